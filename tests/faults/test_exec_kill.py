"""A process that fans out is killed at any moment: nothing of it lives on, and the disk holds whole commits only."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import anyio
import pytest

from fanout.store.local import LocalStore
from tests.support.connections import alive, connected, until

#: Each exec writes three files that only together are a commit; every fourth leaves a child behind.
CHILD = """
import asyncio, sys, fanout
from fanout.config import Settings
from fanout.local import LocalFanout
from fanout.store.local import LocalStore

async def main(store, cache, word):
    settings = Settings(store="memory://", cache_dir=cache, max_in_flight=8)
    async with LocalFanout(settings, store=LocalStore(store, fsync=False)) as fo:
        disk = await fo.disks.get("ws")
        print("ready", flush=True)
        for generation in range(1000):
            # The word is in the environment of the command's processes and among the arguments of what starts them.
            command = (f": {word};" " mkdir -p $FANOUT_EXEC_ID; for i in 1 2 3; do echo {} > $FANOUT_EXEC_ID/$i; done;"
                       " [ $(({} % 4)) = 0 ] && (setsid sleep 300 &); sleep 0.0{}")
            await fo.map(command, range(8), disks={"w": disk.mount(conditional=True)}, env={word: "1"})

asyncio.run(main(*sys.argv[1:]))
"""


def mounts() -> list[str]:
    return [line for line in Path("/proc/self/mounts").read_text().splitlines() if "overlay" in line]


@pytest.mark.parametrize("round_number", range(4))
def test_killed_at_any_moment(round_number: int, tmp_path: Path) -> None:
    seed = int.from_bytes(os.urandom(4), "big")
    print("seed", seed)
    before = mounts()
    word = f"KILL_{uuid.uuid4().hex}"
    store, cache = LocalStore(tmp_path / "store", fsync=False), tmp_path / "cache"
    anyio.run(_create, store, tmp_path / "first")
    arguments = [sys.executable, "-c", CHILD, str(tmp_path / "store"), str(cache), word]
    # A group of its own, so that the test cannot leave it behind either.
    child = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    time.sleep(random.Random(seed).uniform(0.05, 1.5))
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    try:
        anyio.run(until, lambda: not alive(word), 10.0)
    finally:
        for pid in alive(word):
            os.kill(pid, signal.SIGKILL)
    assert mounts() == before
    anyio.run(_check, store, cache)
    shutil.rmtree(tmp_path)


async def _create(store: LocalStore, cache: Path) -> None:
    async with connected(store, cache) as fo:
        await fo.disks.create("ws")


async def _check(store: LocalStore, cache: Path) -> None:
    """With the killed process's cache: leftovers are gone, what it holds is right, the disk has whole commits."""
    async with connected(store, cache) as fo:
        disk = await fo.disks.get("ws")
        commits = [commit async for commit in disk.log()]
        files: dict[str, set[str]] = {}
        async for item in disk.list_objects():
            name, _, file = item.key.partition("/")
            files.setdefault(name, set()).add(file)
        assert all(three == {"1", "2", "3"} for three in files.values())
        assert {commit.exec_id for commit in commits} == set(files)
        assert [commit.seq for commit in commits] == sorted((commit.seq for commit in commits), reverse=True)
        run = await fo.exec("ls | wc -l; cat */* | wc -l; echo > after", disks={"w": disk})
        assert run.raise_for_status().stdout == f"{len(files)}\n{3 * len(files)}\n"
        assert await disk.head_object("after") is not None
    for scratch in ("upper", "tmp", "trash"):
        assert list((cache / scratch).iterdir()) == []
