"""What the client makes of answers: refusals, strangers, waiting, secrets. The server says what it is told to say."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import anyio
import pytest

import fanout
from fanout import wire
from fanout.client import RemoteFanout
from fanout.config import Settings
from fanout.errors import Busy, Denied, Invalid, NotFound, Unavailable, Unknown
from fanout.runtime import Runtime
from tests.support.servers import ScriptedServer, cut, reply

pytestmark = pytest.mark.anyio
KEY = "key-0123456789abcdef-SECRET"
HASTY = Runtime(uniform=lambda low, high: low)
Handler = Callable[[BaseHTTPRequestHandler], None]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.close()


def said(data: object, status: int = 200, **headers: str) -> Handler:
    told = {
        "Content-Type": "application/json",
        wire.INSTANCE: "me",
        **{k.replace("_", "-"): v for k, v in headers.items()},
    }
    return reply(status, body=json.dumps(data).encode(), headers=told)


def ok(data: object = None) -> Handler:
    return said({"success": True, "data": data})


def refused(status: int, code: str, **headers: str) -> Handler:
    return said({"success": False, "error": "because", "code": code}, status, **headers)


ABOUT = ok({"server": "fanout", "version": "1", "api": 1, "instance": "me"})
HEAD = {"key": "f", "size": 1, "etag": "e", "lastModified": "2026-01-01T00:00:00Z", "mode": 420, "kind": "file"}
DISK = wire.Handle(id="dsk-0123456789abcdef", name="ws", branch="main")


def far(server: ScriptedServer, *script: Handler, **settings: object) -> RemoteFanout:
    server.script += [ABOUT, *script]
    return RemoteFanout(Settings.load({}, url=server.endpoint, api_key=KEY, **settings), runtime=HASTY)


def disk_of(fo: RemoteFanout) -> fanout.Disk:
    from fanout.client.disk import RemoteDisk

    return RemoteDisk(fo.http, HASTY, DISK)


async def test_white_space_before_an_answer(server: ScriptedServer) -> None:
    body = b"\n\n" + json.dumps({"success": True, "data": HEAD}).encode()
    failed = b"\n\n" + json.dumps({"success": False, "error": "late", "code": "busy"}).encode()
    async with far(server, reply(200, body=body), reply(200, body=failed)) as fo:
        found = await disk_of(fo).head_object("f")
        assert found is not None
        assert found.size == 1
        with pytest.raises(Busy, match="late"):
            await disk_of(fo).head_object("f")


@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        (reply(200, body=b"<html>hello</html>"), Unavailable, "does not answer as a fanout server"),
        (reply(200, body=b"[]"), Unavailable, "does not answer as a fanout server"),
        (reply(200, body=b'{"items": []}'), Unavailable, "does not answer as a fanout server"),
        (reply(404, body=b"no such page"), Unavailable, "does not answer as a fanout server"),
        (reply(301, headers={"Location": "https://elsewhere/"}), Unavailable, "https://elsewhere/"),
        (reply(401, body=b"who are you"), Denied, "refuses"),
        (refused(404, "not_found"), Unavailable, "without this API"),
        (refused(401, "unauthorized"), Denied, "because"),
        (cut, Unavailable, "was cut"),
    ],
)
async def test_what_is_no_server_or_does_not_want_us(
    server: ScriptedServer, answer: Handler, kind: type[Exception], says: str
) -> None:
    fo = RemoteFanout(Settings.load({}, url=server.endpoint, api_key=KEY), runtime=HASTY)
    server.script = [answer]
    with pytest.raises(kind, match=says) as caught:
        await fo.open()
    assert len(server.requests) == 1, "a mistyped URL is told at once"
    if kind is Unavailable and "elsewhere" not in says:
        assert server.endpoint in str(caught.value)
    assert "SECRET" not in f"{caught.value!r} {fo!r} {fo.settings!r}"


async def test_where_nobody_listens() -> None:
    for url, says in (
        ("http://127.0.0.1:1", "cannot connect to http://127.0.0.1:1"),
        ("http://nobody.invalid", "cannot connect to http://nobody.invalid"),
    ):
        with pytest.raises(Unavailable, match=says):
            await fanout.connect(url).open()


async def test_tls_that_is_none(server: ScriptedServer) -> None:
    with pytest.raises(Unavailable, match="cannot connect to https://"):
        await fanout.connect(server.endpoint.replace("http:", "https:")).open()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "host:7070",
        "ftp://host",
        "http://",
        "http://h/?q=1",
        "http://h/#f",
        "http://h:port",
        "http://h h",
        "http://h\n",
    ],
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(Invalid, match="url"):
        RemoteFanout(Settings(url=url))


def test_secrets_are_not_shown() -> None:
    with pytest.raises(Invalid) as caught:
        RemoteFanout(Settings(url="http://SECRET@host"))
    assert "SECRET" not in str(caught.value)
    for key in ("", " ", "key\nSECRET", "SECRET-ä"):
        with pytest.raises(Invalid, match="api_key") as caught:
            RemoteFanout(Settings(url="http://host", api_key=key))
        assert "SECRET" not in str(caught.value)


async def test_the_key_is_sent_and_nothing_is_compressed(server: ScriptedServer) -> None:
    async with far(server):
        pass
    headers = {name.lower(): value for name, value in server.requests[0][2].items()}
    assert headers["authorization"] == KEY
    assert headers["accept-encoding"] == "identity"


# -- once more -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [refused(429, "no_capacity", Retry_After="0"), refused(503, "runtime_retryable", Retry_After="0"),
     reply(503, headers={"Retry-After": "0"}), reply(429)],
)  # fmt: skip
async def test_a_server_that_asks_for_patience_gets_it(
    server: ScriptedServer, answer: Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept = []
    real = anyio.sleep
    monkeypatch.setattr(anyio, "sleep", lambda seconds: (slept.append(seconds), real(0))[1])
    async with far(server, answer, answer, ok(HEAD)) as fo:
        assert await disk_of(fo).head_object("f") is not None
    assert len(server.requests) == 4
    assert len([seconds for seconds in slept if seconds >= 0.05]) >= 2


async def test_patience_ends_with_the_callers(server: ScriptedServer) -> None:
    async with far(server, *[refused(429, "no_capacity", Retry_After="30")] * 2) as fo:
        began = time.monotonic()
        with anyio.move_on_after(0.2) as scope:
            await disk_of(fo).head_object("f")
        assert scope.cancelled_caught
        assert time.monotonic() - began < 25


async def test_patience_ends(server: ScriptedServer) -> None:
    now = [0.0]

    def monotonic() -> float:
        now[0] += 400
        return now[0]

    server.script += [ABOUT, *[refused(429, "no_capacity", Retry_After="0")] * 5]
    runtime = Runtime(uniform=lambda low, high: low, monotonic=monotonic)
    async with RemoteFanout(Settings.load({}, url=server.endpoint, api_key=KEY), runtime=runtime) as fo:
        with pytest.raises(Busy, match="because"):
            await disk_of(fo).head_object("f")


@pytest.mark.parametrize("answer", [refused(503, "unavailable"), refused(503, "busy"), refused(500, "internal")])
async def test_what_a_server_has_tried_is_not_tried_again(server: ScriptedServer, answer: Handler) -> None:
    async with far(server, answer) as fo:
        with pytest.raises(fanout.FanoutError, match="because"):
            await disk_of(fo).head_object("f")
    assert len(server.requests) == 2


async def test_a_write_is_named_and_says_that_it_comes_again(server: ScriptedServer) -> None:
    async with far(server, cut, reply(502), ok(None)) as fo:
        await disk_of(fo).delete_object("f")
    keys = {request[2].get(wire.IDEMPOTENCY) for request in server.requests[1:]}
    assert len(keys) == 1
    assert None not in keys
    assert [request[2].get(wire.RETRY_OF) for request in server.requests[1:]] == [None, "me", "me"]


async def test_a_write_that_nobody_answers_is_unknown(server: ScriptedServer) -> None:
    async with far(server, *[cut] * 20) as fo:
        with pytest.raises(Unknown, match="cannot be learned"):
            await disk_of(fo).delete_object("f")
        with pytest.raises(Unavailable):
            await disk_of(fo).head_object("f")
    assert len(server.requests) == 1 + 8 + 8


async def test_a_stream_is_never_sent_twice(server: ScriptedServer) -> None:
    async with far(server, cut, ABOUT) as fo:
        with pytest.raises(Unknown, match="cannot be learned"):
            [event async for event in fo.stream("true")]
    assert len([request for request in server.requests if request[1].endswith("/stream")]) == 1


async def test_lines_that_are_errors_and_lists_that_do_not_end(server: ScriptedServer) -> None:
    row = json.dumps(HEAD).encode() + b"\n"
    start, end = b'{"list":{"seq":4}}\n', b'{"end":true}\n'
    gone = json.dumps({"success": False, "error": "gone", "code": "not_found"}).encode() + b"\n"
    script = [reply(200, body=b"\n" + start + row), reply(200, body=start + row + row + b"\n" + end)]
    async with far(server, *script, reply(200, body=start + row + gone), reply(200, body=b"<p>\n")) as fo:
        assert len([item async for item in disk_of(fo).list_objects()]) == 3
        assert "skip=1" in server.requests[2][1]
        assert "seq=4" in server.requests[2][1]
        with pytest.raises(NotFound, match="gone"):
            [item async for item in disk_of(fo).list_objects()]
        with pytest.raises(Unavailable, match="does not answer as a fanout server"):
            [item async for item in disk_of(fo).list_objects()]


async def test_a_connection_that_is_closed(server: ScriptedServer) -> None:
    def silent(handler: BaseHTTPRequestHandler) -> None:
        time.sleep(0.5)
        cut(handler)

    fo: Any = far(server, silent)
    await fo.open()
    async with anyio.create_task_group() as group:

        async def waiting() -> None:
            with pytest.raises(Unavailable, match="closed"):
                await disk_of(fo).head_object("f")

        group.start_soon(waiting)
        while len(server.requests) < 2:
            await anyio.sleep(0.001)
        await fo.aclose()
    for call in (disk_of(fo).head_object("f"), fo.exec("true"), fo.disks.get("ws")):
        with pytest.raises(Unavailable, match="not open"):
            await call
    await fo.aclose()


def test_http2_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "h2", None)
    with pytest.raises(Invalid, match="h2"):
        anyio.run(RemoteFanout(Settings(url="http://127.0.0.1:1", http2=True)).open)


def test_proxies_are_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    from fanout.client.pool import _proxy_for

    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    assert _proxy_for("http://far.example:7070") is None
    monkeypatch.setenv("http_proxy", "proxy.example:3128")
    monkeypatch.setenv("no_proxy", "near.example,127.0.0.1")
    assert _proxy_for("http://far.example:7070") == "http://proxy.example:3128"
    assert _proxy_for("https://far.example") is None
    assert _proxy_for("http://near.example") is None
    assert _proxy_for("http://127.0.0.1:7070") is None
    monkeypatch.setenv("all_proxy", "http://proxy.example:1")
    assert _proxy_for("https://far.example") == "http://proxy.example:1"
