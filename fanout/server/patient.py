"""Answers that may take long: kept alive while there is nothing to say, given up when nobody listens any more.

Owns heartbeats and noticing that the caller went away. Knows nothing of what is being answered.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, aclosing, nullcontext

import anyio
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from fanout import wire
from fanout.errors import Unavailable
from fanout.server.answers import EXPECTED, answer_of

__all__ = ["Held", "Patient", "Streaming"]

_log = logging.getLogger("fanout.server")
#: What is entered around work, with the scope that cancels it.
Held = Callable[[anyio.CancelScope], AbstractContextManager[object]]
_CANCELLED = "it was cancelled by another call"
_Beat = Callable[[], Awaitable[None]]


def _nothing(scope: anyio.CancelScope) -> AbstractContextManager[object]:
    return nullcontext()


class Patient(Response):
    """Answers with what `work` returns, which is cancelled when the caller goes away, unless it is to `finish`.

    After a heartbeat's time it begins, with white space and status 200 whatever comes of it: the envelope tells.
    `held` is entered with the scope of the work, which others may cancel through it.
    """

    def __init__(
        self, work: Callable[[], Awaitable[Response]], headers: Mapping[str, str], *, finish: bool = False,
        held: Held = _nothing,
    ) -> None:  # fmt: skip
        super().__init__(media_type="application/json", headers=dict(headers))
        self._work = work
        self._finish = finish
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False
        answer: Response | None = None
        mistake: Exception | None = None

        async def beat() -> None:
            nonlocal begun
            if not begun:
                await send(_start(200, _without_length(self)))
                begun = True
            await send(_part(wire.BEAT))

        with anyio.CancelScope() as work, self._held(work):
            async with anyio.create_task_group() as group:
                group.start_soon(_attend, receive, beat, None if self._finish else group.cancel_scope)
                try:
                    answer = await self._work()
                except EXPECTED as error:
                    answer = answer_of(error)
                except Exception as error:
                    mistake, answer = error, answer_of(error)
                group.cancel_scope.cancel()
        if work.cancelled_caught:
            answer = answer_of(Unavailable(_CANCELLED))
        if mistake is not None and not begun:
            raise mistake
        if answer is None:
            return  # nobody is there to be told
        if begun:
            await send(_part(bytes(answer.body), more=False))
        else:
            answer.raw_headers += [each for each in _without_length(self) if each[0] != b"content-type"]
            await answer(scope, receive, send)


class Streaming(Response):
    """Sends what `parts` yields as it comes, then `last`. The caller's going away closes `parts`.

    An error before the first part is an answer of its own; later `failed` says what is sent of it, or (None) the
    connection is cut, so that what was sent cannot be taken for all. `beating`: heartbeats may stand between parts.
    `held` as in `Patient`.
    """

    def __init__(
        self, parts: AsyncGenerator[bytes, None], media_type: str, headers: Mapping[str, str], *, last: bytes = b"",
        failed: Callable[[Exception], bytes] | None = None, beating: bool = True, held: Held = _nothing,
    ) -> None:  # fmt: skip
        super().__init__(media_type=media_type, headers=dict(headers))
        self._parts = parts
        self._last = last
        self._failed = failed
        self._beating = beating
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False
        failure: Exception | None = None
        lock = anyio.Lock()

        async def say(data: bytes) -> None:
            nonlocal begun
            async with lock:
                if not begun:
                    begun = True
                    await send(_start(200, _without_length(self) if self._beating else self.raw_headers))
                await send(_part(data))

        async def beat() -> None:
            if self._beating:
                await say(wire.BEAT)

        with anyio.CancelScope() as work, self._held(work):
            async with anyio.create_task_group() as group, aclosing(self._parts) as parts:
                group.start_soon(_attend, receive, beat, group.cancel_scope)
                try:
                    async for part in parts:
                        await say(part)
                    await say(self._last)
                except Exception as error:
                    failure = error
                else:
                    await send(_part(b"", more=False))
                group.cancel_scope.cancel()
        if work.cancelled_caught:
            failure = Unavailable(_CANCELLED)
        if failure is not None:
            await self._fail(failure, begun, scope, receive, send)

    async def _fail(self, error: Exception, begun: bool, scope: Scope, receive: Receive, send: Send) -> None:
        if not begun:
            if not isinstance(error, EXPECTED):
                raise error
            await answer_of(error)(scope, receive, send)
        elif self._failed is not None:
            await send(_part(self._failed(error), more=False))
        # Else the answer stays unfinished, and the server closes the connection.
        if begun and not isinstance(error, EXPECTED):
            _log.error("an answer broke", exc_info=error)


async def _attend(receive: Receive, beat: _Beat, scope: anyio.CancelScope | None) -> None:
    """Send heartbeats until the caller goes away; then cancel `scope`."""
    while True:
        message: Message = {"type": ""}
        with anyio.move_on_after(wire.HEARTBEAT_S):
            message = await receive()
        if message["type"] == "http.disconnect":
            if scope is not None:
                scope.cancel()
            return
        if not message["type"]:
            await beat()


def _without_length(response: Response) -> list[tuple[bytes, bytes]]:
    return [each for each in response.raw_headers if each[0] != b"content-length"]


def _start(status: int, headers: list[tuple[bytes, bytes]]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": headers}


def _part(data: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}
