"""Large files and long calls: bounded memory at both ends, and a quiet command outlives a proxy's patience."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import uuid
from pathlib import Path

import anyio
import pytest
import uvicorn

from fanout import wire
from fanout.client import RemoteFanout
from fanout.config import Settings
from fanout.model import Finished
from fanout.server.app import create_app
from fanout.server.state import State
from tests.support.cable import cable_to
from tests.support.serving import Running

MIB = 1 << 20
#: A file, and what each end may need to hold of it at most.
SIZE, ALLOWED = 384 * MIB, 256 * MIB

CLIENT = """
import asyncio, hashlib, json, os, resource, sys
import fanout

async def main(where, size, local):
    block = os.urandom(4 << 20)
    digest, read = hashlib.sha256(), hashlib.sha256()

    async def stream():
        for number in range(size // len(block)):
            piece = number.to_bytes(8) + block[8:]
            digest.update(piece)
            yield piece

    async with fanout.connect(**where["connection"]) as fo:
        disk = await fo.disks.create(where["disk"])
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        await disk.put_object("streamed", stream())
        async for piece in disk.read_object("streamed"):
            read.update(piece)
        await disk.download("/streamed", local)
        await disk.upload(local, "/uploaded")
        same = (await disk.head_object("streamed")).size == (await disk.head_object("uploaded")).size == size
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"same": same and read.digest() == digest.digest(), "grown": (after - before) << 10}))

asyncio.run(main(json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
"""


def peak(pid: int) -> int:
    """Return the most memory a process ever held, in bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) << 10


def test_a_large_file_needs_little_memory(server: Running, disk_name: str, tmp_path: Path) -> None:
    before = peak(server.process.pid)
    where = {"connection": {"url": server.url, "api_key": server.token}, "disk": disk_name}
    command = [sys.executable, "-c", CLIENT, json.dumps(where), str(SIZE), str(tmp_path / "local")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["same"]
    assert told["grown"] < ALLOWED, f"the client grew by {told['grown'] >> 20} MiB"
    grown = peak(server.process.pid) - before
    assert grown < ALLOWED, f"the server grew by {grown >> 20} MiB"


@pytest.mark.anyio
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_quiet_command_outlives_a_proxy_that_cuts_what_is_silent(
    streamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten minutes and sixty seconds, in less than three, and one."""
    monkeypatch.setattr(wire, "HEARTBEAT_S", 0.05)
    settings = Settings.load({}, store="memory://", cache_dir=tmp_path)
    state = await State(settings, authenticate=False).open()
    config = uvicorn.Config(create_app(state), port=0, ws="none", lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    listening = config.bind_socket()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(server.serve, [listening])
            while not server.started:
                await anyio.sleep(0.01)
            with cable_to(url) as cable:
                async with RemoteFanout(Settings.load({}, url=cable.url)) as fo:
                    disk = await fo.disks.create(f"ws-{uuid.uuid4().hex[:12]}")
                    assert (await fo.exec("true", disks={"w": disk})).ok
                    cable.idle_s = 1.0
                    cable.cut()
                    connections = cable.connections
                    if streamed:
                        events = [event async for event in fo.stream("sleep 2.5; echo x >> f", disks={"w": disk})]
                        assert isinstance(events[-1], Finished)
                        run = events[-1].run
                    else:
                        run = await fo.exec("sleep 2.5; echo x >> f", disks={"w": disk})
                    assert run.ok
                    assert run.timing.execute_ms > 2 * 1000 * cable.idle_s
                    assert cable.connections <= connections + 1, "it was cut, and sent again"
                    assert await disk.get_object("f") == b"x\n"
            server.should_exit = True
    finally:
        await state.close()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
