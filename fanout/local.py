"""The embedded connection: the public interface on a store and an engine of this host.

Owns wiring (store, catalogue, cache, engine, executor) and the bridge from async calls to the blocking disk
layer. Decides nothing about trees, commits or sandboxes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

import anyio
import anyio.to_thread

from fanout.api import Disk, Disks, Fanout, Mounts, Progress
from fanout.config import Settings
from fanout.disk.branch import Landed
from fanout.disk.catalogue import Catalogue
from fanout.disk.disk import Disk as CoreDisk
from fanout.disk.disk import Point
from fanout.disk.merge import Policy
from fanout.disk.paths import absolute, shown, tree_path
from fanout.disk.state import State
from fanout.engine.base import Engine
from fanout.engine.open import open_engine
from fanout.errors import Invalid, NotFound, Unavailable
from fanout.format import entry as records
from fanout.format.tree import DIR, FILE, SYMLINK, Node, content_hash, directory
from fanout.model import Change, Checkpoint, Commit, CommitPolicy, DirEntry, Event, Mount, ObjectInfo, Run
from fanout.run import request
from fanout.run.changes import change_of, changes_of
from fanout.run.exec import Host, Job, JobMount
from fanout.run.executor import LocalExecutor
from fanout.run.once import Once
from fanout.runtime import Runtime, system
from fanout.store.base import Store
from fanout.store.open import open_store
from fanout.view.cache import HostCache
from fanout.view.transfer import download, upload_intents

__all__ = ["LocalDisk", "LocalFanout"]

T = TypeVar("T")
_BATCH = 256
_KINDS: dict[int, Literal["file", "directory", "symlink"]] = {DIR: "directory", FILE: "file", SYMLINK: "symlink"}
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class LocalFanout(Fanout):
    """An embedded connection; see `fanout.connect`. `store`, `engine` and `runtime` can be handed in ready-made."""

    def __init__(
        self, settings: Settings, *, store: Store | None = None, engine: Engine | None = None, runtime: Runtime = system
    ) -> None:
        self.settings = settings
        self._runtime = runtime
        self._given_store = store
        self._given_engine = engine
        self._engine_lock = threading.Lock()
        self._once: Once[Run] = Once()
        self._opened = False

    async def open(self) -> LocalFanout:
        """Open store and cache. The first exec makes and probes the engine: a host without one can still read."""
        if not self._opened:
            await anyio.to_thread.run_sync(self._open)
        return self

    async def aclose(self) -> None:
        """Wait for background work and release everything. Execs under way must have ended or been cancelled."""
        if self._opened:
            self._opened = False
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._close)

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
        options = {
            "disks": disks, "cwd": cwd, "env": env, "stdin": stdin, "timeout_s": timeout_s, "network": network,
            "commit": commit, "cpus": cpus, "memory_mib": memory_mib,
        }  # fmt: skip
        key = request.check_key(idempotency_key)
        if key is None:
            return await self._exec(command, options)
        return await self._once.run(key, _fingerprint(command, options), partial(self._exec, command, options))

    async def stream(self, command: str, **options: Any) -> AsyncGenerator[Event, None]:
        if options.pop("idempotency_key", None) is not None:
            raise Invalid.argument("idempotency_key", "…", "a stream cannot be joined; use exec")
        job = await self._job(command, options)
        async with aclosing(self._executor.stream(job)) as events:
            async for event in events:
                yield event

    async def _exec(self, command: str, options: Mapping[str, Any]) -> Run:
        job = await self._job(command, options)
        return await self._executor.run(job)

    async def _job(self, command: str, options: Mapping[str, Any]) -> Job:
        """Check everything that can be checked, and resolve names, before anything starts."""
        self._check_open()
        arrived_s = self._runtime.monotonic()
        job_id = f"ex-{self._runtime.hex_id(16)}"
        unknown = options.keys() - _OPTIONS.keys()
        if unknown:
            raise Invalid.argument(
                min(unknown), options[min(unknown)], f"no such option; there are {', '.join(_OPTIONS)}"
            )
        given = {**_OPTIONS, **options}
        disks: Mounts = given["disks"] or {}
        names = [request.check_mount_name(name) for name in disks]
        cwd = given["cwd"]
        checked: dict[str, Any] = {
            "command": request.check_command(command),
            "cwd": request.check_cwd(cwd) if cwd is not None else f"/mnt/{names[0]}" if len(names) == 1 else "/mnt",
            "env": {**_environment(job_id), **request.check_env(given["env"])},
            "stdin": request.check_stdin(given["stdin"]),
            "limits": request.check_limits(given["timeout_s"], given["cpus"], given["memory_mib"]),
            "commit": request.check_commit(given["commit"]),
            "network": bool(given["network"]),
        }
        known = self._known_mounts(disks)
        if known is None or self._engine is None:
            known = await anyio.to_thread.run_sync(self._prepare, disks)
        return Job(id=job_id, mounts=known, author=self._author, arrived_s=arrived_s, **checked)

    # -- blocking side --------------------------------------------------------------------------------------

    def _open(self) -> None:
        settings = self.settings
        self._store = self._given_store or open_store(settings.store, s3_endpoint=settings.s3_endpoint)
        self._catalogue = Catalogue(self._store, self._runtime, settings.tuning)
        self._cache = HostCache(settings.cache_dir, settings.cache_bytes, self._runtime)
        self._engine: Engine | None = None
        self._author = settings.author or _user()
        self.disks: LocalDisks = LocalDisks(self)
        root = str(settings.root_dir or "/")
        shell = "/bin/bash" if os.path.exists(os.path.join(root, "bin/bash")) else "/bin/sh"
        self._host_values = {"shell": shell, "output_bytes": settings.output_bytes}
        self._opened = True

    def _close(self) -> None:
        if self._engine is not None:
            self._executor.close()
            self._engine.close()
        self._catalogue.close()
        self._cache.close()
        if self._given_store is None:
            self._store.close()

    def _check_open(self) -> None:
        if not self._opened:
            raise Unavailable("this connection is not open: use `async with fanout.connect(...) as fo`")

    def _prepare(self, disks: Mounts) -> list[JobMount]:
        """What may need the store or run something: the engine's first probe, and opening disks."""
        mounts = [self._job_mount(name, given) for name, given in disks.items()]
        with self._engine_lock:
            if self._engine is None:
                engine = self._given_engine or open_engine(self.settings)
                engine.probe()
                host = Host(engine, self._cache, self._runtime, **self._host_values)  # type: ignore[arg-type]
                self._executor = LocalExecutor(host, self.settings.max_in_flight)
                self._engine = engine
        return mounts

    def _known_mounts(self, disks: Mounts) -> list[JobMount] | None:
        """Return the job's mounts without any request, or None where something has to be looked up."""
        mounts: list[JobMount] = []
        for name, given in disks.items():
            if isinstance(given, LocalDisk) and given.at is None:
                mounts.append(JobMount(name, given.core, given.point, "shared"))
            else:
                return None
        return mounts

    def _job_mount(self, name: str, given: object) -> JobMount:
        mount = given.mount() if isinstance(given, Disk) else given
        if not isinstance(mount, Mount):
            raise Invalid.argument(f"disks[{name!r}]", given, "a disk, or what disk.mount(...) returned")
        core = self._catalogue.get(mount.disk)
        branch = core.branch(mount.branch)
        base = Point(branch) if mount.at is None else core.point(mount.at, mount.branch)
        if mount.mode != "read_only" and base.branch is not branch:
            raise Invalid.argument("at", mount.at, f"a point of branch {mount.branch!r}, or mount it read-only")
        sub = tree_path("subdirectory", (mount.subdirectory or "").rstrip("/") or "/", allow_root=True)
        return JobMount(name, core, base, mount.mode, sub)


