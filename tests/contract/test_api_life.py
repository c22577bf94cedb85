"""The life of a connection: opening, closing while things run, event loops, threads, the blocking twin, the default."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import pytest

import fanout
import fanout.sync
from fanout.api import Fanout
from fanout.config import Settings
from fanout.errors import Invalid, Unavailable
from fanout.local import LocalFanout
from fanout.model import Finished, Output, Started
from fanout.store.memory import MemoryStore
from tests.support.connections import alive, connected, until


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def fo(anyio_backend: str, tmp_path: Path) -> AsyncIterator[Fanout]:
    async with connected(MemoryStore(), tmp_path, max_in_flight=2) as fo:
        yield fo


# -- closing ---------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_closing_stops_what_runs_and_what_waits(tmp_path: Path) -> None:
    word = f"CLOSE_{uuid.uuid4().hex}"
    store = MemoryStore()
    fo = LocalFanout(Settings(store="memory://", cache_dir=tmp_path, max_in_flight=2), store=store)
    await fo.open()
    disk = await fo.disks.create("ws")
    errors: list[Exception] = []

    async def one() -> None:
        with pytest.raises(Unavailable, match="connection was closed") as caught:
            await fo.exec("echo > f; sleep 300", disks={"w": disk}, env={word: "1"})
        errors.append(caught.value)

    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(one)
        await until(lambda: len(alive(f"{word}=1\0")) >= 2)
        await fo.aclose()
        await fo.aclose()
    assert len(errors) == 5
    assert not alive(word)
    with pytest.raises(Unavailable, match="not open"):
        await fo.exec("true")
    async with connected(store, tmp_path) as again:
        assert [c async for c in (await again.disks.get("ws")).log()] == []


@pytest.mark.anyio
async def test_closing_does_not_wait_for_a_reader_that_does_not_read(tmp_path: Path) -> None:
    word = f"READ_{uuid.uuid4().hex}"
    async with connected(MemoryStore(), tmp_path) as fo:
        events = fo.stream("yes", env={word: "1"})
        assert isinstance(await anext(events), Started)
        await until(lambda: alive(word))
    assert not alive(word)
    with pytest.raises(Unavailable, match="connection was closed"):
        async for _ in events:
            pass


@pytest.mark.anyio
async def test_no_thread_outlives_the_connection(tmp_path: Path) -> None:
    async with connected(MemoryStore(), tmp_path) as fo:
        disk = await fo.disks.create("ws")
        await fo.map("echo > {}", range(20), disks={"w": disk})
        assert any(thread.name.startswith("fanout") for thread in threading.enumerate())
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("fanout")]
    assert left == []


@pytest.mark.anyio
async def test_opening_at_once_opens_once(tmp_path: Path) -> None:
    fo = LocalFanout(Settings(store="memory://", cache_dir=tmp_path))
    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(fo.open)
    assert len(list((tmp_path / "owner").iterdir())) == 1
    await fo.disks.create("ws")
    await fo.open()
    await fo.disks.get("ws")
    await fo.aclose()


@pytest.mark.anyio
async def test_a_bad_cache_directory_leaves_it_closed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Invalid, match="cache_dir"):
        await LocalFanout(Settings(store="memory://", cache_dir=tmp_path / "file")).open()


@pytest.mark.anyio
async def test_a_stream_left_by_break_is_killed(fo: Fanout) -> None:
    word = f"BREAK_{uuid.uuid4().hex}"
    for _ in range(3):  # more than there are slots
        async for event in fo.stream("echo x; sleep 300", env={word: "1"}):
            if isinstance(event, Output):
                break
    await until(lambda: not alive(word))
    assert (await fo.exec("echo free")).ok


# -- event loops -----------------------------------------------------------------------------------------------------


def test_one_connection_in_two_event_loops(tmp_path: Path) -> None:
    fo = LocalFanout(Settings(store="memory://", cache_dir=tmp_path))

    async def use(text: str) -> str:
        await fo.open()
        return (await fo.exec(f"echo {text}")).stdout

    assert [asyncio.run(use(text)) for text in ("one", "two")] == ["one\n", "two\n"]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda n: asyncio.run(use(str(n))), range(8))) == [f"{n}\n" for n in range(8)]
    asyncio.run(fo.aclose())


def test_a_loop_that_ends_with_execs_under_way_takes_them_along(tmp_path: Path) -> None:
    word = f"LOOP_{uuid.uuid4().hex}"
    fo = LocalFanout(Settings(store="memory://", cache_dir=tmp_path, max_in_flight=1))

    async def leave_behind() -> None:
        await fo.open()
        tasks = [asyncio.ensure_future(fo.exec("sleep 300", env={word: "1"})) for _ in range(3)]
        await until(lambda: alive(word))
        assert len(tasks) == 3

    asyncio.run(leave_behind())
    assert not alive(word)

    async def after() -> str:
        return (await fo.exec("echo ok")).stdout

    assert asyncio.run(after()) == "ok\n"
    asyncio.run(fo.aclose())


DEFAULT = """
import asyncio, sys, fanout

