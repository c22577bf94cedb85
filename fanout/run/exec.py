"""One exec, from admission to result: mount, start, wait, diff, commit.

Owns the order of these five and what a result says about them. Blocking; runs in one thread per exec. Knows
nothing of queues or event loops (executor.py) and nothing of how mounts, sandboxes or commits work.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal

from fanout.disk.branch import Branch
from fanout.disk.checkout import held
from fanout.disk.disk import Disk, Point
from fanout.disk.merge import Policy
from fanout.disk.paths import shown
from fanout.disk.proposal import Landed, Proposal
from fanout.disk.state import State
from fanout.engine.base import Engine, Exit, Limits, Process, Spec
from fanout.errors import Conflict, FanoutError, Invalid, LeaseLost, Unavailable, Unknown
from fanout.format.entry import Effect
from fanout.format.tree import DIR, SYMLINK
from fanout.model import CommitPolicy, Finished, Mode, Output, Run, RunCommit, Started, Timing, Usage
from fanout.run.changes import changes_of
from fanout.run.output import Capture, TextStream
from fanout.runtime import Runtime
from fanout.view.cache import HostCache
from fanout.view.view import View, open_view

__all__ = ["Cancel", "Cancelled", "Host", "Job", "JobMount", "announce", "execute"]

Emit = Callable[[Started | Output | Finished], None]
#: What a command may write in any case, however little is free: the file system itself then refuses it.
_MIN_DISK_BYTES = 64 << 20
_POLICIES: Mapping[Mode, Policy] = {"conditional": Policy.LAST_WINS, "shared": Policy.FIRST_WINS}


class Cancelled(Exception):
    """The caller went away: everything of the exec is dead and nothing of it was committed."""


class Cancel:
    """Tells a running exec, from any thread and any number of times, to stop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: Process | None = None
        self._set = False

    def set(self) -> None:
        """Stop the exec: its processes are killed, and nothing is committed if its commit has not begun."""
        with self._lock:
            self._set = True
            process = self._process
        if process is not None:
            process.kill()

    def attach(self, process: Process) -> None:
        """From now on `set` kills this process (at once, if it was set already)."""
        with self._lock:
            self._process = process
            late = self._set
        if late:
            process.kill()

    def check(self) -> None:
        """Raise `Cancelled` if it was set."""
        if self._set:
            raise Cancelled


@dataclass(frozen=True, slots=True)
class Host:
    """What an exec needs of the host it runs on."""

    engine: Engine
    cache: HostCache
    runtime: Runtime
    shell: str = "/bin/bash"
    name: str = field(default_factory=socket.gethostname)
    output_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True)
class JobMount:
    """One disk of a job: the tree it sees, which is `base`'s, and the paths it holds locks on while it runs.

    `lock_wait_s` bounds the wait for those, in seconds; None waits as long as the command may run. `place` is where
    it is seen, /mnt/<name> by default, and `aliases` names in it that lead back to it (see `open_view`).
    """

    name: str
    disk: Disk
    base: Point
    mode: Mode
    subdirectory: bytes = b""
    checkout: tuple[bytes, ...] = ()
    lock_wait_s: float | None = None
    place: str = ""
    aliases: tuple[bytes, ...] = ()

    @property
    def target(self) -> str:
        return self.place or f"/mnt/{self.name}"


@dataclass(frozen=True, slots=True)
class Job:
    """One checked request to run a command. `arrived_s` is monotonic seconds.

    `fence` is called once it can be kept from committing by breaking its locks, of which each mount then has one; it
    raises where the exec must not run.
    """

    id: str
    command: str
    mounts: Sequence[JobMount]
    cwd: str
    env: Mapping[str, str]
    stdin: bytes
    network: bool
    limits: Limits
    commit: CommitPolicy
    author: str
    arrived_s: float
    fence: Callable[[], None] | None = None


@dataclass(slots=True)
class _Mounted:
    """One mount while its exec runs."""

    mount: JobMount
    view: View
    state: State
    lock_id: str

    @property
    def base_seq(self) -> int:
        return self.state.seq


