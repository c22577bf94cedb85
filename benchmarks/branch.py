"""branch: making branches and checkpoints of 1,000 and of 100,000 files. Their cost must not depend on the size."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from benchmarks import trees
from benchmarks.harness import Report, Side, Size, Stats, interleave
from fanout import Settings
from fanout.local import LocalFanout
from fanout.store.open import open_store
from fanout.store.wrap import Metered

__all__ = ["ABOUT", "LIMIT", "run"]

ABOUT = "a branch and a checkpoint of 1,000 and of 100,000 files"

#: Most that one of the large disk may take, for each millisecond of the small one's.
LIMIT = 1.5

_SIZES = {"full": (1_000, 100_000), "quick": (1_000, 20_000), "smallest": (20, 200)}
_ROUNDS = {"full": 60, "quick": 30, "smallest": 2}


async def run(report: Report, size: Size, place: Path) -> None:
    settings = Settings(store=f"file://{place}/store", cache_dir=place / "cache")
    metered = Metered(open_store(settings.store))
    requests: dict[str, list[float]] = {}

    def counted(name: str, what: str, call: Callable[[str], Awaitable[object]]) -> Side:
        numbers = iter(range(1 << 20))
        requests[name] = []

        async def side() -> float:
            before = metered.usage()
            started = time.perf_counter()
            await call(f"{what}-{next(numbers)}")
            took = (time.perf_counter() - started) * 1e3
            requests[name].append((metered.usage() - before).total)
            return took

        return side

    async with LocalFanout(settings, store=metered) as fo:
        sides: dict[str, Side] = {}
        for files in _SIZES[size]:
            disk = await trees.filled(fo, files, 100, f"ws{files}")
            for what, call in (("branch", disk.branch), ("checkpoint", disk.checkpoint)):
                sides[f"{what} of {files} files"] = counted(f"{what} of {files} files", what, call)
        found = await interleave(sides, _ROUNDS[size])
    metered.close()
    stats = {name: report.add(name, values) for name, values in found.items()}
    small, large = _SIZES[size]
    for what in ("branch", "checkpoint"):
        mine, other = stats[f"{what} of {large} files"], stats[f"{what} of {small} files"]
        report.ratio(f"{what}: {large} / {small} files", mine, other, LIMIT)
        few = Stats.of(requests[f"{what} of {small} files"])
        many = Stats.of(requests[f"{what} of {large} files"])
        report.bound(f"{what}: requests, {large} files", many.p50, few.p50, unit="requests")
