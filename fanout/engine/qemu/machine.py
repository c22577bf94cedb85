"""One virtual machine: QEMU as a process, the agent in it as a peer, one command, the end.

Owns the host's side of the conversation. Knows nothing of mounts, of virtiofsd, of the sandbox that QEMU itself runs in
(`launch` is the caller's) and of pools. Blocking. Everything a guest sends is taken as hostile.
"""

from __future__ import annotations

import dataclasses
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn
from typing import Protocol as Shape

from fanout.engine.base import Exit, Sink
from fanout.engine.qemu import protocol
from fanout.engine.qemu.command import PORT, ROOT_TAG, Acceleration, Guest, Inherited, command_line
from fanout.engine.qemu.image import Image
from fanout.engine.qemu.monitor import Monitor
from fanout.engine.qemu.protocol import STDIN_CLOSED, STDIN_WINDOW, Frame, Kind, Request, Stage
from fanout.errors import EngineUnavailable, Invalid
from fanout.runtime import Runtime, system

__all__ = ["Acceleration", "Files", "Guest", "Hypervisor", "Launch", "Machine"]

#: What is kept of the console, for messages.
CONSOLE_BYTES = 8 * 1024

#: How much of it a message shows.
SHOWN_BYTES = 600

#: How long a guest may take to make the command's sandbox, and to take a request.
BUILD_S = 60.0
SEND_S = 30.0

#: How many times the grace a guest without KVM has to hand over its output: where many compute it waits for its turn.
EMULATED_PATIENCE = 5

#: How long a killed QEMU may take to be gone.
DEATH_S = 60.0

#: Memory that is a shared file is not part of a saved state.
WITHOUT_MEMORY = [{"capability": "x-ignore-shared", "state": True}]

Limit = Literal["time", "memory", "disk", "pids"]
Status = Literal["completed", "timed_out", "killed", "oom"]


