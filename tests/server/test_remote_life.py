"""The life of a remote connection: event loops, threads, the blocking twin, the default, closing, many at once."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import pytest

import fanout
import fanout.sync
from fanout.client import RemoteFanout
from fanout.config import Settings
from fanout.errors import Unavailable
from fanout.model import Finished, Output
from tests.support.connections import alive, until
from tests.support.serving import Running


def settings(server: Running, **more: object) -> Settings:
    return Settings.load({}, url=server.url, api_key=server.token, **more)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_event_loops(server: Running, disk_name: str, backend: str, tmp_path: Path) -> None:
    async def work() -> None:
        async with RemoteFanout(settings(server)) as fo:
            disk = await fo.disks.create(disk_name)
            (tmp_path / "f").write_bytes(b"f")
            await disk.upload(tmp_path, "/up")
            await disk.download("/up", tmp_path / "down")
            assert (tmp_path / "down" / "f").read_bytes() == b"f"
            await disk.put_object("large", b"x" * (5 << 20))
            assert len(await disk.get_object("large")) == 5 << 20
            events = [event async for event in fo.stream("cat up/f", disks={"w": disk})]
            assert isinstance(events[-1], Finished)
            assert events[-1].run.stdout == "f"
            with anyio.move_on_after(0.2) as scope:
                await fo.exec("sleep 300", disks={"w": disk})
            assert scope.cancelled_caught
            assert [run.stdout for run in await fo.map("echo {}", "abc")] == ["a\n", "b\n", "c\n"]

    anyio.run(work, backend=backend)


def test_one_connection_in_several_loops(server: Running, disk_name: str) -> None:
    fo = RemoteFanout(settings(server))

    async def run() -> str:
        await fo.open()
        return (await fo.exec("echo hi")).stdout

    assert [asyncio.run(run()) for _ in range(3)] == ["hi\n"] * 3
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda _: asyncio.run(run()), range(8))) == ["hi\n"] * 8
    asyncio.run(fo.aclose())
    with pytest.raises(Unavailable, match="not open"):
        asyncio.run(fo.exec("true"))  # type: ignore[arg-type]


def test_blocking(server: Running, disk_name: str, tmp_path: Path) -> None:
    with fanout.sync.connect(server.url, api_key=server.token) as fo:
        disk = fo.disks.create(disk_name)
        disk.put_object("f", (b"%d" % i for i in range(5)))
        assert disk.get_object("f", start=1, end=3) == b"12"
        assert b"".join(disk.read_object("f", start=2)) == b"234"
        assert fo.exec("cat f", disks={"w": disk}).stdout == "01234"
        disk.download("/f", tmp_path / "f")
        assert (tmp_path / "f").read_bytes() == b"01234"
        word = f"SYNC_{uuid.uuid4().hex}"
        for event in fo.stream("echo x; sleep 300", env={word: "1"}):
            if isinstance(event, Output):
                break
        del event
        anyio.run(until, lambda: not alive(word))


def test_the_default_connection(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import asyncio, fanout; print(asyncio.run(fanout.exec('echo $FANOUT_EXEC_ID')).stdout, end='')"
    monkeypatch.setenv("FANOUT_URL", server.url)
    monkeypatch.setenv("FANOUT_API_KEY", server.token)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ex-")
    assert done.stderr == ""


@pytest.mark.anyio
async def test_closing_kills_what_runs(server: Running) -> None:
    words = {streamed: f"CLOSE_{uuid.uuid4().hex}" for streamed in (False, True)}
    fo = await RemoteFanout(settings(server)).open()
    failures: list[BaseException] = []

    async def run(streamed: bool) -> None:
        try:
            if streamed:
                [event async for event in fo.stream("sleep 300", env={words[True]: "1"})]
            else:
                await fo.exec("sleep 300", env={words[False]: "1"})
        except Unavailable as error:
            failures.append(error)

    async with anyio.create_task_group() as group:
        group.start_soon(run, False)
        group.start_soon(run, True)
        await until(lambda: all(alive(word) for word in words.values()))
        await fo.aclose()
        assert not any(alive(word) for word in words.values())
    assert [type(error) for error in failures] == [Unavailable, Unavailable]


@pytest.mark.anyio
async def test_many_at_once(server: Running, disk_name: str) -> None:
    """More than the server runs at once: all are served, and each connection is used for many."""
    async with RemoteFanout(settings(server)) as fo:
        disk = await fo.disks.create(disk_name)
        runs = await fo.map("echo {} > {}", range(80), disks={"w": disk.mount(conditional=True)})
        assert all(run.ok for run in runs)
        assert len([item async for item in disk.list_objects()]) == 80


@pytest.mark.anyio
async def test_max_in_flight_is_kept_here(server: Running) -> None:
    word = f"MAX_{uuid.uuid4().hex}"
    most = 0
    over = anyio.Event()

    async def watch() -> None:
        nonlocal most
        while not over.is_set():
            found = await anyio.to_thread.run_sync(lambda: len(alive(f"{word}=1\0")))
            most = max(most, found)
            await anyio.sleep(0.01)

    async with RemoteFanout(settings(server, max_in_flight=2)) as fo, anyio.create_task_group() as group:
        group.start_soon(watch)
        await fo.map("exec sleep 0.0{}", range(9), env={word: "1"})
        over.set()
    assert 0 < most <= 4, "the command and pid 1 of each sandbox"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
