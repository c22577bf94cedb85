"""One running sandbox: its pipes, its timeout, its death and its accounting.

Owns the file descriptors of a started bwrap. Knows nothing of bwrap's options, mounts or cgroup files.

Who is who: the *monitor* is bwrap as the spawner started it, its child; the *init* is pid 1 of the sandbox's pid
namespace, the monitor's child; the *leader* is the command. The leader ends, the init tells the monitor, the monitor
writes `{"exit-code": n}` to the status pipe and ends; the spawner then kills the init, and with it all that is left.
An init can be collected only when its whole namespace is dead: then the spawner says so, and that is what `wait` waits
for. Where the spawner itself dies, the monitors die with it (bwrap's parent-death signal), and their inits.

How the command's own failure and bwrap's are told apart: bwrap writes the exit code to the status pipe only when
the command was executed, and that pipe is closed inside the sandbox. Without an exit code nothing of the command
ever ran, so what is on stderr was written by bwrap alone and can be trusted.
"""

from __future__ import annotations

import json
import os
import select
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NoReturn

from fanout.engine.base import Exit, Process, Sink, Spec
from fanout.engine.limits import Cgroup
from fanout.engine.quota import DiskWatch
from fanout.engine.spawning import Ending, Spawner, read_ending
from fanout.errors import EngineUnavailable, Invalid
from fanout.runtime import Runtime

__all__ = ["Pipes", "SandboxProcess", "disk_watch", "raise_setup_failure"]

CHUNK_BYTES = 64 * 1024

#: bwrap's messages begin so. Output that does is held back until it is known who wrote it.
MARK = b"bwrap: "
HELD_BYTES = 8 * 1024

#: How much longer than the command's timeout building its sandbox may take.
BUILD_S = 60.0

#: More chunks than a pipe can hold: what is read of it after everything is dead (somebody else may hold it still).
LEFT_CHUNKS = 64

#: How long a killed sandbox may take to be gone before the engine says that it cannot (a process in an
#: uninterruptible wait, as on a hung network file system).
DEATH_S = 60.0

#: The exit code that bwrap gives for an init or a leader ended by SIGKILL.
KILLED = 128 + signal.SIGKILL

Status = Literal["completed", "timed_out", "killed", "oom"]
Limit = Literal["time", "memory", "disk", "pids"]


@dataclass(slots=True)
class Pipes:
    """Our ends of a sandbox's pipes; -1 where closed. `started` breaks when the sandbox is built (see `wait`).

    `end` is where the spawner tells how it ended.
    """

    stdout: int
    stderr: int
    stdin: int
    status: int = -1
    started: int = -1
    end: int = -1

    def close(self) -> None:
        """Close what is open."""
        for name in ("stdout", "stderr", "stdin", "status", "started", "end"):
            self.close_one(name)

    def close_one(self, name: str) -> None:
        """Close one pipe, if it is open."""
        fd = getattr(self, name)
        setattr(self, name, -1)
        if fd >= 0:
            os.close(fd)


