"""CASE 27: disk full, in the cache, in a command's layer and in the store. A typed error that names the place, earlier
commits intact, nothing half done left behind, and everything works again when there is space."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from fanout.api import Disk
from fanout.config import Tuning
from fanout.errors import FanoutError, Unavailable
from fanout.model import Finished, Run, Started
from fanout.store.local import LocalStore
from fanout.store.memory import MemoryStore
from tests.support.connections import connected, until
from tests.support.disks import UNFOLDED, check_refs, check_tree, cold, contents, get, hasty, new_disk, put, put_many
from tests.support.full import Small, fail_writes_below, small

MIB = 1 << 20


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Small]:
    """A small file system for the cache."""
    with small(tmp_path / "host", "6m", 400) as made:
        yield made


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Small]:
    """A small file system for the store."""
    with small(tmp_path / "place", "3m", 400) as made:
        yield made


def leftovers(cache: Path) -> list[str]:
    return [f"{kind}/{name}" for kind in ("tmp", "upper", "trash") for name in os.listdir(cache / kind)]


# -- the host's cache ---------------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("what", ["base", "delta"])
async def test_a_tree_that_has_no_room(host: Small, what: str) -> None:
    cache = host.path / "cache"
    store = MemoryStore()
    async with connected(store, cache) as fo:
        disk = await fo.disks.create("ws")
        await disk.put_object("small", b"small")
        if what == "delta":
            assert (await fo.exec("cat small", disks={"w": disk})).stdout == "small"
        big = os.urandom(8 * MIB)
        await disk.put_object("d/big", big)
        with pytest.raises(Unavailable, match=str(cache)) as caught:
            await fo.exec("cat small", disks={"w": disk})
        assert not hasattr(caught.value, "run"), "the command never ran"
        await anyio.to_thread.run_sync(fo._cache._remover.submit(lambda: None).result)  # type: ignore[attr-defined]
        assert [name for name in leftovers(cache) if not name.startswith("upper/")] == []
        assert await disk.get_object("small") == b"small", "no cache is needed for this"
        host.resize("64m")
        assert (await fo.exec("cat d/big | wc -c", disks={"w": disk})).stdout == f"{len(big)}\n"
    assert leftovers(cache) == []


@pytest.mark.anyio
async def test_room_is_made_of_what_nobody_uses_and_only_of_that(host: Small) -> None:
    store = MemoryStore()
    async with connected(store, host.path / "cache") as fo:
        one, two = [await fo.disks.create(name) for name in ("one", "two")]
        for disk in (one, two):
            await disk.put_object("f", os.urandom(4 * MIB))
        assert (await fo.exec("wc -c < f", disks={"w": one})).stdout == f"{4 * MIB}\n"
        assert (await fo.exec("wc -c < f", disks={"w": two})).stdout == f"{4 * MIB}\n", "the first one's tree went"
        runs: list[Run] = []

        async with anyio.create_task_group() as group:
            started = anyio.Event()

            async def use() -> None:
                async for event in fo.stream("md5sum < f; sleep 1.5; md5sum < f", disks={"w": one}):
                    if isinstance(event, Started):
                        started.set()
                    elif isinstance(event, Finished):
                        runs.append(event.run)

            group.start_soon(use)
            await started.wait()
            with pytest.raises(Unavailable, match="cache"):
                await fo.exec("wc -c < f", disks={"w": two})
        first, second = runs[0].raise_for_status().stdout.splitlines()
        assert first == second, "a mounted tree was touched"
        assert (await fo.exec("wc -c < f", disks={"w": two})).stdout == f"{4 * MIB}\n"


@pytest.mark.anyio
async def test_a_cache_with_no_names_left(host: Small) -> None:
    store = MemoryStore()
    async with connected(store, host.path / "cache") as fo:
        disk = await fo.disks.create("ws")
        await disk.put_object("f", b"1")
        host.fill_names()
        with pytest.raises(Unavailable, match=str(host.path)):
            await fo.exec("cat f", disks={"w": disk})
        host.free()
        assert (await fo.exec("cat f", disks={"w": disk})).stdout == "1"
        host.fill_names()  # warm, but no layer can be made for a command any more
        outcomes: list[FanoutError | Run] = []
        for _ in range(3):
            try:
                outcomes.append(await fo.exec("cat f; echo x > new", disks={"w": disk}))
            except FanoutError as error:
                outcomes.append(error)
        for outcome in outcomes:
            assert isinstance(outcome, Unavailable) or "No space left" in outcome.stderr, outcome
        host.free()
        await fo.exec("echo 2 > f", disks={"w": disk})
        assert await disk.get_object("f") == b"2\n"
        host.fill_names()
        with pytest.raises(Unavailable, match=str(host.path)):
            async with connected(store, host.path / "another"):
                pass


@pytest.mark.anyio
async def test_a_download_that_has_no_room(host: Small, tmp_path: Path) -> None:
    async with connected(MemoryStore(), tmp_path / "cache") as fo:
        disk = await fo.disks.create("ws")
        await disk.put_object("a", b"small")
        await disk.put_object("big", big := os.urandom(8 * MIB))
        with pytest.raises(Unavailable, match=r"big.*full"):
            await disk.download("/", host.path / "down")
        host.resize("32m")
        await disk.download("/", host.path / "down")
        assert (host.path / "down/big").read_bytes() == big


# -- the layer of a command ---------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_command_that_fills_its_layer_sees_it_and_what_it_left_is_whole(host: Small) -> None:
    store = MemoryStore()
    async with connected(store, host.path / "cache") as fo:
        disk = await fo.disks.create("ws")
        await disk.put_object("old", b"there before")
        for _ in range(2):
            run = await fo.exec(
                "head -c 1M /dev/urandom > a; md5sum < a; head -c 20M /dev/urandom > b; echo $?; cat old;"
                " md5sum < b; stat -c %s b; mkdir d; echo x > d/c || echo no",
                disks={"w": disk},
            )
            assert run.status == "completed"
            assert "No space left on device" in run.stderr
            lines = run.stdout.splitlines()
            assert lines[1] == "1"
            assert run.commits["w"].seq is not None
            async with connected(store, host.path.parent / "elsewhere") as other:
                there = await other.disks.get("ws")
                check = await other.exec("md5sum < a; cat old; echo; md5sum < b; stat -c %s b", disks={"w": there})
            assert check.stdout.split() == [
                *lines[0].split(),
                "there",
                "before",
                *lines[2][12:].split(),
                lines[3],
            ]
            assert 3 * MIB < int(lines[3]) < 6 * MIB
            # What it left is as large as the whole cache. Its layer's space is there again, though.
            await disk.delete_object("b")
            small_run = await fo.exec("rm -r a d; head -c 2M /dev/zero > z && wc -c < z", disks={"w": disk})
            assert small_run.raise_for_status().stdout == f"{2 * MIB}\n"
            await disk.delete_object("z")
        assert await disk.get_object("old") == b"there before"
    assert leftovers(host.path / "cache") == []


# -- the store ----------------------------------------------------------------------------------------------------


def unchanged(store: LocalStore, disk: object, wanted: dict[bytes, bytes]) -> None:
    fresh = cold(disk, store)  # type: ignore[arg-type]
    state = fresh.branch().refresh()
    check_tree(state)
    check_refs(store, fresh, state)
    assert contents(fresh, state) == wanted


def temporaries(store: LocalStore) -> list[str]:
    return os.listdir(f"{store.root}/+tmp")


@pytest.mark.parametrize("fsync", [True, False])
@pytest.mark.parametrize("how", ["space", "names"])
@pytest.mark.parametrize("step", ["pack", "entry", "page", "record"])
def test_a_store_that_is_full(place: Small, step: str, how: str, fsync: bool) -> None:
    store = LocalStore(place.path / "store", fsync=fsync)
    tuning = UNFOLDED.model_copy(update={"page_entries": 2, "inline_bytes": 0 if step == "pack" else 256 << 10})
    disk = new_disk(store, hasty(), tuning)
    put(disk, "old", b"there before")
    put_many(disk, [(f"f{n}", b"%d" % n * 50) for n in range(4)])
    wanted = contents(disk, disk.branch().refresh())
    where = {"pack": "/pack/", "entry": "/log/", "page": "/(page|pack)/", "record": "/branch/"}[step]

    def attempt() -> None:
        if step in ("pack", "entry"):
            put(disk, "new", os.urandom(100_000))
        elif step == "page":
            disk.branch().fold()
        else:
            disk.create_branch("b", disk.point())

    place.fill() if how == "space" else place.fill_names()
    for _ in range(2):
        with pytest.raises(Unavailable, match=f"{store.url}.*{where}.*No space left"):
            attempt()
    assert temporaries(store) == []
    unchanged(store, disk, wanted)
    assert get(disk, "old") == b"there before"
    place.free()
    attempt()
    after = contents(disk, cold(disk, store).branch().refresh())
    assert {path: data for path, data in after.items() if path != b"new"} == wanted
    assert (b"new" in after) == (step in ("pack", "entry"))
    put(disk, "more", b"1")
    disk.branch().fold()
    assert get(cold(disk, store), "more") == b"1"


def test_a_fold_in_the_background_of_a_full_store_is_made_up_for(place: Small) -> None:
    store = LocalStore(place.path / "store", fsync=False)
    disk = new_disk(store, hasty(), Tuning(fold_entries=4))
    for n in range(3):
        put(disk, f"f{n}", b"%d" % n)
    data = os.urandom(4000)
    with open(place.path / "+ballast", "wb") as ballast:
        free = os.statvfs(place.path)
        ballast.write(bytes(free.f_bavail * free.f_bsize - 2 * 4096))
    put(disk, "last", data)  # the entry just fits, what folds it does not
    disk.close()
    assert disk.branch().known().folded_seq == 0
    place.free()
    for n in range(4):
        put(disk, f"g{n}", b"%d" % n)
    disk.close()
    assert disk.branch().known().folded_seq > 0
    assert get(cold(disk, store), "last") == data


@pytest.mark.anyio
@pytest.mark.parametrize("size", [1000, 2 * MIB], ids=["entry", "pack"])
async def test_an_exec_whose_commit_finds_the_store_full(place: Small, tmp_path: Path, size: int) -> None:
    store = LocalStore(place.path / "store", fsync=False)
    async with connected(store, tmp_path / "cache", runtime=hasty()) as fo:
        disk = await fo.disks.create("ws")
        await disk.put_object("old", b"there before")
        place.fill()
        with pytest.raises(Unavailable, match=f"{store.url}.*No space left") as caught:
            await fo.exec(f"head -c {size} /dev/urandom > new; echo out; exit 3", disks={"w": disk})
        run: Run = caught.value.run  # type: ignore[attr-defined]
        assert (run.stdout, run.exit_code, run.commits["w"].seq) == ("out\n", 3, None)
        assert temporaries(store) == []
        assert (await fo.exec("cat old; ls", disks={"w": disk})).stdout == "there beforeold\n", "reading needs no space"
        place.free()
        again = await fo.exec(f"head -c {size} /dev/urandom > new; wc -c < new", disks={"w": disk})
        assert again.commits["w"].seq == 2
        assert len(await disk.get_object("new")) == size
    assert leftovers(tmp_path / "cache") == []


# -- without any rights: a limit on the size of files, and writes that fail ---------------------------------------

LIMITED = """
import asyncio, resource, sys
from fanout.config import Settings
from fanout.errors import FanoutError
from fanout.local import LocalFanout
from fanout.store.local import LocalStore

