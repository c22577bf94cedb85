"""The VMs of an engine, and who gets which: the plan's instructions carried out by threads.

Owns the threads that boot and the hand-over. The order and the bounds are `plan.py`'s; what a VM is made of `vm.py`'s.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from fanout.engine.qemu.machine import Guest
from fanout.engine.qemu.plan import Boot, Drop, Give, Instruction, Plan, Refuse
from fanout.engine.qemu.protocol import Request
from fanout.engine.qemu.vm import VM
from fanout.errors import EngineUnavailable

__all__ = ["Pool", "Turn"]


class Turn:
    """One who waits for a VM. `vm` and `warm` tell when it is `served`; else `error` is raised by `take`."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.served = threading.Event()
        self.vm: VM | None = None
        self.warm = False
        self.error: EngineUnavailable | None = None

    def take(self) -> VM | None:
        """Return the VM, or None if nobody was served: he gave up. Raises what went wrong."""
        if self.error is not None:
            raise self.error
        return self.vm


class Pool:
    """Boots VMs as the plan says. Every VM taken must be given to `ended` when it is over."""

    def __init__(
        self, plan: Plan, make: Callable[[Guest, Callable[[VM], None]], VM], rehearsal: Callable[[], Request]
    ) -> None:
        """`make` returns a VM to be booted, which tells if it dies; `rehearsal` what one tries without need."""
        self._plan = plan
        self._make = make
        self._rehearsal = rehearsal
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._turns: dict[int, Turn] = {}
        self._vms: dict[int, VM] = {}
        self._failures: dict[Guest, EngineUnavailable] = {}
        self._closed = False
        self._threads = ThreadPoolExecutor(plan.boots + 2, "fanout-vm")

    def ask(self, guest: Guest) -> Turn:
        """Ask for a VM; the answer may be there at once."""
        with self._lock:
            turn = Turn(next(self._numbers))
            self._turns[turn.number] = turn
            self._carry_out(self._plan.arrive(turn.number, guest))
        return turn

    def give_up(self, turn: Turn) -> None:
        """Wait no more. If he was served meanwhile, the VM goes."""
        with self._lock:
            self._turns.pop(turn.number, None)
            self._carry_out(self._plan.leave(turn.number))
            vm = turn.vm
            turn.served.set()
        if vm is not None:
            vm.end()
            self.ended(vm)

    def ended(self, vm: VM) -> None:
        """A VM that was taken is over, all of it."""
        with self._lock:
            number = next((number for number, each in self._vms.items() if each is vm), None)
            if number is not None:
                del self._vms[number]
                self._carry_out(self._plan.ended(number))

    def counts(self) -> dict[str, int]:
        """See `Plan.counts`."""
        with self._lock:
            return self._plan.counts

    def vms(self) -> Sequence[VM]:
        """Return all there are, whatever they do."""
        with self._lock:
            return list(self._vms.values())

    def close(self) -> None:
        """Give nothing more, kill what there is, and wait for the threads."""
        with self._lock:
            self._closed = True
            self._carry_out(self._plan.close())
            vms = list(self._vms.values())
        for vm in vms:
            vm.kill()
        self._threads.shutdown(wait=True)

    def _died(self, vm: VM) -> None:
        """Have one replaced that died while nobody used it."""
        with self._lock:
            number = next((number for number in self._plan.ready if self._vms[number] is vm), None)
            if number is not None and not self._closed:
                self._threads.submit(self._vms.pop(number).end)
                self._carry_out(self._plan.ended(number))

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        for each in instructions:
            match each:
                case Boot(number, guest, ahead):
                    vm = self._vms[number] = self._make(guest, self._died)
                    self._threads.submit(self._boot, number, vm, ahead)
                case Give(number, waiter, warm):
                    turn = self._turns.pop(waiter)
                    turn.vm, turn.warm = self._vms[number], warm
                    turn.served.set()
                case Drop(number):
                    self._threads.submit(self._destroy, self._vms[number])
                case Refuse(waiter, why):
                    turn = self._turns.pop(waiter)
                    turn.error = self._refusal(why)
                    turn.served.set()

    def _refusal(self, why: str) -> EngineUnavailable:
        last = next(iter(self._failures.values()), None)
        return EngineUnavailable(why) if why or last is None else EngineUnavailable(str(last))

    def _boot(self, number: int, vm: VM, ahead: bool) -> None:
        try:
            vm.boot(rehearsal=self._rehearsal() if ahead else None)
        except BaseException as error:
            vm.end()
            with self._lock:
                self._failures = {
                    vm.guest: error if isinstance(error, EngineUnavailable) else EngineUnavailable(f"boot: {error!r}")
                }
                del self._vms[number]
                self._carry_out(self._plan.failed(number))
        else:
            with self._lock:
                self._carry_out(self._plan.booted(number))

    def _destroy(self, vm: VM) -> None:
        vm.end()
        self.ended(vm)
