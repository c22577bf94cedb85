"""The public interface: disks, objects, trees and history. Written against fanout.Fanout and fanout.Disk alone."""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

import fanout
from fanout.api import Disk, Fanout
from fanout.errors import Conflict, Denied, Exists, Invalid, NotFound
from fanout.store.local import LocalStore
from fanout.store.memory import MemoryStore
from tests.support.connections import connected, remote

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=["memory", "local", "remote", pytest.param("s3", marks=pytest.mark.s3)])
async def fo(
    request: pytest.FixtureRequest, anyio_backend: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Fanout]:
    top = tmp_path_factory.mktemp("api")
    if request.param == "remote":
        async with remote(request.getfixturevalue("remote_server")) as fo:
            yield fo
        return
    if request.param == "memory":
        store: Any = MemoryStore()
    elif request.param == "local":
        store = LocalStore(top / "store", fsync=False)
    else:
        from fanout.store.s3 import S3Store

        endpoint, bucket = request.getfixturevalue("s3_endpoint"), request.getfixturevalue("s3_bucket")
        store = S3Store(bucket, f"t/{uuid.uuid4().hex}", endpoint=endpoint)
    async with connected(store, top / "cache") as fo:
        yield fo
    store.close()


@pytest.fixture
async def disk(fo: Fanout) -> Disk:
    return await fo.disks.create(f"ws-{uuid.uuid4().hex[:12]}")


async def keys(disk: Disk, prefix: str = "", **options: Any) -> list[str]:
    return [item.key async for item in disk.list_objects(prefix, **options)]


# -- disks -----------------------------------------------------------------------------------------------------------


async def test_create_get_list_delete(fo: Fanout) -> None:
    name = f"d-{uuid.uuid4().hex[:8]}"
    made = await fo.disks.create(name)
    assert (made.name, made.branch_name, made.at) == (name, "main", None)
    assert made.id.startswith("dsk-")
    assert len(made.id) == 20
    for by in (name, made.id, f"{name}@main"):
        assert (await fo.disks.get(by)).id == made.id
    with pytest.raises(Exists, match=name):
        await fo.disks.create(name)
    assert made.id in [each.id async for each in fo.disks.list()]
    await made.put_object("f", b"x")
    await fo.disks.delete(name)
    for by in (name, made.id):
        with pytest.raises(NotFound):
            await fo.disks.get(by)
        with pytest.raises(NotFound):
            await fo.disks.delete(by)
    assert made.id not in [each.id async for each in fo.disks.list()]
    again = await fo.disks.create(name)
    assert again.id != made.id
    assert await keys(again) == []


async def test_disks_are_listed_in_order_of_names(fo: Fanout) -> None:
    made = [await fo.disks.create(f"order{suffix}") for suffix in ("-b", ".b", "9", "_")]
    listed = [each.name async for each in fo.disks.list() if each.name.startswith("order")]
    assert listed == sorted(each.name for each in made)


@pytest.mark.parametrize("name", ["", "A", "-a", ".a", "a/b", "a b", "a" * 64, "a@b", "ä", "a\n", None, 5])
async def test_names_of_disks(fo: Fanout, name: Any) -> None:
    with pytest.raises(Invalid, match=r"a-z0-9"):
        await fo.disks.create(name)


async def test_get_names_what_is_missing(fo: Fanout, disk: Disk) -> None:
    with pytest.raises(NotFound, match="'nope'"):
        await fo.disks.get("nope")
    with pytest.raises(NotFound, match="'nope'"):
        await fo.disks.get(f"{disk.name}@nope")
    with pytest.raises(NotFound, match="dsk-0000000000000000"):
        await fo.disks.get("dsk-0000000000000000")
    with pytest.raises(Invalid):
        await fo.disks.get(5)  # type: ignore[arg-type]


# -- objects ---------------------------------------------------------------------------------------------------------


