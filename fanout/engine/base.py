"""The engine contract: what isolates one command, given directories to mount.

Owns the values that cross into an engine, the checks every engine makes on them, and the two classes an engine
implements. An engine knows no disk, no store and no commit: any engine works with any view. Blocking.
"""

from __future__ import annotations

import itertools
import os
import posixpath
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fanout.errors import Invalid

__all__ = ["Engine", "Exit", "Limits", "Mount", "Process", "Sink", "Spec", "check_spec"]

#: Receives output as it arrives: the stream and a non-empty chunk. Called from the thread in `Process.wait`.
Sink = Callable[[Literal["stdout", "stderr"], bytes], None]

#: What the kernel takes as one argument or one `NAME=value` (MAX_ARG_STRLEN, its final NUL included).
MAX_STRING_BYTES = 128 * 1024

#: Less memory than this runs no program at all.
MIN_MEMORY_BYTES = 16 * 1024 * 1024

#: What the kernel takes as all arguments and the environment together; a page less than its 2 MiB, for its own use.
MAX_STRINGS_BYTES = 2 * 1024 * 1024 - 4096


@dataclass(frozen=True, slots=True)
class Mount:
    """One directory tree as the command sees it.

    `lowers` are immutable host directories, lowest first; at least one. Whiteouts in upper ones hide names below:
    overlayfs format, character device 0/0 for a removed name and `<Engine.xattr_prefix>opaque` = "y" on a directory
    that hides what is below it. `upper` and `work` are empty private directories on one file system that receive
    what the command writes, in the same format; both None means read-only (writes give EROFS). `target` is an
    absolute path in the sandbox, apart from the system's directories and from other mounts.
    """

    target: str
    lowers: tuple[str, ...]
    upper: str | None = None
    work: str | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What one command may use. None means unlimited.

    `timeout_s` counts from the command's start. `cpus` is in cores, `memory_bytes` for all its processes together
    where the engine can count that, else for each process. `disk_bytes` is what its writable mounts may come to hold
    beside what was there, all together: it is looked at a few times a second, and what holds more is killed.
    `grace_s` is what an engine may spend on a gentle end before it kills; an engine that kills at once does not use it.
    """

    timeout_s: float | None = None
    cpus: float | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    grace_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Spec:
    """One command for one fresh sandbox.

    `argv` is executed as it is, its first word looked up in the `PATH` of `env`. `env` is the whole environment
    (str as `os.fsencode` takes it), to which an engine adds nothing but `PWD`. `cwd` is an absolute path in the
    sandbox. `stdin` None or b"" means an immediate end of file.
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

    `status`: completed (it exited by itself, or a signal ended its leader: exit code 128+n as in a shell),
    timed_out, killed (by `Process.kill`, a limit, or the whole sandbox by the host) or oom. `limit` names the one that
    it met, as far as this host tells: time, memory, disk (it was killed) or pids (it could not fork). `exit_code` is
    None unless completed; 127 and 126 also mean that `argv[0]` was not found or not executable, as in a shell.
    `started_s` and `ended_s` are monotonic seconds of the command itself. `cpu_s` is user+system seconds of all its
    processes, `max_rss_bytes` the largest of them (the sum where a cgroup counts it); 0 where this host does not tell.
    `warm` is False where a machine had to be booted first.
    """

    status: Literal["completed", "timed_out", "killed", "oom"]
    exit_code: int | None
    started_s: float
    ended_s: float
    cpu_s: float
    max_rss_bytes: int
    warm: bool = True
    limit: Literal["time", "memory", "disk", "pids"] | None = None


class Process(ABC):
    """One started command. `wait` is called once, from one thread; `kill` from any thread, any number of times.

    Every started process must be waited for, also after `kill`: `wait` is what releases it.
    """

    @abstractmethod
    def wait(self, sink: Sink) -> Exit:
        """Feed stdin, deliver all output to `sink`, and return when the command has ended.

        Enforces the timeout. On return every process of the command is dead: background children, setsid and
        double forks included, even those that still hold the output pipes. Output written before the command's
        leader ended is delivered in full. If `sink` raises, the command is killed and the exception passes on.

        What `start` promises to refuse may be found only here, while the sandbox is being built: `Invalid` (a cwd
        that is no directory) and `EngineUnavailable`. Then nothing ran and `sink` was not called.
        """

    @abstractmethod
    def kill(self) -> None:
        """Kill the command and all its processes now; `wait` then returns with status "killed".

        A command that had ended by itself before stays "completed", with its exit code.
        """


class Engine(ABC):
    """Starts commands in fresh sandboxes. Safe for use from many threads."""

    name: str

    @property
    @abstractmethod
    def xattr_prefix(self) -> str:
        """The prefix of overlayfs attributes in the layers of a `Mount`: "trusted.overlay." or "user.overlay."."""

    @abstractmethod
    def probe(self) -> None:
        """Prove that this engine works here by running something; `EngineUnavailable` says what would help.

        Cheap after the first success (cached for the life of the engine).
        """

    @abstractmethod
    def start(self, spec: Spec) -> Process:
        """Start the command; returns once it is being started.

        Raises `EngineUnavailable` where the sandbox cannot be made and `Invalid` for a spec it cannot honour (what
        `check_spec` refuses; a cwd that does not exist or is no directory, which may surface in `Process.wait`
        instead). A command that fails is data in `Exit`, never an exception.
        """

    @abstractmethod
    def close(self) -> None:
        """Kill what still runs and release everything held. A closed engine starts nothing more."""


def check_spec(spec: Spec) -> None:
    """Refuse a spec that no engine can honour: `Invalid`, naming the argument. Looks at values only, not at disks."""
    if not spec.argv:
        raise Invalid.argument("argv", spec.argv, "needs at least one word")
    total = 0
    for i, word in enumerate(spec.argv):
        total += _string_bytes(f"argv[{i}]", word) + 8
    if not _encoded("argv[0]", spec.argv[0]):
        raise Invalid.argument("argv[0]", spec.argv[0], "must name a program")
    for name, value in spec.env.items():
        _check_env_name(name)
        total += _string_bytes(f"env[{name!r}]", f"{name}={value}") + 8
    if total > MAX_STRINGS_BYTES:
        raise Invalid(f"argv and env hold {total} bytes together: at most {MAX_STRINGS_BYTES} (use stdin or a file)")
    _string_bytes("cwd", spec.cwd)
    if not spec.cwd.startswith("/"):
        raise Invalid.argument("cwd", spec.cwd, "must be an absolute path in the sandbox")
    _check_targets([mount.target for mount in spec.mounts])
    for mount in spec.mounts:
        _check_layers(mount)
    _check_limits(spec.limits)


def _encoded(what: str, value: str | bytes) -> bytes:
    try:
        return os.fsencode(value)
    except UnicodeEncodeError as error:
        raise Invalid.argument(what, value, "cannot be encoded in UTF-8") from error


def _string_bytes(what: str, value: str | bytes) -> int:
    encoded = _encoded(what, value)
    if b"\0" in encoded:
        raise Invalid.argument(what, value, "must not hold NUL")
    if len(encoded) >= MAX_STRING_BYTES:
        raise Invalid(
            f"{what} has {len(encoded)} bytes: less than {MAX_STRING_BYTES} are allowed (use stdin or a file)"
        )
    return len(encoded)


def _check_env_name(name: str) -> None:
    if not name or any(c in name for c in "=;\0"):
        raise Invalid.argument("env name", name, "must not be empty nor hold '=', ';' or NUL")


def _check_targets(targets: Sequence[str]) -> None:
    for target in targets:
        _string_bytes("mount target", target)
        if target == "/" or not target.startswith("/") or posixpath.normpath(target) != target or target[:2] == "//":
            raise Invalid.argument("mount target", target, "must be an absolute, normal path other than /")
    ordered = sorted(target + "/" for target in targets)
    for above, below in itertools.pairwise(ordered):
        if below.startswith(above):
            raise Invalid.argument("mount target", below[:-1], f"lies inside another mount, {above[:-1]!r}")


def _check_layers(mount: Mount) -> None:
    if not mount.lowers:
        raise Invalid.argument(f"lowers of {mount.target}", mount.lowers, "needs at least one directory")
    if (mount.upper is None) != (mount.work is None):
        raise Invalid(f"the mount of {mount.target} needs both upper and work, or neither")
    for path in (*mount.lowers, *(p for p in (mount.upper, mount.work) if p is not None)):
        _string_bytes(f"layer of {mount.target}", path)
        if not path.startswith("/"):
            raise Invalid.argument(f"layer of {mount.target}", path, "must be an absolute host path")


def _check_limits(limits: Limits) -> None:
    for name, value in (
        ("timeout_s", limits.timeout_s),
        ("cpus", limits.cpus),
        ("memory_bytes", limits.memory_bytes),
        ("disk_bytes", limits.disk_bytes),
    ):
        if value is not None and not 0 < value < float("inf"):
            raise Invalid.argument(name, value, "must be a number above 0, or None for no limit")
    if limits.memory_bytes is not None and limits.memory_bytes < MIN_MEMORY_BYTES:
        raise Invalid.argument("memory_bytes", limits.memory_bytes, f"must be {MIN_MEMORY_BYTES} (16 MiB) or more")
