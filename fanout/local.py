"""The embedded connection: the public interface on a store and an engine of this host.

Owns wiring (store, catalogue, cache, engine, executor) and the bridge from async calls to the blocking disk
layer. Decides nothing about trees, commits or sandboxes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from fanout import wire
from fanout.api import Disk, Disks, Fanout, Mounts, mounts_of
from fanout.config import Settings
from fanout.disk.calls import Calls, call_digest
from fanout.disk.catalogue import Catalogue
from fanout.disk.disk import Disk as CoreDisk
from fanout.disk.disk import Point
from fanout.engine.base import Engine
from fanout.engine.open import open_engine
from fanout.errors import FanoutError, Invalid, Unavailable
from fanout.local_calls import hash_of, run_claimed
from fanout.local_disk import LocalDisk
from fanout.model import (
    CommitPolicy,
    Event,
    Mount,
    Run,
)
from fanout.run import request
from fanout.run.bridge import each, in_turn
from fanout.run.exec import Host, Job
from fanout.run.executor import LocalExecutor
from fanout.run.grep import Searcher
from fanout.run.mounts import Lines
from fanout.run.once import Once
from fanout.runtime import Runtime, system
from fanout.store.base import Store
from fanout.store.open import open_store
from fanout.view.cache import HostCache
from fanout.view.published import Published
from fanout.view.scans import Scans

__all__ = ["Acting", "LocalFanout"]

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
        self._once: Once[Run] = Once(size_of=_output_bytes)
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
        return await self._exec_once(command, options, idempotency_key, "", None)

    async def stream(self, command: str, **options: Any) -> AsyncGenerator[Event, None]:
        async with aclosing(self._stream(command, options, None)) as events:
            async for event in events:
                yield event

    def acting_as(self, author: str, scope: str = "") -> Acting:
        """Return this connection for somebody whose commits say `author`. `scope` keeps idempotency keys apart."""
        return Acting(self, author, scope)

    @property
    def catalogue(self) -> Catalogue:
        """The disks as the blocking layer has them."""
        self._check_open()
        return self._catalogue

    def load(self) -> tuple[int, int]:
        """Return how many execs hold a slot, and how many wait for one."""
        return self._executor.load() if self._opened and self._engine is not None else (0, 0)

    def stop_execs(self) -> None:
        """Kill the execs under way, whose callers get `Unavailable`, and start none any more. Blocking."""
        if self._opened and self._engine is not None:
            self._executor.close()

    async def _exec_once(
        self, command: str, options: Mapping[str, Any], idempotency_key: str | None, scope: str, author: str | None
    ) -> Run:
        given = request.check_key(idempotency_key)
        if given is None:
            return await self._exec(command, options, author)
        key = f"{scope}\0{given}"
        asked = _fingerprint(command, options)
        if given.startswith(wire.AUTOMATIC):
            call = partial(self._exec, command, options, author, partial(self._once.keep, key))
        else:
            call = partial(self._exec_claimed, call_digest(scope, given), hash_of(asked), command, options, author)
        return await self._once.run(key, asked, call)

    async def _exec_claimed(
        self, digest: str, asked: bytes, command: str, options: Mapping[str, Any], author: str | None
    ) -> Run:
        job = await self._job(command, options, author)
        return await run_claimed(self._calls, self._executor, job, digest, asked, self._runtime)

    async def _stream(self, command: str, options: dict[str, Any], author: str | None) -> AsyncGenerator[Event, None]:
        if options.pop("idempotency_key", None) is not None:
            raise Invalid("idempotency_key is set: a stream cannot be joined; use exec")
        job = await self._job(command, options, author)
        async with aclosing(self._executor.stream(job)) as events:
            async for event in events:
                yield event

    async def _exec(
        self, command: str, options: Mapping[str, Any], author: str | None,
        ended: Callable[[Run | FanoutError], None] | None = None,
    ) -> Run:  # fmt: skip
        job = await self._job(command, options, author)
        return await self._executor.run(job, ended)

    async def _job(self, command: str, options: Mapping[str, Any], author: str | None) -> Job:
        """Check everything that can be checked, and resolve names, before anything starts."""
        self._check_open()
        arrived_s = self._runtime.monotonic()
        job_id = f"ex-{self._runtime.hex_id(16)}"
        given = request.check_options(options)
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
        mounts = mounts_of(disks)
        live = {name: mount for name, mount in mounts.items() if mount.at is None}
        if self._engine is None or self._lines.known(live) is None:
            await in_turn(partial(self._prepare, live))
        known = self._lines.known(mounts)
        if known is None:
            known = await anyio.to_thread.run_sync(self._lines.look_up, mounts)
        self._check_open()
        return Job(id=job_id, mounts=known, author=author or self._author, arrived_s=arrived_s, **checked)

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
            published = Published(self._cache) if settings.grep_index else None
            self._searcher = Searcher(Scans(self._cache), published, self._runtime)
            self._engine: Engine | None = None
            self._author = settings.author or _user()
            self._lines = Lines(self._catalogue)
            self._calls = Calls(self._store, self._catalogue, self._runtime)
            self.disks: LocalDisks = LocalDisks(self)
            self._opened = True

    def _close(self) -> None:
        with self._engine_lock:  # one that is being made is closed, too
            if self._engine is not None:
                self._executor.close()
                self._engine.close()
        self._searcher.close()
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


class Acting(Fanout):
    """An embedded connection in somebody's name. Opening and closing it is left to whoever owns the connection."""

    def __init__(self, fanout: LocalFanout, author: str, scope: str) -> None:
        self._fanout = fanout
        self._author = author
        self._scope = scope
        self.disks: LocalDisks = LocalDisks(fanout, author)

    async def open(self) -> Acting:
        return self

    async def aclose(self) -> None:
        pass

    async def exec(self, command: str, *, idempotency_key: str | None = None, **options: Any) -> Run:
        return await self._fanout._exec_once(
            command, {**request.EXEC_OPTIONS, **options}, idempotency_key, self._scope, self._author
        )

    async def stream(self, command: str, **options: Any) -> AsyncGenerator[Event, None]:
        async with aclosing(self._fanout._stream(command, options, self._author)) as events:
            async for event in events:
                yield event


