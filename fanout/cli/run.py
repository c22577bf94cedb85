"""`fanout exec` and `fanout map`: commands in fresh sandboxes on mounted disks."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import click

from fanout.cli.app import json_option, run_async, session

if TYPE_CHECKING:
    from fanout.api import Disk, Fanout
    from fanout.cli.spec import MountSpec
    from fanout.model import Mount, Run

__all__ = ["COMMANDS", "open_mounts", "run_fields"]

#: What `exec` exits with when the command has no exit code of its own, as timeout(1) and shells have it.
_NO_EXIT_CODE = {"timed_out": 124, "killed": 137, "oom": 137}
_ENDED = {
    "timed_out": "stopped at its timeout (see --timeout)",
    "killed": "killed from outside",
    "oom": "killed for lack of memory (see --memory)",
}


def _run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say how a command runs."""
    for option in (
        click.option("--memory", "memory_mib", type=int, metavar="MIB", help="Memory for all its processes."),
        click.option("--cpus", type=float, metavar="N", help="Cores it may use."),
        click.option("--network", is_flag=True, help="Let it use the network."),
        click.option(
            "--commit",
            type=click.Choice(["always", "on_success", "never"]),
            default="always",
            show_default=True,
            help="When what it wrote is kept.",
        ),
        click.option("--timeout", "timeout_s", type=float, default=300.0, show_default=True, metavar="SECONDS"),
        click.option("--queue-ms", type=float, metavar="MS", help="Longest wait for --checkout. [the timeout]"),
        click.option(
            "--checkout",
            "checkouts",
            multiple=True,
            metavar="[NAME:]PATH",
            help="Lock this path of the mount for the command alone. Repeatable.",
        ),
        click.option("-e", "--env", "env", multiple=True, metavar="K=V", help="Set a variable. Repeatable."),
        click.option("--cwd", metavar="DIR", help="Where it starts. [the only mount, else /mnt]"),
        click.option(
            "-d",
            "--disk",
            "mounts",
            multiple=True,
            metavar="MOUNT",
            help="[NAME=]DISK[:ro|conditional|shared]. Repeatable.",
        ),
    ):
        command = option(command)
    return command


@click.command(
    "exec", short_help="Run a command in a fresh sandbox.", context_settings={"allow_interspersed_args": False}
)
@_run_options
@click.option("--stdin", "stdin_from", metavar="FILE", help="What it reads as standard input; - is ours. [nothing]")
@click.option("-q", "--quiet", is_flag=True, help="No summary line.")
@json_option
@click.argument("words", metavar="COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def exec_(
    context: click.Context,
    /,
    mounts: tuple[str, ...],
    words: tuple[str, ...],
    stdin_from: str | None,
    quiet: bool,
    as_json: bool,
    env: tuple[str, ...],
    checkouts: tuple[str, ...],
    queue_ms: float | None,
    **options: Any,
) -> int:
    """Run COMMAND in a fresh sandbox, commit what it wrote, and exit with its exit code.

    One word is a shell script ('cd src && make'), several are a program and its arguments. Disks are seen at
    /mnt/NAME. Output comes as the command writes it, to the same stream, byte for byte. Without an exit code of
    its own: 124 for a timeout, 137 for a kill or lack of memory. 75: it worked but its commit conflicted.
    """
    from fanout.cli.render import json_document
    from fanout.cli.spec import command_line, environment, parse_mount

    command = command_line(words)
    specs = [parse_mount(text) for text in mounts]
    options["env"] = environment(env)
    options["stdin"] = _read_input(stdin_from)

    async def work() -> int:
        async with session(context) as fo:
            options["disks"] = await open_mounts(fo, specs, checkouts, queue_ms)
            if as_json:
                run = await fo.exec(command, **options)
                json_document(run_fields(run))
            else:
                run = await _stream(fo, command, options)
        if not as_json:
            _report(run, options["disks"], quiet=quiet)
        return _exit_code(run)

    return run_async(work)


