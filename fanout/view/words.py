"""The words of scan files: which of them, and where in them, a search may skip as no word there can be part of a match.

Owns the two files beside a scan file, and the program that writes them:

    words   every run of word bytes in the scan file that is three long or more, once, each on a line, in order
    places  in which blocks of the scan file each word is (`BlockPlaces` reads it):
            u32 version, blocks, words, 0; u64 where each block starts, and the end; u32 where each word's line starts;
            u32 the first of each word's entries, and the end; u16 entries: numbers of blocks

A block begins where a line does. Word bytes are ASCII letters, digits and `_`, and in text whatever is not ASCII.
Nothing else may be imported here: the program runs in an interpreter of its own, as little in the way as possible, and
costs about 20 ns for each byte.
"""

from __future__ import annotations

import mmap
import os
import sys
from array import array
from collections import defaultdict

__all__ = ["NAME", "PLACES", "PROGRAM", "SHORTEST", "VERSION", "words_of", "write_words"]

NAME = "words"
PLACES = "places"
PROGRAM = __file__
VERSION = 1
#: Words shorter than this are left out: they would rule nothing out.
SHORTEST = 3
#: Beyond this share of the scan file its words are not worth having.
_MAX_SHARE = 0.5
#: How long a block is, to the end of its last line; longer where there would be more blocks than entries can name.
_BLOCK = 32 << 10
_MAX_BLOCKS = 60_000
_ASCII = frozenset(b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz")


def _table(binary: bool) -> bytes:
    return bytes(byte if byte in _ASCII or (byte >= 128 and not binary) else 32 for byte in range(256))


def words_of(data: bytes, binary: bool) -> set[bytes]:
    """Return the words of the contents of a file."""
    return {word for word in data.translate(_table(binary)).split() if len(word) >= SHORTEST}


def write_words(directory: str, binary: bool) -> bool:
    """Write the words of the scan file in a directory, if they are not there; False where there was no need.

    An empty file of words says that they are not worth having.
    """
    if os.path.exists(f"{directory}/{PLACES}"):
        return False
    with open(f"{directory}/data", "rb") as file:
        size = os.fstat(file.fileno()).st_size
        starts, places = _indexed(file.fileno(), size, _table(binary))
    words = sorted(places)
    joined = b"\n".join(words) + b"\n" if words else b""
    if len(joined) > _MAX_SHARE * size + 100:
        joined, words, starts = b"", [], array("Q", [0])
    _put(f"{directory}/{NAME}", joined)
    _put(f"{directory}/{PLACES}", _encoded(starts, words, places))
    return True


def _put(target: str, data: bytes) -> None:
    beside = f"{target}.{os.getpid()}"
    with open(beside, "wb") as file:
        file.write(data)
    os.rename(beside, target)


def _indexed(fd: int, size: int, table: bytes) -> tuple[array[int], dict[bytes, list[int]]]:
    """Return where blocks start, and in which each word is."""
    starts = array("Q", [0])
    places: defaultdict[bytes, list[int]] = defaultdict(list)
    step = max(_BLOCK, size // _MAX_BLOCKS)
    if not size:
        return starts, places
    with mmap.mmap(fd, size, access=mmap.ACCESS_READ) as data:
        start = 0
        while start < size:
            end = data.find(b"\n", min(start + step, size) - 1) + 1 or size
            block = len(starts) - 1
            for word in set(data[start:end].translate(table).split()):
                if len(word) >= SHORTEST:
                    places[word].append(block)
            starts.append(end)
            start = end
    return starts, places


def _encoded(starts: array[int], words: list[bytes], places: dict[bytes, list[int]]) -> bytes:
    lines, firsts, entries = array("I"), array("I", [0]), array("H")
    offset = 0
    for word in words:
        lines.append(offset)
        offset += len(word) + 1
        entries.extend(places[word])
        firsts.append(len(entries))
    head = array("I", [VERSION, len(starts) - 1, len(words), 0])
    return b"".join(part.tobytes() for part in (head, starts, lines, firsts, entries))


def main(arguments: list[str]) -> None:
    """Write the words of each directory named; what cannot be read or written is passed over."""
    os.nice(19)
    for argument in arguments:
        kind, _, directory = argument.partition(":")
        try:
            write_words(directory, kind == "binary")
        except (OSError, OverflowError):
            continue


if __name__ == "__main__":
    main(sys.argv[1:])
