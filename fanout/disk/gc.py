"""Garbage collection: trims old history, and deletes what nothing refers to.

Owns the order of things that makes this safe beside commits, folds, new branches, other collections and being killed
(docs/GC.md has the argument): fence, look, write down what is kept, delete what refers before what is referred to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from itertools import islice

from fanout.disk.calls import old_calls
from fanout.disk.fresh import store_now
from fanout.disk.index import unused_indexes
from fanout.disk.log import Log
from fanout.disk.reach import LogView, Reach
from fanout.disk.record import pause, read_back
from fanout.errors import Exists, Invalid, Unavailable, Unknown
from fanout.format import layout
from fanout.format.entry import DiskRecord, Entry
from fanout.format.trim import Kept, encode_kept
from fanout.runtime import Runtime
from fanout.store.base import ObjectMeta, Store

__all__ = ["GRACE_S", "KEEP_HISTORY_S", "Collected", "collect"]

#: What is unreferenced is deleted when it is this old.
GRACE_S = 24 * 3600.0
#: How long a tree can be read after it was superseded, unless a checkpoint or branch keeps it for ever.
KEEP_HISTORY_S = 30 * 24 * 3600.0
#: A probe of the store, or a look at its clock, may be under way whatever the grace.
_PROBE_NS = 3600 * 10**9
_BATCH = 1000
_ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class Collected:
    """What was deleted (or would be): numbers of objects, bytes, and by branch name how far its log is trimmed."""

    packs: int
    pages: int
    snaps: int
    entries: int
    indexes: int
    probes: int
    freed_bytes: int
    kept_packs: int
    kept_bytes: int
    trimmed: dict[str, int]


@dataclass(slots=True)
class _Garbage:
    """What is to go, key -> bytes, in the order of deletion."""

    entries: dict[str, int]
    snaps: dict[str, int]
    records: dict[str, int]
    uploads: dict[str, int]
    indexes: dict[str, int]
    pages: dict[str, int]
    packs: dict[str, int]
    probes: dict[str, int]

    def keys(self) -> Iterator[str]:
        for kind in self._kinds():
            yield from kind

    def freed(self) -> int:
        return sum(sum(kind.values()) for kind in self._kinds())

    def _kinds(self) -> tuple[dict[str, int], ...]:
        return (
            self.entries, self.snaps, self.records, self.uploads, self.indexes, self.pages, self.packs, self.probes,
        )  # fmt: skip


def collect(
    store: Store,
    record: DiskRecord,
    runtime: Runtime,
    *,
    grace_s: float = GRACE_S,
    keep_history_s: float = KEEP_HISTORY_S,
    dry_run: bool = False,
) -> Collected:
    """Delete what no branch, checkpoint or kept history needs and is older than `grace_s` by the store's clock.

    `Corrupt`: something that is needed is damaged; then nothing is deleted. Interrupted anywhere it can be repeated.
    """
    for name, value in (("grace_s", grace_s), ("keep_history_s", keep_history_s)):
        if not isinstance(value, int | float) or not 0 <= value <= 1e10:
            raise Invalid.argument(name, value, "seconds, 0 or more")
    now_ns = store_now(store, runtime)
    oldest_ns = now_ns - int(grace_s * 1e9)
    horizon_ns = now_ns - int(max(grace_s, keep_history_s) * 1e9)
    reach = Reach(store, record, horizon_ns, now_ns, int(grace_s * 1e9))
    reach.scan()
    pages, _ = _unmarked(store, f"{layout.disk_prefix(record.id)}page/", reach.pages, oldest_ns)
    packs, there = _unmarked(store, f"{layout.disk_prefix(record.id)}pack/", reach.packs, oldest_ns)
    raised = {uuid for uuid, view in reach.logs.items() if view.boundary > view.record.boundary}
    if not dry_run and (raised or pages or packs):
        for uuid in raised:
            _announce(store, layout.trim_key(record.id, uuid, reach.logs[uuid].boundary), runtime)
        if packs:
            _stop_late_commits(store, record, reach, runtime)
        # Whatever was named or committed before the fences is seen now; what comes after them cannot need what goes.
        reach.scan()
        pages = {key: size for key, size in pages.items() if _identity(key) not in reach.pages}
        packs = {key: size for key, size in packs.items() if _identity(key) not in reach.packs}
        for view_uuid, view in reach.logs.items():
            if view.boundary > view.record.boundary:
                _announce(store, layout.trim_key(record.id, view_uuid, view.boundary), runtime)
                store.put(layout.kept_key(record.id, view_uuid, view.boundary), encode_kept(view.kept))
    probes = _old(store.list("probe/"), min(oldest_ns, now_ns - _PROBE_NS)) | old_calls(store, now_ns)
    indexes = unused_indexes(store, record.id, reach.pages, oldest_ns)
    garbage = _Garbage({}, {}, {}, dict(reach.old_uploads), indexes, pages, packs, probes)
    for uuid, view in reach.logs.items():
        _add_trimmed(garbage, record.id, uuid, view)
    if not dry_run:
        _delete(store, garbage.keys())
    names = {each.uuid: name for name, each in reach.branches.items()}
    return Collected(
        packs=len(packs),
        pages=len(pages),
        snaps=len(garbage.snaps),
        entries=len(garbage.entries),
        indexes=len(indexes),
        probes=len(garbage.probes),
        freed_bytes=garbage.freed(),
        kept_packs=there["count"] - len(packs),
        kept_bytes=there["bytes"] - sum(packs.values()),
        trimmed={names.get(uuid, uuid): view.boundary for uuid, view in sorted(reach.logs.items()) if view.boundary},
    )


def _unmarked(store: Store, prefix: str, marked: Set[bytes], oldest_ns: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return key -> bytes of what is old and not marked, and `count` and `bytes` of all there is."""
    found: dict[str, int] = {}
    there = {"count": 0, "bytes": 0}
    for meta in store.list(prefix):
        there["count"] += 1
        there["bytes"] += meta.size
        if meta.modified_ns <= oldest_ns and _identity(meta.key) not in marked:
            found[meta.key] = meta.size
    return found, there


