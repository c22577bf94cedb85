"""Layers as another user's: mounts in which what is root's on the disk belongs to one sandbox's user.

Owns mounting them, and showing host paths and the one device that such a user needs. Who the users are, `identities.py`
tells. Part of the spawner process, so it imports the standard library only.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Sequence

if __package__:
    from fanout.engine import overlay
else:
    import overlay  # type: ignore[no-redef, import-not-found]

__all__ = ["LAYERS", "SHOWN", "NotMapped", "mount", "open_tunnels", "show"]

#: Below it is shown what a sandbox's user could not reach by its own path.
SHOWN = f"{overlay.MOUNT_ROOT}/shown"

#: Where layers are attached for the moment in which an overlay of them is mounted.
LAYERS = f"{overlay.MOUNT_ROOT}/layers".encode()

TUN = "/dev/net/tun"

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC = 0x1, 0x2, 0x4, 0x20, 0x1000, 0x4000

#: Numbers of these calls, the same on all machines since they came, and their flags (linux/mount.h).
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_MOUNT_SETATTR = 428, 429, 442
OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH, AT_EMPTY_PATH, AT_FDCWD = 0x1, 0x4, 0x1000, -100
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_IDMAP = 0x1, 0x2, 0x4, 0x100000

_libc = ctypes.CDLL(None, use_errno=True)


class NotMapped(OSError):
    """The file system of a layer, or this kernel, knows no mapped owners."""


def mount(wanted: overlay.Overlay, options: Sequence[str], mapping: int) -> None:
    """As `overlay.mount`, with owners mapped (-1: as they are); a single layer that is not written to is bound.

    OSError where it is refused, `NotMapped` where owners cannot be mapped; nothing is mounted then.
    """
    point, lowers, upper, work = wanted
    if mapping < 0:
        if len(lowers) == 1 and not upper:
            _bind(lowers[0], point, MS_BIND)
            _bind(b"none", point, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)
        else:
            overlay.mount(wanted, options)
        return
    trees: list[int] = []
    attached = 0
    try:
        for path in lowers:
            trees.append(_tree(path, mapping, MOUNT_ATTR_RDONLY))
        if len(lowers) == 1 and not upper:
            _attach(trees[0], point)
            return
        if upper:
            above = os.path.commonpath([upper, work])  # both must be on one mount
            trees.append(_tree(above, mapping, 0))
            held = b"/proc/self/fd/%d/" % trees[-1]
            upper, work = (held + os.path.relpath(path, above) for path in (upper, work))
        for tree in trees:  # a layer of an overlay must be mounted somewhere in this namespace
            _attach(tree, LAYERS)
            attached += 1
        seen = tuple(b"/proc/self/fd/%d" % tree for tree in trees[: len(lowers)])
        overlay.mount((point, seen, upper, work), options)
    finally:
        for _ in range(attached):
            overlay.detach(LAYERS)
        for tree in trees:
            os.close(tree)


def show(paths: Sequence[str]) -> None:
    """Show these files and directories of the host, and all below them, at `SHOWN`/0, 1, ... of this namespace.

    A character device is shown as one that every user may open: only sandboxes that are given it can.
    """
    os.makedirs(LAYERS)
    os.makedirs(SHOWN)
    for number, path in enumerate(paths):
        place = f"{SHOWN}/{number}"
        found = os.stat(path)
        if stat.S_ISCHR(found.st_mode):
            path = _open_device(found.st_rdev, number)
        if stat.S_ISDIR(found.st_mode):
            os.mkdir(place)
        else:
            os.close(os.open(place, os.O_CREAT | os.O_EXCL, 0o644))
        _bind(os.fsencode(path), place.encode(), MS_BIND | MS_REC)


def open_tunnels() -> None:
    """Let everybody in this namespace open /dev/net/tun, as on hosts with udev; a sandbox sees no such device."""
    try:
        found = os.stat(TUN)
    except OSError:
        return  # who asks for a network is told
    if found.st_mode & 0o006 == 0o006:
        return
    place = f"{overlay.MOUNT_ROOT}/devices"
    os.mkdir(place)
    data = ctypes.c_char_p(b"mode=0711,size=16k")
    _checked(_libc.mount(b"fanout", place.encode(), b"tmpfs", ctypes.c_ulong(MS_NOSUID), data), b"tmpfs")
    try:
        os.mknod(f"{place}/tun", stat.S_IFCHR, found.st_rdev)
        os.chmod(f"{place}/tun", 0o666)
        _bind(f"{place}/tun".encode(), TUN.encode(), MS_BIND)
    except OSError:
        pass  # no device can be made here: who asks for a network is told


def _open_device(device: int, number: int) -> str:
    """Make a node of a device for everybody, on a file system that allows devices, and return its path."""
    top = f"{overlay.MOUNT_ROOT}/device-{number}"
    os.mkdir(top)
    _checked(_libc.mount(b"fanout", top.encode(), b"tmpfs", ctypes.c_ulong(MS_NOSUID), b"mode=0711"), top.encode())
    path = f"{top}/node"
    os.mknod(path, stat.S_IFCHR | 0o666, device)
    os.chmod(path, 0o666)
    return path


def _tree(path: bytes, mapping: int, attributes: int) -> int:
    """Return a mount of a directory that is nowhere yet, with mapped owners."""
    tree = _checked(_libc.syscall(SYS_OPEN_TREE, AT_FDCWD, path, OPEN_TREE_CLONE | os.O_CLOEXEC), path)
    wanted = attributes | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_IDMAP
    asked = struct.pack("QQQQ", wanted, 0, 0, mapping)
    try:
        _checked(_libc.syscall(SYS_MOUNT_SETATTR, tree, b"", AT_EMPTY_PATH, asked, len(asked)), path)
    except OSError as error:
        os.close(tree)
        raise NotMapped(error.errno, error.strerror, error.filename) from error
    return tree


def _bind(source: bytes, target: bytes, flags: int) -> None:
    _checked(_libc.mount(source, target, None, ctypes.c_ulong(flags), None), source)


def _attach(tree: int, point: bytes) -> None:
    moved = _libc.syscall(SYS_MOVE_MOUNT, tree, b"", AT_FDCWD, point, MOVE_MOUNT_F_EMPTY_PATH)
    _checked(moved, point)


def _checked(result: int, path: bytes) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), os.fsdecode(path))
    return result
