"""An S3 server in which things go wrong on the wire: requests pass through to a real one unless told otherwise."""

from __future__ import annotations

import http.client
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from tests.support.servers import cut, reply

#: What to do instead of passing a request on: an answer, or None to pass it on after all.
Rule = Callable[[BaseHTTPRequestHandler], Callable[[BaseHTTPRequestHandler], None] | None]


class Proxy:
    """Passes requests to the server at `inner`; safe for threads.

    `accepted`: the access keys that are let through, None for all; others get 403 with `refusal` and a message that
    gives away what it should not. `rules` are asked first. `bodies` changes what a GET answers: "cut" (the connection
    ends in the middle), "short" (half of it, as if it were all), "flipped" (one bit is another), each time a
    pattern of the path is found, `count` times.
    """

    def __init__(self, inner: str) -> None:
        self.accepted: set[str] | None = None
        self.refusal = "ExpiredToken"
        self.message = "scripted"
        self.rules: list[Rule] = []
        self.bodies: list[tuple[str, str, int]] = []
        self.seen: list[tuple[str, str]] = []
        self._lock = threading.Lock()
        self._inner = urlsplit(inner).netloc
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                outer.handle(self)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = answer

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        handler.body = body  # type: ignore[attr-defined]
        self.seen.append((handler.command, handler.path))
        for rule in list(self.rules):
            answer = rule(handler)
            if answer is not None:
                return answer(handler)
        key = re.search(r"Credential=([^/]+)/", handler.headers.get("Authorization", ""))
        if self.accepted is not None and (key is None or key[1] not in self.accepted):
            text = f"<Error><Code>{self.refusal}</Code><Message>{self.message}</Message></Error>"
            return reply(403, body=text.encode())(handler)
        self.forward(handler, body)

    def forward(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        connection = http.client.HTTPConnection(self._inner, timeout=60)
        try:
            headers = {k: v for k, v in handler.headers.items() if k.lower() not in ("connection", "expect")}
            connection.request(handler.command, handler.path, body, headers)
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        whole = len(data)
        how = self._body(handler, data) if answer.status in (200, 206) else ""
        if how == "flipped":
            data = data[: whole // 2] + bytes([data[whole // 2] ^ 1]) + data[whole // 2 + 1 :]
        elif how:
            data = data[: whole // 2]
        handler.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                handler.send_header(name, value)
        length = answer.getheader("Content-Length") or "0" if handler.command == "HEAD" else str(whole)
        handler.send_header("Content-Length", str(len(data)) if how in ("short", "flipped") else length)
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(data)
        if how == "cut":
            handler.close_connection = True

    def _body(self, handler: BaseHTTPRequestHandler, data: bytes) -> str:
        if handler.command != "GET" or not data or "list-type" in handler.path:
            return ""
        with self._lock:
            for place, (how, pattern, count) in enumerate(self.bodies):
                if count and re.search(pattern, handler.path):
                    self.bodies[place] = how, pattern, count - 1
                    return how
        return ""


def once(verb: str, pattern: str, then: Callable[[], None]) -> Rule:
    """Call `then` at the first request that matches."""
    left = [1]

    def rule(handler: BaseHTTPRequestHandler) -> None:
        if left and handler.command == verb and re.search(pattern, handler.path):
            left.clear()
            then()

    return rule


def answering(verb: str, pattern: str, answer: Callable[[BaseHTTPRequestHandler], None], times: int) -> Rule:
    """Give `answer` to the first `times` requests that match, without passing them on."""
    left, lock = [times], threading.Lock()

    def rule(handler: BaseHTTPRequestHandler) -> Callable[[BaseHTTPRequestHandler], None] | None:
        with lock:
            if left[0] and re.fullmatch(verb, handler.command) and re.search(pattern, handler.path):
                left[0] -= 1
                return answer
        return None

    return rule


def stored_but_silent(proxy: Proxy, seconds: float) -> Callable[[BaseHTTPRequestHandler], None]:
    """Pass the request on, then say nothing for longer than the client waits."""

    class Nowhere:
        def write(self, data: bytes) -> None:
            pass

        def flush(self) -> None:
            pass

    def answer(handler: BaseHTTPRequestHandler) -> None:
        wfile, handler.wfile = handler.wfile, Nowhere()  # type: ignore[assignment]
        try:
            # The body was read by the proxy already: it is what the rule was given.
            proxy.forward(handler, handler.body)  # type: ignore[attr-defined]
        finally:
            handler.wfile = wfile
        time.sleep(seconds)
        cut(handler)

    return answer


@contextmanager
def proxy_to(endpoint: str) -> Iterator[Proxy]:
    proxy = Proxy(endpoint)
    try:
        yield proxy
    finally:
        proxy.close()
