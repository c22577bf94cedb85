"""Putting, appending, copying and deleting objects. Each answers when its one commit is durable.

Owns what becomes of a body or a source, and what is kept beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import anyio
import msgspec

from fanout.disk.disk import Disk
from fanout.disk.edits import compact
from fanout.disk.keys import is_key_of_directory
from fanout.disk.merge import Intent
from fanout.disk.objects import plan_put, plan_removal
from fanout.disk.paths import shown
from fanout.disk.state import State as Tree
from fanout.disk.writer import ContentWriter
from fanout.errors import FanoutError
from fanout.format.extents import size_of as bytes_in
from fanout.format.facts import Facts, facts_of, with_facts
from fanout.format.tree import DIR, FILE, SYMLINK, Node, Ref
from fanout.server.s3 import documents
from fanout.server.s3.call import Call, blobs_of, described
from fanout.server.s3.checksums import Claimed, Digests, claimed_checksum, header_of
from fanout.server.s3.conditions import check_read, http_seconds
from fanout.server.s3.described import TAGGING, etag_of, kept_headers, posix_of, refuse_features, size_of
from fanout.server.s3.errors import S3Error, error_of
from fanout.server.s3.reading import find
from fanout.server.s3.request import Header, Reply, check_key

__all__ = ["copy_object", "delete_object", "delete_objects", "put_object", "storing"]

#: Longest body of one append.
_APPEND_BYTES = 1 << 20
_MOST_DELETES = 1000
_DELETE_BODY_BYTES = 2 << 20
#: Elements of a DeleteObjects item, and the header of a DeleteObject that says the same.
_DELETE_CONDITIONS = {
    "ETag": "if-match",
    "LastModifiedTime": "x-amz-if-match-last-modified-time",
    "Size": "x-amz-if-match-size",
}


async def put_object(call: Call) -> Reply:
    key = check_key(call.request.key, write=True)
    refuse_features(call.headers)
    call.disk.writable(call.point)
    if call.query.get("append", "").lower() == "true":
        return await _append(call, key)
    body = call.body()
    body.require_length()
    kept = kept_headers(call.headers)
    checksum = claimed_checksum(call.headers)
    if key.endswith(b"/"):
        return await _put_directory(call, key, kept, checksum)
    posix = posix_of(call.headers, 0o644)
    writer = ContentWriter(call.disk.packer())

    def finish(digests: Digests) -> Reply:
        refs, blobs = writer.finish()
        facts = Facts(md5=digests.md5, headers=kept, checksum=_whole(digests))
        node = Node(FILE, posix.mode, call.now_ns(), writer.size, refs, posix.uid, posix.gid)
        call.commit(partial(_put_at, call, key, with_facts(node, facts)), f"put {shown(key)}", blobs)
        return Reply(200, _put_headers(digests.md5.hex(), digests))

    async with storing(call, writer):
        reply: Reply = await body.run(call.threads, checksum, writer.write, finish)
    return reply


class storing:
    """Abandon what a writer has begun to store if the block fails."""

    def __init__(self, call: Call, writer: ContentWriter) -> None:
        self._call = call
        self._writer = writer

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            with anyio.CancelScope(shield=True):
                await self._call.threads(self._writer.abandon)


def _whole(digests: Digests) -> tuple[str, ...]:
    return (digests.checksum.algorithm, digests.value, "FULL_OBJECT") if digests.checksum is not None else ()


def _put_headers(etag: str, digests: Digests) -> list[Header]:
    headers = [(b"etag", f'"{etag}"'.encode())]
    if digests.checksum is not None:
        headers += [
            (header_of(digests.checksum.algorithm).encode(), digests.value.encode()),
            (b"x-amz-checksum-type", b"FULL_OBJECT"),
        ]
    return headers


def _put_at(call: Call, key: bytes, node: Node, tree: Tree) -> Sequence[Intent]:
    path = key.removesuffix(b"/")
    now = tree.get(path)
    if now is not None and now.kind == DIR and not is_key_of_directory(tree, path, now):
        now = None  # only there because of what is in it
    call.require_condition(now)
    return plan_put(tree, path, node)


async def _put_directory(call: Call, key: bytes, kept: tuple[tuple[str, str], ...], checksum: Claimed | None) -> Reply:
    posix = posix_of(call.headers, 0o755)

    def take(piece: bytes) -> None:
        raise S3Error("InvalidArgument", "A key that ends in / is a directory: its body must be empty.")

    def finish(digests: Digests) -> Reply:
        facts = Facts(md5=digests.md5, headers=kept, checksum=_whole(digests))
        node = Node(DIR, posix.mode, call.now_ns(), uid=posix.uid, gid=posix.gid)
        call.commit(partial(_put_at, call, key, with_facts(node, facts)), f"mkdir {shown(key)}")
        return Reply(200, _put_headers(digests.md5.hex(), digests))

    reply: Reply = await call.body().run(call.threads, checksum, take, finish)
    return reply


async def _append(call: Call, key: bytes) -> Reply:
    """Add the body to the end of a file, whatever that is when the commit lands; make the file if there is none."""
    if key.endswith(b"/"):
        raise S3Error("InvalidArgument", "A key that ends in / is a directory: nothing can be appended.")
    body = call.body(_APPEND_BYTES)
    body.require_length()
    kept = kept_headers(call.headers)
    posix = posix_of(call.headers, 0o644)
    writer = ContentWriter(call.disk.packer())

    def finish(digests: Digests) -> Reply:
        added, blobs = writer.finish()
        landed: list[Node] = []

        def plan(tree: Tree) -> Sequence[Intent]:
            now = tree.get(key)
            call.require_condition(now)
            if now is None or now.kind != FILE:
                made = Node(FILE, posix.mode, call.now_ns(), writer.size, added, posix.uid, posix.gid)
                node = with_facts(made, Facts(md5=digests.md5, headers=kept))
            else:
                data = _compacted(call, tree, now.data + added, blobs)
                changed = msgspec.structs.replace(
                    now, data=data, size=bytes_in(data), mtime_ns=call.now_ns(), digest=b""
                )
                facts = facts_of(now)
                node = with_facts(changed, Facts(headers=facts.headers) if facts is not None else None)
            landed[:] = [node]
            return plan_put(tree, key, node)

        call.commit(plan, f"append to {shown(key)}", blobs)
        return Reply(200, [(b"etag", f'"{described(landed[0])[1]}"'.encode())])

    async with storing(call, writer):
        reply: Reply = await body.run(call.threads, claimed_checksum(call.headers), writer.write, finish)
    return reply


def _compacted(call: Call, tree: Tree, data: tuple[Ref, ...], blobs: dict[bytes, bytes]) -> tuple[Ref, ...]:
    """Keep a file that is appended to often in few runs; what is packed anew is added to `blobs`."""
    packer = call.disk.packer()
    known = {**tree.blob_bytes(), **blobs}
    data = compact(data, lambda refs: call.disk.reader.read(refs, known), packer.add, packer.tuning.extent_bytes)
    blobs.update(packer.finish().blobs)
    return data


# -- copying -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Source:
    """What is to be copied: a node of a tree of a disk."""

    disk: Disk
    tree: Tree
    node: Node

    @property
    def blobs(self) -> dict[bytes, bytes]:
        return blobs_of(self.tree, self.node.data)


async def copy_object(call: Call) -> Reply:
    """Copy on the server: within one disk no data is moved, whatever the size."""
    source_call, source_key = await call.source()
    key = check_key(call.request.key, write=True)
    refuse_features(call.headers)
    call.disk.writable(call.point)
    directive = call.headers.get("x-amz-metadata-directive", "COPY").upper()
    if directive not in ("COPY", "REPLACE"):
        raise S3Error("InvalidArgument", "Unknown metadata directive.", ArgumentValue=directive[:80])
    same = source_call.point == call.point and source_key == key
    if same and directive == "COPY":
        raise S3Error(
            "InvalidRequest",
            "This copy request is illegal because it is trying to copy an object to itself without changing the "
            "object's metadata.",
        )
    kept = kept_headers(call.headers)
    reply: Reply = await call.threads(partial(_copy, call, source_call, source_key, key, directive, kept))
    return reply


def _copy(
    call: Call, source_call: Call, source_key: bytes, key: bytes, directive: str, kept: tuple[tuple[str, str], ...]
) -> Reply:
    tree, node = find(source_call, source_key)
    facts, etag = described(node)
    check_read(call.headers, etag, node.mtime_ns, "x-amz-copy-source-", unchanged="PreconditionFailed")
    if (node.kind == DIR) != key.endswith(b"/"):
        raise S3Error("InvalidArgument", "A directory is copied to a key that ends in /, a file to one that does not.")
    if node.size > call.state.limits.object_bytes:
        raise S3Error("InvalidRequest", "The source is too large to be copied at once: use UploadPartCopy.")
    source = Source(source_call.disk, tree, node)
    made = _adopted(call, source)
    told = facts or Facts()
    told = msgspec.structs.replace(told, headers=_copied_headers(call, directive, told.headers, kept))
    if "x-archil-mode" in call.headers or "x-archil-uid" in call.headers or "x-archil-gid" in call.headers:
        posix = posix_of(call.headers, node.mode)
        made.node = msgspec.structs.replace(made.node, mode=posix.mode, uid=posix.uid, gid=posix.gid)
    now_ns = call.now_ns()
    copy = msgspec.structs.replace(made.node, mtime_ns=now_ns, link=b"")
    copy = with_facts(copy, told if told != Facts() else None)
    plan = partial(_put_at, call, key, copy)
    call.commit(plan, f"copy {shown(source_key)} to {shown(key)}", made.blobs, source.blobs)
    etag = etag_of(copy, facts_of(copy))
    inner = documents.text("LastModified", documents.iso_date(now_ns)) + documents.text("ETag", f'"{etag}"')
    if told.checksum:
        inner += documents.text(f"Checksum{told.checksum[0]}", told.checksum[1])
        inner += documents.text("ChecksumType", told.checksum[2])
    return Reply(200, [], documents.document("CopyObjectResult", inner))


def _copied_headers(
    call: Call, directive: str, old: tuple[tuple[str, str], ...], given: tuple[tuple[str, str], ...]
) -> tuple[tuple[str, str], ...]:
    """Return the headers of a copy: the source's or those given, and its tags or those given."""
    tags = given if call.headers.get("x-amz-tagging-directive", "").upper() == "REPLACE" else old
    others = given if directive == "REPLACE" else old
    return tuple(
        sorted((*(each for each in others if each[0] != TAGGING), *(each for each in tags if each[0] == TAGGING)))
    )


