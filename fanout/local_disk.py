"""A disk handle of the embedded connection: the public interface of one line of a disk, over the blocking disk layer.

Owns the bridge from its async calls to blocking ones, and what they answer. Decides nothing about trees or commits.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

import anyio
import anyio.to_thread

from fanout.api import Content, Disk, Progress
from fanout.disk.disk import Disk as CoreDisk
from fanout.disk.disk import Point
from fanout.disk.gc import GRACE_S, KEEP_HISTORY_S
from fanout.disk.merge import Policy
from fanout.disk.paths import absolute, shown, tree_path
from fanout.disk.proposal import Landed
from fanout.disk.state import State
from fanout.disk.trim import Trimmed
from fanout.errors import Invalid, NotFound, Unavailable
from fanout.format.entry import Entry
from fanout.format.tree import DIR, Node, directory
from fanout.model import (
    Change,
    Checkpoint,
    Commit,
    DirEntry,
    FsckReport,
    GcReport,
    Grep,
    GrepOutput,
    GrepSyntax,
    Lock,
    ObjectInfo,
)
from fanout.run import request
from fanout.run.bridge import BATCH, Pull, each
from fanout.run.changes import change_of, changes_of
from fanout.run.describe import (
    KINDS,
    checkpoint_of,
    commit_of,
    directory_entry,
    fsck_report,
    list_tree,
    lock_of,
    object_info,
    only_time,
    when,
)
from fanout.run.grep import Searcher
from fanout.run.grep_query import check_query
from fanout.view.transfer import download, upload_intents

__all__ = ["LocalDisk"]


class LocalDisk(Disk):
    """A disk handle of an embedded connection. `author` is who its commits say they are by; `searcher` searches it."""

    def __init__(self, core: CoreDisk, point: Point, author: str, searcher: Searcher | None = None) -> None:
        self.core = core
        self.point = point
        self.id = core.id
        self.name = core.name
        self.branch_name = point.branch.name
        self.at = point.checkpoint
        self.author = author
        self._searcher = searcher

    async def pinned(self, seq: int | None = None) -> LocalDisk:
        """Return a handle on this line as it is now, or was at commit `seq`, whatever is committed meanwhile."""

        def work() -> LocalDisk:
            state = self.point.state() if seq is None else self.point.branch.at(seq)
            point = Point(self.point.branch, state.seq, self.point.checkpoint)
            return LocalDisk(self.core, point, self.author, self._searcher)

        return await anyio.to_thread.run_sync(work)

    async def upload(self, local: str | Path, remote: str = "/", *, progress: Progress | None = None) -> Commit:
        target = absolute("remote", remote)

        def work() -> Commit:
            branch = self.core.writable(self.point)
            state = branch.refresh()
            packer = self.core.packer()
            try:
                intents = upload_intents(packer, Path(local), target, bases=state.nodes, progress=progress)
                packed = packer.finish()
            except BaseException:
                packer.abandon()
                raise
            message = f"upload to /{shown(target)}"
            landed = self.core.apply(
                self.point,
                intents,
                policy=Policy.LAST_WINS,
                blobs=dict(packed.blobs),
                seen_blobs=state.blob_bytes(),
                base_seq=state.seq,
                author=self.author,
                message=message,
            )
            return self._commit(landed, message, branch.known().seq)

        return await anyio.to_thread.run_sync(work)

    async def download(self, remote: str, local: str | Path, *, progress: Progress | None = None) -> None:
        source = absolute("remote", remote)

        def work() -> None:
            state = self.point.state()
            self._must(state, source, "remote")
            download(self.core.reader, state, source, Path(local), progress=progress)

        await anyio.to_thread.run_sync(work)

    async def put_object(self, key: str, data: Content, *, mode: int = 0o644) -> ObjectInfo:
        content = request.check_content("data", data)
        path, is_directory = request.check_object(key, mode)
        if is_directory:
            request.check_no_content("data", content)

        def directory_there() -> ObjectInfo:
            self.core.make_directory(self.point, path, 0o755 if mode == 0o644 else mode, self.author)
            node = self.core.writable(self.point).known().get(path)
            return object_info(path, node or directory())

        def whole(body: bytes) -> ObjectInfo:
            return object_info(path, self.core.put_object(self.point, path, body, mode, self.author))

        def stream(pull: Pull) -> ObjectInfo:
            size = self.core.tuning.extent_bytes  # of the first run: how much is to come is not known
            node = self.core.put_content(self.point, path, size, pull.read, mode, self.author)
            return object_info(path, node)

        if is_directory:
            return await anyio.to_thread.run_sync(directory_there)
        if isinstance(content, bytes):
            return await anyio.to_thread.run_sync(whole, content)
        pull = Pull("data", content)
        try:
            return await anyio.to_thread.run_sync(stream, pull)
        finally:
            pull.stop()

    async def get_object(self, key: str, *, start: int = 0, end: int | None = None) -> bytes:
        path = tree_path("key", key)
        request.check_range(start, end)
        return await anyio.to_thread.run_sync(lambda: b"".join(self.core.file_chunks(self.point, path, start, end)))

    async def read_object(self, key: str, *, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        path = tree_path("key", key)
        request.check_range(start, end)
        async for chunk in each(lambda: self.core.file_chunks(self.point, path, start, end), 1):
            yield chunk

    async def head_object(self, key: str) -> ObjectInfo | None:
        path = tree_path("key", key.rstrip("/") or "/", allow_root=True)
        node = await anyio.to_thread.run_sync(self.core.lookup, self.point, path)
        if node is None or node.kind == DIR:
            return None
        return object_info(path, node)

    async def stat(self, path: str) -> DirEntry | None:
        key = absolute("path", path)
        node = await anyio.to_thread.run_sync(self.core.lookup, self.point, key)
        parent, _, name = key.rpartition(b"/")
        return None if node is None else directory_entry(parent, name, node)

    async def delete_object(self, key: str, *, recursive: bool = False) -> None:
        path = tree_path("key", key.rstrip("/") or "/", allow_root=recursive)
        await anyio.to_thread.run_sync(
            partial(self.core.delete_object, self.point, path, recursive=recursive, author=self.author)
        )

    async def move(self, source: str, target: str, *, replace: bool = False) -> Commit:
        return await self._moved("move", self.core.move, source, target, replace)

    async def copy(self, source: str, target: str, *, replace: bool = False) -> Commit:
        return await self._moved("copy", self.core.copy, source, target, replace)

    async def _moved(self, what: str, act: Callable[..., Landed], source: str, target: str, replace: bool) -> Commit:
        old, new = request.check_move(source, target, replace)
        landed = await anyio.to_thread.run_sync(partial(act, self.point, old, new, self.author, replace=replace))
        return self._commit(landed, f"{what} {shown(old)} to {shown(new)}", 0)

    async def list_objects(
        self, prefix: str = "", *, recursive: bool = True, start_after: str = ""
    ) -> AsyncIterator[ObjectInfo]:
        start = os.fsencode(prefix).lstrip(b"/")
        after = os.fsencode(start_after).lstrip(b"/")
        async for item in each(lambda: list_tree(self.point.state(), start, after, recursive)):
            yield item

    async def listdir(self, path: str = "/") -> AsyncIterator[DirEntry]:
        parent = absolute("path", path)

        def entries() -> Iterator[DirEntry]:
            state = self.point.state()
            node = self._must(state, parent, "path")
            if node.kind != DIR:
                raise Invalid.argument("path", path, "a directory; it is a " + KINDS[node.kind])
            for name, child in state.children(parent):
                yield directory_entry(parent, name, child)

        async for item in each(entries):
            yield item

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
        if self._searcher is None:
            raise Unavailable(f"{self!r} was not made by a connection: there is nothing that could search it")
        query = check_query(
            pattern,
            directory=directory,
            recursive=recursive,
            syntax=syntax,
            ignore_case=ignore_case,
            word=word,
            include=include,
            exclude=exclude,
            at=at,
            before=before,
            after=after,
            output=output,
            binary=binary,
            max_results=max_results,
            max_line_bytes=max_line_bytes,
            max_duration_s=max_duration_s,
            concurrency=concurrency,
        )
        return await self._searcher.grep(self.core, self.point, query)

    async def checkpoint(self, name: str | None = None) -> Checkpoint:
        made, record = await anyio.to_thread.run_sync(
            self.core.create_checkpoint, name, self.point.branch, self.point.seq
        )
        return checkpoint_of(made, record)

    async def checkpoints(self) -> AsyncIterator[Checkpoint]:
        async for name in each(self.core.checkpoint_names):
            record = await anyio.to_thread.run_sync(self.core.checkpoint_record, name)
            yield checkpoint_of(name, record)

    async def branch(self, name: str, *, checkpoint: str | None = None) -> LocalDisk:
        def work() -> LocalDisk:
            start = self.point
            if checkpoint is not None:
                record = self.core.checkpoint_record(checkpoint)
                start = Point(self.core.branch(record.branch), record.seq, checkpoint)
            made = self.core.create_branch(name, start)
            return LocalDisk(self.core, Point(made), self.author, self._searcher)

        return await anyio.to_thread.run_sync(work)

    async def branches(self) -> AsyncIterator[str]:
        async for name in each(self.core.branch_names):
            yield name

    async def merge(self, branch: Disk | str, *, on_conflict: Literal["fail", "ours", "theirs"] = "fail") -> Commit:
        def work() -> Commit:
            into = self.core.writable(self.point)
            if isinstance(branch, LocalDisk):
                if branch.id != self.id:
                    raise Invalid.argument("branch", repr(branch), f"a branch of the same disk, {self.name!r}")
                source = branch.point
            else:
                source = Point(self.core.branch(str(branch)))
            landed = self.core.merge(into, source, on_conflict, self.author)
            return self._commit(landed, f"merge {source.branch.name}", into.known().seq)

        return await anyio.to_thread.run_sync(work)

    async def log(self, *, limit: int | None = None, after: int = 0) -> AsyncIterator[Commit]:
        if limit is not None and limit < 1:
            raise Invalid.argument("limit", limit, "at least 1")
        if after < 0:
            raise Invalid.argument("after", after, "a sequence number of at least 0")
        async for commit in each(lambda: islice(self._history(after), limit)):
            yield commit

    async def diff(self, before: str | int, after: str | int | None = None) -> AsyncIterator[Change]:
        def changes() -> Iterator[Change]:
            old = self.core.point(before, self.branch_name)
            new = self.point if after is None else self.core.point(after, self.branch_name)
            for difference in self.core.diff(old, new):
                if not only_time(difference.before, difference.after):
                    yield change_of(difference)

        async for change in each(changes):
            yield change

    def _history(self, after: int) -> Iterator[Commit]:
        """Newest first, reading the log a window at a time."""
        high = self.point.branch.refresh().seq if self.point.seq is None else self.point.seq
        while high > after:
            low = max(after, high - BATCH)
            entries: list[Entry] = []
            while low < high:
                try:
                    entries = list(self.point.branch.history(low, high))
                    break
                except Trimmed as trimmed:  # here the history ends
                    low = after = trimmed.boundary
            for entry in reversed(entries):
                for commit in reversed(entry.commits):
                    if commit.effects or commit.merged_uuid:  # else it only took or released a lock
                        yield commit_of(entry.seq, commit)
            high = low

    def _must(self, state: State, path: bytes, argument: str) -> Node:
        node = state.get(path)
        if node is None:
            raise NotFound(
                f"{argument}: disk {self.name!r} has no {'/' + shown(path)!r} on {self.at or self.branch_name!r}"
            )
        return node

    async def locks(self) -> list[Lock]:
        def work() -> list[Lock]:
            held = sorted(self.point.branch.refresh().locks.values(), key=lambda lock: (lock.seq, lock.id))
            return [lock_of(lock) for lock in held]

        return await anyio.to_thread.run_sync(work)

    async def break_lock(self, lock: Lock | str) -> None:
        lock_id = lock.id if isinstance(lock, Lock) else lock
        release = partial(self.point.branch.release, lock_id, broken=True, author=self.author)
        await anyio.to_thread.run_sync(release)

    async def gc(
        self, *, grace_s: float = GRACE_S, keep_history_s: float = KEEP_HISTORY_S, dry_run: bool = False
    ) -> GcReport:
        def work() -> GcReport:
            began_s = self.core.runtime.monotonic()
            collected = self.core.collect(grace_s, keep_history_s, dry_run)
            took_ms = (self.core.runtime.monotonic() - began_s) * 1e3
            return GcReport(dry_run=dry_run, duration_ms=took_ms, **asdict(collected))

        return await anyio.to_thread.run_sync(work)

    async def fsck(self, *, quick: bool = False) -> FsckReport:
        def work() -> FsckReport:
            began_s = self.core.runtime.monotonic()
            checked = self.core.check(quick=quick)
            return fsck_report(checked, quick, (self.core.runtime.monotonic() - began_s) * 1e3)

        return await anyio.to_thread.run_sync(work)

    def _commit(self, landed: Landed, message: str, seq: int) -> Commit:
        return Commit(
            seq=seq if landed.seq is None else landed.seq,
            time=when(landed.time_ns),
            author=self.author,
            message=message,
            exec_id=None,
            base_seq=seq if landed.seq is None else landed.seq - 1,
            changes=changes_of(landed.effects),
        )
