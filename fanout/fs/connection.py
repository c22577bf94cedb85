"""The connection behind one file system: opened when it is first needed, closed when nobody needs it any more.

Owns that life, over garbage collection, forks and the end of the process, and the handles on lines of disks.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from typing import Any, ClassVar, TypeVar

import anyio

from fanout.api import Disk, Fanout
from fanout.errors import NotFound
from fanout.runtime import system

__all__ = ["Connection"]

T = TypeVar("T")
#: For how long a handle is believed when what it was asked for is not there: the disk may be another one by now.
_TRUSTED_S = 1.0
#: How long the end of the process waits for a connection to close.
_CLOSING_S = 10.0
#: Before thread pools are shut down, which is before `atexit`: closing still has work for them.
_at_exit: Callable[[Callable[[], None]], Any] = getattr(threading, "_register_atexit", atexit.register)


class Connection:
    """One `fanout.Fanout` and its handles, by line. All its coroutines run in one event loop."""

    def __init__(self, fanout: Fanout) -> None:
        self._fanout = fanout
        self._lines: dict[str, tuple[Disk, float]] = {}
        self._opening = anyio.Lock()
        self._open = False
        self._closer: _Closer | None = None

    async def open(self) -> Fanout:
        """Return the connection, open."""
        if not self._open:
            async with self._opening:
                if not self._open:
                    await self._fanout.open()
                    self._open = True
                    self._closer = _Closer(self._fanout, asyncio.get_running_loop())
                    weakref.finalize(self, self._closer.start).atexit = False
        return self._fanout

    async def aclose(self) -> None:
        """Close what was opened; the next call opens it again."""
        self._lines.clear()
        if self._open:
            self._open = False
            if self._closer is not None:
                self._closer.forget()
            await self._fanout.aclose()

    async def line(self, name: str) -> Disk:
        """Return a handle on `disk`, `disk@branch` or `disk@checkpoint`; `NotFound`."""
        held = self._lines.get(name)
        return held[0] if held is not None else await self._fetch(name)

    def forget(self, name: str) -> None:
        """Let go of the handles on all lines of a disk."""
        disk = name.partition("@")[0]
        for line in [line for line in self._lines if line.partition("@")[0] == disk]:
            del self._lines[line]

    async def on(self, name: str, work: Callable[[Disk], Awaitable[T]], *, again: bool = True) -> T:
        """Do something with a line. Where something is not there it is tried again if the disk was made anew meanwhile.

        Not `again`: `work` cannot be repeated; only the next call finds the new disk.
        """
        disk = await self.line(name)
        try:
            return await work(disk)
        except NotFound:
            _, since_s = self._lines.get(name, (None, 0.0))
            if system.monotonic() - since_s < _TRUSTED_S:
                raise
            self.forget(name)
            if not again:
                raise
            fresh = await self._fetch(name)
            if fresh.id == disk.id:
                raise
        return await work(fresh)

    async def _fetch(self, name: str) -> Disk:
        fanout = await self.open()
        disk = await fanout.disks.get(name)
        self._lines[name] = disk, system.monotonic()
        return disk


class _Closer:
    """Closes a connection from outside of its event loop, once, and only in the process and loop it was opened in."""

    open: ClassVar[set[_Closer]] = set()

    def __init__(self, fanout: Fanout, loop: asyncio.AbstractEventLoop) -> None:
        self._fanout = fanout
        self._loop = loop
        self._pid = os.getpid()
        self.open.add(self)

    def start(self) -> Future[None] | None:
        if self not in self.open:
            return None
        self.forget()
        if self._pid != os.getpid() or not self._loop.is_running():
            return None  # nothing can run there any more
        return asyncio.run_coroutine_threadsafe(self._fanout.aclose(), self._loop)

    def forget(self) -> None:
        self.open.discard(self)


def _close_all() -> None:
    closing = [closer.start() for closer in list(_Closer.open)]
    wait([future for future in closing if future is not None], _CLOSING_S)


_at_exit(_close_all)
