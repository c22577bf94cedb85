"""Arithmetic on a file's references: cutting and joining runs of bytes without touching the bytes.

Owns slicing and splicing of ref lists. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from fanout.format.tree import HOLE, Ref

__all__ = ["cut", "hole", "size_of", "splice"]


def size_of(refs: Iterable[Ref]) -> int:
    """Return how many bytes of a file the references stand for."""
    return sum(ref.size for ref in refs)


def hole(size: int) -> tuple[Ref, ...]:
    """Return references to `size` zero bytes that are stored nowhere."""
    return (Ref(HOLE, 0, 0, size, b""),) if size > 0 else ()


def cut(refs: Sequence[Ref], start: int, end: int) -> tuple[Ref, ...]:
    """Return references to the bytes start <= i < end of what `refs` stand for (fewer where they end earlier)."""
    return tuple(_Walk(refs).cut(start, end))


def splice(refs: Sequence[Ref], other: Sequence[Ref], ranges: Iterable[tuple[int, int]]) -> tuple[Ref, ...]:
    """Return `refs` with each range (start, end) of bytes replaced by the same range of `other`.

    `ranges` are sorted and disjoint. A range beyond the end of `refs` makes it longer, zeros filling any gap.
    """
    size = size_of(refs)
    mine, theirs = _Walk(refs), _Walk(other)
    joined: list[Ref] = []
    at = 0
    for start, end in ranges:
        _extend(joined, mine.cut(at, start))
        _extend(joined, hole(start - max(at, size)))
        _extend(joined, theirs.cut(start, end))
        at = end
    _extend(joined, mine.cut(at, size))
    return tuple(joined)


class _Walk:
    """Cuts one run of bytes after the other out of a ref list, from left to right, in one pass."""

    def __init__(self, refs: Sequence[Ref]) -> None:
        self._refs = refs
        self._index = 0
        self._at = 0

    def cut(self, start: int, end: int) -> Iterator[Ref]:
        """Yield what stands for start <= i < end; `start` is not before where an earlier cut ended."""
        while self._index < len(self._refs):
            ref = self._refs[self._index]
            low, high = max(start - self._at, 0), min(end - self._at, ref.size)
            if low < high:
                yield _part(ref, low, high)
            if end <= self._at + ref.size:
                return  # the next cut may want the rest of it
            self._at += ref.size
            self._index += 1


def _extend(joined: list[Ref], refs: Iterable[Ref]) -> None:
    """Append references, making one of two that follow each other in one frame."""
    for ref in refs:
        last = joined[-1] if joined else None
        if last is not None and _follows(last, ref):
            whole = not last.skip and last.size + ref.size == last.raw
            joined[-1] = msgspec.structs.replace(last, length=-1 if whole else last.size + ref.size)
        else:
            joined.append(ref)


def _follows(last: Ref, ref: Ref) -> bool:
    same_frame = last.pack == ref.pack != HOLE and last.offset == ref.offset
    return same_frame and last.skip + last.size == ref.skip


def _part(ref: Ref, low: int, high: int) -> Ref:
    """Return the bytes low <= i < high of one reference."""
    if low == 0 and high == ref.size:
        return ref
    if ref.pack == HOLE:
        return hole(high - low)[0]
    return msgspec.structs.replace(ref, skip=ref.skip + low, length=high - low)
