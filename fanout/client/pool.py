"""Connections to one server from one event loop, each used for one request at a time.

Owns how many there are, how long they are kept and which proxy they go through. httpx's own pool looks at every
connection for every request, and its client does much that is of no use with one server and one key: with fifty execs
at once both cost more than all else of a call. So each connection is a transport of its own; the last one used is next.
"""

from __future__ import annotations

import contextlib
import ssl
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from importlib.util import find_spec
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import anyio
import httpx

from fanout.errors import Invalid
from fanout.runtime import Runtime

__all__ = ["Pool"]

#: Requests under way at once; others wait for one of them to end.
_MOST = 512
#: How long an idle connection is kept, in seconds: less than the server keeps it.
_IDLE_S = 30.0


class Pool:
    """The connections of one event loop. A proxy is what the environment says (HTTP_PROXY, NO_PROXY, …)."""

    def __init__(
        self, url: str, headers: Mapping[str, str], timeout: httpx.Timeout, runtime: Runtime, *, http2: bool = False
    ) -> None:
        if http2 and find_spec("h2") is None:
            raise Invalid("http2 is True: the package h2 is needed for it (pip install h2)")
        self._headers = headers
        self._extensions = {"timeout": timeout.as_dict()}
        self._runtime = runtime
        self._http2 = http2
        self._tls: ssl.SSLContext | bool = ssl.create_default_context() if url.startswith("https:") else False
        self._proxy = _proxy_for(url)
        self._free = anyio.Semaphore(_MOST, fast_acquire=True)
        self._idle: deque[tuple[httpx.AsyncHTTPTransport, float]] = deque()

    async def send(
        self, method: str, url: str, content: bytes | AsyncIterable[bytes] | None, headers: Mapping[str, str]
    ) -> httpx.Response:
        """Send a request and return its answer, unread. Its connection is free again when the answer is closed."""
        request = httpx.Request(
            method, url, content=content, headers={**self._headers, **headers}, extensions=self._extensions
        )
        await self._free.acquire()
        transport = self._idle.pop()[0] if self._idle else self._made()
        try:
            response = await transport.handle_async_request(request)
        except BaseException:
            await self._discard(transport)
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.request = request
        response.stream = _Leased(response.stream, self, transport)
        return response

    async def aclose(self) -> None:
        """Close the idle connections."""
        while self._idle:
            await self._idle.pop()[0].aclose()

    async def _discard(self, transport: httpx.AsyncHTTPTransport) -> None:
        """Close a connection that nobody knows the state of: a request on it failed or was cancelled."""
        self._free.release()
        with anyio.CancelScope(shield=True), contextlib.suppress(httpx.HTTPError):
            await transport.aclose()

    async def _release(self, transport: httpx.AsyncHTTPTransport) -> None:
        """Keep a connection for the next request, and close those that have been idle for long."""
        now_s = self._runtime.monotonic()
        self._idle.append((transport, now_s))
        self._free.release()
        while self._idle and self._idle[0][1] < now_s - _IDLE_S:
            await self._idle.popleft()[0].aclose()

    def _made(self) -> httpx.AsyncHTTPTransport:
        return httpx.AsyncHTTPTransport(
            verify=self._tls,
            http2=self._http2,
            proxy=self._proxy,
            limits=httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=_IDLE_S),
        )


def _proxy_for(url: str) -> str | None:
    parts = urlsplit(url)
    if parts.hostname is None or proxy_bypass(parts.hostname):
        return None
    known = getproxies()
    proxy = known.get(parts.scheme) or known.get("all")
    return proxy if proxy is None or "://" in proxy else f"http://{proxy}"


class _Leased(httpx.AsyncByteStream):
    """An answer's bytes; closing them gives the connection back."""

    def __init__(self, inner: httpx.AsyncByteStream, pool: Pool, transport: httpx.AsyncHTTPTransport) -> None:
        self._inner = inner
        self._pool = pool
        self._transport: httpx.AsyncHTTPTransport | None = transport
        self._whole = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._inner:
            yield part
        self._whole = True

    async def aclose(self) -> None:
        transport, self._transport = self._transport, None
        if transport is None:
            return
        try:
            with anyio.CancelScope(shield=True), contextlib.suppress(httpx.HTTPError):
                await self._inner.aclose()
        except BaseException:
            self._whole = False  # a task of asyncio, cancelled by its own method: no scope shields from that
            raise
        finally:
            await (self._pool._release(transport) if self._whole else self._pool._discard(transport))