class LocalDisks(Disks):
    """The disks of an embedded connection."""

    def __init__(self, fanout: LocalFanout, author: str | None = None) -> None:
        self._fanout = fanout
        self._author = author

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
        disk_name, at, line = name.partition("@")
        if at and not line:
            raise Invalid.argument("name", name, "a branch or checkpoint after the @")
        core = self._fanout._catalogue.get(disk_name)
        return self._handle(core, core.point(line) if line else None)

    def _handle(self, core: CoreDisk, point: Point | None = None) -> LocalDisk:
        author = self._author or self._fanout._author
        return LocalDisk(core, point or core.point(), author, self._fanout._searcher)


def _environment(job_id: str) -> dict[str, str]:
    return {"PATH": _PATH, "HOME": "/root", "USER": "root", "LANG": "C.UTF-8", "FANOUT_EXEC_ID": job_id}


def _fingerprint(command: str, options: Mapping[str, Any]) -> object:
    """What makes two calls the same one; a copy, as the caller may change what he passed."""
    made = {
        "disks": mounts_of(request.check_disks(options["disks"])),
        "env": request.check_env(options["env"]),
        "stdin": request.check_stdin(options["stdin"]),
    }
    return command, {**options, **made}


def _output_bytes(outcome: Run | FanoutError) -> int:
    run = outcome if isinstance(outcome, Run) else outcome.run  # type: ignore[attr-defined]
    return len(run.stdout_bytes) + len(run.stderr_bytes)


def _user() -> str:
    return os.environ.get("USER") or f"uid-{os.getuid()}"
