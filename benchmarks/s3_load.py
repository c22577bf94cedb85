"""The load generator of `s3`: many clients with one connection each, speaking HTTP over plain sockets.

Run as `python -m benchmarks.s3_load` in a process of its own, with a `Load` as JSON on standard input; it prints a
`Found` as JSON. A client library takes a millisecond of Python for each request, more than some of the servers that are
to be measured, so here requests are signed (SigV4 in a header, with the hash of the body, as boto3 does over HTTP) and
put together before the clock starts. Each client then sends one, reads all of the answer, and sends the next.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import hmac
import json
import re
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import quote, urlsplit

__all__ = ["Connection", "Found", "Load", "Signer"]

_REGION = "us-east-1"
_EMPTY = hashlib.sha256(b"").hexdigest()
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Load:
    """What is to be done: `calls` requests by each of `clients`, on keys `prefix` + number that go round at `keys`.

    `list`: a call is a whole listing of `prefix`, page by page.
    """

    endpoint: str
    bucket: str
    access_key: str
    secret_key: str
    what: Literal["get", "put", "list"] = "list"
    prefix: str = ""
    size: int = 0
    keys: int = 1
    clients: int = 1
    calls: int = 1


@dataclass(frozen=True, slots=True)
class Found:
    """Milliseconds of every call, and of all of them together; how many keys the last listing had.

    `refused` says what calls were answered that did not succeed.
    """

    calls_ms: list[float]
    wall_ms: float
    listed: int
    refused: list[str]


class Refused(Exception):
    """An answer that is no success."""


class Signer:
    """Signs requests with SigV4."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._host = urlsplit(load.endpoint).netloc
        now = datetime.datetime.now(datetime.UTC)
        self._time, self._day = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d")
        key = f"AWS4{load.secret_key}".encode()
        for part in (self._day, _REGION, "s3", "aws4_request"):
            key = hmac.digest(key, part.encode(), "sha256")
        self._key = key

    def head(self, method: str, key: str = "", query: dict[str, str] | None = None, body: bytes = b"") -> bytes:
        """Return a signed request, without the body."""
        path = f"/{self._load.bucket}/{quote(key)}" if key else f"/{self._load.bucket}"
        asked = "&".join(f"{quote(k, safe='')}={quote(v, safe='')}" for k, v in sorted((query or {}).items()))
        digest = hashlib.sha256(body).hexdigest() if body else _EMPTY
        headers = {"host": self._host, "x-amz-content-sha256": digest, "x-amz-date": self._time}
        names = ";".join(headers)
        lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
        canonical = f"{method}\n{path}\n{asked}\n{lines}\n{names}\n{digest}"
        scope = f"{self._day}/{_REGION}/s3/aws4_request"
        hashed = hashlib.sha256(canonical.encode()).hexdigest()
        text = f"AWS4-HMAC-SHA256\n{self._time}\n{scope}\n{hashed}"
        signature = hmac.digest(self._key, text.encode(), "sha256").hex()
        credential = f"Credential={self._load.access_key}/{scope}"
        headers["authorization"] = f"AWS4-HMAC-SHA256 {credential}, SignedHeaders={names}, Signature={signature}"
        if method == "PUT":
            headers["content-length"] = str(len(body))
        told = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        target = f"{path}?{asked}" if asked else path
        return f"{method} {target} HTTP/1.1\r\n{told}\r\n".encode()


