"""The engine contract: what isolates one command, given directories to mount.

Owns the values that cross into an engine and the two classes an engine implements. An engine knows no disk,
no store and no commit: any engine works with any view. Blocking.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Engine", "Exit", "Limits", "Mount", "Process", "Sink", "Spec"]

#: Receives output as it arrives: the stream and a non-empty chunk. Called from the thread in `Process.wait`.
Sink = Callable[[Literal["stdout", "stderr"], bytes], None]


@dataclass(frozen=True, slots=True)
class Mount:
    """One directory tree as the command sees it.

    `lowers` are immutable host directories, lowest first; at least one. Whiteouts in upper ones hide names below
    (overlayfs format). `upper` and `work` are empty private directories on one file system that receive what the
    command writes; both None means read-only (writes give EROFS). `target` is an absolute path in the sandbox.
    """

    target: str
    lowers: tuple[str, ...]
    upper: str | None = None
    work: str | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What one command may use. None means unlimited. `cpus` in cores, `memory_bytes` for all its processes."""

    timeout_s: float | None = None
    cpus: float | None = None
    memory_bytes: int | None = None
    grace_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Spec:
    """One command for one fresh sandbox. `argv` is executed as it is; `cwd` is an absolute path in the sandbox.

    `env` is the whole environment. `stdin` None or b"" means an immediate end of file.
    """

    argv: Sequence[str | bytes]
    mounts: Sequence[Mount] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = "/"
    stdin: bytes | None = None
    network: bool = False
    limits: Limits = Limits()


@dataclass(frozen=True, slots=True)
class Exit:
    """How a command ended.

    `status`: completed (it exited by itself, or a signal of its own doing ended it: exit code 128+n as in a
    shell), timed_out, killed (by `Process.kill`, or by the host from outside) or oom. `exit_code` is None unless completed.
    `started_s` and `ended_s` are monotonic seconds of the command itself. `cpu_s` is user+system seconds of all its
    processes, `max_rss_bytes` the largest of them (rusage; the sum where a cgroup counts it).
    """

    status: Literal["completed", "timed_out", "killed", "oom"]
    exit_code: int | None
    started_s: float
    ended_s: float
    cpu_s: float
    max_rss_bytes: int


class Process(ABC):
    """One started command. `wait` is called once, from one thread; `kill` from any thread, any number of times."""

    @abstractmethod
    def wait(self, sink: Sink) -> Exit:
        """Feed stdin, deliver all output to `sink`, and return when the command has ended.

        Enforces the timeout. On return every process of the command is dead: background children, setsid and
        double forks included, even those that still hold the output pipes. Output written before the command's
        leader ended is delivered in full. If `sink` raises, the command is killed and the exception passes on.
        """

    @abstractmethod
    def kill(self) -> None:
        """Kill the command and all its processes now; `wait` then returns with status "killed"."""


class Engine(ABC):
    """Starts commands in fresh sandboxes. Safe for use from many threads."""

    name: str

    @abstractmethod
    def probe(self) -> None:
        """Prove that this engine works here by running something; `EngineUnavailable` says what would help.

        Cheap after the first success (cached for the life of the engine).
        """

    @abstractmethod
    def start(self, spec: Spec) -> Process:
        """Start the command; returns once it is being started.

        Raises `EngineUnavailable` where the sandbox cannot be made and `Invalid` for a spec it cannot honour (a cwd that does not
        exist or is no directory, names with NUL). A command that fails is data in `Exit`, never an exception.
        """

    def close(self) -> None:
        """Kill what still runs and release everything held."""
