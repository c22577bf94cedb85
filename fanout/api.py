"""The public interface: connections, disks and execs. Embedded and remote connections both implement it.

Owns names, defaults and docstrings of what users call, and what can be said in terms of it (`map`, `mount`).
How it is done is in local.py (this host); default.py makes connections.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal

import anyio

from fanout.disk.paths import tree_path
from fanout.errors import Denied, Invalid
from fanout.format.layout import MAIN
from fanout.model import (
    Change,
    Checkpoint,
    Commit,
    CommitPolicy,
    DirEntry,
    Event,
    FsckReport,
    GcReport,
    Grep,
    GrepOutput,
    GrepSyntax,
    Lock,
    Mode,
    Mount,
    ObjectInfo,
    Run,
)
from fanout.run.request import check_checkout, expand

__all__ = ["Content", "Disk", "Disks", "Fanout", "mounts_of"]

Mounts = Mapping[str, "Disk | Mount"]
#: What a file is made of: all at once, or bit by bit.
Content = bytes | str | AsyncIterable[bytes] | BinaryIO
#: Called with files done, bytes done and files in all (None while unknown), from another thread.
Progress = Callable[[int, int, int | None], None]


class Disk(ABC):
    """A handle on one line of a disk: a branch, which can be written, or a checkpoint, which cannot.

    `id` is "dsk-" and 16 hex digits; `branch_name` is the branch (that of a checkpoint: where it was taken);
    `at` is the checkpoint's name or None.
    """

    id: str
    name: str
    branch_name: str
    at: str | None

    def __repr__(self) -> str:
        line = self.at or self.branch_name
        return f"<fanout.Disk {self.name if line == MAIN else f'{self.name}@{line}'} ({self.id})>"

    def mount(
        self,
        *,
        read_only: bool = False,
        conditional: bool = False,
        subdirectory: str | None = None,
        checkout: Iterable[str] = (),
        queue_ms: float | None = None,
        branch: str | None = None,
        at: str | int | None = None,
    ) -> Mount:
        """Say how an exec sees this disk.

        Default is `shared`: the first commit wins a path, and a later one that changed it too is a `Conflict`.
        `conditional`: every commit lands, the later one wins a path. `read_only`: writes fail with EROFS.
        `subdirectory`: only this part of the disk is seen, as the mount's root. `at`: a checkpoint name or a sequence
        number to start from instead of the newest commit. `branch`: this handle's by default.

        `checkout`: paths of the disk (they need not exist) on which the exec takes exclusive, recursive locks before
        its command starts, all or none, and keeps until its commit, which releases them; anybody else's commit under
        them is a `Conflict`. `queue_ms` bounds the wait for them, then `Busy` (default: the exec's timeout).
        """
        if read_only and conditional:
            raise Invalid.argument("conditional", conditional, "a mount is read_only or conditional, not both")
        if self.at is not None and at is None:
            at = self.at
        if self.at is not None and not read_only:
            raise Denied(f"{self!r} is a checkpoint: mount it with read_only=True, or start a branch from it")
        paths = check_checkout(checkout, queue_ms, read_only)
        if subdirectory is not None:
            trimmed = subdirectory.rstrip("/") or "/" if isinstance(subdirectory, str) else subdirectory
            tree_path("subdirectory", trimmed, allow_root=True)
        mode: Mode = "read_only" if read_only else "conditional" if conditional else "shared"
        return Mount(
            disk=self.id,
            branch=branch or self.branch_name,
            mode=mode,
            subdirectory=subdirectory,
            checkout=paths,
            queue_ms=queue_ms,
            at=at,
        )

    # Objects and trees ---------------------------------------------------------------------------------------

    @abstractmethod
    async def upload(self, local: str | Path, remote: str = "/", *, progress: Progress | None = None) -> Commit:
        """Put a local file or tree at `remote`, in one commit. A `.fanoutignore` (gitignore syntax) in it is honoured.

        Names already there are replaced; names the local tree does not have stay.
        """

    @abstractmethod
    async def download(self, remote: str, local: str | Path, *, progress: Progress | None = None) -> None:
        """Write the file or tree at `remote` to a local path. Nothing outside of `local` is written."""

    @abstractmethod
    async def put_object(self, key: str, data: Content, *, mode: int = 0o644) -> ObjectInfo:
        """Store one file, durably, with the directories it needs. A key that ends in `/` makes a directory.

        `data` is bytes, or text that is stored as UTF-8, or (of any size, with bounded memory) an async iterable of
        bytes or a file that is open for reading bytes. All of it becomes visible in one commit, or nothing of it.
        `Conflict` where a directory has the name, or a file has the name of a directory it needs.
        """

    @abstractmethod
    async def get_object(self, key: str, *, start: int = 0, end: int | None = None) -> bytes:
        """Return one file's bytes, or those from `start` up to `end` (exclusive; the file's end by default).

        What is asked for beyond the file's end is left out. `NotFound`, or `Invalid` for a directory or link.
        """

    @abstractmethod
    def read_object(self, key: str, *, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        """Like `get_object`, yielding the bytes in chunks (of 4 MiB at most, as stored by default).

        All chunks are of the file as it was at the start, whatever becomes of it meanwhile.
        """

    @abstractmethod
    async def head_object(self, key: str) -> ObjectInfo | None:
        """Describe one file (or link); None if there is none or it is a directory."""

    @abstractmethod
    async def stat(self, path: str) -> DirEntry | None:
        """Describe whatever has this absolute path, a link as a link; None if nothing has. The root has no name."""

    @abstractmethod
    async def delete_object(self, key: str, *, recursive: bool = False) -> None:
        """Remove a file, a link or an empty directory (a whole tree if `recursive`). What is not there is fine."""

    @abstractmethod
    async def move(self, source: str, target: str, *, replace: bool = False) -> Commit:
        """Rename a file or directory in one commit, whatever its size; `NotFound`, `Exists`.

        `replace`: a file takes the place of a file or link that has the name; a directory never takes one.
        """

    @abstractmethod
    async def copy(self, source: str, target: str, *, replace: bool = False) -> Commit:
        """Make a second one of a file or directory in one commit that moves no data; otherwise like `move`.

        The copies are of now. With `replace` a file may be copied onto itself, which only gives it the present time.
        """

    @abstractmethod
    def list_objects(
        self, prefix: str = "", *, recursive: bool = True, start_after: str = ""
    ) -> AsyncIterator[ObjectInfo]:
        """Yield the files whose key starts with `prefix`, in byte order of keys.

        Not `recursive`: only those without a `/` after the prefix, and directories as keys ending in `/`.
        """

    @abstractmethod
    def listdir(self, path: str = "/") -> AsyncIterator[DirEntry]:
        """Yield one directory's entries in byte order; `NotFound`, or `Invalid` for a file."""

    @abstractmethod
    async def grep(
        self,
        pattern: str | bytes,
        *,
        directory: str = "/",
        recursive: bool = True,
        syntax: GrepSyntax = "rust",
        ignore_case: bool = False,
        word: bool = False,
        include: Iterable[str] = (),
        exclude: Iterable[str] = (),
        at: str | int | None = None,
        before: int = 0,
        after: int = 0,
        output: GrepOutput = "lines",
        binary: bool = True,
        max_results: int = 1000,
        max_line_bytes: int = 4096,
        max_duration_s: float = 30.0,
        concurrency: int | None = None,
    ) -> Grep:
        """Search the files below `directory` for lines that match, as ripgrep would find them in a download.

        `syntax`: "rust" (ripgrep's own), "ere" (POSIX extended, as `grep -E`), "fixed" or "pcre2". `word`: only where
        the match is a whole word. `include`, `exclude`: globs as for `rg -g`, seen from the disk's root; what is both
        is excluded. `at`: a branch, a checkpoint or a commit of this branch; the newest commit by default. `before`,
        `after`: lines around a match to bring (to 1,000). `output`: "lines", "count" (of lines, for each file), or
        "files" (their names only).

        Every file is searched, hidden and ignored ones too; symbolic links are not followed. A file that starts with a
        byte order mark is searched as what it says. A file that holds a NUL byte is named in `binary_files` if a line
        of it matches; those with one in their first 8 KiB are left out if `binary` is false. Results are in byte order
        of paths, then by line, whatever `concurrency` is (default: the host's cores); `max_results` (1 to 1,000,000)
        are the first of that order. Lines are cut to `max_line_bytes` (1 to 1 MiB). `max_duration_s` (to 3,600) bounds
        the whole call. Lines end with newlines only: a carriage return is part of its line.

        Errors: `Invalid` for a bad argument and a pattern that does not compile (the message says where), `NotFound`
        and `Invalid` for a `directory` that is not there or none, `EngineUnavailable` where there is no ripgrep.
        """

    # History -------------------------------------------------------------------------------------------------

    @abstractmethod
    async def checkpoint(self, name: str | None = None) -> Checkpoint:
        """Name the branch as it is now; `Exists` if the name is taken. Costs one small object."""

    @abstractmethod
    def checkpoints(self) -> AsyncIterator[Checkpoint]:
        """Yield the disk's checkpoints in order of names."""

    @abstractmethod
    async def branch(self, name: str, *, checkpoint: str | None = None) -> Disk:
        """Start a branch from a checkpoint, or from this handle's line as it is now. Costs one small object."""

    @abstractmethod
    def branches(self) -> AsyncIterator[str]:
        """Yield the names of the disk's branches, `rescue/…` included."""

    @abstractmethod
    async def merge(self, branch: Disk | str, *, on_conflict: Literal["fail", "ours", "theirs"] = "fail") -> Commit:
        """Bring another branch's changes into this one, three-way.

        Where both sides changed a path: "fail" raises `Conflict` and changes nothing, "ours" keeps this branch's,
        "theirs" takes the other's.
        """

    @abstractmethod
    def log(self, *, limit: int | None = None, after: int = 0) -> AsyncIterator[Commit]:
        """Yield commits, newest first, down to sequence number `after` (exclusive), at most `limit`."""

    @abstractmethod
    def diff(self, before: str | int, after: str | int | None = None) -> AsyncIterator[Change]:
        """Yield what differs between two points (branch, checkpoint or sequence number; default: this line now)."""

    # Locks ---------------------------------------------------------------------------------------------------

    @abstractmethod
    async def locks(self) -> list[Lock]:
        """Return the locks that are held on this branch, in order of their taking."""

    @abstractmethod
    async def break_lock(self, lock: Lock | str) -> None:
        """Take a lock (or that of an id) from its holder, whose commit then fails with `LeaseLost`; `NotFound`."""

    # Care ----------------------------------------------------------------------------------------------------

    @abstractmethod
    async def gc(
        self, *, grace_s: float = 24 * 3600.0, keep_history_s: float = 30 * 24 * 3600.0, dry_run: bool = False
    ) -> GcReport:
        """Trim old history and delete what nothing refers to, on all branches of this disk.

        Branches and checkpoints read as before, for ever. What was superseded more than `keep_history_s` ago and is
        named by none of them goes, and what was never referred to goes after `grace_s`, both by the store's clock. A
        `grace_s` of less than a day is safe only while nothing is being written. `Corrupt` if something that is
        needed is damaged; then nothing is deleted.
        """

    @abstractmethod
    async def fsck(self, *, quick: bool = False) -> FsckReport:
        """Verify every object that a branch, a checkpoint or the history of this disk needs; changes nothing.

        Damage is in the report, with the paths it affects, and no error. `quick` leaves out the contents of files: it
        looks at the indexes of packs only.
        """


