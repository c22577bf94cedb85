"""The queue of commits: everyone is committed once, whoever leads, and nobody waits for one who is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from fanout.config import Tuning
from fanout.disk.group import Group
from fanout.disk.merge import Policy
from fanout.disk.proposal import Proposal, Waiting
from fanout.runtime import system


def waiting() -> Waiting:
    return Waiting(Proposal((), Policy.STRICT), 0, {})


@pytest.fixture
def group() -> Group:
    return Group(system, Tuning(group_commits=5))


def in_threads(count: int, call: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=call, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "somebody waits for ever"


def test_each_is_committed_once(group: Group) -> None:
    committed: list[Waiting] = []
    sizes: list[int] = []

    def commit(batch: list[Waiting]) -> None:
        sizes.append(len(batch))
        time.sleep(0.0005)
        committed.extend(batch)

    def work(number: int) -> None:
        for _ in range(20):
            mine = waiting()
            group.land(mine, commit)
            assert mine.done

    in_threads(24, work)
    assert len(committed) == len({id(each) for each in committed}) == 24 * 20
    assert max(sizes) <= 5
    assert len(sizes) < 24 * 20, "those that waited went together"


def test_a_commit_that_fails_leaves_nobody_waiting(group: Group) -> None:
    failed: list[int] = []

    def commit(batch: list[Waiting]) -> None:
        time.sleep(0.001)
        raise OSError("the store is gone")

    def work(number: int) -> None:
        mine = waiting()
        try:
            group.land(mine, commit)
        except OSError:
            failed.append(number)
        assert mine.done

    in_threads(12, work)
    assert failed, "who led is told"


def until(condition: Callable[[], bool]) -> None:
    for _ in range(30_000):
        if condition():
            return
        time.sleep(0.001)
    raise AssertionError("it did not come to that")


@pytest.mark.parametrize("leads", [True, False])
def test_one_who_is_interrupted_is_not_waited_for(group: Group, leads: bool) -> None:
    """Ctrl-C while waiting, just after or long before it was made the leader."""
    started, release = threading.Event(), threading.Event()
    committed: list[Waiting] = []

    def commit(batch: list[Waiting]) -> None:
        started.set()
        assert release.wait(30)
        committed.extend(batch)

    first, second, third = waiting(), waiting(), waiting()
    second.turn = _Interrupted(second, started if not leads else None)  # type: ignore[assignment]
    caught: list[BaseException] = []

    def interrupted() -> None:
        try:
            group.land(second, commit)
        except KeyboardInterrupt as error:
            caught.append(error)

    threads = [threading.Thread(target=group.land, args=(first, commit))]
    threads[0].start()
    assert started.wait(30)
    for target, there in ((interrupted, second), (lambda: group.land(third, commit), third)):
        threads.append(threading.Thread(target=target))
        threads[-1].start()
        until(lambda there=there: there in group._queue or bool(caught))  # type: ignore[misc]
    until(lambda: third in group._queue)
    release.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert len(caught) == 1
    assert first in committed
    assert third in committed
    assert second not in committed


class _Interrupted:
    """A turn whose waiter is interrupted: at once (`at` is set), or when it has been made the leader."""

    def __init__(self, mine: Waiting, at: threading.Event | None) -> None:
        self._mine = mine
        self._at = at
        self._made = threading.Event()

    def acquire(self) -> bool:
        assert (self._at or self._made).wait(30)
        raise KeyboardInterrupt

    def release(self) -> None:
        assert self._mine.leads
        self._made.set()
