"""A disk that is seen under several names at once, as the archil dialect promises: never more than its tree commits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from fanout.api import Disk
from fanout.config import Settings
from fanout.engine.bubblewrap import BubblewrapEngine
from fanout.local import LocalFanout
from fanout.model import Run
from fanout.run.mounts import PlacedMount
from fanout.store.memory import MemoryStore
from tests.support.connections import unprobed

pytestmark = pytest.mark.anyio
NAMES = ("archil", "data")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["kernel", "bwrap"])
async def fo(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LocalFanout]:
    store, engine = MemoryStore(), BubblewrapEngine(overlay=request.param)
    settings = Settings.load({}, store="memory://", cache_dir=tmp_path)
    async with LocalFanout(settings, store=store, engine=engine) as connection:
        await unprobed(connection, store)
        yield connection
    engine.close()


async def run(fo: LocalFanout, command: str, disk: Disk | None = None, **mount: Any) -> Run:
    disk = disk or await fo.disks.get("ws")
    placed = PlacedMount.of(disk.mount(**mount), "/mnt", NAMES)
    return await fo.exec(command, disks={"ws": placed}, cwd="/mnt")


async def keys(fo: LocalFanout) -> list[str]:
    disk = await fo.disks.get("ws")
    return sorted([entry.path async for entry in disk.listdir("/")])


async def test_all_names_are_one_place(fo: LocalFanout) -> None:
    told = await run(fo, "echo 1 > a; cat /mnt/archil/a /mnt/data/a; echo 2 > /mnt/data/b; cat /mnt/archil/b; pwd")
    assert told.stdout == "1\n1\n2\n/mnt\n", told.stderr
    assert await keys(fo) == ["/a", "/b"]
    again = await run(fo, "cat archil/a data/b", read_only=True)
    assert again.stdout == "1\n2\n", again.stderr


async def test_read_only_stays_so_under_every_name(fo: LocalFanout) -> None:
    told = await run(fo, "touch /mnt/x || touch /mnt/data/x || touch /mnt/archil/x || stat -c %a /mnt", read_only=True)
    assert told.stderr.count("Read-only file system") == 3
    assert told.stdout == "755\n"


@pytest.mark.parametrize(
    "command",
    [
        "true",
        "rm archil data",
        "touch -h archil; chown -h 0:0 data",
        "mv archil other && mv other archil",
        "rm data && ln -s . data",
    ],
)
async def test_what_happens_to_the_names_is_not_committed(fo: LocalFanout, command: str) -> None:
    told = await run(fo, command)
    assert told.exit_code == 0, told.stderr
    assert not told.commits["ws"].changes  # at most the directory's own time, which moved
    assert await keys(fo) == []


async def test_a_name_put_to_another_use_is_committed(fo: LocalFanout) -> None:
    told = await run(fo, "rm archil && mkdir archil && echo 1 > archil/x && rm data && echo 2 > data")
    assert told.exit_code == 0, told.stderr
    assert await keys(fo) == ["/archil", "/data"]
    told = await run(fo, "cat archil/x data")  # now they are the disk's own
    assert told.stdout == "1\n2\n"
    told = await run(fo, "rm -r archil data")
    assert await keys(fo) == []
    told = await run(fo, "echo 3 > archil/y; cat data/y")
    assert told.stdout == "3\n"
    assert await keys(fo) == ["/y"]


async def test_a_subdirectory(fo: LocalFanout) -> None:
    disk = await fo.disks.get("ws")
    await disk.put_object("sub/data/own", b"1\n")
    told = await run(fo, "cat data/own; echo 2 > archil/x; rm archil", subdirectory="sub")
    assert told.stdout == "1\n", told.stderr
    assert [info.key async for info in disk.list_objects()] == ["sub/data/own", "sub/x"]


async def test_many_at_once(fo: LocalFanout) -> None:
    done: list[Run] = []

    async def one(number: int) -> None:
        done.append(await run(fo, f"echo {number} > /mnt/data/{number}; rm archil", conditional=True))

    async with anyio.create_task_group() as group:
        for number in range(8):
            group.start_soon(one, number)
    assert all(each.ok for each in done)
    assert await keys(fo) == [f"/{number}" for number in range(8)]
