"""Reads local files into packs: several at once, in order, without following a symlink.

Owns what becomes of a file's bytes: unchanged (the stored runs again), packed, or a hole. Knows nothing of what
changed around the files.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from fanout.disk.data import Packer, Reader
from fanout.disk.edits import unshared
from fanout.format.extents import cut
from fanout.format.pack import encode_frame, encode_frames, is_text
from fanout.format.tree import FILE, HOLE, Node, Ref
from fanout.view.local import Directories, unlock, user_xattrs

__all__ = ["Content", "LocalFile", "Reuse", "pack_files", "reusable", "same_bytes"]

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_THREADS = 4
#: Small files go to a worker in groups: a task of its own for each would cost more than reading it.
_GROUP_FILES = 64
_GROUP_BYTES = 1 << 20
_WINDOW = 8
#: A hole is written down from this size on, and in pieces of at most the other.
_HOLE_MIN = 64 << 10
_HOLE_PIECE = 1 << 30


class LocalFile(NamedTuple):
    """One regular file to read: `name` in the directory `parent` (relative to the root), and what it replaces."""

    parent: bytes
    name: str
    found: os.stat_result
    base: Node | None


class Content(NamedTuple):
    """What a file holds."""

    data: tuple[Ref, ...]
    size: int
    xattrs: tuple[tuple[bytes, bytes], ...]
    digest: bytes = b""


#: Runs of bytes the disk already stores, by their hash.
Reuse = Mapping[bytes, Ref]


class _Frame(NamedTuple):
    """One run ready for a pack. `frame` is b"" where the disk has it already (see the hash) or for a hole."""

    frame: bytes
    raw: int
    digest: bytes
    text: bool


class _Shared:
    """A frame that holds several small files: compressing them together costs less, and takes less room."""

    __slots__ = ("frame", "raw", "ref", "text")

    def __init__(self, text: bool) -> None:
        self.text = text
        self.raw = b""
        self.frame: tuple[bytes, bytes] = (b"", b"")
        self.ref: Ref | None = None


class _Part(NamedTuple):
    """One file's place in a shared frame."""

    shared: _Shared
    skip: int
    digest: bytes


class _Small(NamedTuple):
    frame: _Frame | _Part | None
    xattrs: tuple[tuple[bytes, bytes], ...]
    size: int


