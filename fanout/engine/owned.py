"""Directories that belong to this process while it lives, and are removed by the next one where it was killed.

Owns their names, their locks and their end. Knows nothing of what is in them.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

__all__ = ["OwnedDirectory"]


class OwnedDirectory:
    """A fresh private directory, in memory where that can be had; `close`, or the interpreter's end, removes it."""

    def __init__(self, prefix: str) -> None:
        """Make one; what killed processes of this user left under the same prefix is removed first."""
        _remove_stale(prefix)
        self.path, lock = _locked_directory(prefix)
        self.close = weakref.finalize(self, _remove_own, os.getpid(), self.path, lock)


def _places() -> list[str]:
    """Where a directory may live: in memory if possible, for making hundreds of small files there takes no time."""
    return [path for path in ("/dev/shm", tempfile.gettempdir()) if os.access(path, os.W_OK | os.X_OK)]


def _locked_directory(prefix: str) -> tuple[str, int]:
    """Make a directory, locked for as long as this process lives: the sign that it is in use."""
    while True:
        path = tempfile.mkdtemp(prefix=prefix, dir=_places()[0])
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_SH)
        if os.fstat(lock).st_nlink:
            return path, lock
        os.close(lock)  # another process took it for a stale one before it was locked


def _remove_own(pid: int, path: str, lock: int) -> None:
    """Remove a directory of this process; a forked child must leave its parent's alone."""
    if os.getpid() == pid:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _remove_stale(prefix: str) -> None:
    for path in (path for place in _places() for path in Path(place).glob(f"{prefix}*")):
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            if os.fstat(lock).st_uid == os.geteuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            pass  # in use
        finally:
            os.close(lock)
