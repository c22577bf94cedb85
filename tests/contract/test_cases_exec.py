"""The exec cases of the field: each test carries its number. Real sandboxes and VMs, through the public interface.

On VMs there are fewer or smaller ones where only the number differs: their processors are emulated.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from fanout.api import Disk, Fanout
from fanout.errors import Invalid
from fanout.model import Finished, Output, Run
from fanout.store.memory import MemoryStore
from tests.support.connections import alive, connected, in_vms, remote, until
from tests.support.guests import image_or_skip, with_image

pytestmark = pytest.mark.anyio
MIB = 1 << 20


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=["memory", "remote", "qemu"])
async def fo(
    request: pytest.FixtureRequest, anyio_backend: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Fanout]:
    if request.param == "remote":
        async with remote(request.getfixturevalue("remote_server")) as fo:
            yield fo
        return
    engine = "qemu" if request.param == "qemu" else "bubblewrap"
    async with connected(MemoryStore(), tmp_path_factory.mktemp("cache"), engine=engine) as fo:
        yield fo


@pytest.fixture(params=["bubblewrap", "qemu"])
def engine(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    if kind == "qemu":
        image_or_skip()
    return kind


@pytest.fixture
async def disk(fo: Fanout) -> Disk:
    return await fo.disks.create(f"ws-{uuid.uuid4().hex[:12]}")


def mark() -> tuple[str, dict[str, str]]:
    """A word that is in the environment of one exec's processes and nowhere else."""
    word = f"MARK_{uuid.uuid4().hex}"
    return word, {word: "1"}


async def streamed(fo: Fanout, command: str) -> tuple[bytes, str, Run]:
    data, text = b"", ""
    async for event in fo.stream(command):
        if isinstance(event, Output) and event.stream == "stdout":
            data += event.data
            text += event.text
        elif isinstance(event, Finished):
            return data, text, event.run
    raise AssertionError("no result")


