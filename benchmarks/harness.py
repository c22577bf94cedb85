"""What all benchmarks share: interleaved runs, percentiles, targets, the report and the facts of the machine.

Owns how numbers are taken and shown. Knows nothing of what is measured. Absolute times say little (other machines,
other neighbours); the report's point is its ratios, whose both sides ran in turn in one process.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

__all__ = ["Report", "Size", "Skip", "Stats", "Target", "Workload", "interleave", "machine", "timed"]

#: How much of a workload to run: all of it, under 20 s, or just enough to see that it runs.
Size = Literal["full", "quick", "smallest"]

#: Runs one side once and returns what it measured (milliseconds, mostly).
Side = Callable[[], Awaitable[float]]


class Skip(Exception):
    """A peer or a whole workload cannot run here; the message says why."""


class Workload(Protocol):
    """What a benchmark module offers. `ABOUT` is one line for the listing."""

    ABOUT: str

    async def run(self, report: Report, size: Size, place: Path) -> None:
        """Fill the report. `place` is an empty directory that is removed afterwards."""


@dataclass(frozen=True, slots=True)
class Stats:
    """What repeated runs of one thing gave."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Stats:
        """Keep a sample; at least one value."""
        if not values:
            raise ValueError("statistics of nothing")
        return cls(tuple(values))

    @property
    def p50(self) -> float:
        return statistics.median(self.values)

    @property
    def p99(self) -> float:
        return self.percentile(99)

    @property
    def best(self) -> float:
        return min(self.values)

    def percentile(self, percent: float) -> float:
        """Return the smallest value that at least `percent` of all are not above (nearest rank)."""
        rank = math.ceil(percent / 100 * len(self.values))
        return sorted(self.values)[max(rank, 1) - 1]


@dataclass(frozen=True, slots=True)
class Row:
    """One measured thing."""

    label: str
    unit: str
    stats: Stats


@dataclass(frozen=True, slots=True)
class Target:
    """A number that is to stay at or below (or, `at_least`, at or above) a limit. No limit: for information."""

    label: str
    value: float
    limit: float | None = None
    at_least: bool = False
    unit: str = "x"

    @property
    def met(self) -> bool | None:
        """Whether the limit holds; None without one."""
        if self.limit is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit


@dataclass(slots=True)
class Report:
    """What one workload found. `note` and `skip` keep what a reader must know."""

    name: str
    rows: list[Row] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, label: str, values: Sequence[float], unit: str = "ms") -> Stats:
        """Keep a sample under a label and return its statistics."""
        stats = Stats.of(values)
        self.rows.append(Row(label, unit, stats))
        return stats

    def ratio(self, label: str, ours: Stats, theirs: Stats, limit: float | None = None) -> None:
        """Keep the ratio of two medians; `limit` is the most it may be."""
        self.targets.append(Target(label, ours.p50 / theirs.p50, limit))

    def bound(
        self, label: str, value: float, limit: float | None = None, *, unit: str = "ms", at_least: bool = False
    ) -> None:
        """Keep one number with its limit."""
        self.targets.append(Target(label, value, limit, at_least, unit))

    def skip(self, what: str, why: object) -> None:
        """Say that a part did not run."""
        self.skipped.append(f"{what}: skipped, {why}")

    @property
    def met(self) -> bool:
        """Whether no target was missed."""
        return all(target.met is not False for target in self.targets)

    def text(self) -> str:
        """Render for a terminal."""
        lines = [f"== {self.name}"]
        width = max((len(row.label) for row in self.rows), default=0)
        for row in self.rows:
            s = row.stats
            lines.append(
                f"  {row.label:<{width}}  p50 {s.p50:10.2f} {row.unit}  p99 {s.p99:10.2f}  best {s.best:10.2f}"
                f"  n={len(s.values)}"
            )
        width = max((len(target.label) for target in self.targets), default=0)
        for t in self.targets:
            verdict = ""
            if t.limit is not None:
                verdict = f"  target {'>=' if t.at_least else '<='} {t.limit:g}: {'met' if t.met else 'MISSED'}"
            lines.append(f"  {t.label:<{width}}  {t.value:10.2f} {t.unit}{verdict}")
        lines += [f"  {line}" for line in (*self.notes, *self.skipped)]
        return "\n".join(lines)

    def values(self) -> dict[str, Any]:
        """Return what `--json` writes, samples included."""
        return {
            "name": self.name,
            "met": self.met,
            "rows": [
                {"label": r.label, "unit": r.unit, "p50": r.stats.p50, "p99": r.stats.p99, "values": r.stats.values}
                for r in self.rows
            ],
            "targets": [
                {"label": t.label, "value": t.value, "unit": t.unit, "limit": t.limit, "at_least": t.at_least,
                 "met": t.met}
                for t in self.targets
            ],
            "skipped": self.skipped,
            "notes": self.notes,
        }  # fmt: skip


async def interleave(sides: Mapping[str, Side], rounds: int, *, warm_up: int = 1) -> dict[str, list[float]]:
    """Run the sides in turn (A B A B), `rounds` times after `warm_up` unmeasured ones.

    Whatever slows the machine for a while slows all sides alike.
    """
    found: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(-warm_up, rounds):
        for name, side in sides.items():
            value = await side()
            if turn >= 0:
                found[name].append(value)
    return found


def timed(function: Callable[[], object]) -> Side:
    """Make a side of a blocking function: its milliseconds."""

    async def side() -> float:
        started = time.perf_counter()
        function()
        return (time.perf_counter() - started) * 1e3

    return side


def machine() -> dict[str, Any]:
    """Return what a reader of numbers wants to know about where they were taken."""
    memory = 0
    model = ""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        model = next((line.partition(":")[2].strip() for line in cpuinfo.splitlines() if "model name" in line), "")
    except OSError:
        pass
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": model,
        "memory_bytes": memory,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "root": os.geteuid() == 0,
        "load": os.getloadavg()[0],
    }


def write_json(path: Path, size: Size, reports: Sequence[Report]) -> None:
    """Write reports and machine facts for programs."""
    document = {"machine": machine(), "size": size, "workloads": [report.values() for report in reports]}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def complain(text: str) -> None:
    """Say something to whoever sits in front of it, apart from the report."""
    print(text, file=sys.stderr, flush=True)
