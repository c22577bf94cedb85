"""What fsspec is told of a name: the dictionaries of `info` and `ls`.

Owns their fields. `type` is "file", "directory" or "other" (a link that leads to no file); `mtime` is in seconds,
`mode` the permission bits, `etag` the hash of a file's content.
"""

from __future__ import annotations

from typing import Any

from fanout.model import DirEntry

__all__ = ["Info", "of_entry", "of_link", "of_root"]

Info = dict[str, Any]
_TYPES = {"file": "file", "directory": "directory", "symlink": "other"}


def of_root(path: str) -> Info:
    """Describe the list of disks, or a disk."""
    return {"name": path, "size": 0, "type": "directory"}


def of_entry(path: str, entry: DirEntry, destination: str | None = None) -> Info:
    """Describe what was found at a path; `destination` is where links led to, if it was by way of links."""
    info: Info = {
        "name": path,
        "size": 0 if entry.kind == "directory" else entry.size,
        "type": _TYPES[entry.kind],
        "mtime": entry.mtime_ns / 1e9,
        "mode": entry.mode,
    }
    if entry.kind == "file":
        info["etag"] = entry.etag
    return info if destination is None else {**info, "islink": True, "destination": destination}


def of_link(path: str, link: DirEntry, found: DirEntry | None) -> Info:
    """Describe an entry of a directory that is a link to `found`, None being nothing on this disk.

    One to a directory is "other", so that no walk goes round in circles.
    """
    return of_entry(path, link if found is None or found.kind == "directory" else found, link.target)
