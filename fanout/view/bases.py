"""Which scan files of a disk's pages this host has: where the content of a new page is looked for before it is fetched.

Owns that list, which outlives the process in one small file a disk, and the choice between resting a page on others'
scan files and writing one for it. A list that is out of date or gone costs time only.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from fanout.format.tree import Node, content_hash
from fanout.view.scan import Copy, Scan

__all__ = ["Base", "Bases", "Kind", "Rested", "rest"]

Kind = Literal["text", "binary"]
Files = Sequence[tuple[bytes, Node]]

#: So much of a page may lie in patches, and so much of the scan files it rests on may be of no use to it.
_PATCHED_SHARE = 0.25
_DEAD_SHARE = 0.5
#: How many scan files are looked through for one page.
_CANDIDATES = 6
#: Of superseded scan files so many times the number of those in use are remembered.
_REMEMBERED = 3


class Base(msgspec.Struct, frozen=True, array_like=True):
    """A page's scan file: its paths are first <= path < end (None: no end)."""

    kind: Kind
    identity: str
    first: bytes
    end: bytes | None


@dataclass(frozen=True, slots=True)
class Rested:
    """What a page rests on: which files of which scan files hold it, and what none of them has."""

    live: Mapping[str, frozenset[int]]
    missing: Files
    copies: Mapping[int, Copy] = field(default_factory=dict)


class Bases:
    """The bases of one disk, the last used last. Thread safe."""

    def __init__(self, path: str, writer: str) -> None:
        self._path = path
        self._writer = writer
        self._lock = threading.Lock()
        self._bases: dict[str, Base] = {}
        try:
            with open(path, "rb") as file:
                for base in msgspec.msgpack.decode(file.read(), type=list[Base]):
                    self._bases[base.identity] = base
        except (OSError, msgspec.DecodeError):
            pass

    def near(self, kind: Kind, first: bytes, end: bytes | None) -> list[str]:
        """Return the bases of a kind that overlap a range of paths, the last used first."""
        with self._lock:
            found = [
                base.identity
                for base in reversed(self._bases.values())
                if base.kind == kind and (end is None or base.first < end) and (base.end is None or first < base.end)
            ]
        return found[:_CANDIDATES]

    def use(self, bases: Iterable[Base]) -> None:
        """Note which bases a search used; what is new is written down."""
        used = list(bases)
        with self._lock:
            new = any(base.identity not in self._bases for base in used)
            for base in used:
                self._bases.pop(base.identity, None)
                self._bases[base.identity] = base
            while len(self._bases) > _REMEMBERED * len(used) + 64:
                self._bases.pop(next(iter(self._bases)))
            data = msgspec.msgpack.encode(list(self._bases.values())) if new else b""
        if data:
            self._write(data)

    def _write(self, data: bytes) -> None:
        beside = f"{self._path}.{self._writer}"
        try:
            with open(beside, "wb") as file:
                file.write(data)
            os.replace(beside, self._path)
        except OSError:
            pass  # the host is full, perhaps: then the next process finds less


def rest(files: Files, candidates: Mapping[str, Scan]) -> Rested | None:
    """Find a page's files in scan files of others; None where these have none of them.

    Where writing one for it is the better choice, `missing` is everything, and `copies` says where bytes of it are.
    """
    places: dict[int, tuple[str, int]] = {}
    following = dict.fromkeys(candidates, 0)
    for at, (path, node) in enumerate(files):
        content = node.digest or content_hash(node)
        for identity, scan in candidates.items():
            likely = following[identity]  # mostly, both have the same files
            number = likely if likely < scan.files and scan.path(likely) == path else scan.find(path)
            if number is None:
                continue
            following[identity] = number + 1
            if scan.hash_of(number) == content:
                places[at] = identity, number
                break
    if not places:
        return None
    total = sum(node.size + 1 for _, node in files)
    missing = [item for at, item in enumerate(files) if at not in places]
    live: dict[str, set[int]] = {}
    for identity, number in places.values():
        live.setdefault(identity, set()).add(number)
    patched = sum(node.size + 1 for _, node in missing)
    carried = sum(candidates[identity].size for identity in live)
    if patched > _PATCHED_SHARE * total or total - patched < (1 - _DEAD_SHARE) * carried:
        copies = {at: Copy(candidates[identity], number) for at, (identity, number) in places.items()}
        return Rested({}, files, copies)
    return Rested({identity: frozenset(numbers) for identity, numbers in live.items()}, missing)