class LocalDisks(Disks):
    """The disks of an embedded connection."""

    def __init__(self, fanout: LocalFanout) -> None:
        self._fanout = fanout

    async def create(self, name: str) -> LocalDisk:
        return await self._call(lambda: self._handle(self._fanout._catalogue.create(name)))

    async def get(self, name: str) -> LocalDisk:
        return await self._call(lambda: self._get(name))

    async def list(self) -> AsyncIterator[Disk]:
        self._fanout._check_open()
        async for name in _each(self._fanout._catalogue.names):
            yield await self.get(name)

    async def delete(self, name: str) -> None:
        await self._call(lambda: self._fanout._catalogue.delete(name))

    async def _call(self, function: Callable[[], T]) -> T:
        self._fanout._check_open()
        return await anyio.to_thread.run_sync(function)

    def _get(self, name: str) -> LocalDisk:
        if not isinstance(name, str):
            raise Invalid.argument("name", name, "a disk's name or id, with @branch or @checkpoint after it if wanted")
        disk_name, _, line = name.partition("@")
        core = self._fanout._catalogue.get(disk_name)
        return self._handle(core, core.point(line) if line else None)

    def _handle(self, core: CoreDisk, point: Point | None = None) -> LocalDisk:
        return LocalDisk(core, point or core.point(), self._fanout._author)


