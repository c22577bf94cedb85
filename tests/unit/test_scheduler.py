"""Admission against a model: the cap holds, the order is that of arrival, no slot is ever lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fanout.run.scheduler import Scheduler

#: Arrivals (at a time, which need not be the order of the calls) and departures of a few jobs, in any state.
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(0, 9), st.integers(0, 5)),
        st.tuples(st.just("leave"), st.integers(0, 9), st.just(0)),
    ),
    max_size=60,
)


@given(cap=st.integers(1, 4), steps=STEPS)
def test_against_a_model(cap: int, steps: list[tuple[str, int, int]]) -> None:
    scheduler = Scheduler(cap)
    running: set[str] = set()
    waiting: list[tuple[int, int, str]] = []
    for number, (verb, which, at) in enumerate(steps):
        job = f"j{which}"
        if verb == "arrive" and (job in running or any(w[2] == job for w in waiting)):
            with pytest.raises(ValueError):
                scheduler.arrive(job, at)
            continue
        if verb == "arrive":
            waiting.append((at, number, job))
            started = scheduler.arrive(job, at)
        else:
            running.discard(job)
            waiting = [w for w in waiting if w[2] != job]
            started = scheduler.leave(job)
        waiting.sort()
        expected = [job for _, _, job in waiting[: cap - len(running)]]
        waiting = waiting[len(expected) :]
        running.update(expected)
        assert started == expected
        assert (scheduler.running, scheduler.waiting) == (len(running), len(waiting))
        assert len(running) <= cap
        assert len(running) == cap or not waiting, "a slot is free and somebody waits"


def test_first_come_first_served() -> None:
    scheduler = Scheduler(2)
    assert [scheduler.arrive(job) for job in "abcd"] == [["a"], ["b"], [], []]
    assert scheduler.leave("b") == ["c"]
    assert scheduler.leave("a") == ["d"]


def test_a_call_that_came_first_goes_first_although_it_took_longer_to_get_here() -> None:
    scheduler = Scheduler(1)
    scheduler.arrive("running", 0.0)
    scheduler.arrive("late", 2.0)
    scheduler.arrive("early", 1.0)
    assert scheduler.leave("running") == ["early"]
    assert scheduler.leave("early") == ["late"]


def test_leaving_twice_gives_one_slot() -> None:
    scheduler = Scheduler(1)
    for job in "abc":
        scheduler.arrive(job)
    assert scheduler.leave("a") == ["b"]
    assert scheduler.leave("a") == []
    assert (scheduler.running, scheduler.waiting) == (1, 1)


def test_who_gave_up_waiting_is_skipped_and_may_come_again() -> None:
    scheduler = Scheduler(1)
    scheduler.arrive("a", 0.0)
    scheduler.arrive("b", 1.0)
    scheduler.arrive("c", 2.0)
    assert scheduler.leave("b") == []
    scheduler.arrive("b", 3.0)
    assert scheduler.leave("a") == ["c"]
    assert scheduler.leave("c") == ["b"]
