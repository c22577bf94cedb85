"""`fanout bench URL` against a real server: it measures, and cancelled it leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio

import fanout
from tests.support.serving import Running


def _bench(server: Running, *words: str) -> subprocess.Popen[str]:
    environ = {**os.environ, "FANOUT_API_KEY": server.token}
    command = [sys.executable, "-m", "fanout", "bench", server.url, *words]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _disks(server: Running) -> list[str]:
    async def names() -> list[str]:
        async with fanout.connect(server.url, api_key=server.token) as fo:
            return [disk.name async for disk in fo.disks.list() if disk.name.startswith("bench-")]

    return anyio.run(names)


def test_a_server_is_measured_from_outside(server: Running, tmp_path: Path) -> None:
    process = _bench(server, "--in-flight", "1,2", "--calls", "3", "--json", str(tmp_path / "out.json"))
    shown, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")
    assert shown.startswith(f"{server.url}: ")
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["url"] == server.url
    for level in document["levels"]:
        assert level["errors"] == {}
        assert min(level["ms"]["outside"]["values"]) > 0
    assert server.token not in (tmp_path / "out.json").read_text()
    assert _disks(server) == []


def test_interrupted_it_deletes_its_disk(server: Running) -> None:
    process = _bench(server, "--in-flight", "2", "--calls", "1000000")
    while not _disks(server):
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGINT)
    shown, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert shown == ""
    assert errors == "fanout: interrupted; nothing is left running\n"
    assert _disks(server) == []
