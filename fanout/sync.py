"""The same objects with blocking methods: `from fanout.sync import connect`.

Owns the bridge from blocking callers to the async interface: one event loop in one background thread per
connection. Every method takes, returns and raises what its async twin in api.py does.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, TypeVar, cast

import anyio.to_thread
from anyio.from_thread import BlockingPortal, start_blocking_portal

from fanout import api, default
from fanout.api import Progress
from fanout.errors import Unavailable
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
    Mount,
    ObjectInfo,
    Run,
)

__all__ = ["Disk", "Disks", "Fanout", "connect"]

T = TypeVar("T")
Content = bytes | str | Iterable[bytes] | BinaryIO
Mounts = Mapping[str, "Disk | Mount"]


class _Bridge:
    """Runs coroutines and async iterators of one connection in its event loop thread."""

    def __init__(self) -> None:
        self._context: AbstractContextManager[BlockingPortal] | None = None
        self._portal: BlockingPortal | None = None

    def start(self) -> None:
        if self._context is None:
            self._context = start_blocking_portal()
            self._portal = self._context.__enter__()

    def stop(self) -> None:
        context, self._context, self._portal = self._context, None, None
        if context is not None:
            context.__exit__(None, None, None)

    def call(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if self._portal is None:
            raise Unavailable("this connection is not open: use `with fanout.sync.connect(...) as fo`")
        over = threading.Event()

        async def run() -> T:
            try:
                return await function()
            finally:
                over.set()

        future: Future[T] = self._portal.start_task_soon(run)
        try:
            return future.result()
        except BaseException:
            # Perhaps this thread was interrupted: what it waited for is not to go on without it.
            if future.cancel():
                over.wait()
            raise

    def each(self, make: Callable[[], AsyncIterator[T]]) -> Iterator[T]:
        iterator = make()

        async def step() -> tuple[bool, T | None]:
            try:
                return True, await anext(iterator)
            except StopAsyncIteration:
                return False, None

        async def finish() -> None:
            close = getattr(iterator, "aclose", None)
            if close is not None:
                await close()

        try:
            while True:
                more, item = self.call(step)
                if not more:
                    return
                yield item  # type: ignore[misc]
        finally:
            self.call(finish)


class Disk:
    """A blocking handle on one line of a disk; see `fanout.Disk`."""

    def __init__(self, inner: api.Disk, bridge: _Bridge) -> None:
        self._inner = inner
        self._bridge = bridge
        self.id = inner.id
        self.name = inner.name
        self.branch_name = inner.branch_name
        self.at = inner.at

    def __repr__(self) -> str:
        return repr(self._inner)

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
        """See `fanout.Disk.mount`."""
        return self._inner.mount(
            read_only=read_only,
            conditional=conditional,
            subdirectory=subdirectory,
            checkout=checkout,
            queue_ms=queue_ms,
            branch=branch,
            at=at,
        )

    def upload(self, local: str | Path, remote: str = "/", *, progress: Progress | None = None) -> Commit:
        """See `fanout.Disk.upload`."""
        return self._bridge.call(lambda: self._inner.upload(local, remote, progress=progress))

    def download(self, remote: str, local: str | Path, *, progress: Progress | None = None) -> None:
        """See `fanout.Disk.download`."""
        self._bridge.call(lambda: self._inner.download(remote, local, progress=progress))

    def put_object(self, key: str, data: Content, *, mode: int = 0o644) -> ObjectInfo:
        """See `fanout.Disk.put_object`; `data` may be an iterable of bytes, where that takes an async one."""
        return self._bridge.call(lambda: self._inner.put_object(key, _inner_content(data), mode=mode))

    def get_object(self, key: str, *, start: int = 0, end: int | None = None) -> bytes:
        """See `fanout.Disk.get_object`."""
        return self._bridge.call(lambda: self._inner.get_object(key, start=start, end=end))

    def read_object(self, key: str, *, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """See `fanout.Disk.read_object`."""
        return self._bridge.each(lambda: self._inner.read_object(key, start=start, end=end))

    def head_object(self, key: str) -> ObjectInfo | None:
        """See `fanout.Disk.head_object`."""
        return self._bridge.call(lambda: self._inner.head_object(key))

    def stat(self, path: str) -> DirEntry | None:
        """See `fanout.Disk.stat`."""
        return self._bridge.call(lambda: self._inner.stat(path))

    def delete_object(self, key: str, *, recursive: bool = False) -> None:
        """See `fanout.Disk.delete_object`."""
        self._bridge.call(lambda: self._inner.delete_object(key, recursive=recursive))

    def move(self, source: str, target: str, *, replace: bool = False) -> Commit:
        """See `fanout.Disk.move`."""
        return self._bridge.call(lambda: self._inner.move(source, target, replace=replace))

    def copy(self, source: str, target: str, *, replace: bool = False) -> Commit:
        """See `fanout.Disk.copy`."""
        return self._bridge.call(lambda: self._inner.copy(source, target, replace=replace))

    def list_objects(self, prefix: str = "", *, recursive: bool = True, start_after: str = "") -> Iterator[ObjectInfo]:
        """See `fanout.Disk.list_objects`."""
        return self._bridge.each(lambda: self._inner.list_objects(prefix, recursive=recursive, start_after=start_after))

    def listdir(self, path: str = "/") -> Iterator[DirEntry]:
        """See `fanout.Disk.listdir`."""
        return self._bridge.each(lambda: self._inner.listdir(path))

    def grep(
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
        """See `fanout.Disk.grep`."""
        return self._bridge.call(
            lambda: self._inner.grep(
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
        )

    def checkpoint(self, name: str | None = None) -> Checkpoint:
        """See `fanout.Disk.checkpoint`."""
        return self._bridge.call(lambda: self._inner.checkpoint(name))

    def checkpoints(self) -> Iterator[Checkpoint]:
        """See `fanout.Disk.checkpoints`."""
        return self._bridge.each(self._inner.checkpoints)

    def branch(self, name: str, *, checkpoint: str | None = None) -> Disk:
        """See `fanout.Disk.branch`."""
        return Disk(self._bridge.call(lambda: self._inner.branch(name, checkpoint=checkpoint)), self._bridge)

    def branches(self) -> Iterator[str]:
        """See `fanout.Disk.branches`."""
        return self._bridge.each(self._inner.branches)

    def merge(self, branch: Disk | str, *, on_conflict: Literal["fail", "ours", "theirs"] = "fail") -> Commit:
        """See `fanout.Disk.merge`."""
        source = branch._inner if isinstance(branch, Disk) else branch
        return self._bridge.call(lambda: self._inner.merge(source, on_conflict=on_conflict))

    def log(self, *, limit: int | None = None, after: int = 0) -> Iterator[Commit]:
        """See `fanout.Disk.log`."""
        return self._bridge.each(lambda: self._inner.log(limit=limit, after=after))

    def diff(self, before: str | int, after: str | int | None = None) -> Iterator[Change]:
        """See `fanout.Disk.diff`."""
        return self._bridge.each(lambda: self._inner.diff(before, after))

    def locks(self) -> list[Lock]:
        """See `fanout.Disk.locks`."""
        return self._bridge.call(self._inner.locks)

    def break_lock(self, lock: Lock | str) -> None:
        """See `fanout.Disk.break_lock`."""
        self._bridge.call(lambda: self._inner.break_lock(lock))

    def gc(
        self, *, grace_s: float = 24 * 3600.0, keep_history_s: float = 30 * 24 * 3600.0, dry_run: bool = False
    ) -> GcReport:
        """See `fanout.Disk.gc`."""
        return self._bridge.call(
            lambda: self._inner.gc(grace_s=grace_s, keep_history_s=keep_history_s, dry_run=dry_run)
        )

    def fsck(self, *, quick: bool = False) -> FsckReport:
        """See `fanout.Disk.fsck`."""
        return self._bridge.call(lambda: self._inner.fsck(quick=quick))


class Disks:
    """The disks of a blocking connection; see `fanout.Disks`."""

    def __init__(self, connection: api.Fanout, bridge: _Bridge) -> None:
        self._connection = connection
        self._bridge = bridge

    def create(self, name: str) -> Disk:
        """See `fanout.Disks.create`."""
        return Disk(self._bridge.call(lambda: self._connection.disks.create(name)), self._bridge)

    def get(self, name: str) -> Disk:
        """See `fanout.Disks.get`."""
        return Disk(self._bridge.call(lambda: self._connection.disks.get(name)), self._bridge)

    def list(self) -> Iterator[Disk]:
        """See `fanout.Disks.list`."""
        for inner in self._bridge.each(lambda: self._connection.disks.list()):
            yield Disk(inner, self._bridge)

    def delete(self, name: str) -> None:
        """See `fanout.Disks.delete`."""
        self._bridge.call(lambda: self._connection.disks.delete(name))


class Fanout:
    """A blocking connection; a context manager. Its methods may be called from any number of threads."""

    def __init__(self, inner: api.Fanout) -> None:
        self._inner = inner
        self._bridge = _Bridge()
        self.disks = Disks(inner, self._bridge)

    def __enter__(self) -> Fanout:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self) -> Fanout:
        """Connect; called by `with`."""
        self._bridge.start()
        try:
            self._bridge.call(self._inner.open)
        except BaseException:
            self._bridge.stop()
            raise
        return self

    def close(self) -> None:
        """Release everything."""
        try:
            self._bridge.call(self._inner.aclose)
        finally:
            self._bridge.stop()

    def exec(
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
        """See `fanout.Fanout.exec`."""
        return self._bridge.call(
            lambda: self._inner.exec(
                command,
                disks=_inner_mounts(disks),
                cwd=cwd,
                env=env,
                stdin=stdin,
                timeout_s=timeout_s,
                network=network,
                commit=commit,
                cpus=cpus,
                memory_mib=memory_mib,
                idempotency_key=idempotency_key,
            )
        )

    def grep(self, disk: Disk | str, pattern: str | bytes, **options: Any) -> Grep:
        """See `fanout.Fanout.grep`."""
        inner = disk._inner if isinstance(disk, Disk) else disk
        return self._bridge.call(lambda: self._inner.grep(inner, pattern, **options))

    def stream(self, command: str, **options: Any) -> Iterator[Event]:
        """See `fanout.Fanout.stream`. Closing the iterator early kills the command."""
        return self._bridge.each(lambda: self._inner.stream(command, **_inner_options(options)))

    def map(
        self,
        command: str,
        items: Iterable[object],
        *,
        max_in_flight: int | None = None,
        progress: Callable[[int, Run], None] | None = None,
        **options: Any,
    ) -> list[Run]:
        """See `fanout.Fanout.map`."""
        given = _inner_options(options)
        return self._bridge.call(
            lambda: self._inner.map(command, items, max_in_flight=max_in_flight, progress=progress, **given)
        )


def connect(
    url: str | None = None,
    *,
    api_key: str | None = None,
    store: str | None = None,
    engine: str | None = None,
    **settings: Any,
) -> Fanout:
    """Return a blocking connection; see `fanout.connect`."""
    return Fanout(default.connect(url, api_key=api_key, store=store, engine=engine, **settings))


def _inner_mounts(disks: Mounts | None) -> dict[str, api.Disk | Mount] | None:
    if disks is None:
        return None
    return {name: given._inner if isinstance(given, Disk) else given for name, given in disks.items()}


def _inner_content(data: Content) -> api.Content:
    if (
        isinstance(data, bytes | bytearray | memoryview | str)
        or hasattr(data, "read")
        or not isinstance(data, Iterable)
    ):
        return cast(api.Content, data)
    chunks = iter(data)

    async def each() -> AsyncIterator[bytes]:
        while (chunk := await anyio.to_thread.run_sync(next, chunks, None)) is not None:
            yield chunk

    return each()


def _inner_options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _inner_mounts(value) if key == "disks" else value for key, value in options.items()}
