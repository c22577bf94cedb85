"""Asking the spawner process for sandboxes: it is started, sent requests, and found out when it is dead.

Owns the link to one `spawner.py` process, and the names of mount points in its namespace. Knows nothing of bwrap's
options.
"""

from __future__ import annotations

import array
import errno
import itertools
import marshal
import os
import select
import shutil
import socket
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fanout.engine import mapped, orphans, overlay, spawner
from fanout.engine.base import Mount
from fanout.engine.network import Network
from fanout.errors import EngineUnavailable

__all__ = ["Child", "Ending", "NotMapped", "Spawner", "SpawnerGone", "Started", "memory_file", "read_ending"]

#: How long the spawner may take to come up, and a sandbox from its request to a first sign of life.
SETUP_S = 60.0

#: How long the spawner may take to kill all it started, at the end.
END_S = 10.0


#: How long to wait, each time, for layers that another mount holds still: it is being unmounted.
ATTACH_DELAYS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.3)

#: How long a process may take from closing its files to being dead.
DEATH_S = 1.0


class SpawnerGone(EngineUnavailable):
    """The spawner died before it could start this one; nothing of it ever ran."""


class NotMapped(EngineUnavailable):
    """Mounts are not to be had for a sandbox with a user of its own, but for those that are started from now on."""


@dataclass(frozen=True, slots=True)
class Child:
    """What to start: a program with its three streams and bwrap's arguments (fds of ours), and overlays to mount.

    `network` leads out of its network namespace, which it must unshare. `rlimits` (which, how much) hold for the
    sandbox, as far as this process has that much itself. `others` are descriptors (fd, number in the child) it gets
    beside those, `numbers` where it finds bwrap's arguments,
    its status, what holds it, and the filter.
    """

    argv: Sequence[str | bytes]
    stdin: int
    stdout: int
    stderr: int
    args: int
    overlays: Sequence[tuple[str, Mount]] = ()
    rlimits: Sequence[tuple[int, int]] = ()
    network: Network | None = None
    others: Sequence[tuple[int, int]] = ()
    numbers: tuple[int, int, int, int] = (spawner.ARGS, spawner.STATUS, spawner.BLOCK, spawner.FILTER)


@dataclass(slots=True)
class Started:
    """A sandbox that was made, and waits for its release. The descriptors are the receiver's to close."""

    monitor: int
    init: int
    init_fd: int
    status: int
    block: int
    reply: socket.socket


@dataclass(frozen=True, slots=True)
class Ending:
    """How a sandbox ended: the wait status of its monitor, and what all its processes used (0 where not known)."""

    status: int
    cpu_s: float
    max_rss_bytes: int


