"""Multipart uploads under way, as objects of the bucket: any server can go on with what another began.

Owns their values and encoding; layout.py says where they are. Everything here is written once.
"""

from __future__ import annotations

import msgspec

from fanout.format import envelope
from fanout.format.tree import Ref

__all__ = [
    "PartRecord",
    "UploadEnd",
    "UploadRecord",
    "decode_end",
    "decode_part",
    "decode_upload",
    "encode_end",
    "encode_part",
    "encode_upload",
]


class UploadRecord(msgspec.Struct, frozen=True, array_like=True):
    """An upload that was begun. `path` is the file's on the branch. `headers` are to be given back with the object.

    `algorithm` and `kind` of the checksum (FULL_OBJECT, COMPOSITE) are empty where none was asked for.
    """

    path: bytes
    created_ns: int
    author: str
    mode: int
    uid: int
    gid: int
    headers: tuple[tuple[str, str], ...]
    algorithm: str = ""
    kind: str = ""


class PartRecord(msgspec.Struct, frozen=True, array_like=True):
    """One part that was uploaded: where its bytes are. `stored_ns` is when the writer began to store them."""

    number: int
    size: int
    data: tuple[Ref, ...]
    md5: bytes
    stored_ns: int
    modified_ns: int
    checksum: str = ""


class UploadEnd(msgspec.Struct, frozen=True, array_like=True):
    """An upload is over: aborted (`etag` empty), or completed as an object of this path, ETag and checksum."""

    etag: str
    time_ns: int
    nonce: bytes
    path: bytes = b""
    checksum: tuple[str, ...] = ()


_uploads = msgspec.msgpack.Decoder(UploadRecord)
_parts = msgspec.msgpack.Decoder(PartRecord)
_ends = msgspec.msgpack.Decoder(UploadEnd)


def encode_upload(record: UploadRecord) -> bytes:
    return envelope.encode(envelope.UPLOAD, record)


def decode_upload(data: bytes, key: str) -> UploadRecord:
    return envelope.decode(envelope.UPLOAD, data, _uploads, key)


def encode_part(record: PartRecord) -> bytes:
    return envelope.encode(envelope.PART, record)


def decode_part(data: bytes, key: str) -> PartRecord:
    return envelope.decode(envelope.PART, data, _parts, key)


def encode_end(record: UploadEnd) -> bytes:
    return envelope.encode(envelope.END, record)


def decode_end(data: bytes, key: str) -> UploadEnd:
    return envelope.decode(envelope.END, data, _ends, key)
