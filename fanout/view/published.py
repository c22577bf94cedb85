"""The words of a disk's pages that others published: asked before a page is loaded whose scan file is not on this host.

Owns fetching them from the disk's index objects and keeping them on this host. What cannot be had is as if nobody had
published it. Knows nothing of patterns: `Matching` is the question.

On the host, `words/<disk>-<object>` holds the words of all frames of an index object, each in a file named as the scan
file whose words they are, and `frames`, which describes them; `words/<disk>-<object>-<digest>` those of some frames.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import NamedTuple

import msgspec

from fanout.disk.index import IndexObject, IndexSlice, WordIndex
from fanout.errors import Corrupt, FanoutError, NotFound
from fanout.format.index import BINARY, TEXT, Words
from fanout.format.tree import PageRef
from fanout.view.bases import Kind
from fanout.view.cache import HostCache, Lease
from fanout.view.materialise import host_error
from fanout.view.scan import Stopped
from fanout.view.scans import Facts

__all__ = ["LEAST_BYTES", "Matching", "Published", "Tell", "Told", "identity_of"]

#: The words of less than this are not published, and not asked for.
LEAST_BYTES = 16 << 20
#: What others published since is looked for after so long.
_LISTED_S = 60.0
_THREADS = 4
_KNOWN = 256
_FRAMES = "frames"
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC

#: Takes files of words with their kinds; returns those with a word that a match may need.
Matching = Callable[[Mapping[str, Kind]], Set[str]]
#: `Published.tell` for one disk and question.
Tell = Callable[[Sequence[PageRef], bool, Callable[[], bool]], "dict[str, Told]"]
_frames_decoder = msgspec.msgpack.Decoder(tuple[Words, ...])


class Told(NamedTuple):
    """What published words say of a scan file: how many files it would have, and whether nothing of it can match."""

    facts: Facts
    ruled_out: bool


def identity_of(page: bytes, kind: Kind) -> str:
    """Return the name of a page's scan file."""
    return f"{page.hex()[:48]}-{kind}"


def _identity(frame: Words) -> str:
    return identity_of(frame.page, "binary" if frame.kind == BINARY else "text")


class _Entry(NamedTuple):
    """Words on this host, or where to get them."""

    name: str
    frames: tuple[Words, ...]
    of: IndexObject | None = None


class _Missing:
    """Whose words are still looked for."""

    def __init__(self, pages: Sequence[PageRef], kinds: Sequence[int]) -> None:
        self._counts = {page.hash: page.count for page in pages}
        self._missing = {(page, kind) for page in self._counts for kind in kinds}

    def __bool__(self) -> bool:
        return bool(self._missing)

    def take(self, frames: Iterable[Words]) -> list[Words]:
        """Return those of the frames that were looked for; none of one that its page cannot have."""
        taken = []
        for frame in frames:
            place = frame.page, frame.kind
            if place in self._missing and frame.files + frame.left_out <= self._counts[frame.page]:
                self._missing.remove(place)
                taken.append(frame)
        for frame in taken:
            if frame.kind == TEXT and not frame.left_out:
                self._missing.discard((frame.page, BINARY))
        return taken

    def put_back(self, frames: Iterable[Words]) -> None:
        self._missing.update((frame.page, frame.kind) for frame in frames)


