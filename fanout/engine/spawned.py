"""What the spawner process knows of one sandbox, and how it handles the processes of one.

Owns the record of a sandbox, and acting for its user. Decides nothing: that is `spawner.py`'s. Part of the spawner
process, so it imports the standard library only.
"""

from __future__ import annotations

import io
import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Any

    from fanout.engine import identities, network, overlay

__all__ = ["Children", "Sandbox", "acting_as", "limit", "mark_for_oom", "moves"]


class Sandbox:
    """One request and what became of it; descriptors are -1 where closed."""

    def __init__(
        self,
        reply: socket.socket,
        streams: list[int],
        argv: tuple[bytes, ...],
        overlays: Sequence[overlay.Overlay],
        numbers: tuple[int, ...],
        rlimits: tuple[tuple[int, int], ...],
        way_out: network.Network | None,
        identity: identities.Identity | None,
        tried_until_s: float,
    ) -> None:
        self.reply = reply
        self.identity = identity  # whom it runs as, if not as this process's user
        self.streams = streams  # stdin, stdout, stderr, arguments, then others; closed once the monitor has them
        self.numbers = numbers  # of the arguments, the status, what holds it, the filter, and the others, in the child
        self.argv = argv
        self.rlimits = rlimits
        self.way_out = way_out
        self.connection: network.Connection | None = None
        self.overlays = overlays
        self.mounted = 0  # so many of the overlays, and not yet detached
        self.tried_until_s = tried_until_s
        self.monitor = 0
        self.status = -1  # until the monitor has said what its init is
        self.hold = -1  # the writing end of what holds the init: without it, fanout's death would let it go on
        self.init = 0
        self.init_fd = -1
        self.up = False  # handed over
        self.ended: tuple[int, float, int] | None = None  # the monitor: wait status, CPU seconds, peak bytes
        self.usage: tuple[float, int] | None = None  # the init with all that was in it, if it fell to us
        self.said = b""  # the monitor, of its init
        self.why = ""  # it was not made, where bwrap's own words do not tell


class Children:
    """This process's children, zombies too. What it reads is open from the start: files may be short later."""

    def __init__(self) -> None:
        self._listed: io.FileIO | None = None
        try:
            self._listed = io.FileIO(f"/proc/self/task/{os.getpid()}/children")
        except FileNotFoundError:
            pass  # a kernel without it

    def pids(self) -> list[int]:
        """Return them; OSError where there is no telling."""
        if self._listed is not None:
            self._listed.seek(0)
            return [int(pid) for pid in self._listed.readall().split()]
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
                    parent = int(file.read(4096).rpartition(b")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == os.getpid():
                found.append(int(pid))
        return found


def moves(wanted: Sequence[tuple[int, int]], opened: tuple[str, int], reserved: int) -> list[tuple[Any, ...]]:
    """Return what gives a child these descriptors under these numbers, in whatever order they overlap.

    `opened` is a file that it gets opened anew, at its start. All of ours have numbers from `reserved` on.
    """
    path, place = opened
    if all(number < reserved for _, number in wanted):  # then none is one of ours
        copied = [(os.POSIX_SPAWN_DUP2, fd, number) for fd, number in wanted]
        return [*copied, (os.POSIX_SPAWN_OPEN, place, path, os.O_RDONLY, 0)]
    free = max(reserved, place, *(number for pair in wanted for number in pair)) + 1
    done: list[tuple[Any, ...]] = [(os.POSIX_SPAWN_OPEN, free, path, os.O_RDONLY, 0)]
    done += [(os.POSIX_SPAWN_DUP2, fd, free + 1 + i) for i, (fd, _) in enumerate(wanted)]
    for i, number in enumerate((place, *(number for _, number in wanted))):
        done += [(os.POSIX_SPAWN_DUP2, free + i, number), (os.POSIX_SPAWN_CLOSE, free + i)]
    return done


def mark_for_oom(pid: int) -> None:
    """Have the kernel, when it runs out of memory, kill what a process is and starts before anybody else."""
    try:
        fd = os.open(f"/proc/{pid}/oom_score_adj", os.O_WRONLY)
    except OSError:
        return  # it is not dumpable, and we are not root
    try:
        os.write(fd, b"1000")
    except OSError:
        pass  # a security module says no, or it is dead
    finally:
        os.close(fd)


def limit(pid: int, which: int, most: int) -> None:
    """Set one limit of a process, as far as it may have that much."""
    _, hard = resource.prlimit(pid, which)
    most = most if hard == resource.RLIM_INFINITY else min(hard, most)
    resource.prlimit(pid, which, (most, most))


@contextmanager
def acting_as(identity: identities.Identity | None) -> Iterator[None]:
    """Be somebody else for a moment; what is started then keeps no right of ours."""
    if identity is None:
        yield
        return
    os.setresgid(identity.number, identity.number, 0)
    os.setresuid(identity.number, identity.number, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)
