"""Checkouts through the public interface, and commits that meet inside files and directories (CASE 20)."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from click.testing import CliRunner

from fanout.api import Disk, Fanout
from fanout.cli.root import cli
from fanout.config import Tuning
from fanout.disk import checkout
from fanout.disk.catalogue import Catalogue
from fanout.errors import Busy, Conflict, Invalid, LeaseLost, NotFound
from fanout.format.lock import Acquire
from fanout.local_disk import LocalDisk
from fanout.model import Run, Started
from fanout.runtime import system
from fanout.store.local import LocalStore
from fanout.store.memory import MemoryStore
from tests.support.connections import connected, remote, until

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=["memory", "remote", pytest.param("s3", marks=pytest.mark.s3)])
async def fo(
    request: pytest.FixtureRequest, anyio_backend: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Fanout]:
    top = tmp_path_factory.mktemp("locks")
    if request.param == "remote":
        async with remote(request.getfixturevalue("remote_server")) as fo:
            yield fo
        return
    store: Any = MemoryStore()
    if request.param == "s3":
        from fanout.store.s3 import S3Store

        endpoint, bucket = request.getfixturevalue("s3_endpoint"), request.getfixturevalue("s3_bucket")
        store = S3Store(bucket, f"t/{uuid.uuid4().hex}", endpoint=endpoint)
    async with connected(store, top / "cache") as fo:
        yield fo
    store.close()


@pytest.fixture
async def disk(fo: Fanout) -> Disk:
    disk = await fo.disks.create(f"ws-{uuid.uuid4().hex[:12]}")
    await disk.put_object("src/a", b"a")
    return disk


class Holder:
    """An exec that holds a checkout until its caller is cancelled, at the end of the context."""

    def __init__(self, fo: Fanout, disk: Disk, *paths: str) -> None:
        self._fo = fo
        self._mount = disk.mount(checkout=paths)
        self.id = ""

    async def __aenter__(self) -> Holder:
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        self._started = anyio.Event()
        self._group.start_soon(self._hold)
        with anyio.fail_after(60):
            await self._started.wait()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._group.cancel_scope.cancel()
        await self._group.__aexit__(None, None, None)

    async def _hold(self) -> None:
        async for event in self._fo.stream("sleep 300", disks={"w": self._mount}):
            if isinstance(event, Started):
                self.id = event.id
                self._started.set()


# -- checkouts ---------------------------------------------------------------------------------------------------------


async def test_held_from_before_the_command_to_its_commit(fo: Fanout, disk: Disk) -> None:
    async with Holder(fo, disk, "src/", "/new") as holder:
        (lock,) = await disk.locks()
        assert (lock.paths, lock.exec_id, lock.seq) == (("/new", "/src"), holder.id, 2)
        assert timedelta(0) < lock.expires - datetime.now(UTC) <= timedelta(seconds=checkout.LEASE_S)
        for mode in ({}, {"conditional": True}):
            run = await fo.exec("echo x > src/a; echo y > other", disks={"w": disk.mount(**mode)})
            assert run.ok
            assert run.conflict is not None
            assert run.conflict.paths == ("src/a",)
            assert await disk.get_object("src/a") == b"a"
            assert await disk.head_object("other") is None, "nothing of the commit lands"
            rescue = await fo.disks.get(f"{disk.name}@{run.conflict.rescue_branch}")
            assert await rescue.get_object("other") == b"y\n"
        with pytest.raises(Conflict, match="new"):
            await disk.put_object("new", b"")
        assert (await fo.exec("echo z > free", disks={"w": disk})).conflict is None
    assert await disk.locks() == [], "cancelled, it gives them back"
    await disk.put_object("new", b"")


async def test_its_own_commit_lands_and_lets_go(fo: Fanout, disk: Disk) -> None:
    run = await fo.exec("echo mine >> src/a; echo new > src/b", disks={"w": disk.mount(checkout=["src"])})
    assert run.conflict is None
    assert run.commits["w"].seq == 3, "2 took the lock, 3 is the commit and the release"
    assert run.timing.lock_ms > 0
    assert await disk.locks() == []
    for command in ("true", "exit 3", "kill -9 $$"):
        await fo.exec(command, disks={"w": disk.mount(checkout=["src"])})
        assert await disk.locks() == []
    never = await fo.exec("echo no > src/a", disks={"w": disk.mount(checkout=["src"])}, commit="never")
    assert never.commits["w"].seq is None
    assert await disk.locks() == []


async def test_log_hides_what_only_locks(fo: Fanout, disk: Disk) -> None:
    await fo.exec("true", disks={"w": disk.mount(checkout=["src"])})
    run = await fo.exec("echo x > src/a", disks={"w": disk.mount(checkout=["src"])})
    assert [(c.seq, c.exec_id) async for c in disk.log()] == [(5, run.id), (1, None)]


async def test_busy_names_the_holder(fo: Fanout, disk: Disk) -> None:
    async with Holder(fo, disk, "src") as holder:
        for path, queue_ms in (("src/a", 0), ("/", 50), ("src", 1)):
            with pytest.raises(Busy, match=f"checked out by {holder.id}"):
                await fo.exec("true", disks={"w": disk.mount(checkout=[path], queue_ms=queue_ms)})
        with pytest.raises(Busy, match=holder.id):
            await fo.exec("true", disks={"w": disk.mount(checkout=["src"])}, timeout_s=0.1)
        run = await fo.exec("echo > b/f", disks={"w": disk.mount(checkout=["b"], queue_ms=0)})
        assert run.conflict is None
        assert len(await disk.locks()) == 1


async def test_an_exec_that_waits_for_a_lock_holds_no_commit_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commits wait a little for those of execs that are under way: never for one that waits for a lock itself.

    Embedded only: it looks at the branch.
    """
    async with connected(MemoryStore(), tmp_path) as fo:
        disk = await fo.disks.create("ws")
        assert isinstance(disk, LocalDisk)
        branch = disk.point.branch
        announced: list[float] = []
        writing = branch.writing
        monkeypatch.setattr(branch, "writing", lambda since_s: (announced.append(since_s), writing(since_s))[1])
        async with Holder(fo, disk, "src"), anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(partial(fo.exec, "true", disks={"w": disk.mount(checkout=["src"])}))
            await until(lambda: len(branch.line._waiting) == 3)
            assert announced == []
            assert (await fo.exec("echo > free", disks={"w": disk})).conflict is None
            assert len(announced) == 1
            group.cancel_scope.cancel()


