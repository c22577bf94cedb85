"""Calls that were given an idempotency key: who runs one, and what came of it.

Owns their values and encoding.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from fanout.format import envelope

__all__ = ["ClaimRecord", "EndRecord", "decode_claim", "decode_end", "encode_claim", "encode_end"]


class ClaimRecord(msgspec.Struct, frozen=True, array_like=True):
    """One process's claim to run a call. `asked` is a hash of what was asked, `exec_id` the exec it will be.

    `lines` are the branches it may commit to: (disk id, branch name, a sequence number it had reached before).
    """

    asked: bytes
    exec_id: str
    lines: tuple[tuple[str, str, int], ...]
    created_ns: int


class EndRecord(msgspec.Struct, frozen=True, array_like=True):
    """What came of a claim. `result`: a run, `error`: an error that tells of one, both as JSON in `payload`.

    `void`: nothing was run to its end or committed, and the next call may. `lost`: it committed, and died before it
    could say more; `payload` is a sentence.
    """

    kind: Literal["result", "error", "void", "lost"]
    payload: bytes
    exec_id: str


_claims = msgspec.msgpack.Decoder(ClaimRecord)
_ends = msgspec.msgpack.Decoder(EndRecord)


def encode_claim(record: ClaimRecord) -> bytes:
    return envelope.encode(envelope.CLAIM, record)


def decode_claim(data: bytes, key: str) -> ClaimRecord:
    return envelope.decode(envelope.CLAIM, data, _claims, key)


def encode_end(record: EndRecord) -> bytes:
    return envelope.encode(envelope.OUTCOME, record)


def decode_end(data: bytes, key: str) -> EndRecord:
    return envelope.decode(envelope.OUTCOME, data, _ends, key)
