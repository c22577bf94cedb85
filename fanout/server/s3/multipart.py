"""Multipart uploads: begun, filled, listed, completed and aborted, each call by whichever server it reaches.

Owns S3's rules for parts. The records are disk/uploads.py's. Completing is one commit that refers to what the parts
stored: no data is moved.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from xml.etree.ElementTree import Element

from fanout.disk.merge import Intent
from fanout.disk.objects import plan_put
from fanout.disk.paths import shown
from fanout.disk.state import State as Tree
from fanout.disk.writer import ContentWriter
from fanout.format.extents import cut
from fanout.format.facts import Facts, with_facts
from fanout.format.tree import FILE, Node
from fanout.format.upload import PartRecord, UploadRecord
from fanout.server.s3.call import Call, blobs_of, described
from fanout.server.s3.checksums import (
    ALGORITHMS,
    Claimed,
    Digests,
    claimed_checksum,
    composite,
    full_object,
    header_of,
)
from fanout.server.s3.conditions import check_read
from fanout.server.s3.described import kept_headers, posix_of, refuse_features
from fanout.server.s3.documents import OWNER, child, children, document, iso_date, parse_xml, text
from fanout.server.s3.errors import S3Error, refused
from fanout.server.s3.listing import parameters, raw
from fanout.server.s3.reading import find
from fanout.server.s3.request import Reply, Request, check_key
from fanout.server.s3.writing import storing

__all__ = ["abort", "complete", "create", "list_parts", "list_uploads", "upload_part", "upload_part_copy"]

_MOST_PARTS = 10_000
#: Smallest part but the last, and largest, in bytes.
_LEAST_PART_BYTES = 5 << 20
_MOST_PART_BYTES = 5 << 30
_COMPLETE_BODY_BYTES = 4 << 20
_COPY_RANGE = re.compile(r"bytes=([0-9]{1,19})-([0-9]{1,19})")
_FULL = "FULL_OBJECT"


async def create(call: Call) -> Reply:
    key = check_key(call.request.key, write=True)
    if key.endswith(b"/"):
        raise S3Error("InvalidArgument", "A key that ends in / is a directory: it has no parts.")
    refuse_features(call.headers)
    branch = call.disk.writable(call.point)
    algorithm, kind = _checksum_of_upload(call)
    posix = posix_of(call.headers, 0o644)
    record = UploadRecord(
        key, call.now_ns(), call.principal.author, posix.mode, posix.uid, posix.gid, kept_headers(call.headers),
        algorithm, kind,
    )  # fmt: skip

    def work() -> str:
        call.point.state()  # a disk that was deleted says so; nothing would ever collect the record
        return call.disk.uploads.begin(branch.uuid, record)

    upload_id = await call.threads(work)
    headers = []
    if algorithm:
        headers = [
            (b"x-amz-checksum-algorithm", algorithm.encode()),
            (b"x-amz-checksum-type", kind.encode()),
        ]
    told = (*_bucket_and_key(call.request), text("UploadId", upload_id))
    return Reply(200, headers, document("InitiateMultipartUploadResult", *told))


def _checksum_of_upload(call: Call) -> tuple[str, str]:
    algorithm = call.headers.get("x-amz-checksum-algorithm", "").upper()
    kind = call.headers.get("x-amz-checksum-type", "").upper()
    if algorithm and algorithm not in ALGORITHMS:
        raise S3Error("InvalidRequest", f"There is no checksum algorithm {algorithm[:40]!r}.")
    if kind and (not algorithm or kind not in (_FULL, "COMPOSITE")):
        raise S3Error("InvalidRequest", "x-amz-checksum-type is FULL_OBJECT or COMPOSITE, and needs an algorithm.")
    if algorithm == "CRC64NVME" and kind == "COMPOSITE":
        raise S3Error("InvalidRequest", "CRC64NVME can only be of the type FULL_OBJECT.")
    if algorithm.startswith("SHA") and kind == _FULL:
        raise S3Error("InvalidRequest", f"{algorithm} cannot be of the type FULL_OBJECT.")
    return algorithm, kind or ((_FULL if algorithm == "CRC64NVME" else "COMPOSITE") if algorithm else "")


def _bucket_and_key(request: Request) -> tuple[str, str]:
    return text("Bucket", request.bucket), text("Key", request.key.decode("utf-8", "replace"))


def _number(call: Call) -> int:
    given = call.query.get("partNumber", "")
    if not given.isascii() or not given.isdigit() or not 1 <= int(given[:6]) <= _MOST_PARTS:
        raise refused("partNumber", given, f"Part number must be an integer between 1 and {_MOST_PARTS}, inclusive")
    return int(given)


def _upload(call: Call) -> tuple[str, str, UploadRecord]:
    """Return the branch's uuid, the upload's id and its record; `NoUpload`. Blocking."""
    branch = call.disk.writable(call.point)
    upload_id = call.query.get("uploadId", "")
    record = call.disk.uploads.get(branch.uuid, upload_id)
    if record.path != call.request.key:
        raise S3Error("NoSuchUpload")
    return branch.uuid, upload_id, record


async def upload_part(call: Call) -> Reply:
    number = _number(call)
    body = call.body(_MOST_PART_BYTES)
    body.require_length()
    claimed = claimed_checksum(call.headers)
    uuid, upload_id, record = await call.threads(partial(_upload, call))
    checksum, keeps = _part_checksum(record, claimed)
    began_ns = call.now_ns()
    writer = ContentWriter(call.disk.packer(inline=False))

    def finish(digests: Digests) -> Reply:
        refs, _ = writer.finish()
        value = digests.value if keeps else ""
        part = PartRecord(number, digests.length, refs, digests.md5, began_ns, call.now_ns(), value)
        call.disk.uploads.add_part(uuid, upload_id, part)
        headers = [(b"etag", f'"{digests.md5.hex()}"'.encode())]
        if checksum is not None:
            headers.append((header_of(checksum.algorithm).encode(), digests.value.encode()))
        return Reply(200, headers)

    async with storing(call, writer):
        reply: Reply = await body.run(call.threads, checksum, writer.write, finish)
    return reply


def _part_checksum(record: UploadRecord, claimed: Claimed | None) -> tuple[Claimed | None, bool]:
    """Return the checksum to compute of a part, and whether it is the upload's and so to be kept."""
    if not record.algorithm:
        return claimed, False
    if claimed is not None and claimed.algorithm != record.algorithm:
        raise S3Error(
            "InvalidRequest",
            f"Checksum Type mismatch occurred, expected checksum Type: {record.algorithm.lower()}, actual checksum "
            f"Type: {claimed.algorithm.lower()}",
        )
    return claimed or Claimed(record.algorithm, None), True


