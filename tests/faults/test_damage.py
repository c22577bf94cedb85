"""Stored bytes that are not what was written, and other bad input, through the public interface and the command line:
a typed error that names the object or path, and everything undamaged still reads and commits."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from fanout.api import Fanout
from fanout.cli.root import cli
from fanout.config import Tuning
from fanout.errors import Busy, Corrupt, Invalid, NotFound, meaning
from fanout.format import layout
from fanout.store.base import Store
from fanout.store.local import LocalStore
from fanout.store.memory import MemoryStore
from tests.support.connections import connected

pytestmark = pytest.mark.anyio

TUNING = Tuning(page_entries=2, inline_bytes=0, pack_bytes=1, fold_entries=1 << 30, fold_bytes=1 << 40)
FILES = {f"{d}/f{n}": os.urandom(300) for d in "abc" for n in range(3)}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def store() -> Store:
    return MemoryStore()


def spoil(store: Store, key: str, how: str) -> None:
    data = store.get(key)
    middle = 5 if "/pack/" in key else len(data) // 2  # a pack's footer is not needed for reading
    spoilt = {
        "corrupted": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
        "truncated": data[:middle],
        "empty": b"",
        "version": data[:4] + b"\x09" + data[5:],
        "foreign": b"<html>not found</html>" * 10,
    }
    if how == "missing":
        store.delete([key])
    else:
        store.put(key, spoilt[how])


async def folded(store: Store, cache: Path) -> tuple[str, str]:
    """Make a disk of three directories, folded, with a branch from before; returns its id and its main's uuid."""
    async with connected(store, cache, tuning=TUNING) as fo:
        disk = await fo.disks.create("ws")
        await disk.put_object("early", b"early")
        await disk.branch("side")
        for path, data in FILES.items():
            await disk.put_object(path, data)
        core = disk.core  # type: ignore[attr-defined]
        core.branch().fold()
        await disk.put_object("late", b"late")
        return disk.id, core.branch().uuid


def keys(store: Store, disk_id: str, kind: str) -> list[str]:
    return [meta.key for meta in store.list(f"disks/{disk_id}/{kind}/")]


async def readable(fo: Fanout, line: str = "ws") -> tuple[dict[str, bytes], dict[str, str]]:
    """Read every file; returns what could be read, and the errors of the rest."""
    disk = await fo.disks.get(line)
    good: dict[str, bytes] = {}
    bad: dict[str, str] = {}
    for path in (*FILES, "early", "late"):
        try:
            good[path] = await disk.get_object(path)
        except Corrupt as error:
            bad[path] = str(error)
        except NotFound:
            pass
    return good, bad


@pytest.mark.parametrize("how", ["corrupted", "truncated", "missing"])
@pytest.mark.parametrize("which", range(5))
async def test_a_damaged_pack(store: Store, tmp_path: Path, how: str, which: int) -> None:
    disk_id, _ = await folded(store, tmp_path / "one")
    key = keys(store, disk_id, "pack")[which]
    spoil(store, key, how)
    async with connected(store, tmp_path / "two", tuning=TUNING) as fo:
        disk = await fo.disks.get("ws")
        good, bad = await readable(fo)
        assert len(bad) == 1
        (path,) = bad
        assert key in bad[path]
        assert good == {
            name: data for name, data in {**FILES, "early": b"early", "late": b"late"}.items() if name != path
        }
        with pytest.raises(Corrupt, match=key):
            await fo.exec("ls", disks={"w": disk})
        if path != "late":  # which came after the fold: the base without it is whole
            assert not os.listdir(tmp_path / "two/base"), "a half-built tree was kept"
        # What lies elsewhere is as usable as ever, for commands, too.
        elsewhere = next(d for d in "abc" if not path.startswith(f"{d}/"))
        mount = disk.mount(subdirectory=elsewhere, conditional=True)
        run = await fo.exec("cat f? | wc -c; echo new > new", disks={"w": mount})
        assert run.raise_for_status().stdout == "900\n"
        assert run.commits["w"].seq is not None
        assert await disk.get_object(f"{elsewhere}/new") == b"new\n"
        with pytest.raises(Corrupt, match=key):
            await disk.download("/", tmp_path / "down")
        # What is damaged can be replaced, and all is well again.
        await disk.put_object(path, b"again")
        assert (await fo.exec(f"cat {path}", disks={"w": disk})).stdout == "again"


