"""What every route and the S3 gateway are handed: the connection, the keys, the limits, and who is being served.

Owns opening and closing these, resolving a disk for a principal, and admitting execs. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import anyio
import anyio.to_thread

from fanout.config import Settings
from fanout.errors import Denied, FanoutError, NotFound
from fanout.local import Acting, LocalFanout
from fanout.local_disk import LocalDisk
from fanout.runtime import Runtime, system
from fanout.server.keys import ANONYMOUS, Keys, Principal, Right
from fanout.server.metrics import Metrics
from fanout.store.open import open_store
from fanout.store.wrap import Metered

__all__ = ["Draining", "Saturated", "ServerLimits", "State"]


#: How long the store may take to answer while this server calls itself ready, in seconds.
_READY_S = 5.0


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds of a server. Bytes and seconds; counts are per server.

    `queued_execs`: how many calls may wait for a slot beyond the connection's `max_in_flight` running ones.
    `json_bytes`: body of a REST call. `object_bytes`: body of one upload. `header_bytes`: URL and headers,
    which have to come within `header_s`.
    `call_s`: longest command through the archil dialect. `grace_s`: what running execs get at a shutdown.
    """

    json_bytes: int = 16 << 20
    object_bytes: int = 5 << 30
    header_bytes: int = 64 << 10
    header_s: float = 30.0
    connections: int = 2000
    queued_execs: int = 1000
    call_s: float = 300.0
    grace_s: float = 30.0


class Saturated(Exception):
    """As many execs are under way as this server takes; a later try can succeed."""

    retry_after_s = 1


class Draining(Exception):
    """This server is shutting down and starts nothing new; another one, or this one later, can."""

    retry_after_s = 5


class State:
    """One server's state. `open` before use, `close` in the end.

    `anonymous` is who makes requests without credentials: None where keys are needed. `draining`: set once, by
    `drain`; then no exec is admitted and the server is not ready.
    """

    def __init__(
        self,
        settings: Settings,
        limits: ServerLimits | None = None,
        *,
        runtime: Runtime = system,
        authenticate: bool = True,
    ) -> None:
        self.settings = settings
        self.limits = limits or ServerLimits()
        self.runtime = runtime
        self.anonymous: Principal | None = None if authenticate else ANONYMOUS
        self.draining = False
        self.execs_in_flight = 0
        self._idle = anyio.Event()

    async def open(self) -> State:
        """Open the store, the keys and the connection."""

        def work() -> None:
            self.store = Metered(open_store(self.settings.store, s3_endpoint=self.settings.s3_endpoint))

        await anyio.to_thread.run_sync(work)
        self.keys = Keys(self.store, self.runtime)
        self.fanout = LocalFanout(self.settings, store=self.store, runtime=self.runtime)
        self.metrics = Metrics(self.store.usage, lambda: (self.execs_in_flight, *self.fanout.load()))
        await self.fanout.open()
        return self

    async def close(self) -> None:
        """Stop the execs under way, whose callers are told, and release everything."""
        await self.fanout.aclose()
        await anyio.to_thread.run_sync(self.store.close)

    def acting_as(self, principal: Principal) -> Acting:
        """Return the connection, its commits and execs by this principal."""
        return self.fanout.acting_as(principal.author, principal.id)

    async def disk(self, principal: Principal, spec: str, right: Right) -> LocalDisk:
        """Open the disk that a caller names, if the caller has `right` on it, writing as the caller.

        `spec` is a name or id, with `@branch` or `@checkpoint` after it if wanted; in a URL `rescue:x` stands for the
        branch `rescue/x`. Who may see some disks only learns nothing of others: `Denied` whether they exist or not.
        """
        try:
            disk = await self.fanout.acting_as(principal.author).disks.get(spec.replace(":", "/"))
        except NotFound:
            if principal.disks is not None and not await self._sees_disk_of(principal, spec):
                raise Denied(f"this key does not give access to disk {spec!r}") from None
            raise
        if not principal.sees(disk.id):
            raise Denied(f"this key does not give access to disk {spec!r}")
        principal.require(disk.id, right)
        return disk

    async def _sees_disk_of(self, principal: Principal, spec: str) -> bool:
        """Whether the disk part of `spec` is one of the principal's, so that he may be told what is missing on it."""
        try:
            return principal.sees((await self.fanout.disks.get(spec.partition("@")[0])).id)
        except NotFound:
            return False

    @contextmanager
    def exec(self) -> Iterator[None]:
        """Hold one exec's (or grep's) place among those under way; `Saturated` or `Draining` where there is none."""
        if self.draining:
            raise Draining("this server is shutting down; try again, another one may answer")
        if self.execs_in_flight >= self.settings.max_in_flight + self.limits.queued_execs:
            raise Saturated(f"{self.execs_in_flight} execs are under way, as many as this server takes; try again")
        self.execs_in_flight += 1
        try:
            yield
        finally:
            self.execs_in_flight -= 1
            if self.draining and not self.execs_in_flight:
                self._idle.set()

    async def is_ready(self) -> bool:
        """Whether requests can be served: the store answers in time, and no shutdown has begun."""
        if self.draining:
            return False
        with anyio.move_on_after(_READY_S):
            try:
                await anyio.to_thread.run_sync(self.keys.any, abandon_on_cancel=True)
                return True
            except FanoutError:
                pass
        return False

    async def drain(self) -> bool:
        """Admit no more execs and wait for those under way, `grace_s` at most; returns whether all ended."""
        self.draining = True
        if self.execs_in_flight:
            with anyio.move_on_after(self.limits.grace_s):
                await self._idle.wait()
        return not self.execs_in_flight
