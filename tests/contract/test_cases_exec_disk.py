"""The disk cases of the field at exec level: each test carries its number. Real sandboxes, the public interface.

Those where a command reads or writes a disk run in VMs, too. Those of a store that fails do not: what a store meets
begins when the command is over, whatever it ran in.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from fanout import wire
from fanout.api import Disk, Fanout
from fanout.errors import FanoutError, Invalid, NotFound, Unavailable
from fanout.model import Run
from fanout.store.memory import MemoryStore
from fanout.store.wrap import Fault, Faulty, Metered
from tests.support.connections import connected, in_vms, remote, until
from tests.support.disks import hasty

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["memory", "remote", "qemu"])
async def fo(request: pytest.FixtureRequest, anyio_backend: str, tmp_path: Path) -> AsyncIterator[Fanout]:
    if request.param == "remote":
        async with remote(request.getfixturevalue("remote_server")) as fo:
            yield fo
        return
    engine = "qemu" if request.param == "qemu" else "bubblewrap"
    async with connected(MemoryStore(), tmp_path / "cache", engine=engine) as fo:
        yield fo


both_engines = pytest.mark.parametrize("engine", ["bubblewrap", "qemu"])


@pytest.fixture
async def disk(fo: Fanout) -> Disk:
    return await fo.disks.create(f"ws-{uuid.uuid4().hex[:12]}")


async def test_case_17_a_reader_sees_all_of_a_commit_or_nothing(fo: Fanout, disk: Disk) -> None:
    files = 200 if in_vms(fo) else 1000  # emulated processors take a while
    count = "ls | wc -l; cat * 2>/dev/null | sort -u"
    over = False
    seen: list[str] = []

    async def read() -> None:
        while not over:
            run = await fo.exec(count, disks={"w": disk.mount(read_only=True)})
            seen.append(run.stdout)
        seen.append((await fo.exec(count, disks={"w": disk.mount(read_only=True)})).stdout)

    async with anyio.create_task_group() as group:
        group.start_soon(read)
        for generation in range(3):
            await fo.exec(f"for i in $(seq {files}); do echo {generation} > $i; done", disks={"w": disk})
        over = True
    assert set(seen) <= {"0\n"} | {f"{files}\n{generation}\n" for generation in range(3)}
    assert seen[-1] == f"{files}\n2\n"


@both_engines
async def test_case_21_git(engine: str, tmp_path: Path) -> None:
    store = MemoryStore()
    identity = {
        "GIT_AUTHOR_NAME": "n",
        "GIT_AUTHOR_EMAIL": "e@x",
        "GIT_COMMITTER_NAME": "n",
        "GIT_COMMITTER_EMAIL": "e@x",
    }
    async with connected(store, tmp_path / "one", engine=engine) as fo:
        disk = await fo.disks.create("ws")
        run = await fo.exec(
            "git init -q . && mkdir -p a/b && seq 1000 > a/b/f && ln -s a/b/f l && echo '#!/bin/sh' > x && chmod +x x"
            " && git add . && git commit -qm one && seq 2000 > a/b/f && git commit -qam two && git gc -q",
            disks={"w": disk},
            env=identity,
        )
        run.raise_for_status()
    async with connected(store, tmp_path / "two", engine=engine) as fo:
        disk = await fo.disks.get("ws")
        run = await fo.exec(
            "git fsck --strict 2>&1 && git status --porcelain && git log --format=%s", disks={"w": disk}
        )
        assert run.raise_for_status().stdout.replace("notice: HEAD points to an unborn branch\n", "") == "two\none\n"
        run = await fo.exec(
            "git mv a c && git commit -qm three && git status --porcelain", disks={"w": disk}, env=identity
        )
        assert run.raise_for_status().stdout == ""


async def test_case_26_links_are_links(fo: Fanout, disk: Disk, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    run = await fo.exec(
        "ln -s /etc/passwd abs; ln -s ../../../../etc/passwd up; ln -s loop loop; mkdir d; ln -s d/../d/../loop far;"
        f" ln -s {outside} host; ln -s /mnt/w/d ok; echo in > ok/f; cat host/secret; cat up >/dev/null",
        disks={"w": disk},
    )
    assert "secret" not in run.stdout, "the sandbox saw the host"
    kinds = {o.key: o.kind async for o in disk.list_objects()}
    assert kinds == {"d/f": "file"} | dict.fromkeys(("abs", "up", "loop", "far", "host", "ok"), "symlink")
    targets = {e.name: e.target async for e in disk.listdir("/") if e.kind == "symlink"}
    assert targets["abs"] == "/etc/passwd"
    assert targets["up"] == "../../../../etc/passwd"
    for link in ("abs", "up", "loop", "far", "host", "ok"):
        with pytest.raises(Invalid, match="symbolic link"):
            await disk.get_object(link)
        with pytest.raises(NotFound):
            await disk.get_object(f"{link}/secret")
        head = await disk.head_object(link)
        assert head is not None
        assert head.kind == "symlink"
    await disk.download("/", tmp_path / "down")
    assert os.readlink(tmp_path / "down/abs") == "/etc/passwd"
    # A working directory and a subdirectory behind a link stay inside, too.
    with pytest.raises(FanoutError):
        await fo.exec("cat secret", disks={"w": disk}, cwd="/mnt/w/host")
    with pytest.raises(Invalid):
        await fo.exec("cat secret", disks={"w": disk.mount(subdirectory="host")})
    again = await fo.exec("cat abs host/secret; cat ok/f", disks={"w": disk})
    assert "secret" not in again.stdout.replace("host/secret", "")
    assert again.stdout.endswith("in\n")


@both_engines
async def test_two_connections_see_what_was_acknowledged(engine: str, tmp_path: Path) -> None:
    """Separate caches, as on two hosts. The other one's commands run in sandboxes in any case."""
    store = MemoryStore()
    async with connected(store, tmp_path / "one", engine=engine) as one, connected(store, tmp_path / "two") as two:
        here = await one.disks.create("ws")
        there = await two.disks.get("ws")
        for i in range(5):
            await one.exec(f"echo {i} > f; rm -f g", disks={"w": here})
            run = await two.exec("cat f; ls; echo $(cat f) > g", disks={"w": there})
            assert run.stdout == f"{i}\nf\n"
            assert run.commits["w"].base_seq == 2 * i + 1
            assert await here.get_object("g") == f"{i}\n".encode()
        assert [c.seq async for c in here.log()] == list(range(10, 0, -1))


