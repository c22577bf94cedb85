"""Scan files: the contents of many files of a tree in one local file, for searching them without opening each.

Owns their layout, building one from packs, and finding which file an offset lies in. Knows nothing of patterns.

    data    for each file, in byte order of paths: its bytes, then one newline that is not its own
    table   where each file starts, its path, its content's hash, and what searching it has to know (flags)

The newline keeps any line from crossing into the next file. Where the file ends in a newline itself it makes one line
too many, at `end`, which `row_at` gives away. A UTF-8 byte order mark is overwritten with newlines, for the same
effect: the file starts after it. What a UTF-16 mark announces follows after all files, decoded. The layout is known
from the tree alone (but for the last), so that runs can be written in any order. Long holes are kept short.
"""

from __future__ import annotations

import codecs
import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from fanout.disk.data import Reader, Slice
from fanout.errors import Corrupt
from fanout.format.pack import is_text_pack
from fanout.format.tree import FILE, HOLE, Node, Ref, content_hash
from fanout.view import words
from fanout.view.materialise import host_error

__all__ = ["DECODED", "HAS_NUL", "Copy", "Scan", "Stopped", "is_binary", "open_scan", "searchable", "write_scan"]

#: Flags of a file: it holds a NUL byte; its bytes start with a UTF-8 mark; with a UTF-16 mark, so that what is to be
#: searched is its decoded form.
HAS_NUL, MARK, DECODED = 1, 2, 4
_MARK = b"\xef\xbb\xbf"
_WIDE = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}
#: A hole longer than this is kept this long: the file is binary, and no line of it is shown.
_HOLE_BYTES = 64 << 10
_THREADS = 4
_COUNTS = 8
_STEP = 1 << 20
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_VERSION = 1


class Stopped(Exception):
    """Building was stopped by whoever wanted it."""


class _Table(msgspec.Struct, frozen=True, array_like=True):
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

    def __init__(self, data_path: str, table: _Table) -> None:
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
                return start + len(_MARK), end
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


class _Piece(NamedTuple):
    """One run of one file, and where it belongs. `ends`: the newline follows."""

    file: int
    ref: Ref
    offset: int
    begins: bool
    ends: bool


def searchable(node: Node | None) -> bool:
    """Whether a node has lines to search."""
    return node is not None and node.kind == FILE and node.size > 0


def is_binary(node: Node) -> bool:
    """Whether a file counts as binary by where its beginning is stored: a NUL in its first 8 KiB."""
    return bool(node.data) and not is_text_pack(node.data[0].pack)


def open_scan(directory: str) -> Scan:
    """Open what `write_scan` wrote; FileNotFoundError where it is not there (any more)."""
    with open(f"{directory}/table", "rb") as file:
        table = msgspec.msgpack.decode(file.read(), type=_Table)
    return Scan(f"{directory}/data", table)


