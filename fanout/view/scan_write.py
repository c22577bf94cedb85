"""Writing scan files: where everything goes, and bringing it there from packs and from other scan files.

Owns both. The layout is a pure function of the tree's nodes, so that what it needs can be fetched for several at once
and written in any order. Knows nothing of when a scan file is wanted, or of patterns.
"""

from __future__ import annotations

import codecs
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import accumulate
from typing import NamedTuple

import msgspec

from fanout.disk.data import Frames, Reader, Slice
from fanout.errors import Corrupt
from fanout.format.tree import HOLE, Node, Ref, content_hash
from fanout.view.materialise import host_error
from fanout.view.scan import DECODED, HAS_NUL, MARK, MARK_BYTES, VERSION, Copy, Stopped, Table

__all__ = ["Layout", "Recipe", "write_scan"]

_WIDE = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}
#: What a byte order mark begins with.
_HEADS = frozenset({0xEF, 0xFE, 0xFF})
#: A hole longer than this is kept this long: the file is binary, and no line of it is shown.
_HOLE_BYTES = 64 << 10
#: Files that follow each other are written with one call of about this much.
_BLOCK_BYTES = 1 << 20
_THREADS = 4
_STEP = 1 << 20
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class _Piece(NamedTuple):
    """One run of a file of several, and where it belongs. `ends`: the newline follows."""

    file: int
    ref: Ref
    offset: int
    begins: bool
    ends: bool


class _Frame:
    """What is wanted of one frame: whole files, as runs [first, end) of their numbers, and pieces of others."""

    __slots__ = ("pieces", "ref", "runs")

    def __init__(self, ref: Ref) -> None:
        self.ref = ref
        self.runs: list[list[int]] = []
        self.pieces: list[_Piece] = []


class Layout:
    """Where everything of one scan file goes.

    `files` are in byte order of paths; `copies` says of some, by their number, where on this host they are. `left_out`
    is how many files are left to another scan file. `Corrupt` for nodes that contradict themselves.
    """

    def __init__(
        self, files: Sequence[tuple[bytes, Node]], copies: Mapping[int, Copy] | None = None, left_out: int = 0
    ) -> None:
        self.files = files
        self.copies = copies or {}
        self.left_out = left_out
        #: Where each file starts; one more than files.
        self.starts = array("Q", [0])
        #: Where in its frame each file is that lies in one.
        self.skips = array("Q")
        self.stops = array("Q")
        #: Files of several runs, and those with holes.
        self.several: list[int] = []
        self._frames: dict[tuple[bytes, int], _Frame] = {}
        self._plan()

    @property
    def refs(self) -> Iterator[Ref]:
        """Yield one reference to each frame that is needed."""
        return (frame.ref for frame in self._frames.values())

    def frame(self, ref: Ref) -> _Frame:
        return self._frames[ref.pack, ref.offset]

    def _plan(self) -> None:
        """Go through the files once: there are many, and hardly any is not a single run."""
        copies, starts, skips, stops = self.copies, self.starts, self.skips, self.stops
        at = 0
        pack, offset, digest, run = HOLE, -1, b"", [-1, -1]
        for number, (path, node) in enumerate(self.files):
            refs = node.data
            if len(refs) != 1 or not (ref := refs[0]).pack:
                self._plan_several(number, path, node, at)
                at += _kept_size(path, node) + 1
                skips.append(0)
                stops.append(0)
                starts.append(at)
                continue
            skip = ref.skip
            stop = skip + (ref.raw if ref.length < 0 else ref.length)
            if stop - skip != node.size:
                raise _wrong(path, node)
            at += node.size + 1
            skips.append(skip)
            stops.append(stop)
            starts.append(at)
            if copies and number in copies:
                continue
            if ref.offset == offset and ref.pack == pack and ref.hash == digest:
                if run[1] == number:
                    run[1] = number + 1
                    continue
            else:
                pack, offset, digest = ref.pack, ref.offset, ref.hash
            run = [number, number + 1]
            self._frame_of(ref).runs.append(run)

    def _plan_several(self, number: int, path: bytes, node: Node, at: int) -> None:
        if number in self.copies:
            return
        self.several.append(number)
        last = len(node.data) - 1
        for place, ref in enumerate(node.data):
            if ref.pack == HOLE:
                at += min(ref.size, _HOLE_BYTES)
                continue
            self._frame_of(ref).pieces.append(_Piece(number, ref, at, not place, place == last))
            at += ref.size

    def _frame_of(self, ref: Ref) -> _Frame:
        frame = self._frames.get((ref.pack, ref.offset))
        if frame is None:
            frame = self._frames[ref.pack, ref.offset] = _Frame(ref)
        elif frame.ref.hash != ref.hash:
            raise Corrupt(f"pack {ref.pack.hex()}: two files want other bytes of the frame at {ref.offset}")
        return frame


