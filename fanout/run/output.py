"""Keeping a command's output within bounds: exact up to a cap, head and tail beyond it.

Owns truncation and incremental decoding. Knows nothing of processes.
"""

from __future__ import annotations

import codecs
from collections import deque

__all__ = ["Capture", "TextStream"]


class Capture:
    """Collects one stream. Holds at most `cap` bytes plus one chunk, whatever arrives.

    Up to `cap` bytes are kept exactly; of more, the first and the last `cap // 2` with a marker between.
    """

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.total = 0
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_size = 0

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes."""
        self.total += len(chunk)
        room = self.cap // 2 - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        if chunk:
            self._tail.append(chunk)
            self._tail_size += len(chunk)
            keep = self.cap - self.cap // 2
            while self._tail_size - len(self._tail[0]) >= keep:
                self._tail_size -= len(self._tail.popleft())

    @property
    def truncated(self) -> bool:
        """Whether bytes were left out."""
        return self.total > self.cap

    def value(self) -> bytes:
        """Return what was kept."""
        tail = b"".join(self._tail)
        if not self.truncated:
            return bytes(self._head) + tail
        keep = self.cap - self.cap // 2
        left_out = self.total - self.cap
        return bytes(self._head) + b"\n[... %d bytes left out ...]\n" % left_out + tail[-keep:]


class TextStream:
    """Decodes one stream chunk by chunk as UTF-8, never splitting a character; invalid bytes are replaced."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, chunk: bytes, *, final: bool = False) -> str:
        """Return the text that is complete so far."""
        return self._decoder.decode(chunk, final)
