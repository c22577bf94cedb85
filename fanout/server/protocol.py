"""HTTP/1.1 as uvicorn speaks it, with bounds on what comes before a body: bytes, and the time for them.

Owns these bounds. A server without them keeps what a client never finishes.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

__all__ = ["bounded"]


def bounded(header_bytes: int, header_s: float) -> type[HttpToolsProtocol]:
    """Return the protocol for requests whose URL and headers take at most so many bytes, sent within so many seconds.

    More bytes are answered 431; who takes longer is hung up on.
    """

    class Bounded(HttpToolsProtocol):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._head_bytes = 0
            self._in_head = True
            self._too_long = False
            self._deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._head_came()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._in_head:
                # What is unfinished is kept by the parser; what a body or the next request brings is not counted long.
                if self._head_bytes > header_bytes:
                    self._refuse()
                    return
                self._head_bytes += len(data)
            super().data_received(data)
            if self._too_long and not self.transport.is_closing():
                self._refuse()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            if not self._in_head:
                self._in_head, self._head_bytes = True, 0
                self._expect_head()

        def on_headers_complete(self) -> None:
            self._in_head = False
            self._head_came()
            if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > header_bytes:
                self._too_long = True  # no route is started
                return
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            if not self._too_long:
                super().on_body(body)

        def on_message_complete(self) -> None:
            if not self._too_long:
                super().on_message_complete()

        def _expect_head(self) -> None:
            self._head_came()
            self._deadline = self.loop.call_later(header_s, self.transport.close)

        def _head_came(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _refuse(self) -> None:
            if self.cycle is not None and not self.cycle.response_complete:
                self.transport.close()  # an answer to an earlier request is on its way
                return
            text = b"the URL and headers are longer than this server takes"
            self.transport.write(
                STATUS_LINE[431] + b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
                b"content-length: " + str(len(text)).encode() + b"\r\n\r\n" + text
            )
            self.transport.close()

    return Bounded
