"""How the native API's routes are made: what all of them do before and after their own one or two lines.

Owns parameters, bodies, rights, answers, idempotency and the OpenAPI of each route. Knows no operation.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Literal, TypeVar

from fastapi import APIRouter, Request, Response

from fanout import wire
from fanout.api import Disk
from fanout.errors import Invalid, Unknown
from fanout.local_disk import LocalDisk
from fanout.model import Value
from fanout.run.once import Once
from fanout.runtime import Runtime
from fanout.server.answers import answer_of, success
from fanout.server.caller import Caller, CallerOf
from fanout.server.keys import Right
from fanout.server.patient import Patient, Streaming

__all__ = ["Answer", "Call", "Native", "handle_of"]

V = TypeVar("V", bound=Value)
Answer = Value | Disk | list[Any] | dict[str, Any] | None
_OnLine = Callable[[LocalDisk, "Call"], Awaitable[Answer]]
_Plain = Callable[["Call"], Awaitable[Answer]]
_Rows = Callable[["Call"], AsyncIterator[Value | str]]
_RowsOfLine = Callable[[LocalDisk, "Call"], AsyncIterator[Value | str]]
Method = Literal["GET", "PUT", "POST", "DELETE"]

#: Rows that are sent together.
_ROWS = 256
#: Calls whose answers are remembered, and bytes of these.
_REMEMBERED, _REMEMBERED_BYTES = 10_000, 64 << 20


class Call:
    """One request as a route sees it. `given` are its query's values."""

    def __init__(self, request: Request, caller: Caller, names: tuple[str, ...], body: bytes) -> None:
        self.request = request
        self.caller = caller
        self.content = body
        self._names = {name.rstrip("!") for name in names}
        self._given = wire.parse_query(request.scope["query_string"], self._names)
        for name in names:
            if name.endswith("!") and name[:-1] not in self._given:
                raise Invalid(f"{name[:-1]} is missing from the query")

    def text(self, name: str, default: str = "") -> str:
        """Return a value as it was given."""
        return self._given.get(name, default)

    def perhaps(self, name: str) -> str | None:
        """Return a value, or None where there is none."""
        return self._given.get(name)

    def number(self, name: str) -> int | None:
        """Return a whole number, or None where there is none."""
        text = self._given.get(name)
        if text is None:
            return None
        if not text.isascii() or not text.removeprefix("-").isdigit() or len(text) > 19:
            raise Invalid.argument(name, text, "a whole number")
        return int(text)

    def truth(self, name: str, default: bool = False) -> bool:
        """Return true or false."""
        text = self._given.get(name)
        if text not in (None, "true", "false"):
            raise Invalid.argument(name, text, "true or false")
        return default if text is None else text == "true"

    def body(self, kind: type[V]) -> V:
        """Return the JSON of the body."""
        return wire.value_of(kind, wire.json_of(self.content) if self.content else {})

    async def line(self, right: Right) -> LocalDisk:
        """Open the line that path and query name, if the caller has this right on it."""
        disk, line = self.request.path_params["disk"], self._given.get("line")
        return await self.caller.disk(f"{disk}@{line}" if line else disk, right)


