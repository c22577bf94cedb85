"""The index objects of a disk: listing them, reading words by range, storing new ones, and which are of no use.

Owns their life in the store. Nothing depends on them: what is damaged, gone or from another version is as if it were
not there. Knows nothing of scan files or patterns.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from fanout.errors import Corrupt, FanoutError, NotFound, Unavailable, Unknown
from fanout.format import layout
from fanout.format.index import BINARY, Words, decode_footer, decode_words, footer_bytes
from fanout.runtime import Runtime
from fanout.store.base import ObjectMeta, Store

__all__ = ["IndexObject", "IndexSlice", "WordIndex", "damaged_indexes", "unused_indexes"]

#: So much of an object's end is asked for at first: the footer of about 1,000 frames.
_END_BYTES = 64 << 10
#: Frames closer than this are fetched with one request, which is cut at the other.
_GAP_BYTES = 64 << 10
_SLICE_BYTES = 4 << 20
_PARALLEL = 4
#: So many objects of a disk are looked at, the largest. Others come of hosts that publish at once, and will be removed.
_MOST = 64
#: How many objects' footers are remembered.
_KNOWN = 256


@dataclass(frozen=True, slots=True)
class IndexObject:
    """One index object: its identity, bytes, and what it holds."""

    identity: str
    size: int
    frames: tuple[Words, ...]

    @property
    def covers(self) -> set[tuple[bytes, int]]:
        """Which scan files it has the words of, by page and kind."""
        return {(frame.page, frame.kind) for frame in self.frames}


@dataclass(slots=True)
class IndexSlice:
    """Frames of one object that one ranged get brings."""

    identity: str
    start: int
    end: int
    frames: list[Words] = field(default_factory=list)


class WordIndex:
    """The index objects of one disk. Thread safe, blocking."""

    def __init__(self, store: Store, disk_id: str, runtime: Runtime) -> None:
        self.disk_id = disk_id
        self._store = store
        self._runtime = runtime
        self._known: OrderedDict[str, IndexObject] = OrderedDict()
        self._lock = threading.Lock()

    def objects(self) -> list[IndexObject]:
        """Return the objects that are there, the largest first: one listing, and one get for each that is new."""
        listed = self._store.list(layout.index_prefix(self.disk_id))
        metas = sorted((meta for meta in listed if layout.is_index_key(meta.key)), key=_rank)[:_MOST]
        if len(metas) < 2:
            found = [self._open(meta) for meta in metas]
        else:
            with ThreadPoolExecutor(_PARALLEL, "fanout-index") as pool:
                found = list(pool.map(self._open, metas))
        return [each for each in found if each.frames]

    def plan(self, of: IndexObject, frames: Iterable[Words]) -> list[IndexSlice]:
        """Group frames of an object into ranged reads."""
        slices: list[IndexSlice] = []
        for frame in sorted(frames, key=lambda frame: frame.offset):
            last = slices[-1] if slices else None
            end = frame.offset + frame.stored
            if last is None or frame.offset - last.end > _GAP_BYTES or end - last.start > _SLICE_BYTES:
                last = IndexSlice(of.identity, frame.offset, end)
                slices.append(last)
            last.frames.append(frame)
            last.end = max(last.end, end)
        return slices

    def fetch(self, piece: IndexSlice) -> Iterator[tuple[Words, bytes]]:
        """Yield the words of one slice's frames, verified; `Corrupt`, and `NotFound` where the object is gone."""
        key = layout.index_key(self.disk_id, piece.identity)
        data = memoryview(self._store.get(key, piece.start, piece.end - piece.start))
        for frame in piece.frames:
            start = frame.offset - piece.start
            yield frame, decode_words(data[start : start + frame.stored], frame, key)

    def publish(self, data: bytes) -> bool:
        """Store a new object; False, and nothing is left of it, where the disk was deleted meanwhile."""
        key = layout.index_key(self.disk_id, self._runtime.hex_id(32))
        try:
            self._store.put(key, data)
            # A deletion lists these once more after it removed the record: one of the two sees the other.
            there = self._store.head(layout.disk_key(self.disk_id)) is not None
        except (Unavailable, Unknown):  # it may be there, on a disk that may be gone
            with suppress(FanoutError):
                self._store.delete([key])
            raise
        if not there:
            self._store.delete([key])
        return there

    def remove(self, objects: Sequence[IndexObject]) -> None:
        """Delete objects."""
        if objects:
            self._store.delete([layout.index_key(self.disk_id, each.identity) for each in objects])

    def _open(self, meta: ObjectMeta) -> IndexObject:
        identity = meta.key.rpartition("/")[2]
        with self._lock:
            known = self._known.get(identity)
            if known is not None and known.size == meta.size:
                self._known.move_to_end(identity)
                return known
        try:
            frames = _footer(self._store, meta)
        except (Corrupt, NotFound):
            frames = ()
        found = IndexObject(identity, meta.size, frames)
        with self._lock:
            self._known[identity] = found
            while len(self._known) > _KNOWN:
                self._known.popitem(last=False)
        return found


def _rank(meta: ObjectMeta) -> tuple[int, str]:
    return -meta.size, meta.key


def _footer(store: Store, meta: ObjectMeta) -> tuple[Words, ...]:
    end = store.get(meta.key, max(meta.size - _END_BYTES, 0))
    length = footer_bytes(end, meta.key)
    if len(end) < length <= meta.size:
        end = store.get(meta.key, meta.size - length)
    return decode_footer(end, meta.size, meta.key)


def _verified(store: Store, meta: ObjectMeta) -> tuple[Words, ...]:
    """Read all of an object; returns its frames, each of which is what its hash says."""
    data = store.get(meta.key)
    frames = decode_footer(data, len(data), meta.key)
    for frame in frames:
        decode_words(memoryview(data)[frame.offset : frame.offset + frame.stored], frame, meta.key)
    return frames


def unused_indexes(store: Store, disk_id: str, pages: Set[bytes], oldest_ns: int) -> dict[str, int]:
    """Return key -> bytes of what is no good (any more): older than `oldest_ns` and of no page of these, or damaged."""
    found: dict[str, int] = {}
    for meta in store.list(layout.index_prefix(disk_id)):
        if meta.modified_ns > oldest_ns:
            continue
        try:
            frames = _verified(store, meta) if layout.is_index_key(meta.key) else ()
        except Corrupt:
            frames = ()
        except NotFound:
            continue
        if not any(frame.page in pages for frame in frames):
            found[meta.key] = meta.size
    return found


def damaged_indexes(
    store: Store, disk_id: str, counts: Mapping[bytes, tuple[int, int]], *, quick: bool
) -> Iterator[tuple[str, str]]:
    """Yield (key, what is wrong with it) of index objects; `quick` reads their footers only.

    `counts` says of pages how many text and binary files they have that are searched.
    """
    for meta in store.list(layout.index_prefix(disk_id)):
        if not layout.is_index_key(meta.key):
            continue
        try:
            frames = _footer(store, meta) if quick else _verified(store, meta)
        except NotFound:
            continue
        except Corrupt as error:
            yield meta.key, str(error).removeprefix(f"{meta.key}: ")
            continue
        for frame in frames:
            text, binary = counts.get(frame.page, (frame.files, frame.left_out))
            mine, others = (binary, text) if frame.kind == BINARY and frame.page in counts else (text, binary)
            if (frame.files, frame.left_out) != (mine, others):
                yield meta.key, f"counts {frame.files} files of page {frame.page.hex()}, which has {mine}"
                break
