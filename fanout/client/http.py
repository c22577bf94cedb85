"""HTTP to one server: connections, the key, answers and errors, and what is sent again.

Owns every rule of docs/REMOTE.md about retries. The only home of httpx. Knows no operation of the API.
"""

from __future__ import annotations

import contextlib
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import anyio
import anyio.lowlevel
import httpx

from fanout import wire
from fanout.client.pool import Pool
from fanout.errors import Busy, Denied, FanoutError, Invalid, NotFound, Unavailable, Unknown
from fanout.runtime import Runtime

__all__ = ["Answer", "Body", "Cut", "Http", "Method"]

T = TypeVar("T")
Method = Literal["GET", "PUT", "POST", "DELETE"]
#: A body, or what makes its parts, anew for each attempt.
Body = bytes | Callable[[], AsyncIterator[bytes]] | None

_CONNECT_S = 10.0
#: A server that is alive says something more often than that.
_SILENCE_S = 4.5 * wire.HEARTBEAT_S
#: How often a call is sent after its connection broke, and how long is waited between.
_ATTEMPTS = 8
_BACKOFF_S = 0.1
_BACKOFF_MAX_S = 4.0
#: How long a server may put a call off ("as many are under way as this server takes") before that is its answer.
_PATIENCE_S = 600.0
_MAX_RETRY_AFTER_S = 60.0
#: What a server says that has not begun anything.
_NOT_BEGUN = frozenset({"no_capacity", "runtime_retryable"})
_GATEWAY = frozenset({502, 503, 504})
_CLOSE_S = 5.0


class Cut(Exception):
    """The connection ended before the answer did. `sent`: the server may have begun with the call."""

    def __init__(self, message: str, sent: bool = True) -> None:
        super().__init__(message)
        self.sent = sent


class _Later(Exception):
    """The server has not begun, and asks for the call to be sent again in `after_s` seconds."""

    def __init__(self, error: FanoutError, after_s: float) -> None:
        super().__init__(str(error))
        self.error = error
        self.after_s = after_s


class Answer(NamedTuple):
    """The headers of an answer, and its parts as they come (`Cut` where they break off)."""

    headers: Mapping[str, str]
    parts: AsyncGenerator[bytes, None]