async def first():
    fo = await fanout.default.connection()
    disk = await fo.disks.create("ws")
    runs = await asyncio.gather(*[fanout.exec(f"echo {i} > {i}", disks={"w": disk}) for i in range(3)])
    print(sum(run.ok for run in runs))

async def second():
    fo = await fanout.default.connection()
    disk = await fo.disks.get("ws")
    print((await fanout.exec("cat *", disks={"w": disk})).stdout.split())
    print([run.stdout for run in await fanout.map("printf {}", "ab")])
    async for event in fanout.stream("echo streamed"):
        pass
    print(event.run.stdout.strip())

asyncio.run(first())
asyncio.run(second())
"""


def test_the_default_connection_in_two_runs(tmp_path: Path) -> None:
    environ = {**os.environ, "FANOUT_STORE": f"file://{tmp_path}/store", "FANOUT_CACHE_DIR": f"{tmp_path}/cache"}
    done = subprocess.run([sys.executable, "-c", DEFAULT], env=environ, capture_output=True, text=True, timeout=120)
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout.splitlines() == ["3", "['0', '1', '2']", "['a', 'b']", "streamed"]
    assert list((tmp_path / "cache/upper").iterdir()) == []


TRIO = """
import sys, trio, fanout
from fanout.config import Settings
from fanout.local import LocalFanout

async def main():
    async with LocalFanout(Settings(store="memory://", cache_dir=sys.argv[1])) as fo:
        disk = await fo.disks.create("ws")
        runs = await fo.map("echo {} > {}; echo {}", range(4), disks={"w": disk}, max_in_flight=2)
        print([run.stdout.strip() for run in runs], [o.key async for o in disk.list_objects()])
        with trio.move_on_after(0.3):
            await fo.exec("echo > lost; sleep 300", disks={"w": disk})
        print([event.kind if hasattr(event, "kind") else type(event).__name__ async for event in fo.stream("echo x")])
        print(len([c async for c in disk.log()]) <= 4)

