"""One command in a VM: from waiting for one to that VM's end.

Owns what may happen in the wrong order: killed before there is a VM, a VM that dies before it is asked, a layer that
grows past its limit. Knows nothing of how VMs are made or chosen.
"""

from __future__ import annotations

import dataclasses
import threading

from fanout.engine.base import Exit, Process, Sink, Spec
from fanout.engine.process import disk_watch
from fanout.engine.qemu.machine import Guest
from fanout.engine.qemu.pool import Pool
from fanout.engine.qemu.protocol import Request
from fanout.engine.qemu.vm import VM
from fanout.engine.spawning import NotMapped
from fanout.errors import EngineUnavailable
from fanout.runtime import Runtime

__all__ = ["VMProcess"]

#: How long `launch` waits for a VM that is being booted for it. Who must queue longer is started later.
START_S = 2.0

#: How many VMs may turn out to be of no use for a command: those of the pool, at most.
ATTEMPTS = 80


class VMProcess(Process):
    """One command, from waiting for a VM to that VM's end."""

    def __init__(self, spec: Spec, pool: Pool, request: Request, guest: Guest, runtime: Runtime) -> None:
        self._spec = spec
        self._pool = pool
        self._request = request
        self._runtime = runtime
        self._lock = threading.Lock()  # to change who holds what
        self._killed = False
        self._guest = guest
        self._turn = pool.ask(guest)
        self._vm: VM | None = None
        self._warm = False
        self._disk_full = False
        self._failure: BaseException | None = None
        self._sent = threading.Event()  # or it will never be

    def launch(self) -> None:
        """Start the command as soon as there is a VM; waits for one that is being booted, but not for its turn."""
        if self._turn.served.is_set():
            self._begin()
        else:
            threading.Thread(target=self._begin, name="fanout-vm-start", daemon=True).start()
            self._sent.wait(START_S)

    def kill(self) -> None:
        """See `Process.kill`."""
        with self._lock:
            self._killed = True
            vm = self._vm
        if vm is not None:
            vm.kill()
        else:
            self._pool.give_up(self._turn)

    def wait(self, sink: Sink) -> Exit:
        """See `Process.wait`."""
        self._sent.wait()
        vm = self._vm
        if vm is None or self._failure is not None:
            if self._killed:
                now_s = self._runtime.monotonic()
                return Exit("killed", None, now_s, now_s, 0.0, 0)
            raise self._failure or EngineUnavailable("there was no VM")
        over = threading.Event()
        watcher = self._watch_disk(vm, over)
        try:
            ended = vm.wait(sink, timeout_s=self._spec.limits.timeout_s, grace_s=self._spec.limits.grace_s)
        finally:
            over.set()
            self._pool.ended(vm)
            if watcher is not None:
                watcher.join()
        if self._disk_full and ended.status == "killed":
            ended = dataclasses.replace(ended, limit="disk")
        return dataclasses.replace(ended, warm=self._warm)

    def _watch_disk(self, vm: VM, over: threading.Event) -> threading.Thread | None:
        """Kill the VM when its command has written more than it may."""
        watch = disk_watch(self._spec, self._runtime)
        if watch is None:
            return None

        def look() -> None:
            while not over.wait(max(0.0, watch.next_s - self._runtime.monotonic())):
                if watch.exceeded():
                    self._disk_full = True
                    vm.kill()
                    return

        thread = threading.Thread(target=look, name="fanout-disk", daemon=True)
        thread.start()
        return thread

    def _begin(self) -> None:
        """Take the VM when it is there and send it the command."""
        try:
            for again in reversed(range(ATTEMPTS)):
                try:
                    self._send()
                    break
                except NotMapped:
                    if not again or not self._ask_again():
                        raise
        except BaseException as error:
            self._failure = error
            self._give_up_vm()
        finally:
            self._sent.set()

    def _send(self) -> None:
        self._turn.served.wait()
        vm = self._turn.take()
        with self._lock:
            if vm is None or self._killed:
                return  # whoever killed it gives the VM back
            self._vm, self._warm = vm, self._turn.warm
        vm.send(self._spec.mounts, self._request, self._spec.stdin)

    def _ask_again(self) -> bool:
        """Want another VM: this one cannot have the mounts, and those that are made from now on can."""
        self._give_up_vm()
        with self._lock:
            self._vm = None
            if not self._killed:
                self._turn = self._pool.ask(self._guest)
            return not self._killed

    def _give_up_vm(self) -> None:
        if self._vm is not None:
            self._vm.end()
            self._pool.ended(self._vm)
