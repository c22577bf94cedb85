"""The frame around every metadata object: magic, kind, version, checksum, zstd-compressed msgpack.

Owns encoding and verification of whole objects. Knows nothing of what the values mean.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TypeVar

import msgspec
import zstandard

from fanout.errors import Corrupt
from fanout.format.contexts import compressed, decompressed

__all__ = [
    "BRANCH",
    "CHECKPOINT",
    "CLAIM",
    "DISK",
    "END",
    "ENTRY",
    "KEY",
    "MASTER",
    "OUTCOME",
    "PAGE",
    "PART",
    "SEAL",
    "SNAP",
    "UPLOAD",
    "VERSION",
    "decode",
    "encode",
    "kind_of",
]

VERSION = 1
DISK, BRANCH, CHECKPOINT, ENTRY, SNAP, PAGE, SEAL = b"D", b"B", b"C", b"E", b"S", b"P", b"X"
UPLOAD, PART, END = b"U", b"R", b"Z"
KEY, MASTER, CLAIM, OUTCOME = b"A", b"M", b"Q", b"O"  # K is a kept record (trim.py)

_MAGIC = b"FAN"
_HEADER = 4 + 1 + 16
_MAX_RAW = 1 << 30
_SKIPPABLE = 0x184D2A50

_encoder = msgspec.msgpack.Encoder()
T = TypeVar("T")


def encode(kind: bytes, value: object, salt: bytes = b"") -> bytes:
    """Frame a value: `FAN` kind version sha256(payload)[:16] payload, payload = zstd(msgpack(value)).

    A `salt` follows as a zstd skippable frame, which every reader skips.
    """
    payload = compressed(_encoder.encode(value))
    if salt:
        payload += struct.pack("<II", _SKIPPABLE, len(salt)) + salt
    return b"".join((_MAGIC, kind, bytes([VERSION]), hashlib.sha256(payload).digest()[:16], payload))


def kind_of(data: bytes) -> bytes:
    """Return the kind of a framed object, unverified; b"" for what is none."""
    return data[3:4] if data[:3] == _MAGIC else b""


def decode(kind: bytes, data: bytes, decoder: msgspec.msgpack.Decoder[T], key: str) -> T:
    """Verify and decode a framed object; `Corrupt` names `key` and says what is wrong."""
    if len(data) < _HEADER or data[:3] != _MAGIC:
        raise Corrupt(f"{key}: not a fanout object (bad magic or truncated to {len(data)} bytes)")
    if data[3:4] != kind:
        raise Corrupt(f"{key}: holds an object of kind {data[3:4]!r} where {kind!r} belongs")
    if data[4] != VERSION:
        raise Corrupt(f"{key}: format version {data[4]} is unknown; this fanout reads version {VERSION}")
    payload = memoryview(data)[_HEADER:]
    if hashlib.sha256(payload).digest()[:16] != data[5:_HEADER]:
        raise Corrupt(f"{key}: checksum mismatch")
    try:
        raw = decompressed(payload, _MAX_RAW)
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise Corrupt(f"{key}: holds what this fanout does not know, as from a newer one ({error})") from error
    except (zstandard.ZstdError, msgspec.DecodeError) as error:
        raise Corrupt(f"{key}: cannot be decoded ({error})") from error