async def main(store, cache):
    made = LocalStore(store, fsync=False)
    async with LocalFanout(Settings(store="memory://", cache_dir=cache), store=made) as fo:
        disk = await fo.disks.create("ws")
        await disk.put_object("f/small", b"small")
        await disk.put_object("big", b"x" * (3 << 20))  # compresses to little
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        for work in (disk.put_object("huge", open("/dev/urandom", "rb").read(4 << 20)),
                     fo.exec("cat f/small", disks={"w": disk})):
            try:
                await work
            except FanoutError as error:
                print(error.code, error)
        run = await fo.exec("cat small; echo 1 > new", disks={"w": disk.mount(subdirectory="f")})
        print(run.stdout, run.commits["w"].seq, [o.key async for o in disk.list_objects()])

asyncio.run(main(*sys.argv[1:]))
"""


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", LIMITED, str(tmp_path / "store"), str(tmp_path / "cache")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    pack, view, rest = done.stdout.splitlines()
    assert pack.startswith("unavailable")
    assert "/pack/" in pack
    assert "File too large" in pack
    assert view.startswith("unavailable")
    assert "big" in view
    assert rest == "small 3 ['big', 'f/new', 'f/small']"
    assert os.listdir(tmp_path / "store/+tmp") == []
    assert leftovers(tmp_path / "cache") == []


@pytest.mark.anyio
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO], ids=errno.errorcode.get)
async def test_a_write_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    store = LocalStore(tmp_path / "store", fsync=False)
    async with connected(store, tmp_path / "cache", runtime=hasty()) as fo:
        disk = await fo.disks.create("ws")
        await disk.put_object("old", b"there before")
        with monkeypatch.context() as patch:
            hit = fail_writes_below(patch, tmp_path / "store", error)
            with pytest.raises(Unavailable, match=f"{store.url}.*/log/.*{os.strerror(error)}"):
                await disk.put_object("new", b"1")
            assert hit
            assert temporaries(store) == []
        with monkeypatch.context() as patch:
            hit = fail_writes_below(patch, tmp_path / "cache", error)
            with pytest.raises(Unavailable, match=r"cache|old"):
                await fo.exec("cat old", disks={"w": disk})
            assert hit
        await _works_again(disk, tmp_path)
        assert (await fo.exec("cat old", disks={"w": disk})).stdout == "there before"


async def _works_again(disk: Disk, tmp_path: Path) -> None:
    await until(lambda: not os.listdir(tmp_path / "cache/trash"))
    assert await disk.head_object("new") is None
    await disk.put_object("new", b"2")
    assert await disk.get_object("new") == b"2"
