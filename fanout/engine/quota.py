"""How much a running command has written, looked at now and then, where no file system counts it.

Owns counting an upper layer and when to look again. Kills nobody. For any engine whose layers lie on this host.

What is counted changes meanwhile, by the hand of whoever is counted: nothing is followed but directories, by their
descriptors.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from fanout.runtime import Runtime

__all__ = ["DiskWatch", "written_bytes"]

#: How often the file system's free space is asked for, in seconds.
LOOK_S = 0.2

#: How often the layers are counted though the free space tells of nothing (others may have freed as much), and how
#: many times longer than a count took to wait for the next.
COUNT_S, COUNT_RATIO = 5.0, 20.0

#: As deep as a path of 4,096 bytes: each directory on the way down is an open file meanwhile.
MAX_DEPTH = 2048

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class DiskWatch:
    """Says when the layers of one command hold more than `limit` bytes together. For one thread."""

    def __init__(self, layers: Sequence[str], limit: int, runtime: Runtime) -> None:
        self._layers = layers
        self._limit = limit
        self._runtime = runtime
        self._free = self._free_bytes()
        self.next_s = runtime.monotonic() + LOOK_S
        self._count_s = runtime.monotonic() + COUNT_S

    def exceeded(self) -> bool:
        """Look, if it is time to (`next_s`, in monotonic seconds)."""
        now = self._runtime.monotonic()
        if now < self.next_s:
            return False
        self.next_s = now + LOOK_S
        taken = self._free - self._free_bytes()
        if now < self._count_s and taken < self._limit:
            return False
        found = sum(written_bytes(layer, self._limit) for layer in self._layers)
        after = self._runtime.monotonic()
        wait_s = (after - now) * COUNT_RATIO
        self.next_s = after + max(LOOK_S, wait_s)
        self._count_s = after + max(COUNT_S, wait_s)
        return found > self._limit

    def _free_bytes(self) -> int:
        """Return what is free on the layers' file system; they share one."""
        try:
            found = os.statvfs(self._layers[0])
        except OSError:
            return 0
        return found.f_bfree * found.f_frsize


def written_bytes(layer: str, enough: int) -> int:
    """Return the bytes that a directory and all below it take on the disk; stops counting above `enough`.

    One that is deeper than any path can name holds more than enough.
    """
    total = 0
    above: list[tuple[int, list[str]]] = []  # open directories on the way down, and what is left to visit of each
    try:
        above.append(_opened(layer, None))
        while above and total <= enough:
            fd, names = above[-1]
            if not names:
                os.close(fd)
                above.pop()
                continue
            name = names.pop()
            try:
                found = os.stat(name, dir_fd=fd, follow_symlinks=False)
                total += found.st_blocks * 512 // max(1, found.st_nlink)
                if stat.S_ISDIR(found.st_mode):
                    if len(above) == MAX_DEPTH:
                        return enough + 1
                    above.append(_opened(name, fd))
            except OSError:
                continue  # gone, or a link now
    except OSError:
        pass  # all of it is gone
    finally:
        for fd, _ in above:
            os.close(fd)
    return total


def _opened(path: str, above: int | None) -> tuple[int, list[str]]:
    fd = os.open(path, _DIRECTORY, dir_fd=above)
    try:
        return fd, os.listdir(fd)
    except OSError:
        os.close(fd)
        raise