class LocalDisk(Disk):
    """A disk handle of an embedded connection."""

    def __init__(self, core: CoreDisk, point: Point, author: str) -> None:
        self.core = core
        self.point = point
        self.id = core.id
        self.name = core.name
        self.branch_name = point.branch.name
        self.at = point.checkpoint
        self._author = author

    async def upload(self, local: str | Path, remote: str = "/", *, progress: Progress | None = None) -> Commit:
        target = absolute("remote", remote)

        def work() -> Commit:
            branch = self.core.writable(self.point)
            packer = self.core.packer()
            try:
                intents = upload_intents(packer, Path(local), target, progress=progress)
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
                author=self._author,
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

    async def put_object(self, key: str, data: bytes | str, *, mode: int = 0o644) -> ObjectInfo:
        body = data.encode("utf-8", "surrogateescape") if isinstance(data, str) else bytes(data)
        if not 0 <= mode <= 0o7777:
            raise Invalid.argument("mode", oct(mode), "permission bits, 0 to 0o7777")
        is_directory = key.endswith("/") and key.strip("/") != ""
        path = tree_path("key", key.rstrip("/") if is_directory else key)

        def work() -> ObjectInfo:
            if is_directory:
                if body:
                    raise Invalid.argument("data", body, "empty, for a key that ends in / and so makes a directory")
                self.core.make_directory(self.point, path, 0o755 if mode == 0o644 else mode, self._author)
                node = self.core.writable(self.point).known().get(path)
                return _object(path, node or directory())
            return _object(path, self.core.put_object(self.point, path, body, mode, self._author))

        return await anyio.to_thread.run_sync(work)

    async def get_object(self, key: str) -> bytes:
        path = tree_path("key", key)
        return (await anyio.to_thread.run_sync(self.core.read_file, self.point, path))[1]

    async def head_object(self, key: str) -> ObjectInfo | None:
        path = tree_path("key", key.rstrip("/") or "/", allow_root=True)
        node = await anyio.to_thread.run_sync(self.core.lookup, self.point, path)
        if node is None or node.kind == DIR:
            return None
        return _object(path, node)

    async def delete_object(self, key: str, *, recursive: bool = False) -> None:
        path = tree_path("key", key.rstrip("/") or "/", allow_root=recursive)
        await anyio.to_thread.run_sync(
            partial(self.core.delete_object, self.point, path, recursive=recursive, author=self._author)
        )

    async def move(self, source: str, target: str) -> Commit:
        old, new = absolute("source", source), absolute("target", target)
        if not old or not new:
            raise Invalid.argument("source" if not old else "target", source if not old else target, "not the root")
        landed = await anyio.to_thread.run_sync(self.core.move, self.point, old, new, self._author)
        return self._commit(landed, f"move {shown(old)} to {shown(new)}", 0)

    async def list_objects(
        self, prefix: str = "", *, recursive: bool = True, start_after: str = ""
    ) -> AsyncIterator[ObjectInfo]:
        start = os.fsencode(prefix).lstrip(b"/")
        after = os.fsencode(start_after).lstrip(b"/")
        async for item in _each(lambda: _objects(self.point.state(), start, after, recursive)):
            yield item

    async def listdir(self, path: str = "/") -> AsyncIterator[DirEntry]:
        parent = absolute("path", path)

        def entries() -> Iterator[DirEntry]:
            state = self.point.state()
            node = self._must(state, parent, "path")
            if node.kind != DIR:
                raise Invalid.argument("path", path, "a directory; it is a " + _KINDS[node.kind])
            for name, child in state.children(parent):
                yield _dir_entry(parent, name, child)

        async for item in _each(entries):
            yield item

    async def checkpoint(self, name: str | None = None) -> Checkpoint:
        made, record = await anyio.to_thread.run_sync(
            self.core.create_checkpoint, name, self.point.branch, self.point.seq
        )
        return _checkpoint(made, record)

    async def checkpoints(self) -> AsyncIterator[Checkpoint]:
        async for name in _each(self.core.checkpoint_names):
            record = await anyio.to_thread.run_sync(self.core.checkpoint_record, name)
            yield _checkpoint(name, record)

    async def branch(self, name: str, *, checkpoint: str | None = None) -> LocalDisk:
        def work() -> LocalDisk:
            start = self.point
            if checkpoint is not None:
                record = self.core.checkpoint_record(checkpoint)
                start = Point(self.core.branch(record.branch), record.seq, checkpoint)
            made = self.core.create_branch(name, start)
            return LocalDisk(self.core, Point(made), self._author)

        return await anyio.to_thread.run_sync(work)

    async def branches(self) -> AsyncIterator[str]:
        async for name in _each(self.core.branch_names):
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
            landed = self.core.merge(into, source, on_conflict, self._author)
            return self._commit(landed, f"merge {source.branch.name}", into.known().seq)

        return await anyio.to_thread.run_sync(work)

    async def log(self, *, limit: int | None = None, after: int = 0) -> AsyncIterator[Commit]:
        if limit is not None and limit < 1:
            raise Invalid.argument("limit", limit, "at least 1")
        if after < 0:
            raise Invalid.argument("after", after, "a sequence number of at least 0")
        async for commit in _each(lambda: islice(self._history(after), limit)):
            yield commit

    async def diff(self, before: str | int, after: str | int | None = None) -> AsyncIterator[Change]:
        def changes() -> Iterator[Change]:
            old = self.core.point(before, self.branch_name)
            new = self.point if after is None else self.core.point(after, self.branch_name)
            for difference in self.core.diff(old, new):
                if not _only_time(difference.before, difference.after):
                    yield change_of(difference)

        async for change in _each(changes):
            yield change

    def _history(self, after: int) -> Iterator[Commit]:
        """Newest first, reading the log a window at a time."""
        high = self.point.branch.refresh().seq if self.point.seq is None else self.point.seq
        while high > after:
            low = max(after, high - _BATCH)
            for entry in reversed(list(self.point.branch.history(low, high))):
                for commit in reversed(entry.commits):
                    yield _commit(entry.seq, commit)
            high = low

    def _must(self, state: State, path: bytes, argument: str) -> Node:
        node = state.get(path)
        if node is None:
            raise NotFound(
                f"{argument}: disk {self.name!r} has no {'/' + shown(path)!r} on {self.at or self.branch_name!r}"
            )
        return node

    def _commit(self, landed: Landed, message: str, seq: int) -> Commit:
        return Commit(
            seq=seq if landed.seq is None else landed.seq,
            time=_time(landed.time_ns),
            author=self._author,
            message=message,
            exec_id=None,
            base_seq=seq if landed.seq is None else landed.seq - 1,
            changes=changes_of(landed.effects),
        )


