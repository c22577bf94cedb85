"""What a killed spawner left half built is found by its mark, and nothing else is."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from fanout.engine import orphans


@pytest.fixture
def bwrap(tmp_path: Path) -> str:
    """A program of bwrap's name that only waits."""
    sleep = shutil.which("sleep")
    if sleep is None:
        pytest.skip("there is no sleep here")
    shutil.copy(sleep, tmp_path / "bwrap")
    return str(tmp_path / "bwrap")


def dead_owner() -> str:
    """The mark of a process that has ended."""
    with subprocess.Popen(["sleep", "60"]) as process:
        started = orphans._start_time(process.pid)
        process.kill()
    return f"{process.pid}:{started}"


def outcome(program: str, value: str | None) -> int | None:
    """Run `program` with a mark, sweep, and say how it ended (None: it lives on, and is ended here)."""
    env = {} if value is None else {orphans.VARIABLE: value}
    with subprocess.Popen([program, "60"], env=env) as process:
        orphans.sweep()
        try:
            return process.wait(0.3)
        except subprocess.TimeoutExpired:
            process.kill()
            return None


def test_of_a_dead_spawner(bwrap: str) -> None:
    assert outcome(bwrap, dead_owner()) == -signal.SIGKILL


def test_a_spawner_of_the_same_pid_is_another(bwrap: str) -> None:
    assert outcome(bwrap, f"{os.getpid()}:1") == -signal.SIGKILL


def test_what_is_not_an_orphan_lives(bwrap: str) -> None:
    assert outcome(bwrap, orphans.mark()[orphans.VARIABLE]) is None
    assert outcome(bwrap, None) is None
    assert outcome(bwrap, "nonsense") is None
    assert outcome(shutil.which("sleep") or "", dead_owner()) is None
