"""What one command may use, and what it did use: cgroup v2 where the host delegates one, rlimits elsewhere.

Owns cgroup files, rlimits and accounting. Works on a process that is stopped before its command starts, so that no
extra process is needed. Knows nothing of sandboxes.

The machines this was written on have no cgroup v2 with a memory controller: its files are tested with the kernel of a
virtual machine (tests/contract/test_qemu_cgroups.py), an engine that uses them on directory trees only.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import resource
from dataclasses import dataclass
from pathlib import Path

from fanout.engine.base import Limits

__all__ = ["Cgroup", "Cgroups", "delegated_parent", "memory_left", "rlimits", "spread"]

#: Open files of a command: many programs close all possible descriptors one by one, so "unlimited" is a trap.
OPEN_FILES = 65536

#: Processes and threads of one exec: enough for any build, and few enough that many bombs fit on a host.
PIDS_MAX = 4096

#: One byte, not none: for none the kernel still feeds a dump to the program that the host's core_pattern names.
NO_CORE = 1

#: Since this Linux a user's processes are counted apart in each user namespace.
COUNTED_APART = (5, 14)

PERIOD_US = 100_000


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The cgroup of one exec."""

    path: Path

    def add(self, pid: int) -> None:
        """Move a process in; what it forks later is born in it."""
        _write(self.path / "cgroup.procs", str(pid))

    def oom(self) -> bool:
        """Say whether the kernel killed something in it for want of memory."""
        return _keyed(self.path / "memory.events").get("oom_kill", 0) > 0

    def pids_met(self) -> bool:
        """Say whether a fork failed for there were too many processes."""
        return _keyed(self.path / "pids.events").get("max", 0) > 0

    def usage(self) -> tuple[float, int] | None:
        """Return CPU seconds and peak bytes, or None where this kernel does not count them."""
        used = _keyed(self.path / "cpu.stat").get("usage_usec")
        try:
            peak = int((self.path / "memory.peak").read_text())
        except (OSError, ValueError):
            return None
        return None if used is None else (used / 1e6, peak)

    def remove(self) -> None:
        """Remove it; its processes must be dead. A cgroup that will not go is left to the next `Cgroups`."""
        try:
            self.path.rmdir()
        except OSError:
            pass


class Cgroups:
    """Makes one cgroup for each exec below `parent`, a delegated cgroup without processes of its own."""

    def __init__(self, parent: Path) -> None:
        self.parent = parent
        self._numbers = itertools.count()
        self._prefix = f"fanout-{os.getpid()}-"
        self._remove_stale()

    def make(self, limits: Limits) -> Cgroup:
        """Make a cgroup with these limits. OSError where the host refuses."""
        path = self.parent / f"{self._prefix}{next(self._numbers)}"
        path.mkdir()
        try:
            for name, value in settings(limits).items():
                _set(path / name, value)
        except OSError:
            Cgroup(path).remove()
            raise
        return Cgroup(path)

    def _remove_stale(self) -> None:
        """Remove what killed processes left behind. rmdir refuses a cgroup that still holds a process."""
        for path in self.parent.glob("fanout-*-*"):
            pid = path.name.split("-")[1]
            if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
                Cgroup(path).remove()


def settings(limits: Limits) -> dict[str, str]:
    """Return the cgroup files to write for these limits, in order."""
    files = {"pids.max": str(PIDS_MAX)}
    if limits.memory_bytes is not None:
        files |= {"memory.max": str(limits.memory_bytes), "memory.swap.max": "0", "memory.oom.group": "1"}
    if limits.cpus is not None:
        files["cpu.max"] = f"{max(1000, round(limits.cpus * PERIOD_US))} {PERIOD_US}"
    return files


def delegated_parent(
    proc_self_cgroup: str, mount: Path = Path("/sys/fs/cgroup"), *, attribute: str = "user.delegate"
) -> Path | None:
    """Return the cgroup that a service manager delegated to us, or None.

    That is the parent of our own (systemd's Delegate=yes with DelegateSubgroup=): marked as delegated, writable, and
    handing the memory, cpu and pids controllers down. Nothing is moved and no controller is switched on here:
    anything less than that belongs to somebody else.
    """
    own = next((line[3:] for line in proc_self_cgroup.splitlines() if line.startswith("0::")), None)
    if own is None or own == "/":
        return None
    parent = (mount / own.lstrip("/")).parent
    return parent if usable(parent) and _marked(parent, attribute) else None


def memory_left(proc_self_cgroup: str, mount: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Return what our cgroup (v2) and those above it leave us of their memory, in bytes, where they are limited."""
    own = next((line[3:] for line in proc_self_cgroup.splitlines() if line.startswith("0::")), "/")
    inside = mount / own.lstrip("/")
    left = []
    for above in (inside, *inside.parents):
        if not above.is_relative_to(mount):
            break
        try:
            most, used = (int((above / name).read_text()) for name in ("memory.max", "memory.current"))
            left.append(max(0, most - used))
        except (OSError, ValueError):
            continue  # no limit here ("max"), or no such controller
    return left


def usable(parent: Path) -> bool:
    """Say whether cgroups with limits can be made below this one."""
    try:
        handed_down = set((parent / "cgroup.subtree_control").read_text().split())
    except OSError:
        return False
    return {"memory", "cpu", "pids"} <= handed_down and os.access(parent, os.W_OK)


def _marked(path: Path, attribute: str) -> bool:
    for name in (attribute, "trusted.delegate"):
        try:
            if os.getxattr(path, name) == b"1":
                return True
        except OSError:
            continue
    return False


def rlimits(limits: Limits, *, cgroup: bool, own_user: bool) -> list[tuple[int, int]]:
    """Return the rlimits of a command's processes: (which, how much). What a cgroup counts is left to it.

    `own_user` says that nobody else runs as the user that the command runs as, on this host.
    """
    chosen = [(resource.RLIMIT_CORE, NO_CORE), (resource.RLIMIT_NOFILE, OPEN_FILES)]
    if not cgroup:
        if own_user or _kernel() >= COUNTED_APART:
            chosen.append((resource.RLIMIT_NPROC, PIDS_MAX))
        if limits.memory_bytes is not None:
            chosen.append((resource.RLIMIT_AS, limits.memory_bytes))
    return chosen


def spread(pid: int, limits: Limits, turn: int) -> None:
    """Bind a process that is yet to fork to as many CPUs as it may use, where no cgroup counts; others each turn.

    OSError where the process is gone.
    """
    if limits.cpus is not None:
        os.sched_setaffinity(pid, chosen_cpus(sorted(os.sched_getaffinity(0)), limits.cpus, turn))


def chosen_cpus(available: list[int], cpus: float, turn: int) -> list[int]:
    """Return `cpus` (rounded up) of the available CPUs, starting at another one each turn."""
    count = min(len(available), math.ceil(cpus))
    return sorted(available[(turn * count + i) % len(available)] for i in range(count))


def _kernel() -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])


def _set(path: Path, value: str) -> None:
    try:
        _write(path, value)
    except FileNotFoundError:
        if path.name != "memory.swap.max":  # absent where the kernel has no swap accounting
            raise


def _write(path: Path, value: str) -> None:
    """Write a file that exists: a cgroup's files are never created."""
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)


def _keyed(path: Path) -> dict[str, int]:
    """Read a cgroup file of `name number` lines; empty where it cannot be read."""
    try:
        pairs = (line.split() for line in path.read_text().splitlines())
        return {name: int(number) for name, number in pairs}
    except (OSError, ValueError):
        return {}
