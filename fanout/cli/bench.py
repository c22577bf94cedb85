"""`fanout bench`: how long calls take on a server near or far, or on this host, alone and many at once."""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import click

from fanout.cli.app import Globals, run_async, session, settings

if TYPE_CHECKING:
    from fanout.api import Disk, Fanout
    from fanout.model import Run

__all__ = ["bench"]

_MOST_IN_FLIGHT = 1000
_MOST_CALLS = 1_000_000
#: What the disk of a bench is called, before a random part.
_PREFIX = "bench-"
#: How long deleting it may hold up the end.
_DELETING_S = 15.0
#: Rows of the table, of what a `Run` says of itself; `outside` is the round trip less the server's own time.
_PARTS = ("round_trip", "outside", "queue", "start", "execute", "commit")
_TITLES = {"round_trip": "round trip", "outside": "  outside the server", "start": "    of it start"}


@dataclass(slots=True)
class Level:
    """What was measured with so many calls in flight. `ms` has a list for each of `_PARTS`; errors go by their code."""

    in_flight: int
    wall_s: float = 0.0
    ms: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in _PARTS})
    errors: Counter[str] = field(default_factory=Counter)
    hosts: set[str] = field(default_factory=set)
    engines: set[str] = field(default_factory=set)

    def add(self, round_trip_ms: float, run: Run) -> None:
        """Keep a call that was answered."""
        if not run.ok:
            self.errors[f"exit code {run.exit_code}" if run.status == "completed" else run.status] += 1
            return
        timing = run.timing
        for part, value in (
            ("round_trip", round_trip_ms),
            ("outside", max(round_trip_ms - timing.total_ms, 0.0)),
            ("queue", timing.queue_ms),
            ("start", timing.start_ms),
            ("execute", timing.execute_ms),
            ("commit", timing.commit_ms),
        ):
            self.ms[part].append(value)
        self.hosts.add(run.host)
        self.engines.add(run.engine)

    @property
    def calls(self) -> int:
        """How many calls were made."""
        return len(self.ms["round_trip"]) + self.errors.total()

    @property
    def calls_per_s(self) -> float:
        """How many calls a second succeeded."""
        return len(self.ms["round_trip"]) / self.wall_s if self.wall_s else 0.0

    def fields(self) -> dict[str, Any]:
        """Return what `--json` writes, every sample included."""
        return {
            "in_flight": self.in_flight,
            "calls": self.calls,
            "errors": dict(self.errors),
            "wall_s": self.wall_s,
            "calls_per_s": self.calls_per_s,
            "ms": {
                part: {**{f"p{p}": percentile(values, p) for p in (50, 95, 99)}, "values": values}
                for part, values in self.ms.items()
            },
        }


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return the smallest value that at least `percent` of all are not above; None of nothing."""
    return sorted(values)[max(math.ceil(percent / 100 * len(values)), 1) - 1] if values else None


def _in_flight(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    from fanout.errors import Invalid

    widths = value.split(",")
    if not all(width.strip().isascii() and width.strip().isdigit() for width in widths):
        raise Invalid.argument("--in-flight", value, "numbers with commas between them, such as 1,10,50")
    numbers = tuple(int(width) for width in widths)
    if not all(1 <= number <= _MOST_IN_FLIGHT for number in numbers) or len(set(numbers)) < len(numbers):
        raise Invalid.argument("--in-flight", value, f"different numbers from 1 to {_MOST_IN_FLIGHT}")
    return numbers


def _region(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    from fanout.errors import Invalid

    if value is not None and not (value.isprintable() and 0 < len(value) <= 64):
        raise Invalid.argument("--region", value, "1 to 64 printable characters: a label for the results")
    return value


def _writable(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Find out before an hour of calls that the results could not be written."""
    from fanout.errors import Invalid

    if value is not None:
        place = value if os.path.exists(value) else os.path.dirname(os.path.abspath(value))
        if os.path.isdir(value) or not os.access(place, os.W_OK):
            raise Invalid.argument(f"--{parameter.name}", value, "a file that can be written")
    return value


@click.command(short_help="Measure a server, or this host: round trip, queue, execute.")
@click.argument("url", required=False)
@click.option("--region", metavar="NAME", callback=_region, help="Where this is called from: a label for the results.")
@click.option("--in-flight", "widths", default="1,10,50", show_default=True, metavar="N,N,…", callback=_in_flight,
              help="Calls at once, one measurement each.")  # fmt: skip
@click.option("--calls", type=click.IntRange(1, _MOST_CALLS), default=200, show_default=True, metavar="N",
              help="Calls of each measurement, at least one for each in flight.")  # fmt: skip
@click.option("--command", default="true", show_default=True, help="What each call runs, on a disk of its own making.")
@click.option("--json", metavar="FILE", callback=_writable, help="Write every sample, as JSON.")
@click.option("--chart", metavar="FILE", callback=_writable, help="Draw the medians, as SVG.")
@click.pass_context
def bench(
    context: click.Context, url: str | None, region: str | None, widths: tuple[int, ...], calls: int, command: str,
    json: str | None, chart: str | None,
) -> int:  # fmt: skip
    """Run a command again and again on the server at URL (its key: FANOUT_API_KEY), or on this host without one.

    Prints the median, p95 and p99 of each part of a call, in ms. A disk is made for it, and deleted at the end, also
    of one that was interrupted. Exits with 1 if calls failed.
    """
    options = context.find_object(Globals) or Globals()
    if url is not None:
        context.obj = options = replace(options, url=url)
    target = settings(context).url

    async def work() -> int:
        about = _about(target, region, command)
        async with session(context) as fo, _disk(fo) as disk:
            levels = await _measure(fo, disk, command, widths, calls)
        about["engines"] = sorted(set().union(*(level.engines for level in levels)))
        about["hosts"] = sorted(set().union(*(level.hosts for level in levels)))
        _print(about, levels)
        if json is not None:
            _write(json, _document(about, levels))
        if chart is not None:
            _write(chart, _chart(about, levels))
        return 1 if any(level.errors for level in levels) else 0

    return run_async(work)


