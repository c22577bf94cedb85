"""A process that holds a checkout is frozen past its lease: others go on, and it finds out without harm.

Real processes and real signals; the lease is two thirds of a second. What a break means without processes is in
tests/unit/test_locks.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fanout.config import Tuning
from fanout.disk.catalogue import Catalogue
from fanout.disk.disk import Disk, Point
from fanout.runtime import system
from fanout.store.local import LocalStore
from tests import support
from tests.support.disks import get, put

SCRIPT = Path(support.__file__).parent / "frozen.py"
LEASE_S = 0.66


def start(top: Path, what: str) -> subprocess.Popen[str]:
    command = [sys.executable, SCRIPT, f"file://{top}/store", top / f"cache-{what}", str(LEASE_S), what]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("FANOUT_")}
    environ["PYTHONPATH"] = str(Path(support.__file__).parents[2])
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    disk = Catalogue(LocalStore(tmp_path / "store", fsync=False), system, Tuning()).create("ws")
    put(disk, "src/a", b"before")
    return disk


def test_frozen_past_its_lease(tmp_path: Path, disk: Disk) -> None:
    holder = start(tmp_path, "hold")
    try:
        assert holder.stdout is not None
        exec_id = holder.stdout.readline().strip()
        (lock,) = disk.branch().refresh().locks.values()
        assert lock.owner == exec_id
        os.kill(holder.pid, signal.SIGSTOP)
        taker = start(tmp_path, "take")
        out, _ = taker.communicate(timeout=60)
        taken_by, conflict, waited_ms = out.split()
        assert conflict == "None"
        assert float(waited_ms) >= 0
        assert get(disk, "src/a") == b"theirs\n"
        seq = disk.branch().refresh().seq
        os.kill(holder.pid, signal.SIGCONT)
        said, _ = holder.communicate(timeout=60)
    finally:
        holder.kill()
        holder.wait()
    assert said.startswith("lease_lost: ")
    assert f"rescue/{exec_id}" in said
    state = disk.branch().refresh()
    assert state.seq == seq, "it wrote nothing to the branch"
    assert state.locks == {}
    assert get(disk, "src/a") == b"theirs\n"
    rescue = disk.branch(f"rescue/{exec_id}")
    assert get(disk, "src/a", branch=rescue.name) == get(disk, "src/extra", branch=rescue.name) == b"mine\n"
    assert [e.commits[0].exec_id for e in disk.branch().history(seq - 2, seq)] == [taken_by, taken_by]
    disk.merge(disk.branch(), Point(rescue), "theirs")
    assert get(disk, "src/a") == b"mine\n"


def test_frozen_but_not_broken_it_commits(tmp_path: Path, disk: Disk) -> None:
    """Nobody wanted the lock meanwhile: a clock that ran out takes nothing away."""
    holder = start(tmp_path, "hold")
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        os.kill(holder.pid, signal.SIGSTOP)
        system.sleep(2 * LEASE_S)
        os.kill(holder.pid, signal.SIGCONT)
        said, _ = holder.communicate(timeout=60)
    finally:
        holder.kill()
        holder.wait()
    assert said.startswith("committed "), said
    assert get(disk, "src/a") == b"mine\n"
    assert disk.branch().refresh().locks == {}


def test_killed_its_lock_goes_when_the_lease_has(tmp_path: Path, disk: Disk) -> None:
    holder = start(tmp_path, "hold")
    assert holder.stdout is not None
    holder.stdout.readline()
    holder.kill()
    holder.communicate()
    assert len(disk.branch().refresh().locks) == 1
    taker = start(tmp_path, "take")
    out, _ = taker.communicate(timeout=60)
    assert out.split()[1] == "None"
    assert get(disk, "src/a") == b"theirs\n"
    assert disk.branch().refresh().locks == {}
