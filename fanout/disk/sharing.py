"""Frames that several readings want: fetched once, one reading after the other.

Owns what is kept between two readings, and who may fetch and unpack at a time. Knows nothing of what frames hold.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from fanout.disk.data import Decoded, Reader, Slice
from fanout.format.tree import Ref

__all__ = ["Shared", "Turns"]


class Turns:
    """How many slices may be in memory, how many of these be fetched, and how many be unpacked at a time."""

    def __init__(self, held: int, fetching: int, unpacking: int) -> None:
        self.held = threading.BoundedSemaphore(held)
        self.fetching = threading.BoundedSemaphore(fetching)
        self.unpacking = threading.BoundedSemaphore(unpacking)


class Shared:
    """The frames that several readings want, one after the other: what two of them want is fetched once.

    `wants` are the frames of each reading. A slice is kept until all of them had theirs of it. The threads of one
    reading may share it.
    """

    def __init__(
        self, reader: Reader, wants: Sequence[Iterable[Ref]], blobs: Mapping[bytes, bytes], turns: Turns
    ) -> None:
        self._reader = reader
        self._turns = turns
        readings = [[(ref.pack, ref.offset, ref) for ref in refs] for refs in wants]
        self._slices = reader.plan((ref for refs in readings for _, _, ref in refs))
        self._at = {(piece.pack, ref.offset): number for number, piece in enumerate(self._slices) for ref in piece.refs}
        #: How many readings still want something of a slice.
        self._left = Counter(
            number for refs in readings for number in {self._at[pack, offset] for pack, offset, _ in refs}
        )
        self._kept: dict[int, memoryview] = {}
        self._blobs = blobs

    def plan(self, refs: Iterable[Ref]) -> list[Slice]:
        """Return the slices that hold the frames of one reading, in order, each with these frames."""
        mine: dict[int, list[Ref]] = {}
        for ref in refs:
            mine.setdefault(self._at[ref.pack, ref.offset], []).append(ref)
        slices = []
        for number in sorted(mine):
            whole = self._slices[number]
            slices.append(Slice(whole.pack, whole.start, whole.end, sorted(mine[number], key=_offset_of)))
        return slices

    def fetch(self, piece: Slice, blobs: Mapping[bytes, bytes]) -> Decoded:
        """Yield the frames of one slice that `plan` gave, verified, fetching it if nobody had."""
        number = self._at[piece.pack, piece.refs[0].offset]
        with self._turns.held:
            data = self._kept.pop(number, None)
            if data is None:
                with self._turns.fetching:
                    data = self._reader.load(piece, self._blobs)
            self._left[number] -= 1
            if self._left[number] > 0:
                self._kept[number] = data
            with self._turns.unpacking:
                yield from self._reader.decode(piece, data)


def _offset_of(ref: Ref) -> int:
    return ref.offset
