"""Idempotency keys: a call repeated under the same key joins the first one or gets its result.

Owns remembering results, in this process, for a bounded number of keys. Knows nothing of execs.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from fanout.errors import Invalid
from fanout.run.executor import waker

__all__ = ["Once"]

T = TypeVar("T")


class _Slot(Generic[T]):
    def __init__(self, request: object) -> None:
        self.request = request
        self.result: T | None = None
        self.over = False
        self.waiting: list[Callable[[], None]] = []


class Once(Generic[T]):
    """Runs a call once per key. Failed and cancelled calls are forgotten, so that a retry runs. Thread safe."""

    def __init__(self, keys: int = 10_000) -> None:
        self._keys = keys
        self._slots: OrderedDict[str, _Slot[T]] = OrderedDict()
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
                raise Invalid.argument("idempotency_key", key, "it was used for a different call")
            if first:
                return await self._lead(key, slot, call)
            if not slot.over:
                await event.wait()
            if slot.result is not None:
                return slot.result

    async def _lead(self, key: str, slot: _Slot[T], call: Callable[[], Awaitable[T]]) -> T:
        try:
            slot.result = await call()
            return slot.result
        finally:
            with self._lock:
                slot.over = True
                if slot.result is None:
                    self._slots.pop(key, None)
                while len(self._slots) > self._keys:
                    self._slots.popitem(last=False)
                waiting, slot.waiting = slot.waiting, []
            for wake in waiting:
                wake()
