"""Getting objects: Get, Head, GetObjectAttributes, and finding what a key names.

Owns what a read answers. A small object is found and read in one hop to a thread; a large one is streamed, a run of
it being loaded while the one before is sent.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import anyio

from fanout.disk.keys import is_key_of_directory
from fanout.disk.state import State as Tree
from fanout.format.extents import cut
from fanout.format.facts import Facts
from fanout.format.tree import DIR, HOLE, SYMLINK, Node, Ref
from fanout.server.s3 import documents
from fanout.server.s3.call import Call, blobs_of, described
from fanout.server.s3.conditions import byte_range, check_read
from fanout.server.s3.described import checksum_headers, node_headers, size_of
from fanout.server.s3.errors import S3Error, refused
from fanout.server.s3.request import Header, Reply, check_key

__all__ = ["find", "get_attributes", "get_object", "send_ahead"]

Receiver = Callable[[], Awaitable[Any]]
Sender = Callable[[Any], Awaitable[None]]

#: What is not longer is read in the thread that found it.
_AT_ONCE_BYTES = 1 << 20
#: Runs that are loaded ahead of the one being sent.
_AHEAD = 2
#: Holes are handed out in pieces of this many zero bytes.
_HOLE_BYTES = 1 << 20
_OVERRIDES = {
    "response-cache-control": b"cache-control",
    "response-content-disposition": b"content-disposition",
    "response-content-encoding": b"content-encoding",
    "response-content-language": b"content-language",
    "response-content-type": b"content-type",
    "response-expires": b"expires",
}


def find(call: Call, key: bytes, tree: Tree | None = None) -> tuple[Tree, Node]:
    """Return what a key names and the tree it is in; `NoSuchKey`. Blocking."""
    tree = tree or call.point.state()
    path = key.removesuffix(b"/")
    node = tree.get(path)
    if node is None or (node.kind == DIR) != key.endswith(b"/"):
        raise S3Error("NoSuchKey", Key=key.decode("utf-8", "replace"))
    if node.kind == DIR and not is_key_of_directory(tree, path, node):
        raise S3Error("NoSuchKey", Key=key.decode("utf-8", "replace"))
    return tree, node


async def get_object(call: Call) -> Reply:
    """Get or Head."""
    call.require_version()
    key = check_key(call.request.key, write=False)
    number = call.query.get("partNumber")
    if number is not None and "range" in call.headers:
        raise S3Error("InvalidRequest", "Cannot specify both Range header and partNumber query parameter.")
    reply: Reply = await call.threads(partial(_get, call, key, number))
    return reply


def _get(call: Call, key: bytes, number: str | None) -> Reply:
    tree, node = find(call, key)
    facts, etag = described(node)
    try:
        check_read(call.headers, etag, node.mtime_ns)
    except S3Error as error:
        if error.s3 == "NotModified":
            return Reply(304, [h for h in node_headers(node, facts, etag, checksum=False) if h[0] in _ON_NOT_MODIFIED])
        raise
    size = size_of(node)
    headers: list[Header] = []
    checksum = call.headers.get("x-amz-checksum-mode", "").upper() == "ENABLED"
    if number is not None:
        wanted: tuple[int, int] | None = _part_range(number, facts, size)
        if facts is not None and facts.parts:
            headers.append((b"x-amz-mp-parts-count", b"%d" % len(facts.parts)))
            value = facts.parts[int(number) - 1][1]
            if checksum and value:
                headers += checksum_headers(facts.checksum[0], value, facts.checksum[2])
    else:
        wanted = byte_range(call.headers.get("range"), size)
    checksum = checksum and wanted is None
    headers += _overridden(node_headers(node, facts, etag, checksum=checksum), call.query)
    start, end = wanted or (0, size)
    status = 200
    if wanted is not None:
        status = 206
        headers.append((b"content-range", f"bytes {start}-{end - 1}/{size}".encode()))
    reply = Reply(status, headers, length=end - start)
    if call.request.method == "HEAD":
        return reply
    if node.kind == SYMLINK:
        reply.body = node.target[start:end]
        return reply
    refs = cut(node.data, start, end)
    blobs = blobs_of(tree, refs)
    if end - start <= _AT_ONCE_BYTES:
        reply.body = call.disk.reader.read(refs, blobs)
    else:
        reply.stream = _stream(call, refs, blobs)
    return reply


_ON_NOT_MODIFIED = {b"etag", b"last-modified", b"cache-control", b"expires"}


def _part_range(number: str, facts: Facts | None, size: int) -> tuple[int, int]:
    if not number.isascii() or not number.isdigit() or not 1 <= int(number[:6]) <= 10_000:
        raise refused("partNumber", number, "Part number must be an integer between 1 and 10000, inclusive")
    index = int(number) - 1
    sizes = [each[0] for each in facts.parts] if facts is not None and facts.parts else [size]
    if index >= len(sizes):
        raise S3Error("InvalidPartNumber", PartNumberRequested=number, ActualPartCount=str(len(sizes)))
    start = sum(sizes[:index])
    return start, start + sizes[index]


def _overridden(headers: list[Header], query: Mapping[str, str]) -> list[Header]:
    given = {_OVERRIDES[name]: value for name, value in query.items() if name in _OVERRIDES}
    if not given:
        return headers
    for name, value in given.items():
        if not value.isprintable():
            raise refused(f"response-{name.decode()}", value, "Header values are printable.")
    kept = [each for each in headers if each[0] not in given]
    return kept + [(name, value.encode("utf-8", "replace")) for name, value in given.items()]


async def _stream(call: Call, refs: Sequence[Ref], blobs: Mapping[bytes, bytes]) -> AsyncIterator[bytes]:
    """Yield what the references stand for, loading ahead. To be closed by who stops early."""
    for ref in refs:
        if ref.pack == HOLE:
            zeros = bytes(min(ref.size, _HOLE_BYTES))
            for left in range(ref.size, 0, -_HOLE_BYTES):
                yield zeros[: min(left, len(zeros))]
        else:
            yield await call.threads(partial(_load, call, ref, blobs))


def _load(call: Call, ref: Ref, blobs: Mapping[bytes, bytes]) -> bytes:
    raw = call.disk.reader.frame(ref, blobs)
    return raw if ref.length < 0 else raw[ref.skip : ref.skip + ref.length]


async def send_ahead(pieces: AsyncIterator[bytes], send: Sender, receive: Receiver) -> None:
    """Send pieces, the next ones being loaded meanwhile; stop loading when the client goes away."""
    outbox, inbox = anyio.create_memory_object_stream[bytes](_AHEAD)

    async def load() -> None:
        async with outbox:
            async for piece in pieces:
                await outbox.send(piece)

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(load)
        group.start_soon(watch)
        async with inbox:
            async for piece in inbox:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        group.cancel_scope.cancel()


async def get_attributes(call: Call) -> Reply:
    """GetObjectAttributes: those that `x-amz-object-attributes` names."""
    call.require_version()
    key = check_key(call.request.key, write=False)
    wanted = {each.strip() for each in call.headers.get("x-amz-object-attributes", "").split(",")} - {""}
    if not wanted or wanted - {"ETag", "Checksum", "ObjectParts", "StorageClass", "ObjectSize"}:
        raise refused("x-amz-object-attributes", ",".join(sorted(wanted)), "Invalid attribute name specified.")

    def work() -> Reply:
        _, node = find(call, key)
        facts, etag = described(node)
        told: list[str] = []
        if "ETag" in wanted:
            told.append(documents.text("ETag", etag))
        if "Checksum" in wanted and facts is not None and facts.checksum:
            algorithm, value, kind = facts.checksum
            inner = documents.text(f"Checksum{algorithm}", value) + documents.text("ChecksumType", kind)
            told.append(f"<Checksum>{inner}</Checksum>")
        if "ObjectParts" in wanted and facts is not None and facts.parts:
            told.append(_object_parts(call, facts))
        if "StorageClass" in wanted:
            told.append(documents.text("StorageClass", "STANDARD"))
        if "ObjectSize" in wanted:
            told.append(documents.text("ObjectSize", size_of(node)))
        modified = (b"last-modified", documents.http_date(node.mtime_ns).encode())
        return Reply(200, [modified], documents.document("GetObjectAttributesResponse", *told))

    reply: Reply = await call.threads(work)
    return reply


def _object_parts(call: Call, facts: Facts) -> str:
    most = _header_number(call, "x-amz-max-parts", 1000)
    after = _header_number(call, "x-amz-part-number-marker", 0)
    algorithm = facts.checksum[0] if facts.checksum else ""
    told: list[str] = []
    shown = 0
    for number, (size, value) in enumerate(facts.parts, 1):
        if number <= after or shown >= most:
            continue
        shown = shown + 1
        inner = documents.text("PartNumber", number) + documents.text("Size", size)
        if algorithm and value:
            inner += documents.text(f"Checksum{algorithm}", value)
        told.append(f"<Part>{inner}</Part>")
    truncated = after + shown < len(facts.parts)
    head = [
        documents.text("PartsCount", len(facts.parts)),
        documents.text("PartNumberMarker", after),
        documents.text("NextPartNumberMarker", after + shown),
        documents.text("MaxParts", most),
        documents.text("IsTruncated", str(truncated).lower()),
    ]
    return f"<ObjectParts>{''.join(head + told)}</ObjectParts>"


def _header_number(call: Call, name: str, usual: int) -> int:
    text = call.headers.get(name, "")
    if not text:
        return usual
    if not text.isascii() or not text.isdigit():
        raise refused(name, text, f"{name} must be a whole number.")
    return min(int(text[:9]), 10_000)