async def test_a_waiting_exec_that_is_cancelled_leaves_nothing(fo: Fanout, disk: Disk) -> None:
    async with Holder(fo, disk, "src"):
        with anyio.move_on_after(0.3) as scope:
            await fo.exec("true", disks={"w": disk.mount(checkout=["src"])})
        assert scope.cancelled_caught
        assert len(await disk.locks()) == 1
    assert await disk.locks() == []


async def test_a_broken_lock_fences_its_holder(fo: Fanout, disk: Disk) -> None:
    async def break_it() -> None:
        while not (locks := await disk.locks()):
            await anyio.sleep(0.01)
        await disk.break_lock(locks[0])
        await disk.put_object("src/a", b"theirs")

    errors: list[LeaseLost] = []

    async def work() -> None:
        try:
            await fo.exec("echo mine > src/a; echo mine > extra; sleep 1", disks={"w": mount})
        except LeaseLost as lost:
            errors.append(lost)

    mount = disk.mount(checkout=["src"], conditional=True)
    async with anyio.create_task_group() as group:
        group.start_soon(break_it)
        group.start_soon(work)
    (error,) = errors
    run: Run = error.run  # type: ignore[attr-defined]
    assert f"rescue/{run.id}" in str(error)
    assert run.ok
    assert run.commits["w"].seq is None
    assert await disk.get_object("src/a") == b"theirs"
    assert await disk.head_object("extra") is None
    rescue = await fo.disks.get(f"{disk.name}@rescue/{run.id}")
    assert (await rescue.get_object("src/a"), await rescue.get_object("extra")) == (b"mine\n", b"mine\n")


async def test_break_lock_takes_ids_and_knows_what_is_there(fo: Fanout, disk: Disk) -> None:
    with pytest.raises(NotFound, match="nothing"):
        await disk.break_lock("nothing")
    async with Holder(fo, disk, "src"):
        (lock,) = await disk.locks()
        await disk.break_lock(lock.id)
        assert await disk.locks() == []
        with pytest.raises(NotFound):
            await disk.break_lock(lock)
        await disk.put_object("src/a", b"free")


@pytest.mark.parametrize("path", ["../x", "a/../../x", "a//b", "", "a\0b"])
async def test_a_checkout_that_leaves_the_disk_is_refused(fo: Fanout, disk: Disk, path: str) -> None:
    if not path:
        assert disk.mount(checkout=[path]).checkout == ("",)  # the root
        return
    with pytest.raises(Invalid, match="checkout"):
        disk.mount(checkout=[path])


