"""A process with VMs is killed, or what holds its VMs is: nothing of them lives on, and the next one cleans up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fanout.engine.base import Spec
from fanout.engine.check import Bench, completed
from fanout.engine.owned import OwnedDirectory
from fanout.engine.qemu.engine import DIRECTORY, QemuEngine
from tests.support.guests import MIB, image_or_skip, qemu_cache

ENV = {"PATH": "/usr/bin:/bin"}

#: Says its processes once a VM runs a command, one is ready and one boots; then it waits to be killed.
CHILD = """
import sys, time
from pathlib import Path
from fanout.engine.base import Spec
from fanout.engine.check import Bench
from fanout.engine.qemu.engine import QemuEngine

engine = QemuEngine(cache_dir=Path(sys.argv[1]), memory_bytes=256 << 20, acceleration="tcg", pool=2)
bench = Bench(engine, Path(sys.argv[2]))
mount = bench.writable(bench.directory({"f": "1"}))
running = engine.start(Spec(["/bin/sleep", "600"], [mount], cwd="/mnt/work"))
while engine.counts()["ready"] < 1 or engine.counts()["booting"] > 0 and sys.argv[3] == "ready":
    time.sleep(0.01)
print(engine._host.vms.spawner.pid, engine._host._directory.path, *(p for vm in engine.vms() for p in vm.pids()))
sys.stdout.flush()
time.sleep(600)
"""


def until(holds: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def gone(pids: list[int]) -> bool:
    return not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.parametrize("moment", ["ready", "booting"])
def test_a_killed_process_leaves_no_vm_no_mount_and_at_last_no_file(moment: str, tmp_path: Path) -> None:
    image_or_skip()
    arguments = [sys.executable, "-c", CHILD, str(qemu_cache()), str(tmp_path), moment]
    child = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert child.stdout is not None
    words = child.stdout.readline().split()
    assert len(words) >= 6, "two VMs of two processes"
    place, pids = Path(words[1]), [int(words[0]), *map(int, words[2:])]
    assert not gone(pids[:1])
    child.kill()
    child.wait()
    child.stdout.close()
    until(lambda: gone(pids), "its VMs live on")
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()
    OwnedDirectory(DIRECTORY).close()
    assert not place.exists()


def test_the_killed_spawner_s_vms_end_and_the_next_command_gets_another(tmp_path: Path) -> None:
    image_or_skip()
    engine = QemuEngine(cache_dir=qemu_cache(), memory_bytes=256 * MIB, acceleration="tcg", pool=1)
    try:
        bench = Bench(engine, tmp_path)
        running = engine.start(Spec(["/bin/sleep", "600"], env=ENV))
        until(lambda: engine.counts()["ready"] == 1, "the pool was not filled")
        pids = [pid for vm in engine.vms() for pid in vm.pids()]
        assert engine._host is not None
        os.kill(engine._host.vms.spawner.pid, signal.SIGKILL)
        assert running.wait(lambda *_: None).status == "killed"
        completed(bench.run("true", env=ENV))
        until(lambda: gone(pids), "VMs outlive their spawner")
    finally:
        engine.close()


def test_a_forked_child_leaves_its_parent_s_vms_alone(tmp_path: Path) -> None:
    image_or_skip()
    engine = QemuEngine(cache_dir=qemu_cache(), memory_bytes=256 * MIB, acceleration="tcg", pool=1)
    try:
        bench = Bench(engine, tmp_path)
        completed(bench.run("true", env=ENV))
        until(lambda: engine.counts()["ready"] == 1, "the pool was not filled")
        pid = os.fork()
        if pid == 0:
            engine.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert completed(bench.run("true", env=ENV)).exit.warm
    finally:
        engine.close()