# -- output ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [MIB - 1, MIB, MIB + 1, 16 * MIB])
async def test_case_01_output_around_the_cap(fo: Fanout, size: int) -> None:
    run = await fo.exec(f"yes 0123456789 | head -c {size}; exit 7")
    data = (b"0123456789\n" * (size // 11 + 1))[:size]
    assert (run.exit_code, run.stdout_total, run.stdout_truncated) == (7, size, size > MIB)
    if size <= MIB:
        assert run.stdout_bytes == data
    else:
        marker = f"\n[... {size - MIB} bytes left out ...]\n".encode()
        assert run.stdout_bytes == data[: MIB // 2] + marker + data[-MIB // 2 :]


CHILD = """
import asyncio, resource, sys
from pathlib import Path
import fanout

async def main():
    engine, cache, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    async with fanout.connect(store="memory://", cache_dir=cache, engine=engine) as fo:
        await fo.exec("yes | head -c 2M")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        run = await fo.exec(f"yes | head -c {size}")
        async for event in fo.stream(f"yes | head -c {size // 4}"):
            pass
        assert run.stdout_total == size and event.run.stdout_total == size // 4
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)

asyncio.run(main())
"""


async def test_case_01_memory_of_the_host_is_bounded(engine: str, tmp_path: Path) -> None:
    size = 40 * MIB if engine == "qemu" else 256 * MIB
    cache = with_image(tmp_path / "cache") if engine == "qemu" else tmp_path
    words = [sys.executable, "-c", CHILD, engine, str(cache), str(size)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 40 * 1024, f"grew by {done.stdout} KiB for {size * 5 // 4} bytes of output"


async def test_case_02_both_streams_at_once(fo: Fanout) -> None:
    run = await fo.exec("(yes out | head -c 1M) & (yes err | head -c 1M >&2) & wait")
    assert run.stdout_bytes == b"out\n" * (MIB // 4)
    assert run.stderr_bytes == b"err\n" * (MIB // 4)


async def test_case_03_characters_are_never_split(fo: Fanout) -> None:
    command = "s=$(printf '☕%.0s' $(seq 1000)); for i in $(seq 100); do printf x%s $s; done"
    expected = ("x" + "☕" * 1000) * 100
    data, text, run = await streamed(fo, command)
    assert text == expected
    assert data == run.stdout_bytes == expected.encode()
    assert run.stdout == (await fo.exec(command)).stdout == expected


async def test_case_04_any_bytes(fo: Fanout) -> None:
    run = await fo.exec("head -c 1M /dev/urandom | tee /tmp/r; sha256sum < /tmp/r >&2")
    assert len(run.stdout_bytes) == MIB
    assert hashlib.sha256(run.stdout_bytes).hexdigest() == run.stderr.split()[0]
    assert isinstance(run.stdout, str)


# -- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        "sleep 300 & wait",
        "setsid sleep 300 & wait",
        "(setsid sh -c 'setsid sleep 300 & setsid sleep 300' &) ; sleep 300",
        "trap '' TERM INT HUP; sleep 300",
    ],
)
async def test_case_05_timeout(fo: Fanout, command: str) -> None:
    word, env = mark()
    timeout_s = 4.0 if in_vms(fo) else 0.5  # a shell must have come to its first command
    run = await fo.exec(f"echo partial; {command}", env=env, timeout_s=timeout_s)
    assert (run.status, run.exit_code, run.ok) == ("timed_out", None, False)
    assert run.stdout == "partial\n"
    assert not alive(word, fo)
    assert run.timing.execute_ms >= timeout_s * 1e3


async def test_case_06_children_left_behind_are_dead(fo: Fanout) -> None:
    word, env = mark()
    run = await fo.exec("(sleep 300 &); (setsid sleep 300 >/dev/null 2>&1 &); echo hi", env=env)
    assert (run.status, run.exit_code, run.stdout) == ("completed", 0, "hi\n")
    assert not alive(word, fo)


@pytest.mark.parametrize("stdin", [None, b"", b"x" * (10 * MIB), "tëxt"])
async def test_case_07_stdin(fo: Fanout, stdin: bytes | str | None) -> None:
    run = await fo.exec("sha256sum", stdin=stdin)
    data = stdin.encode() if isinstance(stdin, str) else stdin or b""
    assert run.stdout.split()[0] == hashlib.sha256(data).hexdigest()


async def test_case_07_stdin_that_nobody_reads(fo: Fanout) -> None:
    run = await fo.exec("exec <&-; echo done", stdin=b"x" * (10 * MIB))
    assert (run.exit_code, run.stdout) == (0, "done\n")


async def test_case_08_cwd(fo: Fanout, disk: Disk) -> None:
    await disk.put_object("a b/new\nline/f", b"")
    await disk.put_object("file", b"")
    for cwd in ("/mnt/w/a b", "/mnt/w/a b/new\nline", "/mnt/w/", "/tmp", "/"):
        run = await fo.exec("pwd", disks={"w": disk}, cwd=cwd)
        assert run.stdout == (cwd.rstrip("/") or "/") + "\n"
    before = len([c async for c in disk.log()])
    for cwd, says in (("/mnt/w/nope", "nope"), ("/mnt/w/file", "file"), ("/no/such", "/no/such"), ("rel", "rel")):
        with pytest.raises(Invalid, match="cwd") as caught:
            await fo.exec("echo > started", disks={"w": disk}, cwd=cwd)
        assert says in str(caught.value)
    assert len([c async for c in disk.log()]) == before


async def test_case_09_env(fo: Fanout) -> None:
    values = ["'single'", '"double"', "$(id) `id` $HOME", "new\nline\n", "☕", "a=b=c", "", " lead", "\\n", "\udcff"]
    env = {f"V{i}": value for i, value in enumerate(values)} | {"with.dot-dash": "x"}
    run = await fo.exec("env -0", env=env)
    seen = dict(item.split(b"=", 1) for item in run.stdout_bytes.split(b"\0") if item)
    for name, value in env.items():
        assert seen[name.encode()] == os.fsencode(value), name
    for name in ("", "A\0", "A;B", "A=B"):
        with pytest.raises(Invalid, match="env is"):
            await fo.exec("true", env={name: "v"})


def zombies() -> set[str]:
    """The dead processes that this one should have collected."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] == "Z" and fields[1] == str(os.getpid()):
            found.add(pid)
    return found


async def test_case_10_exit_codes_while_orphans_die(fo: Fanout) -> None:
    before = zombies()
    count = 12 if in_vms(fo) else 200
    runs = await fo.map("for i in 1 2 3; do (sleep 0.0$i &); done; exit 3 # {}", range(count))
    assert [run.exit_code for run in runs] == [3] * count
    assert zombies() <= before


# -- cancellation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 2, 5])
async def test_case_11_cancelled_in_the_middle(fo: Fanout, disk: Disk, times: int) -> None:
    """By the task's own `cancel`, as asyncio does it, and that several times."""
    import asyncio

    word, env = mark()
    command = "echo x > f; (setsid sleep 300 &); sleep 300"
    task = asyncio.ensure_future(fo.exec(command, disks={"w": disk}, env=env))
    await until(lambda: alive(word, fo))
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not alive(word, fo), "the call came back before its processes were gone"
    assert [c async for c in disk.log()] == []
    assert (await fo.exec("true", disks={"w": disk})).ok


async def test_case_11_cancelled_by_a_scope_and_by_a_timeout(fo: Fanout, disk: Disk) -> None:
    word, env = mark()
    with anyio.move_on_after(0.3):
        await fo.exec("echo x > f; sleep 300", disks={"w": disk}, env=env)
    assert not alive(word, fo)
    assert [c async for c in disk.log()] == []


@pytest.fixture
async def narrow(anyio_backend: str, engine: str, tmp_path: Path) -> AsyncIterator[Fanout]:
    async with connected(MemoryStore(), tmp_path, engine=engine, max_in_flight=2) as fo:
        yield fo


async def test_case_11_cancelled_before_the_start(narrow: Fanout) -> None:
    disk = await narrow.disks.create("ws")
    word, env = mark()
    async with anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(lambda: narrow.exec("sleep 300", env=env))
        await until(lambda: len(alive(word, narrow)) >= 2)
        with anyio.move_on_after(0.1) as scope:
            await narrow.exec("echo x > f", disks={"w": disk})
        assert scope.cancelled_caught, "it ran over the cap"
        group.cancel_scope.cancel()
    assert not alive(word, narrow)
    runs = await narrow.map("echo {}", range(6))  # both slots are free again
    assert all(run.ok for run in runs)
    assert [c async for c in disk.log()] == []


async def test_case_11_a_storm_of_cancellations_loses_no_slot(narrow: Fanout, engine: str) -> None:
    count, step_s = (16, 0.04) if engine == "qemu" else (60, 0.01)
    disk = await narrow.disks.create("ws")
    word, env = mark()

    async def one(number: int) -> None:
        with anyio.move_on_after(step_s * (number % 12)):
            await narrow.exec(f"echo > f{number}; sleep 0.02; exit 1", disks={"w": disk}, env=env)

    async with anyio.create_task_group() as group:
        for number in range(count):
            group.start_soon(one, number)
    assert not alive(word, narrow)
    assert all(run.ok for run in await narrow.map("echo {}", range(4)))
    executor = narrow._executor  # type: ignore[attr-defined]
    assert (executor._scheduler.running, executor._scheduler.waiting) == (0, 0)
    assert not executor._wake
    assert not executor._stop


async def many(engine: str, cache_dir: Path, count: int, cap: int) -> None:
    """CASE 12: never more than `cap` alive, first come first served, all succeed."""
    word, env = mark()
    most = 0
    over = anyio.Event()
    async with connected(MemoryStore(), cache_dir, engine=engine, max_in_flight=cap) as fo:
        disk = await fo.disks.create("ws")

        async def watch() -> None:
            nonlocal most
            while not over.is_set():
                leaders = await anyio.to_thread.run_sync(lambda: len(alive(f"{word}=1\0", fo)))
                most = max(most, leaders)
                await anyio.sleep(0.01)

        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            command = "exec sleep 0.0{}"
            runs = await fo.map(
                command, [i % 10 for i in range(count)], disks={"w": disk.mount(read_only=True)}, env=env
            )
            over.set()
    assert all(run.ok for run in runs)
    # In each sandbox are the command and pid 1, which has the same environment.
    assert 0 < most <= 2 * cap
    # A job's turn comes in its order; how fast its thread then starts is the machine's to say: hence the slack.
    waits = [run.timing.wait_ms for run in runs]
    for earlier, later in zip(waits, waits[2 * cap :], strict=False):
        assert earlier <= later


async def test_case_12_a_queue(engine: str, tmp_path: Path) -> None:
    count, cap = (12, 3) if engine == "qemu" else (150, 12)
    await many(engine, tmp_path, count, cap)


@pytest.mark.soak
async def test_case_12_a_long_queue(engine: str, tmp_path: Path) -> None:
    await many(engine, tmp_path, 1000, 50)
