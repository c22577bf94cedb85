"""From async callers to blocking work in threads: whole iterables, and calls that keep their order.

Owns nothing but the crossing.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from itertools import islice
from typing import BinaryIO, TypeVar

import anyio
import anyio.from_thread
import anyio.to_thread
from anyio.lowlevel import RunVar

from fanout.errors import Invalid, Unavailable

__all__ = ["BATCH", "Pull", "each", "in_turn"]

T = TypeVar("T")
#: How many items cross at once.
BATCH = 256
_turn: RunVar[anyio.CapacityLimiter] = RunVar("fanout-turn")


async def each(make: Callable[[], Iterable[T]], batch: int = BATCH) -> AsyncIterator[T]:
    """Iterate a blocking iterable in worker threads, `batch` items at a time."""
    iterator = iter(await anyio.to_thread.run_sync(make))
    while items := await anyio.to_thread.run_sync(lambda: list(islice(iterator, batch))):
        for item in items:
            yield item


class Pull:
    """Bytes that come in chunks, for blocking code that wants n of them. `read` is called in a thread of `to_thread`.

    Holds no more than one chunk beside what was asked for. `argument` names the chunks in errors.
    """

    def __init__(self, argument: str, chunks: AsyncIterable[bytes] | BinaryIO) -> None:
        self._argument = argument
        self._file = None if isinstance(chunks, AsyncIterable) else chunks
        self._chunks = aiter(chunks) if isinstance(chunks, AsyncIterable) else None
        self._held = bytearray()
        self._over = False
        self._stopped = False

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes, fewer only at the end; `Invalid` for chunks that are not bytes."""
        while len(self._held) < size and not self._over:
            if self._stopped:
                raise Unavailable("the call that these bytes are for was cancelled; nothing was stored")
            chunk = self._next(size - len(self._held))
            if not isinstance(chunk, bytes | bytearray | memoryview):
                raise Invalid.argument(self._argument, chunk, "chunks of bytes")
            self._held += chunk
        taken = bytes(self._held[:size])
        del self._held[:size]
        return taken

    def stop(self) -> None:
        """Let a `read` that still comes fail: whoever wanted it has gone."""
        self._stopped = True

    def _next(self, size: int) -> object:
        if self._chunks is None:
            assert self._file is not None
            chunk = self._file.read(size)
            self._over = not chunk
            return chunk
        return anyio.from_thread.run(self._step)

    async def _step(self) -> object:
        assert self._chunks is not None
        try:
            return await anext(self._chunks)
        except StopAsyncIteration:
            self._over = True
            return b""


async def in_turn(call: Callable[[], T]) -> T:
    """Run a blocking call in a thread, one at a time in this event loop, first come first served."""
    try:
        turn = _turn.get()
    except LookupError:
        turn = anyio.CapacityLimiter(1)
        _turn.set(turn)
    return await anyio.to_thread.run_sync(call, limiter=turn)
