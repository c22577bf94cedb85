"""The diff of hand-made layers: what overlayfs can leave behind, and what a hostile command can."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from fanout.disk.merge import Intent
from fanout.format.tree import DIR, FILE, HOLE, SYMLINK, Node, Ref
from fanout.runtime import seeded
from fanout.view.diff import Found, diff_upper
from fanout.view.local import remove_tree
from tests.support.views import TINY, Workspace, folder

OLD = 1_600_000_000_123_456_789


class Layer:
    """A writable layer made by hand over a small disk."""

    def __init__(self, top: Path) -> None:
        self.upper = top / "upper"
        self.upper.mkdir()
        os.utime(self.upper, ns=(0, 0))
        self.space = Workspace(TINY)
        self.space.write(
            {
                b"d": folder(),
                b"d/a": b"alpha",
                b"d/b": b"beta",
                b"d/e": folder(),
                b"d/e/f": b"deep",
                b"f": b"top",
                b"l": Node(SYMLINK, 0o777, OLD, target=b"f"),
            }
        )

    def diff(self) -> Found:
        os.utime(self.upper, ns=(0, 0))  # making the layer moved it
        self.packer = self.space.packer()
        return diff_upper(
            str(self.upper), self.space.state, self.packer, self.space.reader, runtime=seeded(3), xattr_prefix=PREFIX
        )

    def changes(self) -> dict[bytes, Node | None]:
        """The strong changes, by path."""
        return {i.path: i.node for i in self.diff().intents if not i.weak}

    def directory(self, path: str, mtime_ns: int = folder().mtime_ns) -> Path:
        (self.upper / path).mkdir(parents=True)
        (self.upper / path).chmod(0o755)
        os.utime(self.upper / path, ns=(mtime_ns, mtime_ns))
        return self.upper / path

    def file(self, path: str, data: bytes, mtime_ns: int = OLD, mode: int = 0o644) -> Path:
        target = self.upper / path
        target.write_bytes(data)
        target.chmod(mode)
        os.utime(target, ns=(mtime_ns, mtime_ns))
        return target

    def whiteout(self, path: str) -> None:
        os.mknod(self.upper / path, stat.S_IFCHR, 0)


PREFIX = "user.overlay."


@pytest.fixture
def layer(tmp_path: Path) -> Layer:
    return Layer(tmp_path)


def test_nothing(layer: Layer) -> None:
    assert layer.diff() == Found([], ())


def test_copied_up_unchanged(layer: Layer) -> None:
    layer.file("f", b"top")
    layer.directory("d")
    assert layer.diff().intents == []
    assert layer.packer.finish().blobs == {}


def test_same_content_other_attributes_needs_no_data(layer: Layer) -> None:
    layer.file("f", b"top", mode=0o755)
    base = layer.space.state.get(b"f")
    assert base is not None
    (intent,) = layer.diff().intents
    assert intent.node == Node(FILE, 0o755, OLD, 3, base.data)
    assert intent.base == base
    assert layer.packer.finish().blobs == {}


def test_touched_only(layer: Layer) -> None:
    layer.file("f", b"top", mtime_ns=OLD + 1)
    (intent,) = layer.diff().intents
    assert intent.node is not None
    assert intent.node.mtime_ns == OLD + 1
    assert not intent.weak


def test_a_removed_directory_takes_all_below_along(layer: Layer) -> None:
    layer.whiteout("d")
    assert layer.changes() == dict.fromkeys([b"d", b"d/a", b"d/b", b"d/e", b"d/e/f"])


def test_a_whiteout_of_nothing_is_nothing(layer: Layer) -> None:
    layer.whiteout("never")
    assert layer.changes() == {}


def test_a_directory_becomes_a_file(layer: Layer) -> None:
    layer.file("d", b"now a file")
    changes = layer.changes()
    node = changes.pop(b"d")
    assert node is not None
    assert node.kind == FILE
    assert changes == dict.fromkeys([b"d/a", b"d/b", b"d/e", b"d/e/f"])


def test_a_file_becomes_a_directory(layer: Layer) -> None:
    layer.directory("f")
    layer.file("f/x", b"in it")
    changes = layer.changes()
    assert {path: node.kind for path, node in changes.items() if node} == {b"f": DIR, b"f/x": FILE}


def test_an_opaque_directory_hides_what_it_does_not_hold(layer: Layer) -> None:
    os.setxattr(layer.directory("d"), "user.overlay.opaque", b"y")
    layer.file("d/a", b"alpha")
    assert layer.changes() == dict.fromkeys([b"d/b", b"d/e", b"d/e/f"])


def test_an_opaque_directory_with_the_same_names_inside(layer: Layer) -> None:
    os.setxattr(layer.directory("d"), "user.overlay.opaque", b"y")
    layer.directory("d/e")
    layer.file("d/e/new", b"n")
    changes = layer.changes()
    assert changes.pop(b"d/e/new") is not None
    assert changes == dict.fromkeys([b"d/a", b"d/b", b"d/e/f"])


@pytest.mark.parametrize("redirect", [b"/d", b"d"], ids=["absolute", "relative"])
def test_a_renamed_directory_moves_without_data(layer: Layer, redirect: bytes) -> None:
    layer.whiteout("d")
    os.setxattr(layer.directory("moved"), "user.overlay.redirect", redirect)
    layer.whiteout("moved/b")
    layer.file("moved/new", b"n")
    state = layer.space.state
    changes = layer.changes()
    assert changes[b"moved/a"] == state.get(b"d/a")
    assert changes[b"moved/e"] == state.get(b"d/e")
    assert changes[b"moved/e/f"] == state.get(b"d/e/f")
    assert b"moved/b" not in changes
    assert {path for path, node in changes.items() if node is None} == {b"d", b"d/a", b"d/b", b"d/e", b"d/e/f"}


def test_a_redirect_leads_nowhere_outside(layer: Layer) -> None:
    for number, target in enumerate([b"/../d", b"../d", b"/nowhere", b"/f", b"", b"/", b"\xff"]):
        os.setxattr(layer.directory(f"r{number}"), "user.overlay.redirect", target)
    changes = layer.changes()
    assert all(node is not None and node.kind == DIR for path, node in changes.items() if b"/" not in path)
    assert {path.partition(b"/")[0] for path in changes if b"/" in path} <= {b"r4", b"r5"}  # "/" is the root itself


def test_notes_of_the_other_kind_are_not_believed(tmp_path: Path) -> None:
    layer = Layer(tmp_path)
    os.setxattr(layer.directory("d"), "user.overlay.opaque", b"y")
    found = diff_upper(
        str(layer.upper), layer.space.state, layer.space.packer(), layer.space.reader, xattr_prefix="trusted.overlay."
    )
    assert [i.path for i in found.intents if not i.weak] == []


def test_directories_attributes_and_times(layer: Layer) -> None:
    layer.directory("d", mtime_ns=OLD)
    layer.directory("d/e")
    (layer.upper / "d/e").chmod(0o700)
    weak = {i.path: i.weak for i in layer.diff().intents}
    assert weak == {b"d": True, b"d/e": False}
    os.utime(layer.upper / "d", ns=(5, 5))  # set back on purpose
    assert {i.path: i.weak for i in layer.diff().intents} == {b"d": False, b"d/e": False}


def test_what_no_disk_can_hold_is_skipped_and_replaces_all_the_same(layer: Layer) -> None:
    os.mkfifo(layer.upper / "f")
    server = socket.socket(socket.AF_UNIX)
    here = os.getcwd()
    os.chdir(layer.upper)
    try:
        server.bind("s")
    finally:
        os.chdir(here)
        server.close()
    found = layer.diff()
    assert found.skipped == (b"f", b"s")
    assert [(i.path, i.node) for i in found.intents if not i.weak] == [(b"f", None)]


def test_links_are_kept_and_not_followed(layer: Layer) -> None:
    os.symlink("/etc/passwd", layer.upper / "passwd")
    os.symlink("../..", layer.upper / "up")
    changes = layer.changes()
    assert changes.keys() == {b"passwd", b"up"}
    node = changes[b"passwd"]
    assert node is not None
    assert (node.kind, node.target) == (SYMLINK, b"/etc/passwd")


def test_hard_links_share_an_identity(layer: Layer) -> None:
    layer.file("x", b"one", mode=0o600)
    os.link(layer.upper / "x", layer.upper / "y")
    layer.file("z", b"one", mode=0o600)
    changes = layer.changes()
    x, y, z = (changes[name] for name in (b"x", b"y", b"z"))
    assert x is not None
    assert x == y
    assert x.link
    assert z is not None
    assert z.link == b""


def test_a_renamed_file_needs_no_data(layer: Layer) -> None:
    layer.whiteout("f")
    layer.file("g", b"top")
    base = layer.space.state.get(b"f")
    assert base is not None
    node = layer.changes()[b"g"]
    assert node is not None
    assert node.data == base.data


def test_untouched_extents_are_not_stored_again(layer: Layer) -> None:
    data = os.urandom(4000)
    layer.space.write({b"big": data})
    base = layer.space.state.get(b"big")
    assert base is not None
    layer.file("big", data[:2000] + b"!" + data[2001:] + b"more")
    node = layer.changes()[b"big"]
    assert node is not None
    assert sum(ref not in base.data for ref in node.data) == 2


def test_a_sparse_file_stays_sparse(layer: Layer) -> None:
    with open(layer.upper / "s", "wb") as file:
        file.truncate(6 << 30)
        file.seek(1 << 30)
        file.write(b"island")
    node = layer.changes()[b"s"]
    assert node is not None
    assert node.size == 6 << 30
    assert sum(ref.size for ref in node.data) == 6 << 30
    assert sum(ref.size for ref in node.data if ref.pack != HOLE) < 1 << 20


def test_owners(layer: Layer) -> None:
    base = Node(FILE, 0o644, OLD, uid=1234, gid=99)
    layer.space.write({b"owned": base})
    layer.file("owned", b"changed")
    node = layer.changes()[b"owned"]
    assert node is not None
    assert (node.uid, node.gid) == (1234, 99)
    layer.file("new", b"")
    node = layer.changes()[b"new"]
    assert node is not None
    assert (node.uid, node.gid) == (0, 0)
    if os.geteuid() == 0:
        os.chown(layer.upper / "new", 55, 66)
        node = layer.changes()[b"new"]
        assert node is not None
        assert (node.uid, node.gid) == (55, 66)


def test_attributes_without_the_overlay_s(layer: Layer) -> None:
    target = layer.file("x", b"1")
    os.setxattr(target, "user.mine", b"v")
    os.setxattr(target, "user.overlay.origin", b"note")
    node = layer.changes()[b"x"]
    assert node is not None
    assert node.xattrs == ((b"user.mine", b"v"),)


def test_any_name(layer: Layer) -> None:
    names = [b"\xff\xfe", b"new\nline", b"tab\t", b"-rf", b" ", "é".encode(), "e\u0301".encode(), b"n" * 255, b"\\"]
    for name in names:
        Path(os.fsdecode(os.path.join(os.fsencode(layer.upper), name))).touch()
    assert set(layer.changes()) == set(names)


def test_as_deep_as_it_likes(layer: Layer) -> None:
    fd = os.open(layer.upper, os.O_RDONLY)
    for _ in range(4000):
        os.mkdir("d", 0o700, dir_fd=fd)
        os.mkdir("e", 0o700, dir_fd=fd)
        inner = os.open("d", os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)
    changes = layer.changes()
    assert len([node for node in changes.values() if node is not None]) == 8000  # "d" and "d/e" get other modes
    top = os.open(layer.upper.parent, os.O_RDONLY)
    remove_tree(top, "upper")
    os.close(top)
    assert not layer.upper.exists()


@pytest.mark.parametrize("mode", [0o000, 0o4755, 0o2755, 0o1777])
def test_modes(layer: Layer, mode: int) -> None:
    layer.file("x", b"content")
    (layer.upper / "x").chmod(mode)
    layer.directory("y")
    (layer.upper / "y").chmod(mode)
    changes = layer.changes()
    for name in (b"x", b"y"):
        node = changes[name]
        assert node is not None
        assert node.mode == mode


def test_a_new_name_of_a_sparse_file_is_the_same_file(layer: Layer) -> None:
    packer = layer.space.packer()
    data = bytes(200_000) + b"end"
    refs = tuple(packer.add(data[at : at + 70_000], False) for at in range(0, len(data), 70_000))
    node = Node(FILE, 0o644, OLD, len(data), (Ref(HOLE, 0, 0, 0, b""), *refs))
    layer.space.commit([Intent(b"s", None, node)], packer)
    with open(layer.upper / "s", "wb") as file:
        file.seek(200_000)
        file.write(b"end")
    os.utime(layer.upper / "s", ns=(OLD, OLD))
    os.link(layer.upper / "s", layer.upper / "t")
    changes = layer.changes()
    assert changes.keys() == {b"s", b"t"}
    assert changes[b"s"] == changes[b"t"]
