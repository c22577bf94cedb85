"""Reading what garbage collection says of a log: how far it is trimmed, and what is kept below.

Owns the lookup and the error of asking for what is gone. gc.py writes these records; docs/GC.md has the argument.
"""

from __future__ import annotations

from fanout.errors import Corrupt, NotFound
from fanout.format import layout
from fanout.format.trim import Kept, decode_kept
from fanout.store.base import Store

__all__ = ["Trimmed", "fence", "forget_trimmed", "kept", "refuse_trimmed"]

_ATTEMPTS = 5


class Trimmed(NotFound):
    """A commit that garbage collection has let go of. All after `boundary` are there, and so are their trees."""

    def __init__(self, seq: int, boundary: int) -> None:
        super().__init__(f"commit {seq} is no longer kept: garbage collection trimmed the history up to {boundary}")
        self.seq = seq
        self.boundary = boundary

    def __reduce__(self) -> tuple[type[Trimmed], tuple[int, int]]:
        return (type(self), (self.seq, self.boundary))


def fence(store: Store, disk_id: str, uuid: str) -> int:
    """Return up to where a log is trimmed or about to be; 0 for not at all. One listing."""
    return max(_numbers(store, layout.trim_prefix(disk_id, uuid)), default=0)


def kept(store: Store, disk_id: str, uuid: str) -> Kept:
    """Return what is kept of a log. One listing, and one get if it was ever trimmed."""
    prefix = layout.kept_prefix(disk_id, uuid)
    key = ""
    for _ in range(_ATTEMPTS):
        newest = max(_numbers(store, prefix), default=None)
        if newest is None:
            return Kept(0, {})
        key = layout.kept_key(disk_id, uuid, newest)
        try:
            found = decode_kept(store.get(key), key)
        except NotFound:
            continue  # a newer one has replaced it
        if found.boundary != newest:
            raise Corrupt(f"{key}: says it is of {found.boundary}")
        return found
    raise Corrupt(f"{key} was listed but cannot be read")


def refuse_trimmed(store: Store, disk_id: str, uuid: str, seq: int, last: int | None = None) -> None:
    """Raise `Trimmed` if entry `seq` is missing because it was trimmed; `last` ends the range that was asked for."""
    record = kept(store, disk_id, uuid)
    if not record.holds_entry(seq):
        gone = record.boundary - 1
        raise Trimmed(seq, gone if last is None else min(gone, last))


def forget_trimmed(store: Store, disk_id: str, uuid: str, seq: int, key: str) -> None:
    """Take a record at `key` that names the tree at `seq` back, and raise `Trimmed`, if that tree is going.

    The record was there before the boundary is looked at, and a collection looks at records after it has written its
    boundary: one of the two sees the other.
    """
    if seq < fence(store, disk_id, uuid):
        record = kept(store, disk_id, uuid)
        if seq < record.boundary and seq in record.points:
            return
        store.delete([key])
        raise Trimmed(seq, fence(store, disk_id, uuid) - 1)


def _numbers(store: Store, prefix: str) -> list[int]:
    return [layout.seq_of_key(meta.key) for meta in store.list(prefix) if layout.is_seq_key(meta.key)]
