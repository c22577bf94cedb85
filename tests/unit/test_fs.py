"""`fanout://` beyond fsspec's own suite: errors, commits, links, lines, transactions, caches, pandas and pyarrow."""

from __future__ import annotations

import asyncio
import errno
import gc
import io
import json
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fsspec
import pytest

import fanout.sync
from fanout.fs import FanoutFileSystem
from fanout.fs.connection import Connection, _Closer
from fanout.fs.names import Place, place_of
from fanout.store.local import LocalStore
from tests.support.disks import new_disk

Options = dict[str, Any]


@pytest.fixture
def options(tmp_path: Path) -> Options:
    store = LocalStore(tmp_path / "store", fsync=False)
    new_disk(store, name="ws")
    return {"store": f"file://{tmp_path}/store", "cache_dir": str(tmp_path / "cache"), "author": "tester"}


@pytest.fixture
def fs(options: Options) -> Iterator[FanoutFileSystem]:
    fs = FanoutFileSystem(**options, skip_instance_cache=True)
    yield fs
    fs.close()


@pytest.fixture
def fo(options: Options) -> Iterator[fanout.sync.Fanout]:
    with fanout.sync.connect(**options) as fo:
        yield fo


def commits(fo: fanout.sync.Fanout, line: str = "ws") -> int:
    return len(list(fo.disks.get(line).log()))


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "line", "key"),
    [
        ("", "", ""),
        ("ws", "ws", ""),
        ("ws/a/b", "ws", "a/b"),
        ("ws@try/a", "ws@try", "a"),
        ("ws@rescue/ex-1/a/b", "ws@rescue/ex-1", "a/b"),
        ("ws@rescue/ex-1", "ws@rescue/ex-1", ""),
        ("ws@rescued/a", "ws@rescued", "a"),
    ],
)
def test_a_path_names_a_line_and_a_key(path: str, line: str, key: str) -> None:
    assert place_of(path) == Place(line, key)


def test_protocol_and_slashes_are_no_part_of_a_path() -> None:
    strip = FanoutFileSystem._strip_protocol
    assert strip("fanout://ws/a/") == strip("fanout:///ws/a") == strip("/ws/a/") == "ws/a"
    assert strip("fanout://") == strip("/") == ""
    assert strip(["fanout://ws/a", "b"]) == ["ws/a", "b"]
    assert fsspec.filesystem("fanout", store="memory://").unstrip_protocol("ws/a") == "fanout://ws/a"


def test_fsspec_finds_the_protocol_by_its_entry_point() -> None:
    assert fsspec.get_filesystem_class("fanout") is FanoutFileSystem


def test_bad_settings_are_refused_when_it_is_made() -> None:
    with pytest.raises(fanout.Invalid, match="colour"):
        FanoutFileSystem(colour="red")
    with pytest.raises(fanout.Invalid, match="engine"):
        FanoutFileSystem(engine="warp")
    with pytest.raises(fanout.Invalid, match="one address"):
        FanoutFileSystem("http://a", url="http://b")
    with pytest.raises(fanout.Invalid, match="ftp"):
        FanoutFileSystem("ftp://a")


# -- errors are Python's ---------------------------------------------------------------------------------------------


def error_of(call: Callable[[], object]) -> OSError:
    with pytest.raises(OSError) as caught:
        call()
    return caught.value


