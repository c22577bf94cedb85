"""A store in an S3 bucket, at any endpoint; the only module that knows boto3.

Owns the mapping of S3 answers to the errors of the contract. Knows nothing of what the bytes mean.

Two clients: creates go through one that sends each request once, everything else through one that retries
inside the SDK. What an answer to a create proves:

| answer                              | raised        | because                                             |
|-------------------------------------|---------------|-----------------------------------------------------|
| 412                                 | `Exists`      | something is there; perhaps our own lost write      |
| 409, 429, 5xx, timeout, cut, unread | `Unknown`     | stored or not; a 409 mostly means not: read it back |
| no connection was made              | `Unavailable` | nothing was sent                                    |
| 401, 403, no credentials            | `Denied`      |                                                     |
| no such bucket, other 4xx, 501      | `Invalid`     | the request can never work                          |
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from fanout.errors import Denied, Exists, FanoutError, Invalid, NotFound, Unavailable, Unknown
from fanout.store.base import ObjectMeta, Store, check_key, check_list, check_range, is_key

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

__all__ = ["S3Store"]

_T = TypeVar("_T")
_PAGE = 1000
_CONNECT_TIMEOUT_S = 5
_READ_TIMEOUT_S = 60
_CONNECTIONS = 64
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}")
_DENIED = {
    "AccessDenied",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "RequestTimeTooSkewed",
    "SignatureDoesNotMatch",
}
_BUSY = {"RequestTimeout", "SlowDown", "Throttling", "ThrottlingException", "OperationAborted"}


class S3Store(Store):
    """Objects of one bucket below one prefix; safe for threads, and usable after a fork.

    `endpoint` is an http(s) URL, addressed path-style; None means FANOUT_S3_ENDPOINT, then what boto3 is
    configured with (AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, its profile), then AWS. Credentials come from
    where boto3 looks for them and are never shown; refused ones are looked for anew. `read_timeout_s` is the
    longest silence of the server.
    The bucket must exist. Making the object sends no request; `check` does.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint: str | None = None,
        region: str | None = None,
        connections: int = _CONNECTIONS,
        read_timeout_s: float = _READ_TIMEOUT_S,
    ) -> None:
        if not _BUCKET.fullmatch(bucket):
            shown = bucket if "@" not in bucket and ":" not in bucket else "(not shown: it may hold a secret)"
            raise Invalid.argument(
                "bucket", shown, "3 to 63 [A-Za-z0-9._-]; credentials never go in a URL, boto3 finds them"
            )
        if prefix and (not is_key(prefix.removesuffix("/")) or len(prefix) > 200):
            raise Invalid.argument("prefix", prefix, "a key of at most 200 bytes, or nothing")
        self.bucket = bucket
        self.prefix = prefix.removesuffix("/") + "/" if prefix else ""
        self.url = f"s3://{bucket}/{self.prefix}".rstrip("/")
        self.endpoint = _endpoint(endpoint)
        self._region = region
        self._connections = connections
        self._read_timeout_s = read_timeout_s
        self._lock = threading.Lock()
        self._clients: tuple[int, S3Client, S3Client] | None = None
        self._credentials: tuple[str, str, str] | None = None
        _boto3()  # refused now, not at the first request

    def check(self) -> None:
        """Ask once whether the bucket can be used. `Invalid` where there is none, `Unavailable`, `Denied`."""
        # Not HeadBucket: its answers have no body, so that a wrong key and a wrong bucket look alike.
        self._ask(
            lambda: self._client().list_objects_v2(Bucket=self.bucket, Prefix=self.prefix, MaxKeys=1),
            "listing",
        )

    def create(self, key: str, data: bytes) -> None:
        check_key(key)
        self._ask(
            lambda: self._client(once=True).put_object(
                Bucket=self.bucket, Key=self.prefix + key, Body=data, IfNoneMatch="*"
            ),
            f"create of {key}",
            key=key,
            write=True,
        )

    def put(self, key: str, data: bytes) -> None:
        check_key(key)
        self._ask(
            lambda: self._client().put_object(Bucket=self.bucket, Key=self.prefix + key, Body=data),
            f"put of {key}",
            write=True,
        )

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        check_key(key)
        check_range(start, length)
        if length == 0:
            if self.head(key) is None:
                raise NotFound(f"{self.url}: no object {key}")
            return b""
        return self._ask(lambda: self._get(key, start, length), f"get of {key}", key=key)

    def head(self, key: str) -> ObjectMeta | None:
        check_key(key)
        try:
            found = self._ask(
                lambda: self._client().head_object(Bucket=self.bucket, Key=self.prefix + key),
                f"head of {key}",
                key=key,
                bodiless=True,
            )
        except NotFound:
            return None
        return ObjectMeta(key, found["ContentLength"], _ns(found["LastModified"]))

    def list(self, prefix: str = "", start_after: str = "", limit: int | None = None) -> Iterator[ObjectMeta]:
        check_list(prefix, start_after, limit)
        return self._pages(prefix, start_after, limit)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
        if len(keys) == 1:
            self._ask(
                lambda: self._client().delete_object(Bucket=self.bucket, Key=self.prefix + keys[0]),
                f"delete of {keys[0]}",
            )
            return
        for begin in range(0, len(keys), _PAGE):
            self._delete_page(keys[begin : begin + _PAGE])

    def close(self) -> None:
        with self._lock:
            clients, self._clients = self._clients, None
        if clients is not None and clients[0] == os.getpid():
            for client in clients[1:]:
                client.close()

    # Requests

    def _get(self, key: str, start: int, length: int | None) -> bytes:
        whole = start == 0 and length is None
        last = "" if length is None else start + length - 1
        extra: dict[str, Any] = {} if whole else {"Range": f"bytes={start}-{last}"}
        try:
            answer = self._client().get_object(Bucket=self.bucket, Key=self.prefix + key, **extra)
        except Exception as error:
            if getattr(error, "response", {}).get("ResponseMetadata", {}).get("HTTPStatusCode") == 416:
                return b""  # the range begins past the end
            raise
        with contextlib.closing(answer["Body"]) as body:
            data: bytes = body.read()
        if len(data) != answer["ContentLength"]:
            raise Unavailable(f"{self.url}: get of {key} was cut short: {len(data)} bytes")
        if not whole and "ContentRange" not in answer:  # a server may ignore Range and send everything
            return data[start : None if length is None else start + length]
        if length is not None and len(data) > length:
            raise Unavailable(f"{self.url}: get of {key} gave {len(data)} bytes where {length} were asked for")
        return data

    def _pages(self, prefix: str, start_after: str, limit: int | None) -> Iterator[ObjectMeta]:
        after = start_after if start_after > prefix else ""
        left = limit
        while left is None or left > 0:
            extra: dict[str, Any] = {"StartAfter": self.prefix + after} if after else {}
            size = _PAGE if left is None else min(_PAGE, left)
            request = partial(self._list_page, Prefix=self.prefix + prefix, MaxKeys=size, **extra)
            page = self._ask(request, f"listing of {prefix or 'everything'}")
            contents = page.get("Contents", [])
            for item in contents:
                key = item["Key"][len(self.prefix) :]
                if is_key(key):
                    yield ObjectMeta(key, item["Size"], _ns(item["LastModified"]))
                    left = None if left is None else left - 1
            if not page.get("IsTruncated") or not contents:
                return
            # StartAfter and not the continuation token: a page may then be asked for again at any time.
            after = contents[-1]["Key"][len(self.prefix) :]

    def _list_page(self, **arguments: Any) -> Any:
        return self._client().list_objects_v2(Bucket=self.bucket, **arguments)

    def _delete_page(self, keys: Sequence[str]) -> None:
        answer = self._ask(
            lambda: self._client().delete_objects(
                Bucket=self.bucket,
                Delete={"Objects": [{"Key": self.prefix + key} for key in keys], "Quiet": True},
            ),
            f"delete of {len(keys)} keys",
        )
        failed = [error for error in answer.get("Errors", []) if error.get("Code") != "NoSuchKey"]
        if failed:
            code = failed[0].get("Code", "")
            kind = Denied if code in _DENIED else Unavailable
            raise kind(f"{self.url}: {len(failed)} of {len(keys)} keys could not be deleted: {code}")

    def _ask(
        self,
        request: Callable[[], _T],
        doing: str,
        *,
        key: str = "",
        write: bool = False,
        bodiless: bool = False,
    ) -> _T:
        used = self._clients
        for renewed in (False, True):
            try:
                return request()
            except FanoutError:
                raise
            except Exception as error:
                raised = self._translate(error, doing, key, write, bodiless)
                if raised is None:
                    raise
                # Refused for good, so that nothing is open: once more if there are other credentials by now.
                if renewed or not isinstance(raised, Denied) or not self._renew(used):
                    raise raised from error
        raise AssertionError("the second try returns or raises")

    def _renew(self, refused: tuple[int, S3Client, S3Client] | None) -> bool:
        """Look for credentials again, as they may have expired; returns whether there are others than were refused."""
        with self._lock:
            if self._clients is refused or refused is None:
                try:
                    found = _credentials(_boto3().session.Session())
                except Exception:
                    return False
                if found is None or found == self._credentials:
                    return False
                self._clients = self._make_clients()
            return True

    def _without_secrets(self, text: str) -> str:
        for secret in (self._credentials or ())[1:]:
            if secret:
                text = text.replace(secret, "(secret)")
        return text

    def _translate(self, error: Exception, doing: str, key: str, write: bool, bodiless: bool) -> FanoutError | None:
        import botocore.exceptions as boto
        from botocore.parsers import ResponseParserError

        where = f"{self.url}: {doing}"
        at = f" at {self._client().meta.endpoint_url}" if not isinstance(error, boto.NoRegionError) else ""
        lost = Unknown if write else Unavailable
        match error:
            case boto.ClientError():
                return self._translate_answer(error, where, at, key, lost, bodiless)
            case boto.NoCredentialsError() | boto.PartialCredentialsError() | boto.CredentialRetrievalError():
                help_ = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile"
                return Denied(f"{where}: no usable credentials; {help_}")
            case boto.EndpointConnectionError() | boto.ConnectTimeoutError() | boto.ProxyConnectionError():
                return Unavailable(f"{where}: cannot connect{at}")
            case boto.SSLError():
                return lost(f"{where}: TLS failed{at}: {str(error)[:200]}")
            case boto.HTTPClientError() | boto.IncompleteReadError() | boto.ResponseStreamingError():
                return lost(f"{where}: the answer was lost ({type(error).__name__}){at}")
            case ResponseParserError():  # the server's answer is not S3's
                return lost(f"{where}: the answer cannot be read{at}")
            case boto.BotoCoreError():
                return Invalid(f"{where}: {str(error)[:300]}")
        return None

    def _translate_answer(
        self, error: Any, where: str, at: str, key: str, lost: type[FanoutError], bodiless: bool
    ) -> FanoutError:
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        code = str(error.response.get("Error", {}).get("Code") or "")
        if code == str(status):  # the answer to a HEAD has no body to tell more
            code = ""
        message = self._without_secrets(str(error.response.get("Error", {}).get("Message") or ""))[:200]
        text = f"{where}: " + " ".join(filter(None, (str(status), code, message)))
        if status == 412 and key:
            return Exists(f"{self.url}: {key} is already there")
        if status in (401, 403) or code in _DENIED:
            return Denied(text)
        if code == "NoSuchBucket":
            return Invalid(f"{self.url}: there is no bucket {self.bucket}{at}; make it first")
        # Only a NoSuchKey says that the object is not there; a proxy's 404 does not. A HEAD cannot tell.
        if key and status == 404 and (code == "NoSuchKey" or bodiless):
            return NotFound(f"{self.url}: no object {key}")
        if status == 501:
            return Invalid(f"{text}: this store lacks a feature that fanout needs")
        if status in (404, 408, 409, 425, 429) or status >= 500 or status < 300 or code in _BUSY:
            return lost(text + at)
        return Invalid(text + at)

    def _client(self, *, once: bool = False) -> S3Client:
        clients = self._clients
        if clients is None or clients[0] != os.getpid():  # never share sockets with a parent process
            with self._lock:
                clients = self._clients
                if clients is None or clients[0] != os.getpid():
                    clients = self._clients = self._make_clients()
        return clients[1] if once else clients[2]

    def _make_clients(self) -> tuple[int, S3Client, S3Client]:
        from botocore.exceptions import BotoCoreError

        try:
            session = _boto3().session.Session()
            with contextlib.suppress(Exception):  # the request will say what is wrong with them
                self._credentials = _credentials(session)
            return os.getpid(), self._make_client(session, 1), self._make_client(session, 3)
        except (BotoCoreError, ValueError) as error:
            raise Invalid(f"{self.url}: {str(error)[:300]}") from error

    def _make_client(self, session: Any, attempts: int) -> S3Client:
        from botocore.config import Config

        region = self._region or session.region_name or "us-east-1"
        client: S3Client = session.client(
            "s3",
            region_name=region,
            endpoint_url=self.endpoint,
            config=Config(
                retries={"total_max_attempts": attempts, "mode": "standard"},
                max_pool_connections=self._connections,
                connect_timeout=_CONNECT_TIMEOUT_S,
                read_timeout=self._read_timeout_s,
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                s3={"addressing_style": "path"} if self.endpoint else None,
            ),
        )
        client.meta.events.register("before-sign.s3.DeleteObjects", _add_md5)
        client.meta.events.register("before-sign.s3.PutObject", _do_not_ask_first)
        return client


