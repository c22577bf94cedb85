"""Idempotency keys: a call repeated under the same key joins the first one or gets its result.

Owns remembering results, in this process, within bounds. Knows nothing of execs.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from fanout.errors import FanoutError, Invalid
from fanout.run.executor import waker

__all__ = ["Once"]

T = TypeVar("T")


class _Slot(Generic[T]):
    def __init__(self, request: object) -> None:
        self.request = request
        self.result: T | FanoutError | None = None
        self.size = 0
        self.over = False
        self.waiting: list[Callable[[], object]] = []


class Once(Generic[T]):
    """Runs a call once per key. Failed and cancelled calls are forgotten, so that a retry runs. Thread safe.

    What is given to `keep` is not forgotten. The oldest results go beyond `max_keys` of them, or `max_bytes` by
    `size_of`.
    """

    def __init__(
        self,
        max_keys: int = 10_000,
        max_bytes: int = 64 << 20,
        *,
        size_of: Callable[[T | FanoutError], int] = lambda result: 0,
    ) -> None:
        self._max_keys = max_keys
        self._max_bytes = max_bytes
        self._size_of = size_of
        self._slots: OrderedDict[str, _Slot[T]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    async def run(self, key: str, request: object, call: Callable[[], Awaitable[T]]) -> T:
        """Return `call()`'s result, or the result of an earlier call under `key`.

        `Invalid` if the key was used for another `request`.
        """
        while True:
            event, wake = waker()
            with self._lock:
                slot = self._slots.get(key)
                first = slot is None
                if slot is None:
                    slot = self._slots[key] = _Slot(request)
                elif not slot.over:
                    slot.waiting.append(wake)
            if slot.request != request:
                raise Invalid.argument("idempotency_key", key, "one of its own: it was used for a different call")
            if first:
                return await self._lead(key, slot, call)
            if not slot.over:
                await event.wait()
            if isinstance(slot.result, FanoutError):
                raise copy.copy(slot.result) from slot.result
            if slot.result is not None:
                return slot.result

    def keep(self, key: str, outcome: T | FanoutError) -> None:
        """Remember what the call under way came to, even if its caller goes away before he is told. From any thread."""
        with self._lock:
            slot = self._slots.get(key)
            if slot is not None and not slot.over:
                slot.result = outcome

    async def _lead(self, key: str, slot: _Slot[T], call: Callable[[], Awaitable[T]]) -> T:
        try:
            result = await call()
            slot.result = result
            return result
        finally:
            with self._lock:
                slot.over = True
                if slot.result is None:
                    del self._slots[key]
                else:
                    slot.size = self._size_of(slot.result)
                    self._slots.move_to_end(key)
                    self._bytes += slot.size
                    self._shrink()
                waiting, slot.waiting = slot.waiting, []
            for wake in waiting:
                wake()

    def _shrink(self) -> None:
        """Forget the oldest results; calls under way are no results yet, and stay."""
        excess = len(self._slots) > self._max_keys or self._bytes > self._max_bytes
        for key, slot in list(self._slots.items()) if excess else ():
            if slot.over:
                del self._slots[key]
                self._bytes -= slot.size
            if len(self._slots) <= self._max_keys and self._bytes <= self._max_bytes:
                return