@dataclass(slots=True)
class _Adopted:
    node: Node
    blobs: Mapping[bytes, bytes]


def _adopted(call: Call, source: Source) -> _Adopted:
    """Return the source as a node of the call's disk; data is moved only between disks."""
    if source.disk is call.disk or source.node.kind == SYMLINK or not source.node.data:
        return _Adopted(source.node, {})
    writer = ContentWriter(call.disk.packer())
    try:
        for piece in source.disk.reader.chunks(source.node.data, source.blobs):
            writer.write(piece)
        refs, blobs = writer.finish()
    except BaseException:
        writer.abandon()
        raise
    return _Adopted(msgspec.structs.replace(source.node, data=refs, digest=b""), blobs)


# -- deleting ------------------------------------------------------------------------------------------------------


async def delete_object(call: Call) -> Reply:
    call.require_version()
    call.disk.writable(call.point)
    if not _can_be_there(call.request.key):
        return Reply(204)
    reply: Reply = await call.threads(partial(_delete, call, call.request.key))
    return reply


def _can_be_there(key: bytes) -> bool:
    """Whether a file can have this key; to delete any other is to do nothing."""
    try:
        check_key(key, write=False)
    except S3Error as error:
        if error.s3 == "NoSuchKey":
            return False
        raise
    return True