async def upload_part_copy(call: Call) -> Reply:
    """Make a part of (a range of) an object. On one disk its data stays where it is, and is only read for the MD5."""
    source_call, source_key = await call.source()
    number = _number(call)
    reply: Reply = await call.threads(partial(_part_copy, call, source_call, source_key, number))
    return reply


def _part_copy(call: Call, source_call: Call, source_key: bytes, number: int) -> Reply:
    uuid, upload_id, record = _upload(call)
    began_ns = call.now_ns()
    tree, node = find(source_call, source_key)
    if node.kind != FILE:
        raise S3Error("InvalidRequest", "Only a file can be copied into a part.")
    etag = described(node)[1]
    check_read(call.headers, etag, node.mtime_ns, "x-amz-copy-source-", unchanged="PreconditionFailed")
    start, end = _copy_range(call.headers.get("x-amz-copy-source-range"), node.size)
    refs = cut(node.data, start, end)
    blobs = blobs_of(tree, refs)
    digests = Digests({}, None, Claimed(record.algorithm, None) if record.algorithm else None)
    stays = source_call.disk is call.disk and not blobs
    writer = ContentWriter(call.disk.packer(inline=False))
    try:
        for piece in source_call.disk.reader.chunks(refs, blobs):
            digests.update(piece)
            if not stays:
                writer.write(piece)
        stored = refs if stays else writer.finish()[0]
    except BaseException:
        writer.abandon()
        raise
    now_ns = call.now_ns()
    part = PartRecord(number, end - start, tuple(stored), digests.md5, began_ns, now_ns, digests.value)
    call.disk.uploads.add_part(uuid, upload_id, part)
    told = [text("LastModified", iso_date(now_ns)), text("ETag", f'"{digests.md5.hex()}"')]
    if record.algorithm:
        told.append(text(f"Checksum{record.algorithm}", digests.value))
    return Reply(200, [], document("CopyPartResult", *told))


