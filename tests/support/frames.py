"""Stored runs of bytes without a store: frames in a dict, refs that name them, files made of them."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence

from fanout.format.extents import hole, size_of
from fanout.format.tree import FILE, HOLE, Node, Ref


class Frames:
    """Holds frames by hash. `packed` counts the bytes that `pack` was given, `read_bytes` those that were read."""

    def __init__(self) -> None:
        self._held: dict[bytes, bytes] = {}
        self._offsets = itertools.count()
        self.packed = 0
        self.read_bytes = 0

    def pack(self, raw: bytes, text: bool = True) -> Ref:
        digest = hashlib.sha256(raw).digest()
        self._held[digest] = raw
        self.packed += len(raw)
        return Ref(b"\1" * 16, next(self._offsets), len(raw), len(raw), digest)

    def refs(self, data: bytes, pieces: Sequence[int] = ()) -> tuple[Ref, ...]:
        """Store `data` cut at `pieces`; a piece of zeros becomes a hole."""
        cuts = sorted({0, len(data), *(piece % (len(data) + 1) for piece in pieces)})
        parts = [data[low:high] for low, high in itertools.pairwise(cuts)]
        return tuple(hole(len(part))[0] if not any(part) else self.pack(part) for part in parts)

    def node(self, data: bytes, pieces: Sequence[int] = ()) -> Node:
        return self.of(self.refs(data, pieces))

    def of(self, refs: tuple[Ref, ...]) -> Node:
        return Node(FILE, 0o644, 1, size_of(refs), refs)

    def read(self, refs: Iterable[Ref]) -> bytes:
        parts = []
        for ref in refs:
            raw = bytes(ref.raw) if ref.pack == HOLE else self._held[ref.hash]
            parts.append(raw[ref.skip : ref.skip + ref.size])
            assert len(parts[-1]) == ref.size > 0
        whole = b"".join(parts)
        self.read_bytes += len(whole)
        return whole
