"""Connections that are cut: what was asked for happens once, and what was transferred is not transferred again."""

from __future__ import annotations

import os
import random
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path

import anyio
import pytest

from fanout.api import Disk, Fanout
from fanout.client import RemoteFanout
from fanout.config import Settings
from fanout.errors import NotFound, Unavailable, Unknown
from fanout.model import Output
from fanout.runtime import Runtime
from tests.support.cable import Cable, cable_to
from tests.support.connections import alive, until
from tests.support.serving import Running, running_server
from tests.support.views import of_directory

pytestmark = pytest.mark.anyio
MIB = 1 << 20
#: What a client sends in one piece: a pack of 8 MiB and what its last file added.
PACK = 13 * MIB


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def cable(server: Running) -> Iterator[Cable]:
    with cable_to(server.url) as cable:
        yield cable


@pytest.fixture
async def fo(anyio_backend: str, server: Running, cable: Cable) -> AsyncIterator[Fanout]:
    async with RemoteFanout(Settings.load({}, url=cable.url, api_key=server.token)) as fo:
        yield fo


@pytest.fixture
async def disk(fo: Fanout) -> Disk:
    return await fo.disks.create(f"ws-{uuid.uuid4().hex[:12]}")


async def messages(disk: Disk) -> list[str]:
    return [commit.message async for commit in disk.log()]


# -- lost answers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 3])
async def test_an_exec_whose_answer_is_lost_runs_once(fo: Fanout, disk: Disk, cable: Cable, times: int) -> None:
    cable.lose = times
    run = await fo.exec("echo x >> f; cat f", disks={"w": disk})
    assert cable.lost == times
    assert (run.stdout, run.commits["w"].seq) == ("x\n", 1)
    assert await disk.get_object("f") == b"x\n"
    assert len(await messages(disk)) == 1


async def test_calls_whose_answers_are_lost_are_made_once(fo: Fanout, disk: Disk, cable: Cable) -> None:
    async def losing(call: object) -> object:
        cable.lose = 1
        result = await call  # type: ignore[misc]
        assert cable.lose == 0
        return result

    await losing(disk.put_object("a", b"1"))
    moved = await losing(disk.move("/a", "/b"))
    checkpoint = await losing(disk.checkpoint("base"))
    branch = await losing(disk.branch("side", checkpoint="base"))
    await losing(branch.put_object("side", b"2"))  # type: ignore[attr-defined]
    merged = await losing(disk.merge("side"))
    await losing(disk.delete_object("side"))
    assert [getattr(each, "seq", None) for each in (moved, checkpoint, merged)] == [2, 2, 3]
    assert await messages(disk) == ["delete side", "merge side", "move a to b", "put a"]
    name = f"{disk.name}-2"
    made = await losing(fo.disks.create(name))
    assert (await fo.disks.get(name)).id == made.id  # type: ignore[attr-defined]
    await losing(fo.disks.delete(name))
    with pytest.raises(NotFound):
        await fo.disks.get(name)


async def test_a_command_that_outlives_its_connection_is_run_anew(fo: Fanout, disk: Disk, cable: Cable) -> None:
    """Nothing of the first is committed, and nothing of it is left when the second starts."""
    word = f"CUT_{uuid.uuid4().hex}"
    gate = f"/tmp/{word}"
    async with anyio.create_task_group() as group:
        runs = []

        async def run() -> None:
            command = "echo x >> f; while [ ! -e go ]; do sleep 0.02; [ $((i+=1)) -lt 1000 ] || exit 9; done; cat f"
            runs.append(await fo.exec(command, disks={"w": disk}, env={word: gate}))

        group.start_soon(run)
        await until(lambda: alive(word))
        first = set(alive(word))
        await disk.put_object("go", b"")
        cable.cut()
        await until(lambda: runs)
    assert not first & set(alive(word))
    assert runs[0].stdout == "x\n"
    assert await messages(disk) == [runs[0].command, "put go"]


async def test_a_stream_that_is_cut_is_unknown_and_its_command_dies(fo: Fanout, disk: Disk, cable: Cable) -> None:
    word = f"CUT_{uuid.uuid4().hex}"

    async def follow() -> None:
        async with aclosing(fo.stream("echo x > f; echo y; sleep 300", disks={"w": disk}, env={word: "1"})) as events:
            async for event in events:
                if isinstance(event, Output):
                    cable.cut()

    with pytest.raises(Unknown, match="may be committed or not"):
        await follow()
    await until(lambda: not alive(word))
    assert await messages(disk) == []


# -- transfers -------------------------------------------------------------------------------------------------------