async def test_bad_checkouts(fo: Fanout, disk: Disk) -> None:
    with pytest.raises(Invalid, match="checkout"):
        disk.mount(checkout="src")
    with pytest.raises(Invalid, match="read-only"):
        disk.mount(checkout=["src"], read_only=True)
    for bad in (-1, float("nan"), True):
        with pytest.raises(Invalid, match="queue_ms"):
            disk.mount(checkout=["src"], queue_ms=bad)
    with pytest.raises(Invalid, match="queue_ms"):
        disk.mount(queue_ms=5)
    for at in (None, 1):
        with pytest.raises(Invalid, match=r"checkout of 'b'.*'a' has one"):
            await fo.exec("true", disks={n: disk.mount(checkout=[n], at=at) for n in ("a", "b")})
    assert await disk.locks() == []


async def test_a_branch_is_free_of_its_parents_locks(fo: Fanout, disk: Disk) -> None:
    async with Holder(fo, disk, "src"):
        side = await disk.branch("side")
        assert await side.locks() == []
        await side.put_object("src/a", b"side")
        with pytest.raises(Conflict, match="src/a"):
            await disk.merge(side, on_conflict="theirs")
    await disk.merge(side)
    assert await disk.get_object("src/a") == b"side"


async def test_several_disks_and_crossed_paths(fo: Fanout, disk: Disk) -> None:
    other = await fo.disks.create(f"other-{uuid.uuid4().hex[:8]}")

    async def run(n: int) -> None:
        one, two = (disk, other) if n % 2 else (other, disk)
        mounts = {"x": one.mount(checkout=["p", "q"][:: (-1) ** n]), "y": two.mount(checkout=["q", "p"])}
        done = await fo.exec(
            "for d in x y; do echo $(($(cat $d/p 2>/dev/null || echo 0) + 1)) > $d/p; done", disks=mounts
        )
        assert done.conflict is None

    async with anyio.create_task_group() as group:
        for n in range(8):
            group.start_soon(run, n)
    assert (await disk.get_object("p"), await other.get_object("p")) == (b"8\n", b"8\n")
    assert await disk.locks() == await other.locks() == []


async def count(fo: Fanout, disk: Disk, times: int) -> None:
    command = "echo $(($(cat n 2>/dev/null || echo 0) + 1)) > n; echo {} >> log"
    runs = await fo.map(command, range(times), disks={"w": disk.mount(checkout=["n", "log"])}, max_in_flight=times)
    assert [run.conflict for run in runs] == [None] * times
    assert await disk.get_object("n") == b"%d\n" % times
    lines = (await disk.get_object("log")).split()
    assert sorted(map(int, lines)) == list(range(times))
    assert await disk.locks() == []


async def test_thirty_execs_count_under_one_lock(fo: Fanout, disk: Disk) -> None:
    await count(fo, disk, 30)


@pytest.mark.soak
async def test_two_hundred_execs_count_under_one_lock(fo: Fanout, disk: Disk) -> None:
    await count(fo, disk, 200)


def test_cli_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"file://{tmp_path / 'store'}"
    monkeypatch.setenv("FANOUT_STORE", url)
    monkeypatch.setenv("FANOUT_CACHE_DIR", str(tmp_path / "cache"))
    store = LocalStore(tmp_path / "store", fsync=False)
    branch = Catalogue(store, system, Tuning()).create("ws").branch()
    branch.take(Acquire("aaaa", "exec-1", (b"src", b"two words"), system.now_ns() + 10**12))
    runner = CliRunner()
    shown = runner.invoke(cli, ["locks", "ws"])
    assert (shown.exit_code, "aaaa" in shown.output, "exec-1" in shown.output) == (0, True, True), shown.output
    (lock,) = json.loads(runner.invoke(cli, ["locks", "ws", "--json"]).output)
    assert lock["id"] == "aaaa"
    assert lock["paths"] == ["/src", "/two words"]
    broken = runner.invoke(cli, ["locks", "ws", "--break", "aaaa"])
    assert (broken.exit_code, "aaaa" in broken.output) == (0, False), broken.output
    missing = runner.invoke(cli, ["locks", "ws", "--break", "aaaa"])
    assert missing.exit_code != 0


# -- commits that meet, as commands ------------------------------------------------------------------------------------


async def each(fo: Fanout, mount: Any, *commands: str) -> list[Run]:
    return [await fo.exec(command, disks={"w": mount}) for command in commands]


async def contents(disk: Disk) -> dict[str, bytes]:
    return {o.key: await disk.get_object(o.key) async for o in disk.list_objects()}


