"""`fanout demo`: the main job on real input, and what one after another costs.

Owns the order of the show: put a project on a disk, run its test files at once, read the results back, compare.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fanout.cli.app import json_option, run_async, session

if TYPE_CHECKING:
    from fanout.api import Disk, Fanout
    from fanout.cli.board import Board
    from fanout.model import Run

__all__ = ["demo"]

_OLDEST_PYTHON = (3, 8)
#: Asks the sandbox's own Python what it is, and whether it has pytest.
_LOOK = 'import sys, importlib.util as u; print(*sys.version_info[:2], int(u.find_spec("pytest") is not None))'


@dataclass(frozen=True, slots=True)
class _Plan:
    """What to run: a local project, its place on the disk, and one command for each file."""

    title: str
    local: Path
    remote: str
    files: Sequence[str]
    command: str
    dependencies: Path | None = None
    is_script: bool = False

    def labels(self) -> list[str]:
        """Return the files without the directory they are all in."""
        import os

        shared = os.path.commonpath([os.path.dirname(file) for file in self.files])
        return [os.path.relpath(file, shared) if shared else file for file in self.files]

    def commands(self) -> list[str]:
        """Return one command for each file, all its output going to results/<i>.txt."""
        import shlex

        filled = [self.command.replace("{}", shlex.quote(file)) for file in self.files]
        if self.is_script:
            filled = [f"(\n{script}\n)" for script in filled]
        return [f"cd {self.remote} && {command} > ../results/{i}.txt 2>&1" for i, command in enumerate(filled)]


@dataclass(slots=True)
class _Outcome:
    """What came of it. `serial_s` is None where nothing was compared."""

    plan: _Plan
    disk: str
    results: Sequence[str]
    wall_s: float
    serial_s: float | None
    log_entries: int
    commits: int
    read_ms: float


@click.command(short_help="The main job on real input, with progress and timings.")
@click.argument("directory", metavar="[DIR]", required=False)
@click.option("--command", metavar="'CMD {}'", help="What to run for each file, in DIR. [pytest]")
@click.option("--glob", "globs", multiple=True, metavar="GLOB", help="Which files of DIR. [test_*.py, *_test.py]")
@click.option("--engine", metavar="NAME", help="auto, bubblewrap or qemu.")
@click.option("-n", "--max-in-flight", type=click.IntRange(1), metavar="N", help="How many at once. [8 a core]")
@click.option(
    "--timeout", "timeout_s", type=float, default=300.0, show_default=True, metavar="SECONDS", help="For each file."
)
@click.option("--compare/--no-compare", default=True, show_default=True, help="Also run them one after another.")
@click.option("--keep", is_flag=True, help="Keep the disk afterwards.")
@json_option
@click.pass_context
def demo(
    context: click.Context,
    directory: str | None,
    command: str | None,
    globs: tuple[str, ...],
    engine: str | None,
    max_in_flight: int | None,
    timeout_s: float,
    compare: bool,
    keep: bool,
    as_json: bool,
) -> int:
    """Run a project's test files at once, one fresh sandbox each, on one shared disk.

    Without DIR: a small real project, fetched from the package index once (a pinned release of click). Every
    exec writes results/<i>.txt and commits it; the results are read back without starting a machine. Then the same
    execs run one after another, for comparison. Exits with 1 if a test file failed.

    DIR's test files are run by pytest with the sandbox's python3; --command and --glob run anything else.
    """
    from fanout.cli.board import Board, failed
    from fanout.errors import Invalid

    if directory is None and (command is not None or globs):
        raise Invalid.argument("--command" if command else "--glob", command or globs[0], "only together with DIR")
    if command is not None and "{}" not in command:
        raise Invalid.argument("--command", command, "it must say {} where the file goes")
    overrides = {"max_in_flight": max_in_flight} | ({"engine": engine} if engine else {})

    async def work() -> int:
        async with session(context, **overrides) as fo:
            plan = await _plan(fo, context, directory, command, globs)
            board = Board(plan.labels())
            async with _demo_disk(fo, keep=keep) as disk:
                outcome = await _run(fo, disk, plan, board, timeout_s, compare=compare)
        runs = [run for run in board.runs if run is not None]
        _show(outcome, board, runs, keep=keep, as_json=as_json)
        return int(any(failed(run) for run in runs))

    return run_async(work)


async def _plan(
    fo: Fanout, context: click.Context, directory: str | None, command: str | None, globs: tuple[str, ...]
) -> _Plan:
    from fanout.cli import demo_source
    from fanout.cli.app import settings

    files: list[str] = []
    if directory is not None:
        files = demo_source.find_files(Path(directory), globs or demo_source.TEST_GLOBS)
        title = f"{Path(directory).resolve().name} ({directory})"
        if command is not None:
            return _Plan(title, Path(directory), "project", files, command, is_script=True)
    has_pytest = await _look(fo)
    cache_dir = settings(context).cache_dir
    dependencies: Path | None = None
    if directory is None or not has_pytest:
        dependencies = await demo_source.fetch_dependencies(cache_dir, _say)
    pytest = "PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=../deps:.:src python3 -m pytest -q -p no:cacheprovider {}"
    if directory is not None:
        return _Plan(title, Path(directory), "project", files, pytest, dependencies)
    local = await demo_source.fetch_project(cache_dir, _say)
    files = demo_source.find_files(local, demo_source.TEST_GLOBS)
    pin = demo_source.PROJECT
    return _Plan(f"{pin.package} {pin.version}", local, local.name, files, pytest, dependencies)


async def _look(fo: Fanout) -> bool:
    """Whether the sandbox's Python has pytest; refuse where there is no Python new enough."""
    from fanout.errors import EngineUnavailable

    looked = await fo.exec(f"python3 -c '{_LOOK}'", timeout_s=60.0)
    oldest = ".".join(map(str, _OLDEST_PYTHON))
    advice = f"the demo runs tests with python3 (at least {oldest}) as commands see it: install it in /usr (python3)"
    if not looked.ok:
        raise EngineUnavailable(f"no python3 in the sandbox: {advice}, or run fanout demo DIR --command 'CMD {{}}'")
    major, minor, has_pytest = (int(word) for word in looked.stdout.split())
    if (major, minor) < _OLDEST_PYTHON:
        raise EngineUnavailable(f"the sandbox's python3 is {major}.{minor}: {advice}")
    return bool(has_pytest)


