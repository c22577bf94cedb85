"""A branch's tree at one sequence number: an immutable snap plus the changes since.

Owns looking up, walking and comparing trees, loading only the pages that are touched. Knows nothing of how
commits are decided or stored.
"""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple

import msgspec

from fanout.errors import Corrupt, NotFound
from fanout.format import layout
from fanout.format.entry import ADDED, ATTRIBUTES, DELETED, MODIFIED, Entry, Put
from fanout.format.lock import Lock, locks_after
from fanout.format.tree import (
    Node,
    PageRef,
    Snap,
    decode_page,
    directory,
    page_index,
    root_id,
    same_content,
    same_node,
    subtree_end,
)
from fanout.store.base import Store

__all__ = ["Difference", "Pages", "State", "classify"]

Page = tuple[tuple[bytes, Node], ...]


#: How many pages are loaded at once where all of a tree is wanted.
_AHEAD = 8
#: The root directory of a tree in which nobody ever set it.
_ROOT = directory()


class Difference(NamedTuple):
    """One path that differs between two trees."""

    path: bytes
    before: Node | None
    after: Node | None


def classify(before: Node | None, after: Node | None) -> int:
    """Name the change from `before` to `after`: ADDED, MODIFIED, ATTRIBUTES or DELETED."""
    if after is None:
        return DELETED
    if before is None:
        return ADDED
    return ATTRIBUTES if same_content(before, after) else MODIFIED


class Pages:
    """Loads and keeps decoded pages of one disk, bounded by the number of entries held. Thread safe."""

    def __init__(self, store: Store, disk_id: str, max_entries: int) -> None:
        self._store = store
        self._disk_id = disk_id
        self._max_entries = max_entries
        self._held: OrderedDict[bytes, Page] = OrderedDict()
        self._entries = 0
        self._lock = threading.Lock()

    def load(self, ref: PageRef, *, keep: bool = True) -> Page:
        """Return a page's entries; `Corrupt` names the object. `keep` False leaves the cache to others."""
        with self._lock:
            page = self._held.get(ref.hash)
            if page is not None:
                self._held.move_to_end(ref.hash)
                return page
        key = layout.page_key(self._disk_id, ref.hash)
        try:
            data = self._store.get(key)
        except NotFound as error:
            raise Corrupt(f"{key} is missing, although a snap refers to it") from error
        if hashlib.sha256(data).digest() != ref.hash:
            raise Corrupt(f"{key}: does not match its hash")
        page = decode_page(data, key)
        if keep:
            self.remember(ref.hash, page)
        return page

    def each(self, refs: Iterable[PageRef]) -> Iterator[Page]:
        """Yield the entries of all these pages in order, the next ones being loaded in parallel meanwhile."""
        todo = iter(refs)
        pool = ThreadPoolExecutor(_AHEAD, "fanout-page")
        try:
            ahead: deque[Future[Page]] = deque(pool.submit(self.load, ref) for ref in islice(todo, _AHEAD))
            while ahead:
                page = ahead.popleft().result()
                ahead.extend(pool.submit(self.load, ref) for ref in islice(todo, 1))
                yield page
        finally:
            pool.shutdown(cancel_futures=True)

    def remember(self, page_hash: bytes, page: Page) -> None:
        """Keep a page that was just written or read."""
        with self._lock:
            if page_hash not in self._held:
                self._held[page_hash] = page
                self._entries += len(page)
            while self._entries > self._max_entries and len(self._held) > 1:
                _, old = self._held.popitem(last=False)
                self._entries -= len(old)