@pytest.mark.parametrize("how", ["corrupted", "truncated", "missing", "version"])
async def test_a_damaged_page(store: Store, tmp_path: Path, how: str) -> None:
    disk_id, _ = await folded(store, tmp_path / "one")
    pages = keys(store, disk_id, "page")
    assert len(pages) > 3
    async with connected(store, tmp_path / "two", tuning=TUNING) as fo:
        spoil(store, pages[0], how)
        disk = await fo.disks.get("ws")
        good, bad = await readable(fo)
        assert 1 <= len(bad) <= 2, "a page holds two paths"
        assert all(pages[0] in text for text in bad.values())
        assert len(good) == 11 - len(bad)
        with pytest.raises(Corrupt, match=pages[0]):
            await fo.exec("ls", disks={"w": disk})
        with pytest.raises(Corrupt, match=pages[0]):
            [o async for o in disk.list_objects()]
        whole = next(d for d in "abc" if all(f"{d}/f{n}" in good for n in range(3)))
        path = f"{whole}/f1"
        await disk.put_object(path, b"2")
        assert await disk.get_object(path) == b"2"
        side = await fo.disks.get("ws@side")
        run = await fo.exec("cat early; echo > more", disks={"w": side.mount(branch="side")})
        assert run.stdout == "early"
        assert run.commits["w"].seq == 2


@pytest.mark.parametrize("how", ["corrupted", "truncated", "empty", "version", "foreign"])
@pytest.mark.parametrize("where", ["snap", "log"])
async def test_a_damaged_history(store: Store, tmp_path: Path, where: str, how: str) -> None:
    disk_id, uuid = await folded(store, tmp_path / "one")
    async with connected(store, tmp_path / "two", tuning=TUNING) as fo:
        warm = await fo.disks.get("ws")
        assert await warm.get_object("late") == b"late"
        key = layout.snap_key(disk_id, uuid, 10) if where == "snap" else layout.log_key(disk_id, uuid, 11)
        spoil(store, key, how)
        # A process that had read it goes on.
        await warm.put_object("late", b"later")
        assert (await fo.exec("cat late early", disks={"w": warm})).stdout == "laterearly"
    async with connected(store, tmp_path / "three", tuning=TUNING) as fo:
        disk = await fo.disks.get("ws")
        for call in (
            lambda: disk.get_object("early"),
            lambda: disk.put_object("new", b"1"),
            lambda: fo.exec("cat early", disks={"w": disk}),
            lambda: disk.checkpoint("cp"),
        ):
            with pytest.raises(Corrupt, match=key) as caught:
                await call()
            if how == "version":
                assert "version 9 is unknown" in str(caught.value)
        side = await fo.disks.get("ws@side")
        assert await side.get_object("early") == b"early"
        run = await fo.exec("cat early; echo > more", disks={"w": side.mount(branch="side")})
        assert (run.stdout, run.commits["w"].seq) == ("early", 2)


async def test_a_log_with_a_hole(store: Store, tmp_path: Path) -> None:
    disk_id, uuid = await folded(store, tmp_path / "one")
    async with connected(store, tmp_path / "one", tuning=TUNING) as fo:
        disk = await fo.disks.get("ws")
        for n in range(4):
            await disk.put_object(f"more{n}", b"1")
    hole = layout.log_key(disk_id, uuid, 13)
    store.delete([hole])
    async with connected(store, tmp_path / "two", tuning=TUNING) as fo:
        disk = await fo.disks.get("ws")
        for call in (
            lambda: disk.get_object("early"),
            lambda: disk.put_object("new", b"1"),
            lambda: fo.exec("true", disks={"w": disk}),
        ):
            with pytest.raises(Corrupt, match=f"{hole} is missing"):
                await call()
        before = await fo.disks.get("ws")
        assert (await fo.exec("ls", disks={"w": before.mount(read_only=True, at="side")})).stdout == "early\n"
        run = await fo.exec("cat late", disks={"w": before.mount(read_only=True, at=12)})
        assert run.stdout == "late", "what lies before the hole still reads"
        with pytest.raises(Corrupt, match=hole):
            await fo.exec("true", disks={"w": before.mount(read_only=True, at=14)})
    assert hole not in keys(store, disk_id, "log"), "nobody may fill it"


@pytest.mark.parametrize("which", ["disk", "branch", "checkpoint"])
@pytest.mark.parametrize("how", ["corrupted", "truncated", "version", "foreign"])
async def test_a_damaged_record(store: Store, tmp_path: Path, which: str, how: str) -> None:
    async with connected(store, tmp_path / "one") as fo:
        disk = await fo.disks.create("ws")
        await disk.put_object("f", b"1")
        await disk.branch("b")
        await disk.checkpoint("cp")
        await fo.disks.create("other")
        key = {
            "disk": "names/ws",
            "branch": f"disks/{disk.id}/branch/b",
            "checkpoint": f"disks/{disk.id}/checkpoint/cp",
        }
    spoil(store, key[which], how)
    async with connected(store, tmp_path / "one") as fo:
        with pytest.raises(Corrupt, match=key[which]):
            await fo.disks.get({"disk": "ws", "branch": "ws@b", "checkpoint": "ws@cp"}[which])
        good = await fo.disks.get(disk.id)
        assert await good.get_object("f") == b"1"
        await (await fo.disks.get("other")).put_object("f", b"2")