def _delete(call: Call, key: bytes) -> Reply:
    def plan(tree: Tree) -> Sequence[Intent]:
        now = _at_key(tree, key)
        _check_delete(call.headers, now)
        return plan_removal(tree, [key])

    call.commit(plan, f"delete {shown(key)}")
    return Reply(204)


def _at_key(tree: Tree, key: bytes) -> Node | None:
    path = key.removesuffix(b"/")
    now = tree.get(path)
    if now is None or (now.kind == DIR) != key.endswith(b"/"):
        return None
    return None if now.kind == DIR and not is_key_of_directory(tree, path, now) else now


def _check_delete(conditions: Mapping[str, str], now: Node | None) -> None:
    """Hold the conditions of a delete against what is there; nothing there is fine, whatever they are."""
    match = conditions.get("if-match")
    time = conditions.get("x-amz-if-match-last-modified-time")
    size = conditions.get("x-amz-if-match-size")
    if now is None or (match is None and time is None and size is None):
        return
    etag = described(now)[1]
    if match is not None and match.strip() != "*" and match.strip().strip('"') != etag:
        raise S3Error("PreconditionFailed", Condition="If-Match")
    if time is not None and http_seconds(time) != now.mtime_ns // 10**9:
        raise S3Error("PreconditionFailed", Condition="x-amz-if-match-last-modified-time")
    if size is not None and size != str(size_of(now)):
        raise S3Error("PreconditionFailed", Condition="x-amz-if-match-size")