@contextmanager
def announce(job: Job) -> Iterator[Callable[[], None]]:
    """Tell the branches that a commit of this job may come; the value takes it back early, from any thread.

    Not those it checks out: while it waits for a lock no commit may wait for it, least of all the one that releases it.
    """
    lock = threading.Lock()
    with ExitStack() as announced:
        if job.commit != "never":
            writing = (m.base.branch for m in job.mounts if m.mode != "read_only" and not m.checkout)
            for branch in dict.fromkeys(writing):
                announced.enter_context(branch.writing(job.arrived_s))

        def withdraw() -> None:
            with lock:
                announced.close()

        try:
            yield withdraw
        finally:
            withdraw()


def execute(
    job: Job,
    host: Host,
    cancel: Cancel,
    emit: Emit | None,
    ran: Callable[[], None],
    settled: Callable[[], None],
) -> Run:
    """Run one job to its end and return its result.

    `emit` receives events as they happen; `ran` is called when the command is over and only its commit is left, and
    `settled` when no commit will come any more. Raises `Cancelled` if `cancel` was set before the commit began, and
    typed errors for what is not the command's doing; an error after the command has run carries what is known as
    `.run`.
    """
    clock = host.runtime.monotonic
    admitted_s = clock()
    with ExitStack() as stack:
        locks = _check_out(job, host, cancel, stack)
        if job.fence is not None:
            job.fence()
        locked_s = clock()
        mounted: list[_Mounted] = []
        for mount in job.mounts:
            cancel.check()
            mounted.append(_open(mount, host, locks.get(mount.name, ""), stack))
        _check_cwd(job.cwd, mounted)
        cancel.check()
        mounted_s = clock()
        streams = _Streams(host.output_bytes, emit)
        process = host.engine.start(_spec(job, mounted, host))
        cancel.attach(process)
        streams.started(job.id, (clock() - job.arrived_s) * 1e3)
        exit = process.wait(streams.sink)
        if exit.limit == "disk":
            streams.sink("stderr", b"fanout: killed: it wrote more than half of what was free; nothing is committed\n")
        streams.flush()
        cancel.check()
        returned_s = clock()
        commits, failure = _commit_all(job, exit, mounted, host, cancel, ran)
        settled()
        done_s = clock()
    timing = Timing(
        queue_ms=(exit.started_s - job.arrived_s) * 1e3,
        wait_ms=(admitted_s - job.arrived_s) * 1e3,
        lock_ms=(locked_s - admitted_s) * 1e3,
        mount_ms=(mounted_s - locked_s) * 1e3,
        start_ms=(exit.started_s - mounted_s) * 1e3,
        execute_ms=(exit.ended_s - exit.started_s) * 1e3,
        commit_ms=(done_s - returned_s) * 1e3,
        total_ms=(done_s - job.arrived_s) * 1e3,
    )
    run = _result(job, host, exit, streams, mounted, commits, timing)
    if failure is not None:
        failure.run = run  # type: ignore[attr-defined]
        raise failure
    return run


def _result(
    job: Job,
    host: Host,
    exit: Exit,
    streams: _Streams,
    mounted: Sequence[_Mounted],
    commits: Mapping[str, RunCommit],
    timing: Timing,
) -> Run:
    """Say what became of a job."""
    return Run(
        id=job.id,
        command=job.command,
        status=exit.status,
        exit_code=exit.exit_code,
        limit=exit.limit,
        stdout_bytes=streams.stdout.value(),
        stderr_bytes=streams.stderr.value(),
        stdout_truncated=streams.stdout.truncated,
        stderr_truncated=streams.stderr.truncated,
        stdout_total=streams.stdout.total,
        stderr_total=streams.stderr.total,
        timing=timing,
        usage=Usage(cpu_s=exit.cpu_s, max_rss_bytes=exit.max_rss_bytes),
        engine=host.engine.name,
        host=host.name,
        warm=exit.warm and all(each.view.warm for each in mounted),
        commits=commits,
        conflict=next((commit.conflict for commit in commits.values() if commit.conflict), None),
    )


