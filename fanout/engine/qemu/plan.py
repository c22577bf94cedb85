"""When a VM is booted, given away or dropped: a pure state machine, events in, instructions out.

Owns the order (first come, first served), the bounds, and what memory is promised to whom. Knows no threads, clocks or
processes; VMs and those who wait are numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sized
from dataclasses import dataclass

from fanout.engine.qemu.machine import Guest

__all__ = ["Boot", "Drop", "Give", "Instruction", "Plan", "Refuse", "cost_bytes"]

#: What QEMU and virtiofsd take beside the guest's memory.
OVERHEAD_BYTES = 64 * 1024 * 1024

#: How many boots may fail before the one they were for is told.
ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class Boot:
    """Boot a VM under this number; `ahead` where nobody waits for it."""

    vm: int
    guest: Guest
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class Give:
    """Hand a booted VM to one who waits; `warm` if it was booted before he came."""

    vm: int
    waiter: int
    warm: bool


@dataclass(frozen=True, slots=True)
class Drop:
    """Destroy a booted VM that nobody has."""

    vm: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell one who waits that he will get none; `why` is empty where his last boot's failure says it."""

    waiter: int
    why: str


Instruction = Boot | Give | Drop | Refuse


@dataclass(slots=True)
class _Waiter:
    guest: Guest
    failures: int = 0
    late: bool = False  # something had to be booted after he came


def cost_bytes(guest: Guest) -> int:
    """Return what a VM may take of the host's memory."""
    return guest.memory_bytes + OVERHEAD_BYTES


class Plan:
    """Keeps `size` VMs of kind `pooled` ready once the first of that kind was asked for. Not thread safe.

    At most `boots` boot at once, half as many where nobody waits for them; all there are fit into `memory_bytes`
    together. Others than `pooled` are booted when asked for. Each is given away once.
    """

    def __init__(self, pooled: Guest, *, size: int, boots: int, memory_bytes: int) -> None:
        self.pooled = pooled
        self.size = size
        self.boots = boots
        self.memory_bytes = memory_bytes
        self._ahead = max(1, boots // 2)  # where nobody waits: the commands that run need the cores, too
        self._waiting: dict[int, _Waiter] = {}  # in the order of arrival
        self._booting: dict[int, Guest] = {}
        self._ready: dict[int, Guest] = {}
        self._given: dict[int, Guest] = {}
        self._awake = False
        self._closed = False
        self._next = 0

    @property
    def ready(self) -> tuple[int, ...]:
        """The VMs that wait for somebody."""
        return tuple(self._ready)

    @property
    def counts(self) -> dict[str, int]:
        """How many wait, boot, are ready and are given away."""
        counted: dict[str, Sized] = {"waiting": self._waiting, "booting": self._booting}
        counted |= {"ready": self._ready, "given": self._given}
        return {name: len(held) for name, held in counted.items()}

    def arrive(self, waiter: int, guest: Guest) -> list[Instruction]:
        """Somebody wants a VM."""
        if self._closed:
            return [Refuse(waiter, "the engine is closed")]
        if cost_bytes(guest) > self.memory_bytes:
            wanted, there = cost_bytes(guest) >> 20, self.memory_bytes >> 20
            return [Refuse(waiter, f"a VM of {wanted} MiB does not fit into this host's memory for VMs ({there} MiB)")]
        self._awake = self._awake or guest == self.pooled
        self._waiting[waiter] = _Waiter(guest)
        return self._decide()

    def leave(self, waiter: int) -> list[Instruction]:
        """Somebody waits no more. Who has been given one is no waiter: see `ended`."""
        self._waiting.pop(waiter, None)
        return self._decide()

    def booted(self, vm: int) -> list[Instruction]:
        """A VM is ready."""
        self._ready[vm] = self._booting.pop(vm)
        return self._decide()

    def failed(self, vm: int) -> list[Instruction]:
        """A VM did not come up: the first who waits for such a one is told, if it was not the first time for him.

        Where nobody waits for it, no other is booted in its place until somebody comes.
        """
        guest = self._booting.pop(vm)
        waiter = next((waiter for waiter, each in self._waiting.items() if each.guest == guest), None)
        refused: list[Instruction] = []
        if waiter is None:
            self._awake = False
        else:
            self._waiting[waiter].failures += 1
            if self._waiting[waiter].failures >= ATTEMPTS:
                del self._waiting[waiter]
                refused.append(Refuse(waiter, ""))
        return refused + self._decide()

    def ended(self, vm: int) -> list[Instruction]:
        """A VM that was ready or given away is gone, and its memory free. Others are ignored."""
        self._ready.pop(vm, None)
        self._given.pop(vm, None)
        return self._decide()

    def close(self) -> list[Instruction]:
        """Nobody gets one any more."""
        self._closed = True
        out: list[Instruction] = [Refuse(waiter, "the engine is closed") for waiter in self._waiting]
        self._waiting.clear()
        return out + self._decide()

    def _decide(self) -> list[Instruction]:
        out: list[Instruction] = []
        self._give(out)
        if self._closed:
            out += [self._drop(vm) for vm in list(self._ready)]
            return out
        self._boot_for_waiters(out)
        if self._awake and not self._waiting:
            while self._of(self.pooled) < self.size and len(self._booting) < self._ahead and self._fits(self.pooled):
                out.append(self._boot(self.pooled, ahead=True))
        return out

    def _give(self, out: list[Instruction]) -> None:
        for waiter, each in list(self._waiting.items()):
            vm = next((vm for vm, guest in self._ready.items() if guest == each.guest), None)
            if vm is not None:
                del self._waiting[waiter]
                self._given[vm] = self._ready.pop(vm)
                out.append(Give(vm, waiter, warm=not each.late))
            else:
                each.late = True

    def _boot_for_waiters(self, out: list[Instruction]) -> None:
        """Boot what the first who wait need; nobody gets past one whose VM does not fit yet."""
        coming = Counter(self._booting.values())
        for each in self._waiting.values():
            if coming[each.guest]:
                coming[each.guest] -= 1
                continue
            while not self._fits(each.guest) and self._ready:
                out.append(self._drop(next(iter(self._ready))))  # nobody who waits wants one of these
            if not self._may_boot(each.guest):
                break
            out.append(self._boot(each.guest))

    def _may_boot(self, guest: Guest) -> bool:
        return len(self._booting) < self.boots and self._fits(guest)

    def _fits(self, guest: Guest) -> bool:
        held = (*self._booting.values(), *self._ready.values(), *self._given.values())
        return sum(map(cost_bytes, held)) + cost_bytes(guest) <= self.memory_bytes

    def _of(self, guest: Guest) -> int:
        return sum(held == guest for held in (*self._booting.values(), *self._ready.values()))

    def _boot(self, guest: Guest, *, ahead: bool = False) -> Boot:
        self._next += 1
        self._booting[self._next] = guest
        return Boot(self._next, guest, ahead)

    def _drop(self, vm: int) -> Drop:
        self._given[vm] = self._ready.pop(vm)  # its memory is free when it is gone
        return Drop(vm)
