"""A network between a host and a store that is nearer than the stores people have: so many bytes a second, a latency.

Owns how bytes share the link: in turns, as those of TCP connections about do. Only what is read is slowed down.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

from fanout.store.base import ObjectMeta, Store
from fanout.store.wrap import Wrapper

__all__ = ["GIGABIT", "Link", "Linked"]

#: What passes before another request has its turn.
_TURN_BYTES = 256 << 10


class Link(NamedTuple):
    """What a host is connected by."""

    name: str
    bytes_per_s: float
    latency_s: float


#: What a small machine in a cloud has, in the region of its store.
GIGABIT = Link("1 Gbit/s, 10 ms", 125e6, 0.010)


class Linked(Wrapper):
    """A store behind a link. The time that the store itself takes for a request counts as part of the latency."""

    def __init__(self, inner: Store, link: Link) -> None:
        super().__init__(inner)
        self._link = link
        self._lock = threading.Lock()
        self._free_s = 0.0

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        asked_s = time.perf_counter()
        data = self.inner.get(key, start, length)
        _sleep_until(asked_s + self._link.latency_s)
        left = len(data)
        while left > 0:
            size = min(left, _TURN_BYTES)
            left -= size
            with self._lock:
                self._free_s = max(self._free_s, time.perf_counter()) + size / self._link.bytes_per_s
                mine_s = self._free_s
            _sleep_until(mine_s)
        return data

    def head(self, key: str) -> ObjectMeta | None:
        asked_s = time.perf_counter()
        found = self.inner.head(key)
        _sleep_until(asked_s + self._link.latency_s)
        return found

    def list(self, prefix: str = "", start_after: str = "", limit: int | None = None) -> Iterator[ObjectMeta]:
        time.sleep(self._link.latency_s)
        return self.inner.list(prefix, start_after, limit)


def _sleep_until(when_s: float) -> None:
    left = when_s - time.perf_counter()
    if left > 0:
        time.sleep(left)
