"""The scan files that hold what one tree holds: which are on this host, which are to be built, which are patched over.

Owns the choice. Each page of a tree (a sorted range of paths) has a scan file of its text and one of its binary files,
named by the page's hash: branches that share pages share them, and they never change. What the log holds since, and
the few files of a page that differ from an earlier page's scan file, lie in patches, small scan files of their own.
Knows nothing of patterns.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal

from fanout.disk.data import Reader
from fanout.disk.state import State
from fanout.format.tree import Node, PageRef, content_hash, subtree_end
from fanout.view.cache import HostCache, Lease
from fanout.view.scan import Copy, Scan, is_binary, open_scan, searchable, write_scan

__all__ = ["Held", "Part", "Scans", "Wanted"]

#: How many files' paths and places this process keeps of scan files it has opened.
_OPEN_FILES = 1 << 18
#: A patch holds at most this much, in bytes and files; a tree is put together from at most so many.
_PATCH_BYTES = 32 << 20
_PATCH_FILES = 8192
_MAX_PATCHES = 8
#: Changes up to this much are patched as a whole, whatever is searched, so that the next search has them.
_EAGER_BYTES = 32 << 20

Files = Sequence[tuple[bytes, Node]]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which files of a tree are to be searched: those below `directory` that `selects`, binary ones if `binary`."""

    directory: bytes
    binary: bool
    selects: Callable[[bytes], bool] | None = None

    @property
    def start(self) -> bytes:
        return self.directory + b"/" if self.directory else b"\x01"

    @property
    def end(self) -> bytes | None:
        return subtree_end(self.directory) if self.directory else None

    def takes(self, path: bytes, node: Node | None) -> bool:
        """Whether a file of the tree is wanted."""
        if node is None or not searchable(node) or path < self.start or (self.end is not None and path >= self.end):
            return False
        return (self.binary or not is_binary(node)) and (self.selects is None or self.selects(path))


@dataclass(slots=True)
class Part:
    """One scan file and what of it the tree still has: the files of `live` (all, if None).

    `first` <= every path of it < `end` (None: no end). `build` makes it where it is not there, which `here` says;
    `weight` is about how many files it has. Parts of one kind, text or binary, follow each other; patches overlap all.
    """

    kind: Literal["text", "binary", "patch"]
    identity: str
    first: bytes
    end: bytes | None
    build: Callable[[int], int]
    here: bool
    weight: int
    live: Set[int] | None = None


@dataclass(slots=True)
class Held:
    """An opened scan file that cannot go away before `release`."""

    scan: Scan
    lease: Lease

    @property
    def warm(self) -> bool:
        """Whether it did not have to be built."""
        return self.lease.warm

    def release(self) -> None:
        self.lease.release()


class _Gone(Exception):
    """A scan file was evicted."""


