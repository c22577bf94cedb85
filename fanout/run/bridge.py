"""From async callers to blocking work in threads: whole iterables, and calls that keep their order.

Owns nothing but the crossing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from itertools import islice
from typing import TypeVar

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

__all__ = ["BATCH", "each", "in_turn"]

T = TypeVar("T")
#: How many items cross at once.
BATCH = 256
_turn: RunVar[anyio.CapacityLimiter] = RunVar("fanout-turn")


async def each(make: Callable[[], Iterable[T]]) -> AsyncIterator[T]:
    """Iterate a blocking iterable in worker threads, a batch at a time."""
    iterator = iter(await anyio.to_thread.run_sync(make))
    while batch := await anyio.to_thread.run_sync(lambda: list(islice(iterator, BATCH))):
        for item in batch:
            yield item


async def in_turn(call: Callable[[], T]) -> T:
    """Run a blocking call in a thread, one at a time in this event loop, first come first served."""
    try:
        turn = _turn.get()
    except LookupError:
        turn = anyio.CapacityLimiter(1)
        _turn.set(turn)
    return await anyio.to_thread.run_sync(call, limiter=turn)