trio.run(main)
"""


def test_trio(tmp_path: Path) -> None:
    pytest.importorskip("trio")
    done = subprocess.run([sys.executable, "-c", TRIO, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout.splitlines() == [
        "['0', '1', '2', '3'] ['0', '1', '2', '3']",
        "['Started', 'Output', 'Finished']",
        "True",
    ]


# -- the blocking twin -----------------------------------------------------------------------------------------------


@pytest.fixture
def blocking(tmp_path: Path) -> Iterator[fanout.sync.Fanout]:
    with fanout.sync.connect(store="memory://", cache_dir=tmp_path / "cache", max_in_flight=4) as fo:
        yield fo


def test_blocking(blocking: fanout.sync.Fanout, tmp_path: Path) -> None:
    fo = blocking
    disk = fo.disks.create("ws")
    assert [d.name for d in fo.disks.list()] == ["ws"]
    disk.put_object("d/f", b"x")
    assert disk.get_object("d/f") == b"x"
    assert disk.put_object("bits", (bytes([i]) * 10 for i in range(3))).size == 30
    with open(__file__, "rb") as file:
        disk.put_object("bits", file)
    assert disk.get_object("bits", start=3, end=9) == Path(__file__).read_bytes()[3:9]
    assert b"".join(disk.read_object("bits", start=5)) == Path(__file__).read_bytes()[5:]
    disk.delete_object("bits")
    head = disk.head_object("d/f")
    assert head is not None
    assert [o.key for o in disk.list_objects()] == ["d/f"]
    assert [e.name for e in disk.listdir("/")] == ["d"]
    checkpoint = disk.checkpoint("base")
    assert [c.name for c in disk.checkpoints()] == [checkpoint.name]
    run = fo.exec("cat d/f; echo y > g", disks={"w": disk})
    assert run.raise_for_status().stdout == "x"
    branch = disk.branch("br", checkpoint="base")
    fo.exec("echo z > h", disks={"w": branch.mount(conditional=True)})
    assert list(disk.branches()) == ["br", "main"]
    disk.merge(branch)
    assert [c.path for c in disk.diff("base", "main")] == ["g", "h"]
    assert [c.seq for c in disk.log()] == [6, 5, 4, 3, 2, 1]
    disk.move("/g", "/i")
    disk.delete_object("i")
    disk.upload(__file__, "/up.py")
    disk.download("/up.py", tmp_path / "down.py")
    assert (tmp_path / "down.py").read_bytes() == Path(__file__).read_bytes()
    events = list(fo.stream("echo s", disks={"w": disk}))
    assert isinstance(events[-1], Finished)
    told: list[int] = []
    runs = fo.map("echo {}", "abc", progress=lambda index, run: told.append(index))
    assert ([r.stdout for r in runs], sorted(told)) == (["a\n", "b\n", "c\n"], [0, 1, 2])
    fo.disks.delete("ws")
    assert list(fo.disks.list()) == []
    with pytest.raises(fanout.NotFound):
        fo.disks.get("ws")


def test_blocking_from_several_threads(blocking: fanout.sync.Fanout) -> None:
    disk = blocking.disks.create("ws")

    def one(number: int) -> str:
        blocking.exec(f"echo {number} > {number}", disks={"w": disk.mount(conditional=True)}).raise_for_status()
        return disk.get_object(str(number)).decode()

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(one, range(24))) == [f"{n}\n" for n in range(24)]


def test_blocking_stream_left_early(blocking: fanout.sync.Fanout) -> None:
    word = f"SYNC_{uuid.uuid4().hex}"
    for event in blocking.stream("echo x; sleep 300", env={word: "1"}):
        if isinstance(event, Output):
            break
    del event
    anyio.run(until, lambda: not alive(word))


def test_blocking_that_is_not_open(tmp_path: Path) -> None:
    fo = fanout.sync.connect(store="memory://", cache_dir=tmp_path)
    with pytest.raises(Unavailable, match="with fanout"):
        fo.exec("true")


INTERRUPTED = """
import sys, fanout.sync
how, cache_dir, word = sys.argv[1:]
with fanout.sync.connect(store="memory://", cache_dir=cache_dir, max_in_flight=1) as fo:
    try:
        print("ready", flush=True)
        if how == "exec":
            fo.exec("sleep 300", env={word: "1"})
        else:
            list(fo.stream("sleep 300", env={word: "1"}))
    except KeyboardInterrupt:
        print("interrupted", fo.exec("echo free").stdout.strip())
"""


@pytest.mark.parametrize("how", ["exec", "stream"])
def test_blocking_call_interrupted_from_the_keyboard(how: str, tmp_path: Path) -> None:
    word = f"CTRLC_{uuid.uuid4().hex}"
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, how, str(tmp_path), word],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    anyio.run(until, lambda: alive(f"{word}=1\0"))
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert (out, err, child.returncode) == ("interrupted free\n", "", 0)
    assert not alive(f"{word}=1\0")


def test_the_blocking_twin_has_every_method_with_the_same_arguments() -> None:
    for twin, original in (
        (fanout.sync.Disk, fanout.Disk),
        (fanout.sync.Disks, fanout.Disks),
        (fanout.sync.Fanout, fanout.Fanout),
    ):
        for name, method in vars(original).items():
            if name.startswith("_") or not callable(method):
                continue
            name = {"aclose": "close"}.get(name, name)
            ours = inspect.signature(getattr(twin, name))
            assert list(ours.parameters) == list(inspect.signature(method).parameters), name
            assert [p.default for p in ours.parameters.values()] == [
                p.default for p in inspect.signature(method).parameters.values()
            ], name
