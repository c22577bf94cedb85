"""The plan of VMs against its promises: order, bounds, nobody forgotten, each VM given once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fanout.engine.qemu.machine import Guest
from fanout.engine.qemu.plan import Boot, Drop, Give, Instruction, Plan, Refuse, cost_bytes

SMALL, BIG = Guest(memory_bytes=256 << 20), Guest(memory_bytes=1024 << 20)
PLENTY = 1 << 40


def plan(*, size: int = 2, boots: int = 4, memory_bytes: int = PLENTY) -> Plan:
    return Plan(SMALL, size=size, boots=boots, memory_bytes=memory_bytes)


def ahead(vm: int) -> Boot:
    return Boot(vm, SMALL, ahead=True)


def test_nothing_is_booted_before_somebody_comes() -> None:
    made = plan()
    assert made.counts == {"waiting": 0, "booting": 0, "ready": 0, "given": 0}


def test_the_first_one_waits_for_his_boot_and_the_next_ones_do_not() -> None:
    made = plan()
    assert made.arrive(7, SMALL) == [Boot(1, SMALL)]
    assert made.booted(1) == [Give(1, 7, warm=False), ahead(2), ahead(3)]
    assert made.booted(2) == []
    assert made.booted(3) == []
    assert made.arrive(8, SMALL) == [Give(2, 8, warm=True), ahead(4)]
    assert made.ended(1) == []
    assert made.counts == {"waiting": 0, "booting": 1, "ready": 1, "given": 1}


def test_at_most_so_many_boot_at_once_in_the_order_of_arrival() -> None:
    made = plan(size=0, boots=2)
    assert made.arrive(1, SMALL) == [Boot(1, SMALL)]
    assert made.arrive(2, BIG) == [Boot(2, BIG)]
    assert made.arrive(3, SMALL) == made.arrive(4, BIG) == []
    assert made.booted(2) == [Give(2, 2, warm=False), Boot(3, SMALL)]
    assert made.booted(1) == [Give(1, 1, warm=False), Boot(4, BIG)]
    assert made.booted(4) == [Give(4, 4, warm=False)]


def test_fewer_boot_at_once_where_nobody_waits() -> None:
    made = plan(boots=2)
    made.arrive(1, SMALL)
    assert made.booted(1) == [Give(1, 1, warm=False), ahead(2)]
    assert made.booted(2) == [ahead(3)]


def test_other_kinds_are_booted_when_asked_for_and_not_kept_ready() -> None:
    made = plan()
    assert made.arrive(1, BIG) == [Boot(1, BIG)]
    assert made.booted(1) == [Give(1, 1, warm=False)]
    assert made.ended(1) == []


def test_nobody_gets_past_one_whose_vm_does_not_fit_yet() -> None:
    made = plan(size=0, memory_bytes=cost_bytes(BIG) + cost_bytes(SMALL))
    assert made.arrive(1, SMALL) == [Boot(1, SMALL)]
    assert made.arrive(2, SMALL) == [Boot(2, SMALL)]
    assert made.arrive(3, BIG) == []
    assert made.arrive(4, SMALL) == []
    made.booted(1)
    assert made.booted(2) == [Give(2, 2, warm=False)]
    assert made.ended(1) == [Boot(3, BIG)]
    assert made.ended(2) == [Boot(4, SMALL)]


def test_ready_ones_make_room_for_one_who_waits() -> None:
    made = plan(size=1, memory_bytes=cost_bytes(BIG) + cost_bytes(SMALL) // 2)
    made.arrive(1, SMALL)
    made.booted(1)
    made.booted(2)
    assert made.ready == (2,)
    assert made.arrive(2, BIG) == [Drop(2)]
    assert made.ended(2) == []
    assert made.ended(1) == [Boot(3, BIG)]


def test_what_can_never_fit_is_refused_at_once() -> None:
    made = plan(memory_bytes=cost_bytes(SMALL))
    (refused,) = made.arrive(1, BIG)
    assert isinstance(refused, Refuse)
    assert "1088 MiB does not fit" in refused.why
    assert made.arrive(2, SMALL) == [Boot(1, SMALL)]


def test_a_boot_that_fails_is_tried_again_and_then_told() -> None:
    made = plan(boots=1)
    assert made.arrive(1, SMALL) == [Boot(1, SMALL)]
    assert made.arrive(2, SMALL) == []
    assert made.failed(1) == [Boot(2, SMALL)]
    assert made.failed(2) == [Refuse(1, ""), Boot(3, SMALL)]
    assert made.booted(3) == [Give(3, 2, warm=False), ahead(4)]
    assert made.failed(4) == [], "nobody waits: it is not tried for ever"
    assert made.arrive(3, SMALL) == [Boot(5, SMALL)]


def test_a_ready_one_that_died_is_replaced() -> None:
    made = plan(size=1)
    made.arrive(1, SMALL)
    made.booted(1)
    made.booted(2)
    assert made.ended(2) == [ahead(3)]


def test_one_who_leaves_frees_the_boot_for_the_next() -> None:
    made = plan(size=0, boots=1)
    made.arrive(1, SMALL)
    made.arrive(2, SMALL)
    assert made.leave(1) == []
    assert made.booted(1) == [Give(1, 2, warm=False)]
    made.arrive(3, SMALL)
    made.leave(3)
    assert made.booted(2) == [], "nobody wants it: it stays ready rather than be wasted"
    assert made.arrive(4, SMALL) == [Give(2, 4, warm=True)]


def test_closing_drops_what_is_ready_and_what_still_comes_up() -> None:
    made = plan()
    made.arrive(1, SMALL)
    made.booted(1)
    made.booted(2)
    assert made.close() == [Drop(2)]
    assert made.booted(3) == [Drop(3)]
    assert made.arrive(9, SMALL) == [Refuse(9, "the engine is closed")]


STEPS = st.lists(
    st.tuples(st.sampled_from(["arrive", "arrive big", "leave", "booted", "failed", "ended"]), st.integers(0, 30)),
    max_size=80,
)


@given(steps=STEPS, size=st.integers(0, 3), boots=st.integers(1, 3), fits=st.integers(5, 12))
def test_the_bounds_hold_and_nobody_is_forgotten(
    steps: list[tuple[str, int]], size: int, boots: int, fits: int
) -> None:
    made = Plan(SMALL, size=size, boots=boots, memory_bytes=fits * cost_bytes(SMALL))
    living: dict[int, Guest] = {}
    booting: list[int] = []
    given_away: list[int] = []
    idle: list[int] = []
    waiting: list[int] = []

    def follow(instructions: list[Instruction]) -> None:
        for each in instructions:
            match each:
                case Boot(vm, guest, _):
                    assert vm not in living
                    living[vm] = guest
                    booting.append(vm)
                case Give(vm, waiter, _):
                    idle.remove(vm)
                    given_away.append(vm)
                    waiting.remove(waiter)
                case Drop(vm):
                    idle.remove(vm)
                    given_away.append(vm)
                case Refuse(waiter, _):
                    waiting.remove(waiter)
        assert len(booting) <= boots
        assert sum(map(cost_bytes, living.values())) <= made.memory_bytes

    def end(vm: int) -> None:
        given_away.remove(vm)
        del living[vm]
        follow(made.ended(vm))

    def come_up(vm: int) -> None:
        booting.remove(vm)
        idle.append(vm)
        follow(made.booted(vm))

    for number, (verb, which) in enumerate(steps):
        if verb.startswith("arrive"):
            waiting.append(number)
            follow(made.arrive(number, BIG if verb.endswith("big") else SMALL))
        elif verb == "leave" and waiting:
            follow(made.leave(waiting.pop(which % len(waiting))))
        elif verb == "booted" and booting:
            come_up(booting[which % len(booting)])
        elif verb == "failed" and booting:
            vm = booting.pop(which % len(booting))
            del living[vm]
            follow(made.failed(vm))
        elif verb == "ended" and given_away:
            end(given_away[which % len(given_away)])
    for _ in range(2000):
        if booting:
            come_up(booting[0])
        elif given_away:
            end(given_away[0])
        else:
            break
    assert not waiting
    for each in made.close():
        assert isinstance(each, Drop)


def test_a_number_is_a_vm_once() -> None:
    made = plan(size=0)
    made.arrive(1, SMALL)
    made.booted(1)
    with pytest.raises(KeyError):
        made.booted(1)
