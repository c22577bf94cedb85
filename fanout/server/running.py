"""Running an exec for a request: admitted, counted, and cancelled when its caller goes away.

Owns these three; what an exec is asked and answered belongs to the routes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import anyio
from fastapi import Request

from fanout.model import Run
from fanout.server.answers import Refused
from fanout.server.caller import Caller
from fanout.server.observed import GONE

__all__ = ["run_exec", "unless_gone"]

T = TypeVar("T")


async def run_exec(request: Request, caller: Caller, command: str, *, watched: bool = True, **options: Any) -> Run:
    """Like `Fanout.exec` in the caller's name. If he hangs up, everything of the exec is gone and nothing committed.

    `watched` False: whoever calls this cancels it then.
    """
    metrics = caller.state.metrics
    with caller.state.exec():
        try:
            call = partial(caller.fanout.exec, command, **options)
            run = await (unless_gone(request, call) if watched else call())
        except BaseException as error:
            metrics.failed(cancelled=not isinstance(error, Exception) or isinstance(error, Refused))
            raise
        metrics.finished(run)
        request.scope["fanout.log"].update(exec=run.id, exec_status=run.status, exit_code=run.exit_code)
        return run


async def unless_gone(request: Request, call: Callable[[], Awaitable[T]]) -> T:
    """Return `call()`'s result; cancel it when the caller goes away (whose answer, 499, nobody reads).

    The body of the request must have been read.
    """
    results: list[T] = []
    failures: list[Exception] = []

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        try:
            results.append(await call())
        except Exception as error:
            failures.append(error)  # not as a group of one
        group.cancel_scope.cancel()
    if failures:
        raise failures[0]
    if not results:
        raise Refused(GONE, "gone", "the caller went away")
    return results[0]