def _copy_range(given: str | None, size: int) -> tuple[int, int]:
    if given is None:
        return 0, size
    match = _COPY_RANGE.fullmatch(given)
    if match is None or int(match[1]) > int(match[2]):
        raise refused("x-amz-copy-source-range", given, "The range must be bytes=FIRST-LAST, both within the source.")
    if int(match[2]) >= size:
        raise S3Error("InvalidRange", f"The range is beyond the source, which has {size} bytes.")
    return int(match[1]), int(match[2]) + 1


async def abort(call: Call) -> Reply:
    def work() -> Reply:
        uuid, upload_id, _ = _upload(call)
        call.disk.uploads.finish(uuid, upload_id, "")
        return Reply(204)

    reply: Reply = await call.threads(work)
    return reply


# -- completing ----------------------------------------------------------------------------------------------------


async def complete(call: Call) -> Reply:
    call.disk.writable(call.point)
    data = await call.body(_COMPLETE_BODY_BYTES).read(call.threads, None)
    reply: Reply = await call.threads(partial(_complete, call, data))
    return reply


def _complete(call: Call, data: bytes) -> Reply:
    wanted = _wanted(parse_xml(data, "CompleteMultipartUpload"))
    branch = call.disk.writable(call.point)
    upload_id = call.query.get("uploadId", "")
    ended = call.disk.uploads.end(branch.uuid, upload_id)
    if ended is not None and ended.etag and ended.path == call.request.key:  # the answer was lost, perhaps
        return _completed(call, ended.etag, ended.checksum)
    uuid, upload_id, record = _upload(call)
    parts = _chosen(call, uuid, upload_id, record, wanted)
    md5 = hashlib.md5(b"".join(part.md5 for part in parts), usedforsecurity=False).digest()
    etag = f"{md5.hex()}-{len(parts)}"
    checksum = _checksum_of_object(call, record, parts)
    size = sum(part.size for part in parts)
    said = call.headers.get("x-amz-mp-object-size")
    if said is not None and said != str(size):
        raise S3Error("InvalidRequest", f"The parts have {size} bytes together, not the x-amz-mp-object-size.")
    refs = tuple(ref for part in parts for ref in part.data)
    facts = Facts(
        md5=md5,
        count=len(parts),
        headers=record.headers,
        checksum=checksum,
        parts=tuple((part.size, part.checksum) for part in parts),
    )
    node = with_facts(Node(FILE, record.mode, call.now_ns(), size, refs, record.uid, record.gid), facts)

    def plan(tree: Tree) -> Sequence[Intent]:
        call.disk.uploads.require(uuid, upload_id, record)
        call.require_condition(tree.get(record.path))
        return plan_put(tree, record.path, node)

    call.commit(plan, f"put {shown(record.path)} in {len(parts)} parts")
    call.disk.uploads.finish(uuid, upload_id, etag, record.path, checksum)
    return _completed(call, etag, checksum)


