"""Where in a scan file words are: by blocks of it, each of some lines.

Owns reading what view/words.py wrote. What is damaged, from another version or gone is as if it were not there.
"""

from __future__ import annotations

import mmap
import struct
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

from fanout.view.words import PLACES, VERSION

__all__ = ["Range", "both", "ranges_of_words", "size_of"]

#: Bytes of a scan file, start <= i < end.
Range = tuple[int, int]

_HEAD = struct.Struct("=4I")


def ranges_of_words(directory: str, lines: Sequence[int]) -> tuple[Range, ...] | None:
    """Return the parts of the scan file in `directory` that have any of some words; None if that is not known.

    `lines` are the offsets of the words' lines in its file of words. Parts begin and end where lines do, ascending.
    """
    try:
        with open(f"{directory}/{PLACES}", "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _ranges(memoryview(data), lines)
    except (OSError, ValueError, IndexError, struct.error):
        return None


def _ranges(view: memoryview, lines: Sequence[int]) -> tuple[Range, ...] | None:
    with view:
        version, blocks, words, _ = _HEAD.unpack_from(view)
        if version != VERSION:
            return None
        at = _HEAD.size
        if len(view) < at + 8 * (blocks + 1) + 4 * (2 * words + 1) or len(view) % 2:
            return None
        with (
            view[at : (at := at + 8 * (blocks + 1))].cast("Q") as starts,
            view[at : (at := at + 4 * words)].cast("I") as offsets,
            view[at : (at := at + 4 * (words + 1))].cast("I") as firsts,
            view[at:].cast("H") as entries,
        ):
            wanted: set[int] = set()
            for line in lines:
                number = bisect_left(offsets, line)
                if number == words or offsets[number] != line:
                    return None
                wanted.update(entries[firsts[number] : firsts[number + 1]])
            return _joined([(starts[block], starts[block + 1]) for block in sorted(wanted)])


def _joined(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """Make one of those that touch."""
    if not ranges:
        return ()
    cuts = [place for place, (one, next_one) in enumerate(pairwise(ranges), 1) if one[1] != next_one[0]]
    return tuple((ranges[a][0], ranges[b - 1][1]) for a, b in pairwise((0, *cuts, len(ranges))))


def size_of(ranges: Sequence[Range]) -> int:
    """Return how many bytes some ranges have."""
    return sum(end - start for start, end in ranges)


def both(some: Sequence[Range], others: Sequence[Range]) -> tuple[Range, ...]:
    """Return what is in both of two lists of ranges, each ascending and without overlaps."""
    found: list[Range] = []
    at = 0
    for start, end in some:
        while at < len(others) and others[at][1] <= start:
            at += 1
        place = at
        while place < len(others) and others[place][0] < end:
            found.append((max(start, others[place][0]), min(end, others[place][1])))
            place += 1
    return tuple(found)