def _check_out(job: Job, host: Host, cancel: Cancel, stack: ExitStack) -> dict[str, str]:
    """Take the locks the mounts ask for, in one order for all so that no two wait in a ring; returns ids by mount."""
    locks: dict[str, str] = {}
    for mount in sorted(job.mounts, key=lambda mount: mount.base.branch.uuid):
        fenced = job.fence is not None and mount.mode != "read_only" and job.commit != "never"
        if mount.checkout or fenced:
            wait_s = job.limits.timeout_s or 0.0 if mount.lock_wait_s is None else mount.lock_wait_s
            hold = held(mount.base.branch, job.id, mount.checkout, wait_s, host.runtime, cancel.check)
            locks[mount.name] = stack.enter_context(hold)
    return locks


def _open(mount: JobMount, host: Host, lock_id: str, stack: ExitStack) -> _Mounted:
    """Find the newest tree and make it visible on this host."""
    state = mount.base.state()
    view = open_view(
        host.cache,
        mount.disk.reader,
        state,
        disk_id=mount.disk.id,
        subdirectory=mount.subdirectory,
        writable=mount.mode != "read_only",
        xattr_prefix=host.engine.xattr_prefix,
        aliases=mount.aliases,
    )
    stack.callback(view.close)
    return _Mounted(mount, view, state, lock_id)


def _check_cwd(cwd: str, mounted: Sequence[_Mounted]) -> None:
    """Refuse a working directory that its disk does not have; one behind a link or elsewhere is the engine's to see."""
    for each in mounted:
        prefix = each.mount.target + "/"
        if not cwd.startswith(prefix):
            continue
        path = each.mount.subdirectory
        for part in os.fsencode(cwd[len(prefix) :]).split(b"/"):
            if part in (b"", b"."):
                continue
            path = path + b"/" + part if path else part
            node = each.state.get(path)
            if part == b".." or (node is not None and node.kind == SYMLINK):
                return
            if node is None or node.kind != DIR:
                what = "there is nothing" if node is None else "there is a file"
                raise Invalid.argument(
                    "cwd", cwd, f"a directory of disk {each.mount.disk.name!r}; {what} at {shown(path)!r}"
                )


