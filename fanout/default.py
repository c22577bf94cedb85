"""Making connections: `connect`, and the one that `fanout.exec(...)` and friends use, opened when first needed.

Owns which kind of connection the settings mean, and the default one's life; everything else is the connection's.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any

from fanout.api import Disk, Fanout
from fanout.config import Settings
from fanout.errors import Invalid
from fanout.model import Event, Grep, Run

__all__ = ["connect", "connection", "exec", "grep", "map", "stream"]

#: Before thread pools are shut down, which is before `atexit`: closing still has work for them.
_at_exit: Callable[[Callable[[], None]], Any] = getattr(threading, "_register_atexit", atexit.register)
_lock = threading.Lock()
_connection: Fanout | None = None


def connect(
    url: str | None = None,
    *,
    api_key: str | None = None,
    store: str | None = None,
    engine: str | None = None,
    **settings: Any,
) -> Fanout:
    """Return a connection: embedded in this process by default, on the store of `store` or FANOUT_STORE.

    With `url` (or FANOUT_URL) it is to a fanout server, as whom `api_key` (FANOUT_API_KEY) says; store, engine and
    cache are the server's own then. A `store` given as an argument goes before a FANOUT_URL of the environment.
    Further settings (`cache_dir`, `cache_bytes`, `max_in_flight`, `s3_endpoint`, `root_dir`, `host_paths`, …) are the
    fields of `fanout.Settings`. `Invalid` names a bad one. Nothing is opened before `async with`.
    """
    loaded = Settings.load(url=url, api_key=api_key, store=store, engine=engine, **settings)
    if url is not None and store is not None:
        raise Invalid.argument("store", store, f"None: what is at {url} has a store of its own")
    if loaded.url is not None and store is None:
        from fanout.client import RemoteFanout

        return RemoteFanout(loaded)
    from fanout.local import LocalFanout  # the rest of fanout: `import fanout` and `fanout --help` do without

    return LocalFanout(loaded)


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


async def grep(disk: Disk | str, pattern: str | bytes, **options: Any) -> Grep:
    """`Fanout.grep` on the default connection."""
    return await (await connection()).grep(disk, pattern, **options)


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
