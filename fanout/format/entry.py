"""Log entries and the small create-only records: disks, branches, checkpoints.

Owns their values and encoding. An entry holds effects, already rebased: replaying one is a plain update of a
map from path to node and never needs another object.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from fanout.format import envelope
from fanout.format.lock import LockOp
from fanout.format.tree import Node

__all__ = [
    "ADDED",
    "ATTRIBUTES",
    "DELETED",
    "MODIFIED",
    "TOUCHED",
    "BranchRecord",
    "CheckpointRecord",
    "Commit",
    "DiskRecord",
    "Effect",
    "Entry",
    "Put",
    "Remove",
    "decode_branch",
    "decode_checkpoint",
    "decode_disk",
    "decode_entry",
    "encode_branch",
    "encode_checkpoint",
    "encode_disk",
    "encode_entry",
    "encode_seal",
    "is_seal",
]

#: What a Put did to its path: a new name, new content, new attributes, or only a directory's mtime.
ADDED: Literal[0] = 0
MODIFIED: Literal[1] = 1
ATTRIBUTES: Literal[2] = 2
TOUCHED: Literal[3] = 3
#: What a Remove is to a reader of the history; never stored.
DELETED: Literal[4] = 4


class Put(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """`path` now holds `node`, whatever was there. `change` says what that is to a reader of the history."""

    path: bytes
    node: Node
    change: Literal[0, 1, 2, 3] = 0


class Remove(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """`path` is gone. A removed directory's own entries are removed by effects of their own."""

    path: bytes


Effect = Put | Remove


class Commit(msgspec.Struct, frozen=True, array_like=True):
    """What one exec, upload or object call did: its effects apply in order.

    `author` says who asked, `exec_id` which call (empty for plain disk calls), `base_seq` what it had seen.
    A merge names the branch and sequence number it brought in (`merged_uuid`, `merged_seq`). `locks` are the locks
    it took, renewed, released or broke.
    """

    time_ns: int
    author: str
    message: str
    exec_id: str
    base_seq: int
    effects: tuple[Effect, ...]
    merged_uuid: str = ""
    merged_seq: int = 0
    locks: tuple[LockOp, ...] = ()


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One object of the log: one or more commits that became durable together.

    `write_id` is random and lets a writer recognise its own entry after a lost answer. `blobs` are the small
    packs carried inside, by pack id.
    """

    write_id: bytes
    seq: int
    time_ns: int
    commits: tuple[Commit, ...]
    blobs: dict[bytes, bytes] = {}


class DiskRecord(msgspec.Struct, frozen=True, array_like=True):
    """Identity of a disk. `capabilities` names what the store was probed to hold (`create_only`).

    `main` is the uuid of the branch it was made with, so that opening that one needs no further object.
    """

    id: str
    name: str
    created_ns: int
    capabilities: tuple[str, ...]
    main: str


class BranchRecord(msgspec.Struct, frozen=True, array_like=True):
    """A branch and where it comes from: its parent's (uuid, seq) first, then the parent's own, to the root.

    A branch starts as its parent was at that seq, and its log goes on from there: its first entry is seq + 1.
    The whole lineage is copied here, so that opening a branch needs no other record. A disk's first has none.
    Its sequence numbers never grow from one to the next: no ancestor counts beyond where its child began.
    """

    uuid: str
    lineage: tuple[tuple[str, int], ...]
    created_ns: int


class CheckpointRecord(msgspec.Struct, frozen=True, array_like=True):
    """A named immutable point. `branch` is the branch's name when it was taken."""

    branch_uuid: str
    seq: int
    created_ns: int
    branch: str


_entry_decoder = msgspec.msgpack.Decoder(Entry)
_disk_decoder = msgspec.msgpack.Decoder(DiskRecord)
_branch_decoder = msgspec.msgpack.Decoder(BranchRecord)
_checkpoint_decoder = msgspec.msgpack.Decoder(CheckpointRecord)


def encode_entry(entry: Entry) -> bytes:
    return envelope.encode(envelope.ENTRY, entry)


def decode_entry(data: bytes, key: str) -> Entry:
    """Decode a log entry; `Corrupt` names `key`."""
    return envelope.decode(envelope.ENTRY, data, _entry_decoder, key)


def encode_seal(write_id: bytes) -> bytes:
    """Encode what stands in a log where nothing may be committed any more: its disk was deleted."""
    return envelope.encode(envelope.SEAL, write_id)


def is_seal(data: bytes) -> bool:
    return envelope.kind_of(data) == envelope.SEAL


def encode_disk(record: DiskRecord) -> bytes:
    return envelope.encode(envelope.DISK, record)


def decode_disk(data: bytes, key: str) -> DiskRecord:
    """Decode a disk record; `Corrupt` names `key`."""
    return envelope.decode(envelope.DISK, data, _disk_decoder, key)


def encode_branch(record: BranchRecord) -> bytes:
    return envelope.encode(envelope.BRANCH, record)


def decode_branch(data: bytes, key: str) -> BranchRecord:
    """Decode a branch record; `Corrupt` names `key`."""
    return envelope.decode(envelope.BRANCH, data, _branch_decoder, key)


def encode_checkpoint(record: CheckpointRecord) -> bytes:
    return envelope.encode(envelope.CHECKPOINT, record)


def decode_checkpoint(data: bytes, key: str) -> CheckpointRecord:
    """Decode a checkpoint record; `Corrupt` names `key`."""
    return envelope.decode(envelope.CHECKPOINT, data, _checkpoint_decoder, key)
