"""File bytes in and out of packs: writes new packs in parallel, reads verified ranges.

Owns packing decisions (inline or pack, text or binary, extents) and fetching. Knows nothing of paths or trees.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from fanout.config import Tuning
from fanout.disk.fresh import PackAges
from fanout.errors import Corrupt, NotFound
from fanout.format import layout
from fanout.format.pack import PackBuilder, decode_frame, encode_frame, is_text, pack_id
from fanout.format.tree import HOLE, Ref
from fanout.runtime import Runtime

__all__ = ["Decoded", "Frames", "PackSink", "PackSource", "Packed", "Packer", "Reader", "Slice"]

#: Frames of one pack closer than this are fetched with one request.
_COALESCE_GAP = 64 << 10
#: Holes are handed out in pieces of this many zero bytes.
_HOLE_CHUNK = 1 << 20
#: A request is cut here, so that transfers run in parallel and memory stays bounded.
_COALESCE_MAX = 4 << 20


#: Frames with their raw bytes. Close it where it is not used to its end: others may wait for what it holds.
Decoded = Generator[tuple[Ref, bytes], None, None]


class PackSink(Protocol):
    """Where packs go; a `Store` is one."""

    def put(self, key: str, data: bytes) -> None: ...


class PackSource(Protocol):
    """Where packs come from; a `Store` is one."""

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Packed:
    """What a `Packer` made: blobs to carry inside the entry (by pack id), and how many bytes went to packs."""

    blobs: Mapping[bytes, bytes]
    pack_bytes: int


class Packer:
    """Takes file contents, gives back refs; uploads packs in the background as they fill.

    Nothing refers to the packs until an entry does. Until `finish`, refs may name packs that are not durable.
    Use from one thread.
    """

    def __init__(
        self,
        store: PackSink,
        disk_id: str,
        runtime: Runtime,
        tuning: Tuning,
        *,
        inline: bool = True,
        ages: PackAges | None = None,
    ) -> None:
        self._ages = ages
        self._store = store
        self._disk_id = disk_id
        self._runtime = runtime
        self.tuning = tuning
        self._inline = inline
        self._open: dict[bool, PackBuilder] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._uploads: list[Future[None]] = []
        self._slots = threading.BoundedSemaphore(4)
        self.pack_bytes = 0

    def add(self, raw: bytes, text: bool) -> Ref:
        """Pack one run of bytes (a whole small file or one extent)."""
        frame, digest = encode_frame(raw)
        return self.add_frame(frame, len(raw), digest, text)

    def add_frame(self, frame: bytes, raw_length: int, digest: bytes, text: bool) -> Ref:
        """Pack an already encoded frame."""
        builder = self._open.get(text)
        if builder is None:
            builder = self._open[text] = PackBuilder(pack_id(self._runtime.token_bytes(16), text))
        ref = builder.add(frame, raw_length, digest)
        if builder.size >= self.tuning.pack_bytes:
            self._upload(self._open.pop(text))
        return ref

    def add_content(self, size: int, read: Callable[[int], bytes]) -> tuple[Ref, ...]:
        """Pack a file of about `size` bytes by calling `read(n)` for the next n bytes until it gives b""."""
        tuning = self.tuning
        step = size if size <= tuning.small_file_bytes else tuning.extent_bytes
        refs: list[Ref] = []
        text = True
        while chunk := read(max(step, 1)):
            if not refs:
                text = is_text(chunk)
            refs.append(self.add(chunk, text))
            step = tuning.extent_bytes
        return tuple(refs)

    def finish(self) -> Packed:
        """Make everything durable, or hand small packs back to be carried inside the entry."""
        rest = [builder for builder in self._open.values() if len(builder)]
        self._open.clear()
        blobs: dict[bytes, bytes] = {}
        if self._inline and not self._uploads and sum(b.size for b in rest) <= self.tuning.inline_bytes:
            blobs = {builder.id: builder.finish() for builder in rest}
        else:
            for builder in rest:
                self._upload(builder)
        self._drain()
        return Packed(blobs, self.pack_bytes)

    def abandon(self) -> None:
        """Stop: packs already stored stay behind as garbage."""
        for upload in self._uploads:
            upload.cancel()
        if self._pool:
            self._pool.shutdown(wait=True)

    def _upload(self, builder: PackBuilder) -> None:
        data = builder.finish()
        self.pack_bytes += len(data)
        if self._ages is not None:
            self._ages.note(builder.id)
        self._slots.acquire()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(4, "fanout-pack")
        self._uploads.append(self._pool.submit(self._store_pack, builder.id, data))

    def _store_pack(self, identity: bytes, data: bytes) -> None:
        try:
            # A pack id is random, so a plain put cannot hit anything but its own lost answer.
            self._store.put(layout.pack_key(self._disk_id, identity), data)
        finally:
            self._slots.release()

    def _drain(self) -> None:
        try:
            for upload in self._uploads:
                upload.result()
        finally:
            if self._pool:
                self._pool.shutdown(wait=True)
                self._pool = None


@dataclass(slots=True)
class Slice:
    """One request of a batch read: the frames of one pack that one ranged get brings."""

    pack: bytes
    start: int
    end: int
    refs: list[Ref] = field(default_factory=list)


class Frames(Protocol):
    """Where frames come from, many at once; a `Reader` is one."""

    def plan(self, refs: Iterable[Ref]) -> list[Slice]: ...

    def fetch(self, piece: Slice, blobs: Mapping[bytes, bytes]) -> Decoded: ...


class Reader:
    """Reads and verifies frames of one disk's packs. Thread safe. Keeps a bounded memory of small whole frames."""

    def __init__(self, store: PackSource, disk_id: str, *, cache_bytes: int = 32 << 20) -> None:
        self._store = store
        self._disk_id = disk_id
        self._cache_bytes = cache_bytes
        self._cache: OrderedDict[tuple[bytes, int], bytes] = OrderedDict()
        self._cached = 0
        self._lock = threading.Lock()

    def frame(self, ref: Ref, blobs: Mapping[bytes, bytes]) -> bytes:
        """Return the whole raw frame of `ref`, verified; `Corrupt` names the pack."""
        if ref.pack == HOLE:
            return bytes(ref.raw)
        blob = blobs.get(ref.pack)
        where = f"pack {ref.pack.hex()}"
        if blob is not None:
            return decode_frame(memoryview(blob)[ref.offset : ref.offset + ref.stored], ref, where)
        key = (ref.pack, ref.offset)
        with self._lock:
            raw = self._cache.get(key)
            if raw is not None:
                self._cache.move_to_end(key)
                return raw
        pack_key = layout.pack_key(self._disk_id, ref.pack)
        try:
            data = self._store.get(pack_key, ref.offset, ref.stored)
        except NotFound as error:
            raise Corrupt(f"{pack_key} is missing, although the tree refers to it") from error
        raw = decode_frame(data, ref, pack_key)
        self._remember(key, raw)
        return raw

    def read(self, refs: Sequence[Ref], blobs: Mapping[bytes, bytes]) -> bytes:
        """Return a file's whole content."""
        return b"".join(self.chunks(refs, blobs))

    def chunks(self, refs: Iterable[Ref], blobs: Mapping[bytes, bytes]) -> Iterator[bytes]:
        """Yield a file's content run by run, long holes in pieces."""
        for ref in refs:
            if ref.pack == HOLE:
                zeros = bytes(min(ref.size, _HOLE_CHUNK))
                for left in range(ref.size, 0, -_HOLE_CHUNK):
                    yield zeros if left >= len(zeros) else zeros[:left]
                continue
            raw = self.frame(ref, blobs)
            yield raw if ref.length < 0 else raw[ref.skip : ref.skip + ref.length]

    def plan(self, refs: Iterable[Ref]) -> list[Slice]:
        """Group the distinct stored frames of `refs` into ranged reads, by pack and offset."""
        frames = sorted({(r.pack, r.offset): r for r in refs if r.pack != HOLE}.items())
        slices: list[Slice] = []
        for (pack, offset), ref in frames:
            last = slices[-1] if slices else None
            end = offset + ref.stored
            if (
                last is None
                or last.pack != pack
                or offset - last.end > _COALESCE_GAP
                or end - last.start > _COALESCE_MAX
            ):
                last = Slice(pack, offset, end)
                slices.append(last)
            last.refs.append(ref)
            last.end = max(last.end, end)
        return slices

    def fetch(self, piece: Slice, blobs: Mapping[bytes, bytes]) -> Decoded:
        """Fetch one slice with one request (none for a blob) and yield its frames, verified."""
        return self.decode(piece, self.load(piece, blobs))

    def load(self, piece: Slice, blobs: Mapping[bytes, bytes]) -> memoryview:
        """Return the stored bytes of one slice, as they are."""
        blob = blobs.get(piece.pack)
        if blob is not None:
            return memoryview(blob)[piece.start : piece.end]
        key = layout.pack_key(self._disk_id, piece.pack)
        try:
            return memoryview(self._store.get(key, piece.start, piece.end - piece.start))
        except NotFound as error:
            raise Corrupt(f"{key} is missing, although the tree refers to it") from error

    def decode(self, piece: Slice, data: memoryview) -> Decoded:
        """Yield the frames of a slice from its stored bytes, verified."""
        where = layout.pack_key(self._disk_id, piece.pack)
        for ref in piece.refs:
            at = ref.offset - piece.start
            yield ref, decode_frame(data[at : at + ref.stored], ref, where)

    def _remember(self, key: tuple[bytes, int], raw: bytes) -> None:
        if len(raw) > self._cache_bytes // 8:
            return
        with self._lock:
            if key not in self._cache:
                self._cache[key] = raw
                self._cached += len(raw)
            while self._cached > self._cache_bytes:
                _, old = self._cache.popitem(last=False)
                self._cached -= len(old)
