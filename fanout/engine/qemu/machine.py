"""One virtual machine: QEMU as a process, the agent in it as a peer, one command, the end.

Owns QEMU's command line and the host's side of the protocol. Knows nothing of mounts, of virtiofsd, of the sandbox that
QEMU itself runs in (`launch` is the caller's) and of pools. Blocking; everything a guest sends is taken as hostile.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol as Shape

from fanout.engine.base import Exit, Sink
from fanout.engine.qemu.image import Image
from fanout.engine.qemu.protocol import Request
from fanout.runtime import Runtime, system

__all__ = ["Acceleration", "Guest", "Hypervisor", "Launch", "Machine"]

Acceleration = Literal["kvm", "tcg"]


@dataclass(frozen=True, slots=True)
class Guest:
    """What a VM is made of. Two equal ones are interchangeable: the key of a pool.

    `memory_bytes` is all the guest's memory: kernel, page cache and the command's. `netdev` is the value of QEMU's
    `-netdev` without its id (like "user,restrict=off"), None for no network device at all.
    """

    memory_bytes: int = 256 * 1024 * 1024
    cpus: int = 1
    acceleration: Acceleration = "tcg"
    netdev: str | None = None


class Hypervisor(Shape):
    """The started QEMU, as `launch` returns it; `subprocess.Popen` is one."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


#: Starts QEMU: its argv, the descriptors it must inherit under the same numbers, and the one that becomes its stdout and
#: stderr (stdin is /dev/null). QEMU needs to open nothing but the image's two files, /dev/kvm with KVM, and what its
#: `netdev` needs.
Launch = Callable[[Sequence[str], Sequence[int], int], Hypervisor]


class Machine:
    """A VM for one command: start, wait_ready, send, wait. Then it is gone. `kill` and `alive` from any thread.

    `filesystem` is connected to a vhost-user-fs back end (virtiofsd) that serves the tag `root`; the machine closes it.
    None gives a VM without a file system, for probes. What is served need not be complete before `send`.
    """

    def __init__(
        self,
        image: Image,
        guest: Guest,
        *,
        filesystem: socket.socket | None,
        launch: Launch,
        runtime: Runtime = system,
    ) -> None: ...

    def start(self) -> None:
        """Start QEMU; returns at once. `EngineUnavailable` where it cannot be started."""

    def wait_ready(self, timeout_s: float = 30.0) -> float:
        """Wait until the agent answers; return the seconds since `start`.

        `EngineUnavailable` says what happened instead (QEMU ended, the guest panicked, no answer in time), with the end
        of the console; the VM is dead then.
        """

    def alive(self) -> bool:
        """Say whether QEMU still runs."""

    def send(self, request: Request, stdin: bytes | None = None) -> None:
        """Ask for the command; returns once the request is written. `EngineUnavailable` where the VM died."""

    def wait(self, sink: Sink, *, timeout_s: float | None = None, grace_s: float = 2.0) -> Exit:
        """Feed stdin, deliver output, and return how the command ended; the VM is dead then, whatever happened.

        `timeout_s` counts from the command's start; the guest has `grace_s` after it to hand over the output that
        it holds. `Invalid` for a cwd that is none; `EngineUnavailable` for a guest that refused, panicked, or broke the
        protocol. QEMU killed from outside or by `kill` is status "killed".
        """

    def kill(self) -> None:
        """Kill the VM now. A command whose end was told before stays "completed"."""

    def memory_bytes(self) -> int:
        """Return what QEMU takes of the host's memory now (PSS: its share of what is shared), 0 when it is dead."""