@click.command("map", short_help="Run a command once for each item, all at once.")
@_run_options
@click.option("-n", "--max-in-flight", type=click.IntRange(1), metavar="N", help="How many at once. [8 a core]")
@json_option
@click.argument("command", metavar="'COMMAND {}'")
@click.argument("items", metavar="ITEM... | -", nargs=-1, required=True)
@click.pass_context
def map_(
    context: click.Context,
    /,
    mounts: tuple[str, ...],
    command: str,
    items: tuple[str, ...],
    max_in_flight: int | None,
    as_json: bool,
    env: tuple[str, ...],
    checkouts: tuple[str, ...],
    queue_ms: float | None,
    **options: Any,
) -> int:
    """Run COMMAND once for each ITEM, each in a fresh sandbox, all on the same disks.

    {} in COMMAND is the item, quoted for the shell; {#} is its number, from 1. A single - reads the items from
    standard input, one a line. Ends in a table, and exits with 1 if any failed or conflicted.
    """
    from fanout.cli.board import Board, failed, run_all
    from fanout.cli.render import count, json_document
    from fanout.cli.spec import environment, parse_mount
    from fanout.run.request import expand

    found = _lines() if items == ("-",) else list(items)
    commands = expand(command, found)
    specs = [parse_mount(text) for text in mounts]
    options["env"] = environment(env)

    async def work() -> int:
        from fanout.runtime import system

        board = Board(found)
        async with session(context, max_in_flight=max_in_flight) as fo:
            options["disks"] = await open_mounts(fo, specs, checkouts, queue_ms)
            began = system.monotonic()
            try:
                with board.live():
                    await run_all(fo, board, commands, options=options)
            finally:
                wall_s = system.monotonic() - began
                done = [(index, run) for index, run in enumerate(board.runs) if run is not None]
                if as_json:
                    json_document([{"item": found[index], **run_fields(run)} for index, run in done])
                elif done:
                    board.print_table(["" if run is None else _result(run) for run in board.runs])
                    bad = sum(failed(run) for _, run in done)
                    print(f"{count(len(done), 'exec')} in {wall_s:.2f} s, {bad} failed (times in ms)")
                    _advise([run for _, run in done], options["disks"])
        return int(any(failed(run) for _, run in done))

    return run_async(work)


COMMANDS = (exec_, map_)


async def open_mounts(
    fo: Fanout, specs: Sequence[MountSpec], checkouts: Sequence[str] = (), queue_ms: float | None = None
) -> dict[str, Disk | Mount]:
    """Open the disks of `-d` options and say how they are mounted. A checkpoint is read-only unless told otherwise."""
    from fanout.cli.spec import split_checkouts
    from fanout.errors import Invalid

    found: dict[str, tuple[Disk, MountSpec]] = {}
    for spec in specs:
        disk = await fo.disks.get(str(spec.disk))
        name = spec.name or disk.name
        if name in found:
            raise Invalid.argument("--disk", name, "each name once: give another with -d NAME=DISK")
        found[name] = disk, spec
    locked = split_checkouts(checkouts, list(found))
    if queue_ms is not None and not locked:
        raise Invalid.argument("--queue-ms", queue_ms, "only together with --checkout")
    opened: dict[str, Disk | Mount] = {}
    for name, (disk, spec) in found.items():
        mode = spec.mode or ("ro" if disk.at is not None else "shared")
        opened[name] = disk.mount(
            read_only=mode == "ro",
            conditional=mode == "conditional",
            checkout=locked.get(name, ()),
            queue_ms=queue_ms if name in locked else None,
        )
    return opened


def run_fields(run: Run) -> dict[str, Any]:
    """Return a run as JSON has it: the fields of `fanout.Run`, output as text (and base64 where it is no UTF-8)."""
    from fanout.errors import Conflict

    fields: dict[str, Any] = run.model_dump(exclude={"stdout_bytes", "stderr_bytes", "conflict", "commits"})
    fields["ok"] = run.ok
    for stream, data in (("stdout", run.stdout_bytes), ("stderr", run.stderr_bytes)):
        fields[stream] = data.decode("utf-8", "replace")
        if fields[stream].encode() != data:
            fields[f"{stream}_base64"] = base64.b64encode(data).decode()

    def conflict(value: Conflict | None) -> dict[str, Any] | None:
        if value is None:
            return None
        return {"disk": value.disk, "paths": list(value.paths), "rescue_branch": value.rescue_branch}

    fields["conflict"] = conflict(run.conflict)
    fields["commits"] = {
        name: {**commit.model_dump(exclude={"conflict"}), "conflict": conflict(commit.conflict)}
        for name, commit in run.commits.items()
    }
    return fields


