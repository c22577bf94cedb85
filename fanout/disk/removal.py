"""Deleting a whole disk, so that nobody who still holds it open can commit into nothing.

Owns the order in which its objects go and the seals that stay. log.py tells who meets a seal.

A committer creates the entry after the newest it knows, without looking. So each log gets a seal at its end, and
the places of its newest entries are sealed instead of freed: those that a committer may still believe to be ahead of
the log, which is no longer than `stale_s` (docs/GC.md). One that slept longer looks for the disk itself.
"""

from __future__ import annotations

from functools import partial

from fanout.disk.fresh import store_now
from fanout.disk.record import create_record
from fanout.errors import Exists, NotFound
from fanout.format import layout
from fanout.format.entry import DiskRecord, decode_branch, encode_seal, is_seal
from fanout.runtime import Runtime
from fanout.store.base import Store

__all__ = ["remove_disk"]

_BATCH = 1000
#: A create may be on its way for so long after its tail was last believed in, and store clocks tick in seconds.
_SLACK_NS = 120 * 10**9


def remove_disk(store: Store, record: DiskRecord, runtime: Runtime, stale_s: float) -> None:
    """Delete all objects of a disk but its seals, its name last: until then it can be found, and deleted again."""
    for meta in list(store.list(layout.branch_prefix(record.id))):
        try:
            branch = decode_branch(store.get(meta.key), meta.key)
        except NotFound:
            continue  # somebody else is deleting it, too
        _seal_end(store, record.id, branch.uuid, branch.lineage[0][1] if branch.lineage else 0, runtime)
    young_ns = store_now(store, runtime) - int(stale_s * 1e9) - _SLACK_NS
    batch: list[str] = []
    last = layout.disk_key(record.id)
    for meta in store.list(layout.disk_prefix(record.id)):
        if meta.key == last:
            continue
        if layout.is_log_key(meta.key) and meta.modified_ns >= young_ns:
            if not is_seal(_content(store, meta.key)):
                store.put(meta.key, encode_seal(runtime.token_bytes(16)))
            continue
        batch.append(meta.key)
        if len(batch) >= _BATCH:
            store.delete(batch)
            batch = []
    store.delete([*batch, last])
    # Whoever stores an index looks for the record afterwards, and takes it back where there is none (index.py).
    store.delete([meta.key for meta in store.list(layout.index_prefix(record.id))])
    store.delete([layout.name_key(record.name)])


def _seal_end(store: Store, disk_id: str, uuid: str, begin: int, runtime: Runtime) -> None:
    """Put a seal where the log's next entry would go. Commits that come meanwhile are before it."""
    key = partial(layout.log_key, disk_id, uuid)
    tail = begin
    while True:
        found = (meta.key for meta in store.list(layout.log_prefix(disk_id, uuid), start_after=key(tail)))
        tail = max((layout.seq_of_key(there) for there in found if layout.is_seq_key(there)), default=tail)
        if tail > begin and is_seal(_content(store, key(tail))):
            return
        try:
            create_record(store, key(tail + 1), encode_seal(runtime.token_bytes(16)), "somebody was first", runtime)
            return
        except Exists:
            continue


def _content(store: Store, key: str) -> bytes:
    try:
        return store.get(key)
    except NotFound:
        return b""
