"""Mounts made in a sandbox that runs already, where its own processes could not make them.

Owns entering a sandbox's namespaces. Knows nothing of what the sandbox is for. Part of the spawner process, so it
imports the standard library only; it runs in a forked child of it, for what it enters it cannot leave.

An overlay is mounted where the host's directories are in sight, as a detached copy, which is then moved into the
sandbox. With a private mount namespace of ours that is there; else in a fresh one that belongs to the sandbox's user
namespace, in which its owner may mount, but only with `userxattr`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

if __package__:
    from fanout.engine import mapped, overlay
else:
    import mapped  # type: ignore[no-redef, import-not-found]
    import overlay  # type: ignore[no-redef, import-not-found]

__all__ = ["attach"]

CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND = 0x1, 0x2, 0x4, 0x20, 0x1000
AT_FDCWD, AT_EMPTY_PATH, AT_RECURSIVE = -100, 0x1000, 0x8000
OPEN_TREE_CLONE, OPEN_TREE_CLOEXEC, MOVE_MOUNT_F_EMPTY_PATH = 1, os.O_CLOEXEC, 4

#: The same on every architecture.
SYS_OPEN_TREE, SYS_MOVE_MOUNT = 428, 429

#: Where an overlay is mounted for the moment it takes to copy it.
POINT = f"{overlay.MOUNT_ROOT}/attached"

_libc = ctypes.CDLL(None, use_errno=True)


def attach(
    init: int,
    top: str,
    overlays: Sequence[overlay.Overlay],
    options: Sequence[str],
    *,
    private: bool,
    mapping: int = -1,
) -> None:
    """Mount overlays (and read-only binds, where there is but one layer) below `top` in the sandbox of `init`.

    Their targets are made if need be. The sandbox's root is expected to be read-only and is so again afterwards.
    `private` says that this process's mount namespace is for overlays, and `mapping` whose the files are then (see
    `mapped.py`). OSError where something is refused.
    """
    mounts = os.open(f"/proc/{init}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    if not private:
        _setns(os.open(f"/proc/{init}/ns/user", os.O_RDONLY | os.O_CLOEXEC), CLONE_NEWUSER)
        overlay.unshare_mounts()
        overlay.mount_root()
    os.makedirs(POINT, exist_ok=True)
    trees = [_tree(wanted, options, private, mapping) for wanted in overlays]
    _setns(mounts, CLONE_NEWNS)
    _remount(b"/", 0)
    try:
        for wanted, tree in zip(overlays, trees, strict=True):
            target = os.fsencode(top) + wanted[0]
            _make_directory(target, os.stat(top))
            _move(tree, target)
            _remount(target, 0 if wanted[2] else MS_RDONLY)
    finally:
        _remount(b"/", MS_RDONLY)


def _tree(wanted: overlay.Overlay, options: Sequence[str], private: bool, mapping: int) -> int:
    """Return a detached mount of an overlay, or of its only layer where nothing is written."""
    _, lowers, upper, work = wanted
    if private:
        mapped.mount((os.fsencode(POINT), lowers, upper, work), options, mapping)
    elif len(lowers) == 1 and not upper:
        return _open_tree(lowers[0])
    else:
        overlay.mount((os.fsencode(POINT), lowers, upper, work), options, in_user_namespace=True)
    try:
        return _open_tree(os.fsencode(POINT))
    finally:
        overlay.detach(os.fsencode(POINT))


def _make_directory(target: bytes, above: os.stat_result) -> None:
    """Make a mount point, as the user whose sandbox it is: no other exists there."""
    _libc.setfsgid(above.st_gid)
    _libc.setfsuid(above.st_uid)
    try:
        os.makedirs(target, mode=0o755, exist_ok=True)
    finally:
        _libc.setfsuid(os.geteuid())
        _libc.setfsgid(os.getegid())


def _open_tree(path: bytes) -> int:
    return _checked(
        _libc.syscall(SYS_OPEN_TREE, AT_FDCWD, path, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC), "open_tree", path
    )


def _move(tree: int, target: bytes) -> None:
    moved = _libc.syscall(SYS_MOVE_MOUNT, tree, b"", AT_FDCWD, target, MOVE_MOUNT_F_EMPTY_PATH)
    _checked(moved, "move_mount", target)
    os.close(tree)


def _remount(target: bytes, flags: int) -> None:
    wanted = ctypes.c_ulong(MS_REMOUNT | MS_BIND | MS_NOSUID | MS_NODEV | flags)
    _checked(_libc.mount(None, target, None, wanted, None), "remount", target)


def _setns(fd: int, kind: int) -> None:
    _checked(_libc.setns(fd, kind), "setns", b"")
    os.close(fd)


def _checked(result: int, what: str, path: bytes) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}", os.fsdecode(path))
    return result
