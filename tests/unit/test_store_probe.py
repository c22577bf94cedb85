"""The probe refuses stores that break a promise, and says which store and which promise."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from fanout.errors import Denied, Exists, FanoutError, Invalid, Unavailable, Unknown
from fanout.runtime import Runtime, system
from fanout.store.base import ObjectMeta
from fanout.store.memory import MemoryStore
from fanout.store.probe import probe
from fanout.store.wrap import Fault, Faulty, Metered


class IgnoresCondition(MemoryStore):
    def create(self, key: str, data: bytes) -> None:
        self.put(key, data)


class CheckThenAct(MemoryStore):
    """Two winners: everybody looks before anybody writes."""

    def __init__(self) -> None:
        super().__init__()
        self._both = threading.Barrier(16)

    def create(self, key: str, data: bytes) -> None:
        there = self.head(key) is not None
        if b"racer" in data:
            self._both.wait()
        if there:
            raise Exists(key)
        self.put(key, data)


class LastOneStays(MemoryStore):
    """One winner, but a loser's bytes."""

    def create(self, key: str, data: bytes) -> None:
        try:
            super().create(key, data)
        except Exists:
            self.put(key, data)
            raise


class LateListing(MemoryStore):
    def list(self, prefix: str = "", start_after: str = "", limit: int | None = None) -> Iterator[ObjectMeta]:
        return iter(())


class NoRanges(MemoryStore):
    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return super().get(key)


class Forgets(MemoryStore):
    def head(self, key: str) -> ObjectMeta | None:
        return None


class AlwaysLost(MemoryStore):
    def create(self, key: str, data: bytes) -> None:
        raise Unknown(f"{self.url}: 500")


class NoRights(MemoryStore):
    def create(self, key: str, data: bytes) -> None:
        raise Denied(f"{self.url}: 403")


@pytest.mark.parametrize(
    ("store", "error", "why"),
    [
        (IgnoresCondition("bad"), Invalid, "16 of 16 racing"),
        (CheckThenAct(), Invalid, "racing create-only puts of one key won"),
        (LastOneStays("bad"), Invalid, "replaced"),
        (LateListing("bad"), Invalid, "listed"),
        (NoRanges("bad"), Invalid, "ranged get"),
        (Forgets("bad"), Invalid, "not there"),
        (AlwaysLost("bad"), Unavailable, "no create came through"),
        (NoRights("bad"), Denied, "403"),
        (Faulty(MemoryStore("bad"), Fault("unavailable", "create", times=99)), Unavailable, "injected"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, MemoryStore) else None,
)
def test_a_store_that_breaks_a_promise_is_refused(store: MemoryStore, error: type[FanoutError], why: str) -> None:
    with pytest.raises(error, match=why) as caught:
        probe(store, system)
    assert store.url in str(caught.value)


def test_a_refused_store_is_left_clean() -> None:
    store = IgnoresCondition()
    with pytest.raises(Invalid):
        probe(store, system)
    assert list(store.list()) == []


@pytest.mark.parametrize("kind", ["lost", "echo"])
def test_a_winner_whose_answer_was_lost_is_still_a_winner(kind: str) -> None:
    assert probe(Faulty(MemoryStore(), Fault(kind, "create")), system).create_only  # type: ignore[arg-type]


def test_a_race_in_which_nothing_was_stored_is_held_again() -> None:
    store = Faulty(MemoryStore(), Fault("refused", "create", times=16))
    assert probe(store, system).create_only
    assert list(store.list()) == []


def test_the_clock_offset_and_the_cost() -> None:
    store = Metered(MemoryStore(runtime=Runtime(now_ns=lambda: system.now_ns() + 5 * 10**9)))
    found = probe(store, system)
    assert 4_000 < found.clock_offset_ms < 6_000  # a loaded machine answers late
    assert store.usage().total <= 25
