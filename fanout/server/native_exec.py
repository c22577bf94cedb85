"""The native API's execs: one call that answers with a run, one that streams its events.

Owns who may mount what, and both answers. How an exec is run, counted and cancelled belongs to running.py.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager, nullcontext
from typing import Any

import anyio
from fastapi import Request, Response

from fanout import wire
from fanout.format.layout import is_disk_id
from fanout.model import Finished, Mount
from fanout.server.answers import answer_of, success
from fanout.server.caller import Caller, CallerOf
from fanout.server.keys import Right
from fanout.server.native_calls import Call, Native
from fanout.server.patient import Held, Patient, Streaming
from fanout.server.running import run_exec

__all__ = ["add_routes"]


class _UnderWay:
    """The execs of this server that have a key, so that another call can cancel them and see them end."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], list[tuple[anyio.CancelScope, anyio.Event]]] = {}

    def holding(self, caller: Caller, key: str | None) -> Held:
        """Return what holds the scope of an exec while it is under way."""

        @contextmanager
        def hold(scope: anyio.CancelScope) -> Iterator[None]:
            mine, entry = (caller.principal.id, key or ""), (scope, anyio.Event())
            self._held.setdefault(mine, []).append(entry)
            try:
                yield
            finally:
                entry[1].set()
                self._held[mine].remove(entry)
                if not self._held[mine]:
                    del self._held[mine]

        return hold if key is not None else lambda scope: nullcontext()

    async def cancel(self, caller: Caller, key: str) -> int:
        """Cancel the execs of a key and return how many when all of them are gone."""
        found = list(self._held.get((caller.principal.id, key), ()))
        for scope, _ in found:
            scope.cancel()
        for _, over in found:
            await over.wait()
        return len(found)


def add_routes(native: Native) -> None:
    under_way = _UnderWay()

    async def cancel(request: Request, caller: CallerOf) -> Response:
        """Kill the execs that were sent under an idempotency key; answered when nothing of them is left."""
        call = Call(request, caller, ("key!",), b"")

        async def work() -> Response:
            return success({"cancelled": await under_way.cancel(caller, call.text("key"))})

        return Patient(work, native.headers)

    async def exec_(request: Request, caller: CallerOf) -> Response:
        """Run a command in a fresh sandbox and answer with what became of it. Hanging up kills it."""
        key = native.key_of(request, kept=True)
        command, mounts, options = wire.exec_call(wire.json_of(await request.body()))

        async def work() -> Response:
            disks = await _allowed(caller, mounts)
            run = await run_exec(request, caller, command, watched=False, disks=disks, idempotency_key=key, **options)
            return success(wire.run_fields(run))

        return Patient(work, native.headers, held=under_way.holding(caller, key))

    async def stream(request: Request, caller: CallerOf) -> Response:
        """Run a command in a fresh sandbox: a line of JSON for each event, empty ones between. Hanging up kills it."""
        key = native.key_of(request)
        command, mounts, options = wire.exec_call(wire.json_of(await request.body()))

        async def events() -> AsyncGenerator[bytes, None]:
            disks = await _allowed(caller, mounts)
            metrics = caller.state.metrics
            with caller.state.exec():
                try:
                    async with aclosing(caller.fanout.stream(command, disks=disks, **options)) as found:
                        async for event in found:
                            if isinstance(event, Finished):
                                metrics.finished(event.run)
                            yield wire.json_bytes(wire.event_fields(event)) + b"\n"
                except BaseException as error:
                    metrics.failed(cancelled=not isinstance(error, Exception))
                    raise

        def failed(error: Exception) -> bytes:
            return bytes(answer_of(error).body) + b"\n"

        return Streaming(events(), wire.NDJSON, native.headers, failed=failed, held=under_way.holding(caller, key))

    native.add("POST", "/exec", exec_, exec_, "Run a command", (), wire.Executing)
    native.shortcuts["POST", wire.PREFIX + "/exec"] = exec_
    native.add("DELETE", "/exec", cancel, cancel, "Cancel execs", ("key!",), None)
    native.add("POST", "/stream", stream, stream, "Run a command and follow it", (), wire.Executing)


async def _allowed(caller: Caller, mounts: Mapping[str, Mount]) -> dict[str, Any]:
    """Return mounts of disks that the caller may use so."""
    allowed: dict[str, Any] = {}
    for name, mount in mounts.items():
        right: Right = "read" if mount.mode == "read_only" else "write"
        if is_disk_id(mount.disk):
            caller.principal.require(mount.disk, right)
            allowed[name] = mount
        else:
            found = await caller.disk(mount.disk, right)
            allowed[name] = mount.model_copy(update={"disk": found.id})
    return allowed