class SandboxProcess(Process):
    """A started bwrap whose init is known by a pidfd. `released` is called once, when `wait` is done with it."""

    def __init__(
        self,
        spec: Spec,
        pipes: Pipes,
        *,
        spawner: Spawner,
        monitor: int,
        init: int,
        init_fd: int,
        cgroup: Cgroup | None,
        runtime: Runtime,
        released: Callable[[SandboxProcess], None],
    ) -> None:
        self._spec = spec
        self._pipes = pipes
        self._spawner = spawner
        self._monitor = monitor
        self._init = init
        self._init_fd = init_fd
        self._signalling = threading.Lock()  # held to use or close init_fd: its number is soon another sandbox's
        self._cgroup = cgroup
        self._runtime = runtime
        self._disk = disk_watch(spec, runtime)
        self._limit: Limit | None = None
        self._released = released
        self._ended_by: Status | None = None
        self._exit_code: int | None = None
        self._status_text = b""
        self._held: bytearray | None = bytearray()
        self._stdin_left = memoryview(spec.stdin or b"")
        self._started_s = runtime.monotonic()
        self._ended_s: float | None = None
        self._killed_s: float | None = None
        self._ending: Ending | None = None
        self._orphaned = False  # the spawner is dead
        self._dead = False

    def kill(self) -> None:
        """Kill the sandbox. Safe from any thread, also after its end."""
        self._end("killed")

    def _end(self, why: Status) -> None:
        if self._ended_by is None:
            self._ended_by = why
        self._kill_init()

    def _kill_init(self) -> None:
        if self._killed_s is None:
            self._killed_s = self._runtime.monotonic()
        with self._signalling:
            if self._init_fd >= 0:
                try:
                    signal.pidfd_send_signal(self._init_fd, signal.SIGKILL)
                except ProcessLookupError:
                    pass  # dead already

    def wait(self, sink: Sink) -> Exit:
        """See `Process.wait`."""
        failure: BaseException | None = None
        deliver = sink
        try:
            while True:
                try:
                    self._pump(deliver)
                    break
                except _Immortal:
                    raise
                except BaseException as error:
                    failure = failure or error
                    deliver = _discard
                    self._end("killed")
            ending = self._ending or Ending(signal.SIGKILL, 0, 0)
            if failure is None:
                self._settle(ending.status, sink)
            exit = self._exit(ending)
        finally:
            self._close()
        if failure is not None:
            raise failure
        return exit

    def _pump(self, sink: Sink) -> None:
        """Move bytes until every process of the sandbox is dead, then take what is left in the pipes."""
        poll = select.poll()
        handlers: dict[int, Callable[[], bool]] = {}

        def watch(fd: int, events: int, handler: Callable[[], bool]) -> None:
            if fd >= 0:
                poll.register(fd, events)
                handlers[fd] = handler

        pipes = self._pipes
        watch(pipes.stdout, select.POLLIN, lambda: self._read("stdout", sink))
        watch(pipes.stderr, select.POLLIN, lambda: self._read("stderr", sink))
        watch(pipes.stdin, select.POLLOUT, self._feed)
        watch(pipes.status, select.POLLIN, self._read_status)
        watch(pipes.started, 0, self._mark_start)
        watch(pipes.end, select.POLLIN, self._read_end)
        watch(self._spawner.pidfd, select.POLLIN, self._read_end)
        while not self._dead:
            for fd, _ in poll.poll(self._patience_ms()):
                if fd in handlers and not handlers[fd]():
                    poll.unregister(fd)
                    del handlers[fd]
            if self._orphaned and self._init_fd not in handlers:
                watch(self._init_fd, select.POLLIN, self._mark_dead)
        streams: tuple[Literal["stdout", "stderr"], ...] = ("stdout", "stderr")
        for name in streams:
            for _ in range(LEFT_CHUNKS):
                if getattr(pipes, name) < 0 or not self._read(name, sink):
                    break
        while pipes.status >= 0 and self._read_status():
            pass

    def _patience_ms(self) -> float | None:
        """Return how long to wait for the next event; kills when the time is up."""
        now = self._runtime.monotonic()
        if self._killed_s is not None:
            if now > self._killed_s + DEATH_S:
                raise _Immortal(
                    f"processes of the sandbox (init {self._init}) are still there {DEATH_S:.0f} s after the kill"
                )
            return (self._killed_s + DEATH_S - now) * 1000 + 1
        if self._disk is not None and self._disk.exceeded():
            self._limit = "disk"
            self._end("killed")
            return DEATH_S * 1000
        look_ms = None if self._disk is None else max(0.0, self._disk.next_s - now) * 1000 + 0.5
        timeout_s = self._spec.limits.timeout_s
        if timeout_s is None:
            return look_ms
        building = self._pipes.started >= 0  # not the command's time: on a busy host it may take a while
        left = self._started_s + timeout_s + (BUILD_S if building else 0) - now
        if left > 0:
            left_ms = left * 1000 + 0.5
            return left_ms if look_ms is None else min(left_ms, look_ms)
        self._end("timed_out")
        return DEATH_S * 1000

    def _read(self, name: Literal["stdout", "stderr"], sink: Sink) -> bool:
        """Deliver one chunk; False at the end of the stream or, after death, when nothing is left."""
        try:
            chunk = os.read(getattr(self._pipes, name), CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            self._pipes.close_one(name)
            return False
        if name == "stderr" and self._held is not None:
            self._held += chunk
            if len(self._held) < HELD_BYTES and self._held[: len(MARK)] == MARK[: len(self._held)]:
                return True
            chunk, self._held = bytes(self._held), None
        sink(name, chunk)
        return True

    def _feed(self) -> bool:
        try:
            written = os.write(self._pipes.stdin, self._stdin_left[:CHUNK_BYTES])
        except BlockingIOError:
            return True
        except OSError:  # nobody reads it any more
            self._pipes.close_one("stdin")
            return False
        self._stdin_left = self._stdin_left[written:]
        if not self._stdin_left:
            self._pipes.close_one("stdin")
        return bool(self._stdin_left)

    def _mark_start(self) -> bool:
        """Note the start: the sandbox closed its end of the block pipe, the last thing before it runs the command."""
        self._started_s = self._runtime.monotonic()
        self._pipes.close_one("started")
        return False

    def _read_status(self) -> bool:
        try:
            chunk = os.read(self._pipes.status, 4096)
        except BlockingIOError:
            return False
        if not chunk:
            self._pipes.close_one("status")
            return False
        self._status_text += chunk
        *lines, self._status_text = self._status_text.split(b"\n")
        for line in lines:
            code = json.loads(line).get("exit-code")
            if code is not None:
                self._exit_code = code
                self._ended_s = self._runtime.monotonic()
        return True

    def _read_end(self) -> bool:
        """Learn how all ended, from the spawner, or that there is no spawner any more."""
        if self._dead:
            return False
        self._ending = read_ending(self._pipes.end)
        if self._ending is not None:
            self._dead = True
        else:
            self._spawner.close()
            self._end("killed")
            self._orphaned = True
        return False

    def _mark_dead(self) -> bool:
        self._dead = True
        return False

    def _settle(self, monitor_status: int, sink: Sink) -> None:
        """Deliver the stderr that was held back, or raise what bwrap said if the command never ran."""
        held, self._held = bytes(self._held or b""), None
        ran = self._exit_code is not None or self._ended_by is not None or os.WIFSIGNALED(monitor_status)
        if ran:
            if held:
                sink("stderr", held)
            return
        missing = _exec_failure(self._spec, held)
        if missing is None:
            raise_setup_failure(self._spec, self._spawner.named(held))
        self._exit_code, message = missing
        sink("stderr", message)

    def _exit(self, ending: Ending) -> Exit:
        usage = (ending.cpu_s, ending.max_rss_bytes)
        if self._cgroup is not None:
            usage = self._cgroup.usage() or usage
        status: Status = self._ended_by or "completed"
        if self._cgroup is not None and self._cgroup.oom():
            status = "oom"
        elif self._exit_code is None and os.WIFSIGNALED(ending.status):
            status = self._ended_by or "killed"
        elif self._exit_code not in (None, KILLED):
            status = "completed"  # it had ended by itself when the kill came
        limit: Limit | None = self._limit
        if status == "timed_out":
            limit = "time"
        elif status == "oom":
            limit = "memory"
        elif status == "completed":
            limit = "pids" if self._cgroup is not None and self._cgroup.pids_met() else None
        return Exit(
            status=status,
            exit_code=self._exit_code if status == "completed" else None,
            started_s=self._started_s,
            ended_s=max(self._started_s, self._ended_s or self._runtime.monotonic()),
            cpu_s=usage[0],
            max_rss_bytes=usage[1],
            limit=limit,
        )

    def _close(self) -> None:
        self._pipes.close()
        with self._signalling:
            os.close(self._init_fd)
            self._init_fd = -1
        if self._cgroup is not None:
            self._cgroup.remove()
        self._released(self)


class _Immortal(EngineUnavailable):
    """Killed processes that do not die."""


def disk_watch(spec: Spec, runtime: Runtime) -> DiskWatch | None:
    """Return what tells that a command has written more than it may; None where there is no such limit."""
    layers = [mount.upper for mount in spec.mounts if mount.upper is not None]
    if spec.limits.disk_bytes is None or not layers:
        return None
    return DiskWatch(layers, spec.limits.disk_bytes, runtime)


def _discard(stream: str, chunk: bytes) -> None:
    """Take output that nobody wants any more."""


def _exec_failure(spec: Spec, said: bytes) -> tuple[int, bytes] | None:
    """Return the exit code and message of a command that could not be executed, as a shell would give them."""
    name = os.fsencode(spec.argv[0])
    start = MARK + b"execvp " + name + b": "
    if not said.startswith(start):
        return None
    reason = said[len(start) :]
    return (127 if reason.startswith(b"No such file") else 126), name + b": " + reason


def raise_setup_failure(spec: Spec, said: bytes) -> NoReturn:
    """Raise what bwrap said instead of running the command."""
    start = MARK + b"Can't chdir to " + os.fsencode(spec.cwd) + b": "
    if said.startswith(start):
        raise Invalid.argument("cwd", spec.cwd, said[len(start) :].decode(errors="replace").strip())
    message = said.decode(errors="replace").removeprefix("bwrap: ").strip() or "bwrap ended without a word"
    raise EngineUnavailable(f"the sandbox could not be made: {message}")
