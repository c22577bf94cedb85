"""memory: what an embedding process holds at most while it runs one exec on a disk of 100,000 files.

Measured in a child process of its own, by the kernel: cold, when the tree has to be fetched and written, and warm.
VmHWM, not getrusage: the latter's peak is never below that of the process that started the child.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks import trees
from benchmarks.harness import Report, Size

__all__ = ["ABOUT", "LIMIT_MB", "run"]

ABOUT = "peak resident memory of the embedding process, one exec on 100,000 files"

#: Most that the embedding process may hold, in MB.
LIMIT_MB = 300.0

_FILES = {"full": 100_000, "quick": 20_000, "smallest": 200}

_PEAK = """
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmHWM"))
"""
_CHILD = (
    _PEAK
    + """
import sys
from fanout.sync import connect
with connect(store=sys.argv[1], cache_dir=sys.argv[2]) as fo:
    run = fo.exec("true", disks={"work": fo.disks.get("ws")}).raise_for_status()
print(peak(), int(run.warm))
"""
)
_BARE = _PEAK + "import fanout.sync, fanout.local; print(peak(), 0)"


async def run(report: Report, size: Size, place: Path) -> None:
    async with trees.connected(place) as fo:
        await trees.filled(fo, _FILES[size], 1000)
    arguments = [f"file://{place}/store", str(place / "cache")]
    report.add("a Python that has imported fanout", [_peak_mb(_BARE, [])[0]], "MB")
    for what in ("cold", "warm"):
        peak, warm = _peak_mb(_CHILD, arguments)
        if warm != (what == "warm"):
            raise RuntimeError(f"the {what} exec was not {what}")
        report.add(f"{what}: one exec on {_FILES[size]} files", [peak], "MB")
        report.bound(f"{what}: peak resident memory", peak, LIMIT_MB, unit="MB")


def _peak_mb(program: str, arguments: list[str]) -> tuple[float, bool]:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False, timeout=300
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip()[-500:])
    peak, warm = done.stdout.split()
    return float(peak), warm == "1"
