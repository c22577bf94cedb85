"""One S3 request as it was sent: method, bucket, key, query and headers, and answers to it.

Owns taking a request apart and the rules for keys. Decides nothing about rights or objects.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote_to_bytes

from fanout.disk.paths import MAX_NAME_BYTES
from fanout.server.s3.errors import S3Error, refused

__all__ = ["Header", "Reply", "Request", "check_key", "parse"]

Header = tuple[bytes, bytes]
#: Longest key, in bytes, as S3 has it.
MAX_KEY_BYTES = 1024


@dataclass(slots=True)
class Request:
    """A request taken apart. `raw_query` is as it was escaped; `key` is b"" for the bucket itself.

    `headers` are by lower-case name, bytes as latin-1, repeated ones joined by commas. `scope` is ASGI's.
    """

    method: str
    bucket: str
    key: bytes
    raw_path: bytes
    raw_query: list[tuple[str, str]]
    query: dict[str, str]
    headers: dict[str, str]
    scope: MutableMapping[str, Any]

    @property
    def resource(self) -> str:
        return "/" + self.bucket + ("/" + self.key.decode("utf-8", "replace") if self.key else "")

    def number(self, name: str, usual: int, least: int, most: int) -> int:
        """Return a query parameter that is a whole number; one that is too large counts as the largest."""
        text = self.query.get(name)
        if text is None or text == "":
            return usual
        if not text.isascii() or not text.lstrip("+-").isdigit() or len(text) > 20 or int(text) < least:
            raise refused(name, text, f"{name} must be a whole number, at least {least}.")
        return min(int(text), most)


@dataclass(slots=True)
class Reply:
    """An answer: `body` at once, or `stream`ed after headers that say how long it is."""

    status: int = 200
    headers: list[Header] = field(default_factory=list)
    body: bytes = b""
    stream: AsyncIterator[bytes] | None = None
    length: int | None = None


def parse(scope: MutableMapping[str, Any]) -> Request:
    """Take an ASGI scope apart; `InvalidURI` for what is no path of a bucket or key."""
    raw_path: bytes = (scope.get("raw_path") or scope["path"].encode()).partition(b"?")[0]
    if not raw_path.startswith(b"/"):
        raise S3Error("InvalidURI")
    bucket, _, key = raw_path[1:].partition(b"/")
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        name, value = name.decode("latin-1").lower(), value.decode("latin-1")
        headers[name] = f"{headers[name]},{value}" if name in headers else value
    raw_query: list[tuple[str, str]] = []
    query: dict[str, str] = {}
    for pair in scope["query_string"].decode("latin-1").split("&") if scope["query_string"] else ():
        if pair:
            name, _, value = pair.partition("=")
            raw_query.append((name, value))
            query.setdefault(_text(name), _text(value))
    try:
        named = unquote_to_bytes(bucket).decode()
    except UnicodeDecodeError:
        raise S3Error("InvalidURI") from None
    return Request(scope["method"], named, unquote_to_bytes(key), raw_path, raw_query, query, headers, scope)


def _text(escaped: str) -> str:
    """Unescape a name or value; bytes that are no UTF-8 become surrogate escapes."""
    if "%" not in escaped and "+" not in escaped and escaped.isascii():
        return escaped
    return unquote_to_bytes(escaped.replace("+", "%20").encode("latin-1")).decode("utf-8", "surrogateescape")


def check_key(key: bytes, *, write: bool) -> bytes:
    """Return the key of a file to write, or to look for; an error for one that no file of a disk can have.

    To look for it is to find nothing: `NoSuchKey`. A file that an exec made may have a name that is no UTF-8.
    """
    if len(key) > MAX_KEY_BYTES:
        raise S3Error("KeyTooLongError", Size=str(len(key)), MaxSizeAllowed=str(MAX_KEY_BYTES))
    parts = key.removesuffix(b"/").split(b"/")
    allowed = ""
    if b"" in parts or b"." in parts or b".." in parts:
        allowed = "A key has no empty, '.' or '..' parts between slashes: it is the path of a file."
    elif b"\0" in key:
        allowed = "A key has no NUL bytes: it is the path of a file."
    elif max(map(len, parts)) > MAX_NAME_BYTES:
        allowed = f"A part of a key between slashes has at most {MAX_NAME_BYTES} bytes."
    if allowed:
        shown = key.decode("utf-8", "replace")
        raise refused("key", shown, allowed) if write else S3Error("NoSuchKey", allowed, Key=shown)
    if write:
        try:
            key.decode()
        except UnicodeDecodeError:
            raise S3Error("InvalidURI", "A key is UTF-8.") from None
    return key
