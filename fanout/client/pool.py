"""Connections to one server from one event loop, each used for one request at a time.

Owns how many there are and how long they are kept. httpx's own pool looks at every connection for every request, which
with fifty of them costs more than all else of a call; here each has a client of its own, and the last one used is next.
"""

from __future__ import annotations

import contextlib
import ssl
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Mapping

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
    """The connections of one event loop."""

    def __init__(
        self, url: str, headers: Mapping[str, str], timeout: httpx.Timeout, runtime: Runtime, *, http2: bool = False
    ) -> None:
        self._headers = headers
        self._timeout = timeout
        self._runtime = runtime
        self._http2 = http2
        self._tls: ssl.SSLContext | bool = ssl.create_default_context() if url.startswith("https:") else False
        self._free = anyio.Semaphore(_MOST, fast_acquire=True)
        self._idle: deque[tuple[httpx.AsyncClient, float]] = deque()

    async def send(
        self, method: str, url: str, content: bytes | AsyncIterable[bytes] | None, headers: Mapping[str, str]
    ) -> httpx.Response:
        """Send a request and return its answer, unread. Its connection is free again when the answer is closed."""
        await self._free.acquire()
        client = self._idle.pop()[0] if self._idle else self._made()
        try:
            request = client.build_request(method, url, content=content, headers=headers)
            response = await client.send(request, stream=True)
        except BaseException:
            await self._discard(client)
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Leased(response.stream, self, client)
        return response

    async def aclose(self) -> None:
        """Close the idle connections."""
        while self._idle:
            await self._idle.pop()[0].aclose()

    async def _discard(self, client: httpx.AsyncClient) -> None:
        """Close a connection that nobody knows the state of: a request on it failed or was cancelled."""
        self._free.release()
        with anyio.CancelScope(shield=True), contextlib.suppress(httpx.HTTPError):
            await client.aclose()

    async def _release(self, client: httpx.AsyncClient) -> None:
        """Keep a connection for the next request, and close those that have been idle for long."""
        self._idle.append((client, self._runtime.monotonic()))
        self._free.release()
        while self._idle and self._idle[0][1] < self._runtime.monotonic() - _IDLE_S:
            await self._idle.popleft()[0].aclose()

    def _made(self) -> httpx.AsyncClient:
        try:
            return httpx.AsyncClient(
                headers=self._headers,
                verify=self._tls,
                http2=self._http2,
                timeout=self._timeout,
                limits=httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=_IDLE_S),
            )
        except ImportError as error:
            raise Invalid(f"http2 is set, which needs another package: {error}") from None


class _Leased(httpx.AsyncByteStream):
    """An answer's bytes; closing them gives the connection back."""

    def __init__(self, inner: httpx.AsyncByteStream, pool: Pool, client: httpx.AsyncClient) -> None:
        self._inner = inner
        self._pool = pool
        self._client: httpx.AsyncClient | None = client
        self._whole = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._inner:
            yield part
        self._whole = True

    async def aclose(self) -> None:
        client, self._client = self._client, None
        if client is None:
            return
        try:
            with anyio.CancelScope(shield=True), contextlib.suppress(httpx.HTTPError):
                await self._inner.aclose()
        except BaseException:
            self._whole = False  # a task of asyncio, cancelled by its own method: no scope shields from that
            raise
        finally:
            await (self._pool._release(client) if self._whole else self._pool._discard(client))
