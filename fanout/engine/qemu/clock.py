"""How fast this host's time stamp counter runs, which guests without KVM see as theirs.

Owns the measurement. A guest that measures it itself, on a busy host and with the devices of a microVM, fails now and
then, and a kernel that does not know it has no timer and hangs.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import platform

from fanout.errors import EngineUnavailable
from fanout.runtime import Runtime, system

__all__ = ["tsc_khz"]

#: rdtsc; shl rdx, 32; or rax, rdx; ret
READ_COUNTER = bytes.fromhex("0f31 48c1e220 4809d0 c3")

WINDOW_S = 0.05


@functools.cache
def tsc_khz(runtime: Runtime = system) -> int:
    """Return the counter's rate in kHz, measured once, to within some 10 parts in a million."""
    if platform.machine() != "x86_64":
        raise EngineUnavailable(f"a guest needs the time stamp counter of an x86-64 host, this is {platform.machine()}")
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError as error:
        raise EngineUnavailable(f"cannot read this host's time stamp counter: {error}") from error
    page.write(READ_COUNTER)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    read = ctypes.CFUNCTYPE(ctypes.c_uint64)(address)
    first_s, first = _read_both(runtime, read)
    runtime.sleep(WINDOW_S)
    last_s, last = _read_both(runtime, read)
    return round((last - first) / (last_s - first_s) / 1000)


def _read_both(runtime: Runtime, read: ctypes._CFunctionType) -> tuple[float, int]:
    """Read clock and counter at one moment: the closest of some tries, for anything may come between."""
    best = (float("inf"), 0.0, 0)
    for _ in range(20):
        before, count, after = runtime.monotonic(), read(), runtime.monotonic()
        best = min(best, (after - before, (before + after) / 2, count))
    return best[1], best[2]
