"""Around every request: an id, a log line, its metrics, and an answer where a route broke.

Owns what is told about requests. Knows none of them.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fanout.server import logs
from fanout.server.answers import broken
from fanout.server.state import State

__all__ = ["Observed"]

_SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
#: Status of a request whose caller left before it was answered, as nginx has it.
GONE = 499
_log = logging.getLogger("fanout.server.access")


class Observed:
    """Wraps an application. Routes may add fields to the line of their request: `scope["fanout.log"]["exec"] = …`.

    The route's label in the metrics is its template, or what `scope["fanout.route"]` says.
    """

    def __init__(self, state: State, app: ASGIApp) -> None:
        self._state = state
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        clock = self._state.runtime.monotonic
        request_id, began_s = self._id_of(scope), clock()
        token = logs.request_id.set(request_id)
        fields: dict[str, Any] = {}
        scope["fanout.log"], scope["fanout.request_id"] = fields, request_id
        status, had, sent = 0, 0, 0

        async def receiving() -> Message:
            nonlocal had
            message = await receive()
            had += len(message.get("body", b""))
            return message

        async def sending(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id.encode())]}
            sent += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receiving, sending)
        except Exception as error:
            _log.error("a request broke", exc_info=error)
            if not status:
                await broken(scope, receiving, sending)
        finally:
            took_s = clock() - began_s
            self._state.metrics.answered(scope["method"], _template(scope), status or GONE, took_s, had, sent)
            client = scope.get("client")
            told = {
                "method": scope["method"], "path": scope["path"], "status": status or GONE,
                "ms": round(took_s * 1e3, 2), "bytes_in": had, "bytes_out": sent, "client": client and client[0],
            }  # fmt: skip
            caller = scope.get("fanout.caller")
            if caller is not None:
                told["key"] = caller.principal.id
            _log.info("request", extra={"fields": {**told, **fields}})
            logs.request_id.reset(token)

    def _id_of(self, scope: Scope) -> str:
        for name, value in scope["headers"]:
            if name == b"x-request-id" and _SANE_ID.fullmatch(value):
                return str(value.decode())
        return f"rq-{self._state.runtime.hex_id(16)}"


def _template(scope: Scope) -> str:
    """Return the path of a request with names in place of what varies."""
    route = scope.get("fanout.route") or getattr(scope.get("route"), "path", None)
    if route is None:
        return "none"
    # Newer versions of FastAPI tell the path without the prefix of the router it is in.
    inside = scope["path"].startswith("/api/") and not route.startswith(("/api/", "s3"))
    return f"/api{route}" if inside else str(route)
