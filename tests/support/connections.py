"""Connections to test the public interface on, and looking for what execs leave behind on this host."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from fanout.api import Fanout
from fanout.config import Settings
from fanout.local import LocalFanout
from fanout.runtime import Runtime, system
from fanout.store.base import Store


@asynccontextmanager
async def connected(
    store: Store, cache_dir: Path, *, runtime: Runtime = system, **settings: object
) -> AsyncIterator[Fanout]:
    """Open an embedded connection on a store and a cache directory of its own."""
    loaded = Settings.load({}, store="memory://", cache_dir=cache_dir, author="tester", **settings)
    async with LocalFanout(loaded, store=store, runtime=runtime) as fo:
        yield fo


def alive(marker: str) -> list[int]:
    """Return the processes of this host with `marker` in their environment or among their arguments."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            told = Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue  # gone, or nobody's to read
        if marker.encode() in told:
            found.append(int(pid))
    return found


async def until(true: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait until a condition holds; generous, for it is only reached where something is broken."""
    with anyio.fail_after(seconds):
        while not true():
            await anyio.sleep(0.01)
