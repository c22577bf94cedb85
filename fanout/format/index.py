"""Index objects: the words of many pages' scan files in one object, each readable by range.

Owns their layout and what a reader believes. Derived data: a search without them finds the same, later. Knows nothing
of what words are good for.

    index  = "FIX1" frame* footer sha256(footer)[:16] u32le(len(footer)) "FIXE"
    frame  = zstd of the words of one scan file, each on a line, in byte order
    footer = zstd(msgpack([rules, [[page, kind, offset, stored, raw, sha256, files, left_out, size], ...]]))
"""

from __future__ import annotations

import hashlib
import struct

import msgspec
import zstandard

from fanout.errors import Corrupt
from fanout.format.contexts import compressed, decompressed

__all__ = [
    "BINARY",
    "MAX_RAW_BYTES",
    "RULES",
    "TEXT",
    "IndexBuilder",
    "Words",
    "compress_words",
    "decode_footer",
    "decode_words",
    "footer_bytes",
]

#: What is a word, and how a scan file is laid out, by number: a reader that goes by others ignores the object.
RULES = 1
TEXT, BINARY = 0, 1
#: Larger words of one scan file are not stored, and not believed.
MAX_RAW_BYTES = 64 << 20
_HEAD = b"FIX1"
_TAIL = b"FIXE"
_TRAILER = 16 + 4 + len(_TAIL)
_MAX_FOOTER = 64 << 20
#: Written once in the background and read by every host: worth more effort than a pack.
_LEVEL = 6


class Words(msgspec.Struct, frozen=True, array_like=True):
    """One frame: where the words of a page's text or binary scan file are, and what else is known of that file.

    `hash` is of the frame as stored. `files`: how many the scan file has, `left_out`: how many it leaves to that of
    the other kind, `size`: its bytes.
    """

    page: bytes
    kind: int
    offset: int
    stored: int
    raw: int
    hash: bytes
    files: int
    left_out: int
    size: int


class _Footer(msgspec.Struct, frozen=True, array_like=True):
    rules: int
    frames: tuple[Words, ...]


_decoder = msgspec.msgpack.Decoder(_Footer)
_rules_decoder = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])


def compress_words(raw: bytes) -> bytes:
    """Return the frame of some words."""
    return zstandard.ZstdCompressor(level=_LEVEL).compress(raw)


class IndexBuilder:
    """Collects the frames of one index object in memory."""

    def __init__(self) -> None:
        self._parts: list[bytes] = [_HEAD]
        self.frames: list[Words] = []
        self.size = len(_HEAD)

    def add(self, frame: bytes, about: Words) -> None:
        """Append a frame; of `about` its place and hash are those it gets here."""
        digest = hashlib.sha256(frame).digest()
        self.frames.append(msgspec.structs.replace(about, offset=self.size, stored=len(frame), hash=digest))
        self._parts.append(frame)
        self.size += len(frame)

    def finish(self) -> bytes:
        """Return the object's bytes."""
        footer = compressed(msgspec.msgpack.encode(_Footer(RULES, tuple(self.frames))))
        check = hashlib.sha256(footer).digest()[:16]
        return b"".join((*self._parts, footer, check, struct.pack("<I", len(footer)), _TAIL))


def footer_bytes(end: bytes, where: str) -> int:
    """Return how many bytes at the end of an index object hold its footer; `Corrupt` for what is no such end."""
    if len(end) < _TRAILER or end[-4:] != _TAIL:
        raise Corrupt(f"{where}: not an index object, or truncated")
    return int.from_bytes(end[-8:-4], "little") + _TRAILER


def decode_footer(end: bytes, size: int, where: str) -> tuple[Words, ...]:
    """Return the frames of an object of `size` bytes that ends with `end`, its whole footer.

    None of them for one that goes by other rules. `Corrupt` names `where`.
    """
    length = footer_bytes(end, where)
    if len(end) == size and end[:4] != _HEAD:
        raise Corrupt(f"{where}: not an index object")
    if length > min(len(end), size - len(_HEAD)):
        raise Corrupt(f"{where}: the footer claims {length} bytes")
    footer = end[len(end) - length : len(end) - _TRAILER]
    if hashlib.sha256(footer).digest()[:16] != end[len(end) - _TRAILER : -8]:
        raise Corrupt(f"{where}: the footer does not match its checksum")
    try:
        value = decompressed(footer, _MAX_FOOTER)
        if _rules_decoder.decode(value)[0] != RULES:
            return ()
        frames = _decoder.decode(value).frames
    except (zstandard.ZstdError, msgspec.DecodeError) as error:
        raise Corrupt(f"{where}: the footer cannot be decoded ({error})") from error
    if any(not _is_sound(frame, size - length) for frame in frames):
        raise Corrupt(f"{where}: its footer describes a frame that it cannot hold")
    if len({(frame.page, frame.kind) for frame in frames}) < len(frames):
        raise Corrupt(f"{where}: its footer describes one scan file twice")
    return frames


def _is_sound(frame: Words, end: int) -> bool:
    return (
        len(frame.page) == 32
        and frame.kind in (TEXT, BINARY)
        and len(frame.hash) == 32
        and len(_HEAD) <= frame.offset <= end
        and 0 < frame.stored <= end - frame.offset
        and 0 <= frame.raw <= MAX_RAW_BYTES
        and min(frame.files, frame.left_out, frame.size) >= 0
    )


def decode_words(frame: bytes | memoryview, about: Words, where: str) -> bytes:
    """Return the words in a frame, verified; `Corrupt` names `where`."""
    if len(frame) != about.stored or hashlib.sha256(frame).digest() != about.hash:
        raise Corrupt(f"{where}: the frame at offset {about.offset} does not match its hash")
    try:
        if zstandard.frame_content_size(frame) != about.raw:  # before a damaged size is allocated
            raise Corrupt(f"{where}: the frame at offset {about.offset} is not one of {about.raw} bytes")
        return decompressed(frame) if about.raw else b""
    except zstandard.ZstdError as error:
        raise Corrupt(f"{where}: the frame at offset {about.offset} cannot be decompressed ({error})") from error
