"""Folding: a tree's recent changes become pages, and their inline data becomes packs.

Owns writing snaps. A fold changes nothing anybody can see; it only shortens the next reader's way. Until the
snap object is there nothing refers to what a fold wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec

from fanout.config import Tuning
from fanout.disk.data import Packer
from fanout.disk.state import State
from fanout.errors import Exists
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

Entries = list[tuple[bytes, Node]]


def fold(store: Store, disk_id: str, branch_uuid: str, state: State, runtime: Runtime, tuning: Tuning) -> Snap:
    """Write `state` as the branch's snap at its sequence number and return it; one that is there already serves too."""
    if state.seq == state.folded_seq:
        return state.snap
    moved = _move_blobs(store, disk_id, state, runtime, tuning)
    snap = _write_pages(store, disk_id, state, moved, tuning)
    key = layout.snap_key(disk_id, branch_uuid, state.seq)
    try:
        store.create(key, encode_snap(snap))
    except Exists:
        # Another process folded at the same point: the same tree in other objects. Only its are referenced.
        return decode_snap(store.get(key), key)
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
    store: Store, disk_id: str, state: State, moved: Mapping[tuple[bytes, int], Ref], tuning: Tuning
) -> Snap:
    files = state.snap.files
    size = state.snap.bytes
    pages: list[PageRef] = []
    with ThreadPoolExecutor(8, "fanout-page") as pool:
        uploads = []
        for old, fresh in _regions(state, moved):
            if fresh is None:
                assert old is not None
                pages.append(old)
                continue
            before = dict(state.pages.load(old)) if old is not None else {}
            files += sum(n.kind != DIR for _, n in fresh) - sum(n.kind != DIR for n in before.values())
            size += sum(n.size for _, n in fresh) - sum(n.size for n in before.values())
            for part in split_pages(fresh, tuning.page_entries):
                digest, data = encode_page(part)
                pages.append(PageRef(part[0][0], digest, len(part), len(data)))
                state.pages.remember(digest, tuple(part))
                uploads.append(pool.submit(store.put, layout.page_key(disk_id, digest), data))
        for upload in uploads:
            upload.result()
    return Snap(state.seq, tuple(pages), files, size)


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
