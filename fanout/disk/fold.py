"""Folding: a tree's recent changes become pages, and their inline data becomes packs.

Owns writing snaps. A fold changes nothing anybody can see; it only shortens the next reader's way. Until the
snap object is there nothing refers to what a fold wrote.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from fanout.config import Tuning
from fanout.disk.data import Packer
from fanout.disk.state import State
from fanout.errors import Exists, NotFound, Unavailable, Unknown
from fanout.format import layout
from fanout.format.pack import is_text_pack
from fanout.format.tree import (
    DIR,
    Node,
    PageRef,
    Ref,
    Snap,
    decode_snap,
    encode_page,
    encode_snap,
    page_index,
    split_pages,
)
from fanout.runtime import Runtime
from fanout.store.base import Store

__all__ = ["fold"]

_UPLOADS = 8

Entries = list[tuple[bytes, Node]]


def fold(store: Store, disk_id: str, branch_uuid: str, state: State, runtime: Runtime, tuning: Tuning) -> Snap:
    """Write `state` as the branch's snap at its sequence number and return it; one that is there already serves too."""
    if state.seq == state.folded_seq:
        return state.snap
    began_s = runtime.uptime()
    moved = _move_blobs(store, disk_id, state, runtime, tuning)
    snap = _write_pages(store, disk_id, state, moved, runtime, tuning)
    key = layout.snap_key(disk_id, branch_uuid, state.seq)
    late = Unavailable(f"{key}: the fold took more than {tuning.unreferenced_s:g} s; its pages may be gone as garbage")
    if runtime.uptime() - began_s > tuning.unreferenced_s:
        raise late
    try:
        store.create(key, encode_snap(snap))
        if runtime.uptime() - began_s > tuning.unreferenced_s:  # frozen just here
            store.delete([key])
            raise late
    except (Exists, Unknown) as error:
        # Another process folded at the same point: the same tree in other objects. Only its are referenced.
        # Or it is our own, after a lost answer: either serves.
        try:
            return decode_snap(store.get(key), key)
        except NotFound:
            raise error from None
    return snap


def _move_blobs(
    store: Store, disk_id: str, state: State, runtime: Runtime, tuning: Tuning
) -> dict[tuple[bytes, int], Ref]:
    """Copy the inline frames the tree still refers to into packs; returns old (pack, offset) -> new ref."""
    blobs = state.blob_bytes()
    packer = Packer(store, disk_id, runtime, tuning, inline=False)
    moved: dict[tuple[bytes, int], Ref] = {}
    try:
        for path in sorted(state.changes):
            node = state.changes[path][1]
            for ref in node.data if node is not None else ():
                blob = blobs.get(ref.pack)
                if blob is not None and (ref.pack, ref.offset) not in moved:
                    frame = blob[ref.offset : ref.offset + ref.stored]
                    moved[ref.pack, ref.offset] = packer.add_frame(frame, ref.raw, ref.hash, is_text_pack(ref.pack))
        packer.finish()
    except BaseException:
        packer.abandon()
        raise
    return moved


def _write_pages(
    store: Store,
    disk_id: str,
    state: State,
    moved: Mapping[tuple[bytes, int], Ref],
    runtime: Runtime,
    tuning: Tuning,
) -> Snap:
    files = state.snap.files
    size = state.snap.bytes
    with ThreadPoolExecutor(_UPLOADS, "fanout-page") as pool:
        pages = _PageList(store, disk_id, state, tuning.page_entries, pool, runtime)
        for old, fresh in _regions(state, moved):
            if fresh is None:
                assert old is not None
                pages.keep(old)
                continue
            before = state.pages.load(old) if old is not None else ()
            files += sum(n.kind != DIR for _, n in fresh) - sum(n.kind != DIR for _, n in before)
            size += sum(n.size for _, n in fresh) - sum(n.size for _, n in before)
            pages.rewrite(fresh)
        refs = pages.finish()
    merges = tuple((uuid, brought, at) for uuid, (brought, at) in sorted(state.merges.items()))
    return Snap(state.seq, refs, files, size, merges, tuple(state.locks.values()))