async def test_put_get_head_delete(disk: Disk) -> None:
    put = await disk.put_object("a/b.txt", "tëxt", mode=0o755)
    assert (put.key, put.size, put.mode, put.kind) == ("a/b.txt", 5, 0o755, "file")
    assert await disk.get_object("a/b.txt") == "tëxt".encode()
    assert await disk.get_object("/a/b.txt") == "tëxt".encode()
    head = await disk.head_object("a/b.txt")
    assert head == put
    other = await disk.put_object("a/b.txt", b"other")
    assert other.etag != put.etag
    assert await disk.head_object("a") is None, "a directory is no object"
    assert await disk.head_object("nope") is None
    with pytest.raises(NotFound, match=r"a/nope"):
        await disk.get_object("a/nope")
    with pytest.raises(Invalid, match="directory"):
        await disk.get_object("a")
    await disk.delete_object("a/b.txt")
    await disk.delete_object("a/b.txt")
    assert await disk.head_object("a/b.txt") is None
    assert [entry.name async for entry in disk.listdir("/")] == ["a"], "the directory stays"


@pytest.mark.parametrize("size", [0, 1, 128 << 10, (128 << 10) + 1, (256 << 10) + 1, 5 << 20])
async def test_sizes(disk: Disk, size: int) -> None:
    data = os.urandom(size)
    assert (await disk.put_object("f", data)).size == size
    assert await disk.get_object("f") == data


