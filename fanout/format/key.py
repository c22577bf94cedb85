"""API keys and the master secret, as objects of the bucket.

Owns their values and encoding. Holds no token: only what one can be recognised by.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from fanout.format import envelope

__all__ = ["KeyRecord", "MasterRecord", "Right", "decode_key", "decode_master", "encode_key", "encode_master"]

Right = Literal["read", "write", "admin"]


class KeyRecord(msgspec.Struct, frozen=True, array_like=True):
    """One API key. `token_hash` is the SHA-256 of the whole token.

    `disks` are the ids of the disks it is for, None meaning all. `expires_ns` is nanoseconds since the epoch, 0 meaning
    never. `description` is free text for people.
    """

    id: str
    token_hash: bytes
    nickname: str
    right: Right
    disks: tuple[str, ...] | None
    created_ns: int
    expires_ns: int = 0
    description: str = ""


class MasterRecord(msgspec.Struct, frozen=True, array_like=True):
    """The random secret of a bucket, from which S3 secrets and the signatures of share links are derived."""

    secret: bytes
    created_ns: int


_keys = msgspec.msgpack.Decoder(KeyRecord)
_masters = msgspec.msgpack.Decoder(MasterRecord)


def encode_key(record: KeyRecord) -> bytes:
    return envelope.encode(envelope.KEY, record)


def decode_key(data: bytes, key: str) -> KeyRecord:
    return envelope.decode(envelope.KEY, data, _keys, key)


def encode_master(record: MasterRecord) -> bytes:
    return envelope.encode(envelope.MASTER, record)


def decode_master(data: bytes, key: str) -> MasterRecord:
    return envelope.decode(envelope.MASTER, data, _masters, key)
