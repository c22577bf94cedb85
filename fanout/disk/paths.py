"""Paths as users write them, checked and turned into the bytes a tree is keyed by.

Owns every rule about path text. Knows no tree.
"""

from __future__ import annotations

import os

from fanout.errors import Invalid

__all__ = ["MAX_NAME_BYTES", "MAX_PATH_BYTES", "absolute", "shown", "tree_path"]

#: What Linux file systems hold: one name, and one path. Held by tests/unit/test_paths.py.
MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 4095


def tree_path(argument: str, value: str | bytes, *, allow_root: bool = False) -> bytes:
    """Return the tree key of a path or object key; a leading `/` is allowed, the root is b"".

    Undecodable names use surrogate escapes in `str`. `Invalid` for what no file system can hold.
    """
    if not isinstance(value, str | bytes):
        raise Invalid.argument(argument, value, "a path is str or bytes")
    try:
        raw = value if isinstance(value, bytes) else os.fsencode(value)
    except UnicodeEncodeError as error:
        raise Invalid.argument(argument, value, "not encodable as a file name") from error
    path = raw[1:] if raw.startswith(b"/") else raw
    if not path:
        if allow_root:
            return b""
        raise Invalid.argument(argument, value, "a path below the root of the disk")
    if len(path) > MAX_PATH_BYTES:
        raise Invalid.argument(argument, value, f"at most {MAX_PATH_BYTES} bytes")
    for part in path.split(b"/"):
        if part in (b"", b".", b".."):
            raise Invalid.argument(argument, value, "no empty, '.' or '..' parts: it must stay inside the disk")
        if b"\0" in part:
            raise Invalid.argument(argument, value, "no NUL bytes")
        if len(part) > MAX_NAME_BYTES:
            raise Invalid.argument(argument, value, f"every part at most {MAX_NAME_BYTES} bytes")
    return path


def absolute(argument: str, value: str | bytes) -> bytes:
    """Like `tree_path` for arguments that name a place on the disk: must start with `/`; a trailing `/` is dropped."""
    slash: str | bytes = b"/" if isinstance(value, bytes) else "/"
    if not isinstance(value, str | bytes) or not value.startswith(slash):  # type: ignore[arg-type]
        raise Invalid.argument(argument, value, "an absolute path on the disk, such as '/results'")
    trimmed = value.rstrip(slash) or slash  # type: ignore[arg-type]
    return tree_path(argument, trimmed, allow_root=True)


def shown(path: bytes) -> str:
    """Return a tree path as text; undecodable bytes become surrogate escapes, so that it can be handed back."""
    return os.fsdecode(path)