# -- a store that fails ----------------------------------------------------------------------------------------------


async def meet(tmp_path: Path, fault: Fault, command: str) -> tuple[FanoutError | Run, list[str]]:
    """Run a command while `fault` is with the store; returns what came of it, and what is on the disk then."""
    inner = MemoryStore()
    async with connected(inner, tmp_path / "cache") as fo:
        await (await fo.disks.create("ws")).put_object("before", b"")
    async with connected(Faulty(inner, fault), tmp_path / "cache", runtime=hasty()) as fo:
        disk = await fo.disks.get("ws")
        try:
            outcome: FanoutError | Run = await fo.exec(command, disks={"w": disk})
        except FanoutError as error:
            outcome = error
    async with connected(inner, tmp_path / "cache") as fo:
        return outcome, [o.key async for o in (await fo.disks.get("ws")).list_objects()]


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (Fault("unavailable", "create", "/log/", times=1000), "unavailable"),
        (Fault("refused", "create", "/log/", times=1000), "unknown"),
        (Fault("unavailable", None, "/pack/", times=1000), "unavailable"),
    ],
    ids=str,
)
async def test_a_store_that_fails_at_the_commit(tmp_path: Path, fault: Fault, code: str) -> None:
    outcome, keys = await meet(tmp_path, fault, "head -c 3M /dev/urandom > big; echo out; exit 3")
    assert isinstance(outcome, FanoutError)
    assert outcome.code == code
    run: Run = outcome.run  # type: ignore[attr-defined]
    assert (run.stdout, run.exit_code, run.status) == ("out\n", 3, "completed")
    assert run.commits["w"].seq is None
    assert run.timing.total_ms > 0
    assert keys == ["before"]


@pytest.mark.parametrize("kind", ["lost", "echo", "refused", "unavailable"])
async def test_case_13_and_14_an_answer_that_lies(tmp_path: Path, kind: Any) -> None:
    outcome, keys = await meet(tmp_path, Fault(kind, "create", "/log/"), "echo > f")
    assert isinstance(outcome, Run)
    assert outcome.commits["w"].seq == 2
    assert keys == ["before", "f"]


