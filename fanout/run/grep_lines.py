"""What of a search's raw findings is kept and shown: the first in order of paths, their lines read and cut.

Owns order, the bound on results and everything about a line's text. Knows nothing of who scans.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from fanout.disk.paths import shown
from fanout.model import GrepMatch
from fanout.run.grep_query import Query
from fanout.view.scan import Scan

__all__ = ["Collector", "Found", "read_lines"]


_STEP = 1 << 20


class Found(NamedTuple):
    """A matching line, or with output "count" and "files" a file (`place` 0). Sorts by path, then place."""

    path: bytes
    place: int
    match: GrepMatch


class Collector:
    """Keeps the first `limit` of what it is given, whoever comes in whatever order, and one more. Thread safe.

    `cut` is a path beyond which nothing is wanted any more, or None: `limit` and one more are known up to there.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._found: list[Found] = []
        self._binary: set[bytes] = set()
        self._lock = threading.Lock()
        self.cut: bytes | None = None

    def add(self, found: Iterable[Found]) -> None:
        """Take findings of one shard."""
        more = list(found)
        if not more:
            return
        with self._lock:
            self._found += more
            self._found.sort(key=_order)
            del self._found[self.limit + 1 :]
            if len(self._found) > self.limit:
                self.cut = self._found[-1].path

    def add_binary(self, paths: Iterable[bytes]) -> None:
        """Take the names of binary files that match."""
        with self._lock:
            self._binary.update(paths)

    @property
    def overflowed(self) -> bool:
        """Whether there is more than is kept."""
        return self.cut is not None

    def matches(self) -> tuple[GrepMatch, ...]:
        """Return the first `limit`."""
        return tuple(found.match for found in self._found[: self.limit])

    def binary_files(self) -> list[str]:
        """Return the binary files that match, as far as the matches go."""
        return [shown(path) for path in sorted(self._binary) if self.cut is None or path <= self.cut]


def _order(found: Found) -> tuple[bytes, int]:
    return found.path, found.place


def read_lines(scan: Scan, hits: Iterable[tuple[int, list[int]]], query: Query) -> Iterator[Found]:
    """Read the matching lines of some rows of a scan file: (row, offsets of lines, ascending)."""
    with open(scan.data_path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for row, offsets in hits:
            yield from _lines_of(data, scan, row, offsets, query)


def _lines_of(data: mmap.mmap, scan: Scan, row: int, offsets: list[int], query: Query) -> Iterator[Found]:
    path = scan.path(row)
    file = shown(path)
    start, end = scan.span(row)
    line, at = 1, start
    for offset in offsets:
        line += _newlines(data, at, offset)
        at = offset
        stop = _line_end(data, offset, end)
        text, raw, truncated = _text(data[offset : min(stop, offset + query.max_line_bytes + 4)], stop - offset, query)
        match = GrepMatch.model_construct(
            file=file,
            line=line,
            text=text,
            raw=raw,
            truncated=truncated,
            before=_before(data, start, offset, query) if query.before else (),
            after=_after(data, stop, end, query) if query.after else (),
            count=None,
        )
        yield Found(path, line, match)


def _newlines(data: mmap.mmap, start: int, end: int) -> int:
    """Count newlines a piece at a time: what is counted is copied first."""
    return sum(data[at : min(at + _STEP, end)].count(b"\n") for at in range(start, end, _STEP))


def _line_end(data: mmap.mmap, start: int, end: int) -> int:
    stop = data.find(b"\n", start, end)
    return end if stop < 0 else stop


def _text(line: bytes, length: int, query: Query) -> tuple[str, bytes | None, bool]:
    """Return a line as text, its exact bytes where the text is not them, and whether it was cut."""
    truncated = length > query.max_line_bytes
    if truncated:
        cut = query.max_line_bytes
        while cut > 0 and cut > query.max_line_bytes - 4 and line[cut] & 0xC0 == 0x80:
            cut -= 1  # not in the middle of a character
        line = line[: cut if cut and line[cut] & 0xC0 != 0x80 else query.max_line_bytes]
    try:
        return line.decode(), None, truncated
    except UnicodeDecodeError:
        return line.decode("utf-8", "replace"), line, truncated


def _before(data: mmap.mmap, start: int, offset: int, query: Query) -> tuple[str, ...]:
    lines: list[str] = []
    while offset > start and len(lines) < query.before:
        begin = data.rfind(b"\n", start, offset - 1) + 1 or start
        lines.append(_shown_line(data, begin, offset - 1, query))
        offset = begin
    return tuple(reversed(lines))


def _after(data: mmap.mmap, stop: int, end: int, query: Query) -> tuple[str, ...]:
    lines: list[str] = []
    while stop + 1 < end and len(lines) < query.after:
        begin = stop + 1
        stop = _line_end(data, begin, end)
        lines.append(_shown_line(data, begin, stop, query))
    return tuple(lines)


def _shown_line(data: mmap.mmap, start: int, stop: int, query: Query) -> str:
    return _text(data[start : min(stop, start + query.max_line_bytes + 4)], stop - start, query)[0]
