"""Overlayfs mounts in a private mount namespace, by the kernel's own calls.

Owns the choice of their options. Knows nothing of sandboxes. Part of the spawner process, so it imports the standard
library only.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence

__all__ = [
    *("MOUNT_ROOT", "WANTED_OPTIONS", "Overlay", "chosen_options", "detach", "enter_private_namespace", "mount"),
    *("mount_root", "unshare_mounts"),
]

CLONE_FS, CLONE_NEWNS = 0x200, 0x20000
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x4000, 0x40000
MNT_DETACH = 0x2

#: Options of a writable overlay, each dropped alone where the kernel refuses it. redirect_dir makes renaming a
#: lower directory one entry, index keeps hard links whole, volatile spares a sync of the whole file system at the
#: end of each exec. metacopy must be off: a diff needs the data of every changed file in the upper layer.
WANTED_OPTIONS = ("metacopy=off", "redirect_dir=on", "index=on", "xino=auto", "volatile")

#: Where the private namespace keeps its mount points. It exists wherever sysfs is, and no layer can lie in it.
MOUNT_ROOT = "/sys/fs"

#: A mount point, lowers, upper and work (both b"" if read-only).
Overlay = tuple[bytes, tuple[bytes, ...], bytes, bytes]

_libc = ctypes.CDLL(None, use_errno=True)


def enter_private_namespace() -> tuple[str, ...]:
    """Give this process its own mount namespace, from which no mount reaches the rest of the host.

    Returns the options for overlays in it.
    """
    unshare_mounts()
    try:
        _umount_below(MOUNT_ROOT.encode())
        mount_root()
    except OSError as error:
        raise OSError(f"cannot prepare the mount namespace: {error}") from error
    return chosen_options(_try_overlay)


def unshare_mounts() -> None:
    """Give this process a copy of its mount namespace, from which no mount reaches another."""
    if _libc.unshare(CLONE_NEWNS | CLONE_FS) != 0:
        raise OSError(f"cannot make a mount namespace: {os.strerror(ctypes.get_errno())}")
    _mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)


def mount_root() -> None:
    """Make the place for mount points: empty, in memory, and to be listed by this user only."""
    _mount(b"fanout", MOUNT_ROOT.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, b"mode=0711")


def mount(overlay: Overlay, options: Sequence[str], *, in_user_namespace: bool = False) -> None:
    """Mount an overlay; OSError where it is refused, EBUSY where another still holds its layers.

    `options` are those of a writable one. In a user namespace its notes are attributes that its owner may set.
    """
    point, lowers, upper, work = overlay
    layers = [b"lowerdir=" + b":".join(_escaped(path) for path in reversed(lowers))]
    if upper:
        layers += [b"upperdir=" + _escaped(upper), b"workdir=" + _escaped(work), *map(str.encode, options)]
    if in_user_namespace:
        layers.append(b"userxattr")
    _mount(b"overlay", point, b"overlay", MS_NOSUID | MS_NODEV, b",".join(layers))


def detach(target: bytes) -> None:
    """Drop a mount from this namespace; copies in others stay."""
    if _libc.umount2(target, MNT_DETACH) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), os.fsdecode(target))


def chosen_options(works: Callable[[tuple[str, ...]], bool]) -> tuple[str, ...]:
    """Return the wanted options that this kernel takes, judged by `works`; those it refuses are dropped one by one.

    OSError where not even a plain overlay can be mounted.
    """
    if works(WANTED_OPTIONS):
        return WANTED_OPTIONS
    kept: tuple[str, ...] = ()
    if not works(kept):
        raise OSError("the kernel mounts no overlayfs here (is the overlay module loaded?)")
    for option in WANTED_OPTIONS:
        if works((*kept, option)):
            kept = (*kept, option)
    return kept


def _try_overlay(options: tuple[str, ...]) -> bool:
    """Say whether an overlay with these options mounts, on a scratch directory of the private tmpfs."""
    top = f"{MOUNT_ROOT}/try-{len(os.listdir(MOUNT_ROOT))}".encode()
    lower, upper, work, point = (top + name for name in (b"/lower", b"/upper", b"/work", b"/merged"))
    for path in (lower, upper, work, point):
        os.makedirs(path)
    try:
        mount((point, (lower,), upper, work), options)
    except OSError:
        return False
    detach(point)
    return True


def _escaped(path: bytes) -> bytes:
    """Escape what separates options and layers, as overlayfs reads them."""
    return path.replace(b"\\", b"\\\\").replace(b",", b"\\,").replace(b":", b"\\:")


def _mount(source: bytes, target: bytes, kind: bytes | None, flags: int, data: bytes | None) -> None:
    if _libc.mount(source, target, kind, ctypes.c_ulong(flags), data) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {os.fsdecode(kind or b'flags')}: {os.strerror(number)}", os.fsdecode(target))


def _umount_below(top: bytes) -> None:
    """Drop the mounts below a directory (cgroups, bpf): each costs every sandbox a copy, and none can see them."""
    with open("/proc/self/mounts", "rb") as file:
        points = [line.split(b" ")[1] for line in file]
    for point in reversed(points):
        if point.startswith(top + b"/"):
            detach(point)