def make_tree(top: Path, seed: int) -> int:
    """Make a tree of many small files and a few large ones; returns its bytes."""
    print(f"seed {seed}")
    source = random.Random(seed)
    top.mkdir()
    total = 0
    for name, size in [(f"d{i % 7}/small-{i}", source.randrange(2000)) for i in range(400)] + [
        (f"large-{i}", 9 * MIB + i) for i in range(4)
    ]:
        path = top / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(source.randbytes(size))
        total += size
    os.symlink("large-0", top / "link")
    os.link(top / "large-1", top / "d0" / "hard")
    return total


async def test_transfers_of_trees_go_on_where_they_were_cut(
    fo: Fanout, disk: Disk, cable: Cable, tmp_path: Path
) -> None:
    total = make_tree(tmp_path / "in", 4711)
    cable.cuts_up = [cable.up + part for part in (MIB, total // 3, total // 2, total - MIB)]
    before = cable.up
    commit = await disk.upload(tmp_path / "in", "/t")
    assert not cable.cuts_up, "it was not cut"
    assert total < cable.up - before < total + 4 * PACK
    assert commit.seq == 1
    assert len(await messages(disk)) == 1

    cable.cuts_down = [cable.down + part for part in (20_000, MIB, total // 3, total // 2, total - MIB)]
    before = cable.down
    await disk.download("/t", tmp_path / "out")
    assert not cable.cuts_down, "it was not cut"
    assert total < cable.down - before < total + 5 * 5 * MIB
    assert of_directory(tmp_path / "in") == of_directory(tmp_path / "out")

    before = cable.up
    again = await disk.upload(tmp_path / "in", "/t")
    assert again.changes == ()
    assert cable.up - before < 200_000, "what is there already was sent again"


async def test_a_large_file_goes_on_where_it_was_cut(fo: Fanout, disk: Disk, cable: Cable) -> None:
    data = random.Random(3).randbytes(40 * MIB)

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(data), 1_000_003):
            yield data[at : at + 1_000_003]

    cable.cuts_up = [cable.up + part for part in (MIB, len(data) // 2, len(data) - MIB)]
    before = cable.up
    await disk.put_object("f", pieces())
    assert not cable.cuts_up
    assert cable.up - before < len(data) + 3 * PACK
    cable.cuts_down = [cable.down + part for part in (1000, MIB, len(data) // 2, len(data) - 1000)]
    before = cable.down
    assert await disk.get_object("f") == data
    assert not cable.cuts_down
    assert cable.down - before < len(data) + 4 * 70_000, "it began anew"
    assert len(await messages(disk)) == 1


async def test_lists_go_on_where_they_were_cut_and_as_they_were(fo: Fanout, disk: Disk, cable: Cable) -> None:
    await fo.exec("for i in $(seq 1500); do echo $i > f$i; done", disks={"w": disk})
    keys = [item.key async for item in disk.list_objects()]
    assert len(set(keys)) == 1500
    before = cable.down
    assert [item.key async for item in disk.list_objects()] == keys
    whole = cable.down - before
    cable.cuts_down = [cable.down + whole // 3, cable.down + whole]
    found = []
    async for item in disk.list_objects():
        if not found:
            await disk.put_object("f0-meanwhile", b"")
        found.append(item.key)
    assert not cable.cuts_down
    assert found == keys
    cable.cuts_down = [cable.down + whole // 2]
    assert len([entry async for entry in disk.listdir("/")]) == 1501


async def test_a_server_that_is_gone_is_given_up(server: Running, cable: Cable, disk: Disk) -> None:
    settings = Settings.load({}, url=cable.url, api_key=server.token)
    async with RemoteFanout(settings, runtime=Runtime(uniform=lambda low, high: low)) as fo:
        found = await fo.disks.get(disk.id)
        cable.inner = "http://127.0.0.1:1"
        cable.cut()
        with pytest.raises(Unavailable, match=cable.url):
            await found.get_object("f")
        with pytest.raises((Unavailable, Unknown), match=cable.url):
            await found.put_object("f", b"")


# -- another server --------------------------------------------------------------------------------------------------


async def test_a_server_that_was_restarted(server: Running, cable: Cable, tmp_path: Path) -> None:
    """What it may have done before is not done again; what cannot have been begun is."""
    name = f"ws-{uuid.uuid4().hex[:12]}"
    with running_server(tmp_path / "b", store=server.store, token=server.token) as other:
        async with RemoteFanout(Settings.load({}, url=cable.url, api_key=server.token)) as fo:
            disk = await fo.disks.create(name)
            await disk.put_object("f", b"1")
            cable.inner = other.url
            cable.cut()
            assert await disk.get_object("f") == b"1"
            await disk.put_object("g", b"2")
            assert (await fo.exec("cat g", disks={"w": disk})).stdout == "2"

            cable.then = lambda: setattr(cable, "inner", server.url)
            cable.lose = 1
            with pytest.raises(Unknown, match="cannot be learned"):
                await fo.exec("echo x >> h", disks={"w": disk})
            assert await disk.get_object("h") == b"x\n"
