"""A request's body on its way in: gathered by the event loop, decoded, digested and verified in threads.

Owns the limits of bodies and how much of one is held at once. What becomes of it is the operations' business.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from fanout.server.s3.access import Access
from fanout.server.s3.checksums import Claimed, Digests
from fanout.server.s3.errors import S3Error
from fanout.server.s3.request import Request

__all__ = ["Body", "Threads"]

T = TypeVar("T")
Receive = Callable[[], Awaitable[Any]]
#: Runs a blocking call in a thread.
Threads = Callable[[Callable[[], T]], Awaitable[T]]
#: How much is gathered before a thread works on it: a body of up to this needs one hop.
_BATCH_BYTES = 4 << 20


class Body:
    """The body of one request. `length` is what the client says it is, decoded; None where it does not say."""

    def __init__(self, request: Request, access: Access, receive: Receive, most: int) -> None:
        self._receive = receive
        self._decoder = access.decoder
        self._sha256 = access.sha256
        self._headers = request.headers
        self._most = most
        self.length = self._length(request)
        if self.length is not None and self.length > most:
            raise S3Error("EntityTooLarge", ProposedSize=str(self.length), MaxSizeAllowed=str(most))
        self.digests: Digests | None = None
        self._got = 0

    def _length(self, request: Request) -> int | None:
        name = "content-length" if self._decoder is None else "x-amz-decoded-content-length"
        text = request.headers.get(name)
        if text is None:
            if "chunked" in request.headers.get("transfer-encoding", "").lower():
                return None
            return 0
        if not text.isascii() or not text.isdigit() or len(text) > 18:
            raise S3Error("InvalidArgument", f"{name} is not valid.")
        return int(text)

    def require_length(self) -> None:
        """Refuse a body of which nothing says how long it is, as S3 does."""
        if "content-length" not in self._headers and "transfer-encoding" not in self._headers:
            raise S3Error("MissingContentLength")

    async def run(
        self, threads: Any, checksum: Claimed | None, take: Callable[[bytes], None], finish: Callable[[Digests], T]
    ) -> T:
        """Hand the decoded body to `take` piece by piece, verify it, and return `finish(digests)`; both in threads."""
        self.digests = Digests(self._headers, self._sha256, checksum)
        while True:
            raw, ended = await self._gather()
            if ended:
                result: T = await threads(partial(self._last, raw, take, finish))
                return result
            await threads(partial(self._step, raw, take))

    async def read(self, threads: Any, checksum: Claimed | None) -> bytes:
        """Return a small body whole, verified."""
        pieces: list[bytes] = []
        return bytes(await self.run(threads, checksum, pieces.append, lambda _: b"".join(pieces)))

    async def _gather(self) -> tuple[list[bytes], bool]:
        pieces: list[bytes] = []
        size = 0
        while size < _BATCH_BYTES:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise S3Error("IncompleteBody", "The client went away.")
            piece = message.get("body", b"")
            if piece:
                pieces.append(piece)
                size += len(piece)
            if not message.get("more_body", False):
                return pieces, True
        return pieces, False

    def _step(self, raw: list[bytes], take: Callable[[bytes], None]) -> None:
        assert self.digests is not None
        for piece in raw:
            for data in (piece,) if self._decoder is None else self._decoder.feed(piece):
                self._got += len(data)
                if self._got > self._most:
                    raise S3Error("EntityTooLarge", MaxSizeAllowed=str(self._most))
                self.digests.update(data)
                take(data)

    def _last(self, raw: list[bytes], take: Callable[[bytes], None], finish: Callable[[Digests], T]) -> T:
        assert self.digests is not None
        self._step(raw, take)
        trailers: dict[str, str] = {}
        if self._decoder is not None:
            self._decoder.finish()
            trailers = self._decoder.trailers
        elif self.length is not None and self._got != self.length:
            raise S3Error("IncompleteBody")
        self.digests.verify(trailers)
        return finish(self.digests)