def test_errors_are_pythons_own(fs: FanoutFileSystem, fo: fanout.sync.Fanout) -> None:
    fs.pipe("ws/d/f", b"x")
    fo.disks.get("ws").checkpoint("cp")
    expected: list[tuple[type[OSError], int, Callable[[], object]]] = [
        (FileNotFoundError, errno.ENOENT, lambda: fs.cat("ws/gone")),
        (FileNotFoundError, errno.ENOENT, lambda: fs.cat("ws/gone/deep")),
        (FileNotFoundError, errno.ENOENT, lambda: fs.info("nodisk")),
        (FileNotFoundError, errno.ENOENT, lambda: fs.ls("ws/gone")),
        (FileNotFoundError, errno.ENOENT, lambda: fs.rm("ws/gone")),
        (FileNotFoundError, errno.ENOENT, lambda: fs.rm("ws/gone", recursive=True)),
        (FileNotFoundError, errno.ENOENT, lambda: fs.rmdir("ws/gone")),
        (FileNotFoundError, errno.ENOENT, lambda: fs.mv("ws/gone", "ws/x")),
        (FileNotFoundError, errno.ENOENT, lambda: fs.cp("ws/gone", "ws/x")),
        (FileNotFoundError, errno.ENOENT, lambda: fs.open("ws/gone")),
        (FileNotFoundError, errno.ENOENT, lambda: fs.open("nodisk/x", "wb")),
        (FileNotFoundError, errno.ENOENT, lambda: fs.pipe("nodisk/x", b"")),
        (FileNotFoundError, errno.ENOENT, lambda: fs.mkdir("ws/a/b", create_parents=False)),
        (FileNotFoundError, errno.ENOENT, lambda: fs.checksum("ws/gone")),
        (IsADirectoryError, errno.EISDIR, lambda: fs.cat("ws/d")),
        (IsADirectoryError, errno.EISDIR, lambda: fs.pipe("ws/d", b"")),
        (IsADirectoryError, errno.EISDIR, lambda: fs.pipe("ws", b"")),
        (IsADirectoryError, errno.EISDIR, lambda: fs.open("ws/d", "ab")),
        (IsADirectoryError, errno.EISDIR, lambda: fs.rm("ws/d")),
        (NotADirectoryError, errno.ENOTDIR, lambda: fs.pipe("ws/d/f/x", b"")),
        (NotADirectoryError, errno.ENOTDIR, lambda: fs.rmdir("ws/d/f")),
        (FileExistsError, errno.EEXIST, lambda: fs.mkdir("ws/d")),
        (FileExistsError, errno.EEXIST, lambda: fs.mkdir("ws")),
        (FileExistsError, errno.EEXIST, lambda: fs.makedirs("ws/d")),
        (FileExistsError, errno.EEXIST, lambda: fs.makedirs("ws/d/f", exist_ok=True)),
        (FileExistsError, errno.EEXIST, lambda: fs.open("ws/d/f", "xb")),
        (PermissionError, errno.EACCES, lambda: fs.pipe("ws@cp/d/f", b"")),
        (PermissionError, errno.EACCES, lambda: fs.open("ws@cp/new", "wb")),
        (PermissionError, errno.EACCES, lambda: fs.rm("ws@cp/d", recursive=True)),
        (PermissionError, errno.EACCES, lambda: fs.mv("ws@cp/d/f", "ws@cp/g")),
        (OSError, errno.ENOTEMPTY, lambda: fs.rmdir("ws/d")),
        (OSError, errno.ENOTEMPTY, lambda: fs.rmdir("ws")),
        (OSError, errno.EINVAL, lambda: fs.cat("ws/a//b")),
        (OSError, errno.EINVAL, lambda: fs.cat("ws//b")),
        (OSError, errno.EINVAL, lambda: fs.pipe("ws/../x", b"")),
        (OSError, errno.EINVAL, lambda: fs.pipe("ws/" + "n" * 256, b"")),
        (OSError, errno.EINVAL, lambda: fs.mkdir("No Disk")),
        (OSError, errno.EINVAL, lambda: fs.mv("ws/d", "ws/d/inside")),
    ]
    for number, (kind, code, call) in enumerate(expected):
        error = error_of(call)
        assert type(error) is kind, (number, error)
        assert error.errno == code, (number, error)
    assert fs.find("ws") == ["ws/d/f"]
    assert fs.cat("ws/d/f") == b"x"
    assert not fs.exists("ws/gone")
    assert not fs.exists("ws//b")
    assert not fs.exists("No Disk/x")


def test_an_error_says_where_and_why(fs: FanoutFileSystem) -> None:
    error = error_of(lambda: fs.pipe("nodisk/x", b""))
    assert error.filename == "nodisk/x"
    assert isinstance(error.__cause__, fanout.NotFound)
    assert "there is no disk 'nodisk'" in str(error)


# -- looking ---------------------------------------------------------------------------------------------------------


def test_info_of_a_file_a_directory_a_disk_and_everything(fs: FanoutFileSystem) -> None:
    before = datetime.now(UTC)
    fs.pipe("ws/d/f", b"abc")
    info = fs.info("fanout://ws/d/f")
    assert info.items() >= {"name": "ws/d/f", "size": 3, "type": "file", "mode": 0o644}.items()
    assert fs.modified("ws/d/f") == fs.created("ws/d/f") == datetime.fromtimestamp(info["mtime"], UTC)
    assert abs((fs.modified("ws/d/f") - before).total_seconds()) < 60
    assert fs.info("ws/d").items() >= {"name": "ws/d", "size": 0, "type": "directory", "mode": 0o755}.items()
    assert fs.modified("ws/d") >= fs.modified("ws/d/f")
    assert fs.info("ws") == {"name": "ws", "size": 0, "type": "directory"}
    assert fs.ls("", detail=False) == ["ws"]
    assert fs.isdir("")
    assert fs.isfile("ws/d/f")
    assert not fs.isdir("ws/d/f")
    with pytest.raises(NotImplementedError):
        fs.modified("ws")


def test_a_directory_is_found_beside_names_that_sort_before_its_slash(fs: FanoutFileSystem) -> None:
    fs.pipe({f"ws/a{tail}": b"" for tail in ("-1", ".txt", "+", ".\U0010ffff", ".\udcff", "b", " ")})
    assert not fs.exists("ws/a")
    fs.pipe("ws/a/x", b"")
    assert fs.isdir("ws/a")
    assert fs.info("ws/a.txt")["type"] == "file"


