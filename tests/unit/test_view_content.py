"""Small files of a large commit share frames: the tree, what is read back, and what is seen as unchanged."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from fanout.config import Tuning
from fanout.disk.disk import Disk, Point
from fanout.disk.merge import Policy
from fanout.format.pack import is_text_pack
from fanout.format.tree import FILE, Node, content_hash
from fanout.store.memory import MemoryStore
from fanout.store.wrap import Metered
from fanout.view.transfer import download, upload_intents
from tests.support.disks import new_disk


def some_files(root: Path, count: int = 300) -> dict[bytes, bytes]:
    """Text, binary, empty, equal and larger files in a few directories."""
    made: dict[bytes, bytes] = {}
    for number in range(count):
        path = root / f"d{number % 7}" / f"f{number}"
        path.parent.mkdir(exist_ok=True, parents=True)
        kinds = (b"line %d\n" % number * 50, b"\0\1" * number, b"", b"the same\n", os.urandom(40_000), b"x")
        data = kinds[number % len(kinds)]
        path.write_bytes(data)
        made[os.fsencode(path.relative_to(root))] = data
    return made


def upload(disk: Disk, local: Path) -> int:
    """Commit what is new below `local`; returns how many changes that were."""
    point = disk.point()
    state = point.state()
    packer = disk.packer()
    intents = upload_intents(packer, local, b"", bases=state.nodes)
    packed = packer.finish()
    disk.apply(
        point,
        intents,
        policy=Policy.LAST_WINS,
        blobs=dict(packed.blobs),
        seen_blobs=state.blob_bytes(),
        base_seq=state.seq,
    )  # fmt: skip
    return len([intent for intent in intents if not intent.weak])


def files_of(disk: Disk) -> dict[bytes, Node]:
    return {path: node for path, node in disk.point().state().below(b"") if node.kind == FILE}


@pytest.mark.parametrize("tuning", [Tuning(), Tuning(shared_frame_bytes=1000, pack_bytes=5000, inline_bytes=0)])
def test_shared_frames_hold_what_was_uploaded(tmp_path: Path, tuning: Tuning) -> None:
    made = some_files(tmp_path / "in")
    disk = new_disk(MemoryStore(), tuning=tuning)
    upload(disk, tmp_path / "in")
    nodes = files_of(disk)
    assert nodes.keys() == made.keys()
    shared = [node for node in nodes.values() if node.digest]
    assert len({(n.data[0].pack, n.data[0].offset) for n in shared}) < len(shared) / 2, "nothing was shared"
    for path, data in made.items():
        assert disk.read_file(disk.point(), path)[1] == data
        assert content_hash(nodes[path]) == hashlib.sha256(data).digest(), "an identity depends on where bytes are"
        for ref in nodes[path].data:
            assert is_text_pack(ref.pack) == (b"\0" not in data[:8192])
    disk.branch().fold()
    download(disk.reader, disk.point().state(), b"", tmp_path / "out")
    for path, data in made.items():
        assert (tmp_path / "out" / os.fsdecode(path)).read_bytes() == data


def test_what_did_not_change_is_seen_so(tmp_path: Path) -> None:
    made = some_files(tmp_path)
    store = Metered(MemoryStore())
    disk = new_disk(store)
    upload(disk, tmp_path)
    assert upload(disk, tmp_path) == 0
    before = store.usage().bytes_written
    some = sorted(path for path, data in made.items() if 0 < len(data) < 1000)
    os.utime(tmp_path / os.fsdecode(some[0]))
    (tmp_path / os.fsdecode(some[1])).write_bytes(b"changed\n")
    assert upload(disk, tmp_path) == 2
    assert store.usage().bytes_written - before < 2000
    nodes = files_of(disk)
    assert nodes[some[0]].digest == hashlib.sha256(made[some[0]]).digest()
    assert disk.read_file(disk.point(), some[1])[1] == b"changed\n"
    for path in some[2:]:
        assert disk.read_file(disk.point(), path)[1] == made[path]


def test_a_renamed_part_is_not_stored_again(tmp_path: Path) -> None:
    made = some_files(tmp_path)
    disk = new_disk(MemoryStore())
    upload(disk, tmp_path)
    disk.move(Point(disk.branch()), b"d1", b"moved")
    for path, data in made.items():
        now = path.replace(b"d1/", b"moved/") if path.startswith(b"d1/") else path
        assert disk.read_file(disk.point(), now)[1] == data
