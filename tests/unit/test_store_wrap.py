"""The wrappers: what is tried again, what waits, what is counted, what goes wrong on purpose."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fanout.errors import Exists, FanoutError, Invalid, NotFound, Unavailable, Unknown
from fanout.runtime import Runtime, seeded
from fanout.store.base import ObjectMeta
from fanout.store.memory import MemoryStore
from fanout.store.wrap import Fault, FaultKind, Faulty, Limited, Metered, Retrying, Usage


class Sleepless(Runtime):
    """Notes how long it was asked to sleep; `uniform` gives the upper end."""

    def __init__(self) -> None:
        self.slept: list[float] = []
        super().__init__(sleep=self.slept.append, uniform=lambda low, high: high)


def retrying(*faults: Fault, attempts: int = 4) -> tuple[Retrying, Faulty, Sleepless]:
    runtime = Sleepless()
    faulty = Faulty(MemoryStore(), *faults, runtime=runtime)
    return Retrying(faulty, runtime, attempts=attempts, base_s=1, cap_s=5), faulty, runtime


# Retrying


def test_idempotent_requests_are_tried_again() -> None:
    store, faulty, runtime = retrying(*[
        Fault("unavailable", verb, times=3) for verb in ("put", "get", "head", "list", "delete")
    ])  # fmt: skip
    store.put("k", b"x")
    assert store.get("k") == b"x"
    assert store.head("k") is not None
    assert [meta.key for meta in store.list()] == ["k"]
    store.delete(["k"])
    assert len(faulty.fired) == 15
    assert runtime.slept == [2, 4, 5] * 5


def test_a_create_goes_through_once() -> None:
    for kind, raised in (("unavailable", Unavailable), ("refused", Unknown), ("lost", Unknown), ("echo", Exists)):
        store, faulty, runtime = retrying(Fault(kind))  # type: ignore[arg-type]
        with pytest.raises(raised):
            store.create("k", b"x")
        assert len(faulty.fired) == 1
        assert runtime.slept == []


def test_giving_up_is_bounded_and_says_so() -> None:
    store, faulty, runtime = retrying(Fault("unavailable", times=1000))
    with pytest.raises(Unavailable, match=r"memory://.*gave up after 4 tries"):
        store.get("k")
    assert len(faulty.fired) == 4
    assert len(runtime.slept) == 3


def test_the_backoff_is_jittered() -> None:
    runtime = seeded(7)
    slept: list[float] = []
    runtime.sleep = slept.append
    store = Retrying(Faulty(MemoryStore(), Fault("unavailable", times=99)), runtime, attempts=20, base_s=1, cap_s=8)
    with pytest.raises(Unavailable):
        store.head("k")
    assert all(0 <= pause <= 8 for pause in slept)
    assert len(set(slept)) == 19
    assert min(slept[3:]) < 4 < max(slept[3:])


def test_a_put_whose_answer_was_lost_once_stays_unknown() -> None:
    store, _, _ = retrying(Fault("lost"), Fault("unavailable", nth=2, times=99))
    with pytest.raises(Unknown):
        store.put("k", b"x")
    store, _, _ = retrying(Fault("lost"))
    store.put("k", b"x")


def test_what_a_retry_cannot_help_is_raised_at_once() -> None:
    store, _, runtime = retrying()
    with pytest.raises(NotFound):
        store.get("k")
    with pytest.raises(Invalid):
        store.put("../k", b"")
    assert runtime.slept == []


def test_a_listing_goes_on_where_it_broke() -> None:
    class Breaking(MemoryStore):
        breaks = 3

        def list(self, prefix: str = "", start_after: str = "", limit: int | None = None) -> Iterator[ObjectMeta]:
            for count, meta in enumerate(super().list(prefix, start_after, limit)):
                if count == 2 and self.breaks:
                    self.breaks -= 1
                    raise Unavailable("cut")
                yield meta

    inner = Breaking()
    for n in range(10):
        inner.create(f"k{n}", b"")
    runtime = Sleepless()
    store = Retrying(inner, runtime, attempts=2)
    assert [meta.key for meta in store.list("", "k0", 8)] == [f"k{n}" for n in range(1, 9)]
    assert len(runtime.slept) == 3  # each break found the store one attempt in, never two in a row


# Limited


def test_never_more_requests_at_once_than_the_limit() -> None:
    running, most, lock = 0, 0, threading.Lock()

    class Counting(MemoryStore):
        def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            time.sleep(0.002)
            with lock:
                running -= 1
            return super().get(key, start, length)

    inner = Counting()
    inner.create("k", b"x")
    store = Limited(inner, 3)
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda _: store.get("k"), range(60))) == [b"x"] * 60
    assert most == 3


def test_slots_come_back_after_errors_and_during_a_listing() -> None:
    store = Limited(MemoryStore(), 1)
    for _ in range(3):
        with pytest.raises(NotFound):
            store.get("k")
    store.create("a", b"")
    store.create("b", b"")
    for meta in store.list():
        assert store.get(meta.key) == b""  # would wait for ever if the listing held the slot


# Metered


def test_requests_and_bytes_are_counted() -> None:
    store = Metered(MemoryStore())
    store.create("a", b"12345")
    store.put("b", b"123")
    before = store.usage()
    store.get("a", 1, 2)
    store.get("b")
    store.head("a")
    list(store.list())
    store.delete([f"k{n}" for n in range(1001)])
    with pytest.raises(NotFound):
        store.get("k")
    assert store.usage() == Usage(
        {"create": 1, "put": 1, "get": 3, "head": 1, "list": 1, "delete": 2}, bytes_written=8, bytes_read=5
    )
    since = store.usage() - before
    assert since == Usage({"get": 3, "head": 1, "list": 1, "delete": 2}, bytes_read=5)
    assert (since["get"], since["create"], since.total) == (3, 0, 7)


def test_a_listing_costs_one_request_for_each_thousand() -> None:
    inner = MemoryStore()
    for n in range(2001):
        inner.create(f"k{n:04d}", b"")
    for taken, requests in ((1, 1), (1000, 1), (1001, 2), (2001, 3)):
        store = Metered(inner)
        assert len(list(store.list(limit=taken))) == taken
        assert store.usage().requests == {"list": requests}


def test_counting_is_thread_safe() -> None:
    store = Metered(MemoryStore())
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: store.put(f"k{n}", b"xy"), range(2000)))
    assert store.usage() == Usage({"put": 2000}, bytes_written=4000)


# Faulty


def outcome(call: Any) -> object:
    try:
        return call()
    except FanoutError as error:
        return type(error)


@pytest.mark.parametrize(
    ("kind", "raised", "stored"),
    [
        ("lost", Unknown, b"x"),
        ("echo", Exists, b"x"),
        ("refused", Unknown, None),
        ("unavailable", Unavailable, None),
        ("slow", None, b"x"),
    ],
)
def test_faults_of_a_create(kind: FaultKind, raised: type | None, stored: bytes | None) -> None:
    inner = MemoryStore()
    runtime = Sleepless()
    store = Faulty(inner, Fault(kind, "create", seconds=3), runtime=runtime)
    assert outcome(lambda: store.create("k", b"x")) is raised
    assert (inner.get("k") if inner.head("k") else None) == stored
    assert runtime.slept == ([3] if kind == "slow" else [])
    assert [fired.kind for fired in store.fired] == [kind]
    store.create("l", b"y")


def test_faults_of_reads() -> None:
    inner = MemoryStore()
    inner.create("k", b"0123456789")
    store = Faulty(
        inner,
        Fault("truncated", "get", nth=2),
        Fault("corrupted", "get", nth=3),
        Fault("unavailable", "get", nth=4),
        Fault("refused", "list"),
    )
    assert store.get("k") == b"0123456789"
    assert store.get("k") == b"01234"
    damaged = store.get("k")
    assert len(damaged) == 10
    assert sum(a != b for a, b in zip(damaged, b"0123456789", strict=True)) == 1
    assert outcome(lambda: store.get("k")) is Unavailable
    items = store.list()
    assert outcome(lambda: next(items)) is Unavailable
    assert len(list(store.list())) == 1


def test_a_script_is_matched_by_verb_key_and_count() -> None:
    store = Faulty(MemoryStore(), Fault("unavailable", "create", r"^log/.*[13]$", nth=2, times=1))
    got = [outcome(lambda n=n: store.create(f"log/{n}", b"")) for n in range(6)]
    assert got == [None, None, None, Unavailable, None, None]
    assert outcome(lambda: store.put("log/3", b"")) is None


def test_random_faults_depend_on_the_seed_alone() -> None:
    def run(seed: int, order: int) -> set[tuple[str, str, str]]:
        store = Faulty(MemoryStore(), seed=seed, rate=0.3, runtime=Sleepless())
        for n in list(range(200))[::order]:
            outcome(lambda n=n: store.create(f"k{n}", b""))
            outcome(lambda n=n: store.get(f"k{n}"))
        return {(fired.kind, fired.verb, fired.key) for fired in store.fired}

    first = run(1, 1)
    assert first == run(1, -1)
    assert first != run(2, 1)
    assert 60 < len(first) < 180
    assert {kind for kind, _, _ in first} == {"lost", "echo", "refused", "unavailable", "slow"}


def test_no_faults_without_a_script_or_seed() -> None:
    store = Faulty(MemoryStore())
    for n in range(200):
        store.create(f"k{n}", b"x")
    assert store.fired == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: Fault("explode"),  # type: ignore[arg-type]
        lambda: Fault("lost", nth=0),
        lambda: Faulty(MemoryStore(), seed=1, rate=2),
        lambda: Limited(MemoryStore(), 0),
        lambda: Retrying(MemoryStore(), attempts=0),
    ],
)
def test_bad_settings_are_refused(make: Any) -> None:
    with pytest.raises(Invalid):
        make()