_OPTIONS: dict[str, Any] = {
    "disks": None,
    "cwd": None,
    "env": None,
    "stdin": b"",
    "timeout_s": 300.0,
    "network": False,
    "commit": "always",
    "cpus": None,
    "memory_mib": None,
}


async def _each(make: Callable[[], Iterable[T]]) -> AsyncIterator[T]:
    """Iterate a blocking iterable in worker threads, a batch at a time."""
    iterator = iter(await anyio.to_thread.run_sync(make))
    while batch := await anyio.to_thread.run_sync(lambda: list(islice(iterator, _BATCH))):
        for item in batch:
            yield item


def _environment(job_id: str) -> dict[str, str]:
    return {"PATH": _PATH, "HOME": "/root", "USER": "root", "LANG": "C.UTF-8", "FANOUT_EXEC_ID": job_id}


def _fingerprint(command: str, options: Mapping[str, Any]) -> object:
    plain = dict(options)
    disks = plain.pop("disks") or {}
    mounts = {
        name: given.mount() if isinstance(given, Disk) and given.at is None else given for name, given in disks.items()
    }
    return command, mounts, plain


def _user() -> str:
    return os.environ.get("USER") or f"uid-{os.getuid()}"


def _time(ns: int) -> datetime:
    return datetime.fromtimestamp(ns / 1e9, UTC)