class Connection:
    """One client: a connection that is opened again where the server closed it."""

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        self._address = parts.hostname or "", parts.port or 80
        self._socket: socket.socket | None = None
        self._buffer = bytearray(_BUFFER_BYTES)

    def call(self, head: bytes, body: bytes = b"") -> tuple[int, bytes]:
        """Make one call; returns the length of the answer and, of one that fits in a MiB, the bytes."""
        if self._socket is None:
            self._socket = socket.create_connection(self._address, 60)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(head + body if len(body) < 1 << 16 else head)
        if len(body) >= 1 << 16:
            self._socket.sendall(body)
        view, got, end = memoryview(self._buffer), 0, -1
        while end < 0:
            got += self._received(view[got:])
            end = self._buffer.find(b"\r\n\r\n", 0, got)
        lines = bytes(view[:end]).decode("latin-1").lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:])
        status = lines[0].split()[1]
        if "chunked" in headers.get("transfer-encoding", ""):
            content = self._chunked(bytes(view[end + 4 : got]))
            size = len(content)
        else:
            size = int(headers.get("content-length", "0"))
            kept, left = bytes(view[end + 4 : got]), size - (got - end - 4)
            parts = [kept]
            while left > 0:
                received = self._received(view[: min(left, _BUFFER_BYTES)])
                if size <= _BUFFER_BYTES:
                    parts.append(bytes(view[:received]))
                left -= received
            content = b"".join(parts)
        if headers.get("connection") == "close":
            self._socket.close()
            self._socket = None
        if status not in ("200", "204", "206"):
            raise Refused(f"{lines[0]}: {content[:300].decode('utf-8', 'replace')}")
        return size, content

    def _received(self, view: memoryview) -> int:
        assert self._socket is not None
        count = self._socket.recv_into(view)
        if not count:
            raise RuntimeError(f"{self._address}: the connection was closed within an answer")
        return count

    def _chunked(self, data: bytes) -> bytes:
        content = b""
        while True:
            while b"\r\n" not in data:
                data += self._more()
            line, _, data = data.partition(b"\r\n")
            size = int(line.partition(b";")[0], 16)
            while len(data) < size + 2:
                data += self._more()
            content, data = content + data[:size], data[size + 2 :]
            if not size:
                return content

    def _more(self) -> bytes:
        return bytes(self._buffer[: self._received(memoryview(self._buffer))])


@dataclass(slots=True)
class _Client:
    """One client's requests, ready to be sent, and what became of them."""

    load: Load
    signer: Signer
    number: int
    body: bytes
    heads: list[bytes] = field(default_factory=list)
    calls_ms: list[float] = field(default_factory=list)
    listed: int = 0
    refused: list[str] = field(default_factory=list)
    error: Exception | None = None
    connection: Connection = field(init=False)

    def __post_init__(self) -> None:
        load = self.load
        self.connection = Connection(load.endpoint)
        if load.what == "list":
            return
        first = self.number * load.calls
        keys = [f"{load.prefix}{(first + n) % load.keys:06d}" for n in range(load.calls)]
        method = load.what.upper()
        self.heads = [self.signer.head(method, key, body=self.body) for key in keys]

    def run(self, start: threading.Barrier) -> None:
        try:
            with suppress(Refused):
                self._call(0)  # opens the connection, and what is behind it
            start.wait()
            for number in range(self.load.calls):
                began = time.perf_counter()
                try:
                    self._call(number)
                    self.calls_ms.append((time.perf_counter() - began) * 1e3)
                except Refused as refused:
                    self.refused.append(str(refused))
        except Exception as error:
            self.error = error
            start.abort()

    def _call(self, number: int) -> None:
        if self.load.what == "list":
            self._list()
            return
        size, _ = self.connection.call(self.heads[number], self.body)
        if self.load.what == "get" and size != self.load.size:
            raise RuntimeError(f"{size} bytes came instead of {self.load.size}")

    def _list(self) -> None:
        token, self.listed = "", 0
        while True:
            query = {"list-type": "2", "prefix": self.load.prefix} | ({"continuation-token": token} if token else {})
            _, content = self.connection.call(self.signer.head("GET", query=query))
            self.listed += content.count(b"<Contents>")
            found = re.search(rb"<NextContinuationToken>([^<]+)</NextContinuationToken>", content)
            if found is None:
                return
            token = found[1].decode().replace("&amp;", "&")


def run(load: Load) -> Found:
    """Do what a load says."""
    body = bytes(range(256)) * (load.size // 256 + 1)
    body = body[: load.size] if load.what == "put" else b""
    signer, start = Signer(load), threading.Barrier(load.clients + 1)
    clients = [_Client(load, signer, number, body) for number in range(load.clients)]
    threads = [threading.Thread(target=client.run, args=(start,)) for client in clients]
    for thread in threads:
        thread.start()
    try:
        start.wait()
    except threading.BrokenBarrierError:
        pass
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    wall_ms = (time.perf_counter() - began) * 1e3
    for client in clients:
        if client.error is not None and not isinstance(client.error, threading.BrokenBarrierError):
            raise client.error
    return Found(
        [ms for client in clients for ms in client.calls_ms],
        wall_ms,
        clients[0].listed,
        [refused for client in clients for refused in client.refused],
    )


def main() -> None:
    """Read a load, print what was found."""
    found = run(Load(**json.load(sys.stdin)))
    json.dump(dataclasses.asdict(found), sys.stdout)


if __name__ == "__main__":
    main()
