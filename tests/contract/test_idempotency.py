"""Idempotency keys across connections, as across processes and hosts: run once, whoever asks and whoever dies."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from fanout.api import Disk, Fanout
from fanout.disk import calls
from fanout.disk.calls import Calls, Claim, call_digest, old_calls
from fanout.errors import FanoutError, Invalid, LeaseLost, NotFound, Unavailable, Unknown
from fanout.format import layout
from fanout.format.call import ClaimRecord, EndRecord
from fanout.local import LocalFanout
from fanout.model import Run
from fanout.runtime import system
from fanout.store.base import Store
from fanout.store.memory import MemoryStore
from fanout.store.wrap import Metered
from tests.support.connections import connected, unprobed

pytestmark = pytest.mark.anyio
ONCE = "echo x >> log"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def store() -> Metered:
    return Metered(MemoryStore())


@pytest.fixture
async def two(store: Metered, tmp_path: Path) -> AsyncIterator[tuple[LocalFanout, LocalFanout]]:
    """Two connections on one store, which share nothing else."""
    async with (
        connected(store, tmp_path / "1", engine="bubblewrap") as first,
        connected(store, tmp_path / "2", engine="bubblewrap") as second,
    ):
        await unprobed(first, store)
        assert isinstance(first, LocalFanout)
        assert isinstance(second, LocalFanout)
        yield first, second


async def run(fo: Fanout, key: str | None, command: str = ONCE, **options: Any) -> Run:
    disk = await fo.disks.get("ws")
    mount = disk.mount(conditional=True)
    return await fo.exec(command, disks={"w": mount}, idempotency_key=key, **options)


async def log(fo: Fanout) -> str:
    disk: Disk = await fo.disks.get("ws")
    try:
        return (await disk.get_object("log")).decode()
    except NotFound:
        return ""


def impatient(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.2) -> None:
    """Processes are taken for dead soon."""
    monkeypatch.setattr(calls, "LEASE_S", seconds)


async def test_another_connection_gets_the_first_result(two: tuple[LocalFanout, LocalFanout]) -> None:
    first = await run(two[0], "k", "echo out; printf '\\377' >&2; echo x >> log; exit 3")
    again = await run(two[1], "k", "echo out; printf '\\377' >&2; echo x >> log; exit 3")
    assert again == first
    assert (again.exit_code, again.stderr_bytes, again.commits["w"].seq) == (3, b"\xff", first.commits["w"].seq)
    assert await log(two[0]) == "x\n"


async def test_a_call_under_way_is_joined(two: tuple[LocalFanout, LocalFanout]) -> None:
    runs: list[Run] = []

    async def one(fo: Fanout) -> None:
        runs.append(await run(fo, "k", f"sleep 0.5; {ONCE}"))

    async with anyio.create_task_group() as group:
        for fo in (*two, *two):
            group.start_soon(one, fo)
    assert len({each.id for each in runs}) == 1
    assert await log(two[0]) == "x\n"


async def test_other_keys_are_other_calls(two: tuple[LocalFanout, LocalFanout]) -> None:
    first = await run(two[0], "a")
    assert (await run(two[1], "b")).id != first.id
    mine, other = two[0].acting_as("x", "1"), two[1].acting_as("y", "2")
    assert (await run(mine, "a")).id != (await run(other, "a")).id
    assert await log(two[0]) == "x\n" * 4


@pytest.mark.parametrize(
    "change", [{"command": "echo y >> log"}, {"env": {"A": "2"}}, {"stdin": b"2"}, {"timeout_s": 9.0}, {"cwd": "/mnt"}]
)
async def test_the_same_key_for_something_else(two: tuple[LocalFanout, LocalFanout], change: dict[str, Any]) -> None:
    options = {"command": ONCE, "env": {"A": "1", "B": "1"}, "stdin": b"1", "timeout_s": 10.0, "cwd": "/mnt/w"}
    await run(two[0], "k", **options)
    same = {**options, "env": {"B": "1", "A": "1"}}
    await run(two[1], "k", **same)
    with pytest.raises(Invalid, match="idempotency_key"):
        await run(two[1], "k", **{**options, **change})
    assert await log(two[0]) == "x\n"


async def test_what_never_ran_may_be_tried_again(two: tuple[LocalFanout, LocalFanout]) -> None:
    with pytest.raises(Invalid):
        await run(two[0], "k", "echo x >> ../log", cwd="/mnt/w/missing")
    disk = await two[0].disks.get("ws")
    await disk.put_object("missing/here", b"")
    assert (await run(two[1], "k", "echo x >> ../log", cwd="/mnt/w/missing")).ok


async def test_a_cancelled_call_may_be_tried_again(two: tuple[LocalFanout, LocalFanout]) -> None:
    with anyio.move_on_after(0.5):
        await run(two[0], "k", f"{ONCE}; sleep 1; [ -e /nothing ]")
    assert await log(two[0]) == ""
    await run(two[1], "k", f"{ONCE}; sleep 1; [ -e /nothing ]")
    assert await log(two[0]) == "x\n"


async def test_conflicts_are_kept_too(two: tuple[LocalFanout, LocalFanout]) -> None:
    disk = await two[0].disks.get("ws")
    shared = {"w": disk.mount()}

    async def slow() -> None:
        runs.append(await two[0].exec("echo slow > log; sleep 1", disks=shared, idempotency_key="k"))

    runs: list[Run] = []
    async with anyio.create_task_group() as group:
        group.start_soon(slow)
        await anyio.sleep(0.4)
        await disk.put_object("log", b"other")
    assert runs[0].conflict is not None
    again = await two[1].exec("echo slow > log; sleep 1", disks=shared, idempotency_key="k")
    assert again == runs[0]
    assert [name async for name in disk.branches()] == ["main", f"rescue/{runs[0].id}"]


# -- processes that die --------------------------------------------------------------------------------------------


def claimed(fo: LocalFanout, key: str, asked: bytes) -> Claim:
    """Claim a call and do nothing more, as a process that dies there."""
    record = ClaimRecord(asked, "ex-dead", (), system.now_ns())
    claim = fo._calls.enter(call_digest("", key), record)
    assert isinstance(claim, Claim)
    return claim


async def test_died_before_it_ran(two: tuple[LocalFanout, LocalFanout], monkeypatch: pytest.MonkeyPatch) -> None:
    impatient(monkeypatch)
    seen: list[bytes] = []
    real = Calls.enter

    def spy(self: Calls, key: str, record: ClaimRecord, *more: Any) -> Any:
        seen.append(record.asked)
        return real(self, key, record, *more)

    monkeypatch.setattr(Calls, "enter", spy)
    await run(two[0], "learn what is asked")
    claimed(two[0], "k", seen[0])
    assert (await run(two[1], "k")).ok
    assert await log(two[0]) == "x\n" * 2


async def test_died_after_its_commit(two: tuple[LocalFanout, LocalFanout], monkeypatch: pytest.MonkeyPatch) -> None:
    impatient(monkeypatch)

    def dies(claim: Claim, end: EndRecord) -> None:
        raise Unavailable("gone")

    monkeypatch.setattr(two[0]._calls, "finish", dies)
    first = await run(two[0], "k")
    for _ in range(2):
        with pytest.raises(Unknown, match=f"commit {first.commits['w'].seq} of 'main', exec {first.id}"):
            await run(two[1], "k")
    assert await log(two[0]) == "x\n"


async def test_only_stalled_while_its_command_ran(
    two: tuple[LocalFanout, LocalFanout], monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient(monkeypatch)
    monkeypatch.setattr(two[0]._calls, "keep_alive", lambda claim: lambda: None)
    failures: list[FanoutError] = []

    async def stalled() -> None:
        try:
            await run(two[0], "k", f"{ONCE}; sleep 2")
        except LeaseLost as error:
            failures.append(error)

    async with anyio.create_task_group() as group:
        group.start_soon(stalled)
        await anyio.sleep(0.5)
        taken = await run(two[1], "k", f"{ONCE}; sleep 2")
    assert taken.ok
    assert len(failures) == 1
    assert await log(two[0]) == "x\n"
    assert (await run(two[1], "k", f"{ONCE}; sleep 2")) == taken


async def test_only_stalled_before_it_held_its_locks(
    two: tuple[LocalFanout, LocalFanout], monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient(monkeypatch)
    monkeypatch.setattr(two[0]._calls, "keep_alive", lambda claim: lambda: None)
    await run(two[0], None, "true")  # there is an executor
    go_on, real = anyio.Event(), two[0]._executor.run

    async def waits(*arguments: Any) -> Run:
        await go_on.wait()
        return await real(*arguments)

    monkeypatch.setattr(two[0]._executor, "run", waits)
    failures: list[FanoutError] = []

    async def stalled() -> None:
        try:
            await run(two[0], "k")
        except LeaseLost as error:
            failures.append(error)

    async with anyio.create_task_group() as group:
        group.start_soon(stalled)
        await anyio.sleep(0.2)
        assert (await run(two[1], "k")).ok
        go_on.set()
    assert "taken over" in str(failures[0])
    assert await log(two[0]) == "x\n"


# -- bounds --------------------------------------------------------------------------------------------------------


async def test_without_a_key_nothing_is_asked(store: Metered, two: tuple[LocalFanout, LocalFanout]) -> None:
    await run(two[0], None)
    before = store.usage()
    await run(two[0], None)
    plain = (store.usage() - before).requests
    assert plain["create"] == 1
    before = store.usage()
    await run(two[0], "auto-0123456789abcdef")
    assert (store.usage() - before).requests == plain
    assert not list(store.list(layout.CALLS))
    before = store.usage()
    await run(two[0], str(uuid.uuid4()))
    with_key = (store.usage() - before).requests
    assert with_key["create"] == plain["create"] + 3  # a claim, a lock, what came of it
    assert with_key["head"] == 1


async def test_a_long_outcome_is_cut(two: tuple[LocalFanout, LocalFanout], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fanout.local_calls.MAX_OUTCOME_BYTES", 10_000)
    monkeypatch.setattr("fanout.local_calls._KEPT_STREAM_BYTES", 100)
    command = "head -c 20000 /dev/zero | tr '\\0' a"
    first = await run(two[0], "k", command)
    assert len(first.stdout) == 20_000
    again = await run(two[1], "k", command)
    assert (again.id, len(again.stdout), again.stdout_truncated, again.stdout_total) == (first.id, 100, True, 20_000)


async def test_old_calls_are_forgotten(
    store: Store, two: tuple[LocalFanout, LocalFanout], monkeypatch: pytest.MonkeyPatch
) -> None:
    await run(two[0], "k")
    day_ns = int(calls.KEEP_S * 1e9)
    assert not old_calls(store, system.now_ns() + day_ns - 10**10)
    assert len(old_calls(store, system.now_ns() + day_ns + 10**10)) == 2
    monkeypatch.setattr(calls, "KEEP_S", 0.0)
    disk = await two[0].disks.get("ws")
    await anyio.sleep(0.01)
    await disk.gc(dry_run=True)
    assert list(store.list(layout.CALLS))
    await disk.gc()
    assert not list(store.list(layout.CALLS))
    assert (await run(two[1], "k")).ok
    assert await log(two[0]) == "x\n" * 2
