"""`fanout gc` and `fanout fsck`: taking care of a disk."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from fanout.cli.app import disk_argument, json_option, run_async, session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fanout.model import FsckReport, GcReport

__all__ = ["COMMANDS"]

_DAY_S = 24 * 3600.0


@click.command(short_help="Delete what nothing needs any more.")
@disk_argument
@click.option("--grace", "grace_s", type=click.FloatRange(0, 1e10), default=_DAY_S, metavar="SECONDS",
              help="Spare what is younger, by the store's clock. [a day]")  # fmt: skip
@click.option("--keep-history", "keep_history_s", type=click.FloatRange(0, 1e10), default=30 * _DAY_S,
              metavar="SECONDS", help="How long what was overwritten can be read. [30 days]")  # fmt: skip
@click.option("-n", "--dry-run", is_flag=True, help="Say what would go, and delete nothing.")
@json_option
@click.pass_context
def gc(context: click.Context, spec: str, grace_s: float, keep_history_s: float, dry_run: bool, as_json: bool) -> int:
    """Delete what no branch or checkpoint of DISK needs: old history, and leftovers of what never came to an end.

    Branches and checkpoints read as before. It may run while others work on DISK, and be stopped at any time. A
    --grace of less than a day is safe only while nobody writes.
    """
    from fanout.cli.render import json_document

    async def work() -> None:
        async with session(context) as fo:
            disk = await fo.disks.get(spec)
            report = await disk.gc(grace_s=grace_s, keep_history_s=keep_history_s, dry_run=dry_run)
        if as_json:
            json_document(report)
        else:
            for line in _collected(report):
                print(line)

    return run_async(work)


@click.command(short_help="Verify a disk, object by object.")
@disk_argument
@click.option("--quick", is_flag=True, help="Look at what is there and at indexes, not at the contents of files.")
@json_option
@click.pass_context
def fsck(context: click.Context, spec: str, quick: bool, as_json: bool) -> int:
    """Verify all of DISK: every object that a branch, checkpoint or the history needs, its hashes and references.

    Names each damaged object and the paths that cannot be read because of it. Exits with 76 if there is any.
    """
    from fanout.cli.render import json_document
    from fanout.errors import TABLE

    async def work() -> int:
        async with session(context) as fo:
            report = await (await fo.disks.get(spec)).fsck(quick=quick)
        if as_json:
            json_document(report)
        else:
            for line in _checked(report):
                print(line)
        return 0 if report.ok else TABLE["corrupt"].exit

    return run_async(work)


COMMANDS = (gc, fsck)


def _collected(report: GcReport) -> Iterator[str]:
    from fanout.cli.render import count, safe, size

    what = [
        count(report.packs, "pack"),
        count(report.pages, "page"),
        count(report.snaps, "snap"),
        count(report.entries, "log entry", "log entries"),
    ]
    what += [count(report.indexes, "search index", "search indexes")] if report.indexes else []
    what += [count(report.probes, "probe leftover")] if report.probes else []
    verb = "would delete" if report.dry_run else "deleted"
    yield f"{verb} {', '.join(what)}: {size(report.freed_bytes)}"
    yield f"kept {count(report.kept_packs, 'pack')}: {size(report.kept_bytes)}"
    if report.trimmed and (report.dry_run or report.entries or sys.stdout.isatty()):
        for branch, seq in sorted(report.trimmed.items()):
            yield safe(f"history of {branch} begins at commit {seq}")


def _checked(report: FsckReport) -> Iterator[str]:
    from fanout.cli.render import count, name, safe, size

    for problem in report.problems:
        yield f"{safe(problem.object)}: {safe(problem.what)}"
        for affected in problem.affects:
            if affected.everything:
                yield f"  {safe(affected.line)}: cannot be read at all"
                continue
            if affected.between is not None:
                first, end = affected.between
                upto = f"up to {name(end)}" if end else "to the end"
                spared = f", but {', '.join(map(name, affected.spared))}" if affected.spared else ""
                which = f"all from {name(first) or '/'} {upto} ({affected.count:,} names){spared}"
                yield f"  {safe(affected.line)}: {which}"
                continue
            for path in affected.paths:
                yield f"  {safe(affected.line)}: {name(path)}"
            if affected.count > len(affected.paths):
                yield f"  {safe(affected.line)}: and {affected.count - len(affected.paths):,} more"
    if report.more_problems:
        yield f"and {count(report.more_problems, 'more problem')}"
    looked = [
        count(report.entries, "log entry", "log entries"),
        count(report.snaps, "snap"),
        count(report.pages, "page"),
        count(report.packs, "pack"),
        count(report.files, "file"),
    ]
    result = "no damage" if report.ok else count(len(report.problems) + report.more_problems, "problem")
    yield f"{result}: {', '.join(looked)}, {size(report.bytes_read)} read in {report.duration_ms / 1e3:.1f} s"