def test_find_walk_glob_and_du(fs: FanoutFileSystem) -> None:
    fs.pipe({"ws/a/1.csv": b"1", "ws/a/b/2.csv": b"22", "ws/a/b/c/3.txt": b"333", "ws/z": b"4444"})
    fs.mkdir("ws/a/empty")
    assert fs.find("ws/a") == ["ws/a/1.csv", "ws/a/b/2.csv", "ws/a/b/c/3.txt"]
    assert fs.find("ws/a", maxdepth=1) == ["ws/a/1.csv"]
    assert fs.find("ws/a", maxdepth=1, withdirs=True) == ["ws/a", "ws/a/1.csv", "ws/a/b", "ws/a/empty"]
    assert fs.find("ws", prefix="z") == ["ws/z"]
    assert fs.find("ws/z") == ["ws/z"]
    assert fs.find("ws/gone") == []
    assert fs.find("") == fs.find("ws")
    assert fs.glob("ws/**/*.csv") == ["ws/a/1.csv", "ws/a/b/2.csv"]
    assert fs.glob("ws/a/*") == ["ws/a/1.csv", "ws/a/b", "ws/a/empty"]
    assert fs.glob("*/z") == ["ws/z"]
    assert fs.du("ws") == 10
    assert fs.du("ws/a", total=False) == {"ws/a/1.csv": 1, "ws/a/b/2.csv": 2, "ws/a/b/c/3.txt": 3}
    assert next(iter(fs.walk("ws/a"))) == ("ws/a", ["b", "empty"], ["1.csv"])
    assert {path for path, _, _ in fs.walk("ws")} == {"ws", "ws/a", "ws/a/b", "ws/a/b/c", "ws/a/empty"}
    with pytest.raises(ValueError, match="maxdepth"):
        fs.find("ws", maxdepth=0)


def test_checksum_and_ukey_change_with_the_content_alone(fs: FanoutFileSystem) -> None:
    fs.pipe({"ws/a": b"one", "ws/b": b"one"})
    assert fs.checksum("ws/a") == fs.checksum("ws/b")
    before = fs.checksum("ws/a"), fs.ukey("ws/a")
    fs.touch("ws/a", truncate=False)
    assert (fs.checksum("ws/a"), fs.ukey("ws/a")) == before
    fs.pipe("ws/a", b"two")
    assert fs.checksum("ws/a") != before[0]
    assert fs.ukey("ws/a") != before[1]
    assert fs.ukey("ws") == fs.ukey("ws")


@pytest.fixture
def linked(fs: FanoutFileSystem, fo: fanout.sync.Fanout, tmp_path: Path) -> None:
    top = tmp_path / "tree"
    (top / "runs/7").mkdir(parents=True)
    (top / "runs/7/m.json").write_text("7")
    for link, target in {
        "latest": "runs/7", "m": "latest/m.json", "runs/up": "../m", "self": "self", "out": "/etc/passwd",
        "above": "../../x", "dangling": "nothing", "root": ".",
    }.items():  # fmt: skip
        (top / link).symlink_to(target)
    fo.disks.get("ws").upload(top, "/")


@pytest.mark.usefixtures("linked")
def test_links_are_followed_and_never_out_of_the_disk(fs: FanoutFileSystem, tmp_path: Path) -> None:
    for path in ("ws/m", "ws/latest/m.json", "ws/runs/up"):
        assert fs.cat(path) == b"7"
        assert fs.info(path)["type"] == "file"
        assert fs.size(path) == 1
    assert fs.info("ws/m").items() >= {"islink": True, "destination": "runs/7/m.json"}.items()
    assert fs.isdir("ws/latest")
    assert fs.ls("ws/latest", detail=False) == ["ws/latest/m.json"]
    for path in ("ws/out", "ws/above", "ws/dangling", "ws/latest/no"):
        assert error_of(lambda path=path: fs.cat(path)).errno == errno.ENOENT  # type: ignore[misc]
    assert error_of(lambda: fs.cat("ws/self")).errno == errno.ELOOP
    assert not fs.exists("ws/self")
    kinds = {info["name"][3:]: info["type"] for info in fs.ls("ws")}
    assert kinds == {
        "above": "other", "dangling": "other", "latest": "other", "m": "file", "out": "other", "root": "other",
        "runs": "directory", "self": "other",
    }  # fmt: skip
    assert fs.find("ws/runs") == ["ws/runs/7/m.json", "ws/runs/up"]
    fs.get("ws/runs", str(tmp_path / "got"), recursive=True)
    assert (tmp_path / "got/up").read_text() == "7"
    fs.cp("ws/m", "ws/copied")
    assert fs.info("ws/copied").items() >= {"type": "file", "size": 1}.items()
    fs.pipe("ws/m", b"a file now")
    assert fs.cat("ws/runs/7/m.json") == b"7"
    fs.rm("ws/latest")
    assert not fs.exists("ws/latest")
    assert fs.exists("ws/runs/7/m.json")


# -- reading ---------------------------------------------------------------------------------------------------------