async def delete_objects(call: Call) -> Reply:
    """Delete up to 1,000 keys in one commit."""
    call.disk.writable(call.point)
    data = await call.body(_DELETE_BODY_BYTES).read(call.threads, claimed_checksum(call.headers))
    reply: Reply = await call.threads(partial(_delete_many, call, data))
    return reply


def _delete_many(call: Call, data: bytes) -> Reply:
    root = documents.parse_xml(data, "Delete")
    items = list(documents.children(root, "Object"))
    if not 1 <= len(items) <= _MOST_DELETES:
        raise S3Error("MalformedXML", f"1 to {_MOST_DELETES} objects can be deleted at once.")
    quiet = (documents.child(root, "Quiet") or "").lower() == "true"
    wanted: list[tuple[str, bytes, dict[str, str]]] = []
    outcome: dict[str, S3Error | None] = {}
    for item in items:
        found = item.find("Key")
        name = (found.text or "") if found is not None else ""
        if not name:
            raise S3Error("MalformedXML", "Every object needs a key.")
        try:
            key = name.encode("utf-8", "surrogatepass")
            if not _can_be_there(key):
                outcome[name] = None
                continue
            if (documents.child(item, "VersionId") or "null") != "null":
                raise S3Error("NoSuchVersion")
        except S3Error as error:
            outcome[name] = error
            continue
        names = {
            "ETag": "if-match",
            "LastModifiedTime": "x-amz-if-match-last-modified-time",
            "Size": "x-amz-if-match-size",
        }
        given = {header: documents.child(item, tag) for tag, header in names.items()}
        wanted.append((name, key, {header: text for header, text in given.items() if text is not None}))

    def plan(tree: Tree) -> Sequence[Intent]:
        going: list[bytes] = []
        for name, key, conditions in wanted:
            outcome[name] = None
            try:
                _check_delete(conditions, _at_key(tree, key))
                going.append(key)
            except S3Error as error:
                outcome[name] = error
        return plan_removal(tree, going)

    try:
        call.commit(plan, f"delete {len(wanted)} objects")
    except FanoutError as error:
        for name, _, _ in wanted:
            outcome[name] = outcome.get(name) or error_of(error)
    told = [_deleted(name, error) for name, error in outcome.items() if error is not None or not quiet]
    return Reply(200, [], documents.document("DeleteResult", *told))


def _deleted(name: str, error: S3Error | None) -> str:
    if error is None:
        return f"<Deleted>{documents.text('Key', name)}</Deleted>"
    inner = documents.text("Key", name) + documents.text("Code", error.s3) + documents.text("Message", error.message)
    return f"<Error>{inner}</Error>"
