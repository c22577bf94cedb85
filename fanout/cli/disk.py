"""`fanout disk`: make, list, describe and remove disks."""

from __future__ import annotations

import sys
from typing import Any

import click

from fanout.cli.app import disk_argument, json_option, run_async, session

__all__ = ["disk"]


@click.group(short_help="Create, list, describe and remove disks.")
def disk() -> None:
    """Create, list, describe and remove disks."""


@disk.command(short_help="Create a disk.")
@click.argument("name")
@json_option
@click.pass_context
def create(context: click.Context, name: str, as_json: bool) -> int:
    """Create an empty disk called NAME (a-z, 0-9, '.', '_' and '-').

    The store is tried out first: one that lets two writers win a race is refused.
    """
    from fanout.cli.render import json_document

    async def work() -> None:
        async with session(context) as fo:
            made = await fo.disks.create(name)
            if as_json:
                json_document({"id": made.id, "name": made.name})
            else:
                print(f"created disk {made.name} ({made.id})")

    return run_async(work)


@disk.command("ls", short_help="List all disks.")
@json_option
@click.pass_context
def list_(context: click.Context, as_json: bool) -> int:
    """List all disks of the store, by name."""
    from fanout.cli.render import json_document

    async def work() -> None:
        async with session(context) as fo:
            found = [{"name": each.name, "id": each.id} async for each in fo.disks.list()]
        if as_json:
            json_document(found)
        elif found:
            width = max(len(each["name"]) for each in found)
            for each in found:
                print(f"{each['name']:<{width}}  {each['id']}")
        elif sys.stdout.isatty():
            print("no disks yet; make one: fanout disk create NAME")

    return run_async(work)


@disk.command("rm", short_help="Delete disks with all their history.")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("-y", "--yes", is_flag=True, help="Do not ask (only a terminal is asked).")
@click.pass_context
def remove(context: click.Context, names: tuple[str, ...], yes: bool) -> int:
    """Delete disks with all their branches, checkpoints and history. This cannot be undone."""
    from fanout.cli.spec import parse_disk
    from fanout.errors import Invalid

    for name in names:
        if parse_disk(name).at is not None:
            raise Invalid.argument("NAME", name, "a whole disk, without @: branches and checkpoints stay with it")
    if not yes and sys.stdin.isatty():
        click.confirm(f"Delete {', '.join(names)} with all history?", abort=True, err=True)

    async def work() -> None:
        async with session(context) as fo:
            for name in names:
                await fo.disks.delete(name)

    return run_async(work)


@disk.command(short_help="Describe a disk: commits, size, branches, checkpoints.")
@disk_argument
@json_option
@click.pass_context
def info(context: click.Context, spec: str, as_json: bool) -> int:
    """Describe DISK: its newest commit, how much it holds, its branches and checkpoints."""
    from fanout.cli.render import count, json_document, local_time, safe, size

    async def work() -> None:
        async with session(context) as fo:
            found = await fo.disks.get(spec)
            files = size_bytes = 0
            async for each in found.list_objects():
                files += 1
                size_bytes += each.size
            newest = [commit async for commit in found.log(limit=1)]
            branches = [name async for name in found.branches()]
            checkpoints = [checkpoint async for checkpoint in found.checkpoints()]
        described: dict[str, Any] = {
            "name": found.name,
            "id": found.id,
            "branch": found.branch_name,
            "at": found.at,
            "files": files,
            "size_bytes": size_bytes,
            "newest": newest[0].model_dump(exclude={"changes"}) if newest else None,
            "branches": branches,
            "checkpoints": [checkpoint.model_dump() for checkpoint in checkpoints],
        }
        if as_json:
            json_document(described)
            return
        lines = [("disk", f"{found.name} ({found.id})")]
        lines += [("checkpoint", found.at)] if found.at else []
        lines += [("branch", found.branch_name), ("holds", f"{count(files, 'file')}, {size(size_bytes)}")]
        if newest:
            author = f" by {newest[0].author}" if newest[0].author else ""
            lines.append(("newest commit", f"{newest[0].seq}, {local_time(newest[0].time)}{author}"))
        lines += [("branches" if not i else "", name) for i, name in enumerate(branches)]
        lines += [
            ("checkpoints" if not i else "", f"{cp.name} (commit {cp.seq} of {cp.branch}, {local_time(cp.time)})")
            for i, cp in enumerate(checkpoints)
        ]
        for label, text in lines:
            print(f"{label:<14} {safe(text)}")

    return run_async(work)
