"""ListObjects, V1 and V2, and ListObjectVersions, where every object has the one version `null`.

Owns the parameters and the XML of listings. Which keys there are is disk/keys.py's to say; a page is made in one hop to
a thread and reads no more of the tree than it shows.
"""

from __future__ import annotations

import base64
import binascii

from fanout.disk.keys import KeyPage, list_keys
from fanout.format.tree import Node
from fanout.server.s3.call import Call, described
from fanout.server.s3.described import size_of
from fanout.server.s3.documents import OWNER, document, encoded, iso_date, text
from fanout.server.s3.errors import S3Error, refused
from fanout.server.s3.request import Reply

__all__ = ["list_objects", "list_objects_v2", "list_versions", "parameters"]

_MOST_KEYS = 1000


class parameters:
    """What all listings take."""

    def __init__(self, call: Call, limit: str = "max-keys", most: int = _MOST_KEYS) -> None:
        query = call.query
        self.limit = call.request.number(limit, most, 0, most)
        self.url = _encoding(query.get("encoding-type"))
        self.prefix = raw(query.get("prefix", ""))
        self.delimiter = raw(query.get("delimiter", ""))

    def head(self, call: Call, limit: str = "MaxKeys", *, prefix_as_is: bool = False) -> list[str]:
        """Return what every listing says of itself. In V1 the prefix is never encoded: clients do not decode it."""
        told = [text("Name", call.request.bucket), _element("Prefix", self.prefix, self.url and not prefix_as_is)]
        if self.delimiter:
            told.append(_element("Delimiter", self.delimiter, self.url))
        told.append(text(limit, self.limit))
        if self.url:
            told.append(text("EncodingType", "url"))
        return told

    def key(self, name: str, key: bytes) -> str:
        return _element(name, key, self.url)

    def prefixes(self, page: list[bytes]) -> list[str]:
        return [f"<CommonPrefixes>{self.key('Prefix', prefix)}</CommonPrefixes>" for prefix in page]


def raw(value: str) -> bytes:
    return value.encode("utf-8", "surrogateescape")


def _encoding(value: str | None) -> bool:
    if value not in (None, "", "url"):
        raise refused("encoding-type", value or "", "Invalid Encoding Method specified in Request")
    return value == "url"


def _element(name: str, key: bytes, url: bool) -> str:
    return f"<{name}>{encoded(key, url)}</{name}>"


async def list_objects(call: Call) -> Reply:
    given = parameters(call)
    marker = raw(call.query.get("marker", ""))

    def work() -> Reply:
        page = _page(call, given, marker)
        told = [*given.head(call, prefix_as_is=True), given.key("Marker", marker), *_truncated(page)]
        if page.last is not None and given.delimiter:
            told.append(given.key("NextMarker", page.last))
        told += [_contents(given, key, node, owner=True) for key, node in page.keys]
        return Reply(200, [], document("ListBucketResult", *told, *given.prefixes(page.prefixes)))

    reply: Reply = await call.threads(work)
    return reply


async def list_objects_v2(call: Call) -> Reply:
    given = parameters(call)
    token = call.query.get("continuation-token")
    start_after = raw(call.query.get("start-after", ""))
    after = _position(token) if token else start_after
    owner = call.query.get("fetch-owner") == "true"

    def work() -> Reply:
        page = _page(call, given, after)
        told = [*given.head(call), text("KeyCount", len(page.keys) + len(page.prefixes)), *_truncated(page)]
        if token is not None:
            told.append(text("ContinuationToken", token))
        if page.last is not None:
            told.append(text("NextContinuationToken", _token(page.last)))
        if start_after:
            told.append(given.key("StartAfter", start_after))
        told += [_contents(given, key, node, owner=owner) for key, node in page.keys]
        return Reply(200, [], document("ListBucketResult", *told, *given.prefixes(page.prefixes)))

    reply: Reply = await call.threads(work)
    return reply


async def list_versions(call: Call) -> Reply:
    given = parameters(call)
    marker = raw(call.query.get("key-marker", ""))

    def work() -> Reply:
        page = _page(call, given, marker)
        told = [*given.head(call), given.key("KeyMarker", marker), text("VersionIdMarker", ""), *_truncated(page)]
        if page.last is not None:
            told += [given.key("NextKeyMarker", page.last), text("NextVersionIdMarker", "null")]
        version = text("VersionId", "null") + text("IsLatest", "true")
        told += [_contents(given, key, node, owner=True, element="Version", more=version) for key, node in page.keys]
        return Reply(200, [], document("ListVersionsResult", *told, *given.prefixes(page.prefixes)))

    reply: Reply = await call.threads(work)
    return reply


def _page(call: Call, given: parameters, after: bytes) -> KeyPage:
    return list_keys(call.point.state(), given.prefix, given.delimiter, after, given.limit)


def _truncated(page: KeyPage) -> list[str]:
    return [text("IsTruncated", "false" if page.last is None else "true")]


def _contents(
    given: parameters, key: bytes, node: Node, *, owner: bool, element: str = "Contents", more: str = ""
) -> str:
    facts, etag = described(node)
    checksum = ""
    if facts is not None and facts.checksum:
        checksum = text("ChecksumAlgorithm", facts.checksum[0]) + text("ChecksumType", facts.checksum[2])
    return (
        f"<{element}>{given.key('Key', key)}{more}<LastModified>{iso_date(node.mtime_ns)}</LastModified>"
        f"<ETag>&quot;{etag}&quot;</ETag>{checksum}<Size>{size_of(node)}</Size>{OWNER if owner else ''}"
        f"<StorageClass>STANDARD</StorageClass></{element}>"
    )


def _token(last: bytes) -> str:
    return base64.urlsafe_b64encode(b"1" + last).decode()


def _position(token: str) -> bytes:
    try:
        found = base64.b64decode(token.encode("ascii"), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        found = b""
    if not found.startswith(b"1") or len(found) > 4096:
        raise S3Error(
            "InvalidArgument", "The continuation token provided is incorrect", ArgumentName="continuation-token"
        )
    return found[1:]
