"""Limits: what is written to a cgroup, which cgroup is ours, and what rlimits do to a command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fanout.engine import limits
from fanout.engine.base import Limits, Spec
from fanout.engine.bubblewrap import BubblewrapEngine
from fanout.engine.check import Bench, completed
from fanout.errors import EngineUnavailable

FILES = ("cgroup.procs", "memory.max", "memory.oom.group", "memory.swap.max", "cpu.max", "pids.max")


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """Return what looks like a delegated cgroup: mount/app.service, with us in mount/app.service/main."""
    service = tmp_path / "mount" / "app.service"
    (service / "main").mkdir(parents=True)
    (service / "cgroup.subtree_control").write_text("cpu io memory pids\n")
    try:
        os.setxattr(service, "user.delegate", b"1")
    except OSError as error:
        pytest.skip(f"no user attributes here: {error}")
    return service


def test_settings_of_a_cgroup() -> None:
    assert limits.settings(Limits()) == {"pids.max": "4096"}
    assert limits.settings(Limits(memory_bytes=64 << 20, cpus=1.5)) == {
        "pids.max": "4096",
        "memory.max": "67108864",
        "memory.swap.max": "0",
        "memory.oom.group": "1",
        "cpu.max": "150000 100000",
    }
    assert limits.settings(Limits(cpus=0.001))["cpu.max"] == "1000 100000"  # the kernel's minimum


def test_the_parent_of_our_cgroup_is_used_where_it_was_delegated(parent: Path) -> None:
    own = "1:name=systemd:/other\n0::/app.service/main\n"
    assert limits.delegated_parent(own, parent.parent) == parent
    assert limits.delegated_parent("0::/\n", parent.parent) is None
    assert limits.delegated_parent("4:memory:/app.service/main\n", parent.parent) is None
    (parent / "cgroup.subtree_control").write_text("cpu pids\n")
    assert limits.delegated_parent(own, parent.parent) is None


def test_a_cgroup_of_somebody_else_is_left_alone(parent: Path) -> None:
    os.setxattr(parent, "user.delegate", b"0")
    assert limits.delegated_parent("0::/app.service/main\n", parent.parent) is None


def test_an_explicit_cgroup_must_be_usable(tmp_path: Path) -> None:
    engine = BubblewrapEngine(cgroup=tmp_path)
    try:
        with pytest.raises(EngineUnavailable, match=r"hands down no memory, cpu and pids"):
            engine.start(Spec(["/bin/true"]))
    finally:
        engine.close()


def kernel_made(path: Path, *, without: str = "") -> None:
    for name in FILES:
        if name != without:
            (path / name).touch()


def test_a_cgroup_is_made_used_and_read(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Path.mkdir
    monkeypatch.setattr(Path, "mkdir", lambda path: (make(path), kernel_made(path, without="memory.swap.max"))[0])
    group = limits.Cgroups(parent).make(Limits(memory_bytes=32 << 20))
    assert group.path.parent == parent
    assert (group.path / "memory.max").read_text() == "33554432"
    group.add(42)
    assert (group.path / "cgroup.procs").read_text() == "42"
    assert not group.oom()
    assert group.usage() is None
    (group.path / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 1\noom_kill 1\n")
    (group.path / "cpu.stat").write_text("usage_usec 1500000\nuser_usec 1\n")
    (group.path / "memory.peak").write_text("4096\n")
    assert group.oom()
    assert group.usage() == (1.5, 4096)


def test_a_refused_setting_is_an_error(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Path.mkdir
    monkeypatch.setattr(Path, "mkdir", lambda path: (make(path), kernel_made(path, without="memory.max"))[0])
    with pytest.raises(FileNotFoundError):
        limits.Cgroups(parent).make(Limits(memory_bytes=32 << 20))


def test_cgroups_of_dead_processes_are_removed(parent: Path) -> None:
    for pid in (os.getpid(), 2**22 + 1):
        (parent / f"fanout-{pid}-0").mkdir()
    limits.Cgroups(parent)
    assert [path.name for path in parent.glob("fanout-*")] == [f"fanout-{os.getpid()}-0"]


def test_cpus_are_dealt_out_in_turn() -> None:
    assert [limits.chosen_cpus([0, 1, 2, 3], 1, turn) for turn in range(5)] == [[0], [1], [2], [3], [0]]
    assert limits.chosen_cpus([0, 1, 2, 3], 2.5, 1) == [0, 1, 3]
    assert limits.chosen_cpus([5], 8, 3) == [5]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(BubblewrapEngine(), tmp_path)


def test_rlimits_reach_the_command(bench: Bench) -> None:
    wanted = Limits(memory_bytes=256 << 20, cpus=1)
    outcome = completed(bench.run("ulimit -c; ulimit -v; nproc", limits=wanted))
    assert outcome.stdout.split() == [b"0", b"262144", b"1"]
    files = int(completed(bench.run("ulimit -n")).stdout)
    assert 256 <= files <= limits.OPEN_FILES
    bench.engine.close()


def test_memory_over_the_limit_fails_in_the_command(bench: Bench) -> None:
    outcome = bench.run("head -c 200000000 /dev/zero | tail -c 150000000 | wc -c", limits=Limits(memory_bytes=64 << 20))
    assert outcome.exit.status in ("completed", "oom")
    assert outcome.stdout.strip() != b"150000000"
    bench.engine.close()


def test_scratch_space_is_bounded_by_the_memory_limit(bench: Bench) -> None:
    outcome = bench.run("head -c 40000000 /dev/zero > /tmp/f", limits=Limits(memory_bytes=32 << 20))
    assert outcome.exit.exit_code != 0
    assert b"No space left" in outcome.stderr
    bench.engine.close()


def test_cpu_time_of_all_processes_is_counted(bench: Bench) -> None:
    spin = "i=0; while [ $i -lt 60000 ]; do i=$((i+1)); done"
    outcome = completed(bench.run(f"({spin}) & ({spin}) & wait"))
    assert 0.02 < outcome.exit.cpu_s < 10
    bench.engine.close()


USAGE = """
import ctypes, json
from fanout.engine.base import Spec
from fanout.engine.bubblewrap import BubblewrapEngine

