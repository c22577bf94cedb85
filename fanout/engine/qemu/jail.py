"""A helper program of a VM (QEMU, virtiofsd) in namespaces of its own, a child of the engine's spawner.

Owns how such a program is started, killed and found dead, and what its sandbox has in common. Knows nothing of what the
program does. bwrap is the launcher, as for commands: no network, no host's process or file in sight, no privileges, and
all of it dead when fanout is.
"""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Sequence

from fanout.engine.base import Mount
from fanout.engine.network import Network
from fanout.engine.spawning import Child, Spawner, memory_file, read_ending
from fanout.errors import EngineUnavailable

__all__ = ["Jail"]

#: Namespaces, and no way back to privileges. Files and capabilities are each program's own.
OPTIONS = (
    *("--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
    *("--die-with-parent", "--new-session", "--hostname", "fanout", "--uid", "0", "--gid", "0", "--cap-drop", "ALL"),
    *("--clearenv", "--setenv", "PATH", "/usr/bin:/bin", "--chdir", "/"),
)

#: How long a sandbox may take from its release to its program.
BUILD_S = 30.0

#: How long a killed one may take to be gone.
DEATH_S = 60.0

#: bwrap tells of a program that a signal ended as a shell does.
BY_SIGNAL = 128

#: What a start that failed may have said of it.
SAID_BYTES = 4096


class Jail:
    """A started program. `kill` and `poll` from any thread; `wait` once it was killed or is about to end."""

    def __init__(
        self,
        spawner: Spawner,
        bwrap: str,
        options: Sequence[str],
        argv: Sequence[str],
        *,
        output: int,
        others: Sequence[int] = (),
        open_files: int = 4096,
        network: Network | None = None,
    ) -> None:
        """Start `argv` with stdout and stderr at `output` and the descriptors `others` under their own numbers.

        `network` is its way out, else there is none. `EngineUnavailable` where the sandbox cannot be made.
        """
        numbers = _free_numbers(others)
        args = memory_file(os.fsencode("\0".join([*OPTIONS, *options]) + "\0"))
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        to_args, to_status, to_block, to_filter = map(str, numbers)
        words = [bwrap, "--args", to_args, "--json-status-fd", to_status, "--block-fd", to_block]
        words += ["--seccomp", to_filter, "--", *argv]
        child = Child(
            words,
            null,
            output,
            output,
            args,
            others=[(fd, fd) for fd in others],
            numbers=numbers,
            network=network,
            rlimits=[(resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, open_files)],
        )
        try:
            started = spawner.start(child, [])
        finally:
            os.close(args)
            os.close(null)
        if started is None:
            raise EngineUnavailable(f"the sandbox of {os.path.basename(argv[0])} could not be made")
        self._spawner = spawner
        self._reply: socket.socket | None = started.reply
        self._init_fd = started.init_fd
        self._signalling = threading.Lock()  # to use or close init_fd: its number is soon another's
        self._reading = threading.Lock()  # to read or close the socket
        self.init = started.init
        self.returncode: int | None = None
        self._status = started.status  # unread, but open: bwrap writes to it at the end
        try:
            os.write(started.block, b"1")
        except BrokenPipeError:
            pass  # it ended; `poll` says so
        self._building = started.block  # breaks when the sandbox is built, right before the program runs

    @property
    def pid(self) -> int:
        """The program's own process; that of its sandbox's init where it is not there yet, or any more."""
        try:
            with open(f"/proc/{self.init}/task/{self.init}/children") as file:
                return int(file.read().split()[0])
        except (OSError, IndexError):
            return self.init

    def attach(self, top: str, mounts: Sequence[Mount]) -> None:
        """Mount below `top`, a directory in it; `EngineUnavailable` where that fails."""
        with self._reading:
            if self._reply is None:
                raise EngineUnavailable("cannot mount in a sandbox: it is dead")
            if self._building >= 0 and not _polled(self._building, 0, BUILD_S):
                raise EngineUnavailable(f"a sandbox was not built within {BUILD_S:.0f} s")
            self._close_building()
            self._spawner.attach(self._reply, top, mounts)

    def death(self) -> int | None:
        """Return a new descriptor that can be read when it is dead; None if it was waited for."""
        with self._signalling:
            return fcntl.fcntl(self._init_fd, fcntl.F_DUPFD_CLOEXEC, 0) if self._init_fd >= 0 else None

    def kill(self) -> None:
        """Kill it, and all it started. Repeating it is harmless."""
        with self._signalling:
            if self._init_fd >= 0:
                try:
                    signal.pidfd_send_signal(self._init_fd, signal.SIGKILL)
                except ProcessLookupError:
                    pass  # dead already

    def poll(self) -> int | None:
        """Return its exit code if it has ended (negative: the signal), else None."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it, and all it started, is dead; return its exit code (-9 where the spawner died).

        `subprocess.TimeoutExpired` after `timeout` seconds.
        """
        with self._reading:
            if self.returncode is None:
                self._await_end(timeout)
            assert self.returncode is not None
            return self.returncode

    def end(self) -> None:
        """Kill it and wait until it is gone; `EngineUnavailable` where it does not go."""
        self.kill()
        try:
            self.wait(DEATH_S)
        except subprocess.TimeoutExpired:
            raise EngineUnavailable(f"process {self.init} is still there {DEATH_S:.0f} s after it was killed") from None

    def _await_end(self, timeout: float | None) -> None:
        assert self._reply is not None
        poll = select.poll()
        poll.register(self._reply, select.POLLIN)
        poll.register(self._spawner.pidfd, select.POLLIN)
        if not poll.poll(None if timeout is None else timeout * 1000):
            raise subprocess.TimeoutExpired("jail", timeout or 0)
        ending = read_ending(self._reply.fileno())
        if ending is None:  # no spawner any more: its sandboxes die with it
            self.kill()
            _polled(self._init_fd, select.POLLIN, DEATH_S)
        code = -signal.SIGKILL if ending is None else os.waitstatus_to_exitcode(ending.status)
        self.returncode = code if code <= BY_SIGNAL else BY_SIGNAL - code
        self._reply.close()
        self._reply = None
        with self._signalling:
            os.close(self._init_fd)
            self._init_fd = -1
        os.close(self._status)
        self._close_building()

    def _close_building(self) -> None:
        building, self._building = self._building, -1
        if building >= 0:
            os.close(building)


def _polled(fd: int, events: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(fd, events)
    return bool(poll.poll(seconds * 1000))


def _free_numbers(taken: Sequence[int]) -> tuple[int, int, int, int]:
    """Return numbers for bwrap's own descriptors that are in nobody's way."""
    free = (number for number in range(3, 4 + 4 + len(taken)) if number not in taken)
    return next(free), next(free), next(free), next(free)
