"""What only the local store can get wrong: links, leftovers, full disks, its layout."""

from __future__ import annotations

import errno
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fanout.errors import Denied, Exists, Invalid, NotFound, Unavailable, Unknown
from fanout.runtime import Runtime, system
from fanout.store.local import LocalStore

DAY_NS = 24 * 3600 * 10**9


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "store"


@pytest.fixture
def store(root: Path) -> LocalStore:
    return LocalStore(root)


def test_the_key_is_the_path(store: LocalStore, root: Path) -> None:
    store.create("a/b", b"x")
    assert (root / "a/b").read_bytes() == b"x"
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


def test_no_key_continues_another(store: LocalStore) -> None:
    store.create("a/b", b"1")
    for write in (store.create, store.put):
        for key in ("a", "a/b/c"):
            with pytest.raises(Invalid, match="continues"):
                write(key, b"2")
    assert [meta.key for meta in store.list()] == ["a/b"]
    assert os.listdir(store.root + "/+tmp") == []


def test_links_are_never_followed(store: LocalStore, root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (root / "dir").symlink_to(outside)
    (root / "file").symlink_to(outside / "secret")
    (root / "dangling").symlink_to(outside / "new")
    for key in ("dir/secret", "file"):
        with pytest.raises(Invalid, match="link"):
            store.get(key)
    with pytest.raises(Invalid, match="dir is a symbolic link"):
        store.create("dir/new", b"x")
    with pytest.raises(Invalid):
        store.put("dir/secret", b"x")
    with pytest.raises(Invalid):
        store.delete(["dir/secret"])
    for key in ("file", "dangling"):
        assert store.head(key) is None
        with pytest.raises(Invalid):
            store.create(key, b"x")
    assert list(store.list()) == []
    assert sorted(os.listdir(outside)) == ["secret"]
    store.put("file", b"ours")  # replaces the link itself
    assert (outside / "secret").read_bytes() == b"secret"
    assert store.get("file") == b"ours"


def test_stray_files_are_no_objects(store: LocalStore, root: Path) -> None:
    os.mkfifo(root / "fifo")
    (root / "with space").write_bytes(b"")
    (root / "x~").mkdir()
    (root / "x~" / "y").write_bytes(b"")
    assert list(store.list()) == []
    with pytest.raises(NotFound):
        store.get("fifo")  # and does not hang


def test_leftovers_are_invisible_and_swept_after_a_day(store: LocalStore, root: Path) -> None:
    for name, age_ns in (("old", DAY_NS + 10**9), ("young", DAY_NS - 60 * 10**9)):
        (root / "+tmp" / name).write_bytes(b"half")
        when = system.now_ns() - age_ns
        os.utime(root / "+tmp" / name, ns=(when, when))
    assert list(store.list()) == []
    LocalStore(root)
    assert os.listdir(root / "+tmp") == ["young"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_stores_nothing(store: LocalStore, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    store.put("k", b"before")
    real = os.write

    def write(fd: int, data: memoryview) -> int:
        if len(data) < 3000:
            raise OSError(number, os.strerror(number))
        return real(fd, data[:1000])

    monkeypatch.setattr(os, "write", write)
    for call in (store.create, store.put):
        with pytest.raises(Unavailable, match=r"file://.*new"):
            call("new", b"x" * 4000)
    with pytest.raises(Unavailable):
        store.put("k", b"x" * 4000)
    monkeypatch.undo()
    assert store.get("k") == b"before"
    assert store.head("new") is None
    assert os.listdir(store.root + "/+tmp") == []


def test_short_writes_are_continued(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:7]))
    store.create("k", bytes(range(100)))
    assert store.get("k") == bytes(range(100))


def test_a_failed_directory_fsync_is_unknown(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create("d/first", b"")
    real = os.fsync

    def fsync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, "I/O error")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(Unknown, match="d/k"):
        store.create("d/k", b"x")


def test_everything_on_the_way_is_synced_before_a_create_returns(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    real_fsync, real_link = os.fsync, os.link

    def fsync(fd: int) -> None:
        events.append("fsync " + os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), root))
        real_fsync(fd)

    def link(*args: Any, **kwargs: Any) -> None:
        events.append("link")
        real_link(*args, **kwargs)

    store = LocalStore(root)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", link)
    store.create("a/b/k", b"x")
    assert events[:2] == [events[0], "fsync ."]  # the file, then the root that got `a`
    assert events[0].startswith("fsync +tmp/")
    assert events[2:] == ["fsync a", "link", "fsync a/b"]
    events.clear()
    store.create("a/b/l", b"x")
    assert events[1:] == ["link", "fsync a/b"]
    events.clear()
    LocalStore(root, fsync=False).create("c/d", b"x")
    assert events == ["link"]


def test_creates_survive_deletes_that_prune_their_folder(root: Path) -> None:
    store, other = LocalStore(root, fsync=False), LocalStore(root, fsync=False)
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            other.put("x/y/churn", b"")
            other.delete(["x/y/churn"])

    with ThreadPoolExecutor(1) as pool:
        churner = pool.submit(churn)
        for n in range(300):
            store.create(f"x/y/{n}", b"")
            assert store.get(f"x/y/{n}") == b""
            store.delete([f"x/y/{n}"])
        stop.set()
        churner.result()
    assert os.listdir(root) == ["+tmp"]


def test_losers_of_a_race_leave_nothing(store: LocalStore) -> None:
    store.create("k", b"")
    with pytest.raises(Exists):
        store.create("k", b"")
    assert os.listdir(store.root + "/+tmp") == []


def test_a_listing_from_near_the_end_looks_at_one_folder(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = LocalStore(store.root, fsync=False)
    for n in range(50):
        fast.create(f"log/a/{n:04d}", b"")
        fast.create(f"log/b/{n:04d}", b"")
        fast.create(f"zoo/{n:04d}/x", b"")
    opened: list[str] = []
    real = LocalStore._folder

    def folder(self: LocalStore, path: str, **how: bool) -> object:
        opened.append(path)
        return real(self, path, **how)

    monkeypatch.setattr(LocalStore, "_folder", folder)
    assert [meta.key for meta in store.list("log/a/", "log/a/0047")] == ["log/a/0048", "log/a/0049"]
    assert set(opened) == {"log/a"}
    opened.clear()
    assert [meta.key for meta in store.list("", "log/b/0048", 1)] == ["log/b/0049"]
    assert set(opened) == {"", "log", "log/b"}


def test_a_root_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(Invalid, match="file"):
        LocalStore(tmp_path / "file")
    with pytest.raises(Invalid, match="file"):
        LocalStore(tmp_path / "file" / "below")


def test_permission_errors_are_denied(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(Denied, match="file://"):
        store.create("k", b"")


def test_its_clock_is_that_of_the_file_system(root: Path) -> None:
    store = LocalStore(root, runtime=Runtime(now_ns=lambda: 0))
    store.create("k", b"")
    meta = store.head("k")
    assert meta is not None
    assert abs(meta.modified_ns - system.now_ns()) < 10 * 10**9