def test_ranges(fs: FanoutFileSystem) -> None:
    fs.pipe("ws/f", b"0123456789")
    assert fs.cat_file("ws/f", 2, 5) == b"234"
    assert fs.cat_file("ws/f", start=-3) == b"789"
    assert fs.cat_file("ws/f", end=-8) == b"01"
    assert fs.cat_file("ws/f", -4, -2) == b"67"
    assert fs.cat_file("ws/f", 8, 100) == b"89"
    assert fs.cat_file("ws/f", 100) == fs.cat_file("ws/f", 5, 5) == fs.cat_file("ws/f", 5, 2) == b""
    assert fs.cat_file("ws/f", -100, 2) == b"01"
    assert fs.cat_ranges(["ws/f"] * 2, [0, 4], [2, 6]) == [b"01", b"45"]
    found = fs.cat_ranges(["ws/f", "ws/gone"], 0, 2)
    assert found[0] == b"01"
    assert isinstance(found[1], FileNotFoundError)
    assert fs.head("ws/f", 3) == b"012"
    assert fs.tail("ws/f", 3) == b"789"
    assert fs.read_block("ws/f", 2, 3) == b"234"
    assert error_of(lambda: fs.cat_file("ws/gone", 5, 5)).errno == errno.ENOENT
    assert fs.cat("ws", recursive=True) == {"ws/f": b"0123456789"}
    fs.mkdir("ws/empty")
    assert fs.cat("ws/empty", recursive=True) == {}


def test_a_file_is_read_in_blocks_and_a_change_meanwhile_is_an_error(fs: FanoutFileSystem) -> None:
    data = os.urandom(10_000)
    fs.pipe("ws/f", data)
    with fs.open("ws/f", block_size=1000, cache_type="bytes") as file:
        assert file.read() == data
        file.seek(-500, 2)
        assert file.read() == data[-500:]
    with fs.open("ws/f", block_size=1000, cache_type="none") as file:
        assert file.read(1000) == data[:1000]
        fs.pipe("ws/f", data[::-1])
        assert error_of(lambda: file.read(1000)).errno == errno.ESTALE
    for changed in (b"short", data * 2):
        with fs.open("ws/f") as file:  # in one block
            fs.pipe("ws/f", changed)
            assert error_of(lambda: file.read()).errno == errno.ESTALE
        fs.pipe("ws/f", data[::-1])
    with fs.open("ws/f", block_size=1000, cache_type="none") as file:
        assert pickle.loads(pickle.dumps(file)).read() == data[::-1]


# -- writing: what appears, when, in how many commits ----------------------------------------------------------------


def test_a_written_file_appears_when_it_is_closed_in_one_commit(fs: FanoutFileSystem, fo: fanout.sync.Fanout) -> None:
    blocks = [os.urandom(1000) for _ in range(7)]
    with fs.open("ws/deep/er/f", "wb", block_size=2000) as file:
        for block in blocks:
            file.write(block)
            assert not fs.exists("ws/deep")
        assert file.tell() == 7000
    assert fs.cat("ws/deep/er/f") == b"".join(blocks)
    assert commits(fo) == 1
    with fs.open("ws/empty", "wb"):
        pass
    assert fs.cat("ws/empty") == b""
    with fs.open("ws/t", "w", encoding="latin-1", newline="\r\n") as text:
        text.write("ü\n")
    assert fs.cat("ws/t") == b"\xfc\r\n"
    assert fs.read_text("ws/t", encoding="latin-1") == "ü\n"
    with fs.open("ws/z.gz", "wb", compression="infer") as packed:
        packed.write(b"x" * 1000)
    assert fs.size("ws/z.gz") < 100
    assert fs.open("ws/z.gz", compression="infer").read() == b"x" * 1000


@pytest.mark.parametrize("size", [10, 5000])
def test_nothing_is_stored_of_a_block_that_fails(fs: FanoutFileSystem, fo: fanout.sync.Fanout, size: int) -> None:
    fs.pipe("ws/f", b"before")
    with suppress(ZeroDivisionError), fs.open("ws/f", "wb", block_size=1000) as file:
        file.write(b"x" * size)
        raise ZeroDivisionError
    assert fs.cat("ws/f") == b"before"
    assert commits(fo) == 1


@pytest.mark.parametrize("size", [10, 5000])
def test_append(fs: FanoutFileSystem, fo: fanout.sync.Fanout, size: int) -> None:
    for number in range(3):
        with fs.open("ws/log", "ab", block_size=1000) as file:
            assert file.tell() == number * size
            file.write(bytes([number]) * size)
    assert fs.cat("ws/log") == b"\0" * size + b"\1" * size + b"\2" * size
    assert commits(fo) == 3


def test_exclusive_creation(fs: FanoutFileSystem) -> None:
    with fs.open("ws/f", "xb") as file:
        file.write(b"mine")
    file = fs.open("ws/g", "xb")
    file.write(b"mine")
    fs.pipe("ws/g", b"theirs")
    with pytest.raises(FileExistsError):
        file.close()
    assert fs.cat("ws/g") == b"theirs"
    with pytest.raises(FileExistsError):
        fs.pipe_file("ws/f", b"", mode="create")


def test_hundreds_of_files_are_open_at_once(fs: FanoutFileSystem) -> None:
    files = [fs.open(f"ws/part/{n}", "wb", block_size=100) for n in range(150)]
    for _ in range(3):
        for number, file in enumerate(files):
            file.write(bytes([number]) * 150)
    for file in files:
        file.close()
    assert fs.cat("ws/part/149") == bytes([149]) * 450
    assert len(fs.find("ws/part")) == 150


