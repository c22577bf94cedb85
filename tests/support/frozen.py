"""A process of its own that runs one exec holding a checkout, or breaks into one.

    frozen.py STORE CACHE LEASE_S hold      start an exec that holds `src`; prints its id, then how it ended
    frozen.py STORE CACHE LEASE_S take      run an exec that checks `src` out too, and writes; prints its id

The lease is `LEASE_S` seconds instead of the usual.
"""

from __future__ import annotations

import sys

import anyio

import fanout
from fanout.disk import checkout
from fanout.model import Finished, Started


async def hold(store: str, cache: str) -> None:
    async with fanout.connect(store=store, cache_dir=cache, engine="bubblewrap") as fo:
        disk = await fo.disks.get("ws")
        mount = disk.mount(checkout=["src"])
        try:
            async for event in fo.stream("echo mine > src/a; echo mine > src/extra; sleep 2", disks={"w": mount}):
                if isinstance(event, Started):
                    print(event.id, flush=True)
                elif isinstance(event, Finished):
                    print(f"committed {event.run.commits['w'].seq}", flush=True)
        except fanout.FanoutError as error:
            print(f"{error.code}: {error}", flush=True)


async def take(store: str, cache: str) -> None:
    async with fanout.connect(store=store, cache_dir=cache, engine="bubblewrap") as fo:
        disk = await fo.disks.get("ws")
        run = await fo.exec("echo theirs > src/a", disks={"w": disk.mount(checkout=["src"], queue_ms=30_000)})
        print(run.id, run.conflict, run.timing.lock_ms, flush=True)


if __name__ == "__main__":
    store, cache, lease_s, what = sys.argv[1:]
    checkout.LEASE_S = float(lease_s)
    anyio.run(hold if what == "hold" else take, store, cache)