def pack_files(
    files: Sequence[LocalFile],
    root_fd: int,
    packer: Packer,
    reuse: Reuse,
    *,
    unlocking: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Iterator[Content | None]:
    """Yield the content of each file, in order; None for one that is gone or is no regular file any more.

    `unlocking` lets the owner read what he shut himself out from. `progress(bytes)` is called for each file.
    """
    work = _Work(root_fd, packer, reuse, unlocking)
    try:
        for content in work.run(files):
            if progress is not None:
                progress(content.size if content is not None else 0)
            yield content
    finally:
        work.close()


class _Work:
    """One run of `pack_files`."""

    def __init__(self, root_fd: int, packer: Packer, reuse: Reuse, unlocking: bool) -> None:
        self._root_fd = root_fd
        self._packer = packer
        self._reuse = reuse
        self._unlocking = unlocking
        self._small = packer.tuning.small_file_bytes
        self._extent = packer.tuning.extent_bytes
        self._share_below = 0
        self._pool: ThreadPoolExecutor | None = None
        self._local = threading.local()
        self._opened: list[Directories] = []

    def run(self, files: Sequence[LocalFile]) -> Iterator[Content | None]:
        groups = self._groups(files)
        waiting: deque[Future[list[_Small | None]] | LocalFile] = deque()
        parallel = len(files) > _GROUP_FILES
        # Few files keep frames of their own, so that reading one of them reads nothing else.
        self._share_below = self._packer.tuning.shared_file_bytes if parallel else 0
        for group in groups:
            if isinstance(group, LocalFile):
                waiting.append(group)
            elif parallel:
                waiting.append(self._executor().submit(self._read_group, group))
            else:
                while waiting:
                    yield from self._collect(waiting.popleft())
                yield from map(self._packed, self._read_group(group))
            while len(waiting) > _WINDOW:
                yield from self._collect(waiting.popleft())
        while waiting:
            yield from self._collect(waiting.popleft())

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        for directories in self._opened:
            directories.close()

    def _groups(self, files: Iterable[LocalFile]) -> Iterator[list[LocalFile] | LocalFile]:
        """Cut the files into groups of small ones and single large ones."""
        group: list[LocalFile] = []
        size = 0
        for file in files:
            if file.found.st_size > self._small:
                if group:
                    yield group
                    group, size = [], 0
                yield file
                continue
            group.append(file)
            size += file.found.st_size
            if len(group) >= _GROUP_FILES or size >= _GROUP_BYTES:
                yield group
                group, size = [], 0
        if group:
            yield group

    def _collect(self, waiting: Future[list[_Small | None]] | LocalFile) -> Iterator[Content | None]:
        if isinstance(waiting, LocalFile):
            yield self._large(waiting)
        else:
            yield from map(self._packed, waiting.result())

    def _packed(self, small: _Small | None) -> Content | None:
        if small is None:
            return None
        if isinstance(small.frame, _Part):
            return Content((self._place_part(small.frame, small.size),), small.size, small.xattrs, small.frame.digest)
        if small.frame is None:
            return Content((), small.size, small.xattrs)
        ref = self._place(small.frame)
        return Content((ref,), small.size, small.xattrs, small.frame.digest if ref.length >= 0 else b"")

    def _place_part(self, part: _Part, size: int) -> Ref:
        shared = part.shared
        if shared.ref is None:
            frame, digest = shared.frame
            shared.ref = self._packer.add_frame(frame, len(shared.raw), digest, shared.text)
            shared.raw, shared.frame = b"", (b"", b"")
        whole = shared.ref
        return Ref(whole.pack, whole.offset, whole.stored, whole.raw, whole.hash, part.skip, size)

    def _place(self, frame: _Frame) -> Ref:
        if not frame.digest:
            return Ref(HOLE, 0, 0, frame.raw, b"")
        if not frame.frame:
            return self._reuse[frame.digest]
        return self._packer.add_frame(frame.frame, frame.raw, frame.digest, frame.text)

    # -- small files, in a worker ----------------------------------------------------------------------------

    def _read_group(self, group: list[LocalFile]) -> list[_Small | None]:
        directories = self._directories()
        read = [self._read_small(file, directories) for file in group]
        frames = iter(self._encode_all([raw for raw, _ in filter(None, read) if raw]))
        return [None if one is None else _Small(next(frames) if one[0] else None, one[1], len(one[0])) for one in read]

    def _read_small(
        self, file: LocalFile, directories: Directories
    ) -> tuple[bytes, tuple[tuple[bytes, bytes], ...]] | None:
        fd = self._open(file, directories)
        if fd < 0:
            return None
        try:
            return _read_all(fd, file.found.st_size), user_xattrs(fd)
        finally:
            os.close(fd)

    def _encode_all(self, raws: list[bytes]) -> list[_Frame | _Part]:
        """Encode the contents of a group, small ones of a kind in shared frames, all in one call."""
        encoded: list[_Frame | _Part | None] = [None] * len(raws)
        bundles: list[tuple[_Shared, list[bytes]]] = []
        sizes: dict[bool, int] = {}
        open_bundles: dict[bool, tuple[_Shared, list[bytes]]] = {}
        alone: list[tuple[int, bool]] = []
        for place, raw in enumerate(raws):
            text = is_text(raw)
            share = len(raw) <= self._share_below
            digest = hashlib.sha256(raw).digest() if share or self._reuse else b""
            if self._stored(digest, len(raw)):
                encoded[place] = _Frame(b"", len(raw), digest, text)
            elif not share:
                alone.append((place, text))
            else:
                bundle = open_bundles.get(text)
                if bundle is None or sizes[text] + len(raw) > self._packer.tuning.shared_frame_bytes:
                    bundle = open_bundles[text] = (_Shared(text), [])
                    bundles.append(bundle)
                    sizes[text] = 0
                encoded[place] = _Part(bundle[0], sizes[text], digest)
                bundle[1].append(raw)
                sizes[text] += len(raw)
        for shared, parts in bundles:
            shared.raw = b"".join(parts)
        together = [*(shared.raw for shared, _ in bundles), *(raws[place] for place, _ in alone)]
        frames = iter(encode_frames(together))
        for shared, _ in bundles:
            shared.frame = next(frames)
        for (place, text), (frame, digest) in zip(alone, frames, strict=True):
            encoded[place] = _Frame(frame, len(raws[place]), digest, text)
        return [one for one in encoded if one is not None]

    def _stored(self, digest: bytes, size: int) -> bool:
        """Whether the disk has these bytes already."""
        known = self._reuse.get(digest)
        return known is not None and known.size == size

    def _encode(self, raw: bytes, text: bool) -> _Frame:
        """Compress a run unless the disk has it; equal size makes that likely enough to hash first."""
        if self._reuse:
            digest = hashlib.sha256(raw).digest()
            if self._stored(digest, len(raw)):
                return _Frame(b"", len(raw), digest, text)
        frame, digest = encode_frame(raw)
        return _Frame(frame, len(raw), digest, text)

    # -- large files, extent by extent -----------------------------------------------------------------------

    def _large(self, file: LocalFile) -> Content | None:
        fd = self._open(file, self._directories())
        if fd < 0:
            return None
        refs: list[Ref] = []
        runs: deque[Future[_Frame] | _Frame] = deque()
        try:
            xattrs = user_xattrs(fd)
            text = is_text(os.pread(fd, 8192, 0))
            for start, end, hole in _runs(fd, file.found):
                for at in range(start, end, _HOLE_PIECE if hole else self._extent):
                    if hole:
                        runs.append(_Frame(b"", min(_HOLE_PIECE, end - at), b"", text))
                    else:
                        length = min(self._extent, end - at)
                        runs.append(self._executor().submit(self._read_run, fd, at, length, text))
                    while len(runs) > _THREADS:
                        refs.append(self._place(_done(runs.popleft())))
            while runs:
                refs.append(self._place(_done(runs.popleft())))
        finally:
            # Runs still under way read this descriptor: see them end before it is closed.
            for run in runs:
                if isinstance(run, Future) and not run.cancel():
                    run.exception()
            os.close(fd)
        refs = [ref for ref in refs if ref.size]
        return Content(tuple(refs), sum(ref.size for ref in refs), xattrs)

    def _read_run(self, fd: int, at: int, length: int, text: bool) -> _Frame:
        return self._encode(_read_at(fd, at, length), text)

    # -- common ----------------------------------------------------------------------------------------------

    def _open(self, file: LocalFile, directories: Directories) -> int:
        """Open a file found as a regular one; -1 if it is none any more (an upload reads a living tree)."""
        try:
            parent_fd = directories.open(file.parent)
            try:
                fd = os.open(file.name, _READ, dir_fd=parent_fd)
            except PermissionError:
                if not self._unlocking:
                    raise
                unlock(file.name, parent_fd)
                fd = os.open(file.name, _READ, dir_fd=parent_fd)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
                return -1
            raise
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            return -1
        return fd

    def _directories(self) -> Directories:
        found: Directories | None = getattr(self._local, "directories", None)
        if found is None:
            found = self._local.directories = Directories(self._root_fd, unlock=self._unlocking)
            self._opened.append(found)
        return found

    def _executor(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, "fanout-read")
        return self._pool


def _done(run: Future[_Frame] | _Frame) -> _Frame:
    return run.result() if isinstance(run, Future) else run


def _read_all(fd: int, expected: int) -> bytes:
    raw = os.read(fd, expected + 1)
    if len(raw) == expected:
        return raw
    parts = [raw]  # it grows or shrinks while we read: take what is there
    while parts[-1]:
        parts.append(os.read(fd, 1 << 20))
    return b"".join(parts)


def _read_at(fd: int, at: int, length: int) -> bytes:
    raw = os.pread(fd, length, at)
    while len(raw) < length:
        more = os.pread(fd, length - len(raw), at + len(raw))
        if not more:
            break
        raw += more
    return raw


def _runs(fd: int, found: os.stat_result) -> Iterator[tuple[int, int, bool]]:
    """Yield (start, end, whether a hole) over a file's length; small holes count as data."""
    size = found.st_size
    if found.st_blocks * 512 >= size:
        yield 0, size, False
        return
    start = at = 0
    while at < size:
        try:
            data = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            data = size
        if data - at >= _HOLE_MIN or (data == size and data > at):
            if at > start:
                yield start, at, False
            yield at, data, True
            start = data
        if data == size:
            break
        at = os.lseek(fd, data, os.SEEK_HOLE)
    if start < size:
        yield start, size, False


def reusable(nodes: Iterable[Node | None]) -> Reuse:
    """Index the stored runs of `nodes` by what they hold, where that is known."""
    known = [node for node in nodes if node is not None]
    runs = {ref.hash: ref for node in known for ref in node.data if ref.length < 0 and ref.pack != HOLE}
    runs.update({node.digest: node.data[0] for node in known if node.digest and len(node.data) == 1})
    return runs


def same_bytes(
    reader: Reader, blobs: Mapping[bytes, bytes], base: Node, data: Sequence[Ref], root_fd: int, file: LocalFile
) -> bool:
    """Compare a file with a stored one where its packed `data` does not tell: parts of runs have no own hash."""
    if base.kind != FILE or base.size != file.found.st_size:
        return False
    with Directories(root_fd) as directories:
        fd = os.open(file.name, _READ, dir_fd=directories.open(file.parent))
    try:
        for start, end in unshared(base.data, data):
            at = start
            for chunk in reader.chunks(cut(base.data, start, end), blobs):
                if _read_at(fd, at, len(chunk)) != chunk:
                    return False
                at += len(chunk)
        return True
    finally:
        os.close(fd)