class Disks(ABC):
    """The disks of a connection."""

    @abstractmethod
    async def create(self, name: str) -> Disk:
        """Create a disk; `Exists` if the name is taken. Names are `[a-z0-9][a-z0-9._-]{0,62}`.

        The store is probed first: one that lets two writers win a race is refused.
        """

    @abstractmethod
    async def get(self, name: str) -> Disk:
        """Open `name`, `name@branch`, `name@checkpoint`, or the same with a disk id; `NotFound`."""

    @abstractmethod
    def list(self) -> AsyncIterator[Disk]:
        """Yield all disks in order of names."""

    @abstractmethod
    async def delete(self, name: str) -> None:
        """Delete a disk with all its history; `NotFound`."""


class Fanout(ABC):
    """A connection. Use it as an async context manager, or call `open` and `aclose`."""

    disks: Disks

    @abstractmethod
    async def open(self) -> Fanout:
        """Connect; called by `async with`."""

    @abstractmethod
    async def aclose(self) -> None:
        """Stop what runs and release everything."""

    async def __aenter__(self) -> Fanout:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    @abstractmethod
    async def exec(
        self,
        command: str,
        *,
        disks: Mounts | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | str | None = b"",
        timeout_s: float = 300.0,
        network: bool = False,
        commit: CommitPolicy = "always",
        cpus: float | None = None,
        memory_mib: int | None = None,
        idempotency_key: str | None = None,
    ) -> Run:
        """Run one command in a fresh sandbox that mounts `disks`, commit what it wrote, and return the result.

        The command is run by bash (or sh). A disk is seen at /mnt/<its key>, in `shared` mode unless mounted
        otherwise; `cwd` is the only disk's mount by default, else /mnt. When this returns, the writes are durable
        and every process of the command is dead. Whether it failed is in the result: non-zero exit, a timeout and a
        conflict are no exceptions. Cancelling the call kills the command and commits nothing.

        Errors: `Invalid`, `NotFound`, `EngineUnavailable` before anything starts; `Unavailable`, `Unknown` from
        the store.
        """

    async def grep(self, disk: Disk | str, pattern: str | bytes, **options: Any) -> Grep:
        """`Disk.grep` of a disk, which may be given by name as for `disks.get`; the options are the same."""
        found = await self.disks.get(disk) if isinstance(disk, str) else disk
        return await found.grep(pattern, **options)

    @abstractmethod
    def stream(self, command: str, **options: Any) -> AsyncGenerator[Event, None]:
        """Like `exec`, yielding `Started`, `Output(stream, data, text)` as it comes, and `Finished(run)`."""

    async def map(
        self,
        command: str,
        items: Iterable[object],
        *,
        max_in_flight: int | None = None,
        progress: Callable[[int, Run], None] | None = None,
        **options: Any,
    ) -> list[Run]:
        """Run `command` once for each item, at once; returns the results in order of the items.

        `{}` in the command is the item, quoted for the shell; `{#}` its number, from 1. `max_in_flight` bounds how
        many are under way (default: the connection's cap alone). `progress(index, run)` is called as each ends. An
        error (not a failing command) cancels the others and is raised. Other options as in `exec`.
        """
        commands = expand(command, items)
        if max_in_flight is not None and (type(max_in_flight) is not int or max_in_flight < 1):
            raise Invalid.argument("max_in_flight", max_in_flight, "at least 1")
        runs: list[Run | None] = [None] * len(commands)
        failures: list[BaseException] = []
        gate = anyio.Semaphore(max_in_flight or max(len(commands), 1), fast_acquire=True)

        async def one(index: int) -> None:
            try:
                async with gate:
                    run = runs[index] = await self.exec(commands[index], **options)
                if progress is not None:
                    progress(index, run)
            except Exception as error:
                failures.append(error)
                group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            for index in range(len(commands)):
                group.start_soon(one, index)
        if failures:
            raise failures[0]
        return [run for run in runs if run is not None]


def mounts_of(disks: Mapping[str, object]) -> dict[str, Mount]:
    """Return how an exec sees its disks; `Invalid` for what is no disk and no mount of one."""
    mounts: dict[str, Mount] = {}
    for name, given in disks.items():
        mount = given.mount() if isinstance(given, Disk) else given
        if not isinstance(mount, Mount):
            raise Invalid.argument(f"disks[{name!r}]", given, "a disk, or what disk.mount(...) returned")
        mounts[name] = mount
    return mounts
