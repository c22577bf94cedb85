"""kill -9 in the middle of a cache fill (base and delta), an eviction, an upload, a download, a fold: the next process
works, half-built trees are never used, what was left is removed. Real processes, at counted system calls."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests import support

SCRIPT = Path(support.__file__).parent / "killed_host.py"
#: The actions, and about how many changes each makes.
CHANGES = {"base": 165, "delta": 105, "evict": 80, "upload": 58, "download": 130, "fold": 58}


def kill(tmp_path: Path, action: str, stride: int, offset: int) -> int:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), action, str(stride), str(offset)],
        capture_output=True, text=True, timeout=500, check=False,
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[2])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("action", CHANGES)
def test_killed_at_some_changes(tmp_path: Path, action: str) -> None:
    stride = CHANGES[action] // 7
    offset = 1 + random.SystemRandom().randrange(stride)
    print("offset", offset)
    assert kill(tmp_path, action, stride, offset) >= 4


@pytest.mark.soak
@pytest.mark.parametrize("action", CHANGES)
def test_killed_at_every_change(tmp_path: Path, action: str) -> None:
    assert kill(tmp_path, action, 1, 1) >= 4
