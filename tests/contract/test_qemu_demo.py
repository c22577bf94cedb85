"""The README's demo in VMs, as it says it: every test file of a real project, each in a machine with its own kernel.

Needs the package index, through pip. It takes some 150 s of computing without KVM, whatever else runs.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.guests import with_image

README = Path(__file__).parents[2] / "README.md"

#: The exit code for an index that does not answer.
UNAVAILABLE = 69


def demo_words() -> list[str]:
    """Return the README's words for it, without the program."""
    (line,) = re.findall(r"^fanout (--engine qemu demo)\b", README.read_text(), re.M)
    return shlex.split(line)


def test_the_readme_s_demo_runs_whole_in_vms(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "FANOUT_"))}
    environ = {
        **kept,
        "FANOUT_STORE": f"file://{tmp_path}/store",
        "FANOUT_CACHE_DIR": str(with_image(tmp_path / "cache")),
        "USER": "tester",
    }
    # A busy machine is not a failure, and how long one after another takes is not the question here.
    words = [sys.executable, "-m", "fanout", *demo_words(), "--no-compare", "--timeout", "1500", "--json"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True)
    if done.returncode == UNAVAILABLE and "cannot fetch" in done.stderr:
        pytest.skip(f"no package index: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["project"] == "click 8.1.8"
    assert result["execs"] == result["commits"] == 20
    assert [run["engine"] for run in result["runs"]] == ["qemu"] * 20
    assert all(re.search(r"\d+ passed", run["result"]) for run in result["runs"])
