"""CASE 16: a process that is killed at any request of an upload, a commit or a fold leaves a whole disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fanout.store.local import LocalStore
from tests import support
from tests.support.disks import TINY, check_refs, check_tree, cold, contents, get, new_disk, put

SCRIPT = Path(support.__file__).parent / "killed.py"
MANY = {b"many/%d" % n: b"%d" % n * 50 for n in range(6)}


def run(root: Path, disk_id: str, k: int, when: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(root), disk_id, "kill", str(k), when],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[2])},
        timeout=60,
        check=False,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode, done.stdout.split()


def killed_at(root: Path, k: int, when: str) -> bool:
    """Let a process die at request k and look at what it left; returns whether it came that far."""
    store = LocalStore(root, fsync=False)
    disk = new_disk(store, tuning=TINY)
    put(disk, "old", b"there before")
    disk.close()
    code, said = run(root, disk.id, k, when)
    fresh = cold(disk, store)
    state = fresh.branch().refresh()
    check_tree(state)
    check_refs(store, fresh, state)
    found = contents(fresh, state)
    steps = [{b"old": b"there before"}]
    steps += [{**steps[-1], b"small": b"1"}]
    steps += [{**steps[-1], **MANY}]
    steps += [{**steps[-1], b"last": b"2" * 100}]
    acknowledged = [name for name in said if name != "end"]
    assert found in steps, "half a commit"
    assert steps.index(found) in (len(acknowledged), len(acknowledged) + 1)
    put(fresh, "next", b"n")
    fresh.branch().fold()
    fresh.close()
    assert contents(fresh, cold(fresh, store).branch().refresh()) == {**found, b"next": b"n"}
    assert get(cold(fresh, store), "old") == b"there before"
    store.close()
    return code != 0


def every(tmp_path: Path, points: list[tuple[int, str]]) -> None:
    with ThreadPoolExecutor(2) as pool:
        died = list(pool.map(lambda p: killed_at(tmp_path / f"{p[0]}-{p[1]}", *p), points))
    assert any(died)


def test_killed_at_chosen_requests(tmp_path: Path) -> None:
    every(tmp_path, [(k, ("before", "after")[k % 2]) for k in range(3, 33, 2)])


@pytest.mark.soak
def test_killed_at_every_request(tmp_path: Path) -> None:
    every(tmp_path, [(k, when) for k in range(1, 70) for when in ("before", "after")])


def test_the_process_lives_through_it_when_it_is_not_killed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, fsync=False)
    disk = new_disk(store, tuning=TINY)
    code, said = run(tmp_path, disk.id, 10**6, "before")
    assert (code, said) == (0, ["small", "many", "last", "end"])
