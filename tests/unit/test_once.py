"""Idempotency keys: concurrent calls join, later ones get the first result, failures are forgotten."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import pytest

from fanout.errors import Invalid, Unknown
from fanout.run.once import Once

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def returning(value: str, calls: list[str]) -> Callable[[], Awaitable[str]]:
    async def call() -> str:
        calls.append(value)
        await anyio.sleep(0)
        return value

    return call


async def test_concurrent_calls_join_and_later_ones_get_the_result() -> None:
    once: Once[str] = Once()
    calls: list[str] = []
    got: list[str] = []

    async def one() -> None:
        got.append(await once.run("k", "request", returning("v", calls)))

    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(one)
    assert await once.run("k", "request", returning("other", calls)) == "v"
    assert (got, calls) == (["v"] * 5, ["v"])


async def test_another_request_under_the_same_key_is_refused() -> None:
    once: Once[str] = Once()
    await once.run("k", "one", returning("v", []))
    with pytest.raises(Invalid, match=r"idempotency_key is 'k'.*different call"):
        await once.run("k", "two", returning("w", []))


async def test_a_failure_is_forgotten_and_who_waited_runs_himself() -> None:
    once: Once[str] = Once()
    calls: list[str] = []
    entered = anyio.Event()

    async def failing() -> str:
        calls.append("failing")
        entered.set()
        await anyio.sleep(0.01)
        raise RuntimeError("no")

    async def lead() -> None:
        with pytest.raises(RuntimeError):
            await once.run("k", 1, failing)

    async with anyio.create_task_group() as group:
        group.start_soon(lead)
        await entered.wait()
        assert await once.run("k", 1, returning("v", calls)) == "v"
    assert calls == ["failing", "v"]


async def test_a_cancelled_leader_hands_over() -> None:
    once: Once[str] = Once()
    entered = anyio.Event()

    async def endless() -> str:
        entered.set()
        await anyio.sleep_forever()
        raise AssertionError

    async with anyio.create_task_group() as group:
        with anyio.CancelScope() as scope:

            async def cancel_soon() -> None:
                await entered.wait()
                scope.cancel()

            group.start_soon(cancel_soon)
            await once.run("k", 1, endless)
    assert scope.cancelled_caught
    assert await once.run("k", 1, returning("v", [])) == "v"


async def test_what_was_kept_is_not_forgotten_with_its_caller() -> None:
    once: Once[str] = Once(size_of=lambda kept: 1)
    entered = anyio.Event()

    async def landing() -> str:
        once.keep("k", "landed")
        entered.set()
        await anyio.sleep_forever()
        raise AssertionError

    async with anyio.create_task_group() as group:
        group.start_soon(once.run, "k", 1, landing)
        await entered.wait()
        group.cancel_scope.cancel()
    assert await once.run("k", 1, returning("again", [])) == "landed"
    assert once._bytes == 1
    once.keep("k", "later")
    assert await once.run("k", 1, returning("again", [])) == "landed", "it was over"


async def test_a_failure_that_was_kept_is_raised_again() -> None:
    once: Once[str] = Once()

    async def ran() -> str:
        error = Unknown("perhaps")
        once.keep("k", error)
        raise error

    for _ in range(3):
        with pytest.raises(Unknown, match="perhaps"):
            await once.run("k", 1, ran)


async def test_old_results_go_calls_under_way_stay() -> None:
    once: Once[str] = Once(max_keys=2, max_bytes=10, size_of=len)
    calls: list[str] = []
    release, entered = anyio.Event(), anyio.Event()

    async def slow() -> str:
        entered.set()
        await release.wait()
        return "slow"

    async def lead() -> None:
        await once.run("slow", 0, slow)

    async with anyio.create_task_group() as group:
        group.start_soon(lead)
        await entered.wait()
        for key in "abc":
            await once.run(key, 0, returning(key, calls))
        assert set(once._slots) == {"slow", "c"}
        release.set()
    await once.run("big", 0, returning("x" * 11, calls))
    assert not once._slots
    assert once._bytes == 0
