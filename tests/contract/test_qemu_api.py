"""The public interface and the command line on VMs: every mount mode, conflicts, streams, cancelling, the demo."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
from click.testing import CliRunner

from fanout.api import Disk, Fanout
from fanout.cli.root import cli
from fanout.errors import Invalid
from fanout.model import Finished, Output
from fanout.store.memory import MemoryStore
from tests.support.connections import connected
from tests.support.guests import with_image

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def fo(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fanout]:
    async with connected(MemoryStore(), tmp_path_factory.mktemp("cache"), engine="qemu") as fo:
        yield fo


@pytest.fixture
async def disk(fo: Fanout) -> Disk:
    return await fo.disks.create(f"ws-{uuid.uuid4().hex[:12]}")


async def test_a_fan_out_commits_and_says_what_it_ran_on(fo: Fanout, disk: Disk) -> None:
    await disk.put_object("in/a.txt", b"first\n")
    commands = [f"mkdir -p out && cat in/a.txt > out/{i} && exit {i % 2}" for i in range(4)]
    async with anyio.create_task_group() as group:
        runs = [None] * len(commands)

        async def one(i: int) -> None:
            runs[i] = await fo.exec(commands[i], disks={"w": disk.mount(conditional=True)})  # type: ignore[call-overload]

        for i in range(len(commands)):
            group.start_soon(one, i)
    assert [run and run.exit_code for run in runs] == [0, 1, 0, 1]
    for i in range(len(commands)):
        assert await disk.get_object(f"out/{i}") == b"first\n"
    again = await fo.exec("cat out/3", disks={"w": disk})
    assert (again.stdout, again.engine) == ("first\n", "qemu")
    assert again.timing.start_ms > 0
    assert again.usage.max_rss_bytes > 0


async def test_the_modes_of_mounts_hold(fo: Fanout, disk: Disk) -> None:
    await disk.put_object("d/f", b"1\n")
    other = await fo.disks.create(f"other-{uuid.uuid4().hex[:12]}")
    mounts = {"ro": disk.mount(read_only=True), "sub": disk.mount(subdirectory="d"), "o": other}
    run = await fo.exec(
        "cat ro/d/f sub/f; echo x > ro/y; echo 2 > sub/g; echo 3 > o/h; rm sub/f", disks=mounts, cwd="/mnt"
    )
    assert run.stdout == "1\n1\n"
    assert "Read-only file system" in run.stderr
    assert await disk.get_object("d/g") == b"2\n"
    assert await disk.head_object("d/f") is None
    assert await other.get_object("h") == b"3\n"
    with pytest.raises(Invalid, match="cwd"):
        await fo.exec("true", disks={"w": disk}, cwd="/mnt/w/nowhere")


async def test_the_second_of_two_writers_is_told(fo: Fanout, disk: Disk) -> None:
    await disk.put_object("same", b"0\n")
    async with anyio.create_task_group() as group:
        runs = []

        async def one(i: int) -> None:
            script = f"cat same > /dev/null; echo {i} > same; sleep 1"
            runs.append(await fo.exec(script, disks={"w": disk}))

        for i in range(2):
            group.start_soon(one, i)
    lost = [run for run in runs if run.conflict is not None]
    if lost:  # else one saw the other's: they did not run side by side
        assert lost[0].conflict is not None
        assert lost[0].conflict.paths == ("same",)
    assert await disk.get_object("same") in (b"0\n", b"1\n")


async def test_output_is_streamed_and_cancelling_leaves_nothing(fo: Fanout, disk: Disk) -> None:
    seen = b""
    async for event in fo.stream("printf 'caf\\303\\251 '; sleep 0.2; echo done; cat", stdin=b"in", disks={"w": disk}):
        if isinstance(event, Output):
            seen += event.data
        elif isinstance(event, Finished):
            assert event.run.ok
    assert seen == "café done\nin".encode()
    with anyio.move_on_after(0.5) as scope:
        await fo.exec("echo never > never; sleep 600", disks={"w": disk})
    assert scope.cancelled_caught
    assert await disk.head_object("never") is None
    run = await fo.exec("sleep 600", disks={"w": disk}, timeout_s=0.5)
    assert (run.status, run.exit_code) == ("timed_out", None)


async def test_output_is_exact_whatever_it_is(fo: Fanout) -> None:
    """The field's cases 2 to 4, 7 and 9 (tests/contract/test_cases_exec.py), in two VMs."""
    script = """
head -c 1048576 /dev/zero | tr '\\0' o & head -c 1048576 /dev/zero | tr '\\0' e >&2 & wait
printf '%s\\n' "$QUOTES" "$LINES2"; i=0; while [ $i -lt 2000 ]; do printf '☕☕☕☕☕'; i=$((i+1)); done
"""
    env = {"QUOTES": "a 'b' \"c\" `d` $(e) \\", "LINES2": "one\ntwo ☕ =x="}
    run = await fo.exec(script, env=env, timeout_s=120)
    assert run.stderr_bytes == b"e" * (1 << 20)
    assert run.stdout_total == (1 << 20) + len((env["QUOTES"] + env["LINES2"]).encode()) + 2 + 30_000
    assert run.stdout.endswith("☕" * 5000)
    assert "\ufffd" not in run.stdout[-20_000:]
    data = bytes(range(256)) * 4096
    echoed = await fo.exec("cat; exit 9", stdin=data, timeout_s=120)
    assert (echoed.exit_code, echoed.stdout_bytes) == (9, data)


def test_the_demo_runs_in_vms(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    for name in ("one", "two"):
        (project / f"check_{name}.sh").write_text(f"echo {name} ran on $(uname -r)\n")
    cache = with_image(tmp_path / "cache")
    environ = {"FANOUT_STORE": f"file://{tmp_path}/store", "FANOUT_CACHE_DIR": str(cache), "USER": "tester"}
    words = ["demo", str(project), "--command", "sh {}", "--glob", "check_*.sh", "--engine", "qemu", "--json"]
    result = CliRunner(env={**environ, "FANOUT_QEMU_MEMORY_MIB": "256"}).invoke(cli, words, prog_name="fanout")
    assert result.exit_code == 0, result.output
    assert "one ran on" in result.stdout
    assert "two ran on" in result.stdout