def _boto3() -> Any:
    try:
        import boto3
    except ImportError as error:
        raise Invalid("s3:// needs boto3, which is not installed: pip install 'fanout[s3]'") from error
    return boto3


def _credentials(session: Any) -> tuple[str, str, str] | None:
    """Return what boto3 finds now: access key, secret key, session token; None where it finds nothing."""
    found = session.get_credentials()
    if found is None:
        return None
    frozen = found.get_frozen_credentials()
    return frozen.access_key or "", frozen.secret_key or "", frozen.token or ""


def _endpoint(given: str | None) -> str | None:
    for argument, value in (
        ("s3_endpoint", given),
        ("FANOUT_S3_ENDPOINT", os.environ.get("FANOUT_S3_ENDPOINT")),
        ("AWS_ENDPOINT_URL_S3", os.environ.get("AWS_ENDPOINT_URL_S3")),
        ("AWS_ENDPOINT_URL", os.environ.get("AWS_ENDPOINT_URL")),
    ):
        if value:
            parts = urlsplit(value)
            if "@" in parts.netloc:
                raise Invalid(f"{argument} holds credentials: leave them out, boto3 finds them")
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
                raise Invalid.argument(argument, value, "http://host[:port] or https://host[:port]")
            return value
    return None  # a profile of boto3 may still name one


def _add_md5(request: Any, **_: Any) -> None:
    """Several stores want Content-MD5 on DeleteObjects, which boto3 no longer sends."""
    if isinstance(request.body, bytes):
        digest = hashlib.md5(request.body, usedforsecurity=False).digest()
        request.headers["Content-MD5"] = base64.b64encode(digest).decode()


def _do_not_ask_first(request: Any, **_: Any) -> None:
    """Send the body at once: `Expect: 100-continue` costs a round trip, or 1 s where a server ignores it."""
    del request.headers["Expect"]


def _ns(moment: datetime.datetime) -> int:
    since = moment - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    return (since.days * 86400 + since.seconds) * 10**9 + since.microseconds * 1000