async def test_a_store_that_fails_before_the_start(tmp_path: Path) -> None:
    outcome, keys = await meet(tmp_path, Fault("unavailable", "get", "/log/", times=1000), "echo > f")
    assert isinstance(outcome, Unavailable)
    assert not hasattr(outcome, "run"), "the command never ran"
    assert keys == ["before"]


async def test_of_several_disks_the_run_says_which_landed(tmp_path: Path) -> None:
    inner = MemoryStore()
    async with connected(inner, tmp_path / "cache", runtime=hasty()) as fo:
        ids = [(await fo.disks.create(name)).id for name in ("one", "two")]
    store = Faulty(inner, Fault("unavailable", "create", f"{ids[1]}/log/", times=1000))
    async with connected(store, tmp_path / "cache", runtime=hasty()) as fo:
        disks = {name: await fo.disks.get(name) for name in ("one", "two")}
        with pytest.raises(Unavailable) as caught:
            await fo.exec("echo > one/f; echo > two/f", disks=disks)
        run: Run = caught.value.run  # type: ignore[attr-defined]
        assert (run.commits["one"].seq, run.commits["two"].seq) == (1, None)
        assert (await fo.exec("true", disks=disks)).ok, "its slot is free"


@pytest.mark.parametrize(("command", "more"), [("cat f", {}), ("echo x > g", {"create": 1})])
async def test_requests_of_a_warm_exec(tmp_path: Path, command: str, more: dict[str, int]) -> None:
    store = Metered(MemoryStore())
    async with connected(store, tmp_path / "cache") as fo:
        disk = await fo.disks.create("ws")
        await disk.put_object("f", b"x")
        for given in (disk, disk.mount(), disk.mount(read_only=True), disk.mount(conditional=True)):
            await fo.exec("true", disks={"w": given})
            before = store.usage()
            await fo.exec(command, disks={"w": given})
            made = {verb: n for verb, n in (store.usage() - before).requests.items() if n}
            read_only = not isinstance(given, Disk) and given.mode == "read_only"
            assert made == {"get": 1, **({} if read_only else more)}
            await fo.exec("rm -f g", disks={"w": disk})


@pytest.mark.parametrize(("key", "lands"), [("/pack/", False), ("/log/", True)])
async def test_case_11_cancelled_at_the_end(tmp_path: Path, key: str, lands: bool) -> None:
    """While its data is uploaded: nothing is committed. When the entry is on its way: it lands, and is waited for."""
    inner = MemoryStore()
    store = Faulty(inner, Fault("slow", "put" if key == "/pack/" else "create", key, times=1000, seconds=0.3))
    async with connected(store, tmp_path / "cache") as fo:
        disk = await fo.disks.create("ws")
        async with anyio.create_task_group() as group:
            with anyio.CancelScope() as scope:

                async def cancel() -> None:
                    await until(lambda: store.fired)
                    scope.cancel()

                group.start_soon(cancel)
                await fo.exec("head -c 3M /dev/urandom > f", disks={"w": disk})
        assert scope.cancelled_caught
        assert [o.key async for o in disk.list_objects()] == (["f"] if lands else [])
        assert (await fo.exec("true", disks={"w": disk})).ok


async def test_a_key_remembers_the_commit_that_was_under_way_when_its_caller_left(tmp_path: Path) -> None:
    """Embedded only: it looks into the store. A client whose connection broke then sends the call again, so."""
    store = Faulty(MemoryStore(), Fault("slow", "create", "/log/", times=1000, seconds=0.3))
    key = wire.AUTOMATIC + "once"
    async with connected(store, tmp_path / "cache") as fo:
        disk = await fo.disks.create("ws")
        assert (await fo.exec("true")).ok  # the engine's first start may take its time
        async with anyio.create_task_group() as group:
            with anyio.CancelScope() as scope:

                async def cancel() -> None:
                    await until(lambda: store.fired)
                    scope.cancel()

                group.start_soon(cancel)
                await fo.exec("echo x >> f", disks={"w": disk}, idempotency_key=key)
        assert scope.cancelled_caught
        run = await fo.exec("echo x >> f", disks={"w": disk}, idempotency_key=key)
        assert run.commits["w"].seq == 1
        assert await disk.get_object("f") == b"x\n"
        assert len([commit async for commit in disk.log()]) == 1