# -- locks and checkouts ----------------------------------------------------------------------------------------


async def test_a_lock_that_is_not_ours(store: Store, tmp_path: Path) -> None:
    async with connected(store, tmp_path / "one") as one, connected(store, tmp_path / "two") as two:
        disk = await one.disks.create("ws")
        other = await two.disks.get("ws")
        with pytest.raises(NotFound, match="no-such-lock"):
            await disk.break_lock("no-such-lock")
        async for event in one.stream("echo 1 > d/f; sleep 0.6", disks={"w": disk.mount(checkout=["d", "e/new"])}):
            if type(event).__name__ != "Started":
                continue
            with pytest.raises(Busy, match=r"'d'.*'e/new'|'e/new'.*'d'") as busy:
                await two.exec("true", disks={"w": other.mount(checkout=["d/sub"], queue_ms=10)})
            assert not hasattr(busy.value, "run")
            run = await two.exec("mkdir -p d e; echo 2 > d/g; echo 3 > free", disks={"w": other})
            assert run.conflict is not None
            assert "d/g" in run.conflict.paths
        assert await disk.head_object("free") is None


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/..", "a/./b", "a//b", "a\0b", "x" * 300, "y/" * 3000])
async def test_a_checkout_that_escapes(store: Store, tmp_path: Path, path: str) -> None:
    async with connected(store, tmp_path / "one") as fo:
        disk = await fo.disks.create("ws")
        with pytest.raises(Invalid, match="checkout"):
            await fo.exec("true", disks={"w": disk.mount(checkout=[path])})
        with pytest.raises(Invalid, match="subdirectory"):
            await fo.exec("true", disks={"w": disk.mount(subdirectory=path)})
        assert [c async for c in disk.log()] == []
        assert await disk.locks() == []


# -- the command line -------------------------------------------------------------------------------------------


Cli = Callable[..., str]


@pytest.fixture
def fanout(tmp_path: Path) -> Cli:
    """Runs a command line and checks its exit code; errors are one line on stderr."""
    environ = {"FANOUT_STORE": f"file://{tmp_path}/store", "FANOUT_CACHE_DIR": f"{tmp_path}/cache", "USER": "tester"}
    runner = CliRunner(env=environ)

    def run(*words: str, code: int = 0, stdin: bytes | None = None) -> str:
        result = runner.invoke(cli, list(words), input=stdin, prog_name="fanout")
        assert result.exit_code == code, (words, result.exit_code, result.output)
        if code:
            assert len(result.stderr.splitlines()) == 1, result.stderr
            return result.stderr
        return result.stdout

    return run


def test_the_command_line_says_what_is_damaged_and_reads_the_rest(fanout: Cli, tmp_path: Path) -> None:
    fanout("disk", "create", "ws")
    store = LocalStore(tmp_path / "store", fsync=False)
    for name in ("good", "bad"):
        (tmp_path / name).write_bytes(os.urandom(400_000))
        fanout("put", "ws", str(tmp_path / name), name)
    disk_id = json.loads(fanout("disk", "info", "ws", "--json"))["id"]
    packs = sorted((m.modified_ns, m.key) for m in store.list(f"disks/{disk_id}/pack/"))
    spoil(store, packs[-1][1], "corrupted")
    code = meaning(Corrupt()).exit
    assert packs[-1][1] in fanout("cat", "ws", "bad", code=code)
    assert packs[-1][1] in fanout("exec", "-d", "w=ws", "--", "true", code=code)
    assert packs[-1][1] in fanout("get", "ws", "bad", str(tmp_path / "down"), code=code)
    fanout("get", "ws", "good", str(tmp_path / "got"))
    assert (tmp_path / "got").read_bytes() == (tmp_path / "good").read_bytes()
    assert fanout("ls", "ws").split() == ["bad", "good"]
    fanout("rm", "ws", "bad")
    assert fanout("exec", "-d", "w=ws", "--", "ls") == "good\n"
    (log,) = {m.key.rpartition("/")[0] for m in store.list(f"disks/{disk_id}/log/")}
    spoil(store, f"{log}/{2:020}", "version")
    error = fanout("ls", "ws", code=code)
    assert f"{2:020}" in error
    assert "version 9 is unknown" in error
    spoil(store, f"{log}/{2:020}", "missing")
    assert "is missing" in fanout("exec", "-d", "w=ws", "--", "true", code=code)
    store.close()
