"""remote_exec: 1, 10 and 50 no-op execs at once through a server, over HTTP, and the same from this process.

The server runs in a process of its own on loopback, with a store, a cache and an engine like those of the embedded
connection. What is compared is what the callers see: the time of all calls of one instant, less that of as many
embedded, for each call. One caller's round trip is shown, too: with many in flight on few cores it is mostly waiting
for the others. So is the CPU time of a call in this process and the server's, which other work here hardly moves.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import anyio

import fanout
from benchmarks import servers, trees
from benchmarks.harness import Report, Side, Size, Stats, interleave

__all__ = ["ABOUT", "LIMIT_MS", "run"]

ABOUT = "1, 10 and 50 no-op execs at once over HTTP, beside the same embedded"

#: Most that HTTP may add to a call, in ms: the difference of the medians, divided by how many calls there were.
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
                rounds = max(_CALLS[size] // width, 1)
                await _compare(report, embedded, remote, width, rounds, server.process.pid)


async def _filled(remote: fanout.Fanout, tree: Path, files: int) -> None:
    disk = await remote.disks.create("ws")
    await disk.upload(trees.make_tree(tree, files, 400))


def _cpu_ms(pid: int) -> float:
    """Return the CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1e3 / os.sysconf("SC_CLK_TCK")


async def _compare(
    report: Report, embedded: fanout.Fanout, remote: fanout.Fanout, width: int, rounds: int, server: int
) -> None:
    used_ms = {"embedded": 0.0, "remote": 0.0}
    calls: dict[str, list[float]] = {"embedded": [], "remote": []}
    parts: dict[str, list[fanout.Timing]] = {"embedded": [], "remote": []}

    def side(name: str, fo: fanout.Fanout, disk: fanout.Disk) -> Side:
        async def one() -> None:
            started = time.perf_counter()
            done = await fo.exec("true", disks={"work": disk})
            calls[name].append((time.perf_counter() - started) * 1e3)
            parts[name].append(done.raise_for_status().timing)

        async def together() -> float:
            before_ms = time.process_time() * 1e3 + _cpu_ms(server)
            started = time.perf_counter()
            async with anyio.create_task_group() as group:
                for _ in range(width):
                    group.start_soon(one)
            took_ms = (time.perf_counter() - started) * 1e3
            used_ms[name] += time.process_time() * 1e3 + _cpu_ms(server) - before_ms
            return took_ms

        return together

    sides = {
        "embedded": side("embedded", embedded, await embedded.disks.get("ws")),
        "remote": side("remote", remote, await remote.disks.get("ws")),
    }
    walls = await interleave(sides, rounds)
    together: dict[str, Stats] = {}
    alone: dict[str, Stats] = {}
    for name in sides:
        together[name] = report.add(f"{width} at once: {name}, all", walls[name])
        alone[name] = report.add(f"{width} at once: {name}, a call", calls[name][width:])
        for part in _PARTS:
            report.add(f"  of it {part}", [getattr(timing, part) for timing in parts[name][width:]])
    added = (together["remote"].p50 - together["embedded"].p50) / width
    report.bound(f"{width} at once: HTTP adds to a call (p50 of all, shared out)", added, LIMIT_MS)
    cpu_ms = (used_ms["remote"] - used_ms["embedded"]) / len(calls["remote"])
    report.bound(f"{width} at once: CPU time that HTTP adds to a call, client and server", cpu_ms)
    if width > 1:
        report.bound(f"{width} at once: a round trip is longer by (p50)", alone["remote"].p50 - alone["embedded"].p50)
