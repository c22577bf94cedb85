"""Arithmetic on a file's references: cutting and joining runs of bytes without touching the bytes.

Owns slicing and splicing of ref lists. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from fanout.format.tree import HOLE, Ref

__all__ = ["cut", "hole", "size_of", "splice"]


def size_of(refs: Iterable[Ref]) -> int:
    """Return how many bytes of a file the references stand for."""
    return sum(ref.size for ref in refs)


def hole(size: int) -> tuple[Ref, ...]:
    """Return references to `size` zero bytes that are stored nowhere."""
    return (Ref(HOLE, 0, 0, size, b""),) if size > 0 else ()


def cut(refs: Iterable[Ref], start: int, end: int) -> tuple[Ref, ...]:
    """Return references to the bytes start <= i < end of what `refs` stand for (fewer where they end earlier)."""
    taken: list[Ref] = []
    at = 0
    for ref in refs:
        low, high = max(start - at, 0), min(end - at, ref.size)
        at += ref.size
        if low < high:
            taken.append(_part(ref, low, high))
    return tuple(taken)


def splice(refs: Sequence[Ref], other: Sequence[Ref], ranges: Iterable[tuple[int, int]]) -> tuple[Ref, ...]:
    """Return `refs` with each range (start, end) of bytes replaced by the same range of `other`.

    `ranges` are sorted and disjoint. A range beyond the end of `refs` makes it longer, zeros filling any gap.
    """
    size = size_of(refs)
    joined: list[Ref] = []
    at = 0
    for start, end in ranges:
        joined += cut(refs, at, start)
        joined += hole(start - max(at, size))
        joined += cut(other, start, end)
        at = end
    joined += cut(refs, at, size)
    return tuple(joined)


def _part(ref: Ref, low: int, high: int) -> Ref:
    """Return the bytes low <= i < high of one reference."""
    if low == 0 and high == ref.size:
        return ref
    if ref.pack == HOLE:
        return hole(high - low)[0]
    return msgspec.structs.replace(ref, skip=ref.skip + low, length=high - low)
