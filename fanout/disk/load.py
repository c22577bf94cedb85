"""Opening a tree: which logs and which snap make up a branch at a sequence number.

Owns lineage and the read path (docs/FORMAT.md has it as steps). Knows nothing of commits to come.
"""

from __future__ import annotations

from collections.abc import Iterator

from fanout.disk.log import Log
from fanout.disk.state import Pages, State
from fanout.disk.trim import Trimmed, kept
from fanout.errors import Corrupt, NotFound
from fanout.format import layout
from fanout.format.entry import BranchRecord
from fanout.format.tree import Snap, decode_snap
from fanout.runtime import Runtime
from fanout.store.base import Store

__all__ = ["lineage_at", "load_state", "newest_snap", "spans"]


def spans(record: BranchRecord, until: int | None) -> Iterator[tuple[str, int, int | None]]:
    """Yield (branch uuid, after, to), newest first: whose log holds which entries up to `until` (None: the tail)."""
    chain: tuple[tuple[str, int | None], ...] = ((record.uuid, until), *record.lineage)
    for place, (uuid, high) in enumerate(chain):
        oldest = place + 1 == len(chain)
        low = 0 if oldest else record.lineage[place][1]
        if until is not None:
            high = until if high is None else min(high, until)
        until = high
        if high is not None and high <= low and not oldest:
            continue  # the point is older than this branch
        yield uuid, low, high


def lineage_at(record: BranchRecord, seq: int) -> tuple[tuple[str, int], ...]:
    """Return the lineage of a branch that starts where `record`'s branch is at `seq`, with the log that holds it first.

    A branch that itself began later than `seq` has no part in it.
    """
    chain = ((record.uuid, seq), *record.lineage)
    first = next((place for place, (_, fork) in enumerate(record.lineage) if seq > fork), len(chain) - 1)
    return tuple((uuid, min(high, seq)) for uuid, high in chain[first:])


def load_state(
    store: Store, disk_id: str, record: BranchRecord, pages: Pages, runtime: Runtime, seq: int | None = None
) -> State:
    """Load a branch's tree at `seq` (None: the tail) from the newest snap at or before it and the log after."""
    state = State(pages, Snap(0, (), 0, 0), 0, {}, {})
    todo: list[tuple[str, int | None]] = []
    for uuid, _, high in spans(record, seq):
        todo.append((uuid, high))
        snap = newest_snap(store, disk_id, uuid, high)
        if snap is not None:
            state = State(pages, snap, snap.seq, {}, {})
            break
    for uuid, high in reversed(todo):
        try:
            state = state.apply(Log(store, disk_id, uuid, runtime).after(state.seq, high, far=True))
        except Trimmed as error:
            if seq is not None:
                raise
            raise Corrupt(f"{layout.snap_prefix(disk_id, uuid)}: a snap is missing ({error})") from error
        if uuid != record.uuid:
            state = state.unlocked()
    return state


def newest_snap(store: Store, disk_id: str, uuid: str, until: int | None, after: int = 0) -> Snap | None:
    """Load the newest snap with after < seq <= until from one branch's own; None where there is none.

    `Trimmed` for an `until` that garbage collection has let go of.
    """
    if until is not None and until <= after:
        return None
    newest: str | None = None
    beyond = False
    for meta in store.list(layout.snap_prefix(disk_id, uuid), start_after=layout.snap_key(disk_id, uuid, after)):
        if not layout.is_seq_key(meta.key):
            continue
        if until is not None and layout.seq_of_key(meta.key) > until:
            beyond = True
            break
        newest = meta.key
    if beyond and until is not None:
        # Only where a newer snap is may the log be trimmed, and only then may a snap here be a stray of a fold that
        # came too late: what a point rests on is written down.
        record = kept(store, disk_id, uuid)
        if until < record.boundary:
            if until not in record.points:
                raise Trimmed(until, record.boundary - 1)
            base = record.points[until]
            newest = layout.snap_key(disk_id, uuid, base) if base > after else None
    if newest is None:
        return None
    try:
        snap = decode_snap(store.get(newest), newest)
    except NotFound as error:
        record = kept(store, disk_id, uuid)
        if until is not None and until < record.boundary and until not in record.points:
            raise Trimmed(until, record.boundary - 1) from None  # it went while we looked
        raise Corrupt(f"{newest} was listed but cannot be read") from error
    if snap.seq != layout.seq_of_key(newest):
        raise Corrupt(f"{newest}: says it is the snap of {snap.seq}")
    return snap
