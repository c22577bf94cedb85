"""Sandboxes that were still being built when their spawner was killed: found and killed by the next one.

Owns the mark that tells whose a sandbox is. bwrap's inner process binds its life to nobody before its user namespace
is set up; killed in that moment, spawner and monitor leave it waiting for ever. Part of the spawner process, so it
imports the standard library only.
"""

from __future__ import annotations

import os
import signal

__all__ = ["VARIABLE", "mark", "sweep"]

#: In bwrap's own environment, never in a command's: the spawner's pid and start time.
VARIABLE = "FANOUT_SPAWNER"


def mark() -> dict[str, str]:
    """Return the environment that makes a bwrap known as this process's."""
    return {VARIABLE: f"{os.getpid()}:{_start_time(os.getpid())}"}


def sweep() -> int:
    """Kill the marked sandboxes whose spawner is dead, as far as this user may; returns how many processes."""
    killed = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                environment = file.read(1 << 16)
            owner, _, started = _value(environment).partition(":")
            if not owner.isdigit() or _start_time(int(owner)) == started or not _is_bwrap(pid):
                continue
            os.kill(int(pid), signal.SIGKILL)
            killed += 1
        except OSError:
            continue  # gone, or another user's
    return killed


def _value(environment: bytes) -> str:
    prefix = VARIABLE.encode() + b"="
    found = next((word for word in environment.split(b"\0") if word.startswith(prefix)), prefix)
    return found[len(prefix) :].decode("ascii", "replace")


def _is_bwrap(pid: str) -> bool:
    with open(f"/proc/{pid}/comm", "rb") as file:
        return file.read().strip() == b"bwrap"


def _start_time(pid: int) -> str:
    """Return when a process started, in clock ticks since boot, which tells it from a later one of its pid."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[19].decode()
    except OSError:
        return ""
