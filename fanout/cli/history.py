"""`fanout checkpoint`, `branch`, `merge`, `log`, `diff`, `locks`: a disk's history."""

from __future__ import annotations

import sys

import click

from fanout.cli.app import disk_argument, json_option, run_async, session

__all__ = ["CHANGE_LETTERS", "COMMANDS"]

#: How `diff` and `log --changes` abbreviate what happened to a path.
CHANGE_LETTERS = {"added": "A", "modified": "M", "attributes": "T", "deleted": "D"}


@click.command(short_help="Name a disk's state as it is now.")
@disk_argument
@click.argument("name", metavar="[NAME]", required=False)
@click.option("--list", "listing", is_flag=True, help="List the disk's checkpoints instead.")
@json_option
@click.pass_context
def checkpoint(context: click.Context, spec: str, name: str | None, listing: bool, as_json: bool) -> int:
    """Name DISK's newest commit NAME (a made-up name by default). It can never change afterwards."""
    from fanout.cli.render import json_document, local_time
    from fanout.errors import Invalid

    if listing and name is not None:
        raise Invalid.argument("NAME", name, "not together with --list")

    async def work() -> None:
        async with session(context) as fo:
            disk = await fo.disks.get(spec)
            if listing:
                found = [each async for each in disk.checkpoints()]
                if as_json:
                    json_document(found)
                for each in found if not as_json else ():
                    print(f"{each.name}  commit {each.seq} of {each.branch}, {local_time(each.time)}")
                return
            made = await disk.checkpoint(name)
            if as_json:
                json_document(made)
            else:
                print(f"checkpoint {made.name}: commit {made.seq} of {disk.name}@{made.branch}")

    return run_async(work)


@click.command(short_help="Start a branch, or list them.")
@disk_argument
@click.argument("name", metavar="[NAME]", required=False)
@click.option("--checkpoint", "start", metavar="NAME", help="Start there instead of at DISK as it is now.")
@json_option
@click.pass_context
def branch(context: click.Context, spec: str, name: str | None, start: str | None, as_json: bool) -> int:
    """Start the branch NAME of DISK; without NAME, list the disk's branches.

    It costs one small object, whatever the disk holds. Use it as DISK@NAME.
    """
    from fanout.cli.render import json_document, safe
    from fanout.errors import Invalid

    if name is None and start is not None:
        raise Invalid.argument("--checkpoint", start, "only together with the NAME of the branch to start")

    async def work() -> None:
        async with session(context) as fo:
            disk = await fo.disks.get(spec)
            if name is None:
                names = [each async for each in disk.branches()]
                if as_json:
                    json_document(names)
                for each in names if not as_json else ():
                    print(safe(each))
                return
            made = await disk.branch(name, checkpoint=start)
            if as_json:
                json_document({"disk": made.name, "id": made.id, "branch": made.branch_name})
            else:
                print(f"branch {made.branch_name}: use it as {made.name}@{made.branch_name}")

    return run_async(work)


@click.command(short_help="Bring a branch's changes back.")
@disk_argument
@click.argument("name", metavar="BRANCH")
@click.option(
    "--on-conflict",
    type=click.Choice(["fail", "ours", "theirs"]),
    default="fail",
    show_default=True,
    help="Where both changed a path: refuse, keep DISK's, or take BRANCH's.",
)
@json_option
@click.pass_context
def merge(context: click.Context, spec: str, name: str, on_conflict: str, as_json: bool) -> int:
    """Bring the changes of BRANCH into DISK, three-way, in one commit."""
    from fanout.cli.render import count, json_document, safe
    from fanout.errors import Conflict

    async def work() -> None:
        async with session(context) as fo:
            disk = await fo.disks.get(spec)
            try:
                commit = await disk.merge(name, on_conflict=on_conflict)  # type: ignore[arg-type]
            except Conflict as conflict:
                choice = f"fanout merge {spec} {name} --on-conflict"
                conflict.add_note(f"nothing was merged; take {spec}'s with {choice} ours, {name}'s with theirs")
                raise
        if as_json:
            json_document(commit)
        else:
            what = count(len(commit.changes), "path") + " changed"
            print(safe(f"merged {name} into {disk.name}@{disk.branch_name}: commit {commit.seq}, {what}"))

    return run_async(work)


