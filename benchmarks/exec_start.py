"""exec_start: how long `true` takes on a warm disk of 20,000 files, from call to result."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks import peers, trees
from benchmarks.harness import Report, Side, Size, Skip, interleave, timed
from fanout.model import Timing

__all__ = ["ABOUT", "LIMIT", "run"]

ABOUT = "`true` on a warm 20,000-file disk, beside bare bwrap and a container"

#: Most that an exec may take, from call to result, for each millisecond of bare bwrap.
LIMIT = 1.6

_FILES = {"full": 20_000, "quick": 20_000, "smallest": 200}
_ROUNDS = {"full": 200, "quick": 60, "smallest": 3}
#: A container takes long and its time is stable: a few rounds are enough.
_CONTAINER_ROUNDS = {"full": 20, "quick": 5, "smallest": 1}


async def run(report: Report, size: Size, place: Path) -> None:
    async with trees.connected(place) as fo:
        disk = await trees.filled(fo, _FILES[size], 400)
        timings: list[Timing] = []

        async def ours() -> float:
            started = time.perf_counter()
            run = await fo.exec("true", disks={"work": disk})
            took = (time.perf_counter() - started) * 1e3
            timings.append(run.raise_for_status().timing)
            return took

        report.add("cold: the first exec on this host", [await ours()])
        lower = trees.base_of(place)
        raw = peers.RawBwrap(lower, place / "raw")
        sides: dict[str, Side] = {"fanout": ours, "raw bwrap": timed(lambda: raw.run("true"))}
        timings.clear()
        found = await interleave(sides, _ROUNDS[size], warm_up=3)
        for part in ("wait_ms", "mount_ms", "start_ms", "execute_ms", "commit_ms", "total_ms"):
            report.add(f"  of it {part}", [getattr(timing, part) for timing in timings[3:]])
        mine = report.add("fanout exec", found["fanout"])
        theirs = report.add("raw bwrap", found["raw bwrap"])
        report.ratio("fanout / raw bwrap", mine, theirs, LIMIT)
        try:
            runtime = peers.Containers()
        except Skip as reason:
            report.skip("container", reason)
            return
        sides = {"fanout": ours, "container": timed(lambda: runtime.run(lower, "true"))}
        found = await interleave(sides, _CONTAINER_ROUNDS[size])
        container = report.add(f"{runtime.name} run", found["container"])
        report.ratio(f"fanout / {runtime.name} run", report.add("fanout exec beside it", found["fanout"]), container)