class State:
    """One immutable tree. `changes` maps a path to (seq, node or None) for every effect after the snap.

    `blobs` are the packs carried inside the entries after the snap. `folded_seq` is the snap's sequence number.
    `merges` maps the uuid of each branch that was merged in to (its last sequence number brought, ours then), `locks`
    the ids of the locks that are held to them.
    """

    __slots__ = ("_identity", "_order", "blobs", "changes", "folded_seq", "locks", "merges", "pages", "seq", "snap")

    def __init__(
        self,
        pages: Pages,
        snap: Snap,
        seq: int,
        changes: Mapping[bytes, tuple[int, Node | None]],
        blobs: Mapping[bytes, tuple[int, bytes]],
        merges: Mapping[str, tuple[int, int]] | None = None,
        locks: Mapping[str, Lock] | None = None,
    ) -> None:
        self.pages = pages
        self.snap = snap
        self.seq = seq
        self.changes = changes
        self.blobs = blobs
        self.merges = {uuid: (brought, at) for uuid, brought, at in snap.merges} if merges is None else merges
        self.locks = {lock.id: lock for lock in snap.locks} if locks is None else locks
        self.folded_seq = snap.seq
        self._order: list[bytes] | None = None
        self._identity = ""

    @property
    def root_id(self) -> str:
        """Identity of the folded part."""
        return root_id(self.snap.pages)

    @property
    def identity(self) -> str:
        """Identity of the whole tree: equal ones mean equal trees (64 hex digits). Computed once."""
        if not self._identity:
            self._identity = self._identify()
        return self._identity

    def _identify(self) -> str:
        if not self.changes:
            return self.root_id
        digest = hashlib.sha256(self.root_id.encode())
        digest.update(msgspec.msgpack.encode([(path, self.changes[path][1]) for path in sorted(self.changes)]))
        return digest.hexdigest()

    def blob_bytes(self) -> Mapping[bytes, bytes]:
        """Return the inline packs by pack id."""
        return {key: data for key, (_, data) in self.blobs.items()}

    def apply(self, entries: Iterable[Entry]) -> State:
        """Return the tree after `entries`, which follow this one without a gap."""
        changes, blobs, merges, seq = dict(self.changes), dict(self.blobs), dict(self.merges), self.seq
        locks = self.locks
        for entry in entries:
            if entry.seq != seq + 1:
                raise Corrupt(f"the log has a hole: entry {entry.seq} follows {seq}")
            seq = entry.seq
            for commit in entry.commits:
                if commit.merged_uuid:
                    merges[commit.merged_uuid] = (commit.merged_seq, seq)
                locks = locks_after(locks, commit.locks, seq)
                for effect in commit.effects:
                    changes[effect.path] = (seq, effect.node if isinstance(effect, Put) else None)
            for key, data in entry.blobs.items():
                blobs[key] = (seq, data)
        return State(self.pages, self.snap, seq, changes, blobs, merges, locks)

    def unlocked(self) -> State:
        """Return the same tree without locks: a branch does not inherit those of the branch it starts from."""
        return State(self.pages, self.snap, self.seq, self.changes, self.blobs, self.merges, {})

    def onto(self, snap: Snap) -> State:
        """Return the same tree resting on a newer snap of the same branch."""
        changes = {path: change for path, change in self.changes.items() if change[0] > snap.seq}
        blobs = {key: blob for key, blob in self.blobs.items() if blob[0] > snap.seq}
        merges, locks = (self.merges, self.locks) if self.seq >= snap.seq else (None, None)
        return State(self.pages, snap, max(self.seq, snap.seq), changes, blobs, merges, locks)

    def get(self, path: bytes) -> Node | None:
        """Return the node at `path`, or None."""
        change = self.changes.get(path)
        node = change[1] if change is not None else self.folded(path)
        return _ROOT if node is None and not path else node

    def nodes(self, paths: Iterable[bytes]) -> dict[bytes, Node]:
        """Return the nodes of those paths that are there."""
        return {path: node for path in paths if (node := self.get(path)) is not None}

    def folded(self, path: bytes) -> Node | None:
        """Return the node the snap alone has at `path`, or None."""
        if not self.snap.pages:
            return None
        page = self.pages.load(self.snap.pages[page_index(self.snap.pages, path)])
        at = bisect_left(page, path, key=_path_of)
        return page[at][1] if at < len(page) and page[at][0] == path else None

    def scan(
        self, start: bytes = b"", end: bytes | None = None, *, whole: bool = False
    ) -> Iterator[tuple[bytes, Node]]:
        """Yield (path, node) for start <= path < end, in byte order. `whole` as for `below`."""
        changed = self.changed_between(start, end)
        path = next(changed, None)
        for item in self._scan_folded(start, end, whole):
            while path is not None and path < item[0]:
                node = self.changes[path][1]
                if node is not None:
                    yield path, node
                path = next(changed, None)
            if path == item[0]:
                node = self.changes[path][1]
                if node is not None:
                    yield path, node
                path = next(changed, None)
            else:
                yield item
        while path is not None:
            node = self.changes[path][1]
            if node is not None:
                yield path, node
            path = next(changed, None)

    def below(self, path: bytes, *, whole: bool = False) -> Iterator[tuple[bytes, Node]]:
        """Yield everything below the directory `path` (all but the root itself for b""), in byte order.

        `whole` says that the caller will read to the end: pages are then loaded ahead, several at once.
        """
        if not path:
            yield from self.scan(b"\x01", whole=whole)
        else:
            yield from self.scan(path + b"/", subtree_end(path), whole=whole)

    def children(self, path: bytes, start_after: bytes = b"") -> Iterator[tuple[bytes, Node]]:
        """Yield (name, node) of one directory's own entries, in byte order of names, skipping what lies deeper."""
        prefix = path + b"/" if path else b""
        end = subtree_end(path) if path else None
        at = prefix + start_after + b"\0" if start_after else (prefix or b"\x01")
        while True:
            deeper = b""
            for found, node in self.scan(at, end):
                name = found[len(prefix) :]
                cut = name.find(b"/")
                if cut >= 0:
                    # Everything from here to subtree_end lies below one child: jump over it.
                    deeper = prefix + name[:cut]
                    break
                yield name, node
            if not deeper:
                break
            at = subtree_end(deeper)

    def has_children(self, path: bytes) -> bool:
        """Whether anything lies below `path`."""
        return next(iter(self.below(path)), None) is not None

    def diff(self, newer: State) -> Iterator[Difference]:
        """Yield what differs from this tree to `newer`, in byte order, reading only pages the two do not share."""
        mine = {page.hash for page in self.snap.pages}
        theirs = {page.hash for page in newer.snap.pages}
        candidates = set(self.changes) | set(newer.changes)
        for state, other in ((self, theirs), (newer, mine)):
            for ref in state.snap.pages:
                if ref.hash not in other:
                    candidates.update(path for path, _ in self.pages.load(ref, keep=False))
        for path in sorted(candidates):
            before, after = self.get(path), newer.get(path)
            if before is not after and not same_node(before, after):
                yield Difference(path, before, after)

    def changed_between(self, start: bytes, end: bytes | None) -> Iterator[bytes]:
        """Yield the paths start <= path < end that changed after the snap, in byte order."""
        if self._order is None:
            self._order = sorted(self.changes)
        order = self._order
        at = bisect_left(order, start)
        while at < len(order) and (end is None or order[at] < end):
            yield order[at]
            at += 1

    def _scan_folded(self, start: bytes, end: bytes | None, whole: bool) -> Iterator[tuple[bytes, Node]]:
        refs = self.page_refs(start, end)
        for page in self.pages.each(refs) if whole else map(self.pages.load, refs):
            at = bisect_left(page, start, key=_path_of)
            for item in page[at:]:
                if end is not None and item[0] >= end:
                    return
                yield item

    def page_refs(self, start: bytes, end: bytes | None) -> Iterator[PageRef]:
        """Yield the pages of the folded part that may hold a path of start <= path < end."""
        pages = self.snap.pages
        for index in range(page_index(pages, start), len(pages)):
            if end is not None and pages[index].first >= end:
                return
            yield pages[index]


def _path_of(item: tuple[bytes, Node]) -> bytes:
    return item[0]