@pytest.mark.parametrize("size", [0, 1, 5, (4 << 20) + 3])
async def test_ranges(disk: Disk, size: int) -> None:
    data = os.urandom(size)
    await disk.put_object("f", data)
    ends = sorted({0, 1, size // 2, max(size - 1, 0), size, size + 1})
    for start in ends:
        for end in (each for each in (*ends, None) if each is None or each >= start):
            wanted = data[start:end]
            assert await disk.get_object("f", start=start, end=end) == wanted, (start, end)
            assert b"".join([part async for part in disk.read_object("f", start=start, end=end)]) == wanted


@pytest.mark.parametrize(
    ("start", "end", "says"), [(-1, None, "start is -1"), (2, 1, "end is 1"), (True, None, "start"), (0, 1.5, "end")]
)
async def test_bad_ranges(disk: Disk, start: Any, end: Any, says: str) -> None:
    await disk.put_object("f", b"abc")
    with pytest.raises(Invalid, match=says):
        await disk.get_object("f", start=start, end=end)
    with pytest.raises(Invalid, match=says):
        await anext(aiter(disk.read_object("f", start=start, end=end)))


async def test_reading_what_is_no_file(disk: Disk) -> None:
    await disk.put_object("d/f", b"")
    with pytest.raises(NotFound, match="nope"):
        await anext(aiter(disk.read_object("nope")))
    with pytest.raises(Invalid, match="directory"):
        await anext(aiter(disk.read_object("d")))


async def test_a_read_goes_on_in_the_file_it_began_with(disk: Disk) -> None:
    data = os.urandom(9 << 20)
    await disk.put_object("f", data)
    chunks = aiter(disk.read_object("f"))
    first = await anext(chunks)
    assert len(first) < len(data)
    await disk.put_object("f", b"other")
    assert first + b"".join([chunk async for chunk in chunks]) == data


async def pieces(data: bytes, size: int) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


@pytest.mark.parametrize("size", [0, 1, 100_000, (9 << 20) + 1])
async def test_put_streams(disk: Disk, tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    put = await disk.put_object("s/f", pieces(data, 70_001), mode=0o600)
    assert (put.key, put.size, put.mode) == ("s/f", size, 0o600)
    assert await disk.head_object("s/f") == put
    assert await disk.get_object("s/f") == data
    (tmp_path / "local").write_bytes(data)
    with open(tmp_path / "local", "rb") as file:
        assert (await disk.put_object("s/g", file)).size == size
    assert await disk.get_object("s/g") == data
    assert len([commit async for commit in disk.log()]) == 2, "each in one commit"


async def test_a_stream_that_breaks_stores_nothing(disk: Disk, tmp_path: Path) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield os.urandom(9 << 20)
        raise ValueError("broke")

    async def of_text() -> AsyncIterator[bytes]:
        yield "text"  # type: ignore[misc]

    with pytest.raises(ValueError, match="broke"):
        await disk.put_object("f", broken())
    with pytest.raises(Invalid, match="data is 'text'"):
        await disk.put_object("f", of_text())
    (tmp_path / "text").write_text("text")
    with open(tmp_path / "text") as file, pytest.raises(Invalid, match="rb"):
        await disk.put_object("f", file)  # type: ignore[arg-type]
    with pytest.raises(Invalid, match="directory"):
        await disk.put_object("d/", pieces(b"", 1))
    assert await disk.head_object("f") is None
    assert [commit async for commit in disk.log()] == []


async def test_a_stream_whose_caller_goes_away_stores_nothing(disk: Disk) -> None:
    asked = anyio.Event()

    async def stuck() -> AsyncIterator[bytes]:
        yield b"some"
        asked.set()
        await anyio.sleep_forever()

    async with anyio.create_task_group() as group:
        group.start_soon(disk.put_object, "f", stuck())
        await asked.wait()
        group.cancel_scope.cancel()
    assert await disk.head_object("f") is None


async def test_keys_that_are_directories(disk: Disk) -> None:
    assert (await disk.put_object("d/", b"")).kind == "directory"
    assert [entry.kind async for entry in disk.listdir("/")] == ["directory"]
    with pytest.raises(Invalid, match="empty"):
        await disk.put_object("e/", b"x")
    await disk.put_object("d/f", b"x")
    with pytest.raises(Conflict):
        await disk.put_object("d", b"x")
    with pytest.raises(Conflict):
        await disk.put_object("d/f/g", b"x")
    with pytest.raises(Invalid, match="recursive"):
        await disk.delete_object("d")
    await disk.delete_object("d", recursive=True)
    assert [entry async for entry in disk.listdir("/")] == []


@pytest.mark.parametrize(
    "key", ["", "/", "a//b", "../a", "a/..", "./a", "a\0b", "n" * 256, "d/" * 2048 + "f", "\ud800"]
)
async def test_bad_keys(disk: Disk, key: str) -> None:
    for call in (disk.put_object(key, b""), disk.get_object(key), disk.delete_object(key)):
        with pytest.raises(Invalid, match="key is"):
            await call
    assert [commit async for commit in disk.log()] == []


@pytest.mark.parametrize(
    ("key", "data", "mode", "says"),
    [("f", 5, 0o644, "data is 5"), ("f", None, 0o644, "data is None"), ("f", b"", 0o10000, "mode"), (5, b"", 1, "key")],
)
async def test_bad_arguments_of_put(disk: Disk, key: Any, data: Any, mode: Any, says: str) -> None:
    with pytest.raises(Invalid, match=says):
        await disk.put_object(key, data, mode=mode)


async def test_names_are_bytes(disk: Disk) -> None:
    names = ["\u00e9", "e\u0301", "new\nline", "tab\t", "\udcff\udcfe", "n" * 255, "-leading", "☕"]
    for name in names:
        await disk.put_object(f"d/{name}", name.encode("utf-8", "surrogateescape"))
    listed = await keys(disk, "d/")
    assert listed == sorted((f"d/{name}" for name in names), key=os.fsencode)
    for key in listed:
        assert await disk.get_object(key) == os.fsencode(key[2:])


async def test_move(disk: Disk) -> None:
    for i in range(5):
        await disk.put_object(f"old/sub/{i}", str(i))
    commit = await disk.move("/old", "/new/place")
    assert commit.seq == 6
    assert await keys(disk) == [f"new/place/sub/{i}" for i in range(5)]
    with pytest.raises(NotFound, match="old"):
        await disk.move("/old", "/x")
    await disk.put_object("f", b"")
    with pytest.raises(Exists, match="f"):
        await disk.move("/new", "/f")
    with pytest.raises(Invalid, match="target"):
        await disk.move("/new", "/new/inside")
    for bad in ("relative", "/"):
        with pytest.raises(Invalid):
            await disk.move(bad, "/x")


async def test_stat_tells_of_everything(disk: Disk, tmp_path: Path) -> None:
    (tmp_path / "tree/d").mkdir(parents=True)
    (tmp_path / "tree/d/f").write_bytes(b"abc")
    (tmp_path / "tree/d/f").chmod(0o750)
    (tmp_path / "tree/d/l").symlink_to("f")
    await disk.upload(tmp_path / "tree")
    listed = {entry.name: entry async for entry in disk.listdir("/d")}
    for name in ("f", "l"):
        assert await disk.stat(f"/d/{name}") == listed[name]
    file = await disk.stat("/d/f")
    head = await disk.head_object("d/f")
    assert file is not None
    assert head is not None
    assert (file.kind, file.size, file.mode, file.etag) == ("file", 3, 0o750, head.etag)
    link = await disk.stat("/d/l")
    assert link is not None
    assert (link.kind, link.target) == ("symlink", "f")
    directory, root = await disk.stat("/d/"), await disk.stat("/")
    assert directory is not None
    assert (directory.kind, directory.path, directory.etag) == ("directory", "/d", "")
    assert root is not None
    assert (root.kind, root.path, root.name) == ("directory", "/", "")
    assert await disk.stat("/d/gone") is None
    assert await disk.stat("/d/f/below") is None
    for bad in ("d", "", "/a//b", "/../x"):
        with pytest.raises(Invalid, match="path"):
            await disk.stat(bad)


async def test_copy_and_taking_a_place(disk: Disk) -> None:
    await disk.put_object("d/a", b"a", mode=0o755)
    await disk.put_object("d/deep/b", b"b")
    commit = await disk.copy("/d", "/e/copy")
    assert {change.path for change in commit.changes} >= {"e/copy/a", "e/copy/deep/b"}
    assert await keys(disk) == ["d/a", "d/deep/b", "e/copy/a", "e/copy/deep/b"]
    await disk.put_object("d/a", b"changed")
    assert await disk.get_object("e/copy/a") == b"a"
    copied = await disk.head_object("e/copy/a")
    assert copied is not None
    assert copied.mode == 0o755
    with pytest.raises(Exists):
        await disk.copy("/d/a", "/d/deep/b")
    await disk.copy("/d/a", "/d/deep/b", replace=True)
    await disk.move("/d/a", "/e/copy/a", replace=True)
    assert await keys(disk) == ["d/deep/b", "e/copy/a", "e/copy/deep/b"]
    assert await disk.get_object("e/copy/a") == await disk.get_object("d/deep/b") == b"changed"
    await disk.copy("/e/copy/a", "/e/copy/a", replace=True)
    touched = await disk.head_object("e/copy/a")
    assert touched is not None
    assert touched.last_modified > copied.last_modified
    for source, target in (("/d", "/e"), ("/e/copy/a", "/d"), ("/d", "/e/copy/a")):
        with pytest.raises(Exists):
            await disk.copy(source, target, replace=True)
    with pytest.raises(NotFound):
        await disk.copy("/gone", "/x")
    with pytest.raises(Invalid):
        await disk.copy("/d", "/d/inside")
    with pytest.raises(Invalid, match="replace"):
        await disk.copy("/d", "/x", replace="yes")  # type: ignore[arg-type]
    for bad in ("", "relative", "/", "/../x"):
        with pytest.raises(Invalid):
            await disk.copy(bad, "/x")


async def test_listing_in_byte_order(disk: Disk) -> None:
    for key in ("a/b", "a-b", "a.b", "a0", "B", "z/y/x", "ab"):
        await disk.put_object(key, b"")
    assert await keys(disk) == ["B", "a-b", "a.b", "a/b", "a0", "ab", "z/y/x"]
    assert await keys(disk, recursive=False) == ["B", "a-b", "a.b", "a/", "a0", "ab", "z/"]
    assert await keys(disk, "a", recursive=False) == ["a-b", "a.b", "a/", "a0", "ab"]
    assert await keys(disk, "a/") == ["a/b"]
    assert await keys(disk, "z/", recursive=False) == ["z/y/"]
    assert await keys(disk, "a/b") == ["a/b"]
    assert await keys(disk, "nope/", recursive=False) == await keys(disk, "nope/") == []
    for recursive in (True, False):
        everything = await keys(disk, recursive=recursive)
        for key in [*everything, "a", "a/", "a/a", "A", "zz", "z/y"]:
            expected = [k for k in everything if k.encode() > key.encode()]
            assert await keys(disk, recursive=recursive, start_after=key) == expected, (recursive, key)


async def test_paging_through_many(disk: Disk, tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    for i in range(600):
        (tmp_path / "many" / f"{i:04d}").write_bytes(b"")
    await disk.upload(tmp_path)
    seen: list[str] = []
    while page := [item.key async for item in disk.list_objects("many/", start_after=seen[-1] if seen else "")][:250]:
        seen += page
    assert seen == [f"many/{i:04d}" for i in range(600)]
    assert len([entry async for entry in disk.listdir("/many")]) == 600


async def test_listdir(disk: Disk) -> None:
    await disk.put_object("d/f", b"xyz", mode=0o600)
    await disk.put_object("d/sub/g", b"")
    entries = [entry async for entry in disk.listdir("/d/")]
    assert [(e.name, e.path, e.kind) for e in entries] == [("f", "/d/f", "file"), ("sub", "/d/sub", "directory")]
    assert (entries[0].size, entries[0].mode) == (3, 0o600)
    with pytest.raises(NotFound, match="/nope"):
        _ = [entry async for entry in disk.listdir("/nope")]
    with pytest.raises(Invalid, match="directory"):
        _ = [entry async for entry in disk.listdir("/d/f")]
    with pytest.raises(Invalid, match="absolute"):
        _ = [entry async for entry in disk.listdir("d")]


# -- trees -----------------------------------------------------------------------------------------------------------


def grow(top: Path) -> None:
    """A tree with all that must survive."""
    (top / "sub/deep").mkdir(parents=True)
    (top / "empty").mkdir(mode=0o750)
    (top / "sub/file").write_bytes(b"content")
    (top / "script").write_bytes(b"#!/bin/sh\n")
    (top / "script").chmod(0o755)
    (top / "sub/deep/big").write_bytes(os.urandom(300_000))
    (top / "link").symlink_to("sub/file")
    (top / "dangling").symlink_to("/nowhere/at/all")
    os.link(top / "sub/file", top / "hard")
    with open(os.fsencode(top) + b"/bad-\xff\xfe", "wb") as file:
        file.write(b"bytes")
    os.utime(top / "script", ns=(1_234_567_890_123_456_789,) * 2)


def picture(top: Path) -> dict[bytes, Any]:
    found: dict[bytes, Any] = {}
    for where, directories, files in os.walk(os.fsencode(top)):
        for name in (*directories, *files):
            path = where + b"/" + name
            stat = os.lstat(path)
            what: Any = stat.st_nlink if os.path.isfile(path) else None
            if os.path.islink(path):
                what = os.readlink(path)
            elif os.path.isfile(path):
                what = (Path(os.fsdecode(path)).read_bytes(), stat.st_nlink, stat.st_mtime_ns)
            found[path[len(os.fsencode(top)) :]] = (stat.st_mode, what)
    return found


async def test_upload_and_download_round_trip(disk: Disk, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    grow(source)
    told: list[tuple[int, int, int | None]] = []
    commit = await disk.upload(source, "/up/here", progress=lambda *how: told.append(how))
    assert commit.seq == 1
    assert {change.kind for change in commit.changes} == {"added"}
    assert told[-1][:2] == (4, 7 + 10 + 300_000 + 5)
    assert [t[0] for t in told] == sorted(t[0] for t in told)
    told.clear()
    await disk.download("/up/here", target, progress=lambda *how: told.append(how))
    assert picture(target) == picture(source)
    assert told
    one = tmp_path / "one"
    await disk.download("/up/here/script", one)
    assert one.read_bytes() == b"#!/bin/sh\n"
    assert one.stat().st_mode & 0o777 == 0o755


async def test_upload_replaces_and_keeps(disk: Disk, tmp_path: Path) -> None:
    await disk.put_object("d/kept", b"kept")
    await disk.put_object("d/f", b"old")
    (tmp_path / "f").write_bytes(b"new")
    await disk.upload(tmp_path, "/d")
    assert await disk.get_object("d/f") == b"new"
    assert await disk.get_object("d/kept") == b"kept"
    await disk.upload(tmp_path / "f", "/single")
    assert await disk.get_object("single") == b"new"


async def test_fanoutignore(disk: Disk, tmp_path: Path) -> None:
    for name in ("keep.py", "x.log", "keep.log", "node_modules/m/i.js", "sub/node_modules/n", "sub/a"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / ".fanoutignore").write_text("# comment\n*.log\n!keep.log\nnode_modules/\n")
    await disk.upload(tmp_path)
    assert await keys(disk) == [".fanoutignore", "keep.log", "keep.py", "sub/a"]


async def test_what_cannot_be_uploaded_or_downloaded(disk: Disk, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="nothing-here"):
        await disk.upload(tmp_path / "nothing-here")
    with pytest.raises(Invalid, match="remote"):
        await disk.upload(tmp_path, "relative")
    with pytest.raises(NotFound, match="/nope"):
        await disk.download("/nope", tmp_path / "x")
    assert not (tmp_path / "x").exists()


async def test_a_link_leads_nowhere_on_the_host(disk: Disk, tmp_path: Path) -> None:
    """CASE 26 for uploads and downloads."""
    source, target, outside = tmp_path / "source", tmp_path / "target", tmp_path / "outside"
    for each in (source, target, outside):
        each.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (source / "out").symlink_to(outside)
    (source / "loop").symlink_to("loop")
    (source / "up").symlink_to("../../outside/secret")
    await disk.upload(source)
    async for item in disk.list_objects():
        assert item.kind == "symlink"
        with pytest.raises(Invalid, match="symbolic link"):
            await disk.get_object(item.key)
    with pytest.raises(NotFound):
        await disk.get_object("out/secret")
    with pytest.raises(Conflict):
        await disk.put_object("out/secret", b"overwritten")
    (target / "out").symlink_to(outside)
    await disk.delete_object("out")
    await disk.put_object("out/secret", b"overwritten")
    await disk.download("/", target)
    assert (outside / "secret").read_bytes() == b"secret"
    assert (target / "out/secret").read_bytes() == b"overwritten"
    assert os.readlink(target / "up") == "../../outside/secret"


# -- history ---------------------------------------------------------------------------------------------------------


async def test_log(disk: Disk) -> None:
    for i in range(4):
        await disk.put_object(f"f{i}", b"")
    log = [commit async for commit in disk.log()]
    assert [commit.seq for commit in log] == [4, 3, 2, 1]
    assert log[0].changes == (fanout.Change(path="f3", kind="added"),)
    assert (log[0].author, log[0].message, log[0].exec_id, log[0].base_seq) == ("tester", "put f3", None, 3)
    assert log[0].time >= log[-1].time
    assert log[0].time.utcoffset() is not None
    assert [c.seq async for c in disk.log(limit=2)] == [4, 3]
    assert [c.seq async for c in disk.log(after=2)] == [4, 3]
    for bad in ({"limit": 0}, {"after": -1}):
        with pytest.raises(Invalid):
            _ = [c async for c in disk.log(**bad)]


async def test_checkpoints(fo: Fanout, disk: Disk) -> None:
    await disk.put_object("f", b"one")
    made = await disk.checkpoint("base")
    assert (made.name, made.branch, made.seq) == ("base", "main", 1)
    await disk.put_object("f", b"two")
    unnamed = await disk.checkpoint()
    assert unnamed.name.startswith("cp-")
    assert [c.name async for c in disk.checkpoints()] == ["base", unnamed.name]
    with pytest.raises(Exists, match="base"):
        await disk.checkpoint("base")
    with pytest.raises(Invalid):
        await disk.checkpoint("Not a name")
    then = await fo.disks.get(f"{disk.name}@base")
    assert then.at == "base"
    assert await then.get_object("f") == b"one"
    assert await keys(then) == ["f"]
    for call in (
        then.put_object("f", b"x"),
        then.delete_object("f"),
        then.move("/f", "/g"),
        then.upload(__file__, "/x"),
    ):
        with pytest.raises(Denied, match="base"):
            await call
    with pytest.raises(Denied, match="read_only"):
        then.mount()
    assert [c.seq async for c in then.log()] == [1]


async def test_branches_and_diff(fo: Fanout, disk: Disk) -> None:
    await disk.put_object("both", b"1")
    await disk.put_object("gone", b"1")
    await disk.checkpoint("base")
    await disk.put_object("later", b"1")
    branch = await disk.branch("attempt-1", checkpoint="base")
    assert branch.branch_name == "attempt-1"
    assert branch.id == disk.id
    assert await keys(branch) == ["both", "gone"]
    await branch.put_object("both", b"2")
    await branch.delete_object("gone")
    await branch.put_object("new", b"1")
    assert await disk.get_object("both") == b"1"
    changes = [(c.path, c.kind) async for c in branch.diff("base")]
    assert changes == [("both", "modified"), ("gone", "deleted"), ("new", "added")]
    assert [c.path async for c in disk.diff("base", "main")] == ["later"]
    assert [c.path async for c in disk.diff(1, 2)] == ["gone"]
    assert [c.path async for c in disk.diff("main", "attempt-1")] == ["both", "gone", "later", "new"]
    assert [name async for name in disk.branches()] == ["attempt-1", "main"]
    assert (await fo.disks.get(f"{disk.name}@attempt-1")).branch_name == "attempt-1"
    with pytest.raises(Exists):
        await disk.branch("attempt-1")
    for missing in (disk.branch("x", checkpoint="nope"),):
        with pytest.raises(NotFound, match="nope"):
            await missing
    with pytest.raises(NotFound):
        _ = [c async for c in disk.diff("nope")]
    with pytest.raises(NotFound):
        _ = [c async for c in disk.diff(99)]


async def test_merge(disk: Disk) -> None:
    await disk.put_object("f", b"base")
    branch = await disk.branch("theirs")
    await branch.put_object("f", b"theirs")
    await branch.put_object("g", b"theirs")
    await disk.put_object("f", b"ours")
    with pytest.raises(Conflict) as caught:
        await disk.merge(branch)
    assert (caught.value.paths, caught.value.rescue_branch, caught.value.disk) == (("f",), None, disk.name)
    assert await keys(disk) == ["f"], "a merge that fails changes nothing"
    commit = await disk.merge("theirs", on_conflict="ours")
    assert {change.path for change in commit.changes} == {"g"}
    assert await disk.get_object("f") == b"ours"
    await branch.put_object("f", b"THEIR OTHER VERSION")
    await disk.put_object("f", b"our own")
    await disk.merge(branch, on_conflict="theirs")
    assert await disk.get_object("f") == b"THEIR OTHER VERSION"
    with pytest.raises(Invalid, match="on_conflict"):
        await disk.merge(branch, on_conflict="mine")  # type: ignore[arg-type]
    with pytest.raises(NotFound):
        await disk.merge("nope")
    with pytest.raises(Invalid, match="itself"):
        await disk.merge(disk)


async def test_merge_of_another_disk_is_refused(fo: Fanout, disk: Disk) -> None:
    other = await fo.disks.create(f"other-{uuid.uuid4().hex[:8]}")
    with pytest.raises(Invalid, match="same disk"):
        await disk.merge(other)
