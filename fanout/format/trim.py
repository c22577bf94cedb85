"""What a garbage collection leaves of a branch's early history: a boundary, and the older points that stay readable.

Owns the record and its encoding. Everything from the boundary on is kept; docs/GC.md says how it gets there.
"""

from __future__ import annotations

import msgspec

from fanout.format import envelope

__all__ = ["Kept", "decode_kept", "encode_kept"]

_KIND = b"K"


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """What is kept of one log: the tree at `boundary` and all after it, and the trees at `points` below.

    `points` maps each such sequence number to that of the snap it rests on, 0 where it rests on none of this log.
    The entries after that snap up to the point are kept, too; all others before the boundary are gone. The entry at
    the boundary stays, so that a log never looks as if it were empty.
    """

    boundary: int
    points: dict[int, int]

    def holds_entry(self, seq: int) -> bool:
        """Whether entry `seq` is one of those that are kept."""
        return seq >= self.boundary or any(base < seq <= point for point, base in self.points.items())

    def holds_snap(self, seq: int) -> bool:
        """Whether the snap of `seq` is one of those that are kept."""
        return seq >= self.boundary or seq in self.points.values()


_decoder = msgspec.msgpack.Decoder(Kept)


def encode_kept(kept: Kept) -> bytes:
    return envelope.encode(_KIND, kept)


def decode_kept(data: bytes, key: str) -> Kept:
    """Decode a record of what is kept; `Corrupt` names `key`."""
    return envelope.decode(_KIND, data, _decoder, key)