def write_scan(
    directory_fd: int,
    files: Sequence[tuple[bytes, Node]],
    reader: Reader,
    blobs: Mapping[bytes, bytes],
    *,
    left_out: int = 0,
    copies: Mapping[int, Copy] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> int:
    """Write the scan file of `files` (in byte order of paths) below an open directory; returns its size.

    `copies` says of some, by their number, where on this host they are. `Corrupt` for stored bytes that are wrong,
    `Unavailable` where the host is full, `Stopped`.
    """
    try:
        build = _Build(directory_fd, files, reader, blobs, left_out, stopped)
        try:
            return build.run(copies or {})
        finally:
            os.close(build.fd)
    except OSError as error:
        raise host_error(error, "a scan file") from error


class _Build:
    def __init__(
        self,
        directory_fd: int,
        files: Sequence[tuple[bytes, Node]],
        reader: Reader,
        blobs: Mapping[bytes, bytes],
        left_out: int,
        stopped: Callable[[], bool],
    ) -> None:
        self._directory_fd = directory_fd
        self._files = files
        self._reader = reader
        self._blobs = blobs
        self._left_out = left_out
        self._stopped = stopped
        self._flags = bytearray(len(files))
        self._starts = array("Q", [0])
        for path, node in files:
            self._starts.append(self._starts[-1] + _kept_size(path, node) + 1)
        self.fd = os.open("data", _CREATE, 0o600, dir_fd=directory_fd)

    def run(self, copies: Mapping[int, Copy]) -> int:
        os.ftruncate(self.fd, self._starts[-1])
        self._copy(copies)
        frames = self._planned(copies)
        slices = self._reader.plan(pieces[0].ref for pieces in frames.values())
        if len(slices) <= 2:
            for piece in slices:
                self._write(piece, frames)
        else:
            with ThreadPoolExecutor(_THREADS, "fanout-scan") as pool:
                for done in [pool.submit(self._write, piece, frames) for piece in slices]:
                    done.result()
        self._look_at_short_beginnings()
        decoded = self._decode()
        self._write_table(decoded)
        return self._starts[-1] + self._starts[-1] // 8 + 100 * len(self._files)  # the words of it will come, perhaps

    def _planned(self, copies: Mapping[int, Copy]) -> dict[tuple[bytes, int], list[_Piece]]:
        """Group all runs by the frame they are in. What is stored nowhere is there already: zeros, and one newline."""
        frames: dict[tuple[bytes, int], list[_Piece]] = {}
        for number, (_, node) in enumerate(self._files):
            if number in copies:
                continue
            offset = self._starts[number]
            last = len(node.data) - 1
            if last < 0 or node.data[last].pack == HOLE:
                os.pwrite(self.fd, b"\n", self._starts[number + 1] - 1)
            for place, ref in enumerate(node.data):
                if ref.pack == HOLE:
                    self._flags[number] |= HAS_NUL
                    offset += min(ref.size, _HOLE_BYTES)
                    continue
                frames.setdefault((ref.pack, ref.offset), []).append(
                    _Piece(number, ref, offset, not place, place == last)
                )
                offset += ref.size
        return frames

    def _write(self, piece: Slice, frames: Mapping[tuple[bytes, int], list[_Piece]]) -> None:
        """Fetch one slice and write its runs, those that follow each other with one call."""
        if self._stopped():
            raise Stopped
        for ref, raw in self._reader.fetch(piece, self._blobs):
            nul = raw.find(b"\0") >= 0
            run: list[bytes | memoryview] = []
            began = at = -1
            view = memoryview(raw)
            for each in frames[ref.pack, ref.offset]:
                if each.ref.hash != ref.hash:
                    raise Corrupt(f"pack {ref.pack.hex()}: two files want other bytes of the frame at {ref.offset}")
                start = each.ref.skip
                data = view[start : start + each.ref.size] if each.ref.length >= 0 else view
                if each.offset != at:
                    self._put(run, began)
                    run, began = [], each.offset
                if each.begins and (raw[start] == 0xEF or raw[start] >= 0xFE):
                    data = self._marked(each.file, data)
                if nul and raw.find(b"\0", start, start + len(data)) >= 0:
                    self._flags[each.file] |= HAS_NUL
                run.append(data)
                at = each.offset + len(data)
                if each.ends:
                    run.append(b"\n")
                    at += 1
            self._put(run, began)

    def _put(self, run: list[bytes | memoryview], offset: int) -> None:
        if run:
            data = memoryview(run[0] if len(run) == 1 else b"".join(run))
            while data:
                written = os.pwrite(self.fd, data, offset)
                data, offset = data[written:], offset + written

    def _marked(self, number: int, data: memoryview) -> memoryview:
        """Take note of a byte order mark."""
        if data[:3] == _MARK:
            self._flags[number] |= MARK
            return memoryview(b"\n" * len(_MARK) + data[len(_MARK) :])
        if bytes(data[:2]) in _WIDE:
            self._flags[number] |= DECODED
        return data

    def _look_at_short_beginnings(self) -> None:
        """A mark can lie across runs where a file was changed within its first bytes."""
        for number, (_, node) in enumerate(self._files):
            if len(node.data) > 1 and node.data[0].size < len(_MARK) and node.data[0].pack != HOLE:
                start = self._starts[number]
                head = os.pread(self.fd, min(len(_MARK), node.size), start)
                self._put([self._marked(number, memoryview(head))], start)

    def _decode(self) -> tuple[int, ...]:
        """Append what UTF-16 files say; a unit that is none becomes U+FFFD."""
        decoded = []
        for number in range(len(self._files)):
            if not self._flags[number] & DECODED:
                continue
            start, end = self._starts[number], self._starts[number + 1] - 1
            decoder = codecs.getincrementaldecoder(_WIDE[os.pread(self.fd, 2, start)])("replace")
            at = self._starts[-1]
            self._flags[number] = DECODED
            for place in range(start + 2, end + 1, _STEP):  # the last piece may be empty: it ends the decoding
                raw = os.pread(self.fd, min(_STEP, end - place), place)
                text = decoder.decode(raw, place + _STEP > end).encode("utf-8", "replace")
                self._flags[number] |= HAS_NUL if b"\0" in text else 0
                self._put([text], at)
                at += len(text)
            self._put([b"\n"], at)
            self._starts.append(at + 1)
            decoded.append(number)
        return tuple(decoded)

    def _copy(self, copies: Mapping[int, Copy]) -> None:
        """Bring over what other scan files have, neighbours at once."""
        numbers = sorted(copies)
        at = 0
        while at < len(numbers):
            scan, first = copies[numbers[at]]
            count = 1
            while (
                at + count < len(numbers)
                and numbers[at + count] == numbers[at] + count
                and copies[numbers[at + count]] == (scan, first + count)
            ):
                count += 1
            for step in range(count):
                self._flags[numbers[at] + step] = scan.flags_of(first + step)
            start, end = scan.extent(first, first + count)
            self._copy_range(scan.data_path, start, end - start, self._starts[numbers[at]])
            at += count

    def _copy_range(self, path: str, start: int, size: int, target: int) -> None:
        source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while size > 0:
                done = os.copy_file_range(source, self.fd, size, start, target)
                if not done:
                    raise Corrupt(f"{path} is shorter than its table says")
                start, target, size = start + done, target + done, size - done
        finally:
            os.close(source)

    def _write_table(self, decoded: tuple[int, ...]) -> None:
        path_ends = array("Q")
        end = 0
        for path, _ in self._files:
            end += len(path)
            path_ends.append(end)
        table = _Table(
            _VERSION,
            self._starts.tobytes(),
            path_ends.tobytes(),
            b"".join(path for path, _ in self._files),
            bytes(self._flags),
            b"".join(content_hash(node) for _, node in self._files),
            decoded,
            self._left_out,
        )
        fd = os.open("table", _CREATE, 0o600, dir_fd=self._directory_fd)
        with open(fd, "wb") as file:
            file.write(msgspec.msgpack.encode(table))


def _kept_size(path: bytes, node: Node) -> int:
    """How many bytes of a file its scan file holds."""
    if sum(ref.size for ref in node.data) != node.size:
        raise Corrupt(f"{os.fsdecode(path)}: its {len(node.data)} runs do not add up to {node.size} bytes")
    return sum(min(ref.size, _HOLE_BYTES) if ref.pack == HOLE else ref.size for ref in node.data)
