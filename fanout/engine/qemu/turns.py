"""Turns on the host's cores for a program that emulates a processor: few and long.

Owns what the host's scheduler is told. Knows nothing of VMs.

An emulator's code and its tables of translated code fill a core's caches. Where more VMs compute than there are cores,
each loses them to the next within the scheduler's usual 3 ms: twelve that import Python modules took 1.6 times the
computing of the same two by two, on two cores; in turns of 100 ms, 1.15 times. One that reads many files beside six
that compute gains too: 2.4 s instead of 3.1.
"""

from __future__ import annotations

import ctypes
import os
import struct
from contextlib import suppress

__all__ = ["TURN_MS", "take_long_turns"]

#: The longest turn that the kernel grants. Linux before 6.12 knows of none; there only the policy counts.
TURN_MS = 100

#: sched_setattr; the second number is that of all machines but x86-64.
NUMBER = 314 if os.uname().machine == "x86_64" else 274

#: struct sched_attr, its first version: size, policy, flags, nice, priority, runtime (the turn), deadline, period.
ATTRIBUTES = struct.Struct("=IIQiIQQQ")

_libc = ctypes.CDLL(None, use_errno=True)


def take_long_turns(pid: int) -> None:
    """Let a process, all its threads and those it makes from now on, compute in long turns, where the host has them."""
    with suppress(OSError):  # it ended
        nice = os.getpriority(os.PRIO_PROCESS, pid)
        attributes = ATTRIBUTES.pack(ATTRIBUTES.size, os.SCHED_BATCH, 0, nice, 0, TURN_MS * 1_000_000, 0, 0)
        for thread in os.listdir(f"/proc/{pid}/task"):
            _libc.syscall(NUMBER, int(thread), attributes, 0)
