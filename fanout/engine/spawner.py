"""The process that starts an engine's sandboxes: their parent, their mount namespace, and their end.

Owns the children and when they are mounted for, killed and collected. Knows nothing of bwrap's options, limits or
pipes' contents. `spawning.py` is its other side. This file is run by its path, isolated and without site packages: it
imports the standard library, and what else is run with it from beside it, only.

Why a process of its own: (1) bwrap binds its life to its parent's only some time after it was started; a parent that
outlives fanout, and knows every child, kills what was still being built. (2) A sandbox's init is an orphan at its
end, and only a child subreaper can collect it with its exact usage; that is no thing to make of somebody's program.
(3) As root the process unshares its mount namespace, so that what it mounts is seen by the sandboxes it starts and by
nobody else, and is gone with it even after kill -9.

One thread, one epoll loop. On the link (SOCK_SEQPACKET) it receives requests and says once that it is ready; each
request brings a socket of its own, on which follow either `failed`, or `up` with descriptors and then `end`. On that
socket, too, more mounts can be asked for while the sandbox lives (`attach.py`). The other side shutting it means: kill.
The link's end, or the death of the process at its other end, means: kill all.
"""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import marshal
import os
import re
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence

if __package__:
    from fanout.engine import attach, identities, mapped, network, orphans, overlay
    from fanout.engine.spawned import Children, Sandbox, acting_as, limit, mark_for_oom, moves
else:  # run by its path: of this directory it takes these modules
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    import attach  # type: ignore[no-redef, import-not-found]
    import identities  # type: ignore[no-redef, import-not-found]
    import mapped  # type: ignore[no-redef, import-not-found]
    import network  # type: ignore[no-redef, import-not-found]
    import orphans  # type: ignore[no-redef, import-not-found]
    import overlay  # type: ignore[no-redef, import-not-found]
    from spawned import (  # type: ignore[no-redef, import-not-found]
        Children,
        Sandbox,
        acting_as,
        limit,
        mark_for_oom,
        moves,
    )

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["ARGS", "BLOCK", "FILTER", "INLINE_BYTES", "MAX_SENT", "STATUS"]

PR_SET_CHILD_SUBREAPER = 36

#: How long, and how often, a mount is tried again whose layers are still those of another: a sandbox copies all
#: that is mounted while it is built. Others are started meanwhile.
BUSY_S, AGAIN_S = 1.0, 0.01

#: Requests that are larger come in a memory file.
INLINE_BYTES = 64 * 1024

#: Open files of this process: each sandbox takes four, and five more while it is started.
OPEN_FILES = 65536

#: Descriptors of a child: its streams, bwrap's arguments, its status, what holds it until it is released, and its
#: filter of system calls.
ARGS, STATUS, BLOCK, FILTER = 3, 4, 5, 6

#: The most descriptors of one request.
MAX_SENT = 16

#: Received descriptors are above this, so that none is in the way of a child's.
RESERVED = 10

#: How often the last children are looked for while there are any.
SWEEP_S = 0.05

_libc = ctypes.CDLL(None, use_errno=True)


class Ended(Exception):
    """There is nobody any more to start sandboxes for."""


