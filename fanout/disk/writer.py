"""One file's content as it comes in: cut into extents and packed while the rest is still on its way.

Owns the cutting. Holds one extent and the open pack in memory, whatever the file's size.
"""

from __future__ import annotations

from fanout.disk.data import Packer
from fanout.format.pack import is_text
from fanout.format.tree import Ref

__all__ = ["ContentWriter"]


class ContentWriter:
    """Takes pieces of any size, in order, from one thread at a time; `finish` gives the references."""

    def __init__(self, packer: Packer) -> None:
        self.packer = packer
        self.size = 0
        self._step = packer.tuning.extent_bytes
        self._pieces: list[bytes] = []
        self._held = 0
        self._text: bool | None = None
        self._refs: list[Ref] = []

    def write(self, piece: bytes) -> None:
        self.size += len(piece)
        self._pieces.append(piece)
        self._held += len(piece)
        if self._held >= self._step:
            self._flush(whole=False)

    def finish(self) -> tuple[tuple[Ref, ...], dict[bytes, bytes]]:
        """Return the references and the blobs that their commit has to carry; all else is durable."""
        self._flush(whole=True)
        packed = self.packer.finish()
        return tuple(self._refs), dict(packed.blobs)

    def abandon(self) -> None:
        """Stop; what was stored stays behind as garbage."""
        self._pieces.clear()
        self.packer.abandon()

    def _flush(self, *, whole: bool) -> None:
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        at = 0
        while at < len(data) and (whole or len(data) - at >= self._step):
            extent = data[at : at + self._step]
            if self._text is None:
                self._text = is_text(extent)
            self._refs.append(self.packer.add(extent, self._text))
            at += len(extent)
        rest = data[at:]
        self._pieces, self._held = ([rest] if rest else []), len(rest)
