"""`fanout.exec(...)` and friends: one embedded connection of this process, opened when first used.

Owns its life; everything else is the connection's.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any

from fanout.api import Fanout, connect
from fanout.model import Event, Run

__all__ = ["connection", "exec", "map", "stream"]

#: Before thread pools are shut down, which is before `atexit`: closing still has work for them.
_at_exit: Callable[[Callable[[], None]], Any] = getattr(threading, "_register_atexit", atexit.register)
_lock = threading.Lock()
_connection: Fanout | None = None


async def connection() -> Fanout:
    """Return the process's default connection, made from FANOUT_* settings and open."""
    global _connection
    with _lock:
        if _connection is None:
            _connection = connect()
            _at_exit(_close)
        made = _connection
    return await made.open()


async def exec(command: str, **options: Any) -> Run:
    """`Fanout.exec` on the default connection."""
    return await (await connection()).exec(command, **options)


async def map(command: str, items: Any, **options: Any) -> list[Run]:
    """`Fanout.map` on the default connection."""
    return await (await connection()).map(command, items, **options)


async def stream(command: str, **options: Any) -> AsyncGenerator[Event, None]:
    """`Fanout.stream` on the default connection."""
    async for event in (await connection()).stream(command, **options):
        yield event


def _close() -> None:
    from fanout.local import LocalFanout

    if isinstance(_connection, LocalFanout):
        _connection.close()
