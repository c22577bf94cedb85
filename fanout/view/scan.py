"""Scan files: the contents of many files of a tree in one local file, for searching them without opening each.

Owns their format, and finding which file an offset lies in; scan_write.py writes them. Knows nothing of patterns.

    data    for each file, in byte order of paths: its bytes, then one newline that is not its own
    table   where each file starts, its path, its content's hash, and what searching it has to know (flags)

The newline keeps any line from crossing into the next file. Where the file ends in a newline itself it makes one line
too many, at `end`, which `row_at` gives away. A UTF-8 byte order mark is overwritten with newlines, for the same
effect: the file starts after it. What a UTF-16 mark announces follows after all files, decoded. The layout is known
from the tree alone (but for the last), so that runs can be written in any order. Long holes are kept short.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from fanout.format.pack import is_text_pack
from fanout.format.tree import FILE, Node
from fanout.view import words

__all__ = [
    "DECODED",
    "HAS_NUL",
    "MARK",
    "MARK_BYTES",
    "VERSION",
    "Copy",
    "Scan",
    "Stopped",
    "Table",
    "is_binary",
    "open_scan",
    "searchable",
]

VERSION = 1

#: Flags of a file: it holds a NUL byte; its bytes start with a UTF-8 mark; with a UTF-16 mark, so that what is to be
#: searched is its decoded form.
HAS_NUL, MARK, DECODED = 1, 2, 4
MARK_BYTES = b"\xef\xbb\xbf"
_COUNTS = 8


class Stopped(Exception):
    """Building was stopped by whoever wanted it."""


class Table(msgspec.Struct, frozen=True, array_like=True):
    """What lies beside the bytes of a scan file."""

    version: int
    starts: bytes
    path_ends: bytes
    paths: bytes
    flags: bytes
    hashes: bytes
    decoded: tuple[int, ...]
    left_out: int


class Scan:
    """An opened scan file. Rows are its files in order, then the decoded forms; immutable."""

    def __init__(self, data_path: str, table: Table) -> None:
        self.data_path = data_path
        self.files = len(table.flags)
        self._starts = array("Q", table.starts)  # one more than rows: where the next would start
        self._path_ends = array("Q", table.path_ends)
        self._paths = table.paths
        self._flags = table.flags
        self._hashes = table.hashes
        self._decoded = table.decoded
        self._counts: dict[object, int] = {}
        #: How many files whoever made this left to another scan file.
        self.left_out = table.left_out

    @property
    def size(self) -> int:
        """Bytes of the data file."""
        return self._starts[-1]

    @property
    def places_path(self) -> str:
        """Where the places of its words are, if they are there."""
        return self.data_path.removesuffix("data") + words.PLACES

    @property
    def in_order(self) -> bool:
        """Whether rows are in order of paths."""
        return not self._decoded

    def row_at(self, offset: int) -> int:
        """Return the row whose file (or newline after it) holds this offset."""
        return bisect_right(self._starts, offset) - 1

    def file_of(self, row: int) -> int:
        """Return the number of the file that a row stands for."""
        return row if row < self.files else self._decoded[row - self.files]

    def path(self, row: int) -> bytes:
        number = self.file_of(row)
        return self._paths[self._path_ends[number - 1] if number else 0 : self._path_ends[number]]

    def span(self, row: int) -> tuple[int, int]:
        """Return where the bytes to search of a row start and end; nothing where its decoded form is another row."""
        start, end = self._starts[row], self._starts[row + 1] - 1
        if row < self.files:
            if self._flags[row] & DECODED:
                return end, end
            if self._flags[row] & MARK:
                return start + len(MARK_BYTES), end
        return start, end

    def next_start(self, row: int) -> int:
        """Return where the next row starts."""
        return self._starts[row + 1]

    def has_nul(self, row: int) -> bool:
        """Whether what is searched of a row holds a NUL byte."""
        return bool(self._flags[self.file_of(row)] & HAS_NUL)

    def flags_of(self, number: int) -> int:
        return self._flags[number]

    def extent(self, first: int, end: int) -> tuple[int, int]:
        """Return which bytes of the data file the files first <= i < end have, newlines included."""
        return self._starts[first], self._starts[end]

    def hash_of(self, number: int) -> bytes:
        """Return the content's hash of a file, as `content_hash` has it."""
        return self._hashes[32 * number : 32 * number + 32]

    def first_from(self, path: bytes) -> int:
        """Return the number of the first file whose path is not below `path` in byte order."""
        return bisect_left(range(self.files), path, key=self.path)

    def counted(self, key: object, count: Callable[[], int]) -> int:
        """Return a number that depends on the paths alone, remembering the last few by their keys."""
        known = self._counts.get(key)
        if known is None:
            while len(self._counts) >= _COUNTS:
                self._counts.pop(next(iter(self._counts)), None)
            known = self._counts[key] = count()
        return known

    def find(self, path: bytes) -> int | None:
        """Return the number of the file of this path."""
        number = self.first_from(path)
        return number if number < self.files and self.path(number) == path else None


class Copy(NamedTuple):
    """A file whose bytes another scan file on this host has already."""

    scan: Scan
    number: int


def searchable(node: Node | None) -> bool:
    """Whether a node has lines to search."""
    return node is not None and node.kind == FILE and node.size > 0


def is_binary(node: Node) -> bool:
    """Whether a file counts as binary by where its beginning is stored: a NUL in its first 8 KiB."""
    return bool(node.data) and not is_text_pack(node.data[0].pack)


def open_scan(directory: str) -> Scan:
    """Open what `write_scan` wrote; FileNotFoundError where it is not there (any more)."""
    with open(f"{directory}/table", "rb") as file:
        table = msgspec.msgpack.decode(file.read(), type=Table)
    return Scan(f"{directory}/data", table)
