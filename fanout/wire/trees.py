"""Trees on the wire: nodes and inline packs in frames.

Owns framing and batching. Pure; whether nodes make a tree is for whoever uses them to see.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Literal, TypeVar, get_args

import msgspec

from fanout.errors import Corrupt
from fanout.format.tree import Node
from fanout.wire.terms import BEAT

__all__ = [
    "MAX_FRAME_BYTES",
    "MAX_PATHS",
    "MAX_PATHS_BYTES",
    "Frames",
    "Header",
    "Looking",
    "batches",
    "decode_header",
    "decode_looking",
    "decode_nodes",
    "decode_paths",
    "encode_header",
    "encode_nodes",
    "encode_paths",
    "frame",
]

#: The longest frame, and so the largest inline pack or batch of nodes: that of one file of about 4 TiB.
MAX_FRAME_BYTES = 64 << 20
#: How many paths are looked up in one call, and how many bytes of them.
MAX_PATHS, MAX_PATHS_BYTES = 10_000, 8 << 20
#: Nodes and runs of files that go together.
_BATCH_WEIGHT = 1024
#: What a frame holds: a header, an inline pack, nodes with their paths, the end, an error as JSON.
Kind = Literal[b"H", b"B", b"N", b"E", b"X"]
_KINDS = frozenset(get_args(Kind))
_HEAD = struct.Struct("<cI")


class Header(msgspec.Struct, frozen=True):
    """What begins a tree. `seq` is the commit it is of, `node` what is at `path` itself (None: nothing)."""

    seq: int
    path: bytes = b""
    node: Node | None = None


class Looking(msgspec.Struct, frozen=True):
    """The answer to a lookup: the commit it was done at, and the paths that are there with their nodes."""

    seq: int
    nodes: tuple[tuple[bytes, Node], ...]


_nodes = msgspec.msgpack.Decoder(tuple[tuple[bytes, Node], ...])
_paths = msgspec.msgpack.Decoder(tuple[bytes, ...])
_header = msgspec.msgpack.Decoder(Header)
_looking = msgspec.msgpack.Decoder(Looking)
_encoder = msgspec.msgpack.Encoder()


def frame(kind: Kind, payload: bytes = b"") -> bytes:
    """Return one frame: a letter, the payload's length (u32, little endian), the payload."""
    return _HEAD.pack(kind, len(payload)) + payload


class Frames:
    """Cuts a stream of bytes into frames. Heartbeats between them are dropped; `Corrupt` for what is no frame."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Take the next bytes and yield (kind, payload) of the frames that are complete now."""
        self._held += data
        at = 0
        while True:
            while self._held[at : at + 1] == BEAT:
                at += 1
            if len(self._held) - at < _HEAD.size:
                break
            kind, length = _HEAD.unpack_from(self._held, at)
            if kind not in _KINDS or length > MAX_FRAME_BYTES:
                raise Corrupt(f"{self._where}: no frame of a tree begins with {bytes(self._held[at : at + 5])!r}")
            if len(self._held) - at - _HEAD.size < length:
                break
            at += _HEAD.size + length
            yield kind, bytes(self._held[at - length : at])
        del self._held[:at]


def batches(nodes: Iterable[tuple[bytes, Node]]) -> Iterator[list[tuple[bytes, Node]]]:
    """Cut nodes into batches that fit into a frame: some hundred files, fewer of large ones."""
    batch: list[tuple[bytes, Node]] = []
    weight = 0
    for item in nodes:
        batch.append(item)
        weight += 1 + len(item[1].data)
        if weight >= _BATCH_WEIGHT:
            yield batch
            batch, weight = [], 0
    if batch:
        yield batch


def encode_nodes(nodes: Iterable[tuple[bytes, Node]]) -> bytes:
    """Return a batch of nodes with their paths."""
    return _encoder.encode(tuple(nodes))


def decode_nodes(data: bytes, where: str) -> tuple[tuple[bytes, Node], ...]:
    """Return a batch of nodes; `Corrupt` names `where`. Whether they make a tree is for whoever uses them to see."""
    return _decoded(_nodes, data, where)


def encode_paths(paths: Iterable[bytes]) -> bytes:
    """Return a list of paths."""
    return _encoder.encode(tuple(paths))


def decode_paths(data: bytes, where: str) -> tuple[bytes, ...]:
    """Return a list of paths; `Corrupt` names `where`."""
    return _decoded(_paths, data, where)


def encode_header(header: Header | Looking) -> bytes:
    return _encoder.encode(header)


def decode_header(data: bytes, where: str) -> Header:
    return _decoded(_header, data, where)


def decode_looking(data: bytes, where: str) -> Looking:
    return _decoded(_looking, data, where)


D = TypeVar("D")


def _decoded(decoder: msgspec.msgpack.Decoder[D], data: bytes, where: str) -> D:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Corrupt(f"{where}: {error}") from None
