"""What changed inside a file: byte ranges, or an append.

Owns comparing two stored contents of one file. Reads only the runs the two do not share.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from fanout.format.extents import cut
from fanout.format.tree import Node, Ref

__all__ = ["MAX_RANGES", "Edits", "find_edits"]

#: A file changed in more places than this was rewritten: byte ranges would say nothing about it.
MAX_RANGES = 4096
_STEP = 1 << 20
_CHANGED = re.compile(rb"[^\0]+")


class Edits(NamedTuple):
    """How a file was changed in place.

    `ranges` are the byte ranges (start, end) in which the new content differs, sorted and disjoint; `appended` says
    that the old content is a prefix of the new. Neither: it was rewritten, shortened, or changed in too many places.
    """

    ranges: tuple[tuple[int, int], ...] = ()
    appended: bool = False


def find_edits(base: Node, node: Node, read: Callable[[tuple[Ref, ...]], bytes]) -> Edits:
    """Compare a file's old and new content. `read` returns the bytes of some refs."""
    if node.size < base.size:
        return Edits()
    ranges: list[tuple[int, int]] = []
    for start, end in _unshared(base, node):
        for low in range(start, end, _STEP):
            high = min(low + _STEP, end)
            for found in _differences(read(cut(base.data, low, high)), read(cut(node.data, low, high)), low):
                if node.size > base.size:
                    return Edits()  # longer and changed before its old end: rewritten
                if ranges and ranges[-1][1] == found[0]:
                    ranges[-1] = (ranges[-1][0], found[1])
                else:
                    ranges.append(found)
                if len(ranges) > MAX_RANGES:
                    return Edits()
    return Edits(tuple(ranges), node.size > base.size)


def _differences(old: bytes, new: bytes, offset: int) -> Iterator[tuple[int, int]]:
    if old == new:
        return
    length = len(old)
    changed = (int.from_bytes(old, "little") ^ int.from_bytes(new, "little")).to_bytes(length, "little")
    for found in _CHANGED.finditer(changed):
        yield offset + found.start(), offset + found.end()


def _unshared(base: Node, node: Node) -> Iterator[tuple[int, int]]:
    """Yield the ranges of the old content that the new one does not hold as the same stored run in the same place."""
    mine = set(_runs(node))
    at = 0
    start = None
    for place in _runs(base):
        if place in mine:
            if start is not None:
                yield start, at
            start = None
        elif start is None:
            start = at
        at = place[0] + place[1]
    if start is not None:
        yield start, at


def _runs(node: Node) -> Iterator[tuple[int, int, int, bytes]]:
    at = 0
    for ref in node.data:
        yield at, ref.size, ref.skip, ref.hash
        at += ref.size