def test_moving_copying_and_removing_are_one_commit_each(fs: FanoutFileSystem, fo: fanout.sync.Fanout) -> None:
    fs.pipe({f"ws/d/{n}": str(n).encode() for n in range(5)} | {"ws/f": b"f"})
    before = commits(fo)
    fs.mv("ws/d", "ws/e/new")
    assert commits(fo) == before + 1
    assert fs.find("ws") == [*(f"ws/e/new/{n}" for n in range(5)), "ws/f"]
    fs.mv("ws/f", "ws/e/new/0")  # in place of a file
    assert fs.cat("ws/e/new/0") == b"f"
    fs.mv("ws/e/new/0", "ws/e")  # into a directory
    fs.mv("ws/e/0", "ws/other/")
    assert commits(fo) == before + 4
    assert fs.cat("ws/other/0") == b"f"
    fs.mv("ws/other/0", "ws/other/0")
    fs.cp("ws/other/0", "ws/other/1")
    fs.rm("ws/e", recursive=True)
    assert commits(fo) == before + 6
    assert fs.find("ws", withdirs=True) == ["ws", "ws/other", "ws/other/0", "ws/other/1"]
    fs.pipe("ws/a/b/c/d", b"")
    fs.rm("ws/a", recursive=True, maxdepth=2)
    assert fs.find("ws/a") == ["ws/a/b/c/d"]
    fs.rm(["ws/a", "ws/a/b", "ws/other/0"], recursive=True)
    assert fs.find("ws", withdirs=True) == ["ws", "ws/other", "ws/other/1"]
    fs.pipe({"ws/g/x1": b"", "ws/g/x2": b"", "ws/g/y": b""})
    fs.rm("ws/g/x*")
    assert fs.find("ws/g") == ["ws/g/y"]
    fs.mv("ws/g/*", "ws/moved/")
    assert fs.find("ws") == ["ws/moved/y", "ws/other/1"]


def test_lines_of_a_disk(fs: FanoutFileSystem, fo: fanout.sync.Fanout) -> None:
    fs.pipe("ws/f", b"one")
    disk = fo.disks.get("ws")
    disk.checkpoint("cp")
    disk.branch("try", checkpoint="cp")
    fs.pipe("ws@try/f", b"two")
    fs.pipe("ws@try/only", b"")
    assert (fs.cat("ws/f"), fs.cat("ws@main/f"), fs.cat("ws@try/f"), fs.cat("ws@cp/f")) == (
        b"one", b"one", b"two", b"one",
    )  # fmt: skip
    fs.cp("ws@try/f", "ws/from")
    fs.mv("ws@try/only", "ws/moved")
    assert fs.find("ws") == ["ws/f", "ws/from", "ws/moved"]
    assert fs.find("ws@try") == ["ws@try/f"]
    assert fs.cat("ws/from") == b"two"


def test_disks_are_directories(fs: FanoutFileSystem, fo: fanout.sync.Fanout) -> None:
    fs.mkdir("other")
    assert fs.ls("", detail=False) == ["other", "ws"]
    fs.makedirs("other", exist_ok=True)
    fs.pipe("other/f", b"x")
    fs.rm("other", recursive=True)
    assert fs.exists("other")
    assert fs.find("other") == []
    fo.disks.get("other").checkpoint("kept")
    assert error_of(lambda: fs.rmdir("other")).errno == errno.ENOTEMPTY
    fs.mkdir("third")
    fs.rmdir("third")
    assert fs.ls("", detail=False) == ["other", "ws"]
    with pytest.raises(PermissionError):
        fs.rm("", recursive=True)


