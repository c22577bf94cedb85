"""`fanout put`, `get`, `ls`, `cat`, `rm`, `mv`: a disk's files, without starting a machine."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from fanout.cli.app import disk_argument, json_option, run_async, session

if TYPE_CHECKING:
    from fanout.api import Disk, Progress
    from fanout.model import DirEntry

__all__ = ["COMMANDS"]

_KINDS = {"file": "-", "directory": "d", "symlink": "l"}


@click.command(short_help="Upload a file or directory in one commit.")
@disk_argument
@click.argument("local", metavar="LOCAL")
@click.argument("remote", metavar="REMOTE")
@json_option
@click.pass_context
def put(context: click.Context, spec: str, local: str, remote: str, as_json: bool) -> int:
    """Upload LOCAL (a file, a directory, or - for standard input) to REMOTE, in one commit.

    A REMOTE that ends in / gets LOCAL's name appended. A .fanoutignore in a directory is honoured.
    """
    from fanout.cli.render import count, json_document, name
    from fanout.errors import Invalid, NotFound

    if local == "-":
        if remote.endswith("/"):
            raise Invalid.argument("REMOTE", remote, "the name of a file, as standard input has none")
    elif not os.path.lexists(local):
        raise NotFound(f"there is no {local!r} on this host")
    elif remote.endswith("/") and remote.strip("/"):
        remote += os.path.basename(os.path.abspath(local))
    elif not remote.strip("/") and not os.path.isdir(local):
        remote = "/" + os.path.basename(local)

    async def work() -> None:
        async with session(context) as fo:
            disk = await fo.disks.get(spec)
            if local == "-":
                stored = await disk.put_object(remote, sys.stdin.buffer)
                seq, changed = None, 1
                target = stored.key
            else:
                with _progress("uploading") as progress:
                    commit = await disk.upload(local, _absolute(remote), progress=progress)
                seq, changed = commit.seq, len(commit.changes)
                target = remote
        if as_json:
            json_document({"disk": disk.name, "path": target, "seq": seq, "changed": changed})
        elif sys.stdout.isatty():
            print(f"{name(local)} -> {disk.name}:{name(_absolute(target))} ({count(changed, 'path')} changed)")

    return run_async(work)


@click.command(short_help="Download a file or directory.")
@disk_argument
@click.argument("remote", metavar="REMOTE")
@click.argument("local", metavar="[LOCAL]", default="")
@click.pass_context
def get(context: click.Context, spec: str, remote: str, local: str) -> int:
    """Download the file or directory REMOTE to LOCAL (by default its own name here; - is standard output)."""
    target = local or os.path.basename(remote.rstrip("/")) or "."

    async def work() -> None:
        async with session(context) as fo:
            disk = await fo.disks.get(spec)
            if local == "-":
                await _copy_out(disk, remote)
                return
            into = target
            if os.path.isdir(into) and await disk.head_object(remote) is not None:
                into = os.path.join(into, os.path.basename(remote))
            with _progress("downloading") as progress:
                await disk.download(_absolute(remote), into, progress=progress)

    return run_async(work)


@click.command("ls", short_help="List a directory.")
@disk_argument
@click.argument("path", metavar="[PATH]", default="/")
@click.option("-l", "long", is_flag=True, help="Show mode, size and time of change.")
@click.option("-R", "recursive", is_flag=True, help="List everything below, as paths.")
@json_option
@click.pass_context
def list_(context: click.Context, spec: str, path: str, long: bool, recursive: bool, as_json: bool) -> int:
    """List PATH (a directory, or one file) of DISK, in byte order of names."""
    from fanout.cli.render import json_stream

    async def work() -> None:
        async with session(context) as fo:
            disk = await fo.disks.get(spec)
            entries = _entries(disk, path, recursive)
            if as_json:
                await json_stream(entries)
                return
            below = len(path.strip("/")) + 1 if path.strip("/") else 0
            async for entry in entries:
                shown = entry.path.strip("/")[below:] if recursive else ""
                print(_line(entry, shown or entry.name, long))

    return run_async(work)


@click.command(short_help="Write files to standard output.")
@disk_argument
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.pass_context
def cat(context: click.Context, spec: str, paths: tuple[str, ...]) -> int:
    """Write the exact bytes of files to standard output."""

    async def work() -> None:
        async with session(context) as fo:
            disk = await fo.disks.get(spec)
            for path in paths:
                await _copy_out(disk, path)

    return run_async(work)


@click.command("rm", short_help="Remove files or directories.")
@disk_argument
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option("-r", "recursive", is_flag=True, help="Remove directories and what is in them.")
@click.option("-f", "force", is_flag=True, help="Say nothing of a path that is not there.")
@click.pass_context
def remove(context: click.Context, spec: str, paths: tuple[str, ...], recursive: bool, force: bool) -> int:
    """Remove files, links and empty directories. What was there stays in the history."""
    from fanout.errors import NotFound

    async def work() -> None:
        async with session(context) as fo:
            disk = await fo.disks.get(spec)
            for path in paths:
                if not force and not await _exists(disk, path):
                    raise NotFound(f"{spec!r} has no {path!r}; -f ignores what is not there")
                await disk.delete_object(path.rstrip("/") or path, recursive=recursive)

    return run_async(work)


@click.command(short_help="Rename a file or directory.")
@disk_argument
@click.argument("source", metavar="SOURCE")
@click.argument("target", metavar="TARGET")
@click.pass_context
def mv(context: click.Context, spec: str, source: str, target: str) -> int:
    """Rename SOURCE to TARGET in one commit, moving no data. A TARGET that ends in / gets SOURCE's name appended."""
    to = target + os.path.basename(source.rstrip("/")) if target.endswith("/") else target

    async def work() -> None:
        async with session(context) as fo:
            disk = await fo.disks.get(spec)
            await disk.move(_absolute(source.rstrip("/")), _absolute(to))

    return run_async(work)