class Spawner:
    """Serves one link until it ends; then kills whatever it started."""

    def __init__(
        self,
        link: socket.socket,
        parent: int,
        filter: int,
        options: tuple[str, ...],
        users: identities.Identities | None,
    ) -> None:
        self.link = link
        self.options = options
        self.users = users  # with a mount namespace of its own only
        self.filter = f"/proc/self/fd/{filter}"
        self.mark = orphans.mark()
        self.monitors: dict[int, Sandbox] = {}
        self.connections: set[int] = set()  # processes that lead out of sandboxes
        self.inits: dict[int, Sandbox] = {}
        self.busy: list[Sandbox] = []
        self.children = Children()
        self.epoll = select.epoll()
        self.handlers: dict[int, Callable[[], None]] = {}
        self.woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.watch(self.woken, select.EPOLLIN, self.reap)
        self.watch(link.fileno(), select.EPOLLIN, self.take_request)
        self.watch(parent, select.EPOLLIN, self.parent_died)

    def serve(self) -> None:
        """Serve until the link or its other side ends."""
        try:
            while True:
                for fd, _ in self.epoll.poll(AGAIN_S if self.busy else None):
                    if (handler := self.handlers.get(fd)) is not None:
                        handler()
                if self.busy:
                    again, self.busy = self.busy, []
                    for sandbox in again:
                        self.start(sandbox)
        except Ended:
            pass
        finally:
            self.end()

    def watch(self, fd: int, events: int, handler: Callable[[], None]) -> None:
        """Call `handler` when something happens; it must bear being called when nothing did."""
        self.handlers[fd] = handler
        self.epoll.register(fd, events)

    def close(self, fd: int) -> None:
        """Close a descriptor that may be watched, and may be open elsewhere."""
        if fd >= 0:
            self.unwatch(fd)
            os.close(fd)

    def unwatch(self, fd: int) -> None:
        """Watch a descriptor no more, which stays open."""
        if self.handlers.pop(fd, None) is not None:
            self.epoll.unregister(fd)

    def parent_died(self) -> None:
        raise Ended

    # --- starting -------------------------------------------------------------------------------------------------

    def take_request(self) -> None:
        """Receive one request and start its sandbox."""
        try:
            data, extra, _, _ = self.link.recvmsg(
                INLINE_BYTES + 4096, socket.CMSG_SPACE(MAX_SENT * 4), socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except ConnectionError:
            raise Ended from None
        if not data:
            raise Ended
        fds = array.array("i")
        for _, _, told in extra:
            fds.frombytes(told[: len(told) // 4 * 4])
        sent, body = marshal.loads(data)
        if len(fds) < sent:  # no room for all of them
            if fds:
                with socket.socket(fileno=fds.pop(0)) as reply:
                    _send(reply, ("failed", f"cannot start a sandbox: {os.strerror(errno.EMFILE)}"))
            for fd in fds:
                os.close(fd)
            return
        if body is None:
            with open(fds.pop(), "rb", buffering=0) as file:
                file.seek(0)
                body = file.readall()
        argv, overlays, numbers, rlimits, way_out = marshal.loads(body)
        reply = socket.socket(fileno=fds.pop(0))
        out = network.Network(*way_out) if way_out else None
        user = self.users.take() if self.users else None
        until_s = time.monotonic() + BUSY_S
        sandbox = Sandbox(reply, list(fds), argv, overlays, numbers, rlimits, out, user, until_s)
        self.watch(reply.fileno(), select.EPOLLIN | select.EPOLLRDHUP, lambda: self.hear(sandbox))
        self.start(sandbox)

    def start(self, sandbox: Sandbox) -> None:
        """Mount and start; what is busy is left for later."""
        try:
            for wanted in sandbox.overlays[sandbox.mounted :]:
                os.makedirs(wanted[0], exist_ok=True)
                mapped.mount(wanted, self.options, sandbox.identity.mapping if sandbox.identity else -1)
                sandbox.mounted += 1
            with acting_as(sandbox.identity):
                self.spawn(sandbox)
        except mapped.NotMapped as error:
            assert self.users is not None
            self.users.refuse(f"owners of files cannot be mapped: {error}")
            sandbox.identity = None
            self.detach(sandbox)
            self.start(sandbox)
        except OSError as error:
            if error.errno == errno.EBUSY and time.monotonic() < sandbox.tried_until_s:
                self.busy.append(sandbox)
            else:
                self.fail(sandbox, f"cannot start a sandbox: {error}")

    def spawn(self, sandbox: Sandbox) -> None:
        """Start the monitor, and wait for what it says of its init."""
        stdin, stdout, stderr, args, *others = sandbox.streams
        to_args, to_status, to_block, to_filter, *numbers = sandbox.numbers
        ends: list[int] = []
        try:
            ends += os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            ends += os.pipe2(os.O_CLOEXEC)
            status_r, status_w, block_r, block_w = ends
            os.set_blocking(status_w, True)
            wanted = [(stdin, 0), (stdout, 1), (stderr, 2), (args, to_args), (status_w, to_status)]
            wanted += [(block_r, to_block), *zip(others, numbers, strict=True)]
            sandbox.monitor = os.posix_spawn(
                sandbox.argv[0],
                sandbox.argv,
                self.mark,
                file_actions=moves(wanted, (self.filter, to_filter), RESERVED),
                setsid=True,
                setsigmask=(),
                setsigdef=SIGNALS,
            )
        except BaseException:
            for fd in ends:
                os.close(fd)
            raise
        self.monitors[sandbox.monitor] = sandbox
        sandbox.status, sandbox.hold = status_r, block_w
        for fd in (status_w, block_r, *sandbox.streams):
            os.close(fd)
        sandbox.streams = []
        self.watch(status_r, select.EPOLLIN, lambda: self.take_init(sandbox))

    def take_init(self, sandbox: Sandbox) -> None:
        """Read what the monitor says of its init, and hand the sandbox over."""
        if sandbox.status < 0 or sandbox.init:
            return
        try:
            text = os.read(sandbox.status, 4096)
        except BlockingIOError:
            return
        sandbox.said += text
        if text and not sandbox.said.endswith(b"\n"):  # one line in several writes; more comes after the release only
            return
        found = re.search(rb'"child-pid": (\d+)', sandbox.said)
        if found is None:
            self.unwatch_status(sandbox)  # it ended without one: its death is told in a moment
            return
        try:
            sandbox.init_fd = os.pidfd_open(int(found[1]))
            mark_for_oom(int(found[1]))
            with acting_as(sandbox.identity):  # whose it is may limit it; root itself may not everywhere
                for which, most in sandbox.rlimits:
                    limit(int(found[1]), which, most)
            if sandbox.way_out is not None:
                self.connect(sandbox, sandbox.way_out, int(found[1]))
        except OSError as error:  # what is left of it ends with its monitor, or is swept
            if error.errno != errno.ESRCH:
                sandbox.why = f"cannot start a sandbox: {error}"
            self.unwatch_status(sandbox)
            self.kill(sandbox)
            return
        sandbox.init = int(found[1])
        self.inits[sandbox.init] = sandbox
        self.detach(sandbox)
        if sandbox.connection is None:
            self.hand_over(sandbox)

    def connect(self, sandbox: Sandbox, way_out: network.Network, init: int) -> None:
        """Start what leads out of a sandbox; it is handed over when that is ready."""
        made = sandbox.connection = network.start(way_out, init, sandbox.identity and sandbox.identity.number)
        self.connections.add(made.pid)
        self.unwatch(sandbox.status)
        self.watch(made.ready, select.EPOLLIN, lambda: self.take_connection(sandbox, made))

    def take_connection(self, sandbox: Sandbox, made: network.Connection) -> None:
        """Hand a sandbox over that has its network, or kill it if it will have none."""
        try:
            ready = os.read(made.ready, 1)
        except BlockingIOError:
            return
        self.unwatch(made.ready)
        if ready:
            self.hand_over(sandbox)
        else:
            said = os.read(made.said, 4096).decode(errors="replace").strip()
            sandbox.why = f"cannot connect a sandbox to the network: {said or 'slirp4netns ended without a word'}"
            self.kill(sandbox)

    def hand_over(self, sandbox: Sandbox) -> None:
        """Give a sandbox that is made to whoever asked for it."""
        sandbox.up = True
        not_mapped = "not root" if self.users is None else self.users.why
        up = ("up", sandbox.monitor, sandbox.init, not_mapped)
        _send(sandbox.reply, up, (sandbox.init_fd, sandbox.status, sandbox.hold))
        self.unwatch_status(sandbox)

    def unwatch_status(self, sandbox: Sandbox) -> None:
        self.close(sandbox.status)
        sandbox.status = -1

    def detach(self, sandbox: Sandbox) -> None:
        """Drop a sandbox's mounts from this namespace: it has its own copy, and every further child would copy them.

        The directories stay, for the next ones: removing one would unmount it in the sandbox too.
        """
        for point, *_ in sandbox.overlays[: sandbox.mounted]:
            overlay.detach(point)
        sandbox.mounted = 0

    def attach(self, sandbox: Sandbox, top: str, overlays: Sequence[overlay.Overlay]) -> None:
        """Mount something in a sandbox that runs. It enters its namespaces, so a child does it."""
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        child = os.fork()
        if not child:
            failure: tuple[int, str, bool] = (0, "", True)
            try:
                mapping = sandbox.identity.mapping if sandbox.identity else -1
                private = self.users is not None
                attach.attach(sandbox.init, top, overlays, self.options, private=private, mapping=mapping)
            except OSError as error:
                failure = (error.errno or 0, str(error), not isinstance(error, mapped.NotMapped))
            except BaseException as error:
                failure = (0, repr(error), True)
            finally:
                os.write(theirs, marshal.dumps(failure))
                os._exit(0)
        os.close(theirs)
        with open(ours, "rb") as file:
            said = file.read()
        os.waitpid(child, 0)
        number, text, can_be_mapped = marshal.loads(said) if said else (0, "the process that mounts was killed", True)
        if self.users is not None and not can_be_mapped:
            self.users.refuse(f"owners of files cannot be mapped: {text}")  # those to come are root's, as their files
        _send(sandbox.reply, ("attached", number, text, can_be_mapped))

    # --- ending ---------------------------------------------------------------------------------------------------

    def hear(self, sandbox: Sandbox) -> None:
        """Do what is asked for a sandbox; kill it if nobody waits for it any more."""
        try:
            if asked := sandbox.reply.recv(INLINE_BYTES, socket.MSG_DONTWAIT):
                self.attach(sandbox, *marshal.loads(asked))
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        del self.handlers[sandbox.reply.fileno()]
        self.epoll.unregister(sandbox.reply.fileno())
        if sandbox.monitor:
            self.kill(sandbox)
        else:
            self.busy = [other for other in self.busy if other is not sandbox]
            self.fail(sandbox, "nobody waits for it")

    def kill(self, sandbox: Sandbox) -> None:
        """Kill a sandbox: its monitor is our child until we collect it."""
        if sandbox.init_fd >= 0:
            _kill_init(sandbox)
        if sandbox.ended is None:
            os.kill(sandbox.monitor, signal.SIGKILL)

    def fail(self, sandbox: Sandbox, why: str) -> None:
        """Say that a sandbox was not made, and forget it. An empty reason: bwrap's own words tell."""
        self.detach(sandbox)
        _send(sandbox.reply, ("failed", why))
        self.forget(sandbox)

    def forget(self, sandbox: Sandbox) -> None:
        if self.inits.get(sandbox.init) is sandbox:
            del self.inits[sandbox.init]
        for fd in (sandbox.reply.detach(), sandbox.status, sandbox.hold, sandbox.init_fd, *sandbox.streams):
            self.close(fd)
        sandbox.status = sandbox.hold = sandbox.init_fd = -1
        sandbox.streams = []
        if sandbox.connection is not None:
            if sandbox.connection.pid in self.connections:
                os.kill(sandbox.connection.pid, signal.SIGKILL)
            for fd in sandbox.connection[1:]:
                self.close(fd)
            sandbox.connection = None
        if self.users is not None and sandbox.identity is not None:
            self.users.give_back(sandbox.identity)
            sandbox.identity = None

    def reap(self) -> None:
        """Collect every child that is dead."""
        try:
            while os.read(self.woken, 512):
                pass
        except BlockingIOError:
            pass
        while self.reap_one():
            pass

    def reap_one(self) -> bool:
        """Collect a child that is dead; False if there is none."""
        try:
            pid, status, used = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        cpu_s, rss = used.ru_utime + used.ru_stime, used.ru_maxrss * 1024
        if (sandbox := self.monitors.pop(pid, None)) is not None:
            self.take_init(sandbox)  # it may have said so just before
            sandbox.ended = (status, cpu_s, rss)
            if sandbox.init_fd < 0:
                self.sweep()  # what it had made and not told of
                self.fail(sandbox, sandbox.why)
            elif sandbox.usage is not None or not _kill_init(sandbox):
                self.tell_end(sandbox)
        elif pid in self.connections:
            self.connections.discard(pid)
        elif (sandbox := self.inits.get(pid)) is not None:
            sandbox.usage = (cpu_s, rss)
            if sandbox.ended is not None:
                self.tell_end(sandbox)
        return pid != 0

    def tell_end(self, sandbox: Sandbox) -> None:
        """Say how a sandbox ended: every process of it is dead and collected."""
        if not sandbox.up:
            self.fail(sandbox, sandbox.why or "the sandbox died while it was made")
            return
        _send(sandbox.reply, ("end", sandbox.ended, sandbox.usage))
        self.forget(sandbox)

    def sweep(self) -> None:
        """Kill every child that is no monitor: an init without one."""
        for pid in self.children.pids():
            if pid not in self.monitors and pid not in self.connections:
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill and collect all, then those that fell to us by it, until there is nobody."""
        for sandbox in self.busy:
            self.fail(sandbox, "the engine is closed")
        self.close(self.link.detach())
        while True:
            while self.reap_one():
                pass
            left = self.children.pids()
            for sandbox in [sandbox for sandbox in self.inits.values() if sandbox.ended is None]:
                _kill_init(sandbox)
            for pid in left:
                os.kill(pid, signal.SIGKILL)  # ours until collected: no other can have its number
            try:
                if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    select.select([self.woken], [], [], SWEEP_S)
                    try:
                        os.read(self.woken, 512)
                    except BlockingIOError:
                        pass
            except ChildProcessError:
                return


def _kill_init(sandbox: Sandbox) -> bool:
    """Kill a sandbox's init; False if it is dead and was collected by its monitor."""
    try:
        signal.pidfd_send_signal(sandbox.init_fd, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _send(to: socket.socket, message: tuple[Any, ...], fds: Sequence[int] = ()) -> None:
    """Send one message, if somebody is there to take it."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        to.sendmsg([marshal.dumps(message)], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except OSError:
        pass


def _reserve(fds: list[int]) -> list[int]:
    """Move descriptors out of the way of a child's, and fill the places below."""
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, RESERVED) for fd in fds]
    for fd in fds:
        os.close(fd)
    for number in range(3, RESERVED):
        os.dup2(0, number, inheritable=False)
    return moved


def _prepare() -> None:
    """Make of this process what a sandbox shall inherit, and the heir of all that is left of one."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # it ends when its work does
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.chdir("/")
    os.umask(0o022)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def main(link_fd: int, parent: int, filter: int, private_mounts: bool, shown: Sequence[str]) -> None:
    """Run as the spawner of the process behind `parent` (a pidfd), which holds the other end of the link.

    `filter` is a file with the system calls that are denied, as the kernel takes them; `shown` are paths to show to
    sandboxes' users, with private mounts.
    """
    link_fd, parent, filter = _reserve([link_fd, parent, filter])
    link = socket.socket(fileno=link_fd)
    try:
        _prepare()
        options: tuple[str, ...] = ()
        users = None
        if private_mounts:
            options = overlay.enter_private_namespace()
            mapped.show(shown)
            mapped.open_tunnels()
            os.setgroups(())
            users = identities.Identities()
        spawner = Spawner(link, parent, filter, options, users)
    except OSError as error:
        _send(link, ("failed", str(error)))
        return
    _send(link, ("ready", options, "not root" if users is None else users.why))
    orphans.sweep()
    spawner.serve()


SIGNALS = [number for number in signal.valid_signals() if number not in (signal.SIGKILL, signal.SIGSTOP)]

if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "private", sys.argv[5:])