class Native:
    """The router of the native API, and what its routes share: the instance's name and the answers it remembers."""

    def __init__(self, router: APIRouter, runtime: Runtime) -> None:
        self.router = router
        #: Routes that are called often and are worth no more than they do themselves, by method and whole path.
        self.shortcuts: dict[tuple[str, str], Callable[[Request, Caller], Awaitable[Response]]] = {}
        self.instance = runtime.hex_id(16)
        self.headers = {wire.INSTANCE: self.instance}
        self._once: Once[tuple[int, bytes]] = Once(
            _REMEMBERED, _REMEMBERED_BYTES, size_of=lambda kept: len(kept[1]) if isinstance(kept, tuple) else 0
        )

    # -- kinds of routes -------------------------------------------------------------------------------------

    def read(
        self, path: str, summary: str, *names: str, method: Method = "GET", body: type[Value] | None = None
    ) -> Callable[[_OnLine], _OnLine]:
        """Make a route of a function that reads one line of a disk."""

        def make(function: _OnLine) -> _OnLine:
            async def route(disk: str, request: Request, caller: CallerOf) -> Response:
                call = Call(request, caller, ("line", *names), await request.body())

                async def work() -> Response:
                    return told(await function(await call.line("read"), call))

                return Patient(work, self.headers)

            self.add(method, path, route, function, summary, ("line", *names), body)
            return function

        return make

    def write(
        self, path: str, summary: str, *names: str, method: Method = "POST", body: type[Value] | None = None
    ) -> Callable[[_OnLine], _OnLine]:
        """Make a route of a function that changes one line of a disk."""

        def make(function: _OnLine) -> _OnLine:
            async def on_line(call: Call) -> Answer:
                return await function(await call.line("write"), call)

            async def route(disk: str, request: Request, caller: CallerOf) -> Response:
                return self.once(Call(request, caller, ("line", *names), await request.body()), on_line)

            self.add(method, path, route, function, summary, ("line", *names), body)
            return function

        return make

    def rows(self, path: str, summary: str, *names: str) -> Callable[[_RowsOfLine], _RowsOfLine]:
        """Make a route of a function that lists something of one line of a disk, from a pinned commit."""
        every = ("line", *names, "seq", "skip")

        def make(function: _RowsOfLine) -> _RowsOfLine:
            async def route(disk: str, request: Request, caller: CallerOf) -> Response:
                call = Call(request, caller, every, b"")

                async def lines() -> AsyncGenerator[bytes, None]:
                    line = await (await call.line("read")).pinned(call.number("seq"))
                    yield wire.json_bytes({"list": {"seq": line.point.seq}}) + b"\n"
                    async for part in _lines(function(line, call), call.number("skip") or 0):
                        yield part

                return self.listing(lines())

            self.add("GET", path, route, function, summary, every, None)
            return function

        return make

    # -- what they are made of -------------------------------------------------------------------------------

    def add(
        self, method: Method, path: str, route: Callable[..., Any], function: Callable[..., Any], summary: str,
        names: tuple[str, ...], body: type[Value] | None, content: str = "application/json",
    ) -> None:  # fmt: skip
        """Add a route with its OpenAPI."""
        extra: dict[str, Any] = {
            "parameters": [
                {"name": name.rstrip("!"), "in": "query", "required": name.endswith("!"), "schema": _SCHEMAS.get(
                    name.rstrip("!"), {"type": "string"})}
                for name in names
            ]
        }  # fmt: skip
        if body is not None:
            extra["requestBody"] = {"content": {content: {"schema": body.model_json_schema()}}, "required": True}
        elif content != "application/json":
            extra["requestBody"] = {"content": {content: {"schema": {"type": "string", "format": "binary"}}}}
        self.router.add_api_route(
            path, route, methods=[method], summary=summary, name=function.__name__, description=function.__doc__,
            openapi_extra=extra, response_class=Response,
        )  # fmt: skip

    def once(self, call: Call, work: _Plain) -> Response:
        """Do what changes something, to its end whoever listens; repeated under its key, it gets the first answer."""
        request = call.request
        key = self.key_of(request)

        async def answered() -> tuple[int, bytes]:
            response = told(await work(call))
            return response.status_code, bytes(response.body)

        async def remembered() -> Response:
            if key is None:
                return told(await work(call))
            asked = (request.method, request.scope["raw_path"], request.scope["query_string"])
            print_ = (*asked, hashlib.sha256(call.content).digest())
            status, body = await self._once.run(f"{call.caller.principal.id}\0{key}", print_, answered)
            return Response(body, status, media_type="application/json")

        return Patient(remembered, self.headers, finish=True)

    def key_of(self, request: Request, *, kept: bool = False) -> str | None:
        """Return the idempotency key of a request; `Unknown` for one that another process may have had before.

        `kept`: what comes of the call is kept in the store, unless the client made the key up.
        """
        key = request.headers.get(wire.IDEMPOTENCY)
        if key is not None and not 0 < len(key) <= 255:
            raise Invalid.argument(wire.IDEMPOTENCY, key, "1 to 255 characters")
        before = request.headers.get(wire.RETRY_OF)
        anywhere = kept and key is not None and not key.startswith(wire.AUTOMATIC)
        if before is not None and before != self.instance and not anywhere:
            raise Unknown(
                "the server was restarted while it had this call, or the call was sent to another server before: "
                "whether it was done cannot be learned"
            )
        return key

    def listing_of(self, rows: AsyncIterator[Value | str], call: Call) -> Response:
        """Answer with rows of what is no line of a disk."""
        return self.listing(_lines(rows, call.number("skip") or 0))

    def listing(self, lines: AsyncGenerator[bytes, None]) -> Response:
        """Answer with lines of JSON, the last of which says that it is the last."""
        return Streaming(lines, wire.NDJSON, self.headers, last=wire.json_bytes({"end": True}) + b"\n", failed=_failed)


def handle_of(disk: Disk) -> wire.Handle:
    """Return what tells a client which line a handle is on."""
    return wire.Handle(id=disk.id, name=disk.name, branch=disk.branch_name, at=disk.at)


def told(answer: Answer) -> Response:
    """Return the envelope with an answer in it."""
    if isinstance(answer, Disk):
        answer = handle_of(answer)
    if isinstance(answer, list):
        return success([wire.plain(each) if isinstance(each, Value) else each for each in answer])
    return success(wire.plain(answer) if isinstance(answer, Value) else answer)


async def _lines(rows: AsyncIterator[Value | str], skip: int) -> AsyncGenerator[bytes, None]:
    """Yield rows as lines, many at once."""
    held: list[bytes] = []
    async for row in rows:
        if skip:
            skip -= 1
            continue
        held.append(wire.json_bytes({"name": row} if isinstance(row, str) else wire.plain(row)))
        if len(held) == _ROWS:
            yield b"\n".join(held) + b"\n"
            held.clear()
    if held:
        yield b"\n".join(held) + b"\n"


def _failed(error: Exception) -> bytes:
    """Return the line that says what ended a list or stream too early."""
    return bytes(answer_of(error).body) + b"\n"


_NUMBER, _TRUTH = {"type": "integer", "minimum": 0}, {"type": "boolean"}
_SCHEMAS: Mapping[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("seq", "skip", "start", "end", "limit", "afterSeq", "beforeSeq", "mode", "offset", "length"), _NUMBER
    ),
    **dict.fromkeys(("recursive",), _TRUTH),
}
