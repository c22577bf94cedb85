"""Users of the host that own nothing: as root, each sandbox runs as one of its own, and never as the host's root.

Owns their numbers and the mappings by which files of root's are theirs within one mount. Part of the spawner process,
so it imports the standard library only.

A mapping is a user namespace that nobody lives in (see mount_setattr(2), MOUNT_ATTR_IDMAP). Through it a file of root's
belongs to the sandbox's user, other owners stay, and what root itself makes (the overlay's own work) gets the user's
number on the disk.
"""

from __future__ import annotations

import ctypes
import os
import signal
from typing import NamedTuple

__all__ = ["Identities", "Identity"]

#: Where the numbers begin: no distribution hands out numbers from here up to 2**31 (systemd's UIDS-GIDS.md).
FIRST = 1879048192

#: How many one spawner may use, and how many spawners' ranges there are.
COUNT, RANGES = 4096, 65536

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWNET = 0x20000, 0x10000000, 0x40000000
MS_REC, MS_PRIVATE = 0x4000, 0x40000

_libc = ctypes.CDLL(None, use_errno=True)


class Identity(NamedTuple):
    """A user and group number, and the mapping that makes root's files theirs (an open user namespace)."""

    number: int
    mapping: int


class Identities:
    """Hands out users, the last one given back first. Empty where this host has none to give (see `why`)."""

    def __init__(self) -> None:
        self.why = ""
        self._first = FIRST + os.getpid() % RANGES * COUNT
        self._made = 0
        self._free: list[Identity] = []
        try:
            self._free.append(self._make())
            if not _may_make_namespaces(self._free[0].number):
                self.refuse("users without rights may not make user namespaces here")
        except OSError as error:
            self.refuse(f"this process cannot map users: {error}")

    def take(self) -> Identity | None:
        """Return a user that no other sandbox of this spawner has; None where there is none."""
        if self.why:
            return None
        if self._free:
            return self._free.pop()
        try:
            return self._make() if self._made < COUNT else None
        except OSError:
            return None

    def give_back(self, identity: Identity) -> None:
        """Take one back, whose every process is dead."""
        self._free.append(identity)

    def refuse(self, why: str) -> None:
        """Hand out no more."""
        self.why = why

    def _make(self) -> Identity:
        number = self._first + self._made
        lines = f"0 {number} 1\n1 1 {number - 1}\n{number} 0 1\n".encode()
        identity = Identity(number, _user_namespace(lines))
        self._made += 1
        return identity


def _user_namespace(lines: bytes) -> int:
    """Make a user namespace with this map of users and groups; OSError where that is not allowed."""
    ready, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        if _libc.unshare(CLONE_NEWUSER) == 0:
            os.write(go, b"1")
            signal.pause()
        os._exit(1)
    try:
        os.close(go)
        if not os.read(ready, 1):
            raise OSError("cannot make a user namespace")
        for name in ("uid_map", "gid_map"):
            fd = os.open(f"/proc/{pid}/{name}", os.O_WRONLY)
            try:
                os.write(fd, lines)
            finally:
                os.close(fd)
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(ready)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _may_make_namespaces(number: int) -> bool:
    """Say whether a user without any rights can make what a sandbox is made of."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setresgid(number, number, number)
            os.setresuid(number, number, number)
            made = _libc.unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWNET) == 0
            os._exit(
                0 if made and _libc.mount(b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None) == 0 else 1
            )
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0
