"""The embedded connection: the public interface on a store and an engine of this host.

Owns wiring (store, catalogue, cache, engine, executor) and the bridge from async calls to the blocking disk
layer. Decides nothing about trees, commits or sandboxes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

import anyio
import anyio.to_thread

from fanout.api import Disk, Disks, Fanout, Mounts, Progress
from fanout.config import Settings
from fanout.disk.catalogue import Catalogue
from fanout.disk.disk import Disk as CoreDisk
from fanout.disk.disk import Point
from fanout.disk.gc import GRACE_S, KEEP_HISTORY_S
from fanout.disk.merge import Policy
from fanout.disk.paths import absolute, shown, tree_path
from fanout.disk.proposal import Landed
from fanout.disk.state import State
from fanout.disk.trim import Trimmed
from fanout.engine.base import Engine
from fanout.engine.open import open_engine
from fanout.errors import Invalid, NotFound, Unavailable
from fanout.format.entry import Entry
from fanout.format.tree import DIR, Node, directory
from fanout.model import (
    Change,
    Checkpoint,
    Commit,
    CommitPolicy,
    DirEntry,
    Event,
    FsckReport,
    GcReport,
    Lock,
    Mount,
    ObjectInfo,
    Run,
)
from fanout.run import request
from fanout.run.bridge import BATCH, each, in_turn
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
from fanout.run.exec import Host, Job
from fanout.run.executor import LocalExecutor
from fanout.run.mounts import Lines
from fanout.run.once import Once
from fanout.runtime import Runtime, system
from fanout.store.base import Store
from fanout.store.open import open_store
from fanout.view.cache import HostCache
from fanout.view.transfer import download, upload_intents

__all__ = ["LocalDisk", "LocalFanout"]

T = TypeVar("T")
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
        self._state_lock = threading.Lock()
        self._engine_lock = threading.Lock()
        self._once: Once[Run] = Once(size_of=lambda run: len(run.stdout_bytes) + len(run.stderr_bytes))
        self._opened = False

    async def open(self) -> LocalFanout:
        """Open store and cache. The first exec makes and probes the engine: a host without one can still read."""
        if not self._opened:
            await anyio.to_thread.run_sync(self._open)
        return self

    async def aclose(self) -> None:
        """Stop execs under way (their callers get `Unavailable`) and release everything. Repeating it is harmless."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.close)

    def close(self) -> None:
        """Like `aclose`, blocking."""
        with self._state_lock:
            if self._opened:
                self._opened = False
                self._close()

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
        call = partial(self._exec, command, options)
        return await (call() if key is None else self._once.run(key, _fingerprint(command, options), call))

    async def stream(self, command: str, **options: Any) -> AsyncGenerator[Event, None]:
        if options.pop("idempotency_key", None) is not None:
            raise Invalid("idempotency_key is set: a stream cannot be joined; use exec")
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
        disks = request.check_disks(given["disks"])
        names = list(disks)
        cwd = given["cwd"]
        checked: dict[str, Any] = {
            "command": request.check_command(command),
            "cwd": request.check_cwd(cwd) if cwd is not None else f"/mnt/{names[0]}" if len(names) == 1 else "/mnt",
            "env": {**_environment(job_id), **request.check_env(given["env"])},
            "stdin": request.check_stdin(given["stdin"]),
            "limits": request.check_limits(given["timeout_s"], given["cpus"], given["memory_mib"]),
            "commit": request.check_commit(given["commit"]),
            "network": request.check_network(given["network"]),
        }
        mounts = _mounts(disks)
        live = {name: mount for name, mount in mounts.items() if mount.at is None}
        if self._engine is None or self._lines.known(live) is None:
            await in_turn(partial(self._prepare, live))
        known = self._lines.known(mounts)
        if known is None:
            known = await anyio.to_thread.run_sync(self._lines.look_up, mounts)
        self._check_open()
        return Job(id=job_id, mounts=known, author=self._author, arrived_s=arrived_s, **checked)

    # -- blocking side --------------------------------------------------------------------------------------

    def _open(self) -> None:
        with self._state_lock:
            if self._opened:
                return
            settings = self.settings
            self._store = self._given_store or open_store(settings.store, s3_endpoint=settings.s3_endpoint)
            try:
                self._cache = HostCache(settings.cache_dir, settings.cache_bytes, self._runtime)
            except BaseException:
                self._close_store()
                raise
            self._catalogue = Catalogue(self._store, self._runtime, settings.tuning)
            self._engine: Engine | None = None
            self._author = settings.author or _user()
            self._lines = Lines(self._catalogue)
            self.disks: LocalDisks = LocalDisks(self)
            self._opened = True

    def _close(self) -> None:
        with self._engine_lock:  # one that is being made is closed, too
            if self._engine is not None:
                self._executor.close()
                self._engine.close()
        self._catalogue.close()
        self._cache.close()
        self._close_store()

    def _close_store(self) -> None:
        if self._given_store is None:
            self._store.close()

    def _check_open(self) -> None:
        if not self._opened:
            raise Unavailable("this connection is not open: use `async with fanout.connect(...) as fo`")

    def _prepare(self, live: Mapping[str, Mount]) -> None:
        """What may need the store or run something: the engine's first probe, and opening disks."""
        if self._lines.known(live) is None:
            self._lines.look_up(live)
        with self._engine_lock:
            self._check_open()
            if self._engine is None:
                engine = self._given_engine or open_engine(self.settings)
                try:
                    engine.probe()
                except BaseException:
                    if self._given_engine is None:
                        engine.close()
                    raise
                bash = os.path.join(str(self.settings.root_dir or "/"), "bin/bash")
                shell = "/bin/bash" if os.path.exists(bash) else "/bin/sh"
                host = Host(engine, self._cache, self._runtime, shell, output_bytes=self.settings.output_bytes)
                self._executor = LocalExecutor(host, self.settings.max_in_flight)
                self._engine = engine


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
        async for name in each(self._fanout._catalogue.names):
            yield await self.get(name)

    async def delete(self, name: str) -> None:
        def work() -> None:
            disk_id = self._fanout._catalogue.get(name).id
            self._fanout._catalogue.delete(disk_id)
            self._fanout._lines.forget(disk_id)

        await self._call(work)

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
            state = branch.refresh()
            packer = self.core.packer()
            try:
                intents = upload_intents(packer, Path(local), target, state=state, progress=progress)
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
        body = request.check_bytes("data", data)
        if not isinstance(mode, int) or not 0 <= mode <= 0o7777:
            raise Invalid.argument("mode", mode, "permission bits, 0 to 0o7777")
        is_directory = isinstance(key, str) and key.endswith("/") and key.strip("/") != ""
        path = tree_path("key", key.rstrip("/") if is_directory else key)

        def work() -> ObjectInfo:
            if is_directory:
                if body:
                    raise Invalid.argument("data", body, "empty, for a key that ends in / and so makes a directory")
                self.core.make_directory(self.point, path, 0o755 if mode == 0o644 else mode, self._author)
                node = self.core.writable(self.point).known().get(path)
                return object_info(path, node or directory())
            return object_info(path, self.core.put_object(self.point, path, body, mode, self._author))

        return await anyio.to_thread.run_sync(work)

    async def get_object(self, key: str) -> bytes:
        path = tree_path("key", key)
        return (await anyio.to_thread.run_sync(self.core.read_file, self.point, path))[1]

    async def head_object(self, key: str) -> ObjectInfo | None:
        path = tree_path("key", key.rstrip("/") or "/", allow_root=True)
        node = await anyio.to_thread.run_sync(self.core.lookup, self.point, path)
        if node is None or node.kind == DIR:
            return None
        return object_info(path, node)

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
            return LocalDisk(self.core, Point(made), self._author)

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
            landed = self.core.merge(into, source, on_conflict, self._author)
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
        release = partial(self.point.branch.release, lock_id, broken=True, author=self._author)
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


def _environment(job_id: str) -> dict[str, str]:
    return {"PATH": _PATH, "HOME": "/root", "USER": "root", "LANG": "C.UTF-8", "FANOUT_EXEC_ID": job_id}


def _mounts(disks: Mapping[str, object]) -> dict[str, Mount]:
    mounts: dict[str, Mount] = {}
    for name, given in disks.items():
        mount = given.mount() if isinstance(given, Disk) else given
        if not isinstance(mount, Mount):
            raise Invalid.argument(f"disks[{name!r}]", given, "a disk, or what disk.mount(...) returned")
        mounts[name] = mount
    return mounts


def _fingerprint(command: str, options: Mapping[str, Any]) -> object:
    """What makes two calls the same one; a copy, as the caller may change what he passed."""
    made = {
        "disks": _mounts(request.check_disks(options["disks"])),
        "env": request.check_env(options["env"]),
        "stdin": request.check_stdin(options["stdin"]),
    }
    return command, {**options, **made}


def _user() -> str:
    return os.environ.get("USER") or f"uid-{os.getuid()}"