@dataclass(slots=True)
class _Patches:
    """The patches of one disk that this process knows: which hold the content of which hash at a path."""

    places: dict[tuple[bytes, bytes], tuple[str, int]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Scans:
    """The scan files of a host cache, as one process sees them. Thread safe, blocking."""

    def __init__(self, cache: HostCache) -> None:
        self._cache = cache
        self._lock = threading.Lock()
        self._opened: OrderedDict[str, Scan] = OrderedDict()
        self._opened_files = 0
        self._patches: OrderedDict[str, _Patches] = OrderedDict()

    # -- one scan file -----------------------------------------------------------------------------------------

    def hold(self, part: Part) -> Held:
        """Return a part's scan file, building it if it is not there."""
        return self._hold(part.identity, part.build)

    def _hold(self, identity: str, build: Callable[[int], int]) -> Held:
        lease = self._cache.lease("scan", identity, build)
        try:
            return Held(self._open(identity, lease), lease)
        except BaseException:
            lease.release()
            raise

    def _hold_if_there(self, identity: str) -> Held | None:
        def build(_: int) -> int:
            raise _Gone

        try:
            return self._hold(identity, build)
        except _Gone:
            return None

    def _open(self, identity: str, lease: Lease) -> Scan:
        with self._lock:
            scan = self._opened.get(identity) if lease.warm else None
            if scan is not None:
                self._opened.move_to_end(identity)
                return scan
        scan = open_scan(lease.path)
        with self._lock:
            old = self._opened.pop(identity, None)
            self._opened_files += scan.files - (old.files if old else 0)
            self._opened[identity] = scan
            while self._opened_files > _OPEN_FILES and len(self._opened) > 1:
                self._opened_files -= self._opened.popitem(last=False)[1].files
        return scan

    # -- a tree ------------------------------------------------------------------------------------------------

    def parts(
        self, disk_id: str, state: State, reader: Reader, wanted: Wanted, stopped: Callable[[], bool]
    ) -> tuple[list[Part], list[Held]]:
        """Return the scan files to search for `wanted`, each kind's in order of paths, and what holds the patches.

        Loads only pages whose scan files are not on this host. The caller releases what it is handed.
        """
        blobs = state.blob_bytes()
        patched: dict[bytes, Node] = {}
        parts: list[Part] = []
        pages = list(state.page_refs(wanted.start, wanted.end))
        ends = [*(page.first for page in pages[1:]), wanted.end]
        for page, end in zip(pages, ends, strict=False):
            parts += self._page_parts(state, reader, blobs, page, end, wanted, patched, stopped)
        for path, node in self._changed(state, wanted):
            patched[path] = node
        patches, held = self._patch(disk_id, patched, reader, blobs, stopped)
        return [*patches, *parts], held

    def _page_parts(
        self,
        state: State,
        reader: Reader,
        blobs: Mapping[bytes, bytes],
        page: PageRef,
        end: bytes | None,
        wanted: Wanted,
        patched: dict[bytes, Node],
        stopped: Callable[[], bool],
    ) -> Iterator[Part]:
        name = page.hash.hex()[:48]
        text, binary = f"{name}-text", f"{name}-binary"
        here = self._cache.has("scan", text)
        only_text = not wanted.binary or (here and self._leaves_out(text) == 0)
        if here and (only_text or self._cache.has("scan", binary)):
            files: Files = ()
        else:
            files = [item for item in state.pages.load(page) if searchable(item[1])]
            some = [item for item in files if wanted.takes(*item) and item[0] not in state.changes]
            if 2 * sum(node.size for _, node in some) < sum(node.size for _, node in files):
                patched.update(some)
                return
            only_text = not wanted.binary or not any(is_binary(node) for _, node in files)
        kinds: tuple[Literal["text", "binary"], ...] = ("text",) if only_text else ("text", "binary")
        for kind in kinds:

            def build(fd: int, binary: bool = kind == "binary") -> int:
                found = files or [item for item in state.pages.load(page, keep=False) if searchable(item[1])]
                mine = [item for item in found if is_binary(item[1]) == binary]
                return write_scan(fd, mine, reader, blobs, left_out=len(found) - len(mine), stopped=stopped)

            identity = text if kind == "text" else binary
            yield Part(kind, identity, page.first, end, build, self._cache.has("scan", identity), page.count)

    def _leaves_out(self, identity: str) -> int:
        with self._lock:
            scan = self._opened.get(identity)
        if scan is not None:
            return scan.left_out
        held = self._hold_if_there(identity)
        if held is None:
            return -1
        held.release()
        return held.scan.left_out

    @staticmethod
    def _changed(state: State, wanted: Wanted) -> Iterable[tuple[bytes, Node]]:
        """The files that the log holds since the pages: all, where that is little."""
        changed = [(path, node) for path, (_, node) in state.changes.items() if node is not None and searchable(node)]
        if sum(node.size for _, node in changed) > _EAGER_BYTES:
            return [item for item in changed if wanted.takes(*item)]
        return [item for item in changed if wanted.binary or not is_binary(item[1])]

    # -- patches -----------------------------------------------------------------------------------------------

    def _patch(
        self,
        disk_id: str,
        files: Mapping[bytes, Node],
        reader: Reader,
        blobs: Mapping[bytes, bytes],
        stopped: Callable[[], bool],
    ) -> tuple[list[Part], list[Held]]:
        """Return parts that hold exactly `files`, from patches that are there and new ones; these are held."""
        if not files:
            return [], []
        with self._lock:
            known = self._patches.setdefault(disk_id, _Patches())
            self._patches.move_to_end(disk_id)
            while len(self._patches) > 64:
                self._patches.popitem(last=False)
        with known.lock:
            held: dict[str, Held] = {}
            try:
                return self._patched(disk_id, known, files, held, reader, blobs, stopped), list(held.values())
            except BaseException:
                for each in held.values():
                    each.release()
                raise

    def _patched(
        self,
        disk_id: str,
        known: _Patches,
        files: Mapping[bytes, Node],
        held: dict[str, Held],
        reader: Reader,
        blobs: Mapping[bytes, bytes],
        stopped: Callable[[], bool],
    ) -> list[Part]:
        wanted = [(path, files[path]) for path in sorted(files)]
        keys = [(path, content_hash(node)) for path, node in wanted]
        for identity in {known.places[key][0] for key in keys if key in known.places}:
            there = self._hold_if_there(identity)
            if there is not None:
                held[identity] = there
        live: dict[str, set[int]] = {}
        missing: list[tuple[bytes, Node]] = []
        for key, item in zip(keys, wanted, strict=True):
            place = known.places.get(key)
            if place is not None and place[0] in held:
                live.setdefault(place[0], set()).add(place[1])
            else:
                missing.append(item)
        if len(live) + (1 if missing else 0) > _MAX_PATCHES:
            live, missing = {}, wanted
        for chunk in _chunks(missing):
            identity, scan = self._new_patch(disk_id, chunk, known, held, reader, blobs, stopped)
            live[identity] = set(range(scan.files))
        if len(known.places) > 4 * len(keys) + _PATCH_FILES:
            known.places = {key: known.places[key] for key in keys}
        parts = []
        for identity, numbers in live.items():
            scan = held[identity].scan
            first, end = scan.path(min(numbers)), scan.path(max(numbers)) + b"\0"
            part = Part("patch", identity, first, end, _never, True, len(numbers))
            part.live = None if len(numbers) == scan.files else numbers
            parts.append(part)
        return sorted(parts, key=lambda part: part.first)

    def _new_patch(
        self,
        disk_id: str,
        chunk: Files,
        known: _Patches,
        held: dict[str, Held],
        reader: Reader,
        blobs: Mapping[bytes, bytes],
        stopped: Callable[[], bool],
    ) -> tuple[str, Scan]:
        keys = [(path, content_hash(node)) for path, node in chunk]
        digest = hashlib.sha256(disk_id.encode())
        for path, content in keys:
            digest.update(b"%d %s" % (len(path), path) + content)
        identity = f"{digest.hexdigest()[:48]}-patch"
        places = [known.places.get(key) for key in keys]
        copies = {
            number: Copy(held[place[0]].scan, place[1])
            for number, place in enumerate(places)
            if place is not None and place[0] in held
        }
        held[identity] = new = self._hold(
            identity, lambda fd: write_scan(fd, chunk, reader, blobs, copies=copies, stopped=stopped)
        )
        known.places.update((key, (identity, number)) for number, key in enumerate(keys))
        return identity, new.scan


def _chunks(files: Files) -> Iterator[Files]:
    """Cut files into runs that one patch may hold."""
    start = size = 0
    for at, (_, node) in enumerate(files):
        if at > start and (size + node.size > _PATCH_BYTES or at - start >= _PATCH_FILES):
            yield files[start:at]
            start, size = at, 0
        size += node.size
    if start < len(files):
        yield files[start:]


def _never(_: int) -> int:
    raise _Gone
