"""What changed inside a file: byte ranges, or an append; and joining two such changes.

Owns comparing two stored contents of one file, reading only the runs the two do not share, and keeping a file that
was joined often in few runs. docs/MERGE.md ("Inside a file") has the outcomes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from fanout.format.extents import cut, size_of, splice
from fanout.format.pack import is_text_pack
from fanout.format.tree import HOLE, Node, Ref

__all__ = ["MAX_FRAGMENTS", "MAX_RANGES", "Edits", "combine", "compact", "find_edits", "unshared"]

#: A file changed in more places than this was rewritten: byte ranges would say nothing about it.
MAX_RANGES = 4096
#: A file in more small runs than this is packed anew where they are smallest, down to half of it.
MAX_FRAGMENTS = 256
#: How much of it one commit packs anew, at most.
_COMPACT_BYTES = 32 << 20
_STEP = 1 << 20
_CHANGED = re.compile(rb"[^\0]+")

#: Returns the bytes of some refs.
Read = Callable[[tuple[Ref, ...]], bytes]
#: Packs one run of bytes; the second argument says whether it is text.
Pack = Callable[[bytes, bool], Ref]


class Edits(NamedTuple):
    """How a file was changed in place.

    `ranges` are the byte ranges (start, end) in which the new content differs, sorted and disjoint; `appended` says
    that the old content is a prefix of the new. Neither: it was rewritten, shortened, or changed in too many places.
    """

    ranges: tuple[tuple[int, int], ...] = ()
    appended: bool = False


def find_edits(base: Node, node: Node, read: Read) -> Edits:
    """Compare a file's old and new content."""
    if node.size < base.size:
        return Edits()
    ranges: list[tuple[int, int]] = []
    for start, end in unshared(base.data, node.data):
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


def combine(base: Node, node: Node, now: Node, read: Read, pack: Pack, extent_bytes: int) -> tuple[Ref, ...]:
    """Return what a file holds in which `node`'s changes of `base` follow those that made it `now`.

    Where `node` was not made from `base` by changing bytes in place or by appending, it wins whole.
    """
    edits = find_edits(base, node, read)
    if edits.appended:
        data = now.data + cut(node.data, base.size, node.size)
    elif edits.ranges:
        data = splice(now.data, node.data, edits.ranges)
    else:
        return node.data
    return compact(data, read, pack, extent_bytes)


def compact(data: tuple[Ref, ...], read: Read, pack: Pack, extent_bytes: int) -> tuple[Ref, ...]:
    """Return `data` with small neighbouring runs packed anew as one, if there are more than `MAX_FRAGMENTS`.

    Those that join the most runs for each byte go first.
    """
    count = sum(_is_fragment(ref, extent_bytes) for ref in data)
    if count <= MAX_FRAGMENTS:
        return data
    text = next((is_text_pack(ref.pack) for ref in data if ref.pack != HOLE), True)
    windows = [(start, end, size_of(data[start:end])) for start, end in _windows(data, extent_bytes)]
    made: dict[int, tuple[int, Ref]] = {}
    spent = 0
    for start, end, size in sorted(windows, key=lambda window: window[2] / (window[1] - window[0])):
        if count <= MAX_FRAGMENTS // 2 or (made and spent + size > _COMPACT_BYTES):
            break
        made[start] = end, pack(read(data[start:end]), text)
        count -= end - start
        spent += size
    compacted: list[Ref] = []
    at = 0
    while at < len(data):
        end, ref = made.get(at, (at + 1, data[at]))
        compacted.append(ref)
        at = end
    return tuple(compacted)


def _is_fragment(ref: Ref, extent_bytes: int) -> bool:
    return ref.pack != HOLE and (ref.length >= 0 or ref.raw < extent_bytes // 2)


def _windows(data: Sequence[Ref], extent_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of neighbouring fragments, two or more, that fit into one extent together."""
    start = size = 0
    for index, ref in enumerate((*data, *(Ref(HOLE, 0, 0, 1, b""),))):
        fits = _is_fragment(ref, extent_bytes) and size + ref.size <= extent_bytes
        if not fits and index - start > 1:
            yield start, index
        if fits:
            size += ref.size
        elif _is_fragment(ref, extent_bytes):
            start, size = index, ref.size
        else:
            start, size = index + 1, 0


def _differences(old: bytes, new: bytes, offset: int) -> Iterator[tuple[int, int]]:
    if old == new:
        return
    length = len(old)
    changed = (int.from_bytes(old, "little") ^ int.from_bytes(new, "little")).to_bytes(length, "little")
    for found in _CHANGED.finditer(changed):
        yield offset + found.start(), offset + found.end()


def unshared(old: Sequence[Ref], new: Sequence[Ref]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of an old content that a new one does not hold as the same stored bytes in the same place."""
    start: int | None = None
    at = left = right = left_from = right_from = 0
    while left < len(old) and right < len(new):
        one, two = old[left], new[right]
        length = min(one.size - left_from, two.size - right_from)
        if one.hash == two.hash and (one.pack == HOLE or one.skip + left_from == two.skip + right_from):
            if start is not None and length:
                yield start, at
                start = None
        elif start is None:
            start = at
        at, left_from, right_from = at + length, left_from + length, right_from + length
        if left_from == one.size:
            left, left_from = left + 1, 0
        if right_from == two.size:
            right, right_from = right + 1, 0
    if start is not None:
        yield start, at