class Published:
    """What a host has of the words that were published, as one process sees it. Thread safe, blocking."""

    def __init__(self, cache: HostCache) -> None:
        self._cache = cache
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, tuple[Words, ...]] = OrderedDict()
        self._listed: OrderedDict[str, tuple[float, list[IndexObject]]] = OrderedDict()
        self._bad: set[str] = set()

    def tell(
        self,
        index: WordIndex,
        matching: Matching,
        pages: Sequence[PageRef],
        binary: bool,
        stopped: Callable[[], bool],
    ) -> dict[str, Told]:
        """Return what is known of the scan files of pages, by their names; those of binary files if `binary`."""
        told: dict[str, Told] = {}
        files: dict[str, Kind] = {}
        missing = _Missing(pages, (TEXT, BINARY) if binary else (TEXT,))
        with ExitStack() as stack:
            for entry in self._entries_for(index, missing):
                taken = missing.take(entry.frames)
                if not taken:
                    continue
                if entry.of is not None:
                    entry = _some(entry, taken)
                lease = self._lease(index, entry, stopped)
                if lease is None:
                    missing.put_back(taken)
                    continue
                stack.callback(lease.release)
                for frame in taken:
                    identity = _identity(frame)
                    told[identity] = Told(Facts(frame.files, frame.left_out, frame.size), not frame.files)
                    if frame.files:
                        files[f"{lease.path}/{identity}"] = "binary" if frame.kind == BINARY else "text"
            for path in files.keys() - (matching(files) if files else set()):
                identity = path.rpartition("/")[2]
                told[identity] = told[identity]._replace(ruled_out=True)
        return told

    def _lease(self, index: WordIndex, entry: _Entry, stopped: Callable[[], bool]) -> Lease | None:
        """Hold words on this host, getting them if they are not here; None where that cannot be done."""
        if entry.name in self._bad:
            return None
        try:
            return self._cache.lease("words", entry.name, _Fetch(index, entry, stopped))
        except FanoutError as error:
            if entry.of is not None and isinstance(error, (Corrupt, NotFound)):
                self._bad.add(entry.name)
            return None

    def _entries_for(self, index: WordIndex, missing: _Missing) -> Iterator[_Entry]:
        """Yield what is here, then what could be fetched, the largest first, as long as something is missing."""
        yield from self._here(index.disk_id)
        if missing:
            for of in self._objects(index):
                yield _Entry(f"{index.disk_id}-{of.identity}", of.frames, of)

    def _here(self, disk_id: str) -> Iterator[_Entry]:
        for name in self._cache.those_there("words", f"{disk_id}-"):
            frames = self._entries.get(name)
            if frames is None:
                try:
                    with open(f"{self._cache.tree_path('words', name)}/{_FRAMES}", "rb") as file:
                        frames = _frames_decoder.decode(file.read())
                except (OSError, msgspec.DecodeError):
                    continue
                with self._lock:
                    self._entries[name] = frames
                    while len(self._entries) > _KNOWN:
                        self._entries.popitem(last=False)
            yield _Entry(name, frames)

    def _objects(self, index: WordIndex) -> list[IndexObject]:
        """Return the index objects of a disk, as they were listed not long ago."""
        now_s = self._cache.runtime.monotonic()
        with self._lock:
            listed_s, objects = self._listed.get(index.disk_id, (-_LISTED_S, []))
        if now_s - listed_s < _LISTED_S:
            return objects
        try:
            objects = index.objects()
        except FanoutError:  # who cannot be asked at all is asked for pages next, and says so
            objects = []
        with self._lock:
            self._listed[index.disk_id] = now_s, objects
            while len(self._listed) > _KNOWN:
                self._listed.popitem(last=False)
        return objects


def _some(entry: _Entry, wanted: Sequence[Words]) -> _Entry:
    """Return what of an object to get: all, unless little of it is wanted."""
    if 2 * sum(frame.stored for frame in wanted) >= sum(frame.stored for frame in entry.frames):
        return entry
    digest = hashlib.sha256(b"".join(b"%d " % frame.offset for frame in wanted)).hexdigest()[:16]
    return entry._replace(name=f"{entry.name}-{digest}", frames=tuple(wanted))


class _Fetch:
    """Gets the words of an entry and writes them below an open directory."""

    def __init__(self, index: WordIndex, entry: _Entry, stopped: Callable[[], bool]) -> None:
        self._index = index
        self._entry = entry
        self._stopped = stopped

    def __call__(self, directory_fd: int) -> int:
        of, frames = self._entry.of, self._entry.frames
        if of is None:
            raise NotFound("the words that were here were evicted")
        slices = self._index.plan(of, frames)
        try:
            if len(slices) < 2:
                for piece in slices:
                    self._write(directory_fd, piece)
            else:
                with ThreadPoolExecutor(_THREADS, "fanout-words") as pool:
                    for done in [pool.submit(self._write, directory_fd, piece) for piece in slices]:
                        done.result()
            _put(directory_fd, _FRAMES, msgspec.msgpack.encode(frames))
        except OSError as error:
            raise host_error(error, "the words of pages") from error
        return sum(frame.raw + 4096 for frame in frames)

    def _write(self, directory_fd: int, piece: IndexSlice) -> None:
        if self._stopped():
            raise Stopped
        for frame, words in self._index.fetch(piece):
            _put(directory_fd, _identity(frame), words)


def _put(directory_fd: int, name: str, data: bytes) -> None:
    fd = os.open(name, _CREATE, 0o600, dir_fd=directory_fd)
    with open(fd, "wb", buffering=0) as file:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]
