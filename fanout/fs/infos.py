"""What fsspec is told of a name: the dictionaries of `info` and `ls`.

Owns their fields. `type` is "file", "directory" or "other" (a link that leads to no file); `mtime` is in seconds,
`mode` the permission bits, `etag` the hash of the content (not in listings).
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fanout.model import DirEntry, ObjectInfo

__all__ = ["Info", "of_entry", "of_link", "of_object", "of_root", "version"]

Info = dict[str, Any]


def of_root(path: str) -> Info:
    """Describe the list of disks, or a disk."""
    return {"name": path, "size": 0, "type": "directory"}


def of_object(path: str, found: ObjectInfo, destination: str | None = None) -> Info:
    """Describe what was found at a path; `destination` is where links led to, if it was by way of links."""
    info = _info(path, found.kind, found.size, found.last_modified, found.mode)
    if found.kind == "file":
        info["etag"] = found.etag
    return info if destination is None else info | {"islink": True, "destination": destination}


def of_entry(path: str, entry: DirEntry) -> Info:
    """Describe an entry of a directory that is no link."""
    return _info(path, entry.kind, entry.size, datetime.fromtimestamp(entry.mtime_ns / 1e9, UTC), entry.mode)


def of_link(path: str, entry: DirEntry, found: ObjectInfo | None) -> Info:
    """Describe an entry of a directory that is a link to `found`, None being nothing on this disk.

    One to a directory is "other", so that no walk goes round in circles.
    """
    info = of_entry(path, entry) if found is None or found.kind == "directory" else of_object(path, found)
    return info | {"islink": True, "destination": entry.target}


def version(info: Info) -> tuple[object, ...]:
    """Return what differs if the content does. Not all that describes a file has its etag."""
    return info["size"], info["mtime"], info.get("etag")


def _info(path: str, kind: str, size: int, modified: datetime, mode: int) -> Info:
    known = {"file": "file", "directory": "directory"}
    return {
        "name": path,
        "size": 0 if kind == "directory" else size,
        "type": known.get(kind, "other"),
        "mtime": modified.timestamp(),
        "mode": mode,
    }