def _spec(job: Job, mounted: Sequence[_Mounted], host: Host) -> Spec:
    mounts = [each.view.mount(each.mount.target) for each in mounted]
    limits = job.limits
    uppers = [mount.upper for mount in mounts if mount.upper is not None]
    if uppers and limits.disk_bytes is None:
        space = os.statvfs(uppers[0])
        limits = replace(limits, disk_bytes=max(_MIN_DISK_BYTES, space.f_bavail * space.f_frsize // 2))
    return Spec(
        argv=(host.shell, "-c", job.command),
        mounts=mounts,
        env=job.env,
        cwd=job.cwd,
        stdin=job.stdin,
        network=job.network,
        limits=limits,
    )


def _commit_all(
    job: Job, exit: Exit, mounted: Sequence[_Mounted], host: Host, cancel: Cancel, ran: Callable[[], None]
) -> tuple[dict[str, RunCommit], FanoutError | None]:
    """Commit the mounts one after the other; returns what landed and the error that stopped the rest, if one did."""
    wanted = exit.limit != "disk" and (
        job.commit == "always" or (job.commit == "on_success" and exit.status == "completed" and exit.exit_code == 0)
    )
    results = {each.mount.name: _outcome(each) for each in mounted}
    proposals: list[tuple[_Mounted, Proposal]] = []
    wrote = [each.mount.name for each in mounted if wanted and each.mount.mode != "read_only"]
    trying = ""
    try:
        for each in mounted:
            if each.mount.name in wrote:
                proposal = _propose(job, each, host)
                results[each.mount.name] = _outcome(each)
                if proposal.intents:
                    proposals.append((each, proposal))
                else:
                    wrote.remove(each.mount.name)
        cancel.check()
        ran()
        rescues = (f"{job.id}-{number}" if number > 1 else job.id for number in count(1))
        for each, proposal in proposals:
            trying = each.mount.name
            results[trying] = _commit(job, each, proposal, rescues)
    except FanoutError as error:
        _tell_fate(error, wrote, results, trying)
        return results, error
    except OSError as error:
        failure = Unavailable(f"this host could not read back what the command wrote: {error}")
        failure.__cause__ = error
        _tell_fate(failure, wrote, results, trying)
        return results, failure
    return results, None


def _tell_fate(error: FanoutError, wrote: Sequence[str], results: Mapping[str, RunCommit], trying: str) -> None:
    """Add to an error what became of the writes to each mount; `trying` is the one whose commit failed."""
    if isinstance(error, Conflict | LeaseLost) or not wrote:
        return  # they say it themselves
    fates = []
    for name in wrote:
        result = results[name]
        if result.conflict is not None:
            fate = f"is kept on branch {result.conflict.rescue_branch!r}"
        elif name == trying and isinstance(error, Unknown):
            fate = "may be committed or not"
        else:
            fate = "is committed" if result.seq is not None else "is not committed"
        fates.append(f"to {name!r} {fate}")
    error.args = (f"{error}; what the command wrote {', '.join(fates)}",)


def _propose(job: Job, each: _Mounted, host: Host) -> Proposal:
    """Turn what the command left in the upper layer into a proposal, its data made durable."""
    packer = each.mount.disk.packer()
    try:
        intents = each.view.intents(packer)
        packed = packer.finish()
    except BaseException:
        packer.abandon()
        raise
    return Proposal(
        intents,
        _POLICIES[each.mount.mode],
        base_seq=each.base_seq,
        blobs=packed.blobs,
        seen_blobs=each.state.blob_bytes(),
        author=job.author,
        message=job.command,
        exec_id=job.id,
        age_s=0.0 if each.mount.checkout else host.runtime.monotonic() - job.arrived_s,  # others wait for what it holds
        lock_id=each.lock_id,
    )


def _commit(job: Job, each: _Mounted, proposal: Proposal, rescues: Iterator[str]) -> RunCommit:
    mount = each.mount
    branch: Branch = mount.base.branch
    try:
        landed: Landed = branch.commit(proposal)
    except LeaseLost as lost:
        rescue = mount.disk.rescue(mount.base, each.base_seq, proposal, next(rescues))
        raise LeaseLost(f"{lost}; the changes are kept on branch {rescue!r}") from None
    except Conflict as conflict:
        rescue = mount.disk.rescue(mount.base, each.base_seq, proposal, next(rescues))
        return _outcome(each, conflict=Conflict(conflict.paths, rescue, mount.disk.name))
    if landed.seq is None:
        return _outcome(each)
    effects: tuple[Effect, ...] = landed.effects
    return _outcome(each, seq=landed.seq, changes=changes_of(effects))


def _outcome(each: _Mounted, **fields: Any) -> RunCommit:
    return RunCommit(base_seq=each.base_seq, skipped=tuple(map(shown, sorted(each.view.skipped))), **fields)


class _Streams:
    """Both output streams on their way to the result and to a listener."""

    def __init__(self, cap: int, emit: Emit | None) -> None:
        self.stdout = Capture(cap)
        self.stderr = Capture(cap)
        self._emit = emit
        self._text = {"stdout": TextStream(), "stderr": TextStream()}

    def started(self, job_id: str, queue_ms: float) -> None:
        if self._emit is not None:
            self._emit(Started(id=job_id, queue_ms=queue_ms))

    def sink(self, stream: Literal["stdout", "stderr"], chunk: bytes) -> None:
        (self.stdout if stream == "stdout" else self.stderr).feed(chunk)
        if self._emit is not None:
            self._emit(Output(stream=stream, data=chunk, text=self._text[stream].feed(chunk)))

    def flush(self) -> None:
        """Emit the text of what ended in the middle of a character."""
        for stream, decoder in self._text.items():
            if self._emit is not None and (rest := decoder.feed(b"", final=True)):
                self._emit(Output(stream="stdout" if stream == "stdout" else "stderr", data=b"", text=rest))