def _completed(call: Call, etag: str, checksum: tuple[str, ...]) -> Reply:
    host = call.headers.get("host", "")
    path = call.request.raw_path.decode("latin-1")
    told = [text("Location", f"http://{host}{path}"), *_bucket_and_key(call.request), text("ETag", f'"{etag}"')]
    if checksum:
        told += [text(f"Checksum{checksum[0]}", checksum[1]), text("ChecksumType", checksum[2])]
    return Reply(200, [], document("CompleteMultipartUploadResult", *told))


def _wanted(root: Element) -> list[tuple[int, str, dict[str, str]]]:
    """Return (number, etag, checksums) of the parts that are to be the object."""
    wanted: list[tuple[int, str, dict[str, str]]] = []
    for item in children(root, "Part"):
        number, etag = child(item, "PartNumber") or "", child(item, "ETag") or ""
        if not number.isascii() or not number.isdigit() or len(number) > 5 or not etag:
            raise S3Error("MalformedXML", "Every part needs a PartNumber and an ETag.")
        sums = {name: child(item, f"Checksum{name}") for name in ALGORITHMS}
        wanted.append((int(number), etag.strip('"'), {name: value for name, value in sums.items() if value}))
    if not wanted or len(wanted) > _MOST_PARTS:
        raise S3Error("MalformedXML", f"An upload is completed with 1 to {_MOST_PARTS} parts.")
    if any(before[0] >= after[0] for before, after in pairwise(wanted)):
        raise S3Error("InvalidPartOrder")
    return wanted


def _chosen(
    call: Call, uuid: str, upload_id: str, record: UploadRecord, wanted: Sequence[tuple[int, str, dict[str, str]]]
) -> list[PartRecord]:
    """Return the parts that are meant: of one that was sent again, the last of that ETag."""
    there: dict[tuple[int, str], PartRecord] = {}
    for part in call.disk.uploads.parts(uuid, upload_id):
        there[part.record.number, part.record.md5.hex()] = part.record
    chosen: list[PartRecord] = []
    for number, etag, sums in wanted:
        part_record = there.get((number, etag))
        if part_record is None or any(
            name != record.algorithm or value != part_record.checksum for name, value in sums.items()
        ):
            raise S3Error("InvalidPart", PartNumber=str(number), ETag=etag[:80], UploadId=upload_id)
        chosen.append(part_record)
    for part_record in chosen[:-1]:
        if part_record.size < _LEAST_PART_BYTES:
            raise S3Error(
                "EntityTooSmall", ProposedSize=str(part_record.size), MinSizeAllowed=str(_LEAST_PART_BYTES),
                PartNumber=str(part_record.number), ETag=part_record.md5.hex(),
            )  # fmt: skip
    return chosen


def _checksum_of_object(call: Call, record: UploadRecord, parts: Sequence[PartRecord]) -> tuple[str, ...]:
    given = claimed_checksum({**call.headers, "x-amz-trailer": ""})
    kind = call.headers.get("x-amz-checksum-type", "").upper()
    if not record.algorithm:
        return ()
    if kind and kind != record.kind:
        raise S3Error("InvalidRequest", f"The upload's checksum is of the type {record.kind}, not {kind[:40]}.")
    if record.kind == _FULL:
        value = full_object(record.algorithm, [(part.size, part.checksum) for part in parts])
    else:
        value = composite(record.algorithm, [part.checksum for part in parts])
    if given is not None and given.value is not None:
        if given.algorithm != record.algorithm:
            raise S3Error("InvalidRequest", f"The upload's checksum is {record.algorithm}, not {given.algorithm}.")
        if given.value.partition("-")[0] != value.partition("-")[0]:
            raise S3Error("BadDigest", f"The {given.algorithm} you specified did not match the calculated checksum.")
    return record.algorithm, value, record.kind


# -- listing -------------------------------------------------------------------------------------------------------


