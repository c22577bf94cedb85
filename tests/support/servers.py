"""Starting the servers that tests talk to, one at a time and without leftovers."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_SUPPORT = Path(__file__).parent


@contextmanager
def moto_server() -> Iterator[str]:
    """Run a moto S3 server in a process of its own; yield its endpoint. It dies with this process."""
    process = subprocess.Popen(
        [sys.executable, str(_SUPPORT / "moto_server.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        assert port, "the moto server did not start"
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate()


class ScriptedServer:
    """An HTTP server that answers each request with the next handler of a script, then with 500."""

    def __init__(self) -> None:
        self.script: list[Callable[[BaseHTTPRequestHandler], None]] = []
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                outer.requests.append((self.command, self.path, dict(self.headers), body))
                (outer.script.pop(0) if outer.script else reply(500))(self)

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


def reply(
    status: int, code: str = "", body: bytes = b"", headers: dict[str, str] | None = None
) -> Callable[[BaseHTTPRequestHandler], None]:
    """Answer with a status and, for a `code`, S3's error document."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        text = f"<Error><Code>{code}</Code><Message>scripted</Message></Error>".encode() if code else body
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(text)), **(headers or {})}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(text)

    return answer


def cut(handler: BaseHTTPRequestHandler) -> None:
    """Close the connection without an answer, after the request was read."""
    handler.close_connection = True
