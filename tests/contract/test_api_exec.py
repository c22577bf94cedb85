"""The public interface: execs, mounts, commits and conflicts. Written against fanout.Fanout and fanout.Disk alone."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

import fanout
from fanout.api import Disk, Fanout
from fanout.errors import Busy, CommandFailed, Conflict, Invalid, Unavailable
from fanout.model import Finished, Output, Run, Started
from fanout.store.memory import MemoryStore
from tests.support.connections import alive, connected, remote, until

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=["memory", "remote", "qemu", pytest.param("s3", marks=pytest.mark.s3)])
async def fo(
    request: pytest.FixtureRequest, anyio_backend: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Fanout]:
    top = tmp_path_factory.mktemp("exec")
    if request.param == "remote":
        async with remote(request.getfixturevalue("remote_server")) as fo:
            yield fo
        return
    engine = "qemu" if request.param == "qemu" else "bubblewrap"
    if request.param != "s3":
        store: Any = MemoryStore()
    else:
        from fanout.store.s3 import S3Store

        endpoint, bucket = request.getfixturevalue("s3_endpoint"), request.getfixturevalue("s3_bucket")
        store = S3Store(bucket, f"t/{uuid.uuid4().hex}", endpoint=endpoint)
    async with connected(store, top / "cache", engine=engine) as fo:
        yield fo
    store.close()


@pytest.fixture
async def disk(fo: Fanout) -> Disk:
    return await fo.disks.create(f"ws-{uuid.uuid4().hex[:12]}")


async def together(fo: Fanout, *calls: tuple[str, Any]) -> list[Run]:
    """Run commands that all start from the tree as it is now, and end one after the other, in order.

    They start from one sequence number, so that it does not matter how they are scheduled.
    """
    runs: list[Run] = []
    for command, mount in calls:
        runs.append(await fo.exec(command, disks={"w": mount}))
    return runs


# -- one exec --------------------------------------------------------------------------------------------------------


async def test_a_run(fo: Fanout, disk: Disk) -> None:
    await disk.put_object("in", b"input")
    run = await fo.exec("cat in; echo err >&2; echo out > out; exit 3", disks={"work": disk})
    assert (run.status, run.exit_code, run.ok) == ("completed", 3, False)
    assert (run.stdout, run.stderr, run.stdout_bytes, run.stdout_total) == ("input", "err\n", b"input", 5)
    assert run.conflict is None
    commit = run.commits["work"]
    assert (commit.base_seq, commit.seq) == (1, 2)
    assert commit.changes == (fanout.Change(path="out", kind="added"),)
    assert await disk.get_object("out") == b"out\n", "a failing command's writes are committed"
    assert run.engine
    assert run.host
    assert run.usage.cpu_s >= 0
    with pytest.raises(CommandFailed, match="exit code 3: err") as caught:
        run.raise_for_status()
    assert caught.value.run is run
    good = await fo.exec("true", disks={"work": disk})
    assert good.raise_for_status() is good
    assert (good.commits["work"].seq, good.commits["work"].changes) == (None, None)


async def test_timing_adds_up(fo: Fanout, disk: Disk) -> None:
    run = await fo.exec("sleep 0.05; echo x > f", disks={"work": disk})
    t = run.timing
    assert abs(t.queue_ms - (t.wait_ms + t.lock_ms + t.mount_ms + t.start_ms)) < 1
    assert t.total_ms >= t.queue_ms + t.execute_ms + t.commit_ms - 0.001
    assert t.execute_ms >= 45
    assert min(t.model_dump().values()) >= 0


async def test_without_a_disk(fo: Fanout) -> None:
    run = await fo.exec("pwd; id -u; echo $HOME $FANOUT_EXEC_ID", stdin=None)
    assert run.stdout == f"/mnt\n0\n/root {run.id}\n"
    assert run.commits == {}


async def test_cwd_defaults(fo: Fanout, disk: Disk) -> None:
    one = await fo.exec("pwd", disks={"a": disk})
    two = await fo.exec("pwd; ls", disks={"a": disk, "b": disk})
    assert (one.stdout, two.stdout) == ("/mnt/a\n", "/mnt\na\nb\n")


async def test_several_disks_in_one_exec(fo: Fanout, disk: Disk) -> None:
    other = await fo.disks.create(f"other-{uuid.uuid4().hex[:8]}")
    await other.put_object("from", b"x")
    run = await fo.exec("cp b/from a/to; rm b/from", disks={"a": disk, "b": other})
    assert await disk.get_object("to") == b"x"
    assert await other.head_object("from") is None
    assert {name: c.changes[0].kind for name, c in run.commits.items() if c.changes} == {"a": "added", "b": "deleted"}


async def test_several_mounts_of_one_disk(fo: Fanout, disk: Disk) -> None:
    await disk.put_object("src/f", b"x")
    run = await fo.exec(
        "cp ro/src/f rw/copy; touch ro/no 2>&1; echo y > sub/g",
        disks={"ro": disk.mount(read_only=True), "rw": disk, "sub": disk.mount(subdirectory="src")},
    )
    assert "Read-only file system" in run.stdout
    assert await disk.get_object("copy") == b"x"
    assert await disk.get_object("src/g") == b"y\n"
    assert run.commits["ro"].seq is None


async def test_both_mounts_of_one_disk_in_conflict_are_both_kept(fo: Fanout, disk: Disk) -> None:
    await disk.put_object("a", b"old")
    await disk.put_object("b", b"old")
    await disk.put_object("a", b"new")
    await disk.put_object("b", b"new")
    run = await fo.exec("echo 1 > x/a; echo 2 > y/b", disks={"x": disk.mount(at=2), "y": disk.mount(at=2)})
    rescued = {c.rescue_branch for c in (run.commits["x"].conflict, run.commits["y"].conflict) if c}
    assert len(rescued) == 2
    found = [
        await (await fo.disks.get(f"{disk.name}@{name}")).get_object(k)
        for name in sorted(map(str, rescued))
        for k in "ab"
    ]
    assert found == [b"1\n", b"old", b"old", b"2\n"]


async def test_subdirectory(fo: Fanout, disk: Disk) -> None:
    await disk.put_object("a/b/f", b"x")
    run = await fo.exec("find . -type f; echo y > g", disks={"w": disk.mount(subdirectory="/a/b/")})
    assert run.stdout == "./f\n"
    assert await disk.get_object("a/b/g") == b"y\n"
    assert [c.path for c in run.commits["w"].changes or ()] == ["a/b/g"]


async def test_at_a_point(fo: Fanout, disk: Disk) -> None:
    await disk.put_object("f", b"one")
    await disk.checkpoint("cp")
    await disk.put_object("f", b"two")
    for at in ("cp", 1):
        run = await fo.exec("cat f", disks={"w": disk.mount(read_only=True, at=at)})
        assert (run.stdout, run.commits["w"].base_seq) == ("one", 1)
    point = await fo.disks.get(f"{disk.name}@cp")
    assert (await fo.exec("cat f", disks={"w": point.mount(read_only=True)})).stdout == "one"
    fresh = await fo.exec("echo three > g", disks={"w": disk.mount(at="cp")})
    assert fresh.commits["w"].seq == 3
    branch = await disk.branch("br", checkpoint="cp")
    await fo.exec("echo mine > f", disks={"w": branch})
    assert (await disk.get_object("f"), await branch.get_object("f")) == (b"two", b"mine\n")
    with pytest.raises(Invalid, match="read-only"):
        await fo.exec("true", disks={"w": disk.mount(at="br")})


async def test_read_only(fo: Fanout, disk: Disk) -> None:
    await disk.put_object("f", b"x")
    run = await fo.exec("echo y > f; mkdir d; rm -f f; true", disks={"w": disk.mount(read_only=True)})
    assert run.stderr.count("Read-only file system") == 3
    assert run.commits["w"].seq is None
    assert [c.seq async for c in disk.log()] == [1]


@pytest.mark.parametrize(("policy", "lands"), [("always", "ab"), ("on_success", "b"), ("never", "")])
async def test_commit_policy(fo: Fanout, disk: Disk, policy: Any, lands: str) -> None:
    await fo.exec("echo > a; false", disks={"w": disk}, commit=policy)
    await fo.exec("echo > b", disks={"w": disk}, commit=policy)
    assert "".join([o.key async for o in disk.list_objects()]) == lands


# -- commits that meet -----------------------------------------------------------------------------------------------


async def test_shared_the_first_commit_wins_and_the_loser_is_kept(fo: Fanout, disk: Disk) -> None:
    await disk.put_object("f", b"base")
    await disk.put_object("other", b"base")
    mount = disk.mount(at=2)
    first, second = await together(fo, ("echo first > f", mount), ("echo second > f; echo mine > extra", mount))
    assert first.conflict is None
    assert first.commits["w"].seq == 3
    assert second.conflict is not None
    assert second.conflict.paths == ("f",)
    assert second.commits["w"].seq is None
    assert second.ok, "the command itself went well"
    with pytest.raises(Conflict, match="rescue/"):
        second.raise_for_status()
    assert await disk.get_object("f") == b"first\n"
    assert await disk.head_object("extra") is None, "nothing of the loser lands"
    name = second.conflict.rescue_branch
    assert name == f"rescue/{second.id}"
    rescue = await fo.disks.get(f"{disk.name}@{name}")
    assert await rescue.get_object("f") == b"second\n"
    assert name in [b async for b in disk.branches()]
    assert [(c.path, c.kind) async for c in disk.diff(2, name)] == [("extra", "added"), ("f", "modified")]
    with pytest.raises(Conflict):
        await disk.merge(name)
    await disk.merge(name, on_conflict="theirs")
    assert await disk.get_object("f") == b"second\n"
    assert await disk.get_object("extra") == b"mine\n"


async def test_a_run_with_a_conflict_as_json(fo: Fanout, disk: Disk) -> None:
    await disk.put_object("f", b"base")
    mount = disk.mount(at=1)
    _, lost = await together(fo, ("echo 1 > f", mount), ("echo 2 > f; printf '\\377'; echo > $'\\377'", mount))
    assert lost.conflict is not None
    dumped = json.loads(json.dumps(lost.model_dump(mode="json", by_alias=True)))
    expected = {"paths": ["f"], "rescueBranch": lost.conflict.rescue_branch, "disk": disk.name}
    assert dumped["conflict"] == dumped["commits"]["w"]["conflict"] == expected
    assert dumped["stdoutBytes"] == "�"
    assert dumped["timing"]["queueMs"] == lost.timing.queue_ms
    won = await fo.exec("echo > $'\\377'", disks={"w": disk})
    assert json.loads(json.dumps(won.model_dump(mode="json")))["commits"]["w"]["changes"][0]["path"] == "\udcff"
    assert json.loads(won.model_dump_json())["commits"]["w"]["changes"]


async def test_conditional_the_later_commit_wins(fo: Fanout, disk: Disk) -> None:
    await disk.put_object("f", b"base")
    mount = disk.mount(at=1, conditional=True)
    runs = await together(fo, ("echo first > f; echo > a", mount), ("echo second > f; echo > b", mount))
    assert [run.conflict for run in runs] == [None, None]
    assert await disk.get_object("f") == b"second\n"
    assert [o.key async for o in disk.list_objects()] == ["a", "b", "f"]
    then = await disk.branch("then", checkpoint=(await disk.checkpoint()).name)
    assert [c.message async for c in then.log(limit=2)] == ["echo second > f; echo > b", "echo first > f; echo > a"]


async def test_everybody_makes_the_same_directory(fo: Fanout, disk: Disk) -> None:
    runs = await fo.map("mkdir -p results; echo {} > results/{}", range(5), disks={"w": disk})
    assert [run.conflict for run in runs] == [None] * 5
    assert [o.key async for o in disk.list_objects()] == [f"results/{i}" for i in range(5)]


async def test_two_at_once_in_shared_mode(fo: Fanout, disk: Disk) -> None:
    """Really at once: both are started before either ends."""
    await disk.put_object("f", b"base")
    mount = disk.mount(at=1)
    runs = await fo.map("echo {} > f", ["1", "2"], disks={"w": mount})
    lost = [run for run in runs if run.conflict]
    assert len(lost) == 1
    assert len([c async for c in disk.log() if c.exec_id]) == 1
    won = next(run for run in runs if not run.conflict)
    assert await disk.get_object("f") == (b"1\n" if won is runs[0] else b"2\n")


async def test_history_says_who_wrote_what(fo: Fanout, disk: Disk) -> None:
    runs = await fo.map("echo > f{}", "abc", disks={"w": disk})
    log = {commit.exec_id: commit async for commit in disk.log()}
    for run, letter in zip(runs, "abc", strict=True):
        commit = log[run.id]
        assert (commit.author, commit.message, commit.base_seq) == ("tester", f"echo > f{letter}", 0)
        assert commit.seq == run.commits["w"].seq
        assert commit.changes == run.commits["w"].changes == (fanout.Change(path=f"f{letter}", kind="added"),)


async def test_what_was_acknowledged_is_seen(fo: Fanout, disk: Disk) -> None:
    for i in range(3):
        await disk.put_object("n", str(i))
        assert (await fo.exec("cat n", disks={"w": disk.mount(read_only=True)})).stdout == str(i)
        await fo.exec(f"echo {i} > m", disks={"w": disk})
        assert await disk.get_object("m") == f"{i}\n".encode()


async def test_a_deleted_disk_cannot_be_mounted(fo: Fanout) -> None:
    gone = await fo.disks.create(f"gone-{uuid.uuid4().hex[:8]}")
    await fo.exec("true", disks={"w": gone})
    await fo.disks.delete(gone.name)
    with pytest.raises(fanout.NotFound):
        await fo.exec("echo > f", disks={"w": gone})


# -- checkouts -------------------------------------------------------------------------------------------------------


async def test_a_checkout_keeps_others_out_and_is_gone_with_its_exec(fo: Fanout, disk: Disk) -> None:
    await disk.put_object("src/f", b"")
    word = f"LOCK_{uuid.uuid4().hex}"
    async with anyio.create_task_group() as group:
        holder = disk.mount(checkout=["src/"])
        group.start_soon(lambda: fo.exec("echo x > src/f; sleep 300", disks={"w": holder}, env={word: "1"}))
        await until(lambda: alive(word, fo))
        assert [lock.paths for lock in await disk.locks()] == [("/src",)]
        with pytest.raises(Busy, match="queue_ms"):
            await fo.exec("true", disks={"w": disk.mount(checkout=["src/f"], queue_ms=50)})
        written = await fo.exec("echo y > src/f; echo y > other", disks={"w": disk.mount(conditional=True)})
        assert written.conflict is not None
        assert written.conflict.paths == ("src/f",)
        beside = await fo.exec("echo y > other", disks={"w": disk})
        assert beside.conflict is None
        group.cancel_scope.cancel()
    assert await disk.locks() == []
    assert not alive(word, fo)
    assert await disk.get_object("src/f") == b""
    run = await fo.exec("echo z > src/f", disks={"w": disk.mount(checkout=["src"], queue_ms=1000)})
    assert run.commits["w"].seq is not None
    assert run.timing.lock_ms > 0
    assert await disk.locks() == []


# -- streams, maps, keys ---------------------------------------------------------------------------------------------


async def test_stream(fo: Fanout, disk: Disk) -> None:
    events = [e async for e in fo.stream("printf 'a\\377b'; echo err >&2; echo x > f", disks={"w": disk})]
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)
    run = events[-1].run
    assert run.id == events[0].id
    outputs = [e for e in events[1:-1] if isinstance(e, Output)]
    assert len(outputs) == len(events) - 2
    assert b"".join(e.data for e in outputs if e.stream == "stdout") == run.stdout_bytes == b"a\xffb"
    assert "".join(e.text for e in outputs if e.stream == "stderr") == "err\n"
    assert json.dumps([e.model_dump(mode="json", by_alias=True) for e in events])
    assert await disk.get_object("f") == b"x\n"


async def test_output_comes_while_the_command_runs(fo: Fanout) -> None:
    marker = f"STREAM_{uuid.uuid4().hex}"
    seen = False
    async for event in fo.stream("echo one; sleep 300", env={marker: "1"}, timeout_s=120):
        if isinstance(event, Output):
            seen = event.text == "one\n" and bool(alive(marker, fo))
            break
    assert seen
    await until(lambda: not alive(marker, fo))  # left by `break`: the command is killed


async def test_a_slow_reader_does_not_outlast_the_timeout(fo: Fanout) -> None:
    """The command is held up while nobody reads, but its time runs, and with it its slot."""
    marker = f"SLOW_{uuid.uuid4().hex}"
    events = fo.stream("yes", env={marker: "1"}, timeout_s=0.5)
    assert isinstance(await anext(events), Started)
    await until(lambda: alive(marker, fo))
    await until(lambda: not alive(marker, fo))  # and we have read nothing
    last = None
    async for event in events:
        last = event
    assert isinstance(last, Finished)
    assert last.run.status == "timed_out"


async def test_map(fo: Fanout, disk: Disk) -> None:
    items = ["plain", "two words", "it's", 'say "x"', "new\nline", "$(id)", "*", "-n", "ü☕"]
    told: dict[int, str] = {}
    runs = await fo.map(
        "printf '%s' {}; echo {#} > n{#}",
        items,
        disks={"w": disk},
        max_in_flight=3,
        progress=lambda index, run: told.__setitem__(index, run.stdout),
    )
    assert [run.stdout for run in runs] == items
    assert [told[i] for i in range(len(items))] == items
    assert {o.key async for o in disk.list_objects()} == {f"n{i}" for i in range(1, len(items) + 1)}
    assert await fo.map("echo {}", []) == []
    for bad in (0, -1, True, 1.5):
        with pytest.raises(Invalid, match="max_in_flight"):
            await fo.map("echo {}", [1], max_in_flight=bad)  # type: ignore[arg-type]


async def test_map_keeps_at_most_so_many_under_way(fo: Fanout) -> None:
    under_way, most = 0, 0
    original = fo.exec

    async def counted(*args: Any, **options: Any) -> Run:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        try:
            return await original(*args, **options)
        finally:
            under_way -= 1

    fo.exec = counted  # type: ignore[method-assign]
    try:
        await fo.map("true {}", range(9), max_in_flight=3)
    finally:
        del fo.exec
    assert most == 3


async def test_an_error_in_map_cancels_the_others(fo: Fanout) -> None:
    marker = f"MAP_{uuid.uuid4().hex}"

    def progress(index: int, run: Run) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        await fo.map("[ {} = 0 ] || sleep 300", range(4), env={marker: "1"}, progress=progress)
    assert not alive(marker, fo)


async def test_idempotency_key(fo: Fanout, disk: Disk) -> None:
    key = uuid.uuid4().hex
    runs: list[Run] = []

    async def call() -> None:
        runs.append(await fo.exec("echo x >> f; sleep 0.1", disks={"w": disk}, idempotency_key=key, env={"A": "1"}))

    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(call)
    await call()
    assert {run.id for run in runs} == {runs[0].id}
    assert await disk.get_object("f") == b"x\n"
    with pytest.raises(Invalid, match="idempotency_key"):
        await fo.exec("echo other", disks={"w": disk}, idempotency_key=key, env={"A": "1"})
    with pytest.raises(Invalid, match="idempotency_key"):
        await fo.exec("echo x >> f; sleep 0.1", disks={"w": disk}, idempotency_key=key, env={"A": "2"})
    with pytest.raises(Invalid, match="idempotency_key"):
        _ = [e async for e in fo.stream("true", idempotency_key=key)]


async def test_a_connection_that_is_not_open(tmp_path: Path) -> None:
    closed = fanout.connect(store="memory://", cache_dir=tmp_path)
    with pytest.raises(Unavailable, match="async with"):
        await closed.exec("true")
