"""Small disks for tests: made without the probe, reopened cold, compared whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from fanout.config import Tuning
from fanout.disk.disk import Disk, Point
from fanout.disk.merge import Intent, Policy
from fanout.disk.record import create_record
from fanout.disk.state import State
from fanout.format import layout
from fanout.format.entry import BranchRecord, DiskRecord, encode_branch, encode_disk
from fanout.format.tree import DIR, FILE, HOLE, Node, parents
from fanout.runtime import Runtime, seeded, system
from fanout.store.base import Store

#: Everything so small that every rare path is taken.
TINY = Tuning(
    page_entries=4,
    fold_entries=3,
    inline_bytes=64,
    small_file_bytes=32,
    extent_bytes=16,
    pack_bytes=128,
    group_wait_s=0.0,
    group_gap_s=0.0,
)
#: Never folds by itself.
UNFOLDED = Tuning(fold_entries=1 << 30, fold_bytes=1 << 40, fold_paths=1 << 30)


def hasty(runtime: Runtime = system) -> Runtime:
    """The same runtime, but sleeping takes no time."""
    return Runtime(
        now_ns=runtime.now_ns,
        monotonic=runtime.monotonic,
        sleep=lambda seconds: None,
        uptime=runtime.uptime,
        token_bytes=runtime.token_bytes,
        salt=runtime.salt,
        uniform=runtime.uniform,
    )


def fixed(seed: int, start_ns: int = 1_750_000_000 * 10**9) -> Runtime:
    """A runtime of which everything depends on the seed: ids, and a clock that moves 1 ms at each look."""
    source, ticks = seeded(seed), itertools.count(start_ns, 10**6)
    return Runtime(
        now_ns=lambda: next(ticks),
        sleep=lambda seconds: None,
        token_bytes=source.token_bytes,
        salt=lambda: b"",
        uniform=source.uniform,
    )


def new_disk(store: Store, runtime: Runtime | None = None, tuning: Tuning = UNFOLDED, name: str = "d") -> Disk:
    """Make a disk as `Catalogue.create` does, without asking the store 40 questions first."""
    runtime = runtime or hasty()
    main = BranchRecord(runtime.hex_id(32), (), runtime.now_ns())
    record = DiskRecord(f"dsk-{runtime.hex_id(16)}", name, main.created_ns, ("create_only",), main.uuid)
    for key, data in (
        (layout.branch_key(record.id, layout.MAIN), encode_branch(main)),
        (layout.disk_key(record.id), encode_disk(record)),
        (layout.name_key(name), encode_disk(record)),
    ):
        create_record(store, key, data, "taken", runtime)
    return Disk(store, record, runtime, tuning)


def cold(disk: Disk, store: Store, tuning: Tuning | None = None) -> Disk:
    """Open the same disk as another process would."""
    return Disk(store, disk.record, disk.runtime, tuning or disk.tuning)


def main(disk: Disk) -> Point:
    return disk.point()


def put(disk: Disk, path: str, data: bytes, branch: str = layout.MAIN) -> None:
    disk.put_object(Point(disk.branch(branch)), path.encode(), data, 0o644)


def get(disk: Disk, path: str, branch: str = layout.MAIN) -> bytes:
    return disk.read_file(Point(disk.branch(branch)), path.encode())[1]


def file_node(disk: Disk, data: bytes, mode: int = 0o644, mtime_ns: int = 0) -> tuple[Node, dict[bytes, bytes]]:
    """Pack some bytes: a node and the blobs its commit carries."""
    packer = disk.packer()
    refs = packer.add_content(len(data), reader(data))
    return Node(FILE, mode, mtime_ns, len(data), refs), dict(packer.finish().blobs)


def reader(data: bytes) -> Callable[[int], bytes]:
    rest = memoryview(data)

    def read(size: int) -> bytes:
        nonlocal rest
        chunk, rest = bytes(rest[:size]), rest[size:]
        return chunk

    return read


def put_many(disk: Disk, files: Iterable[tuple[str, bytes]], branch: str = layout.MAIN) -> int | None:
    """Put many files in one commit."""
    packer = disk.packer()
    intents = []
    for path, data in files:
        refs = packer.add_content(len(data), reader(data))
        intents.append(Intent(path.encode(), None, Node(FILE, 0o644, 1, len(data), refs)))
    blobs = dict(packer.finish().blobs)
    return disk.apply(Point(disk.branch(branch)), intents, policy=Policy.LAST_WINS, blobs=blobs).seq


def contents(disk: Disk, state: State) -> dict[bytes, bytes]:
    """Read every file of a tree."""
    blobs = state.blob_bytes()
    return {path: disk.reader.read(node.data, blobs) for path, node in state.scan() if node.kind == FILE}


def check_tree(state: State) -> None:
    """Every node's parents are directories, and the order is that of whole paths."""
    seen: dict[bytes, Node] = {}
    last: bytes | None = None
    for path, node in state.scan():
        assert last is None or last < path
        last = path
        seen[path] = node
        for parent in parents(path):
            above = seen.get(parent) or state.get(parent)
            assert above is not None, f"{path!r} is there, {parent!r} is not"
            assert above.kind == DIR, f"{path!r} is there, {parent!r} is no directory"


def check_refs(store: Store, disk: Disk, state: State) -> None:
    """A tree refers only to packs that exist or that the entries after its snap carry."""
    for path, node in state.scan():
        for ref in node.data:
            known = ref.pack == HOLE or ref.pack in state.blobs
            assert known or store.head(layout.pack_key(disk.id, ref.pack)), f"{path!r} refers to a pack that is nowhere"
