"""What a path means: which line of which disk, which key on it; and fanout's errors as Python's.

Owns the text after `fanout://` and how links on a disk are followed. Opens nothing.
"""

from __future__ import annotations

import errno
import os
import posixpath
from typing import NamedTuple

from fanout.api import Disk
from fanout.errors import (
    Busy,
    Conflict,
    Denied,
    Exists,
    FanoutError,
    Invalid,
    LeaseLost,
    Limit,
    NotFound,
)
from fanout.model import DirEntry

__all__ = ["Place", "follow", "os_error", "place_of", "refusal"]

#: As many links as Linux follows.
_MAX_LINKS = 40

_NUMBERS: dict[type[FanoutError], int] = {
    NotFound: errno.ENOENT,
    Exists: errno.EEXIST,
    Denied: errno.EACCES,
    Invalid: errno.EINVAL,
    Limit: errno.EFBIG,
    Busy: errno.EBUSY,
    Conflict: errno.EBUSY,
    LeaseLost: errno.EBUSY,
}


class Place(NamedTuple):
    """A path taken apart: `line` is `disk`, `disk@branch` or `disk@checkpoint`, "" for the list of disks.

    `key` has no slash at either end and is "" for the line's root.
    """

    line: str
    key: str


def place_of(path: str) -> Place:
    """Take apart a path without protocol. The branches `rescue/<exec id>` have a slash of their own."""
    line, _, key = path.partition("/")
    if line.endswith("@rescue"):
        name, _, key = key.partition("/")
        line = f"{line}/{name}"
    if key.startswith("/"):
        raise OSError(errno.EINVAL, "a path has no empty parts", path)
    return Place(line, key)


def os_error(error: FanoutError, path: str) -> OSError:
    """Return what Python's own file functions would raise: by the errno, a FileNotFoundError and so on."""
    return OSError(_NUMBERS.get(type(error), errno.EIO), str(error), path)


def refusal(number: int, path: str) -> OSError:
    """Return the error of an errno, as Python words it."""
    return OSError(number, os.strerror(number), path)


async def follow(disk: Disk, key: str) -> tuple[str, DirEntry]:
    """Return what a key leads to, through links in it or at its end, and the key of that.

    `NotFound` if it leads nowhere on this disk: an absolute target is a place of some sandbox.
    """
    asked = key
    for _ in range(_MAX_LINKS):
        found = await disk.stat(f"/{key}")
        if found is not None and found.kind != "symlink":
            return key, found
        onward = await _around(disk, key) if found is None else _target(key, found)
        if onward is None:
            raise NotFound(f"disk {disk.name!r} has no {asked!r}")
        key = onward
    raise OSError(errno.ELOOP, "too many links", asked)


async def _around(disk: Disk, key: str) -> str | None:
    """Return where `key` is if a directory of it is a link."""
    parent = key
    while parent := posixpath.dirname(parent):
        found = await disk.stat(f"/{parent}")
        if found is not None:
            onward = _target(parent, found)
            return None if onward is None else posixpath.join(onward, key[len(parent) + 1 :])
    return None


def _target(key: str, found: DirEntry) -> str | None:
    """Return the key that a link points to; None for one that points out of the disk, and for what is no link."""
    if found.target is None:
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(key), found.target))
    return None if target in (".", "..") or target.startswith(("/", "../")) else target