def test_a_disk_that_was_made_anew_is_found(
    fs: FanoutFileSystem, fo: fanout.sync.Fanout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fanout.fs.connection._TRUSTED_S", 0.0)
    fs.mkdir("other")
    fs.pipe("other/f", b"old")
    fo.disks.delete("other")
    assert not fs.exists("other/f") or fs.cat("other/f") == b"old"  # of a tree that it still has
    new = fo.disks.create("other")
    new.put_object("g", b"new")
    assert fs.cat("other/g") == b"new"
    assert fs.find("other") == ["other/g"]


def test_touch(fs: FanoutFileSystem) -> None:
    fs.touch("ws/f")
    assert fs.cat("ws/f") == b""
    fs.pipe("ws/f", b"kept")
    before = fs.modified("ws/f")
    fs.touch("ws/f", truncate=False)
    assert fs.cat("ws/f") == b"kept"
    assert fs.modified("ws/f") > before
    fs.touch("ws/new", truncate=False)
    fs.touch("ws/f")
    assert fs.size("ws/f") == fs.size("ws/new") == 0


def test_put_and_get_keep_modes_and_tell_how_far_they_are(fs: FanoutFileSystem, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_bytes(b"#!/bin/sh\n" * 100)
    (tmp_path / "run.sh").chmod(0o755)
    callback = fsspec.callbacks.Callback()
    fs.put_file(str(tmp_path / "run.sh"), "ws/run.sh", callback=callback)
    assert fs.info("ws/run.sh")["mode"] == 0o755
    assert (callback.size, callback.value) == (1000, 1000)
    callback = fsspec.callbacks.Callback()
    fs.get_file("ws/run.sh", str(tmp_path / "back"), callback=callback)
    assert (tmp_path / "back").read_bytes() == b"#!/bin/sh\n" * 100
    assert (callback.size, callback.value) == (1000, 1000)
    kept = io.BytesIO()
    fs.get_file("ws/run.sh", kept)
    assert kept.getvalue() == b"#!/bin/sh\n" * 100


def test_a_directory_goes_as_a_whole(fs: FanoutFileSystem, fo: fanout.sync.Fanout, tmp_path: Path) -> None:
    top = tmp_path / "top"
    (top / "a/b").mkdir(parents=True)
    (top / "a/b/f").write_bytes(b"f")
    (top / "g").write_bytes(b"g")
    callback = fsspec.callbacks.Callback()
    fs.put(str(top), "ws/new", recursive=True, callback=callback)
    assert commits(fo) == 1
    assert (callback.size, callback.value) == (2, 2)
    fs.put(str(top), "ws/new", recursive=True)  # into it, now that it is there
    fs.put(str(top) + "/", "ws/new2/", recursive=True)
    assert commits(fo) == 3
    fs.cp("ws/new", "ws/copy", recursive=True)
    fs.cp("ws/new/top/", "ws/copy2/", recursive=True)
    assert commits(fo) == 5
    within = ["a/b/f", "g"]
    assert fs.find("ws") == sorted(
        f"ws/{top}/{name}" for top in ("copy", "copy/top", "copy2", "new", "new/top", "new2") for name in within
    )
    fs.get("ws/copy2", str(tmp_path / "got"), recursive=True)
    (tmp_path / "there").mkdir()
    fs.get("ws/copy2", str(tmp_path / "there"), recursive=True)
    fs.get("ws/copy2/", str(tmp_path / "there"), recursive=True)
    fs.get("ws", str(tmp_path / "all"), recursive=True)
    for place in ("got", "there", "there/copy2", "all/new/top"):
        assert (tmp_path / place / "a/b/f").read_bytes() == b"f"
        assert (tmp_path / place / "g").read_bytes() == b"g"


def test_a_directory_that_is_not_plain_goes_file_by_file_and_whole(fs: FanoutFileSystem, tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    (top / "f").write_bytes(b"f")
    (top / "link").symlink_to("f")
    (top / ".fanoutignore").write_text("f\n")
    fs.put(str(top), "ws/put", recursive=True)
    assert fs.cat("ws/put/link") == fs.cat("ws/put/f") == b"f"
    assert "islink" not in fs.info("ws/put/link")
    fs.pipe("ws/file", b"precious")
    with pytest.raises(NotADirectoryError):
        fs.put(str(top), "ws/file/below", recursive=True)
    os.unlink(top / "link")
    os.unlink(top / ".fanoutignore")
    with pytest.raises(NotADirectoryError):
        fs.put(str(top), "ws/file/below", recursive=True)
    with pytest.raises(FileNotFoundError):
        fs.put(str(top), "nodisk/x", recursive=True)
    with pytest.raises(FileNotFoundError):
        fs.get("ws/gone", str(tmp_path / "x"), recursive=True)
    with pytest.raises(FileNotFoundError):
        fs.cp("ws/gone", "ws/x", recursive=True)
    assert fs.cat("ws/file") == b"precious"
    with fs.transaction:
        fs.put(str(top), "ws/later", recursive=True)
        assert not fs.exists("ws/later/f")
    assert fs.cat("ws/later/f") == b"f"


# -- transactions ----------------------------------------------------------------------------------------------------


def test_a_transaction_is_one_commit(fs: FanoutFileSystem, fo: fanout.sync.Fanout, tmp_path: Path) -> None:
    fs.pipe("ws/log", b"one ")
    fo.disks.get("ws").put_object("private/", b"", mode=0o700)
    (tmp_path / "local").write_bytes(b"local")
    before = commits(fo)
    with fs.transaction:
        with fs.open("ws/a", "w") as text:
            text.write("a")
        with fs.open("ws/log", "ab") as file:
            file.write(b"two")
        with fs.open("ws/big", "wb", block_size=1000) as file:
            for _ in range(5):
                file.write(b"x" * 999)
        fs.pipe_file("ws/private/b", b"b")
        fs.put_file(str(tmp_path / "local"), "ws/c/d")
        left_open = fs.open("ws/open", "wb")
        left_open.write(b"open")
        assert fs.find("ws") == ["ws/log"]
    assert commits(fo) == before + 1
    assert fs.cat("ws", recursive=True) == {
        "ws/a": b"a", "ws/big": b"x" * 4995, "ws/c/d": b"local", "ws/log": b"one two", "ws/open": b"open",
        "ws/private/b": b"b",
    }  # fmt: skip
    assert fs.info("ws/private")["mode"] == 0o700
    assert fs.info("ws/a")["mode"] == 0o644
    fs.pipe("ws/after", b"")  # the transaction is over
    assert fs.exists("ws/after")


def test_a_transaction_that_fails_stores_nothing_and_leaves_nothing(
    fs: FanoutFileSystem, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    fs.pipe("ws/d/f", b"")
    with suppress(ZeroDivisionError), fs.transaction:
        fs.pipe_file("ws/a", b"a")
        with fs.open("ws/b", "wb") as file:
            file.write(b"b")
        raise ZeroDivisionError
    transaction = fs.start_transaction()
    fs.pipe_file("ws/a", b"a")
    fs.pipe_file("ws/d", b"a directory has this name")
    with pytest.raises(OSError):
        transaction.complete()
    assert fs.find("ws") == ["ws/d/f"]
    assert os.listdir(tmp_path / "tmp") == []
    fs.pipe("ws/after", b"")
    assert fs.exists("ws/after")


def test_a_deferred_file_is_committed_or_discarded_by_hand(fs: FanoutFileSystem) -> None:
    fs.start_transaction()
    one, two = fs.open("ws/one", "wb"), fs.open("ws/two", "wb")
    one.write(b"1")
    two.write(b"2")
    assert not fs.exists("ws/one")
    fs.end_transaction()
    assert fs.cat("ws/one") == b"1"
    assert fs.cat("ws/two") == b"2"


# -- life ------------------------------------------------------------------------------------------------------------


def test_listings_are_cached_only_on_request_and_forgotten_by_writes(options: Options, fo: fanout.sync.Fanout) -> None:
    disk = fo.disks.get("ws")
    live, cached = FanoutFileSystem(**options), FanoutFileSystem(**options, use_listings_cache=True)
    cached.pipe("ws/d/mine", b"")
    assert live.ls("ws/d", detail=False) == cached.ls("ws/d", detail=False) == ["ws/d/mine"]
    disk.put_object("d/theirs", b"")
    assert live.ls("ws/d", detail=False) == ["ws/d/mine", "ws/d/theirs"]
    assert cached.ls("ws/d", detail=False) == ["ws/d/mine"]
    assert not cached.exists("ws/d/theirs")
    assert cached.ls("ws/d", detail=False, refresh=True) == ["ws/d/mine", "ws/d/theirs"]
    for change in (
        lambda: cached.pipe("ws/d/x", b""),
        lambda: cached.mv("ws/d/x", "ws/d/y"),
        lambda: cached.cp("ws/d/y", "ws/d/z"),
        lambda: cached.rm("ws/d/y"),
        lambda: cached.touch("ws/d/t"),
        lambda: cached.mkdir("ws/d/dir"),
        lambda: cached.rmdir("ws/d/dir"),
    ):
        cached.ls("ws/d")
        change()
        assert cached.ls("ws/d") == live.ls("ws/d")
    disk.put_object("d/last", b"")
    cached.invalidate_cache()
    assert cached.exists("ws/d/last")
    live.close()
    cached.close()


def test_one_instance_for_the_same_options_and_it_travels(options: Options) -> None:
    fs = fsspec.filesystem("fanout", **options)
    assert fsspec.filesystem("fanout", **options) is fs
    assert pickle.loads(pickle.dumps(fs)) is fs
    assert fsspec.AbstractFileSystem.from_json(fs.to_json()) is fs
    assert fs != fsspec.filesystem("fanout", store="memory://x")
    assert fs.fsid == pickle.loads(pickle.dumps(fs)).fsid
    fs.pipe("ws/f", b"x")
    fs.close()
    assert fs.cat("ws/f") == b"x"  # opened again
    fs.close()
    FanoutFileSystem.clear_instance_cache()


def test_threads_share_an_instance(fs: FanoutFileSystem) -> None:
    def work(number: int) -> None:
        for turn in range(5):
            fs.pipe(f"ws/{number}/{turn}", b"x")
            assert fs.cat(f"ws/{number}/{turn}") == b"x"

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fs.find("ws")) == 40


def _in_a_child(options: Options, inherited: bool) -> bytes:
    fs = FanoutFileSystem(**options)
    fs.pipe(f"ws/child-{inherited}", b"child")
    data: bytes = fs.cat("ws/f")
    return data


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes_make_their_own(options: Options, method: str) -> None:
    fs = FanoutFileSystem(**options)
    fs.pipe("ws/f", b"parent")
    with multiprocessing.get_context(method).Pool(2) as pool:
        found = pool.starmap(_in_a_child, [(options, False), (options, True)])
    assert found == [b"parent"] * 2
    assert fs.find("ws") == ["ws/child-False", "ws/child-True", "ws/f"]
    fs.close()
    FanoutFileSystem.clear_instance_cache()


def test_a_connection_nobody_needs_is_closed(options: Options) -> None:
    gc.collect()
    before = len(_Closer.open)
    fs = FanoutFileSystem(**options, skip_instance_cache=True)
    fs.pipe("ws/f", b"")
    assert len(_Closer.open) == before + 1
    held: Connection = fs._connection
    assert held._open
    del fs, held
    gc.collect()
    assert len(_Closer.open) == before


def test_in_the_callers_own_event_loop(options: Options) -> None:
    async def work() -> None:
        fs = FanoutFileSystem(**options, asynchronous=True, skip_instance_cache=True)
        await fs._pipe_file("ws/a/f", b"0123")
        assert await fs._cat_file("ws/a/f", 1, 3) == b"12"
        assert await fs._ls("ws/a", detail=False) == ["ws/a/f"]
        await fs._mv("ws/a/f", "ws/g")
        assert await fs._find("ws") == ["ws/g"]
        together = await asyncio.gather(*(fs._pipe_file(f"ws/n/{n}", b"") for n in range(20)))
        assert len(together) == 20
        await fs._rm("ws/n", recursive=True)
        assert await fs._exists("ws/n") is False
        await fs.aclose()

    asyncio.run(work())


# -- what uses it ----------------------------------------------------------------------------------------------------


def test_pandas(options: Options) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": range(1000), "b": [f"x{n}" for n in range(1000)]})
    frame.to_csv("fanout://ws/t/a.csv.gz", index=False, storage_options=options)
    assert pandas.read_csv("fanout://ws/t/a.csv.gz", storage_options=options).equals(frame)
    frame.to_parquet("fanout://ws/t/a.parquet", storage_options=options)
    read = pandas.read_parquet("fanout://ws/t/a.parquet", columns=["b"], storage_options=options)
    assert list(read.columns) == ["b"]
    frame.to_json("fanout://ws/t/a.jsonl", orient="records", lines=True, storage_options=options)
    assert len(pandas.read_json("fanout://ws/t/a.jsonl", lines=True, storage_options=options)) == 1000
    with pytest.raises(FileNotFoundError):
        pandas.read_csv("fanout://ws/gone.csv", storage_options=options)


def test_pyarrow(fs: FanoutFileSystem) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import dataset, parquet
    from pyarrow.fs import FileSelector, FileType, FSSpecHandler, PyFileSystem

    arrow = PyFileSystem(FSSpecHandler(fs))
    table = pyarrow.table({"k": [n % 3 for n in range(300)], "v": range(300)})
    dataset.write_dataset(table, "ws/set", filesystem=arrow, format="parquet", partitioning=["k"])
    assert len(fs.glob("ws/set/*/*.parquet")) == 3
    found = dataset.dataset("ws/set", filesystem=arrow, partitioning=["k"]).to_table(filter=dataset.field("k") == 1)
    assert sorted(found["v"].to_pylist()) == list(range(1, 300, 3))
    parquet.write_table(table, "ws/one.parquet", filesystem=fs)
    assert parquet.read_table("ws/one.parquet", filesystem=fs).equals(table)
    infos = {info.path: info.type for info in arrow.get_file_info(FileSelector("ws", recursive=False))}
    assert infos == {"ws/one.parquet": FileType.File, "ws/set": FileType.Directory}
    assert arrow.get_file_info("ws/gone").type == FileType.NotFound
    arrow.create_dir("ws/made/deep", recursive=True)
    arrow.delete_dir("ws/set")
    arrow.move("ws/one.parquet", "ws/made/two.parquet")
    arrow.copy_file("ws/made/two.parquet", "ws/three.parquet")
    assert fs.find("ws") == ["ws/made/two.parquet", "ws/three.parquet"]
    with arrow.open_input_file("ws/three.parquet") as file:
        assert file.size() == fs.size("ws/three.parquet")
        assert file.read_at(4, 0) == b"PAR1"


def test_open_files_caches_and_maps(options: Options, tmp_path: Path) -> None:
    for number, opened in enumerate(fsspec.open_files("fanout://ws/parts/*.json", "w", num=3, **options)):
        with opened as file:
            json.dump(number, file)
    found = []
    for opened in fsspec.open_files("fanout://ws/parts/*.json", **options):
        with opened as file:
            found.append(json.load(file))
    assert found == [0, 1, 2]
    kept = {"fanout": options, "simplecache": {"cache_storage": str(tmp_path / "simple")}}
    with fsspec.open("simplecache::fanout://ws/parts/1.json", **kept) as file:
        assert file.read() == b"1"
    mapping = fsspec.get_mapper("fanout://ws/store", **options)
    mapping["a/b"] = b"value"
    assert dict(mapping) == {"a/b": b"value"}
    del mapping["a/b"]
    assert list(mapping) == []


def test_names_that_are_not_utf_8(fs: FanoutFileSystem) -> None:
    name = os.fsdecode(b"ws/\xff\xfe")
    fs.pipe(name, b"x")
    assert fs.ls("ws", detail=False) == [name]
    assert fs.cat(name) == b"x"
    assert fs.info(name)["size"] == 1
    unusual = [f"ws/{each}" for each in ("a b", "a#b", "a?b", "a%20b", "ü", "a@b", "-", "...")]
    fs.pipe(dict.fromkeys(unusual, b"u"))
    assert all(fs.cat_file(each) == b"u" for each in unusual)
    assert set(unusual) <= set(fs.find("ws"))
