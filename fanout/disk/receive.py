"""Packs and nodes that were made elsewhere, by whoever may write the disk: nothing they say is believed.

Owns checking them before a commit refers to them. Knows nothing of how they arrive. Blocking, thread safe.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from fanout.disk.data import Reader
from fanout.disk.fresh import PackAges
from fanout.disk.paths import shown, tree_path
from fanout.disk.record import create_record
from fanout.errors import Corrupt, Invalid
from fanout.format import layout
from fanout.format.extents import size_of
from fanout.format.pack import ID_BYTES, TRAILER_BYTES, decode_footer, decode_frame, footer_bytes
from fanout.format.tree import DIR, FILE, HOLE, SYMLINK, Node, Ref
from fanout.runtime import Runtime
from fanout.store.base import Store

__all__ = ["MAX_PACK_BYTES", "Receiver", "check_node"]

#: The largest pack that is taken, and the largest frame in it.
MAX_PACK_BYTES = 64 << 20
_MAX_FRAME_BYTES = 64 << 20
#: How many frames of how many packs are remembered; others are read again.
_KNOWN_FRAMES = 200_000
_TIME_MAX_NS = 2**62
_ID_MAX = 2**32
_MAX_XATTRS_BYTES = 64 << 10
_MAX_TARGET_BYTES = 4095

_HEAD = b"FPK1"

_Frames = frozenset[tuple[int, int, int, bytes]]


class Receiver:
    """Takes packs and nodes for one disk."""

    def __init__(self, store: Store, disk_id: str, runtime: Runtime, ages: PackAges, reader: Reader) -> None:
        self._store = store
        self._disk_id = disk_id
        self._runtime = runtime
        self._ages = ages
        self._reader = reader
        self._known: OrderedDict[bytes, _Frames] = OrderedDict()
        self._frames = 0
        self._lock = threading.Lock()

    def store_pack(self, identity: bytes, pack: bytes) -> None:
        """Verify a pack and make it durable; doing so again is harmless.

        `Invalid` for what is no pack, `Exists` where another pack has this id.
        """
        if len(identity) != ID_BYTES:
            raise Invalid.argument("pack", identity.hex(), f"an id of {ID_BYTES} bytes")
        if len(pack) > MAX_PACK_BYTES:
            raise Invalid(f"body: a pack of {len(pack)} bytes; at most {MAX_PACK_BYTES}")
        try:
            frames = _verified(pack)
        except Corrupt as error:
            raise Invalid(str(error)) from None
        self._ages.note(identity)
        key = layout.pack_key(self._disk_id, identity)
        # Create-only: an id that is there already is the echo of a lost answer, or somebody else's pack.
        create_record(self._store, key, pack, f"there is another pack {identity.hex()}", self._runtime)
        self._remember(identity, frames)

    def pack_piece(self, identity: bytes, offset: int, length: int) -> bytes:
        """Return bytes of a pack, fewer where it ends; `NotFound`. Who takes them apart verifies them."""
        return self._store.get(layout.pack_key(self._disk_id, identity), offset, length)

    def check(self, nodes: Iterable[tuple[bytes, Node]], *blobs: Mapping[bytes, bytes]) -> None:
        """Raise `Invalid` unless these are nodes that a tree of this disk can hold.

        `blobs` are inline packs: new ones, and those of the tree that the nodes were made for. All other packs that are
        referred to are in the store.
        """
        held = {pack: data for each in blobs for pack, data in each.items()}
        digests: list[tuple[bytes, Node]] = []
        seen: set[Ref] = set()
        before: bytes | None = None
        for path, node in nodes:
            check_node(path, node)
            if before is not None and path <= before:
                raise _bad(path, "paths come in byte order, each once")
            before = path
            for ref in node.data:
                if ref.pack != HOLE and ref not in seen:
                    self._check_ref(path, ref, held)
                    seen.add(ref)
            if node.digest:
                digests.append((path, node))
        self._check_digests(digests, held)

    def _check_ref(self, path: bytes, ref: Ref, held: Mapping[bytes, bytes]) -> None:
        if ref.pack in held:
            try:
                decode_frame(memoryview(held[ref.pack])[ref.offset : ref.offset + ref.stored], ref, "")
            except Corrupt:
                raise _bad(path, "a run of it is not in its inline pack") from None
        elif (ref.offset, ref.stored, ref.raw, ref.hash) not in self._frames_of(path, ref.pack):
            raise _bad(path, f"pack {ref.pack.hex()} does not hold a run of it")

    def _check_digests(self, nodes: list[tuple[bytes, Node]], held: Mapping[bytes, bytes]) -> None:
        """See that files in shared frames are what they say: what comes later may be stored as a reference to them."""
        wanted: dict[tuple[bytes, int], list[tuple[bytes, Node]]] = {}
        for path, node in nodes:
            if len(node.data) != 1 or node.data[0].pack == HOLE:
                raise _bad(path, "only a file in one run has a digest of its own")
            wanted.setdefault((node.data[0].pack, node.data[0].offset), []).append((path, node))
        for piece in self._reader.plan(node.data[0] for _, node in nodes):
            for ref, raw in self._reader.fetch(piece, held):
                for path, node in wanted[ref.pack, ref.offset]:
                    mine = node.data[0]
                    if hashlib.sha256(raw[mine.skip : mine.skip + mine.size]).digest() != node.digest:
                        raise _bad(path, "its content does not match its digest")

    def _frames_of(self, path: bytes, identity: bytes) -> _Frames:
        with self._lock:
            known = self._known.get(identity)
            if known is not None:
                self._known.move_to_end(identity)
                return known
        if len(identity) != ID_BYTES:
            raise _bad(path, "it names no pack")
        key = layout.pack_key(self._disk_id, identity)
        meta = self._store.head(key)
        if meta is None:
            raise _bad(path, f"pack {identity.hex()} is not there")
        length = footer_bytes(self._store.get(key, max(meta.size - TRAILER_BYTES, 0)))
        frames = frozenset(decode_footer(_HEAD + self._store.get(key, max(meta.size - length, 0)), key))
        self._remember(identity, frames)
        return frames

    def _remember(self, identity: bytes, frames: _Frames) -> None:
        with self._lock:
            if identity not in self._known:
                self._known[identity] = frames
                self._frames += len(frames)
            while self._frames > _KNOWN_FRAMES and len(self._known) > 1:
                self._frames -= len(self._known.popitem(last=False)[1])


def _verified(pack: bytes) -> _Frames:
    """Return a pack's frames, each decoded and compared with its hash."""
    index = decode_footer(pack, "body")
    view = memoryview(pack)
    for offset, stored, raw, digest in index:
        if raw > _MAX_FRAME_BYTES or offset < len(_HEAD) or stored < 0:
            raise Corrupt(f"body: no frame of {raw} bytes can be at {offset}")
        decode_frame(view[offset : offset + stored], Ref(b"", offset, stored, raw, digest), "body")
    return frozenset(index)


