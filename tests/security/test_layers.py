"""What a hostile command leaves behind on its disk, and what the commit's own walk makes of it.

The walk runs as whoever runs fanout, often root, over a tree that an enemy made. It must read nothing but that tree,
follow nothing, wait for nothing, and put nothing on the disk that means something on a host.
"""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from fanout.api import Disk, Fanout
from fanout.config import Settings
from fanout.errors import EngineUnavailable
from fanout.local import LocalFanout
from fanout.store.memory import MemoryStore
from tests.support.engines import ENGINES, make_engine

pytestmark = pytest.mark.anyio

SECRET = "the host's own words"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=ENGINES)
async def host(
    request: pytest.FixtureRequest, anyio_backend: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Fanout, Path]]:
    """A connection on each engine, and its cache directory."""
    engine = make_engine(request.param)
    cache = tmp_path_factory.mktemp("cache")
    settings = Settings.load({}, store="memory://", cache_dir=cache, author="tester")
    try:
        engine.probe()
        async with LocalFanout(settings, store=MemoryStore(), engine=engine) as fo:
            yield fo, cache
    except EngineUnavailable as error:
        pytest.skip(str(error))
    finally:
        engine.close()


@pytest.fixture
def fo(host: tuple[Fanout, Path]) -> Fanout:
    return host[0]


@pytest.fixture
def secret() -> Iterator[Path]:
    path = Path("/tmp", f"fanout-secret-{uuid.uuid4().hex}")
    path.mkdir()
    (path / "file").write_text(SECRET)
    yield path
    (path / "file").unlink()
    path.rmdir()


async def new_disk(fo: Fanout) -> Disk:
    return await fo.disks.create(f"d-{uuid.uuid4().hex[:12]}")


async def names(disk: Disk) -> dict[str, str]:
    """Return every name of a disk's root, with what it is."""
    return {entry.name: entry.kind async for entry in disk.listdir("/")}


async def test_links_are_kept_as_links_and_read_by_nobody(fo: Fanout, secret: Path) -> None:
    disk = await new_disk(fo)
    script = f"ln -s {secret}/file a; ln -s {secret} b; ln -s ../../../../../..{secret}/file c; ln -s /proc/self/root d"
    run = await fo.exec(script, disks={"w": disk})
    assert run.ok, run.stderr
    assert await names(disk) == dict.fromkeys("abcd", "symlink")
    run = await fo.exec("cat a b/file c d/etc/passwd | wc -l", disks={"w": disk})
    assert run.stdout == "2\n"  # the sandbox's own passwd


async def test_pipes_sockets_and_devices_are_left_out(fo: Fanout) -> None:
    disk = await new_disk(fo)
    script = """mkfifo pipe; mknod null c 1 3; mknod disk b 254 0; mknod whiteout c 0 0; echo 1 > file
    /usr/bin/python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("socket")'; true"""
    run = await fo.exec(script, disks={"w": disk})
    assert run.status == "completed"
    assert await names(disk) == {"file": "file"}
    assert set(run.commits["w"].skipped) >= {"pipe", "socket"}


async def test_a_pipe_in_the_place_of_a_file_holds_nobody_up(fo: Fanout) -> None:
    disk = await new_disk(fo)
    await disk.put_object("f", b"1" * 1000)
    run = await fo.exec("rm f; mkfifo f; mkdir d; mkfifo d/f", disks={"w": disk})
    assert run.status == "completed"
    assert await names(disk) == {"d": "directory"}


async def test_odd_names_stay_what_they_are(fo: Fanout) -> None:
    disk = await new_disk(fo)
    script = r"""
import os
os.chdir("/mnt/w")
names = [b"new\nline", b"\xff\xfe", b"-rf", b"$(id)", b" ", b"x" * 255, b"\x1b[2J", "\u202e".encode(), b"...", b"\\"]
for name in names:
    open(name, "w").close()
"""
    run = await fo.exec(f"/usr/bin/python3 - <<'END'\n{script}\nEND", disks={"w": disk})
    assert run.ok, run.stderr
    found = {os.fsencode(name) for name in await names(disk)}
    wanted = {b"new\nline", b"\xff\xfe", b"-rf", b"$(id)", b" ", b"x" * 255, b"\x1b[2J", b"...", b"\\"}
    assert found == wanted | {"\u202e".encode()}
    assert (await fo.exec("ls -A | wc -l", disks={"w": disk})).stdout == "11\n"


DEEP = """
import os
os.chdir("/mnt/w")
open("beside", "w").close()
for number in range(DEPTH):
    os.mkdir("d" * 200)
    os.chdir("d" * 200)
open("bottom", "w").close()
"""


