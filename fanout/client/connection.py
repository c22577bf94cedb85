"""The remote connection: the public interface of a fanout server's disks and execs.

Owns what a call is on the wire, and checks what can be checked before it is sent, as an embedded connection does.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any
from weakref import WeakKeyDictionary

import anyio
import anyio.lowlevel

from fanout import wire
from fanout.api import Disks, Fanout, Mounts, mounts_of
from fanout.client.disk import RemoteDisk
from fanout.client.http import Cut, Http
from fanout.config import Settings
from fanout.errors import Invalid, Unknown
from fanout.format import layout
from fanout.model import CommitPolicy, Event, Finished, Run
from fanout.run import request
from fanout.runtime import Runtime, system

__all__ = ["RemoteDisks", "RemoteFanout"]


class RemoteFanout(Fanout):
    """A connection to a fanout server; see `fanout.connect`. May be used from any number of event loops."""

    def __init__(self, settings: Settings, *, runtime: Runtime = system) -> None:
        if settings.url is None:
            raise Invalid("url is None: the server's, such as http://host:7070")
        self.settings = settings
        self.runtime = runtime
        self.http = Http(settings.url, settings.api_key, runtime, http2=settings.http2)
        self._keys: set[str] = set()
        self._gates: WeakKeyDictionary[Any, anyio.Semaphore] = WeakKeyDictionary()
        self.disks: RemoteDisks = RemoteDisks(self.http, runtime)

    async def open(self) -> RemoteFanout:
        """Ask the server who it is: `Unavailable` where there is none, `Denied` where it does not take the key."""
        await self.http.open()
        return self

    async def about(self) -> wire.About:
        """Return what the server says of itself."""
        return wire.heard(wire.About, await self.http.call("GET", ""))

    async def aclose(self) -> None:
        """Close the connections. Execs under way are killed and commit nothing; their callers get `Unavailable`."""
        keys = list(self._keys)
        await self.http.stop()
        async with anyio.create_task_group() as group:
            for key in keys:
                group.start_soon(self._cancel, key)
        await self.http.aclose()

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
        key = request.check_key(idempotency_key) or wire.AUTOMATIC + self.runtime.hex_id(32)
        body = self._body(command, options)
        async with self._slot(), self._under_way(key):
            return wire.run_of(await self.http.call("POST", "/exec", body=body, key=key))

    async def stream(self, command: str, **options: Any) -> AsyncGenerator[Event, None]:
        if options.pop("idempotency_key", None) is not None:
            raise Invalid("idempotency_key is set: a stream cannot be joined; use exec")
        body = self._body(command, request.check_options(options))
        key = wire.AUTOMATIC + self.runtime.hex_id(32)
        ended = False
        try:
            async with (
                self._slot(),
                self._under_way(key),
                aclosing(self.http.lines("POST", "/stream", body=body, key=key)) as lines,
            ):
                async for line in lines:
                    event = wire.event_of(line)
                    ended = isinstance(event, Finished)
                    yield event
        except Cut as cut:
            raise Unknown(f"{cut}: what the command wrote may be committed or not") from cut
        if not ended:
            raise Unknown(f"{self.http.url}: the stream ended early; what the command wrote may be committed or not")

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        """Hold one of `max_in_flight` places, if a number was asked for: the server has its own bound."""
        if "max_in_flight" not in self.settings.model_fields_set:
            yield
            return
        loop = anyio.lowlevel.current_token().native_token
        gate = self._gates.setdefault(loop, anyio.Semaphore(self.settings.max_in_flight))
        async with gate:
            yield

    @asynccontextmanager
    async def _under_way(self, key: str) -> AsyncIterator[None]:
        """See to it that when a call's caller has gone, so has everything of its exec."""
        self._keys.add(key)
        try:
            yield
        except (anyio.get_cancelled_exc_class(), GeneratorExit):
            await self._cancel(key)
            raise
        finally:
            self._keys.discard(key)

    async def _cancel(self, key: str) -> None:
        """Have an exec killed and wait a while until it is; its connection is closed, so it dies in any case."""
        told = False
        with anyio.CancelScope(shield=True):
            while not told:
                try:
                    await self.http.farewell("DELETE", "/exec", {"key": key})
                    told = True
                except anyio.get_cancelled_exc_class():
                    continue  # a task of asyncio, cancelled once more by its own method: no scope shields from that

    def _body(self, command: str, options: Mapping[str, Any]) -> dict[str, Any]:
        self.http.check_open()
        disks = request.check_disks(options["disks"])
        request.check_limits(options["timeout_s"], options["cpus"], options["memory_mib"])
        checked = {
            **options,
            "cwd": None if options["cwd"] is None else request.check_cwd(options["cwd"]),
            "env": request.check_env(options["env"]),
            "stdin": request.check_stdin(options["stdin"]),
            "commit": request.check_commit(options["commit"]),
            "network": request.check_network(options["network"]),
        }
        return wire.exec_fields(request.check_command(command), mounts_of(disks), checked)


class RemoteDisks(Disks):
    """The disks of a remote connection."""

    def __init__(self, http: Http, runtime: Runtime) -> None:
        self._http = http
        self._runtime = runtime

    async def create(self, name: str) -> RemoteDisk:
        layout.check_name("name", name)
        made = await self._http.call("POST", "/disks", body={"name": name}, key=self._runtime.hex_id(32))
        return self._handle(made)

    async def get(self, name: str) -> RemoteDisk:
        if not isinstance(name, str):
            raise Invalid.argument("name", name, "a disk's name or id, with @branch or @checkpoint after it if wanted")
        disk_name, at, line = name.partition("@")
        if at and not line:
            raise Invalid.argument("name", name, "a branch or checkpoint after the @")
        if not layout.is_disk_id(disk_name):
            layout.check_name("disk", disk_name)
        if line:
            layout.check_branch_name("at", line)
        return self._handle(await self._http.call("GET", "/disk", {"name": name}))

    async def list(self) -> AsyncIterator[RemoteDisk]:
        async with aclosing(self._http.rows("/disks", {})) as rows:
            async for row in rows:
                yield self._handle(row)

    async def delete(self, name: str) -> None:
        if not layout.is_disk_id(name):
            layout.check_name("disk", name)
        await self._http.call("DELETE", f"/disks/{name}", key=self._runtime.hex_id(32))

    def _handle(self, fields: Any) -> RemoteDisk:
        return RemoteDisk(self._http, self._runtime, wire.heard(wire.Handle, fields))
