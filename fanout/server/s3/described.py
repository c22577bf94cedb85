"""What S3 says of a node: its ETag, its headers, and what it is told to keep.

Owns that translation between nodes and headers. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from urllib.parse import parse_qsl, urlencode

from fanout.format.facts import Facts
from fanout.format.tree import DIR, SYMLINK, Node, content_hash
from fanout.server.s3.checksums import header_of
from fanout.server.s3.documents import http_date
from fanout.server.s3.errors import S3Error, refused
from fanout.server.s3.request import Header

__all__ = [
    "LINK_TYPE",
    "TAGGING",
    "Posix",
    "checked_tags",
    "checksum_headers",
    "etag_of",
    "kept_headers",
    "node_headers",
    "posix_of",
    "refuse_features",
    "size_of",
]

#: Content-Type of a symbolic link, whose content is its target's text.
LINK_TYPE = "inode/symlink"
_USUAL_TYPE = "binary/octet-stream"
_DIRECTORY_TYPE = "application/x-directory"
_EMPTY_MD5 = hashlib.md5(usedforsecurity=False).hexdigest()
_KEPT = ("content-type", "cache-control", "content-disposition", "content-encoding", "content-language", "expires")
_META = "x-amz-meta-"
#: Tags are kept with the headers, and only counted in an answer.
TAGGING = "x-amz-tagging"
_MAX_META_BYTES = 2048
_MOST_TAGS, _TAG_NAME_CHARACTERS, _TAG_VALUE_CHARACTERS = 10, 128, 256

#: Headers whose promise this server cannot keep: better refused than ignored.
_UNKEPT = (
    "x-amz-server-side-encryption", "x-amz-object-lock", "x-amz-website-redirect-location", "x-amz-grant-",
    "x-amz-copy-source-server-side-encryption",
)  # fmt: skip
_ACLS = {"", "private", "bucket-owner-full-control", "bucket-owner-read"}


class Posix:
    """Owner and mode that an object's file gets."""

    __slots__ = ("gid", "mode", "uid")

    def __init__(self, mode: int, uid: int, gid: int) -> None:
        self.mode = mode
        self.uid = uid
        self.gid = gid


def etag_of(node: Node, facts: Facts | None) -> str:
    """Return the ETag without quotes: the MD5 if S3 wrote the content, else one that no client takes for an MD5."""
    if facts is not None and facts.md5:
        return facts.md5.hex() + (f"-{facts.count}" if facts.count else "")
    if node.kind == DIR:
        return _EMPTY_MD5
    if node.kind == SYMLINK:
        return hashlib.sha256(node.target).hexdigest() + "-l"
    return content_hash(node).hex() + "-f"


def size_of(node: Node) -> int:
    return len(node.target) if node.kind == SYMLINK else 0 if node.kind == DIR else node.size


def node_headers(node: Node, facts: Facts | None, etag: str, *, checksum: bool) -> list[Header]:
    """Return the headers of a Get or Head."""
    told = [
        (b"etag", f'"{etag}"'.encode()),
        (b"last-modified", http_date(node.mtime_ns).encode()),
        (b"accept-ranges", b"bytes"),
    ]
    typed = False
    if facts is not None:
        for name, value in facts.headers:
            if name == TAGGING:
                told.append((b"x-amz-tagging-count", b"%d" % (value.count("&") + 1)))
                continue
            typed = typed or name == "content-type"
            told.append((name.encode("latin-1"), value.encode("latin-1")))
        if checksum and facts.checksum:
            told += checksum_headers(*facts.checksum)
    if not typed:
        usual = {DIR: _DIRECTORY_TYPE, SYMLINK: LINK_TYPE}.get(node.kind, _USUAL_TYPE)
        told.append((b"content-type", usual.encode()))
    told += (
        (b"x-archil-mode", b"%04o" % node.mode),
        (b"x-archil-uid", b"%d" % node.uid),
        (b"x-archil-gid", b"%d" % node.gid),
    )
    return told


def checksum_headers(algorithm: str, value: str, kind: str) -> list[Header]:
    return [(header_of(algorithm).encode(), value.encode()), (b"x-amz-checksum-type", kind.encode())]


def kept_headers(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the headers of a Put that its object gives back; `MetadataTooLarge`."""
    kept: list[tuple[str, str]] = []
    size = 0
    for name, value in headers.items():
        if name.startswith(_META):
            size += len(name) - len(_META) + len(value)
            kept.append((name, value))
        elif name in _KEPT:
            if name == "content-encoding":
                value = ", ".join(part for part in map(str.strip, value.split(",")) if part != "aws-chunked")
            if value:
                kept.append((name, value))
    if headers.get(TAGGING):
        kept.append((TAGGING, checked_tags(parse_qsl(headers[TAGGING], keep_blank_values=True, max_num_fields=100))))
    if size > _MAX_META_BYTES:
        raise S3Error("MetadataTooLarge", Size=str(size), MaxSizeAllowed=str(_MAX_META_BYTES))
    return tuple(sorted(kept))


def checked_tags(tags: Sequence[tuple[str, str]]) -> str:
    """Return tags as they are kept, the text of an x-amz-tagging header; `InvalidTag`."""
    if len(tags) > _MOST_TAGS:
        raise S3Error("InvalidTag", f"Object tags cannot be greater than {_MOST_TAGS}.")
    if len(dict(tags)) != len(tags):
        raise S3Error("InvalidTag", "Cannot provide multiple Tags with the same key.")
    for name, value in tags:
        if not 1 <= len(name) <= _TAG_NAME_CHARACTERS or len(value) > _TAG_VALUE_CHARACTERS:
            raise S3Error("InvalidTag", "The TagKey or TagValue you have provided is invalid.")
    return urlencode(sorted(tags))


def posix_of(headers: Mapping[str, str], usual_mode: int) -> Posix:
    """Return what x-archil-mode (octal), -uid and -gid say; root and `usual_mode` by default."""
    return Posix(
        _number(headers, "x-archil-mode", 8, 0o7777, usual_mode),
        _number(headers, "x-archil-uid", 10, 2**32 - 2, 0),
        _number(headers, "x-archil-gid", 10, 2**32 - 2, 0),
    )


def _number(headers: Mapping[str, str], name: str, base: int, most: int, usual: int) -> int:
    text = headers.get(name)
    if text is None:
        return usual
    try:
        value = int(text, base) if text.isascii() and text.isalnum() else -1
    except ValueError:
        value = -1
    if not 0 <= value <= most:
        limit = f"octal, at most {most:o}" if base == 8 else f"at most {most}"
        raise refused(name, text, f"{name} must be a number, {limit}.")
    return value


def refuse_features(headers: Mapping[str, str]) -> None:
    """Refuse what the client asks for and would not get."""
    for name in headers:
        if name.startswith("x-amz-") and name.startswith(_UNKEPT):
            raise S3Error("NotImplemented", f"{name} is not implemented.", Header=name)
    if headers.get("x-amz-acl", "") not in _ACLS:
        raise S3Error("AccessControlListNotSupported")
    if headers.get("x-amz-storage-class", "STANDARD") != "STANDARD":
        raise S3Error("InvalidStorageClass")