class Spawner:
    """One spawner process, from now until `close`, its own death or the end of this object; with it dies what it made.

    With `private_mounts` (needs CAP_SYS_ADMIN) it has its own mount namespace and mounts overlays in it. Where `mapped`
    is true then, sandboxes run as users of their own, who see the host's paths `shown` at `seen_at`. Each sandbox gets
    `filter` (see `seccomp.py`) as its descriptor `spawner.FILTER`. Raises `EngineUnavailable` where one of these or the
    start fails.
    """

    def __init__(self, *, private_mounts: bool, filter: bytes, shown: Sequence[str] = ()) -> None:
        self.private_mounts = private_mounts
        self._shown = tuple(shown)
        self._numbers = itertools.count()
        self._free: deque[str] = deque()
        self._link, self.pid, self.pidfd = _start_process(private_mounts, filter, self._shown)
        weakref.finalize(self, os.close, self.pidfd)  # not at `close`: who waits for a sandbox watches it
        self._end = weakref.finalize(self, _end_process, os.getpid(), self._link, self.pid, self.pidfd)
        try:
            self.options, self.not_mapped = self._handshake()
            self._link.settimeout(SETUP_S)  # for what is sent to a spawner that was stopped
        except BaseException:
            self._end()
            raise

    @property
    def mapped(self) -> bool:
        """Whether sandboxes run as users of their own; `not_mapped` says why not."""
        return not self.not_mapped

    def seen_at(self, path: str) -> str:
        """Return where the sandboxes' user sees one of the host's paths to be shown."""
        return f"{mapped.SHOWN}/{self._shown.index(path)}" if self.private_mounts else path

    def named(self, said: bytes) -> bytes:
        """Return what bwrap said with the host's own paths in it."""
        for path in self._shown:
            said = said.replace(self.seen_at(path).encode(), os.fsencode(path))
        return said

    def mount_point(self) -> str:
        """Return the path, in the private namespace, of a mount point to be: nobody else's until `start` returns."""
        try:
            return self._free.pop()
        except IndexError:
            return f"{overlay.MOUNT_ROOT}/{next(self._numbers)}"

    def start(self, child: Child, ours: list[int]) -> Started | None:
        """Mount the child's overlays and start it; None if it ended by itself, with a word on its stderr.

        `ours` are descriptors to close once it has them: copies of ours would keep its pipes open.

        Raises `EngineUnavailable` where a mount or the start fails, `SpawnerGone` where nobody was there to do it. Then
        nothing stays mounted.
        """
        reply, theirs = _socket_pair()
        try:
            with theirs:
                self._send(child, theirs.fileno())
            while ours:
                os.close(ours.pop())
            started = self._answer(reply, child)
        except BaseException:
            self.abandon(reply)
            raise
        if started is None:
            reply.close()
        return started

    def attach(self, reply: socket.socket, top: str, mounts: Sequence[Mount]) -> None:
        """Mount in a sandbox that runs: at its targets below `top`, which is a directory of it.

        Raises `EngineUnavailable` where that fails; some may be mounted then. `NotMapped` where the owners of these
        files cannot be mapped: those that are started from now on can mount them.
        """
        overlays = [_overlay(mount.target, mount) for mount in mounts]
        message = marshal.dumps((top, overlays))
        if len(message) > spawner.INLINE_BYTES:
            raise EngineUnavailable(f"the paths of the mounts' layers are too long: {len(message)} bytes")
        for delay_s in ATTACH_DELAYS_S:
            try:
                reply.send(message, socket.MSG_NOSIGNAL)
            except OSError as error:
                raise EngineUnavailable(f"cannot mount in a sandbox: {error}") from error
            answer, _ = self._receive(reply)
            if answer is None or answer[0] != "attached":
                raise EngineUnavailable("cannot mount in a sandbox: it is dead")
            _, number, text, can_be_mapped = answer
            if not text:
                return
            if not can_be_mapped:
                raise NotMapped(f"cannot mount in a sandbox: {text}")
            if number != errno.EBUSY:
                break
            time.sleep(delay_s)
        raise EngineUnavailable(f"cannot mount in a sandbox: {text}")

    def abandon(self, reply: socket.socket) -> None:
        """Have a sandbox killed, and wait until it is dead."""
        try:
            reply.shutdown(socket.SHUT_WR)
            while _readable(END_S, reply.fileno(), self.pidfd) and reply.recv(4096, socket.MSG_DONTWAIT):
                pass
        except OSError:
            pass  # it was not connected any more, or its spawner is dead
        reply.close()

    def close(self) -> None:
        """End the process, and with it all that it started."""
        self._end()

    def forget(self) -> None:
        """Leave the process to another: called in a forked child, whose parent it serves."""
        self._end.detach()
        self._link.close()

    def _handshake(self) -> tuple[tuple[str, ...], str]:
        word, *said = self._receive(self._link)[0] or ("failed", "the spawner of sandboxes ended without a word")
        if word != "ready":
            raise EngineUnavailable(said[0])
        options, not_mapped = said
        return tuple(options), str(not_mapped)

    def _send(self, child: Child, reply: int) -> None:
        overlays = [_overlay(point, mount) for point, mount in child.overlays]
        numbers = (*child.numbers, *(number for _, number in child.others))
        argv, rlimits = tuple(map(os.fsencode, child.argv)), tuple(child.rlimits)
        way_out = child.network and (child.network.program, child.network.denied)
        body = marshal.dumps((argv, overlays, numbers, rlimits, way_out))
        fds = [reply, child.stdin, child.stdout, child.stderr, child.args, *(fd for fd, _ in child.others)]
        large = -1
        if len(body) > spawner.INLINE_BYTES:
            large = memory_file(body)
            fds.append(large)
        message = marshal.dumps((len(fds), None if large >= 0 else body))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        try:
            self._link.sendmsg([message], rights, socket.MSG_NOSIGNAL)
        except OSError as error:
            if isinstance(error, ConnectionError) or not self._end.alive:
                raise SpawnerGone("the spawner of sandboxes is dead") from error
            raise EngineUnavailable(f"cannot start a sandbox: {error}") from error
        finally:
            if large >= 0:
                os.close(large)

    def _answer(self, reply: socket.socket, child: Child) -> Started | None:
        message, fds = self._receive(reply)
        if message is None:
            if not _readable(DEATH_S, self.pidfd):
                raise EngineUnavailable("cannot start a sandbox: the spawner has too many open files")
            raise SpawnerGone("the spawner of sandboxes died before it could start this one")
        self._free.extend(point for point, _ in child.overlays)
        if message[0] == "failed":
            if message[1]:
                raise EngineUnavailable(message[1])
            return None
        _, monitor, init, self.not_mapped = message
        if len(fds) < 3:
            for fd in fds:
                os.close(fd)
            raise EngineUnavailable("cannot start a sandbox: too many open files")
        reply.setblocking(False)
        init_fd, status, block = fds
        return Started(monitor, init, init_fd, status, block, reply)

    def _receive(self, source: socket.socket) -> tuple[Any, list[int]]:
        """Return the next message and its descriptors; None if there will be none."""
        if not _readable(SETUP_S, source.fileno(), self.pidfd):
            raise EngineUnavailable(f"no sandbox was made within {SETUP_S:.0f} s")
        fds = array.array("i")
        try:
            flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            data, extra, _, _ = source.recvmsg(64 * 1024, socket.CMSG_SPACE(4 * 4), flags)
        except (BlockingIOError, ConnectionError):  # the process ended, and had said nothing
            return None, []
        for _, _, told in extra:
            fds.frombytes(told[: len(told) // 4 * 4])
        return (marshal.loads(data) if data else None), list(fds)


def read_ending(reply: int) -> Ending | None:
    """Read how a sandbox ended, from a socket that does not block; None where its spawner has not said so."""
    try:
        data = os.read(reply, 4096)
    except OSError:
        return None
    if not data:
        return None
    _, (status, cpu_s, rss), usage = marshal.loads(data)
    if usage is None:  # the monitor outlived its init and collected it, and with it the usage of all the sandbox
        return Ending(status, cpu_s, rss)
    return Ending(status, *usage)


def memory_file(data: bytes) -> int:
    """Return a file in memory that holds `data`."""
    fd = os.memfd_create("fanout-bwrap", os.MFD_CLOEXEC)
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _overlay(point: str, mount: Mount) -> overlay.Overlay:
    lowers = tuple(map(os.fsencode, mount.lowers))
    return os.fsencode(point), lowers, os.fsencode(mount.upper or ""), os.fsencode(mount.work or "")


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    try:
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        raise EngineUnavailable(f"cannot start a sandbox: {error}") from error


def _start_process(private_mounts: bool, filter: bytes, shown: Sequence[str]) -> tuple[socket.socket, int, int]:
    """Start the spawner; return the link to it, its pid and a pidfd of it."""
    python = None if getattr(sys, "frozen", False) else sys.executable
    python = python or shutil.which("python3")
    if not python:
        raise EngineUnavailable("there is no Python interpreter to run the spawner of sandboxes with")
    ours, theirs = _socket_pair()
    passed = [theirs.fileno()]
    try:
        passed += (os.pidfd_open(os.getpid()), memory_file(filter))
        words = [*map(str, passed), *(("private", *shown) if private_mounts else ("shared",))]
        process = subprocess.Popen(
            [python, "-I", "-S", spawner.__file__, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=passed,
            env={name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
            cwd="/",
            start_new_session=True,
        )
        process.returncode = 0  # `_end_process` collects it: keep Popen's finalizer from doing so
        return ours, process.pid, os.pidfd_open(process.pid)
    except OSError as error:
        ours.close()
        raise EngineUnavailable(f"cannot start the spawner of sandboxes: {error}") from error
    finally:
        theirs.close()
        for fd in passed[1:]:
            os.close(fd)


def _end_process(owner: int, link: socket.socket, pid: int, pidfd: int) -> None:
    """End the spawner of this process; a forked child must leave its parent's alone."""
    if os.getpid() == owner:
        killed = _readable(0, pidfd)
        try:
            link.shutdown(socket.SHUT_RDWR)  # a forked child may hold it too
        except OSError:
            pass  # it is dead
        if _readable(END_S, pidfd):
            try:
                os.waitpid(pid, 0)
            except ChildProcessError:
                pass  # collected by somebody who collects every child
        if killed:
            orphans.sweep()  # it had no time to kill what it was building
    link.close()


def _readable(seconds: float, *fds: int) -> bool:
    """Wait until one of them can be read (a pidfd: is dead); False if none can."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