class Http:
    """Calls to one server, from any event loop. `url` is shown in errors; the key never is."""

    def __init__(self, url: str, api_key: str | None, runtime: Runtime, *, http2: bool = False) -> None:
        self.url = _checked(url)
        self._base = self.url + wire.PREFIX
        self._headers = {"Accept-Encoding": "identity", "User-Agent": "fanout", **_authorization(api_key)}
        self._runtime = runtime
        self._http2 = http2
        self._pools: WeakKeyDictionary[Any, Pool] = WeakKeyDictionary()
        self._under_way: dict[object, Callable[[], object]] = {}
        self._opened = False
        self._instance: str | None = None

    async def open(self) -> None:
        """See that a fanout server is there and takes the key. Tried once: a mistyped URL should be told at once."""
        if self._opened:
            return
        self._opened = True
        try:
            await self.call("GET", "", attempts=1)
        except BaseException as error:
            await self.aclose()
            if isinstance(error, NotFound):
                raise Unavailable(
                    f"{self.url} is a fanout server without this API; is it of an older version?"
                ) from None
            raise

    async def stop(self) -> None:
        """Take no more calls, and end those under way, whose callers get `Unavailable`."""
        self._opened = False
        for cancel in list(self._under_way.values()):
            cancel()
        with anyio.CancelScope(shield=True), anyio.move_on_after(_CLOSE_S):
            while self._under_way:
                await anyio.sleep(0.001)

    async def aclose(self) -> None:
        """Stop, and close the connections of this event loop."""
        await self.stop()
        with anyio.CancelScope(shield=True):
            pool = self._pools.pop(_loop(), None)
            if pool is not None:
                await pool.aclose()
        self._pools.clear()

    def check_open(self) -> None:
        """Raise `Unavailable` unless this is open."""
        if not self._opened:
            raise Unavailable("this connection is not open: use `async with fanout.connect(...) as fo`")

    # -- calls ---------------------------------------------------------------------------------------------------

    async def call(
        self, method: Method, path: str, query: Mapping[str, object] | None = None, *, body: object = None,
        content: Body = None, key: str | None = None, attempts: int = _ATTEMPTS,
    ) -> Any:  # fmt: skip
        """Return the `data` of a call's answer; what the server refuses is raised.

        `body` is sent as JSON, `content` as it is. `key` names a call that changes something: sent again after its
        answer was lost, it gets the first one's. Without one a call must be harmless to repeat.
        """
        data = content if body is None else wire.json_bytes(body)
        answer = await self.fetch(method, path, query, content=data, key=key, attempts=attempts)
        return self._envelope(answer).get("data")

    async def fetch(
        self, method: Method, path: str, query: Mapping[str, object] | None = None, *, content: Body = None,
        key: str | None = None, attempts: int = _ATTEMPTS,
    ) -> bytes:  # fmt: skip
        """Like `call`, returning the bytes of the whole answer."""
        url = self._base + path + wire.query(query or {})

        async def once(headers: dict[str, str]) -> bytes:
            return await self._guarded(lambda: self._whole(method, url, content, headers))

        return await self._repeated(once, key, attempts)

    async def farewell(self, method: Method, path: str, query: Mapping[str, object]) -> None:
        """Make a last call about something, even where this is closed; once, and whatever comes of it."""
        url = self._base + path + wire.query(query)
        with contextlib.suppress(FanoutError, Cut, _Later), anyio.move_on_after(_CLOSE_S):
            await self._whole(method, url, None, {})

    async def rows(self, path: str, query: Mapping[str, object]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the rows of a list. One that was cut goes on where it ended, in the same commit's state."""
        seen = failures = 0
        seq: int | None = None
        while True:
            try:
                asked = query if seq is None and not seen else {**query, "seq": seq, "skip": seen}
                async with contextlib.aclosing(self.lines("GET", path, asked)) as lines:
                    async for line in lines:
                        if line.get("end") is True:
                            return
                        if isinstance(line.get("list"), dict):
                            seq = line["list"].get("seq")
                            continue
                        failures = 0
                        seen += 1
                        yield line
                raise Cut(f"{self.url}: the list ended early")
            except Cut as cut:
                failures += 1
                if failures >= _ATTEMPTS:
                    raise Unavailable(str(cut)) from cut
                await self.pause(failures)

    async def lines(
        self, method: Method, path: str, query: Mapping[str, object] | None = None, *, body: object = None,
        key: str | None = None,
    ) -> AsyncGenerator[dict[str, Any], None]:  # fmt: skip
        """Yield the lines of an answer, JSON objects; one that is an error is raised. `Cut` where they break off."""
        content = None if body is None else wire.json_bytes(body)
        held = bytearray()
        async with self.answer(method, path, query, content=content, key=key) as answer:
            async for part in answer.parts:
                held += part
                *whole, rest = bytes(held).split(b"\n")
                held = bytearray(rest)
                for line in whole:
                    if line:
                        fields = _json(line)
                        if fields is None:
                            raise self._stranger("a line that is no JSON")
                        if fields.get("success") is False:
                            raise wire.error_of(fields, 500)
                        yield fields

    @contextlib.asynccontextmanager
    async def answer(
        self, method: Method, path: str, query: Mapping[str, object] | None = None, *, content: Body = None,
        key: str | None = None,
    ) -> AsyncIterator[Answer]:  # fmt: skip
        """Send a call and give its answer as it comes.

        Until it comes, a GET is sent again as in `call`; another only where the server cannot have begun (`Unknown`).
        """
        url = self._base + path + wire.query(query or {})

        async def once(headers: dict[str, str]) -> httpx.Response:
            return await self._guarded(lambda: self._begun(method, url, content, headers))

        response = await self._repeated(once, key, _ATTEMPTS, blind=method != "GET")
        try:
            async with contextlib.aclosing(self._parts(response)) as parts:
                yield Answer(response.headers, parts)
        finally:
            await _close(response)

    async def pause(self, failures: int) -> None:
        """Wait before the next attempt: full jitter, longer with each failure."""
        await self._sleep(self._runtime.uniform(0, min(_BACKOFF_S * 2**failures, _BACKOFF_MAX_S)))

    async def _sleep(self, seconds: float) -> None:
        await self._guarded(lambda: anyio.sleep(seconds))

    # -- attempts ------------------------------------------------------------------------------------------------

    async def _repeated(
        self, once: Callable[[dict[str, str]], Awaitable[T]], key: str | None, attempts: int, *, blind: bool = False
    ) -> T:
        """Do it until there is an answer, or no sense in going on. `blind`: never twice if it may have been begun."""
        headers = {} if key is None else {wire.IDEMPOTENCY: key}
        until_s = self._runtime.monotonic() + _PATIENCE_S
        failures, uncertain = 0, False
        while True:
            instance = self._instance
            try:
                return await once(headers)
            except _Later as later:
                if self._runtime.monotonic() + later.after_s > until_s:
                    raise later.error from None
                await self._sleep(later.after_s * self._runtime.uniform(1, 1.5))
            except Cut as cut:
                failures += 1
                if cut.sent and (blind or key is not None):
                    uncertain = True
                    if instance is not None:
                        headers.setdefault(wire.RETRY_OF, instance)
                if failures >= attempts or (uncertain and (blind or instance is None)):
                    kind = Unknown if uncertain else Unavailable
                    fate = ": whether it was done cannot be learned" if uncertain else ""
                    raise kind(f"{cut}{fate}") from cut
                await self.pause(failures)

    async def _begun(self, method: Method, url: str, content: Body, headers: dict[str, str]) -> httpx.Response:
        """Send a request and return its answer, unread, if that is one; what the server refuses is raised."""
        with self._translated():
            body = content() if callable(content) else content
            response = await self._pool().send(method, url, body, headers)
        self._instance = response.headers.get(wire.INSTANCE, self._instance)
        if response.status_code != 200:
            try:
                with self._translated():
                    data = await _read(response)
            finally:
                await _close(response)
            self._refuse(response, data)
        return response

    async def _whole(self, method: Method, url: str, content: Body, headers: dict[str, str]) -> bytes:
        response = await self._begun(method, url, content, headers)
        try:
            with self._translated():
                return await _read(response)
        finally:
            await _close(response)

    async def _parts(self, response: httpx.Response) -> AsyncGenerator[bytes, None]:
        parts = response.aiter_raw()

        async def step() -> bytes | None:
            with self._translated():
                return await anext(parts, None)

        while (part := await self._guarded(step)) is not None:
            yield part

    async def _guarded(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do something that `aclose` can stop."""
        self.check_open()
        with anyio.CancelScope() as scope:
            me = object()
            self._under_way[me] = _canceller(scope)
            try:
                return await work()
            finally:
                del self._under_way[me]
        raise Unavailable("the connection was closed before the answer came")

    def _pool(self) -> Pool:
        loop = _loop()
        pool = self._pools.get(loop)
        if pool is None:
            timeout = httpx.Timeout(_SILENCE_S, connect=_CONNECT_S, pool=None)
            pool = self._pools[loop] = Pool(self.url, self._headers, timeout, self._runtime, http2=self._http2)
        return pool

    # -- what went wrong -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            message = f"cannot connect to {self.url}: {_cause(error)}"
            if _final(error):
                raise Unavailable(message) from error
            raise Cut(message, sent=False) from error
        except httpx.PoolTimeout as error:
            raise Cut(f"{self.url}: {_cause(error)}", sent=False) from error
        except httpx.ReadTimeout as error:
            raise Cut(f"{self.url} has said nothing for {_SILENCE_S:g} s") from error
        except (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError) as error:
            raise Cut(f"the connection to {self.url} was cut: {_cause(error)}") from error
        except httpx.HTTPError as error:
            raise Unavailable(f"{self.url}: {_cause(error)}") from error

    def _refuse(self, response: httpx.Response, data: bytes) -> NoReturn:
        """Raise what an answer other than 200 means."""
        status = response.status_code
        fields = _json(data)
        after_s = _retry_after(response.headers)
        if fields is not None and fields.get("success") is False:
            error = wire.error_of(fields, status)
            raise _Later(error, after_s) if fields.get("code") in _NOT_BEGUN else error
        kind = response.headers.get("content-type", "no content type")
        if status == 429 or (status == 503 and "retry-after" in response.headers):
            raise _Later(Busy(f"{self.url} takes no more requests now (HTTP {status})"), after_s)
        if status in _GATEWAY:
            raise Cut(f"{self.url}: whatever stands before the server answers HTTP {status}")
        if status in (401, 403):
            raise Denied(f"{self.url} refuses (HTTP {status}, {kind}): it is no fanout server, or the key is wrong")
        if 300 <= status < 400:
            raise Unavailable(f"{self.url} is elsewhere: {response.headers.get('location', 'it does not say where')}")
        raise self._stranger(f"HTTP {status}, {kind}")

    def _envelope(self, data: bytes) -> dict[str, Any]:
        fields = _json(data)
        if fields is None or not isinstance(fields.get("success"), bool):
            raise self._stranger("no envelope")
        if not fields["success"]:
            raise wire.error_of(fields, 500)  # it came after a heartbeat
        return fields

    def _stranger(self, what: str) -> Unavailable:
        return Unavailable(f"{self.url} does not answer as a fanout server does ({what})")


def _checked(url: object) -> str:
    allowed = "http://host:port or https://host, without a user, a query or a fragment"
    if not isinstance(url, str):
        raise Invalid.argument("url", url, allowed)
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 0) >= 0
    except ValueError:
        good = False
    if good and "@" in parts.netloc:
        raise Invalid(f"url is (secret): {allowed}; give the key as api_key")
    if not good or parts.query or parts.fragment or not url.isprintable() or " " in url:
        raise Invalid.argument("url", url, allowed)
    return url.rstrip("/")


def _authorization(api_key: str | None) -> dict[str, str]:
    if api_key is None:
        return {}
    key = api_key.strip()
    if not key or not key.isascii() or not key.isprintable():
        raise Invalid("api_key is (secret): printable ASCII, as `fanout keys create` shows it")
    return {"Authorization": key}


def _loop() -> Any:
    return anyio.lowlevel.current_token().native_token


def _canceller(scope: anyio.CancelScope) -> Callable[[], object]:
    """Return what cancels a scope of this event loop, from any thread."""
    native = _loop()
    soon = getattr(native, "call_soon_threadsafe", None) or native.run_sync_soon

    def cancel() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is gone, and the scope with it
            soon(scope.cancel)

    return cancel


async def _read(response: httpx.Response) -> bytes:
    return b"".join([part async for part in response.aiter_raw()])


async def _close(response: httpx.Response) -> None:
    if not response.is_closed:
        with anyio.CancelScope(shield=True), contextlib.suppress(httpx.HTTPError):
            await response.aclose()


def _json(data: bytes) -> dict[str, Any] | None:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def _retry_after(headers: Mapping[str, str]) -> float:
    try:
        return min(max(float(headers.get("retry-after", "1")), 0.05), _MAX_RETRY_AFTER_S)
    except ValueError:  # a date
        return 1.0


def _cause(error: BaseException) -> str:
    """Return the most telling words of a chain of errors: those of the innermost that has some."""
    words = type(error).__name__
    at: BaseException | None = error
    while at is not None:
        words = str(at) or words
        inner = at.__cause__ or at.__context__
        at = inner.exceptions[0] if isinstance(inner, BaseExceptionGroup) else inner
    return words


def _final(error: BaseException) -> bool:
    """Whether trying again cannot help: no such name, or a certificate that is not believed."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, ssl.SSLCertVerificationError):
            return True
        at = at.__cause__ or at.__context__
    return "Name or service not known" in str(error) or "nodename nor servname" in str(error)