class Recipe:
    """How a scan file is made that is not there: called with an open directory it does it, from its own `reader`."""

    def __init__(
        self,
        lay_out: Callable[[], Layout],
        reader: Reader,
        blobs: Mapping[bytes, bytes],
        stopped: Callable[[], bool],
    ) -> None:
        self.lay_out = lay_out
        self.reader = reader
        self.blobs = blobs
        self._stopped = stopped

    def __call__(self, directory_fd: int) -> int:
        return self.write(directory_fd, self.lay_out(), self.reader)

    def write(self, directory_fd: int, layout: Layout, frames: Frames) -> int:
        """Write it from `frames`, as `write_scan` does."""
        return write_scan(directory_fd, layout, frames, self.blobs, self._stopped)


def write_scan(
    directory_fd: int,
    layout: Layout,
    frames: Frames,
    blobs: Mapping[bytes, bytes],
    stopped: Callable[[], bool] = lambda: False,
) -> int:
    """Write a scan file below an open directory; returns its size on disk, with what will come beside it.

    `Corrupt` for stored bytes that are wrong, `Unavailable` where the host is full, `Stopped`.
    """
    try:
        writing = _Writing(directory_fd, layout, frames, blobs, stopped)
        try:
            return writing.run()
        finally:
            os.close(writing.fd)
    except OSError as error:
        raise host_error(error, "a scan file") from error