DESCEND = """
import os
os.chdir("/mnt/w")
depth = 0
while os.path.isdir("d" * 200):
    os.chdir("d" * 200)
    depth += 1
print(depth if os.path.exists("bottom") else "no bottom")
"""


async def test_a_tree_deeper_than_a_path_can_be_is_kept_whole(fo: Fanout, tmp_path: Path) -> None:
    disk = await new_disk(fo)
    run = await fo.exec(f"/usr/bin/python3 - <<'END'\n{DEEP.replace('DEPTH', '60')}\nEND", disks={"w": disk})
    assert run.ok, run.stderr
    assert set(await names(disk)) == {"beside", "d" * 200}
    settings = Settings.load({}, store="memory://", cache_dir=tmp_path, author="tester")
    engine = make_engine("bubblewrap-bwrap")
    try:
        assert isinstance(fo, LocalFanout)
        async with LocalFanout(settings, store=fo._store, engine=engine) as elsewhere:
            disk = await elsewhere.disks.get(disk.name)
            run = await elsewhere.exec(f"/usr/bin/python3 - <<'END'\n{DESCEND}\nEND", disks={"w": disk})
    finally:
        engine.close()
    assert run.stdout == "60\n", run.stderr


async def test_what_a_layer_holds_is_harmless_on_the_host(host: tuple[Fanout, Path]) -> None:
    """Nobody but its owner can reach it while it lies there, and no bit of it is obeyed."""
    fo, cache = host
    disk = await new_disk(fo)
    script = "cp /bin/cat mine; chmod 6755 mine; mkdir open; chmod 777 open; chmod 777 ."
    run = await fo.exec(script, disks={"w": disk})
    assert run.ok, run.stderr
    for above in (cache, *cache.glob("upper/*/upper")):
        parents = [above, *above.parents]
        assert any(parent.stat().st_mode & 0o077 == 0 for parent in parents), above
    again = await fo.exec("stat -c %a mine; ./mine /proc/self/status | grep NoNewPrivs", disks={"w": disk})
    assert again.stdout.split() == ["6755", "NoNewPrivs:", "1"]


SWAP = """
import os, sys, threading, time
os.chdir("/mnt/w")
if os.fork():
    time.sleep(0.3)
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
while True:
    for name in ("a", "b"):
        os.mkdir(name)
        open(f"{name}/file", "w").write("mine")
        os.rename(name, name + "2")
        os.symlink(SECRET, name)
        os.unlink(name)
        os.mkdir(name); os.rename(name, name + "3"); os.symlink(SECRET + "/file", name + "4")
        os.rename(name + "4", name + "2/file")
        os.unlink(name + "2/file"); os.rmdir(name + "2"); os.rmdir(name + "3")
"""


async def test_nobody_is_left_to_race_the_walk(fo: Fanout, secret: Path) -> None:
    """A process that outlives its command and swaps files for links is dead before the first name is read."""
    for _ in range(4):
        disk = await new_disk(fo)
        code = SWAP.replace("SECRET", repr(str(secret)))
        run = await fo.exec(f"/usr/bin/python3 - <<'END'\n{code}\nEND", disks={"w": disk})
        assert run.ok, run.stderr
        async for entry in disk.listdir("/"):
            if entry.kind == "directory":
                async for inner in disk.listdir(entry.path):
                    if inner.kind == "file":
                        assert (await disk.get_object(inner.path)) in (b"mine", b"")
            elif entry.kind == "file":
                assert SECRET.encode() not in await disk.get_object(entry.path)


async def test_a_layer_that_is_full_of_nothing_is_walked_in_bounded_time(fo: Fanout) -> None:
    """Holes and hard links are cheap to make: they must be cheap to commit."""
    disk = await new_disk(fo)
    script = "truncate -s 100G holes; echo 1 > f; for i in $(seq 200); do ln f l$i; done"
    run = await fo.exec(script, disks={"w": disk})
    assert run.ok, run.stderr
    assert run.timing.commit_ms < 30_000
    assert len(await names(disk)) == 202


async def test_modes_that_lock_the_owner_out_hide_nothing(fo: Fanout) -> None:
    disk = await new_disk(fo)
    run = await fo.exec("mkdir d; echo 1 > d/f; chmod 0 d/f d; echo 2 > g; chmod 0 g", disks={"w": disk})
    assert run.ok, run.stderr
    assert await disk.get_object("d/f") == b"1\n"
    assert stat.S_IMODE((await disk.head_object("g")).mode) == 0
