"""One of several processes that write to one branch as fast as they can, each with a cache directory of its own.

    writer.py STORE CACHE WHO COUNT SEED

Says `ready`, waits for a line, then makes COUNT changes in random ways, four at a time. Prints one JSON object for
each: what it did, and what it was told. STORE is a directory or an s3:// URL.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from fanout.api import Fanout
from fanout.disk.merge import Intent, Policy
from fanout.errors import Conflict, Exists, FanoutError, Invalid, NotFound
from fanout.format.tree import FILE, Node, directory
from fanout.store.local import LocalStore
from fanout.store.open import open_store
from tests.support.connections import connected

HOT = 6


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Writer:
    """Makes one change after the other; `did` is what it says about the last one."""

    def __init__(self, fo: Fanout, disk: Any, who: str, source: random.Random) -> None:
        self.fo = fo
        self.disk = disk
        self.who = who
        self.source = source

    async def step(self, n: int) -> dict[str, Any]:
        kind: Callable[[int, bytes], Awaitable[dict[str, Any]]] = self.source.choices(
            [self.put, self.put_hot, self.shared, self.conditional, self.delete, self.move, self.append],
            [30, 15, 20, 15, 5, 5, 4],
        )[0]
        data = f"{self.who} {n} {self.source.randbytes(self.source.choice((4, 40, 700))).hex()}\n".encode()
        said: dict[str, Any] = {"op": kind.__name__, "hash": digest(data), "status": "ok"}
        try:
            said.update(await kind(n, data))
        except Conflict:
            said["status"] = "conflict"
        except (NotFound, Exists, Invalid):
            said["status"] = "nothing"  # what it wanted to move or delete is not there (any more)
        except FanoutError as error:
            said["status"] = error.code
        return said

    async def put(self, n: int, data: bytes) -> dict[str, Any]:
        await self.disk.put_object(f"{self.who}/{n}", data)
        return {"path": f"{self.who}/{n}"}

    async def put_hot(self, n: int, data: bytes) -> dict[str, Any]:
        path = f"hot/{n % HOT}"
        await self.disk.put_object(path, data)
        return {"path": path}

    async def shared(self, n: int, data: bytes) -> dict[str, Any]:
        return await self._apply(f"hot/{n % HOT}", data, Policy.FIRST_WINS)

    async def conditional(self, n: int, data: bytes) -> dict[str, Any]:
        return await self._apply(f"{self.who}/{n}", data, Policy.LAST_WINS)

    async def _apply(self, path: str, data: bytes, policy: Policy) -> dict[str, Any]:
        """What an exec does: look, take its time, commit what it changed against what it saw."""
        core, point = self.disk.core, self.disk.point
        state = await anyio.to_thread.run_sync(point.state)
        await anyio.sleep(self.source.uniform(0, 0.01))

        def work() -> int | None:
            packer = core.packer()
            parts = [data, b""]
            refs = packer.add_content(len(data), lambda size: parts.pop(0) if parts else b"")
            node = Node(FILE, 0o644, core.runtime.now_ns(), len(data), refs)
            above, name = path.partition("/")[0].encode(), path.encode()
            intents = [Intent(above, state.get(above), directory(), weak=state.get(above) is not None)]
            intents = [each for each in intents if not each.weak] + [Intent(name, state.get(name), node)]
            blobs = dict(packer.finish().blobs)
            seq: int | None = core.apply(
                point, intents, policy=policy, blobs=blobs, seen_blobs=state.blob_bytes(), base_seq=state.seq
            ).seq
            return seq

        return {"path": path, "seq": await anyio.to_thread.run_sync(work), "base": state.seq}

    async def delete(self, n: int, data: bytes) -> dict[str, Any]:
        path = f"{self.who}/{self.source.randrange(n + 1)}"
        there = await self.disk.head_object(path) is not None
        await self.disk.delete_object(path)
        return {"path": path, "hash": None, "status": "ok" if there else "nothing"}

    async def move(self, n: int, data: bytes) -> dict[str, Any]:
        path, to = f"{self.who}/{self.source.randrange(n + 1)}", f"{self.who}/moved-{n}"
        await self.disk.move(f"/{path}", f"/{to}")
        return {"path": to, "hash": None}

    async def append(self, n: int, data: bytes) -> dict[str, Any]:
        """A real exec, of either mode, that appends to a file which all append to."""
        mount = self.disk.mount(conditional=True) if n % 3 else self.disk.mount()
        run = await self.fo.exec("cat >> appended", disks={"w": mount}, stdin=data)
        commit = run.commits["w"]
        if commit.conflict is not None:
            return {"status": "conflict", "path": "appended", "hash": None, "line": data.decode()}
        return {"path": "appended", "seq": commit.seq, "hash": None, "line": data.decode(), "exec": run.id}


async def main(where: str, cache: str, who: str, count: int, seed: int) -> None:
    endpoint = os.environ.get("FANOUT_TEST_S3_ENDPOINT")
    store = LocalStore(where, fsync=False) if where.startswith("/") else open_store(where, s3_endpoint=endpoint)
    async with connected(store, Path(cache)) as fo:
        disk = await fo.disks.get("ws")
        await fo.exec("cat appended", disks={"w": disk.mount(read_only=True)})
        print("ready", flush=True)
        await anyio.to_thread.run_sync(sys.stdin.readline)
        numbers = iter(range(count))
        writer = Writer(fo, disk, who, random.Random(seed))

        async def work() -> None:
            for n in numbers:
                print(json.dumps(await writer.step(n)), flush=True)

        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(work)
    print("end", flush=True)


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
