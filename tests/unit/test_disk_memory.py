"""Memory of big commits: the bound that docs/LIMITS.md may quote."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import resource, sys
from fanout.config import Tuning
from fanout.disk.proposal import Proposal
from fanout.disk.merge import Intent, Policy
from fanout.format.tree import FILE, Node
from fanout.runtime import system
from fanout.store.local import LocalStore
from tests.support.disks import cold, new_disk, reader

store = LocalStore(sys.argv[1], fsync=False)
disk = new_disk(store, system, Tuning())
packer = disk.packer()
intents = []
for n in range(100_000):
    data = b"file %d " % n * 10 + system.token_bytes(200)
    refs = packer.add_content(len(data), reader(data))
    intents.append(Intent(b"d%d/file-%d" % (n % 100, n), None, Node(FILE, 0o644, n, len(data), refs)))
disk.branch().commit(Proposal(intents, Policy.LAST_WINS, 0, packer.finish().blobs))
disk.close()
state = cold(disk, store).branch().refresh()
assert state.folded_seq == 1
assert sum(1 for _ in state.scan()) == 100_100
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""


@pytest.mark.soak
def test_committing_and_folding_100_000_files_stays_below_300_mib(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 300
