"""Limits by cgroup v2 (`engine/limits.py`) with a real kernel that has its controllers: a guest's.

Few hosts give a test a delegated cgroup; the guest of a VM has all of them, and its root may do as it likes there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import fanout
from fanout.engine.base import Limits
from fanout.engine.check import Bench, completed
from fanout.engine.qemu.engine import QemuEngine
from tests.support.guests import ALL_CAPABILITIES, MIB, image_or_skip, qemu_cache

SCRIPT = """
import os, sys, time, types
from pathlib import Path
package = types.ModuleType("fanout")  # without what the rest of it needs
package.__path__ = ["/fanout"]
sys.modules["fanout"] = package
from fanout.engine import limits
from fanout.engine.base import Limits

def child(group, work):
    held, release = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(held, 1)
        try:
            work()
        finally:
            os._exit(0)
    group.add(pid)
    os.write(release, b"1")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def compute():
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass

def bomb():
    for _ in range(30):
        try:
            if os.fork() == 0:
                time.sleep(600)
        except OSError:
            return

parent = Path("/tmp/cgroup/parent")
parent.mkdir()
assert not limits.usable(parent), "nothing is handed down yet"
(parent / "cgroup.subtree_control").write_text("+memory +cpu +pids")
assert limits.usable(parent)
(parent / "fanout-999999-1").mkdir()  # a dead process's
groups = limits.Cgroups(parent)
assert not list(parent.glob("fanout-999999-*"))

group = groups.make(Limits(memory_bytes=24 << 20))
assert child(group, lambda: bytearray(100 << 20)) == -9
assert group.oom() and not group.pids_met()
assert group.usage()[1] <= 24 << 20

group = groups.make(Limits(cpus=0.5))
began = time.monotonic()
assert child(group, compute) == 0
assert time.monotonic() - began > 0.45, "half a core"
assert not group.oom()
assert 0.25 < group.usage()[0] < 1.5
group.remove()
assert not group.path.exists()

limits.PIDS_MAX = 20
group = groups.make(Limits())
assert child(group, bomb) == 0
assert group.pids_met()
group.remove()
assert group.path.exists(), "one with processes is left to the next"
(group.path / "cgroup.kill").write_text("1")
while "populated 1" in (group.path / "cgroup.events").read_text():
    time.sleep(0.01)
group.remove()
assert not group.path.exists()
print("held")
"""


def test_limits_hold_in_a_real_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image_or_skip()
    monkeypatch.setattr("fanout.engine.qemu.engine.CAPABILITY_MASK", ALL_CAPABILITIES)
    package = str(Path(fanout.__file__).parent)
    engine = QemuEngine(
        cache_dir=qemu_cache(), memory_bytes=256 * MIB, acceleration="tcg", pool=0, host_paths=[(package, "/fanout")]
    )
    try:
        script = 'mkdir /tmp/cgroup && mount -t cgroup2 none /tmp/cgroup && exec python3 -c "$0"'
        env, limits = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, Limits(timeout_s=600)
        outcome = completed(Bench(engine, tmp_path).run(["/bin/sh", "-c", script, SCRIPT], env=env, limits=limits))
    finally:
        engine.close()
    assert outcome.stdout == b"held\n"