def _old(metas: Iterable[ObjectMeta], oldest_ns: int) -> dict[str, int]:
    return {meta.key: meta.size for meta in metas if meta.modified_ns <= oldest_ns}


def _identity(key: str) -> bytes | None:
    """Return the page hash or pack id that a key ends with; None for a stray, which nothing refers to."""
    try:
        return bytes.fromhex(key.rpartition("/")[2])
    except ValueError:
        return None


def _announce(store: Store, key: str, runtime: Runtime) -> None:
    """Create a fence. Whose it is does not matter: its key says all."""
    for attempt in range(_ATTEMPTS):
        if attempt:
            pause(runtime, attempt)
        try:
            store.create(key, b"")
            return
        except Exists:
            return
        except Unknown as error:
            if read_back(store, key, lambda: store.get(key), error, runtime) is not None:
                return
        except Unavailable:
            if attempt == _ATTEMPTS - 1:
                raise
    raise Unavailable(f"{store.url} did not store {key}")


def _stop_late_commits(store: Store, record: DiskRecord, reach: Reach, runtime: Runtime) -> None:
    """Take the next place of every log with an empty entry.

    A committer that was frozen just before its create, for so long that its packs look like garbage, finds the place
    taken, and looks at the age of its packs before it tries the next.
    """
    known = {record.main, *(each.uuid for each in reach.branches.values())}
    for uuid in sorted(known & reach.logs.keys()):
        log = Log(store, record.id, uuid, runtime)
        log.append(
            reach.logs[uuid].tail,
            lambda seq, write_id: Entry(write_id, seq, runtime.now_ns(), ()),
            lambda entries: None,
        )


def _add_trimmed(garbage: _Garbage, disk_id: str, uuid: str, view: LogView) -> None:
    """Add the entries and snaps below a log's boundary that no point needs, strays of late writers among them."""
    if not view.boundary:
        return
    kept = _still_kept(view)
    for seq, size in view.entries.items():
        if not kept.holds_entry(seq):
            garbage.entries[layout.log_key(disk_id, uuid, seq)] = size
    for seq, size in view.snaps.items():
        if not kept.holds_snap(seq):
            garbage.snaps[layout.snap_key(disk_id, uuid, seq)] = size
    garbage.records.update((layout.kept_key(disk_id, uuid, seq), 0) for seq in view.records if seq < view.boundary)
    garbage.records.update((layout.trim_key(disk_id, uuid, seq), 0) for seq in view.fences if seq < view.boundary)


def _still_kept(view: LogView) -> Kept:
    """What readers go by: the new record if the boundary was raised, else the one that is there."""
    return view.kept if view.boundary > view.record.boundary else view.record


def _delete(store: Store, keys: Iterator[str]) -> None:
    while batch := list(islice(keys, _BATCH)):
        store.delete(batch)