COMMANDS = (put, get, list_, cat, remove, mv)


async def _exists(disk: Disk, path: str) -> bool:
    from fanout.errors import Invalid, NotFound

    if await disk.head_object(path.rstrip("/") or path) is not None:
        return True
    try:
        async for _ in disk.listdir(_absolute(path)):
            break
    except NotFound:
        return False
    except Invalid:  # below a file
        return False
    return True


async def _entries(disk: Disk, path: str, recursive: bool) -> AsyncIterator[DirEntry]:
    """Yield what `ls` shows: the entries of a directory, all below it, or the one file `path` names."""
    from fanout.model import DirEntry

    trimmed = path.rstrip("/")
    found = await disk.head_object(trimmed) if trimmed.strip("/") else None
    if found is not None:
        mtime_ns = int(found.last_modified.timestamp() * 1e9)
        yield DirEntry(
            name=os.path.basename(trimmed),
            path=found.key,
            kind=found.kind,
            size=found.size,
            mode=found.mode,
            mtime_ns=mtime_ns,
        )
        return
    waiting = [_absolute(trimmed)]
    while waiting:
        entries = [entry async for entry in disk.listdir(waiting.pop())]
        for entry in entries:
            yield entry
        if recursive:
            waiting += [_absolute(entry.path) for entry in reversed(entries) if entry.kind == "directory"]


def _line(entry: DirEntry, shown: str, long: bool) -> str:
    from datetime import UTC, datetime

    from fanout.cli.render import local_time, name

    text = name(shown) + ("/" if entry.kind == "directory" else "")
    if not long:
        return text
    moment = datetime.fromtimestamp(entry.mtime_ns / 1e9, UTC)
    target = f" -> {name(entry.target)}" if entry.target is not None else ""
    return f"{_KINDS[entry.kind]}{_permissions(entry.mode)} {entry.size:>11,} {local_time(moment)} {text}{target}"


def _permissions(mode: int) -> str:
    import stat

    return stat.filemode(mode & 0o7777)[1:]


def _absolute(path: str) -> str:
    """A disk has no working directory: `a/b` and `/a/b` are the same place."""
    return path if path.startswith("/") else "/" + path


async def _copy_out(disk: Disk, path: str) -> None:
    sys.stdout.flush()
    async for chunk in disk.read_object(path):
        sys.stdout.buffer.write(chunk)
    sys.stdout.buffer.flush()


@contextmanager
def _progress(verb: str) -> Iterator[Progress | None]:
    """Show files and bytes on a terminal's stderr while the body runs; elsewhere do nothing."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.live import Live
    from rich.text import Text

    from fanout.cli.render import count, size, stderr_console

    state: dict[str, Any] = {"text": f"{verb} ..."}

    def progress(files: int, size_bytes: int, files_total: int | None) -> None:
        of = f" of {files_total:,}" if files_total is not None else ""
        state["text"] = f"{verb} {count(files, 'file')}{of}, {size(size_bytes)}"

    show: Callable[[], Text] = lambda: Text(state["text"])  # noqa: E731 - typed for mypy
    with Live(console=stderr_console(), get_renderable=show, transient=True, refresh_per_second=8):
        yield progress