async def list_parts(call: Call) -> Reply:
    limit = call.request.number("max-parts", 1000, 0, 1000)
    after = call.request.number("part-number-marker", 0, 0, _MOST_PARTS)

    def work() -> Reply:
        uuid, upload_id, record = _upload(call)
        newest: dict[int, PartRecord] = {}
        truncated = False
        for part in call.disk.uploads.parts(uuid, upload_id, after):
            if part.record.number not in newest and len(newest) >= limit:
                truncated = True
                break
            newest[part.record.number] = part.record
        told = [
            *_bucket_and_key(call.request),
            text("UploadId", upload_id),
            OWNER.replace("Owner>", "Initiator>"),
            OWNER,
            text("StorageClass", "STANDARD"),
            text("PartNumberMarker", after),
            text("NextPartNumberMarker", max(newest, default=0)),
            text("MaxParts", limit),
            text("IsTruncated", str(truncated).lower()),
        ]
        if record.algorithm:
            told += [text("ChecksumAlgorithm", record.algorithm), text("ChecksumType", record.kind)]
        for number, each in newest.items():
            inner = [
                text("PartNumber", number),
                text("LastModified", iso_date(each.modified_ns)),
                text("ETag", f'"{each.md5.hex()}"'),
                text("Size", each.size),
            ]
            if record.algorithm:
                inner.append(text(f"Checksum{record.algorithm}", each.checksum))
            told.append(f"<Part>{''.join(inner)}</Part>")
        return Reply(200, [], document("ListPartsResult", *told))

    reply: Reply = await call.threads(work)
    return reply


async def list_uploads(call: Call) -> Reply:
    given = parameters(call, "max-uploads")
    marker = raw(call.query.get("key-marker", ""))
    id_marker = call.query.get("upload-id-marker", "") if marker else ""

    def work() -> Reply:
        branch = call.point.branch
        found = sorted(
            (record.path, upload_id, record) for upload_id, record in call.disk.uploads.under_way(branch.uuid)
        )
        shown_uploads: list[str] = []
        prefixes: list[bytes] = []
        last: tuple[bytes, str] | None = None
        truncated = False
        for path, upload_id, record in found:
            if not path.startswith(given.prefix) or (path, upload_id) <= (marker, id_marker or "~"):
                continue
            at = path.find(given.delimiter, len(given.prefix)) if given.delimiter else -1
            group = path[: at + len(given.delimiter)] if at >= 0 else b""
            if group and (group in prefixes or group <= marker):
                continue
            if len(shown_uploads) + len(prefixes) >= given.limit:
                truncated = given.limit > 0
                break
            last = (group, "") if group else (path, upload_id)
            if group:
                prefixes.append(group)
            else:
                shown_uploads.append(_upload_element(given, path, upload_id, record))
        told = [
            text("Bucket", call.request.bucket),
            given.key("KeyMarker", marker),
            text("UploadIdMarker", id_marker),
            *given.head(call, "MaxUploads")[1:],
            text("IsTruncated", str(truncated).lower()),
        ]
        if truncated and last is not None:
            told += [given.key("NextKeyMarker", last[0]), text("NextUploadIdMarker", last[1])]
        return Reply(200, [], document("ListMultipartUploadsResult", *told, *shown_uploads, *given.prefixes(prefixes)))

    reply: Reply = await call.threads(work)
    return reply


def _upload_element(given: parameters, path: bytes, upload_id: str, record: UploadRecord) -> str:
    inner = [
        given.key("Key", path),
        text("UploadId", upload_id),
        OWNER.replace("Owner>", "Initiator>"),
        OWNER,
        text("StorageClass", "STANDARD"),
        text("Initiated", iso_date(record.created_ns)),
    ]
    if record.algorithm:
        inner += [text("ChecksumAlgorithm", record.algorithm), text("ChecksumType", record.kind)]
    return f"<Upload>{''.join(inner)}</Upload>"
