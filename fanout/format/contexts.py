"""Compression contexts, kept: making one costs more than using it on a few kilobytes.

Owns lending them. A list's pop and append are atomic, so any number of threads may share it; one whose use failed is
not given back.
"""

from __future__ import annotations

import zstandard

__all__ = ["LEVEL", "compressed", "compressor", "decompressed", "give_back"]

LEVEL = 1

_compressors: list[zstandard.ZstdCompressor] = []
_decompressors: list[zstandard.ZstdDecompressor] = []


def compressor() -> zstandard.ZstdCompressor:
    """Lend a context; `give_back` it after use."""
    try:
        return _compressors.pop()
    except IndexError:
        return zstandard.ZstdCompressor(level=LEVEL)


def give_back(context: zstandard.ZstdCompressor) -> None:
    _compressors.append(context)


def compressed(raw: bytes) -> bytes:
    """Return one zstd frame of `raw`."""
    context = compressor()
    packed = context.compress(raw)
    _compressors.append(context)
    return packed


def decompressed(frame: bytes | memoryview, most: int = 0) -> bytes:
    """Return the content of one zstd frame, of at most `most` bytes if it does not say how long it is."""
    try:
        context = _decompressors.pop()
    except IndexError:
        context = zstandard.ZstdDecompressor()
    raw = context.decompress(frame, max_output_size=most)
    _decompressors.append(context)
    return raw
