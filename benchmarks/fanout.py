"""fanout: 1, 10 and 50 execs started in one instant on one disk: a no-op, one line written, and a real test file.

The peer starts as many bare bwraps at once, each over its own upper layer, and waits for all. It neither collects
what they wrote nor makes it durable; fanout's time has both in it.
"""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks import peers, trees
from benchmarks.harness import Report, Side, Size, interleave
from fanout import Disk, Fanout, Run

__all__ = ["ABOUT", "LIMIT", "run"]

ABOUT = "1, 10 and 50 execs at once, a no-op and a test file, beside as many bare bwraps"

#: Most that all calls of one instant may take together, for each millisecond of as many bare bwraps.
LIMIT = 1.4

_FILES = {"full": 20_000, "quick": 5_000, "smallest": 200}
_WIDTHS = {"full": (1, 10, 50), "quick": (1, 10, 50), "smallest": (3,)}
_ROUNDS = {"full": 15, "quick": 4, "smallest": 1}

_TEST = '''"""A test file as agents run them: some parsing, some dictionaries, some text."""
import json
import unittest


class Words(unittest.TestCase):
    def setUp(self):
        self.lines = [f"{n} {n * n} {n % 7}" for n in range(3000)]

    def test_split(self):
        rows = [line.split() for line in self.lines]
        self.assertEqual(sum(int(row[1]) for row in rows), sum(n * n for n in range(3000)))

    def test_json(self):
        text = json.dumps({line: len(line) for line in self.lines})
        self.assertEqual(len(json.loads(text)), 3000)

    def test_groups(self):
        groups = {}
        for line in self.lines:
            groups.setdefault(line[-1], []).append(line)
        self.assertEqual(sorted(groups), list("0123456"))
'''

_COMMANDS = {
    "no-op": "true {}",
    "one line written": "echo ok > results/{}.txt",
    "test file": "python3 -m unittest -q tests.test_words > results/{}.txt 2>&1",
}


async def run(report: Report, size: Size, place: Path) -> None:
    widths = _WIDTHS[size]
    async with trees.connected(place, max_in_flight=max(widths)) as fo:
        # First what both sides need, so that it is in the base which the peers mount too.
        first = {"tests/test_words.py": _TEST.encode(), "results/about.txt": b"one file an exec\n"}
        disk = await trees.filled(fo, _FILES[size], 400, first=first)
        await fo.exec("true", disks={"work": disk})
        raw = peers.RawBwrap(trees.base_of(place), place / "raw")
        for what, command in _COMMANDS.items():
            for width in widths:
                rounds = _ROUNDS[size] * (5 if width == 1 else 1)  # one call is over soon, and as soon disturbed
                await _compare(report, fo, disk, raw, what, command, width, rounds)


async def _compare(
    report: Report, fo: Fanout, disk: Disk, raw: peers.RawBwrap, what: str, command: str, width: int, rounds: int
) -> None:
    commands = [command.format(number) for number in range(width)]
    runs: list[Run] = []

    async def ours() -> float:
        started = time.perf_counter()
        done = await fo.map(command, range(width), disks={"work": disk.mount(conditional=True)})
        took = (time.perf_counter() - started) * 1e3
        runs.extend(run.raise_for_status() for run in done)
        return took

    async def theirs() -> float:
        started = time.perf_counter()
        for process in [raw.start(each) for each in commands]:
            peers.finish(process)
        return (time.perf_counter() - started) * 1e3

    sides: dict[str, Side] = {"fanout": ours, "raw bwrap": theirs}
    found = await interleave(sides, rounds)
    label = f"{width} x {what}"
    for part in ("queue_ms", "execute_ms", "commit_ms", "total_ms"):
        report.add(f"{label}: {part} of a call", [getattr(run.timing, part) for run in runs[width:]])
    mine = report.add(f"{label}: fanout, all", found["fanout"])
    other = report.add(f"{label}: raw bwrap, all", found["raw bwrap"])
    report.ratio(f"{label}: fanout / raw bwrap", mine, other, LIMIT)
