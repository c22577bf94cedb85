"""Makes the golden disk of format v1: `python tests/data/make_golden.py DIR` writes DIR/store and DIR/expected.json.

Everything in it depends on a seed and a fixed clock. It is kept for ever: whatever fanout becomes, it reads this disk
(tests/unit/test_golden.py). Do not make it anew unless format v1 itself was wrong before any release.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from fanout.config import Tuning
from fanout.disk.proposal import Proposal
from fanout.disk.disk import Disk, Point
from fanout.disk.merge import Intent, Policy
from fanout.disk.state import State
from fanout.format.lock import Acquire
from fanout.format.tree import DIR, FILE, HOLE, SYMLINK, Node, Ref
from fanout.store.base import Store
from fanout.store.local import LocalStore
from tests.support.disks import file_node, fixed, new_disk, put, put_many

TUNING = Tuning(
    page_entries=6,
    fold_entries=1 << 30,
    inline_bytes=512,
    small_file_bytes=2048,
    extent_bytes=1024,
    pack_bytes=4096,
)
SEED = 1


def build(store: Store) -> Disk:
    """Write the disk, the same each time."""
    disk = new_disk(store, fixed(SEED), TUNING, "golden")
    main = disk.branch()
    clock = 1_700_000_000_123_456_789

    put(disk, "small.txt", b"inline\n")
    put(disk, "dir/empty", b"")
    put(disk, "small.txt", b"inline, second version\n")

    text = "".join(f"line {n} of a text that is in several extents\n" for n in range(120)).encode()
    binary = b"\0" + bytes(n * n % 251 for n in range(3000))
    put_many(
        disk, [("dir/large.txt", text), ("dir/binary", binary), *((f"many/{n:02}", b"%d\n" % n) for n in range(20))]
    )

    packer = disk.packer()
    start = packer.add(b"head" * 64, True)
    end = packer.add(b"tail" * 64, True)
    whole = packer.add(b"0123456789", True)
    sparse = Node(FILE, 0o644, clock, (1 << 20) + 512, (start, Ref(HOLE, 0, 0, 1 << 20, b""), end))
    part = Node(FILE, 0o644, clock, 4, (Ref(whole.pack, whole.offset, whole.stored, whole.raw, whole.hash, 3, 4),))
    linked = Node(FILE, 0o640, clock, 10, (whole,), 1000, 100, link=b"inode-1")
    special = {
        b"sparse": sparse,
        b"part": part,
        b"hard-1": linked,
        b"hard-2": linked,
        b"symlink": Node(SYMLINK, 0o777, -1, 9, target=b"../\xff/etc"),
        b"setuid": Node(FILE, 0o4755, clock, 10, (whole,), xattrs=((b"user.a", b"\0\xff"), (b"user.b", b""))),
        b"dir/\xff\n\xc3\xa9": Node(FILE, 0o600, 2**62, 10, (whole,), 2**32 - 2, 2**32 - 2),
        b"n" * 255: Node(FILE, 0, clock),
        b"empty-dir": Node(DIR, 0o1777, clock),
    }
    blobs = dict(packer.finish().blobs)
    main.commit(
        Proposal(
            [Intent(path, None, node) for path, node in special.items()],
            Policy.FIRST_WINS,
            main.known().seq,
            blobs,
            author="golden",
            message="special ☕",
            exec_id="exec-1",
        )
    )
    disk.create_checkpoint("before-fold", main)
    main.fold()
    put(disk, "after-fold", b"carried inside its entry\n")
    disk.move(Point(main), b"hard-1", b"moved/hard-1")
    disk.delete_object(Point(main), b"many/07")

    disk.create_branch("side", disk.point("before-fold"))
    put(disk, "side-only", b"s\n", "side")
    put(disk, "small.txt", b"side's version\n", "side")
    disk.branch("side").fold()
    put(disk, "side-later", b"l\n", "side")
    disk.merge(main, disk.point("side"), "theirs", author="golden")
    disk.create_checkpoint("merged", main)
    main.take(Acquire("0123456789abcdef", "exec-2", (b"dir", b"many"), 2**62))
    node, more = file_node(disk, b"unfolded tail\n")
    main.commit(Proposal([Intent(b"tail", None, node)], Policy.LAST_WINS, main.known().seq, more))
    disk.close()
    return disk


def describe(disk: Disk, state: State) -> dict[str, Any]:
    """Everything one can read of a tree, as JSON."""
    blobs = state.blob_bytes()
    found = {}
    for path, node in state.scan():
        digest = hashlib.sha256()
        for chunk in disk.reader.chunks(node.data, blobs):
            digest.update(chunk)
        found[path.hex()] = [
            node.kind, node.mode, node.mtime_ns, node.size, node.uid, node.gid, node.target.hex(), node.link.hex(),
            [[key.decode(), value.hex()] for key, value in node.xattrs],
            digest.hexdigest() if node.kind == FILE else "",
        ]  # fmt: skip
    locks = [[lock.id, lock.owner, [p.decode() for p in lock.paths], lock.seq] for lock in state.locks.values()]
    merges = {uuid: list(place) for uuid, place in sorted(state.merges.items())}
    return {"seq": state.seq, "folded_seq": state.folded_seq, "nodes": found, "locks": locks, "merges": merges}


def history(disk: Disk, branch: str) -> list[Any]:
    return [
        [
            entry.seq,
            entry.time_ns,
            [[c.author, c.message, c.exec_id, c.base_seq, len(c.effects)] for c in entry.commits],
        ]
        for entry in disk.log(Point(disk.branch(branch)))
    ]


def expectations(disk: Disk) -> dict[str, Any]:
    """What test_golden.py wants to find again."""
    points = ("main", "side", "before-fold", "merged")
    return {
        "id": disk.id,
        "points": {point: describe(disk, disk.point(point).state()) for point in points},
        "history": {branch: history(disk, branch) for branch in ("main", "side")},
    }


def main(target: Path) -> None:
    store = LocalStore(target / "store")
    made = build(store)
    fresh = Disk(store, made.record, made.runtime, TUNING)
    (target / "expected.json").write_text(json.dumps(expectations(fresh), indent=0, ensure_ascii=True) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
