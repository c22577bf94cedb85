"""Connections to test the public interface on, and looking for what execs leave behind on this host."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread

from fanout.api import Disk, Fanout
from fanout.client import RemoteFanout
from fanout.config import Settings
from fanout.engine.qemu.engine import QemuEngine
from fanout.local import LocalFanout
from fanout.runtime import Runtime, system
from fanout.store.base import Store
from tests.support.disks import new_disk
from tests.support.guests import with_image
from tests.support.serving import Running


@asynccontextmanager
async def connected(
    store: Store, cache_dir: Path, *, runtime: Runtime = system, **settings: object
) -> AsyncIterator[Fanout]:
    """Open an embedded connection on a store and a cache directory of its own.

    On namespaces unless told otherwise: whether VMs run here is found out by booting one, once a cache directory.
    With `engine` "qemu" guests are small, and their image that of all tests; where there is none the test is skipped.
    """
    given = {"engine": "bubblewrap", **settings}
    if given["engine"] == "qemu":
        with_image(cache_dir)
        given = {"qemu_memory_mib": 256, "qemu_pool": 1, **given}
    loaded = Settings.load({}, store="memory://", cache_dir=cache_dir, author="tester", **given)
    async with LocalFanout(loaded, store=store, runtime=runtime) as fo:
        yield fo


@asynccontextmanager
async def remote(server: Running, **settings: object) -> AsyncIterator[Fanout]:
    """Open a connection to a server, as its administrator."""
    loaded = Settings.load({}, url=server.url, api_key=server.token, **settings)
    async with RemoteFanout(loaded) as fo:
        yield fo


def in_vms(fo: Fanout) -> bool:
    """Say whether it runs commands in VMs of this host, whose processors are emulated."""
    return isinstance(fo, LocalFanout) and fo.settings.engine == "qemu"


def alive(marker: str, fo: Fanout | None = None) -> list[int]:
    """Return the processes of this host with `marker` in their environment or among their arguments.

    Where `fo` runs its commands in VMs nobody sees those from here: the processes of its VMs that have a command,
    whichever; there are two of each, as there are of a command in a sandbox.
    """
    engine = getattr(fo, "_engine", None)
    if isinstance(engine, QemuEngine):
        return [pid for vm in engine.vms() if vm.is_taken for pid in vm.pids()]
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


async def unprobed(fo: Fanout, store: Store, name: str = "ws") -> Disk:
    """Make a disk without asking the store first what it can do: on S3 that takes longer than many a test."""
    await anyio.to_thread.run_sync(lambda: new_disk(store, name=name))
    return await fo.disks.get(name)
