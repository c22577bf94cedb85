"""If-Match and its kin, and Range: which request is to be refused, and which bytes are meant.

Owns these rules (RFC 9110, as S3 applies them). Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

from fanout.server.s3.errors import S3Error

__all__ = ["byte_range", "check_read", "check_write", "http_seconds"]

_RANGE = re.compile(r"bytes=([0-9]{0,19})-([0-9]{0,19})")


def check_read(
    headers: Mapping[str, str], etag: str, modified_ns: int, prefix: str = "", *, unchanged: str = "NotModified"
) -> None:
    """Raise `PreconditionFailed` or `unchanged` where the conditions of a read say so.

    `prefix` is that of a copy's conditions on its source, `x-amz-copy-source-`.
    """
    modified_s = modified_ns // 10**9
    match, none_match = headers.get(prefix + "if-match"), headers.get(prefix + "if-none-match")
    since, not_since = headers.get(prefix + "if-modified-since"), headers.get(prefix + "if-unmodified-since")
    if match is not None:
        if not _matches(match, etag):
            raise S3Error("PreconditionFailed", Condition="If-Match")
    elif not_since is not None:
        limit_s = http_seconds(not_since)
        if limit_s is not None and modified_s > limit_s:
            raise S3Error("PreconditionFailed", Condition="If-Unmodified-Since")
    if none_match is not None:
        if _matches(none_match, etag):
            raise S3Error(unchanged, Condition="If-None-Match")
    elif since is not None:
        limit_s = http_seconds(since)
        if limit_s is not None and modified_s <= limit_s:
            raise S3Error(unchanged, Condition="If-Modified-Since")


def check_write(headers: Mapping[str, str], etag: str | None) -> None:
    """Raise `PreconditionFailed` or `NoSuchKey` where the conditions of a write do not hold; None: nothing is there."""
    match, none_match = headers.get("if-match"), headers.get("if-none-match")
    if match is not None:
        if etag is None:
            raise S3Error("NoSuchKey")
        if not _matches(match, etag):
            raise S3Error("PreconditionFailed", Condition="If-Match")
    if none_match is not None and etag is not None and _matches(none_match, etag):
        raise S3Error("PreconditionFailed", Condition="If-None-Match")


def _matches(given: str, etag: str) -> bool:
    return any(
        each == "*" or each.removeprefix("W/").strip('"') == etag
        for each in (part.strip() for part in given.split(","))
    )


def http_seconds(text: str) -> int | None:
    """Return an HTTP date as seconds since the epoch; None for what is none, which HTTP says to ignore."""
    try:
        return int(parsedate_to_datetime(text).timestamp())
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


def byte_range(text: str | None, size: int) -> tuple[int, int] | None:
    """Return the bytes start <= i < end that a Range header means; None for all. `InvalidRange`: there are none.

    What is no single range of bytes is ignored, as HTTP allows.
    """
    match = _RANGE.fullmatch(text.strip()) if text is not None else None
    if match is None or not (match[1] or match[2]):
        return None
    if not match[1]:
        start, end = max(size - int(match[2]), 0), size
    else:
        start, end = int(match[1]), min(int(match[2]) + 1, size) if match[2] else size
        if match[2] and int(match[2]) < start:
            return None
    if start >= end:
        raise S3Error("InvalidRange", RangeRequested=(text or "")[:80], ActualObjectSize=str(size))
    return start, end