class Hypervisor(Shape):
    """The started QEMU, as `launch` returns it; `subprocess.Popen` is one. `pid` is QEMU's own."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


#: Starts QEMU: its argv, the descriptors it must inherit under the same numbers, and the one that becomes its stdout
#: and stderr (stdin is /dev/null). QEMU opens nothing but the image's two files, its own firmware, /dev/kvm with KVM,
#: and what its `netdev` needs.
Launch = Callable[[Sequence[str], Sequence[int], int], Hypervisor]


@dataclass(frozen=True, slots=True)
class Files:
    """Files (descriptors, the caller's) that make a machine one to copy: its memory, and the state of all the rest.

    With `resumes` it does not boot but goes on from these; else it boots, and `Machine.save` writes them.
    """

    memory: int
    state: int
    resumes: bool


@dataclass(slots=True)
class _Conversation:
    """What `wait` knows of the command."""

    stdin: memoryview
    name: bytes
    cwd: bytes
    sent_s: float
    started_s: float | None = None
    kill_sent_s: float | None = None
    end: Frame | None = None
    end_s: float = 0.0
    stdin_sent: int = 0
    stdin_credited: int = 0
    stdin_over: bool = False


class Machine:
    """A VM for one command: start, wait_ready, send, wait; then it is gone. `kill` and `alive` from any thread.

    `filesystem` is connected to a vhost-user-fs back end (virtiofsd) that serves the tag `root`; `start` closes ours.
    None gives a VM without a file system, for probes. What is served need not be complete before `send`. With `files`
    the machine can be saved when it is ready, before its file system is plugged in: `wait_ready`, `save`, `plug`.
    """

    def __init__(
        self,
        image: Image,
        guest: Guest,
        *,
        filesystem: socket.socket | None,
        launch: Launch,
        files: Files | None = None,
        runtime: Runtime = system,
    ) -> None:
        self._image = image
        self._guest = guest
        self._filesystem = filesystem
        self._files = files
        self._monitor_end: socket.socket | None = None
        self._monitor: Monitor | None = None
        self._launch = launch
        self._runtime = runtime
        self._lock = threading.Lock()
        self._hypervisor: Hypervisor | None = None
        self._agent: socket.socket | None = None
        self._console: socket.socket | None = None
        self._console_tail = bytearray()
        self._frames = protocol.Frames()
        self._outgoing = bytearray()
        self._started_s = 0.0
        self._killed = False
        self._talk: _Conversation | None = None

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start QEMU; returns at once. `EngineUnavailable` where it cannot be started."""
        self._agent, agent_there = socket.socketpair()
        self._console, console_there = socket.socketpair()
        there = [agent_there, console_there]
        numbers = Inherited(agent_there.fileno(), console_there.fileno())
        if self._filesystem is not None:
            there.append(self._filesystem)
            numbers = replace(numbers, filesystem=self._filesystem.fileno())
        if self._files is not None:
            self._monitor_end, monitor_there = socket.socketpair()
            there.append(monitor_there)
            memory, resumes = self._files.memory, self._files.resumes
            numbers = replace(numbers, monitor=monitor_there.fileno(), memory=memory, resumes=resumes)
        inherited = [each.fileno() for each in there] + ([self._files.memory] if self._files else [])
        try:
            argv = command_line(self._image, self._guest, numbers)
            self._started_s = self._runtime.monotonic()
            with self._lock:
                if self._killed:
                    raise EngineUnavailable("the virtual machine was killed before it was started")
                self._hypervisor = self._launch(argv, inherited, console_there.fileno())
        except OSError as error:
            self._dispose()
            raise EngineUnavailable(f"cannot start QEMU: {error}") from error
        except BaseException:
            self._dispose()
            raise
        finally:
            for each in there:
                each.close()
        self._agent.setblocking(False)
        self._console.setblocking(False)

    def wait_ready(self, timeout_s: float = 30.0) -> float:
        """Wait until the agent answers, its file system mounted if it has one; return the seconds since `start`.

        `EngineUnavailable` says what happened instead (QEMU ended, the guest panicked, no answer in time), with the end
        of the console; the VM is dead then.
        """
        deadline = self._started_s + timeout_s
        if self._files is not None and self._files.resumes:
            self._ask("migrate-set-capabilities", capabilities=WITHOUT_MEMORY)
            self._ask("getfd", self._files.state, fdname="state")
            self._ask("migrate-incoming", uri="fd:state")
            self._asked("query-status", "paused", ("inmigrate",))
            self.plug(timeout_s)
        else:
            self._expect(Kind.READY, deadline)
            if self._files is None and self._filesystem is not None:
                self._tell(Kind.PREPARE, Kind.PREPARED, deadline)
        return self._runtime.monotonic() - self._started_s

    def save(self, timeout_s: float = 30.0) -> None:
        """Write its state; memory and state are then those of a machine that was not given anything yet.

        It stands still until `plug`. `EngineUnavailable` where that fails; the VM is dead then.
        """
        assert self._files is not None
        self._tell(Kind.SETTLE, Kind.SETTLED, self._runtime.monotonic() + timeout_s)
        self._ask("stop")
        self._ask("migrate-set-capabilities", capabilities=WITHOUT_MEMORY)
        self._ask("getfd", self._files.state, fdname="state")
        self._ask("migrate", uri="fd:state")
        self._asked("query-migrate", "completed", ("setup", "active", "device"))

    def plug(self, timeout_s: float = 30.0) -> None:
        """Plug the file system in, and let the machine go on. `EngineUnavailable` as from `wait_ready`."""
        driver = {"driver": "vhost-user-fs-pci", "chardev": "files", "tag": ROOT_TAG, "queue-size": 256}
        self._ask("device_add", bus=PORT, **driver)
        self._ask("cont")
        self._tell(Kind.PREPARE, Kind.PREPARED, self._runtime.monotonic() + timeout_s)

    def alive(self) -> bool:
        """Say whether QEMU still runs."""
        return self._hypervisor is not None and self._hypervisor.poll() is None

    def kill(self) -> None:
        """Kill the VM now. A command whose end was told before stays "completed"."""
        with self._lock:
            self._killed = True
            if self._hypervisor is not None:
                self._hypervisor.kill()

    def close(self) -> None:
        """Kill the VM, wait for its end and release what is held of it. Not while another thread is in `wait`."""
        self.kill()
        self._dispose()

    def memory_bytes(self) -> int:
        """Return what QEMU takes of the host's memory now (PSS: its share of what is shared), 0 when it is dead."""
        if self._hypervisor is None:
            return 0
        try:
            with open(f"/proc/{self._hypervisor.pid}/smaps_rollup") as lines:
                return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
        except OSError:
            return 0

    def rehearse(self, request: Request, timeout_s: float = 30.0) -> None:
        """Run something as a trial: a command like it starts sooner. `EngineUnavailable` as from `wait_ready`."""
        self._outgoing += protocol.encode_request(request, Kind.REHEARSE)
        self._expect(Kind.REHEARSED, self._runtime.monotonic() + timeout_s)

    def _ask(self, command: str, *fds: int, **arguments: Any) -> None:
        """Have QEMU do something."""
        try:
            if self._monitor is None:
                assert self._monitor_end is not None
                self._monitor = Monitor(self._monitor_end, self._runtime)
            self._monitor.ask(command, *fds, **arguments)
        except EngineUnavailable as error:
            self._fail(str(error))

    def _asked(self, command: str, wanted: str, passing: tuple[str, ...]) -> None:
        """Wait until QEMU is in a state."""
        self._ask(command)
        assert self._monitor is not None
        try:
            self._monitor.await_status(command, wanted, passing)
        except EngineUnavailable as error:
            self._fail(str(error))

    def _tell(self, kind: Kind, answer: Kind, deadline: float) -> None:
        """Have the agent do something before it is asked for a command."""
        self._outgoing += protocol.encode(kind, ROOT_TAG.encode() if kind is Kind.PREPARE else b"")
        self._expect(answer, deadline)

    def _expect(self, kind: Kind, deadline: float) -> None:
        """Wait for this frame; no other may come before it."""
        try:
            while (left_s := deadline - self._runtime.monotonic()) > 0:
                for frame in self._turn(left_s):
                    if frame.kind is not kind:
                        raise protocol.BadFrame(f"{frame.kind.name} instead of {kind.name}")
                    if kind is Kind.READY:
                        protocol.check_ready(frame.payload)
                    return
            self._fail(f"its agent did not answer within {deadline - self._started_s:.0f} s")
        except protocol.BadFrame as error:
            self._fail(f"its agent does not speak our protocol: {error}")
        except _Gone:
            self._fail(self._death())

    # --- the command --------------------------------------------------------------------------------------------------

    def send(self, request: Request, stdin: bytes | None = None) -> None:
        """Ask for the command; returns once the request is written. `EngineUnavailable` where the VM died."""
        now = self._runtime.monotonic()
        if request.now_ns is not None:  # it may have waited for this VM
            request = dataclasses.replace(request, now_ns=self._runtime.now_ns())
        self._talk = _Conversation(memoryview(stdin or b""), request.argv[0], request.cwd, now)
        self._outgoing += protocol.encode_request(request)
        if not stdin:
            self._end_stdin()
        try:
            while self._outgoing:
                if self._runtime.monotonic() > now + SEND_S:
                    self._fail(f"its agent did not take the request within {SEND_S:.0f} s")
                self._flush()
                if self._outgoing:
                    _ready(self._agent, select.POLLOUT, 100)
                    if not self.alive():
                        raise _Gone
        except _Gone:
            if not self._killed:  # else `wait` says so
                self._fail(self._death())

    def wait(self, sink: Sink, *, timeout_s: float | None = None, grace_s: float = 2.0) -> Exit:
        """Feed stdin, deliver output, and return how the command ended; the VM is dead then, whatever happened.

        `timeout_s` counts from the command's start; the guest has `grace_s` after it, five times that without KVM,
        to hand over the output that it holds. `Invalid` for a cwd that is none; `EngineUnavailable` for a guest that
        refused, panicked, or broke the protocol. QEMU killed from outside or by `kill` is status "killed".
        """
        talk = self._talk
        if talk is None:
            raise RuntimeError("send was not called")
        if self._guest.acceleration == "tcg":
            grace_s *= EMULATED_PATIENCE
        try:
            while talk.end is None:
                for frame in self._turn(self._patience_s(talk, timeout_s, grace_s)):
                    self._take(talk, frame, sink)
                self._feed(talk)
            return self._settle(talk, talk.end, sink)
        except protocol.BadFrame as error:
            self._fail(f"its agent broke the protocol: {error}")
        except _Gone:
            return self._lost(talk)
        finally:
            self._dispose()

    def _take(self, talk: _Conversation, frame: Frame, sink: Sink) -> None:
        match frame.kind:
            case Kind.STDOUT if talk.started_s is not None:
                sink("stdout", frame.payload)
            case Kind.STDERR if talk.started_s is not None:
                sink("stderr", frame.payload)
            case Kind.STARTED if talk.started_s is None:
                talk.started_s = self._runtime.monotonic()
            case Kind.CREDIT:
                credit = protocol.decode_credit(frame.payload)
                if credit == STDIN_CLOSED:
                    talk.stdin_over = True
                elif credit > talk.stdin_sent - talk.stdin_credited:
                    raise protocol.BadFrame("more stdin taken than was sent")
                else:
                    talk.stdin_credited += credit
            case Kind.EXIT | Kind.REFUSED if talk.end is None:
                talk.end, talk.end_s = frame, self._runtime.monotonic()
            case _:
                raise protocol.BadFrame(f"{frame.kind.name} out of turn")

    def _feed(self, talk: _Conversation) -> None:
        """Queue as much stdin as the guest has room for, while the socket takes it."""
        while not talk.stdin_over and not self._outgoing:
            window = STDIN_WINDOW - (talk.stdin_sent - talk.stdin_credited)
            piece = talk.stdin[talk.stdin_sent : talk.stdin_sent + min(window, protocol.MAX_PAYLOAD)]
            if len(piece):
                self._outgoing += protocol.encode(Kind.STDIN, piece)
                talk.stdin_sent += len(piece)
            if talk.stdin_sent == len(talk.stdin):
                self._end_stdin()
            if not self._outgoing:
                break
            self._flush()

    def _end_stdin(self) -> None:
        assert self._talk is not None
        self._talk.stdin_over = True
        self._outgoing += protocol.encode(Kind.STDIN_END)

    def _patience_s(self, talk: _Conversation, timeout_s: float | None, grace_s: float) -> float:
        """Return how long to wait for the next event; ends a command whose time is up, first gently."""
        now = self._runtime.monotonic()
        if talk.started_s is None:
            left = talk.sent_s + BUILD_S - now
            if left <= 0:
                self._fail(f"its agent did not start the command within {BUILD_S:.0f} s")
            return left
        if talk.kill_sent_s is not None:
            left = talk.kill_sent_s + grace_s - now
            if left <= 0:
                raise _Gone
            return left
        if timeout_s is None:
            return 3600.0
        left = talk.started_s + timeout_s - now
        if left > 0:
            return left
        talk.kill_sent_s, talk.stdin_over = now, True
        self._outgoing += protocol.encode(Kind.KILL)
        return grace_s

    def _settle(self, talk: _Conversation, end: Frame, sink: Sink) -> Exit:
        if end.kind is Kind.REFUSED:
            refusal = protocol.decode_refusal(end.payload)
            reason = os.strerror(refusal.errno)
            if refusal.stage == Stage.CWD:
                raise Invalid.argument("cwd", os.fsdecode(talk.cwd), reason)
            raise EngineUnavailable(f"the guest could not make the sandbox: {refusal.text}: {reason}")
        report = protocol.decode_exit(end.payload)
        status: Status = "completed"
        limit: Limit | None = "pids" if report.pids else None
        if report.oom:
            status, limit = "oom", "memory"
        elif report.killed and talk.kill_sent_s is not None:
            status, limit = "timed_out", "time"
        elif report.killed:
            status = "killed"
        code = report.value + (128 if report.how == "signaled" else 0)
        if report.how == "not executed":
            code = 127 if report.value == 2 else 126
            sink("stderr", talk.name + b": " + os.strerror(report.value).encode() + b"\n")
        # The guest's own measure, without the way here, but within what happened here.
        known_s = talk.started_s or talk.end_s
        started_s = known_s if report.killed else max(talk.sent_s, talk.end_s - report.elapsed_s)
        return Exit(
            status=status,
            exit_code=code if status == "completed" else None,
            started_s=started_s,
            ended_s=talk.end_s,
            cpu_s=report.cpu_s,
            max_rss_bytes=report.max_rss_bytes,
            limit=limit,
        )

    def _lost(self, talk: _Conversation) -> Exit:
        """Say what becomes of a command whose VM ended under it."""
        now = self._runtime.monotonic()
        status: Status = "killed"
        limit: Limit | None = None
        if talk.kill_sent_s is not None:
            status, limit = "timed_out", "time"
        elif not self._killed:
            assert self._hypervisor is not None
            code = self._hypervisor.wait(DEATH_S)
            if code not in (-signal.SIGKILL, -signal.SIGTERM):
                self._fail(self._death())
        return Exit(status, None, talk.started_s or talk.sent_s, now, 0.0, 0, limit=limit)

    # --- bytes --------------------------------------------------------------------------------------------------------

    def _turn(self, patience_s: float) -> Iterator[Frame]:
        """Wait for something to happen, write what can be written, give the frames that arrived.

        Raises `_Gone` when the agent's end is closed, which is when QEMU is dead.
        """
        assert self._agent is not None
        assert self._console is not None
        poll = select.poll()
        poll.register(self._agent, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        poll.register(self._console, select.POLLIN)
        for fd, _ in poll.poll(max(0.0, patience_s) * 1000 + 0.5):
            if fd == self._console.fileno():
                self._read_console()
        self._flush()
        try:
            data = self._agent.recv(256 * 1024)
        except BlockingIOError:
            return
        except OSError as error:
            raise _Gone from error
        if not data:
            raise _Gone
        yield from self._frames.feed(data)

    def _flush(self) -> None:
        assert self._agent is not None
        try:
            while self._outgoing:
                del self._outgoing[: self._agent.send(self._outgoing)]
        except BlockingIOError:
            return
        except OSError:
            self._outgoing.clear()  # its death shows when reading, after what it said last

    def _read_console(self) -> bool:
        """Keep the end of what the console and QEMU itself say; False when there is nothing more."""
        assert self._console is not None
        try:
            said = self._console.recv(64 * 1024)
        except OSError:
            return False
        self._console_tail += said
        del self._console_tail[:-CONSOLE_BYTES]
        return bool(said)

    def _death(self) -> str:
        assert self._hypervisor is not None
        try:
            code = self._hypervisor.wait(DEATH_S)
        except subprocess.TimeoutExpired:
            return "QEMU closed its connections and lives on"
        if code < 0:
            return f"QEMU was ended by signal {-code}"
        return "its kernel stopped or QEMU gave up" if code == 0 else f"QEMU ended with code {code}"

    def _fail(self, what: str) -> NoReturn:
        """Kill the VM and raise what happened, with the end of the console."""
        self._dispose()
        tail = bytes(self._console_tail[-SHOWN_BYTES:]).decode(errors="replace")
        lines = (line.strip() for line in tail.splitlines())
        shown = "".join(c if c.isprintable() else "?" for c in " / ".join(filter(None, lines)))
        raise EngineUnavailable(f"the virtual machine failed: {what}" + (f"; its console: {shown}" if shown else ""))

    def _dispose(self) -> None:
        """Make sure that QEMU is dead and nothing of it is held."""
        if self._hypervisor is not None:
            self._hypervisor.kill()
            try:
                self._hypervisor.wait(DEATH_S)
            except subprocess.TimeoutExpired as error:
                raise EngineUnavailable(f"QEMU is still there {DEATH_S:.0f} s after it was killed") from error
        if self._console is not None:
            while _ready(self._console, select.POLLIN, 0) and self._read_console():
                pass
        for each in (self._agent, self._console, self._monitor, self._monitor_end):
            if each is not None:
                each.close()


def _ready(end: socket.socket | None, event: int, patience_ms: float) -> bool:
    if end is None or end.fileno() < 0:
        return False
    poll = select.poll()
    poll.register(end, event)
    return bool(poll.poll(patience_ms))


class _Gone(Exception):
    """The agent's end of the port is closed."""
