"""remote_exec: 1, 10 and 50 no-op execs at once through a server, over HTTP, and the same from this process.

The server runs in a process of its own on loopback, with a store, a cache and an engine like those of the embedded
connection. What is compared is each call as its caller sees it: the round trip, less what the same call takes embedded.
"""

from __future__ import annotations

import time
from pathlib import Path

import anyio

import fanout
from benchmarks import servers, trees
from benchmarks.harness import Report, Side, Size, Stats, interleave

__all__ = ["ABOUT", "LIMIT_MS", "run"]

ABOUT = "1, 10 and 50 no-op execs at once over HTTP, beside the same embedded"

#: Most that a call may take over HTTP beyond the same call embedded, in ms (the difference of the medians).
LIMIT_MS = 5.0

_FILES = {"full": 20_000, "quick": 2_000, "smallest": 50}
_WIDTHS = {"full": (1, 10, 50), "quick": (1, 10, 50), "smallest": (2,)}
#: Calls at each width, about.
_CALLS = {"full": 400, "quick": 100, "smallest": 2}
_ENGINE = "bubblewrap"
_PARTS = ("queue_ms", "execute_ms")


async def run(report: Report, size: Size, place: Path) -> None:
    most = max(_WIDTHS[size])
    here, there = place / "embedded", place / "server"
    with servers.fanout_server(there, "--max-in-flight", str(most), options=("--engine", _ENGINE)) as server:
        async with (
            trees.connected(here, max_in_flight=most, engine=_ENGINE) as embedded,
            fanout.connect(server.url, api_key=server.token) as remote,
        ):
            await trees.filled(embedded, _FILES[size], 400)
            await _filled(remote, place / "tree", _FILES[size])
            for width in _WIDTHS[size]:
                await _compare(report, embedded, remote, width, max(_CALLS[size] // width, 1))


async def _filled(remote: fanout.Fanout, tree: Path, files: int) -> None:
    disk = await remote.disks.create("ws")
    await disk.upload(trees.make_tree(tree, files, 400))


async def _compare(report: Report, embedded: fanout.Fanout, remote: fanout.Fanout, width: int, rounds: int) -> None:
    calls: dict[str, list[float]] = {"embedded": [], "remote": []}
    parts: dict[str, list[fanout.Timing]] = {"embedded": [], "remote": []}

    def side(name: str, fo: fanout.Fanout, disk: fanout.Disk) -> Side:
        async def one() -> None:
            started = time.perf_counter()
            done = await fo.exec("true", disks={"work": disk})
            calls[name].append((time.perf_counter() - started) * 1e3)
            parts[name].append(done.raise_for_status().timing)

        async def together() -> float:
            started = time.perf_counter()
            async with anyio.create_task_group() as group:
                for _ in range(width):
                    group.start_soon(one)
            return (time.perf_counter() - started) * 1e3

        return together

    sides = {
        "embedded": side("embedded", embedded, await embedded.disks.get("ws")),
        "remote": side("remote", remote, await remote.disks.get("ws")),
    }
    walls = await interleave(sides, rounds)
    found: dict[str, Stats] = {}
    for name in sides:
        report.add(f"{width} at once: {name}, all", walls[name])
        found[name] = report.add(f"{width} at once: {name}, a call", calls[name][width:])
        for part in _PARTS:
            report.add(f"  of it {part}", [getattr(timing, part) for timing in parts[name][width:]])
    report.bound(f"{width} at once: overhead of a call (p50)", found["remote"].p50 - found["embedded"].p50, LIMIT_MS)
