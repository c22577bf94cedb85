"""The one ASGI application: REST under `/api`, a few pages about the server itself, S3 everywhere else.

Owns which part answers a request, who may ask, and how large a body may be. The routes are archil.py's and native.py's,
S3 is s3/'s.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from importlib.metadata import version

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from fastapi_offline import FastAPIOffline
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fanout import wire
from fanout.server import answers
from fanout.server.answers import EXPECTED, Refused, answer_of
from fanout.server.archil import routes as archil
from fanout.server.caller import Caller, principal_of
from fanout.server.native import native_api
from fanout.server.observed import Observed
from fanout.server.s3.gateway import S3Gateway
from fanout.server.state import State

__all__ = ["create_app"]

#: First parts of paths that are ours; all else is a bucket's. On the S3 port these are buckets, too.
OURS = frozenset({"api", "docs", "healthz", "metrics", "openapi.json", "readyz"})


Route = Callable[[Request, Caller], Awaitable[Response]]
#: Paths below `/api` that ask for no key: a share link is signed.
_PUBLIC = "/api/shared/"


class Application:
    """Dispatches a request to REST or to S3. `s3_port`: the local port on which all is S3, if there is one.

    `shortcuts` are routes that need nothing of what the framework does for the others, by method and path.
    """

    def __init__(self, state: State, rest: ASGIApp, s3: ASGIApp, shortcuts: Mapping[tuple[str, str], Route]) -> None:
        self.state = state
        self.s3_port: int | None = None
        self._rest = rest
        self._s3 = s3
        self._shortcuts = shortcuts
        self._observed = Observed(state, self._dispatch)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            await self._observed(scope, receive, send)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        first = scope["path"].split("/", 2)[1] if scope["path"].startswith("/") else ""
        server = scope.get("server")
        if first not in OURS or (self.s3_port is not None and server is not None and server[1] == self.s3_port):
            scope["fanout.route"] = "s3"
            await self._s3(scope, receive, send)
        elif first != "api" or scope["path"].startswith(_PUBLIC):
            await self._rest(scope, receive, send)
        else:
            await self._api(scope, receive, send)

    async def _api(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let nobody have a body read who may not ask."""
        try:
            scope["fanout.caller"] = Caller(self.state, await principal_of(self.state, scope))
            limits = self.state.limits
            most = limits.object_bytes if wire.takes_long_bodies(scope["path"]) else limits.json_bytes
            limited = _limited(scope, receive, most)
        except EXPECTED as error:
            answer = answer_of(error)
            answer.headers["Connection"] = "close"  # its body stays unread
            await answer(scope, receive, send)
            return
        shortcut = self._shortcuts.get((scope["method"], scope["path"]))
        if shortcut is None:
            await self._rest(scope, limited, send)
            return
        scope["fanout.route"] = scope["path"]
        try:
            answer = await shortcut(Request(scope, limited), scope["fanout.caller"])
        except EXPECTED as error:
            answer = answer_of(error)
        await answer(scope, limited, send)


def create_app(state: State) -> Application:
    """Return the application that serves an opened state."""
    rest = FastAPIOffline(
        title="fanout",
        description="Disks and execs. The key of a request: `Authorization: key-…`.",
        version=version("fanout"),
        docs_url="/docs",
        redoc_url=None,
        openapi_url="/openapi.json",
        static_url="/docs/files",  # of the page itself, which works without the internet
    )
    answers.install(rest)
    rest.state.fanout = state
    rest.include_router(archil.public)
    rest.include_router(archil.router)
    native = native_api(state)
    rest.include_router(native.router)

    @rest.get("/healthz", include_in_schema=False)
    async def healthz() -> dict[str, str]:
        return {"status": "alive"}

    @rest.get("/readyz", include_in_schema=False)
    async def readyz() -> Response:
        if await state.is_ready():
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "draining" if state.draining else "the store does not answer"}, 503)

    @rest.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(state.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return Application(state, rest, S3Gateway(state), native.shortcuts)


def _limited(scope: Scope, receive: Receive, most: int) -> Receive:
    """Return a `receive` that raises `Refused` (413) where a body is longer than `most`; at once if it says so."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > most:
            raise _too_long(most)
    had = 0

    async def limited() -> Message:
        nonlocal had
        message = await receive()
        if message["type"] == "http.request":
            had += len(message.get("body", b""))
            if had > most:
                raise _too_long(most)
        return message

    return limited


def _too_long(most: int) -> Refused:
    return Refused(413, "limit", f"the body is longer than the {most} bytes this server takes", {"Connection": "close"})


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
