"""Which layers a view rests on: bases are shared, deltas are exact, and a warm view asks the store nothing."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from fanout.config import Tuning
from fanout.disk.state import State
from fanout.errors import Invalid, NotFound, Unavailable
from fanout.format.tree import FILE, Node
from fanout.store.memory import MemoryStore
from fanout.view import compare
from fanout.view.cache import HostCache
from fanout.view.view import View, open_view
from tests.support.views import Contents, Item, Workspace, folder, of_state


class Counting(MemoryStore):
    """Counts what is asked of it."""

    gets = 0

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        self.gets += 1
        return super().get(key, start, length)


class Host:
    """A cache and a disk, and what a command would see of it."""

    def __init__(self, top: Path) -> None:
        self.cache = HostCache(top / "cache", 1 << 30)
        self.store = Counting()
        self.space = Workspace(Tuning(page_entries=16), self.store)
        self.space.write({b"d": folder(), b"d/e": folder(0o700), b"d/e/f": b"deep", b"d/a": b"alpha", b"top": b"t"})
        self.space.branch.fold()

    def open(self, state: State | None = None, subdirectory: bytes = b"", writable: bool = True) -> View:
        return open_view(
            self.cache, self.space.reader, state or self.space.state,
            disk_id=self.space.disk.id, subdirectory=subdirectory, writable=writable,
        )  # fmt: skip


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    made.space.close()
    made.cache.close()


def merged(lowers: tuple[str, ...]) -> Contents:
    """What overlayfs shows of lower layers without notes: the topmost wins, directories merge, whiteouts hide."""
    tree: Contents = {}
    for lower in lowers:
        for where, names, files in os.walk(lower):
            for name in names + files:
                full = os.path.join(where, name)
                path = os.fsencode(os.path.relpath(full, lower))
                found = os.lstat(full)
                if not stat.S_ISDIR(found.st_mode) or tree.get(path, Item("", 0, 0, "", ())).kind != "d":
                    tree = {p: item for p, item in tree.items() if not p.startswith(path + b"/")}
                if stat.S_ISCHR(found.st_mode):
                    tree.pop(path, None)
                elif stat.S_ISDIR(found.st_mode):
                    tree[path] = Item("d", stat.S_IMODE(found.st_mode), found.st_mtime_ns, "", ())
                else:
                    content = os.readlink(full) if stat.S_ISLNK(found.st_mode) else Path(full).read_text()
                    tree[path] = Item("f", stat.S_IMODE(found.st_mode), found.st_mtime_ns, content, ())
    return tree


def expected(host: Host, below: bytes = b"") -> Contents:
    """The same of the newest tree."""
    cut = len(below) + 1 if below else 0
    tree: Contents = {}
    for path, node in host.space.state.below(below):
        content = host.space.read(path).decode() if node.kind == FILE else ""
        tree[path[cut:]] = Item("f" if node.kind == FILE else "d", node.mode, node.mtime_ns, content, ())
    return tree


def test_a_view_is_the_tree(host: Host) -> None:
    with host.open() as view:
        mount = view.mount("/mnt/x")
        assert (mount.target, len(mount.lowers)) == ("/mnt/x", 1)
        assert merged(mount.lowers) == expected(host)
        assert mount.upper is not None
        assert mount.work is not None
        assert os.listdir(mount.upper) == os.listdir(mount.work) == []
        assert os.stat(mount.upper).st_dev == os.stat(mount.lowers[0]).st_dev
    assert not os.path.exists(mount.upper)


def test_read_only_has_no_upper(host: Host) -> None:
    with host.open(writable=False) as view:
        mount = view.mount("/mnt/x")
        assert mount.upper is mount.work is None
        assert view.intents(host.space.packer()) == []


def test_warm_asks_the_store_nothing(host: Host) -> None:
    with host.open() as view:
        assert not view.warm
    before = host.store.gets
    with host.open() as view:
        assert view.warm
    assert host.store.gets == before


def test_a_change_is_a_delta_on_the_same_base(host: Host) -> None:
    with host.open() as view:
        base = view.mount("/x").lowers
    host.space.write({b"d/a": b"changed", b"d/e/new": b"n"})
    with host.open() as view:
        lowers = view.mount("/x").lowers
        assert lowers[:1] == base
        assert len(lowers) == 2
        assert merged(lowers) == expected(host)
        assert sorted(os.listdir(lowers[1] + "/d")) == ["a", "e"]
        assert not os.path.exists(lowers[1] + "/top")


@pytest.mark.parametrize(
    "changes",
    [
        {b"top": None},
        {b"d/a": None},
        {b"d/e/f": None, b"d/e": None},
        {b"d/e/f": None, b"d/e": None, b"d/a": None, b"d": None},
        {b"d/e/f": None, b"d/e": Node(FILE, 0o644, 5)},
        {b"top": folder(0o711)},
        {b"d": folder(0o700, 77)},
        {b"d": folder(0o755, 78), b"d/n": folder(0o500, 79)},
    ],
    ids=["file", "inner", "directory", "all", "directory-to-file", "file-to-directory", "attributes", "new-directory"],
)
def test_deltas_are_exact(host: Host, changes: dict[bytes, Node | None]) -> None:
    host.open().close()
    host.space.write(changes)
    for fold in (False, True):
        if fold:
            host.space.branch.fold()
        with host.open(writable=False) as view:
            lowers = view.mount("/x").lowers
            assert len(lowers) == 2
            assert merged(lowers) == expected(host)


def test_a_file_in_place_of_a_directory_and_back(host: Host) -> None:
    host.open().close()
    host.space.write({b"d/e/f": None, b"d/e": Node(FILE, 0o644, 5)})
    host.open().close()
    host.space.write({b"d/e": None})
    host.space.write({b"d/e": folder(0o750), b"d/e/other": b"o"})
    with host.open() as view:
        assert merged(view.mount("/x").lowers) == expected(host)


def test_hard_links_stay_together_across_layers(host: Host) -> None:
    node = Node(FILE, 0o644, 9, link=b"L" * 16)
    host.space.write({b"one": node, b"d/two": node})
    host.open().close()
    host.space.write({b"d/three": node})
    with host.open() as view:
        delta = view.mount("/x").lowers[1]
        assert os.stat(delta + "/one").st_nlink == 3


def test_a_branch_uses_its_parent_s_base(host: Host) -> None:
    with host.open() as view:
        base = view.mount("/x").lowers
    branch = host.space.disk.create_branch("other", host.space.disk.point())
    with host.open(branch.known()) as view:
        assert view.mount("/x").lowers == base


def test_another_process_finds_the_folded_base(host: Host, tmp_path: Path) -> None:
    host.open().close()
    host.space.write({b"new": b"n"})
    other = HostCache(tmp_path / "cache", 1 << 30)
    with open_view(other, host.space.reader, host.space.state, disk_id=host.space.disk.id, writable=False) as view:
        assert len(view.mount("/x").lowers) == 2
        assert merged(view.mount("/x").lowers) == expected(host)
    assert len(os.listdir(tmp_path / "cache" / "base")) == 1
    other.close()


def test_much_change_is_a_new_base(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "_DELTA_PATHS", 3)
    host.open().close()
    host.space.write({b"n%d" % number: b"x" for number in range(5)})
    with host.open() as view:
        assert len(view.mount("/x").lowers) == 1
        assert merged(view.mount("/x").lowers) == expected(host)


@pytest.mark.parametrize("full_first", [True, False])
def test_a_subdirectory(host: Host, full_first: bool) -> None:
    if full_first:
        host.open().close()
    with host.open(subdirectory=b"d") as view:
        mount = view.mount("/x")
        assert merged(mount.lowers) == expected(host, b"d")
        assert mount.upper is not None
        assert os.stat(mount.upper).st_mtime_ns == folder().mtime_ns
    assert len(os.listdir(f"{host.cache.dir}/base")) == 1
    host.space.write({b"top": b"elsewhere"})
    with host.open(subdirectory=b"d") as view:
        assert len(view.mount("/x").lowers) == 1
    host.space.write({b"d/a": None, b"d/e/f": b"changed"})
    with host.open(subdirectory=b"d") as view:
        assert merged(view.mount("/x").lowers) == expected(host, b"d")
    with host.open(subdirectory=b"d/e") as view:
        assert merged(view.mount("/x").lowers) == expected(host, b"d/e")


def test_a_subdirectory_that_came_after_the_base(host: Host) -> None:
    host.open().close()
    host.space.write({b"late/x": b"1", b"top": None})
    host.space.write({b"top/in": b"2"})
    for where in (b"late", b"top"):
        with host.open(subdirectory=where) as view:
            assert merged(view.mount("/x").lowers) == expected(host, where)


def test_subdirectories_that_are_none(host: Host) -> None:
    with pytest.raises(NotFound, match="nowhere"):
        host.open(subdirectory=b"nowhere")
    for bad in (b"top", b"d/../d", b"d//e", b"/d", b"d/"):
        with pytest.raises(Invalid, match="subdirectory"):
            host.open(subdirectory=bad)


def test_the_changes_come_with_their_place(host: Host) -> None:
    with host.open(subdirectory=b"d") as view:
        upper = view.mount("/x").upper
        assert upper is not None
        Path(upper, "new").write_bytes(b"n")
        packer = host.space.packer()
        intents = view.intents(packer)
        host.space.commit(intents, packer)
    assert host.space.read(b"d/new") == b"n"
    node = host.space.state.get(b"d")
    assert node is not None
    assert node.mtime_ns > folder().mtime_ns


def test_an_untouched_view_commits_nothing(host: Host) -> None:
    with host.open() as view:
        assert view.intents(host.space.packer()) == []


def test_a_full_host_is_said_and_leaves_nothing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **more: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(Unavailable, match=host.cache.dir):
        host.open()
    monkeypatch.undo()
    host.open().close()
    assert of_state(host.space.state, host.space.reader)


def test_what_a_view_rests_on_is_never_evicted(host: Host) -> None:
    with host.open() as first:
        before = expected(host)
        host.space.write({b"new": b"in a delta"})
        with host.open() as second:
            bases, both = first.mount("/x").lowers, second.mount("/x").lowers
            host.cache.evict(0)
            assert merged(bases) == before
            assert merged(both) == expected(host)
            assert len(both) == 2
    host.cache.evict(0)
    assert not any(os.path.exists(lower) for lower in both)
