"""Packs: many small runs of file bytes in one object, each readable by range.

Owns frame encoding, pack layout and pack ids. Text and binary go into separate packs, told apart by the id
alone, so that a search reads only text.

    pack   = "FPK1" frame* footer sha256(footer)[:16] u32le(len(footer)) "FPKE"
    frame  = raw bytes, or one zstd frame where that is smaller
    footer = zstd(msgpack([[offset, stored, raw, sha256], ...]))
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import msgspec
import zstandard

from fanout.errors import Corrupt
from fanout.format import contexts
from fanout.format.contexts import compressed, decompressed
from fanout.format.tree import Ref

__all__ = [
    "ID_BYTES",
    "TRAILER_BYTES",
    "PackBuilder",
    "decode_footer",
    "decode_frame",
    "encode_frame",
    "encode_frames",
    "footer_bytes",
    "is_text",
    "is_text_pack",
    "pack_id",
]

ID_BYTES = 16
_HEAD = b"FPK1"
_TAIL = b"FPKE"
#: How many bytes at the end of a pack say where its footer begins.
TRAILER_BYTES = _TRAILER = 16 + 4 + len(_TAIL)
_SNIFF = 8192
_footer_decoder = msgspec.msgpack.Decoder(tuple[tuple[int, int, int, bytes], ...])


#: Whether this build of the library takes many frames in one call (its C extension does).
_BATCHES = "multi_compress_to_buffer" in zstandard.backend_features


def is_text(head: bytes) -> bool:
    """Whether a file that begins with `head` counts as text: no NUL in its first 8 KiB, as grep and git decide."""
    return b"\0" not in head[:_SNIFF]


def pack_id(random: bytes, text: bool) -> bytes:
    """Make a pack id from 16 random bytes: the lowest bit of the first says whether the pack holds text."""
    return bytes([random[0] & 0xFE | text]) + random[1:ID_BYTES]


def is_text_pack(identity: bytes) -> bool:
    """Whether the pack of this id holds text."""
    return bool(identity) and bool(identity[0] & 1)


def encode_frame(raw: bytes) -> tuple[bytes, bytes]:
    """Return (frame, sha256 of raw). The frame is `raw` itself unless zstd makes it smaller. Thread safe."""
    packed = compressed(raw) if len(raw) > 32 else raw
    return (packed if len(packed) < len(raw) else raw), hashlib.sha256(raw).digest()


def encode_frames(raws: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """Return `encode_frame` of each: one call into zstd for all, so that other threads run meanwhile."""
    if not _BATCHES or len(raws) < 2:
        return [encode_frame(raw) for raw in raws]
    worth = [raw for raw in raws if len(raw) > 32]
    packed = iter(_compressed_all(worth) if worth else ())
    frames: list[tuple[bytes, bytes]] = []
    for raw in raws:
        frame = next(packed) if len(raw) > 32 else raw
        frames.append((frame if len(frame) < len(raw) else raw, hashlib.sha256(raw).digest()))
    return frames


def decode_frame(frame: bytes | memoryview, ref: Ref, where: str) -> bytes:
    """Return the raw bytes of the whole frame of `ref`, verified; `Corrupt` names `where`."""
    if len(frame) != ref.stored:
        raise Corrupt(f"{where}: {len(frame)} bytes at offset {ref.offset} where {ref.stored} belong")
    try:
        if ref.stored == ref.raw:
            raw = bytes(frame)
        elif zstandard.frame_content_size(frame) != ref.raw:  # before a damaged size is allocated
            raise Corrupt(f"{where}: the frame at offset {ref.offset} is not one of {ref.raw} bytes")
        else:
            raw = decompressed(frame)
    except zstandard.ZstdError as error:
        raise Corrupt(f"{where}: the frame at offset {ref.offset} cannot be decompressed ({error})") from error
    if len(raw) != ref.raw or hashlib.sha256(raw).digest() != ref.hash:
        raise Corrupt(f"{where}: the frame at offset {ref.offset} does not match its hash")
    return raw


def _compressed_all(raws: list[bytes]) -> list[bytes]:
    context = contexts.compressor()
    segments = context.multi_compress_to_buffer(raws, threads=1)  # type: ignore[arg-type]
    contexts.give_back(context)
    return [segments[place].tobytes() for place in range(len(segments))]


class PackBuilder:
    """Collects frames of one pack in memory."""

    def __init__(self, identity: bytes) -> None:
        self.id = identity
        self._parts: list[bytes] = [_HEAD]
        self._index: list[tuple[int, int, int, bytes]] = []
        self.size = len(_HEAD)

    def add(self, frame: bytes, raw_length: int, digest: bytes) -> Ref:
        """Append an encoded frame; returns the reference to it."""
        offset = self.size
        self._parts.append(frame)
        self.size += len(frame)
        self._index.append((offset, len(frame), raw_length, digest))
        return Ref(self.id, offset, len(frame), raw_length, digest)

    def __len__(self) -> int:
        return len(self._index)

    def finish(self) -> bytes:
        """Return the pack's bytes."""
        footer = compressed(msgspec.msgpack.encode(self._index))
        check = hashlib.sha256(footer).digest()[:16]
        return b"".join((*self._parts, footer, check, struct.pack("<I", len(footer)), _TAIL))


def footer_bytes(trailer: bytes) -> int:
    """Return how many bytes at the end of a pack hold its index, from the last `TRAILER_BYTES` of them."""
    return int.from_bytes(trailer[-8:-4], "little") + _TRAILER


def decode_footer(pack: bytes, where: str) -> tuple[tuple[int, int, int, bytes], ...]:
    """Return the frames of a whole pack as (offset, stored, raw, sha256); `Corrupt` names `where`."""
    if len(pack) < len(_HEAD) + _TRAILER or pack[:4] != _HEAD or pack[-4:] != _TAIL:
        raise Corrupt(f"{where}: not a pack, or truncated to {len(pack)} bytes")
    (length,) = struct.unpack("<I", pack[-8:-4])
    if length > len(pack) - len(_HEAD) - _TRAILER:
        raise Corrupt(f"{where}: the footer claims {length} bytes")
    footer = pack[-_TRAILER - length : -_TRAILER]
    if hashlib.sha256(footer).digest()[:16] != pack[-_TRAILER:-8]:
        raise Corrupt(f"{where}: the footer does not match its checksum")
    try:
        return _footer_decoder.decode(decompressed(footer, 1 << 28))
    except (zstandard.ZstdError, msgspec.DecodeError) as error:
        raise Corrupt(f"{where}: the footer cannot be decoded ({error})") from error