async def test_case_20(fo: Fanout, disk: Disk) -> None:
    await disk.put_object("f", b"." * 30)
    await disk.put_object("log", b"start\n")
    mount = disk.mount(conditional=True, at=3)
    write = "printf {} | dd of=f bs=1 seek={} conv=notrunc status=none; echo {} >> log".format
    runs = await each(fo, mount, write("a" * 10, 0, "a"), write("b" * 10, 10, "b"), write("c" * 10, 15, "c"))
    assert [run.conflict for run in runs] == [None] * 3
    assert await disk.get_object("f") == b"a" * 10 + b"b" * 5 + b"c" * 10 + b"." * 5, "overlap: the later commit"
    assert await disk.get_object("log") == b"start\na\nb\nc\n"


async def test_case_20_large_and_sparse(fo: Fanout, disk: Disk) -> None:
    """Several extents and a hole of 6 GiB: quick, and stored small."""
    await fo.exec(
        "head -c 9M /dev/urandom > big; printf head > sparse; truncate -s 6G sparse; printf tail >> sparse",
        disks={"w": disk},
    )
    before = await disk.get_object("big")
    mount = disk.mount(conditional=True, at=2)
    poke = "printf {0} | dd of=big bs=1 seek={1} conv=notrunc status=none; printf {0} | dd of=sparse bs=1 seek={2}"
    poke += " conv=notrunc status=none"
    runs = await each(
        fo, mount, poke.format("AAAA", 100, 1 << 30), poke.format("BBBB", 8 << 20, 5 << 30), "printf X >> sparse"
    )
    assert [run.conflict for run in runs] == [None] * 3
    expected = bytearray(before)
    expected[100:104], expected[8 << 20 : (8 << 20) + 4] = b"AAAA", b"BBBB"
    assert await disk.get_object("big") == bytes(expected)
    read = "dd if=sparse bs=4 count=1 status=none skip=$((({})/4));"
    run = await fo.exec(
        "".join(read.format(at) for at in (0, 1 << 30, 5 << 30, 6 << 30)) + "tail -c 1 sparse; stat -c ' %s' sparse",
        disks={"w": disk},
    )
    assert run.stdout == f"headAAAABBBBtailX {(6 << 30) + 5}\n"


SITUATIONS = {
    # first, second: what `conditional` leaves (None: a conflict there too); `shared` always conflicts
    ("rm f", "echo 2 > f"): {"f": b"2\n", "d/g": b"g"},
    ("echo 1 > f", "rm f"): {"d/g": b"g"},
    ("rm f; mkdir f; echo 1 > f/x", "echo 2 > f"): None,
    ("echo 1 > f", "rm f; mkdir f; echo 2 > f/x"): {"f/x": b"2\n", "d/g": b"g"},
    ("mv d e", "echo 2 > d/g"): {"f": b"f", "e/g": b"g", "d/g": b"2\n"},
    ("echo 1 > d/g", "mv d e"): {"f": b"f", "e/g": b"g"},
    ("truncate -s 0 f", "printf 2 >> f"): {"f": b"2", "d/g": b"g"},
    ("printf 1 >> f", "truncate -s 0 f"): {"f": b"", "d/g": b"g"},
}


@pytest.mark.parametrize(("first", "second"), SITUATIONS)
async def test_pairs_of_operations(fo: Fanout, first: str, second: str) -> None:
    for mode in ("shared", "conditional"):
        disk = await fo.disks.create(f"pair-{uuid.uuid4().hex[:12]}")
        await disk.put_object("f", b"f")
        await disk.put_object("d/g", b"g")
        mount = disk.mount(conditional=mode == "conditional", at=2)
        one, two = await each(fo, mount, first, second)
        assert one.conflict is None
        after_one = (await fo.exec("find . -type f | sort", disks={"w": disk.mount(read_only=True, at=3)})).stdout
        expected = SITUATIONS[first, second] if mode == "conditional" else None
        if expected is None:
            assert two.conflict is not None
            names = "".join(f"./{key}\n" for key in await contents(disk))
            assert names == after_one, "the first commit stands as it was"
            rescue = await fo.disks.get(f"{disk.name}@{two.conflict.rescue_branch}")
            seen = {o.key async for o in rescue.list_objects()}
            wanted = await fo.exec(f"{second}; find . -type f", disks={"w": disk.mount(at=2)}, commit="never")
            assert {f"./{key}" for key in seen} == set(wanted.stdout.split())
        else:
            assert two.conflict is None
            assert await contents(disk) == expected