async def _stream(fo: Fanout, command: str, options: dict[str, Any]) -> Run:
    from fanout.model import Finished, Output

    run: Run | None = None
    async with aclosing(fo.stream(command, **options)) as events:
        async for event in events:
            if isinstance(event, Output):
                out = sys.stdout if event.stream == "stdout" else sys.stderr
                out.buffer.write(event.data)
                out.buffer.flush()
            elif isinstance(event, Finished):
                run = event.run
    assert run is not None, "a stream ended without a result"
    return run


def _report(run: Run, mounts: dict[str, Disk | Mount], *, quiet: bool) -> None:
    from fanout.cli.board import outcome
    from fanout.cli.render import count, milliseconds, safe

    timing = run.timing
    parts = [f"exit {outcome(run)}" if run.exit_code is not None else outcome(run)]
    parts += [
        f"{label} {milliseconds(value)} ms"
        for label, value in (
            ("queue", timing.queue_ms),
            ("execute", timing.execute_ms),
            ("commit", timing.commit_ms),
        )
    ]
    for name, commit in run.commits.items():
        if commit.seq is not None:
            parts.append(f"{name}: {count(len(commit.changes or ()), 'path')}, commit {commit.seq}")
        elif commit.conflict is not None:
            line = getattr(mounts[name], "branch", "main")
            print(f"fanout: {_conflict_advice(commit.conflict, line)}", file=sys.stderr)
    if run.status != "completed":
        print(f"fanout: the command was {_ENDED[run.status]}", file=sys.stderr)
    if sys.stderr.isatty() and not quiet:
        text = safe(" · ".join(parts))
        click.secho(text, dim=True, err=True)


def _conflict_advice(conflict: Any, line: str) -> str:
    """Say in one line what clashed, where the changes are, and how to look at them and take them."""
    from fanout.cli.render import safe

    into = conflict.disk if line == "main" else f"{conflict.disk}@{line}"
    rescue = conflict.rescue_branch
    return safe(
        f"{conflict}; see them: fanout diff {conflict.disk} {line} {rescue}; "
        f"take them: fanout merge {into} {rescue} --on-conflict theirs"
    )


def _advise(runs: Sequence[Run], mounts: dict[str, Disk | Mount]) -> None:
    """Say once for many runs what to do about conflicts."""
    clashed = [(name, commit.conflict) for run in runs for name, commit in run.commits.items() if commit.conflict]
    if clashed:
        name, first = clashed[0]
        advice = _conflict_advice(first, getattr(mounts[name], "branch", "main"))
        print(f"fanout: {len(clashed)} conflicted (-d …:conditional lets the later win), as: {advice}", file=sys.stderr)


def _exit_code(run: Run) -> int:
    from fanout.errors import TABLE

    if run.exit_code is None:
        return _NO_EXIT_CODE[run.status]
    if run.exit_code == 0 and run.conflict is not None:
        return TABLE["conflict"].exit
    return run.exit_code


def _result(run: Run) -> str:
    """Return the last line a command wrote, of stderr if it failed and wrote there."""
    if run.conflict is not None:
        return f"changes are on {run.conflict.rescue_branch}"
    first, second = (run.stdout, run.stderr) if run.ok else (run.stderr, run.stdout)
    return (first.strip() or second.strip()).rpartition("\n")[2]


def _read_input(source: str | None) -> bytes:
    if source is None:
        return b""
    if source == "-":
        return sys.stdin.buffer.read()
    with open(source, "rb") as file:
        return file.read()


def _lines() -> list[str]:
    """Return the lines of standard input, empty ones left out; undecodable bytes pass unchanged."""
    import os

    return [os.fsdecode(line) for line in sys.stdin.buffer.read().splitlines() if line.strip()]
