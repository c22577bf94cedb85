"""Private writable layers: made, emptied and used again.

Owns a view's directories and what must be gone from them before another command may write there. Used again rather
than removed, and spread over the file system, because ext4 hands a freed inode out again only minutes later: looking
past thousands of such, in the one group of inodes where everything lay, took longer than all else about a mount.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from fanout.runtime import Runtime
from fanout.view.local import remove_tree

__all__ = ["Scratch", "ScratchPool", "spread"]

#: A sandbox that was being built when another ended may hold that one's mount for a moment more: hence a rest.
_REST_S = 1.0
_MAX_RESTING = 256
#: A directory that grew beyond a block stays slow for ever, whatever is removed from it.
_MAX_DIRECTORY_BYTES = 4096
_GET_FLAGS, _SET_FLAGS = 0x80086601, 0x40086602  # FS_IOC_GETFLAGS and FS_IOC_SETFLAGS on 64-bit machines
_TOP_DIRECTORY = 0x20000  # FS_TOPDIR_FL, as `chattr +T` sets it
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Scratch(NamedTuple):
    """A private directory of one view on the cache's file system."""

    path: str
    upper: str
    work: str


class ScratchPool:
    """Makes scratch directories below names that `name` gives, and keeps emptied ones for later. Thread safe."""

    def __init__(self, name: Callable[[], str], runtime: Runtime) -> None:
        self._name = name
        self._runtime = runtime
        self._resting: deque[tuple[float, Scratch]] = deque()
        self._lock = threading.Lock()
        self._flags: bytes | None = None

    def take(self) -> Scratch:
        """Return an empty scratch, one that has rested if there is one."""
        with self._lock:
            if self._resting and self._resting[0][0] <= self._runtime.monotonic():
                return self._resting.popleft()[1]
        return self._make()

    def keep(self, scratch: Scratch) -> bool:
        """Empty a scratch for later use; False if it is not fit for it and has to be removed."""
        with self._lock:
            if len(self._resting) >= _MAX_RESTING:
                return False
        try:
            fit = self._empty_upper(scratch.upper)
            if fit:
                fd = os.open(scratch.work, _DIRECTORY)
                try:
                    _empty(fd)
                finally:
                    os.close(fd)
        except OSError:
            return False
        if fit:
            with self._lock:
                self._resting.append((self._runtime.monotonic() + _REST_S, scratch))
        return fit

    def drain(self) -> list[Scratch]:
        """Return all that rest; they are the caller's to remove."""
        with self._lock:
            resting = [scratch for _, scratch in self._resting]
            self._resting.clear()
        return resting

    def _make(self) -> Scratch:
        path = self._name()
        os.mkdir(path, 0o700)
        os.mkdir(f"{path}/upper", 0o755)
        os.mkdir(f"{path}/work", 0o700)
        if self._flags is None:
            fd = os.open(f"{path}/upper", _DIRECTORY)
            try:
                self._flags = _flags(fd)
            finally:
                os.close(fd)
        return Scratch(path, f"{path}/upper", f"{path}/work")

    def _empty_upper(self, path: str) -> bool:
        """Make an upper layer like new: what a command left in it, and what it did to its root."""
        fd = os.open(path, _DIRECTORY)
        try:
            found = os.fstat(fd)
            if (found.st_uid, found.st_gid) != (os.geteuid(), os.getegid()) or _flags(fd) != self._flags:
                return False
            if found.st_size > _MAX_DIRECTORY_BYTES:
                return False
            os.fchmod(fd, 0o755)
            _empty(fd)
            for name in os.listxattr(fd):  # the command's, access lists among them, and the overlay's own notes
                if not name.startswith("security."):
                    os.removexattr(fd, name)
            return True
        finally:
            os.close(fd)


def _empty(fd: int) -> None:
    for name in os.listdir(fd):
        remove_tree(fd, name)


def _flags(fd: int) -> bytes:
    """Return a directory's attribute flags (chattr): a command may set some of its mount's root. b"" without any."""
    try:
        return fcntl.ioctl(fd, _GET_FLAGS, bytes(8))
    except OSError:
        return b""


def spread(path: str) -> None:
    """Ask the file system to keep what is made in a directory apart: each in an inode group of its own (ext4)."""
    fd = os.open(path, _DIRECTORY)
    try:
        (flags,) = struct.unpack("Q", fcntl.ioctl(fd, _GET_FLAGS, bytes(8)))
        fcntl.ioctl(fd, _SET_FLAGS, struct.pack("Q", flags | _TOP_DIRECTORY))
    except OSError:
        pass  # not ext4: nothing to ask for
    finally:
        os.close(fd)