engine = BubblewrapEngine()
program = "x = bytearray(60_000_000); x[::4096] = b'1' * len(x[::4096]); sum(range(3_000_000))"
ended = engine.start(Spec(["/usr/bin/python3", "-c", program])).wait(lambda *_: None)
reaper = ctypes.c_int()
ctypes.CDLL(None).prctl(37, ctypes.byref(reaper), 0, 0, 0)
engine.close()
print(json.dumps([ended.exit_code, ended.cpu_s, ended.max_rss_bytes, reaper.value]))
"""


def test_usage_is_exact_and_the_program_is_no_reaper() -> None:
    done = subprocess.run([sys.executable, "-c", USAGE], capture_output=True, text=True, check=True)
    code, cpu_s, rss, reaper = json.loads(done.stdout)
    assert (code, reaper) == (0, 0)
    assert 0.01 < cpu_s < 10
    assert 50_000_000 < rss < 500_000_000


def test_the_memory_that_is_left_is_that_of_every_cgroup_above(tmp_path: Path) -> None:
    for name, most, used in (("", "9000", "0"), ("a", "max", "5"), ("a/b", "1000", "400"), ("a/b/c", "500", "600")):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "memory.max").write_text(f"{most}\n")
        (tmp_path / name / "memory.current").write_text(f"{used}\n")
    assert limits.memory_left("12:cpu:/x\n0::/a/b\n", tmp_path)[:2] == [600, 9000]
    assert limits.memory_left("0::/a/b/c\n", tmp_path)[0] == 0
    assert limits.memory_left("1:name=x:/\n", tmp_path / "nowhere") == []
