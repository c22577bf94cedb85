"""One VM with its file system: QEMU and virtiofsd, each alone in a sandbox, from boot to the last of both.

Owns that neither is left without the other. Knows nothing of who waits for VMs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from fanout.engine import rootfs
from fanout.engine.base import Exit, Mount, Sink
from fanout.engine.network import Network
from fanout.engine.qemu import accel
from fanout.engine.qemu.image import Image
from fanout.engine.qemu.jail import Jail
from fanout.engine.qemu.machine import Files, Guest, Hypervisor, Machine
from fanout.engine.qemu.protocol import Request
from fanout.engine.qemu.reaper import Reaper
from fanout.engine.qemu.share import TOP, Share, Virtiofsd
from fanout.engine.qemu.template import Templates
from fanout.engine.qemu.turns import take_long_turns
from fanout.engine.spawning import Spawner
from fanout.errors import EngineUnavailable
from fanout.runtime import Runtime

__all__ = ["VM", "Host"]

#: How long a boot may take. On a busy host without KVM it is ten times what it is on a quiet one.
BOOT_S = 60.0


@dataclass(frozen=True, slots=True)
class Host:
    """What VMs are made with here: programs, the image, and where the tree comes from.

    `files` are the image's two, and where a sandbox's user finds them; `kvm` is where it finds KVM's device. `tree` are
    bwrap's options for what guests see, `directory` a private place for sockets. Guests with a network have a way out
    by `network`, whose resolver is named in the file `resolver`; with `own_resolver` the tree's own /etc/resolv.conf
    must be hidden for that. Guests like `copied` are copies of a template.
    """

    spawner: Spawner
    bwrap: str
    virtiofsd: Virtiofsd
    image: Image
    files: Mapping[str, str]
    kvm: str
    tree: Sequence[str]
    directory: str
    network: Network | None
    resolver: str
    own_resolver: bool
    templates: Templates
    copied: Guest | None
    reaper: Reaper
    runtime: Runtime


class VM:
    """A VM for one command: `boot`, then `send` and `wait`, or `end`; `kill` from any thread at any time.

    `is_taken` says that it was given its command.
    """

    def __init__(self, host: Host, guest: Guest, died: Callable[[VM], None] = lambda vm: None) -> None:
        """`died` is called, from another thread, if it dies by itself after it has booted."""
        self._host = host
        self._died = died
        self._deaths: list[int] = []
        self.guest = guest
        self._lock = threading.Lock()
        self._killed = False
        self.is_taken = False
        self._share: Share | None = None
        self._qemu: Jail | None = None
        self._machine: Machine | None = None

    def boot(self, rehearsal: Request | None = None) -> None:
        """Start it and wait until its agent answers; `EngineUnavailable` says what happened instead.

        With a `rehearsal`, a trial of that comes before: a command like it then starts sooner.
        """
        try:
            if self.guest == self._host.copied:
                self._copy_or_make()
            else:
                self._start(None).wait_ready(BOOT_S)
            if rehearsal is not None:
                assert self._machine is not None
                self._machine.rehearse(rehearsal, BOOT_S)
            self._watch()
        except BaseException as error:
            said = self._share.said() if self._share is not None else ""
            self.end()
            if said and isinstance(error, EngineUnavailable):
                raise EngineUnavailable(f"{error}; virtiofsd: {said}") from error
            raise

    def _watch(self) -> None:
        for part in (self._qemu, self._share):
            death = part.death() if part is not None else None
            if death is not None:
                self._deaths.append(death)
                self._host.reaper.watch(death, self._dead)

    def _dead(self) -> None:
        """A part of it is dead. Without virtiofsd the guest would wait for ever for its files."""
        if self._qemu is not None:
            self._qemu.kill()  # not by the machine: whoever waits for that shall find out how QEMU ended
        self._died(self)

    def _copy_or_make(self) -> None:
        """Go on from the template; where there is none yet, boot, and become it on the way."""
        templates = self._host.templates
        if self._resume(templates):
            return
        with templates.making(self.guest) as files:
            if files is not None:
                machine = self._start(files)
                machine.wait_ready(BOOT_S)
                machine.save(BOOT_S)
                with suppress(OSError):  # a full disk: the next one boots, too
                    templates.keep(self.guest, files)
                machine.plug(BOOT_S)
                return
        if not self._resume(templates):
            raise EngineUnavailable("the template of VMs vanished")

    def _resume(self, templates: Templates) -> bool:
        files = templates.resume(self.guest)
        if files is None:
            return False
        try:
            self._start(files).wait_ready(BOOT_S)
        except EngineUnavailable:
            if not self._killed:
                templates.drop(self.guest)  # the next one boots
            raise
        finally:
            os.close(files.memory)
            os.close(files.state)
        return True

    def _start(self, files: Files | None) -> Machine:
        host = self._host
        tree = host.tree
        if self.guest.netdev is not None and host.own_resolver:
            tree = [*tree, "--ro-bind", host.resolver, f"{TOP}/etc/resolv.conf"]
        share = self._share = Share(host.virtiofsd, host.spawner, host.bwrap, tree, host.directory)
        machine = Machine(
            host.image,
            self.guest,
            filesystem=share.connection,
            launch=self._launch,
            files=files,
            runtime=host.runtime,
        )
        with self._lock:
            self._machine = machine
            if self._killed:
                machine.kill()
        machine.start()
        return machine

    def alive(self) -> bool:
        """Say whether both are there."""
        return bool(self._machine and self._machine.alive() and self._share and self._share.alive())

    def send(self, mounts: Sequence[Mount], request: Request, stdin: bytes | None) -> None:
        """Show the mounts and have the command started; `EngineUnavailable` where that fails."""
        assert self._share is not None
        assert self._machine is not None
        self.is_taken = True
        self._share.attach(mounts)
        if self.guest.acceleration == "tcg" and self._qemu is not None:
            take_long_turns(self._qemu.pid)  # not before: who waits for a boot wants it soon
        self._machine.send(request, stdin)

    def wait(self, sink: Sink, *, timeout_s: float | None, grace_s: float) -> Exit:
        """See `Machine.wait`; then virtiofsd is gone, too, and with it every mount."""
        assert self._machine is not None
        try:
            return self._machine.wait(sink, timeout_s=timeout_s, grace_s=grace_s)
        finally:
            self.end()

    def kill(self) -> None:
        """Kill it. Whoever boots it or waits for it finds it dead."""
        with self._lock:
            self._killed = True
            machine = self._machine
        if machine is not None:
            machine.kill()

    def end(self) -> None:
        """Kill both and wait until they are gone; repeating it is harmless."""
        with self._lock:
            self._killed = True
            machine, share, self._share = self._machine, self._share, None
            deaths, self._deaths = self._deaths, []
        for death in deaths:
            self._host.reaper.unwatch(death)
        try:
            if machine is not None:
                machine.close()
        finally:
            if share is not None:
                share.end()

    def pids(self) -> list[int]:
        """Return its processes that are there: QEMU's, then virtiofsd's."""
        return [each.pid for each in (self._qemu, self._share) if each is not None]

    def _launch(self, argv: Sequence[str], inherited: Sequence[int], output: int) -> Hypervisor:
        options = rootfs.program_arguments([argv[0]])
        for path, seen_at in self._host.files.items():
            options += ["--ro-bind", seen_at, path]
        if self.guest.acceleration == "kvm":
            options += ["--dev-bind", self._host.kvm, accel.DEVICE]
        network = None
        if self.guest.netdev is not None:
            network = self._host.network
            options += ["--ro-bind", self._host.resolver, "/etc/resolv.conf"]
        options += ["--proc", "/proc", "--remount-ro", "/"]
        host = self._host
        qemu = self._qemu = Jail(
            host.spawner, host.bwrap, options, argv, output=output, others=inherited, network=network
        )
        assert self._share is not None
        return _Both(qemu, self._share)


class _Both:
    """QEMU, as `Machine` knows it; when it is killed, virtiofsd is at the same time: there is no more use for it."""

    def __init__(self, qemu: Jail, share: Share) -> None:
        self._qemu = qemu
        self._share = share

    @property
    def pid(self) -> int:
        return self._qemu.pid

    def poll(self) -> int | None:
        return self._qemu.poll()

    def kill(self) -> None:
        self._share.kill()
        self._qemu.kill()

    def wait(self, timeout: float | None = None) -> int:
        return self._qemu.wait(timeout)