@asynccontextmanager
async def _demo_disk(fo: Fanout, *, keep: bool) -> AsyncIterator[Disk]:
    import anyio

    from fanout.runtime import system

    disk = await fo.disks.create(f"demo-{system.hex_id(6)}")
    try:
        yield disk
    finally:
        if not keep:
            with anyio.CancelScope(shield=True):
                await fo.disks.delete(disk.name)


async def _run(fo: Fanout, disk: Disk, plan: _Plan, board: Board, timeout_s: float, *, compare: bool) -> _Outcome:
    from fanout.cli.board import Board, run_all
    from fanout.cli.render import count
    from fanout.runtime import system

    await _fill(fo, disk, plan, timeout_s)
    start = await disk.checkpoint("start")
    commands = plan.commands()

    async def timed(on: Disk, board: Board, max_in_flight: int | None) -> float:
        mount = on.mount(conditional=True)
        began = system.monotonic()
        with board.live(plain=on is disk):
            options = {"disks": {"work": mount}, "cwd": "/mnt/work", "timeout_s": timeout_s}
            await run_all(fo, board, commands, max_in_flight=max_in_flight, options=options)
        return system.monotonic() - began

    _say(f"running {count(len(commands), 'test file')} at once" if len(commands) > 1 else "running 1 file")
    wall_s = await timed(disk, board, None)
    began = system.monotonic()
    results = [_last_line(await disk.get_object(f"results/{index}.txt")) for index in range(len(commands))]
    read_ms = (system.monotonic() - began) * 1e3
    landed = [commit.seq async for commit in disk.log(after=start.seq)]
    serial_s: float | None = None
    if compare:
        _say("the same one after another, for comparison (--no-compare leaves it out)")
        branch = await disk.branch("one-by-one", checkpoint="start")
        serial_s = await timed(branch, Board(plan.labels()), 1)
    return _Outcome(plan, disk.name, results, wall_s, serial_s, len(set(landed)), len(landed), read_ms)


async def _fill(fo: Fanout, disk: Disk, plan: _Plan, timeout_s: float) -> None:
    """Put the project, its dependencies and an empty results/ on the disk."""
    from fanout.cli.render import count

    uploaded = len((await disk.upload(plan.local, f"/{plan.remote}")).changes)
    await disk.put_object("results/", b"")
    if plan.dependencies is not None:
        uploaded += len((await disk.upload(plan.dependencies, "/deps")).changes)
        # Once here instead of in every exec.
        compiled = await fo.exec("python3 -m compileall -q deps; true", disks={"work": disk}, timeout_s=timeout_s)
        compiled.raise_for_status()
    _say(f"{plan.title}: {count(uploaded, 'path')} on disk {disk.name}")


def _show(outcome: _Outcome, board: Board, runs: Sequence[Run], *, keep: bool, as_json: bool) -> None:
    from fanout.cli.board import failed
    from fanout.cli.render import count, json_document, milliseconds

    plan, bad = outcome.plan, sum(failed(run) for run in runs)
    cpu_s = sum(run.usage.cpu_s for run in runs)
    if as_json:
        json_document(_fields(outcome, runs, cpu_s))
        return
    board.print_table(outcome.results)
    print()
    print(f"{plan.title}: {count(len(runs), 'exec')} in {outcome.wall_s:.2f} s wall, {bad} failed (table in ms)")
    if outcome.serial_s is None:
        print(f"their commands used {cpu_s:.2f} s of CPU, the least that one after another takes")
    else:
        print(f"one after another they took {outcome.serial_s:.2f} s ({outcome.serial_s / outcome.wall_s:.1f}x)")
    print(
        f"{count(outcome.commits, 'commit')} landed in {count(outcome.log_entries, 'log entry', 'log entries')}, "
        f"{count(len(outcome.results), 'result')} read with get_object in {milliseconds(outcome.read_ms)} ms"
    )
    if keep:
        name = outcome.disk
        print(f"kept: fanout ls {name} results; fanout cat {name} results/0.txt; fanout log {name}")


def _fields(outcome: _Outcome, runs: Sequence[Run], cpu_s: float) -> dict[str, Any]:
    from fanout.cli.run import run_fields

    return {
        "project": outcome.plan.title,
        "disk": outcome.disk,
        "execs": len(runs),
        "wall_s": outcome.wall_s,
        "one_after_another_s": outcome.serial_s,
        "cpu_s": cpu_s,
        "commits": outcome.commits,
        "log_entries": outcome.log_entries,
        "read_back_ms": outcome.read_ms,
        "runs": [
            {"branch": file, "result": result, **run_fields(run)}
            for file, result, run in zip(outcome.plan.files, outcome.results, runs, strict=True)
        ],
    }


def _last_line(data: bytes) -> str:
    """Return the last line that says something, without pytest's rulers."""
    lines = [line.strip(" =") for line in data.decode("utf-8", "replace").splitlines()]
    return next((line for line in reversed(lines) if line), "(no output)")


def _say(text: str) -> None:
    from fanout.cli.render import safe

    click.secho(safe(text), dim=True, err=True)
    sys.stderr.flush()