def _about(url: str | None, region: str | None, command: str) -> dict[str, Any]:
    import platform
    from datetime import UTC, datetime
    from urllib.parse import urlsplit

    import fanout
    from fanout.cli.render import utc
    from fanout.runtime import system

    return {
        "fanout": fanout.__version__,
        "python": platform.python_version(),
        "client": platform.node(),
        # Without what may stand before the @: it is a secret.
        "url": url and urlsplit(url)._replace(netloc=urlsplit(url).netloc.rpartition("@")[2]).geturl(),
        "region": region,
        "date": utc(datetime.fromtimestamp(system.now_ns() / 1e9, UTC)),
        "command": command,
    }


@asynccontextmanager
async def _disk(fo: Fanout) -> AsyncIterator[Disk]:
    """Make a disk with one file, and delete it whatever happens."""
    import anyio

    from fanout.runtime import system

    disk = await fo.disks.create(f"{_PREFIX}{system.hex_id(12)}")
    try:
        await disk.put_object("about.txt", b"made by `fanout bench`, which deletes it\n")
        yield disk
    finally:
        with anyio.move_on_after(_DELETING_S, shield=True):
            await fo.disks.delete(disk.id)


async def _measure(fo: Fanout, disk: Disk, command: str, widths: Sequence[int], calls: int) -> list[Level]:
    levels = []
    total = sum(max(calls, width) for width in widths)
    with _progress(total) as tell:
        (await fo.exec(command, disks={"work": disk.mount(conditional=True)})).raise_for_status()
        for width in widths:
            await _at_once(fo, disk, command, Level(width), width, lambda: None)  # connections, threads, caches
            level = Level(width)
            await _at_once(fo, disk, command, level, max(calls, width), tell)
            levels.append(level)
    return levels


async def _at_once(fo: Fanout, disk: Disk, command: str, level: Level, calls: int, tell: Callable[[], None]) -> None:
    """Make calls, `level.in_flight` at a time."""
    import anyio

    from fanout.errors import FanoutError
    from fanout.runtime import system

    mount = disk.mount(conditional=True)
    numbers = iter(range(calls))

    async def caller() -> None:
        for _ in numbers:
            began_s = system.monotonic()
            try:
                run = await fo.exec(command, disks={"work": mount})
            except FanoutError as error:
                level.errors[error.code] += 1
            else:
                level.add((system.monotonic() - began_s) * 1e3, run)
            tell()

    began_s = system.monotonic()
    async with anyio.create_task_group() as group:
        for _ in range(min(level.in_flight, calls)):
            group.start_soon(caller)
    level.wall_s = system.monotonic() - began_s


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """Show on a terminal how many calls were made."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from fanout.cli.render import stderr_console

    columns = (TextColumn("calls"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr_console(), transient=True) as progress:
        task = progress.add_task("calls", total=total)
        yield lambda: progress.advance(task)


def _print(about: dict[str, Any], levels: Sequence[Level]) -> None:
    from fanout.cli.render import count, milliseconds, print_table, safe

    where = safe(about["url"] or "this host, embedded") + (f" from {safe(about['region'])}" if about["region"] else "")
    print(f"{where}: `{safe(about['command'])}`, engine {', '.join(about['engines']) or 'none'}, ms")
    rows = []
    for level in levels:
        first = (str(level.in_flight), str(level.calls), str(level.errors.total()), f"{level.calls_per_s:.1f}")
        for part in _PARTS:
            values = [percentile(level.ms[part], percent) for percent in (50, 95, 99)]
            shown = ["-" if value is None else milliseconds(value) for value in values]
            rows.append([*(first if part == _PARTS[0] else ("", "", "", "")), _TITLES.get(part, f"  {part}"), *shown])
    print_table(["in flight>", "calls>", "errors>", "calls/s>", "", "p50>", "p95>", "p99>"], rows)
    for level in levels:
        for code, number in sorted(level.errors.items()):
            print(f"{count(number, 'call')} of {level.in_flight} in flight failed: {safe(code)}", file=sys.stderr)


def _document(about: dict[str, Any], levels: Sequence[Level]) -> str:
    return json.dumps({**about, "levels": [level.fields() for level in levels]}, indent=1) + "\n"


def _chart(about: dict[str, Any], levels: Sequence[Level]) -> str:
    from fanout.cli.chart import Bar, svg

    names = ("outside", "queue", "execute", "commit")
    bars = [
        Bar(
            str(level.in_flight),
            [percentile(level.ms[name], 50) or 0.0 for name in names],
            percentile(level.ms["round_trip"], 95) or 0.0,
            percentile(level.ms["round_trip"], 99) or 0.0,
        )
        for level in levels
    ]
    where = (about["url"] or f"{about['client']}, embedded") + (f" from {about['region']}" if about["region"] else "")
    subtitle = f"{about['command'][:60]}; fanout {about['fanout']}, {about['date'][:10]}; medians of each part"
    return svg(where, subtitle, ("outside the server", *names[1:]), bars)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
