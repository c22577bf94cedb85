"""Trees written to the host: exact, verified, and never outside of their directory, whatever the names are."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

import pytest

from fanout.errors import Corrupt, Limit
from fanout.format import layout
from fanout.format.tree import DIR, FILE, HOLE, SYMLINK, Node, Ref, directory
from fanout.view.local import remove_tree
from fanout.view.materialise import Written, materialise
from tests.support.views import TINY, Workspace, folder, of_directory, of_state

Entries = Iterable[tuple[bytes, Node | None]]


def write(space: Workspace, where: Path, entries: Entries | None = None, **how: bool) -> Written:
    where.mkdir(exist_ok=True)
    fd = os.open(where, os.O_RDONLY)
    try:
        given = space.state.below(b"") if entries is None else entries
        return materialise(fd, folder(), given, space.reader, space.state.blob_bytes(), **how)
    finally:
        os.close(fd)


def test_everything_a_tree_can_hold(tmp_path: Path) -> None:
    space = Workspace(TINY)
    space.write(
        {
            b"d": folder(0o750),
            b"d/small": b"x" * 50,
            b"d/large": bytes(range(256)) * 20,
            b"d/none": b"",
            b"odd \xff\n\t-name": b"bytes",
            b"-": folder(0o1777),
            b"link": Node(SYMLINK, 0o777, 7_000_000_001, target=b"../../etc/passwd"),
            b"empty": folder(0o500),
        }
    )
    big = space.state.get(b"d/large")
    assert big is not None
    assert len(big.data) > 2
    space.write({b"d/e": Node(FILE, 0o4711, 5_000_000_009, big.size, big.data, link=b"L" * 16)})
    space.write({b"f": Node(FILE, 0o4711, 5_000_000_009, big.size, big.data, link=b"L" * 16)})
    for fold in (False, True):
        if fold:
            space.branch.fold()
        where = tmp_path / f"tree{fold}"
        write(space, where)
        assert of_directory(where) == of_state(space.state, space.reader)
        assert stat.S_IMODE(os.stat(where / "f").st_mode) == 0o4711
        assert os.stat(where / "d" / "e").st_nlink == 2
        assert os.stat(where / "empty").st_mtime_ns == folder().mtime_ns
        assert os.stat(where).st_mtime_ns == folder().mtime_ns


def test_the_umask_does_not_show(tmp_path: Path) -> None:
    space = Workspace()
    space.write({b"f": Node(FILE, 0o666, 1), b"g": b"data", b"d": folder(0o777)})
    old = os.umask(0o077)
    try:
        write(space, tmp_path / "t")
    finally:
        os.umask(old)
    modes = {path: item.mode for path, item in of_directory(tmp_path / "t").items()}
    assert modes == {b"f": 0o666, b"g": 0o644, b"d": 0o777}


def test_holes_take_no_room(tmp_path: Path) -> None:
    space = Workspace()
    space.write({b"x": b"tail"})
    tail = space.state.get(b"x")
    assert tail is not None
    hole = Ref(HOLE, 0, 0, 6 << 30, b"")
    written = write(space, tmp_path / "t", [(b"s", Node(FILE, 0o644, 1, (6 << 30) + 4, (hole, *tail.data)))])
    found = os.stat(tmp_path / "t" / "s")
    assert found.st_size == (6 << 30) + 4
    assert found.st_blocks * 512 < 1 << 20
    assert written.space_bytes < 1 << 20
    with open(tmp_path / "t" / "s", "rb") as file:
        file.seek(6 << 30)
        assert file.read() == b"tail"


def test_parts_of_frames(tmp_path: Path) -> None:
    space = Workspace()
    space.write({b"x": b"0123456789"})
    node = space.state.get(b"x")
    assert node is not None
    ref = node.data[0]
    cut = Ref(ref.pack, ref.offset, ref.stored, ref.raw, ref.hash, 2, 3)
    write(space, tmp_path / "t", [(b"y", Node(FILE, 0o644, 1, 13, (cut, ref)))])
    assert (tmp_path / "t" / "y").read_bytes() == b"2340123456789"
    wild = Ref(ref.pack, ref.offset, ref.stored, ref.raw, ref.hash, 8, 5)
    with pytest.raises(Corrupt, match="'z'"):
        write(space, tmp_path / "u", [(b"z", Node(FILE, 0o644, 1, 5, (wild,)))])


@pytest.mark.parametrize(
    "entries",
    [
        [(b"..", folder())],
        [(b"../x", Node(SYMLINK, 0o777, 1, target=b"y"))],
        [(b".", folder())],
        [(b"a\0b", folder())],
        [(b"/etc", folder())],
        [(b"a//b", folder())],
        [(b"a", folder()), (b"a/..", folder())],
        [(b"a", Node(SYMLINK, 0o777, 1, target=b"/tmp")), (b"a/b", Node(FILE, 0o644, 1))],
        [(b"a/b", Node(FILE, 0o644, 1))],
        [(b"a", Node(FILE, 0o644, 1)), (b"a", Node(FILE, 0o644, 1))],
        [(b"a", Node(SYMLINK, 0o777, 1, target=b""))],
        [(b"a", Node(9, 0o644, 1))],
        [(b"a", Node(FILE, 0o644, 1, 5))],
    ],
)
def test_what_is_no_tree_is_refused(tmp_path: Path, entries: list[tuple[bytes, Node]]) -> None:
    space = Workspace()
    with pytest.raises(Corrupt):
        write(space, tmp_path / "t", entries)
    assert sorted(os.listdir(tmp_path)) == ["t"]


def test_a_name_the_host_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(Limit, match="name"):
        write(Workspace(), tmp_path / "t", [(b"n" * 256, folder())])


@pytest.mark.parametrize("large", [False, True])
def test_damaged_bytes_are_refused(tmp_path: Path, large: bool) -> None:
    space = Workspace(TINY)
    space.write({b"f": os.urandom(3000 if large else 250)})
    space.branch.fold()
    for meta in space.store.list(layout.disk_prefix(space.disk.id) + "pack/"):
        data = bytearray(space.store.get(meta.key))
        data[20] ^= 1
        space.store.put(meta.key, bytes(data))
    with pytest.raises(Corrupt, match="pack/"):
        write(space, tmp_path / "t")


def test_a_lost_pack_is_named(tmp_path: Path) -> None:
    space = Workspace(TINY)
    space.write({b"f": os.urandom(3000)})
    space.branch.fold()
    keys = [meta.key for meta in space.store.list(layout.disk_prefix(space.disk.id) + "pack/")]
    space.store.delete(keys)
    with pytest.raises(Corrupt, match="missing"):
        write(space, tmp_path / "t")


def test_overlay_notes_never_come_from_a_disk(tmp_path: Path) -> None:
    notes = ((b"user.overlay.opaque", b"y"), (b"user.kept", b"v"), (b"trusted.overlay.redirect", b"/etc"))
    entries = [(b"d", Node(DIR, 0o755, 1, xattrs=notes)), (b"f", Node(FILE, 0o644, 1, xattrs=notes))]
    write(Workspace(), tmp_path / "t", entries)
    for name in ("d", "f"):
        assert os.listxattr(tmp_path / "t" / name) == ["user.kept"]


def test_deeper_than_a_path_can_be(tmp_path: Path) -> None:
    entries = [(b"/".join([b"d"] * depth), directory(0o755, depth)) for depth in range(1, 4001)]
    write(Workspace(), tmp_path / "t", entries)
    fd = os.open(tmp_path / "t", os.O_RDONLY)
    for depth in range(1, 4001):
        inner = os.open("d", os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
        os.close(fd)
        fd = inner
        if depth % 1000 == 0:
            assert os.fstat(fd).st_mtime_ns == depth
    os.close(fd)
    top = os.open(tmp_path, os.O_RDONLY)
    remove_tree(top, "t")
    os.close(top)
    assert os.listdir(tmp_path) == []