@click.command(short_help="Show the commits of a branch.")
@disk_argument
@click.option("-n", "limit", type=click.IntRange(1), default=20, show_default=True, help="How many, newest first.")
@click.option("-c", "--changes", is_flag=True, help="List the paths that each commit changed.")
@json_option
@click.pass_context
def log(context: click.Context, spec: str, limit: int, changes: bool, as_json: bool) -> int:
    """Show the commits of DISK, newest first: number, time, author, paths changed, message."""
    from fanout.cli.render import json_stream, local_time, name, print_table, safe

    async def work() -> None:
        async with session(context) as fo:
            disk = await fo.disks.get(spec)
            if as_json:
                await json_stream(disk.log(limit=limit))
                return
            commits = [commit async for commit in disk.log(limit=limit)]
        if not changes:
            rows = [
                (str(c.seq), local_time(c.time), safe(c.author), f"{len(c.changes):,}", safe(c.message))
                for c in commits
            ]
            if rows or sys.stdout.isatty():
                print_table(("commit>", "time", "author", "paths>", "message"), rows, flexible="message")
            return
        for c in commits:
            print(f"commit {c.seq}  {local_time(c.time)}  {safe(c.author)}  {safe(c.message)}")
            for change in c.changes:
                print(f"  {CHANGE_LETTERS[change.kind]} {name(change.path)}")

    return run_async(work)


@click.command(short_help="Show what differs between two points.")
@disk_argument
@click.argument("before", metavar="A")
@click.argument("after", metavar="[B]", required=False)
@json_option
@click.pass_context
def diff(context: click.Context, spec: str, before: str, after: str | None, as_json: bool) -> int:
    """Show the paths of DISK that differ between A and B (by default DISK as it is now).

    A and B are branches, checkpoints or commit numbers. A added, M modified, T attributes, D deleted.
    """
    from fanout.cli.render import json_stream, name

    async def work() -> None:
        async with session(context) as fo:
            disk = await fo.disks.get(spec)
            changes = disk.diff(_point(before), None if after is None else _point(after))
            if as_json:
                await json_stream(changes)
                return
            async for change in changes:
                print(f"{CHANGE_LETTERS[change.kind]} {name(change.path)}")

    return run_async(work)


@click.command(short_help="Show the checkouts held on a disk, or break one.")
@disk_argument
@click.option("--break", "lock_id", metavar="LOCK", help="Take this lock from its holder first.")
@json_option
@click.pass_context
def locks(context: click.Context, spec: str, lock_id: str | None, as_json: bool) -> int:
    """Show the checkouts held on DISK, or break one: its holder's commit then fails."""
    from fanout.cli.render import json_document, local_time, name, print_table

    async def work() -> None:
        async with session(context) as fo:
            disk = await fo.disks.get(spec)
            if lock_id is not None:
                await disk.break_lock(lock_id)
            held = await disk.locks()
        if as_json:
            json_document(held)
        elif held:
            rows = [(each.id, each.exec_id, local_time(each.expires), " ".join(map(name, each.paths))) for each in held]
            print_table(("lock", "exec", "expires", "paths"), rows, flexible="paths")
        elif sys.stdout.isatty():
            print(f"no locks on {disk.name}@{disk.branch_name}")

    return run_async(work)


COMMANDS = (checkpoint, branch, merge, log, diff, locks)


def _point(text: str) -> str | int:
    """A number is a commit of the branch; everything else a name."""
    return int(text) if text.isascii() and text.isdigit() else text