class _Writing:
    def __init__(
        self,
        directory_fd: int,
        layout: Layout,
        frames: Frames,
        blobs: Mapping[bytes, bytes],
        stopped: Callable[[], bool],
    ) -> None:
        self._directory_fd = directory_fd
        self._layout = layout
        self._frames = frames
        self._blobs = blobs
        self._stopped = stopped
        self._flags = bytearray(len(layout.files))
        self._starts = array("Q", layout.starts)
        self.fd = os.open("data", _CREATE, 0o600, dir_fd=directory_fd)

    def run(self) -> int:
        os.ftruncate(self.fd, self._starts[-1])
        self._copy()
        slices = self._frames.plan(self._layout.refs)
        if len(slices) <= 2:
            for piece in slices:
                self._write(piece)
        else:
            with ThreadPoolExecutor(_THREADS, "fanout-scan") as pool:
                for done in [pool.submit(self._write, piece) for piece in slices]:
                    done.result()
        self._finish_several()
        self._overwrite_marks()
        decoded = self._decode()
        self._write_table(decoded)
        # The words of it will come, perhaps.
        return self._starts[-1] + self._starts[-1] // 8 + 100 * len(self._layout.files)

    def _write(self, piece: Slice) -> None:
        """Fetch one slice and write its files, those that follow each other with one call."""
        if self._stopped():
            raise Stopped
        layout = self._layout
        skips, stops = layout.skips, layout.stops
        chunks: list[bytes | memoryview] = []
        began = at = size = 0
        with closing(self._frames.fetch(piece, self._blobs)) as decoded:
            for ref, raw in decoded:
                frame = layout.frame(ref)
                view = memoryview(raw)
                for first, end in frame.runs:
                    if first != at or size >= _BLOCK_BYTES:
                        self._put_files(began, at, chunks)
                        chunks, began, size = [], first, 0
                    chunks += map(view.__getitem__, map(slice, skips[first:end], stops[first:end]))
                    if not _HEADS.isdisjoint(map(view.__getitem__, skips[first:end])):
                        self._look_for_marks(first, end, view)
                    at = end
                    size += stops[end - 1] - skips[first]
                for each in frame.pieces:
                    self._put_piece(each, view)
            self._put_files(began, at, chunks)

    def _put_files(self, first: int, end: int, chunks: list[bytes | memoryview]) -> None:
        """Write the files first <= i < end."""
        if not chunks:
            return
        chunks.append(b"")
        data = b"\n".join(chunks)
        starts = self._starts
        base = starts[first]
        if len(data) != starts[end] - base:
            raise _outside(self._layout.files[first][0])
        if data.find(b"\0") >= 0:
            for number in range(first, end):
                if data.find(b"\0", starts[number] - base, starts[number + 1] - 1 - base) >= 0:
                    self._flags[number] |= HAS_NUL
        self._put(data, base)

    def _put_piece(self, piece: _Piece, view: memoryview) -> None:
        data = bytes(view[piece.ref.skip : piece.ref.skip + piece.ref.size])
        if len(data) != piece.ref.size:
            raise _outside(self._layout.files[piece.file][0])
        if piece.begins:
            self._look_at_beginning(piece.file, data)
        if data.find(b"\0") >= 0:
            self._flags[piece.file] |= HAS_NUL
        self._put(data, piece.offset)

    def _put(self, data: bytes, offset: int) -> None:
        written = os.pwrite(self.fd, data, offset)
        while written < len(data):
            written += os.pwrite(self.fd, memoryview(data)[written:], offset + written)

    def _look_for_marks(self, first: int, end: int, view: memoryview) -> None:
        for number in range(first, end):
            start = self._layout.skips[number]
            self._look_at_beginning(number, bytes(view[start : min(start + 3, self._layout.stops[number])]))

    def _look_at_beginning(self, number: int, head: bytes) -> None:
        """Take note of a byte order mark."""
        if head.startswith(MARK_BYTES):
            self._flags[number] |= MARK
        elif head[:2] in _WIDE:
            self._flags[number] |= DECODED

    def _finish_several(self) -> None:
        """End the files of several runs with their newlines. A mark can lie across runs, a hole is stored nowhere."""
        for number in self._layout.several:
            node = self._layout.files[number][1]
            self._put(b"\n", self._starts[number + 1] - 1)
            if any(ref.pack == HOLE for ref in node.data):
                self._flags[number] |= HAS_NUL
            if len(node.data) > 1 and node.data[0].size < len(MARK_BYTES) and node.data[0].pack != HOLE:
                head = os.pread(self.fd, min(len(MARK_BYTES), node.size), self._starts[number])
                self._look_at_beginning(number, head)

    def _overwrite_marks(self) -> None:
        for number, flags in enumerate(self._flags if any(self._flags) else b""):
            if flags & MARK:
                self._put(b"\n" * len(MARK_BYTES), self._starts[number])

    def _decode(self) -> tuple[int, ...]:
        """Append what UTF-16 files say; a unit that is none becomes U+FFFD."""
        decoded = []
        for number, flags in enumerate(bytes(self._flags) if any(self._flags) else b""):
            if not flags & DECODED:
                continue
            start, end = self._starts[number], self._starts[number + 1] - 1
            mark = os.pread(self.fd, 2, start)
            decoder = codecs.getincrementaldecoder(_WIDE[mark])("replace")
            at = self._starts[-1]
            self._flags[number] = DECODED
            # ripgrep takes a second mark off, too.
            begin = start + 4 if end - start >= 4 and os.pread(self.fd, 2, start + 2) == mark else start + 2
            for place in range(begin, end + 1, _STEP):  # the last piece may be empty: it ends the decoding
                raw = os.pread(self.fd, min(_STEP, end - place), place)
                text = decoder.decode(raw, place + _STEP > end).encode("utf-8", "replace")
                self._flags[number] |= HAS_NUL if b"\0" in text else 0
                self._put(text, at)
                at += len(text)
            self._put(b"\n", at)
            self._starts.append(at + 1)
            decoded.append(number)
        return tuple(decoded)

    def _copy(self) -> None:
        """Bring over what other scan files have, neighbours at once."""
        copies = self._layout.copies
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
        files = self._layout.files
        paths = [path for path, _ in files]
        table = Table(
            VERSION,
            self._starts.tobytes(),
            array("Q", accumulate(map(len, paths))).tobytes(),
            b"".join(paths),
            bytes(self._flags),
            b"".join([node.digest or content_hash(node) for _, node in files]),
            decoded,
            self._layout.left_out,
        )
        fd = os.open("table", _CREATE, 0o600, dir_fd=self._directory_fd)
        with open(fd, "wb") as file:
            file.write(msgspec.msgpack.encode(table))


def _kept_size(path: bytes, node: Node) -> int:
    """How many bytes of a file its scan file holds."""
    if sum(ref.size for ref in node.data) != node.size:
        raise _wrong(path, node)
    return sum(min(ref.size, _HOLE_BYTES) if ref.pack == HOLE else ref.size for ref in node.data)


def _wrong(path: bytes, node: Node) -> Corrupt:
    return Corrupt(f"{os.fsdecode(path)}: its {len(node.data)} runs do not add up to {node.size} bytes")


def _outside(path: bytes) -> Corrupt:
    return Corrupt(f"{os.fsdecode(path)}, or a file after it: a run of it lies outside of its frame")