def _object(path: bytes, node: Node) -> ObjectInfo:
    key = shown(path) + ("/" if node.kind == DIR else "")
    size = len(node.target) if node.kind == SYMLINK else node.size
    return ObjectInfo(
        key=key,
        size=size,
        etag="" if node.kind == DIR else content_hash(node).hex(),
        last_modified=_time(node.mtime_ns),
        mode=node.mode,
        kind=_KINDS[node.kind],
    )


def _objects(state: State, prefix: bytes, after: bytes, recursive: bool) -> Iterator[ObjectInfo]:
    if recursive:
        for path, node in state.scan(max(prefix, after) or b"\x01"):
            if not path.startswith(prefix):
                if path > prefix:
                    return
                continue
            if node.kind != DIR and path > after:
                yield _object(path, node)
        return
    parent, _, name = prefix.rpartition(b"/")
    for child, node in state.children(parent):
        path = parent + b"/" + child if parent else child
        if child.startswith(name) and path > after:
            yield _object(path, node)


def _dir_entry(parent: bytes, name: bytes, node: Node) -> DirEntry:
    return DirEntry(
        name=shown(name),
        path="/" + shown(parent + b"/" + name if parent else name),
        kind=_KINDS[node.kind],
        size=node.size,
        mode=node.mode,
        mtime_ns=node.mtime_ns,
        target=shown(node.target) if node.kind == SYMLINK else None,
    )


def _checkpoint(name: str, record: records.CheckpointRecord) -> Checkpoint:
    return Checkpoint(name=name, branch=record.branch, seq=record.seq, time=_time(record.created_ns))


def _commit(seq: int, commit: records.Commit) -> Commit:
    return Commit(
        seq=seq,
        time=_time(commit.time_ns),
        author=commit.author,
        message=commit.message,
        exec_id=commit.exec_id or None,
        base_seq=commit.base_seq,
        changes=changes_of(commit.effects),
    )


def _only_time(before: Node | None, after: Node | None) -> bool:
    """Whether only a directory's mtime differs, which moves with every name in it."""
    return (
        before is not None
        and after is not None
        and before.kind == after.kind == DIR
        and (before.mode, before.uid, before.gid, before.xattrs) == (after.mode, after.uid, after.gid, after.xattrs)
    )