class _PageList:
    """The new snap's pages as they come, in order. Rewritten ones swallow small neighbours, so that a tree that
    shrank does not keep its many pages.
    """

    def __init__(
        self,
        store: Store,
        disk_id: str,
        state: State,
        page_entries: int,
        pool: ThreadPoolExecutor,
        runtime: Runtime,
    ) -> None:
        self._runtime = runtime
        self._store = store
        self._disk_id = disk_id
        self._pages = state.pages
        self._page_entries = page_entries
        self._small = page_entries // 4
        self._pool = pool
        self._uploads: deque[Future[None]] = deque()
        self._done: list[PageRef] = []
        self._pending: Entries = []

    def keep(self, page: PageRef) -> None:
        """Take over an unchanged page."""
        if self._pending:
            room = self._page_entries - len(self._pending)
            if page.count <= room and min(page.count, len(self._pending)) <= self._small:
                self._pending += self._pages.load(page)
                return
            self._flush()
        self._done.append(page)

    def rewrite(self, entries: Entries) -> None:
        """Take a page's changed entries (none: it is gone)."""
        if entries and not self._pending and self._done:
            last = self._done[-1]
            if last.count + len(entries) <= self._page_entries and min(last.count, len(entries)) <= self._small:
                self._pending = list(self._pages.load(self._done.pop()))
        elif self._pending and len(self._pending) > self._small and len(entries) > self._small:
            self._flush()
        self._pending += entries
        while len(self._pending) > 8 * self._page_entries:
            head, self._pending = self._pending[: 4 * self._page_entries], self._pending[4 * self._page_entries :]
            self._write(head)

    def finish(self) -> tuple[PageRef, ...]:
        """Wait until all pages are stored and return them."""
        self._flush()
        while self._uploads:
            self._uploads.popleft().result()
        return tuple(self._done)

    def _flush(self) -> None:
        self._write(self._pending)
        self._pending = []

    def _write(self, entries: Entries) -> None:
        for part in split_pages(entries, self._page_entries):
            digest, data = encode_page(part, self._runtime.salt())
            self._done.append(PageRef(part[0][0], digest, len(part), len(data)))
            self._pages.remember(digest, tuple(part))
            if len(self._uploads) >= 2 * _UPLOADS:
                self._uploads.popleft().result()
            self._uploads.append(self._pool.submit(self._store.put, layout.page_key(self._disk_id, digest), data))


def _regions(state: State, moved: Mapping[tuple[bytes, int], Ref]) -> Iterator[tuple[PageRef | None, Entries | None]]:
    """Yield each old page with its new entries, or None where nothing in its range changed."""
    old = state.snap.pages
    grouped: dict[int, list[bytes]] = {}
    for path in sorted(state.changes):
        grouped.setdefault(page_index(old, path), []).append(path)
    if not old:
        yield None, list(_merged((), grouped.get(0, ()), state, moved))
        return
    for index, ref in enumerate(old):
        changed = grouped.get(index)
        if changed is None:
            yield ref, None
        else:
            yield ref, list(_merged(state.pages.load(ref), changed, state, moved))


def _merged(
    page: Iterable[tuple[bytes, Node]], changed: Iterable[bytes], state: State, moved: Mapping[tuple[bytes, int], Ref]
) -> Iterator[tuple[bytes, Node]]:
    entries = dict(page)
    for path in changed:
        node = state.changes[path][1]
        if node is None:
            entries.pop(path, None)
        else:
            entries[path] = _with_moved(node, moved)
    for path in sorted(entries):
        yield path, entries[path]


def _with_moved(node: Node, moved: Mapping[tuple[bytes, int], Ref]) -> Node:
    if not any((ref.pack, ref.offset) in moved for ref in node.data):
        return node
    data = tuple(_relocated(ref, moved.get((ref.pack, ref.offset))) for ref in node.data)
    return msgspec.structs.replace(node, data=data)


def _relocated(ref: Ref, to: Ref | None) -> Ref:
    if to is None:
        return ref
    return msgspec.structs.replace(to, skip=ref.skip, length=ref.length)