def check_node(path: bytes, node: Node) -> None:
    """Raise `Invalid` unless a tree can have this node; what its runs refer to is not looked at."""
    try:
        if tree_path("path", path) != path:
            raise Invalid.argument("path", path, "no leading '/'")
    except Invalid as error:
        raise Invalid(f"nodes: {error}") from None
    if not 0 <= node.mode <= 0o7777 or not (0 <= node.uid < _ID_MAX and 0 <= node.gid < _ID_MAX):
        raise _bad(path, "its mode or owner is out of range")
    if abs(node.mtime_ns) > _TIME_MAX_NS:
        raise _bad(path, "its time is out of range")
    if node.kind not in (DIR, FILE, SYMLINK) or len(node.link) not in (0, 16) or len(node.digest) not in (0, 32):
        raise _bad(path, "it is no file, directory or link")
    if node.kind != FILE and (node.data or node.size or node.link or node.digest):
        raise _bad(path, "only a file has contents")
    if (node.kind == SYMLINK) != bool(node.target) or b"\0" in node.target or len(node.target) > _MAX_TARGET_BYTES:
        raise _bad(path, "a link, and nothing else, points somewhere")
    if any(ref.pack == HOLE and (ref.offset, ref.stored, ref.hash, ref.skip) != (0, 0, b"", 0) for ref in node.data):
        raise _bad(path, "a hole of it is none")
    if any(
        ref.skip < 0 or ref.length < -1 or ref.skip + ref.size > ref.raw or min(ref.stored, ref.offset) < 0
        or (ref.raw > _MAX_FRAME_BYTES and ref.pack != HOLE)
        for ref in node.data
    ):  # fmt: skip
        raise _bad(path, "a run of it lies outside of its frame")
    if any(ref.size <= 0 for ref in node.data) or size_of(node.data) != node.size:
        raise _bad(path, f"its runs do not add up to {node.size} bytes")
    names = [name for name, _ in node.xattrs]
    if len(set(names)) != len(names) or any(
        not name.startswith(b"user.") or name.startswith(b"user.overlay.") or b"\0" in name for name in names
    ):
        raise _bad(path, "its attributes are user.*, each once")
    if sum(len(name) + len(value) for name, value in node.xattrs) > _MAX_XATTRS_BYTES:
        raise _bad(path, f"its attributes are longer than {_MAX_XATTRS_BYTES} bytes")


def _bad(path: bytes, what: str) -> Invalid:
    return Invalid(f"nodes: {shown(path)!r}: {what}")
