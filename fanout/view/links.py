"""Hard links that overlayfs keeps together through its index, though the writable layer shows only some names.

With `index=on` a file of a lower layer that has several names is copied up once, into the work directory's index.
A name that was not touched itself then shows the new content without appearing in the layer. Owns finding those
names. Knows nothing of what is done with them.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterable, Iterator, Sequence

from fanout.view.local import Directories

__all__ = ["Handles", "indexed_files", "origin_handle"]

_libc = ctypes.CDLL(None, use_errno=True)
#: struct ovl_fb: version, magic, length, flags, type, a uuid of 16 bytes, then the file handle itself.
_MAGIC = 0xFB
_HEADER = 21
_HANDLE_MAX = 128


class _FileHandle(ctypes.Structure):
    _fields_ = (
        ("bytes", ctypes.c_uint32),
        ("type", ctypes.c_int32),
        ("handle", ctypes.c_ubyte * _HANDLE_MAX),
    )


class Handles:
    """Which names of the lower layers are one file, as the kernel tells files apart: by file handle."""

    def __init__(self, lowers: Sequence[str], paths: Iterable[bytes]) -> None:
        """Look up `paths` (relative to the layers' roots) in `lowers` (lowest first)."""
        self._paths: dict[bytes, list[bytes]] = {}
        roots = [os.open(lower, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) for lower in reversed(lowers)]
        layers = [Directories(root) for root in roots]
        try:
            for path in paths:
                handle = next((found for layer in layers if (found := _handle(layer, path))), None)
                if handle is not None:
                    self._paths.setdefault(handle, []).append(path)
        finally:
            for layer in layers:
                layer.close()
            for root in roots:
                os.close(root)

    def names(self, handle: bytes | None) -> list[bytes]:
        """Return the paths of the file with this handle."""
        return self._paths.get(handle, []) if handle is not None else []


def origin_handle(origin: bytes | None) -> bytes | None:
    """Return the handle in overlayfs' note of which lower file a copy came from."""
    if origin is None or len(origin) <= _HEADER or origin[1] != _MAGIC:
        return None
    return origin[4:5] + origin[_HEADER : origin[2]]


def indexed_files(work: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield (name, stat) of the files in a work directory's index; nothing where there is no index."""
    try:
        with os.scandir(f"{work}/index") as entries:
            for entry in entries:
                found = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(found.st_mode):
                    yield entry.name, found
    except (FileNotFoundError, PermissionError):
        return


def _handle(layer: Directories, path: bytes) -> bytes | None:
    parent, _, name = path.rpartition(b"/")
    held = _FileHandle(bytes=_HANDLE_MAX)
    mount = ctypes.c_int()
    try:
        fd = layer.open(parent)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if _libc.name_to_handle_at(fd, name, ctypes.byref(held), ctypes.byref(mount), 0) != 0:
        return None
    return bytes([held.type & 0xFF]) + bytes(held.handle[: held.bytes])
