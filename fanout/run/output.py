"""Keeping a command's output within bounds: exact up to a cap, head and tail beyond it.

Owns truncation and incremental decoding. Knows nothing of processes.
"""

from __future__ import annotations

import codecs

__all__ = ["Capture", "TextStream"]


class Capture:
    """Collects one stream. Holds at most one and a half times `cap` bytes plus one chunk, whatever arrives.

    Up to `cap` bytes are kept exactly; of more, the first and the last `cap // 2` with a marker between.
    """

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.total = 0
        self._head = bytearray()
        self._tail = bytearray()
        self._keep = cap - cap // 2

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes."""
        self.total += len(chunk)
        room = self.cap // 2 - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        self._tail += chunk
        if len(self._tail) > 2 * self._keep:
            del self._tail[: -self._keep]

    @property
    def truncated(self) -> bool:
        """Whether bytes were left out."""
        return self.total > self.cap

    def value(self) -> bytes:
        """Return what was kept."""
        if not self.truncated:
            return bytes(self._head + self._tail)
        marker = b"\n[... %d bytes left out ...]\n" % (self.total - self.cap)
        return bytes(self._head) + marker + bytes(self._tail[-self._keep :])


class TextStream:
    """Decodes one stream chunk by chunk as UTF-8, never splitting a character; invalid bytes are replaced."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, chunk: bytes, *, final: bool = False) -> str:
        """Return the text that is complete so far."""
        return self._decoder.decode(chunk, final)
