"""What of a disk is needed: which entries, snaps, pages and packs its branches and checkpoints rest on.

Owns that question for garbage collection (docs/GC.md has the rules). Changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from fanout.disk.leftovers import list_uploads, packs_of_uploads
from fanout.disk.load import lineage_at
from fanout.disk.state import Pages
from fanout.errors import Corrupt, NotFound
from fanout.format import layout
from fanout.format.entry import (
    BranchRecord,
    CheckpointRecord,
    DiskRecord,
    Effect,
    Put,
    decode_branch,
    decode_checkpoint,
    decode_entry,
)
from fanout.format.tree import Node, PageRef, decode_snap
from fanout.format.trim import Kept, decode_kept
from fanout.store.base import Store

__all__ = ["LogView", "Reach", "in_parallel", "list_logs"]

_PARALLEL = 8
_CHUNK = 256
#: How often a scan begins anew when something goes away under it: another collection is at work.
_ATTEMPTS = 3

T = TypeVar("T")
R = TypeVar("R")
Place = tuple[str, int]


@dataclass(slots=True)
class LogView:
    """One branch's log as it was listed. Sizes in bytes by sequence number; `snap_times` by the store's clock.

    `fences` are the boundaries announced, `records` those of which it was written down what is kept, `record` the
    newest of these; `boundary` and `points` are what this collection has to keep.
    """

    fork: int = 0
    entries: dict[int, int] = field(default_factory=dict)
    snaps: dict[int, int] = field(default_factory=dict)
    snap_times: dict[int, int] = field(default_factory=dict)
    fences: list[int] = field(default_factory=list)
    records: list[int] = field(default_factory=list)
    record: Kept = field(default_factory=lambda: Kept(0, {}))
    boundary: int = 0
    points: dict[int, int] = field(default_factory=dict)

    @property
    def tail(self) -> int:
        return max(self.entries, default=max(self.fork, self.boundary))

    @property
    def kept(self) -> Kept:
        """What this collection keeps."""
        return Kept(self.boundary, {point: base for point, base in self.points.items() if point < self.boundary})

    def base_of(self, point: int) -> int | None:
        """Return the snap that a point rests on (0: none of this log); None for a point that is gone already."""
        if point < self.record.boundary:
            return self.record.points.get(point)
        return max((seq for seq in self.snaps if self.record.boundary <= seq <= point), default=self.record.boundary)


def list_logs(store: Store, disk: DiskRecord) -> dict[str, LogView]:
    """List the logs of a disk, by branch uuid, reading no object."""
    logs: dict[str, LogView] = {disk.main: LogView()}
    for what in ("log", "snap", "trim", "kept"):
        for meta in store.list(f"{layout.disk_prefix(disk.id)}{what}/"):
            if not layout.is_seq_key(meta.key):
                continue
            uuid, seq = meta.key.split("/")[-2], layout.seq_of_key(meta.key)
            view = logs.setdefault(uuid, LogView())
            match what:
                case "log":
                    view.entries[seq] = meta.size
                case "snap":
                    view.snaps[seq] = meta.size
                    view.snap_times[seq] = meta.modified_ns
                case "trim":
                    view.fences.append(seq)
                case "kept":
                    view.records.append(seq)
    return logs


class Reach:
    """Marks what is needed. `scan` as often as there may be news; marks are never taken back.

    History superseded before `horizon_ns`, by the store's clock (which says `now_ns`), is not needed for itself, nor
    multipart uploads that ended more than `grace_ns` ago: `old_uploads` maps their keys to bytes.
    """

    def __init__(self, store: Store, record: DiskRecord, horizon_ns: int, now_ns: int, grace_ns: int) -> None:
        self.packs: set[bytes] = set()
        self.pages: set[bytes] = set()
        self.logs: dict[str, LogView] = {}
        self.branches: dict[str, BranchRecord] = {}
        self.checkpoints: dict[str, CheckpointRecord] = {}
        self.old_uploads: dict[str, int] = {}
        self._store = store
        self._disk = record
        self._horizon_ns = horizon_ns
        self._now_ns = now_ns
        self._grace_ns = grace_ns
        self._loader = Pages(store, record.id, 1)
        self._chosen: dict[str, int] = {}
        self._merges: set[Place] = set()
        self._snaps_done: set[Place] = set()
        self._entries_done: set[Place] = set()

    def scan(self) -> None:
        """Look at everything that is listed, and mark what is needed. `Corrupt`: the disk is damaged."""
        for attempt in range(_ATTEMPTS):
            try:
                self._scan()
                return
            except (NotFound, Corrupt) as error:
                if attempt == _ATTEMPTS - 1:
                    raise Corrupt(f"{error}; nothing was deleted, `fanout fsck` tells what is damaged") from error

    def _scan(self) -> None:
        self._mark_uploads()
        # Logs before branches: a log that is seen has a record that is seen.
        self.logs = list_logs(self._store, self._disk)
        for uuid, view in self.logs.items():
            if view.records:
                key = layout.kept_key(self._disk.id, uuid, view.records[-1])
                view.record = decode_kept(self._store.get(key), key)
        self._load_records()
        for uuid, view in self.logs.items():
            self._choose_boundary(uuid, view)
        for uuid, view in self.logs.items():
            self._mark_from_boundary(uuid, view)
        todo = set(self._named_points())
        seen: set[Place] = set()
        while todo:
            seen |= todo
            for uuid, point in todo:
                self._mark_point(uuid, point)
            todo = {place for merge in self._merges for place in self._resolve(*merge)} - seen

    # -- what there is ----------------------------------------------------------------------------------------

    def _load_records(self) -> None:
        def load(prefix: str, known: dict[str, T], decode: Callable[[bytes, str], T]) -> None:
            for meta in self._store.list(prefix):
                name = layout.name_of_key(meta.key, prefix)
                if name not in known:
                    known[name] = decode(self._store.get(meta.key), meta.key)

        load(layout.checkpoint_prefix(self._disk.id), self.checkpoints, decode_checkpoint)
        load(layout.branch_prefix(self._disk.id), self.branches, decode_branch)
        for record in self.branches.values():
            view = self.logs.setdefault(record.uuid, LogView())
            view.fork = record.lineage[0][1] if record.lineage else 0

    def _named_points(self) -> Iterator[Place]:
        """Yield the points that checkpoints name and branches begin at."""
        for record in self.branches.values():
            for uuid, seq in record.lineage:
                yield from self._resolve(uuid, seq)
        for checkpoint in self.checkpoints.values():
            yield from self._resolve(checkpoint.branch_uuid, checkpoint.seq)

    def _resolve(self, uuid: str, seq: int) -> Iterator[Place]:
        """Yield the logs, and how far of each, that the tree of a branch at `seq` may rest on."""
        record = next((each for each in self.branches.values() if each.uuid == uuid), None)
        yield from lineage_at(record, seq) if record is not None else ((uuid, seq),)

    def _mark_uploads(self) -> None:
        """Keep what open uploads stored. Before the logs: one that is completed meanwhile is seen there."""
        self.old_uploads = {}
        for view in list_uploads(self._store, self._disk.id).values():
            if view.is_over(self._now_ns, self._grace_ns):
                self.old_uploads.update(view.keys)
            else:
                self.packs.update(packs_of_uploads(self._store, view))

    # -- what of it is needed ---------------------------------------------------------------------------------

    def _choose_boundary(self, uuid: str, view: LogView) -> None:
        old = (s for s, time_ns in view.snap_times.items() if time_ns <= self._horizon_ns and s >= view.record.boundary)
        chosen = max(self._chosen.get(uuid, 0), view.record.boundary, *view.fences, *old)
        self._chosen[uuid] = view.boundary = chosen
        first = max(chosen, view.fork) + 1
        missing = next((seq for seq in range(first, view.tail + 1) if seq not in view.entries), None)
        if missing is not None:
            raise Corrupt(f"{layout.log_key(self._disk.id, uuid, missing)} is missing")
        if chosen and chosen not in view.snaps:
            raise Corrupt(f"{layout.snap_key(self._disk.id, uuid, chosen)} is missing, on which the trimmed log rests")

    def _mark_from_boundary(self, uuid: str, view: LogView) -> None:
        self._mark_snaps(uuid, (seq for seq in view.snaps if seq >= view.boundary))
        self._mark_entries(uuid, (seq for seq in view.entries if seq >= view.boundary))

    def _mark_point(self, uuid: str, point: int) -> None:
        view = self.logs.get(uuid)
        if view is None or point >= view.boundary:
            return
        base = view.base_of(point)
        if base is None:
            return  # it was gone before this collection; whoever is naming it now will find out
        view.points[point] = base
        self._mark_snaps(uuid, (base,) if base else ())
        self._mark_entries(uuid, (seq for seq in range(max(base, view.fork) + 1, point + 1)))

    def _mark_snaps(self, uuid: str, seqs: Iterable[int]) -> None:
        for seq in seqs:
            if (uuid, seq) in self._snaps_done:
                continue
            key = layout.snap_key(self._disk.id, uuid, seq)
            snap = decode_snap(self._store.get(key), key)
            self._merges.update((merged, brought) for merged, brought, _ in snap.merges)
            fresh = [page for page in snap.pages if page.hash not in self.pages]
            for page, nodes in in_parallel(self._load_page, fresh):
                self._mark_nodes(nodes)
                self.pages.add(page.hash)
            self._snaps_done.add((uuid, seq))

    def _mark_entries(self, uuid: str, seqs: Iterable[int]) -> None:
        fresh = (seq for seq in seqs if (uuid, seq) not in self._entries_done)
        for seq, (merges, effects) in in_parallel(lambda seq: (seq, self._load_entry(uuid, seq)), fresh):
            self._merges.update(merges)
            self._mark_nodes(effect.node for effect in effects if isinstance(effect, Put))
            self._entries_done.add((uuid, seq))

    def _mark_nodes(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            for ref in node.data:
                self.packs.add(ref.pack)

    def _load_page(self, page: PageRef) -> tuple[PageRef, list[Node]]:
        return page, [node for _, node in self._loader.load(page, keep=False)]

    def _load_entry(self, uuid: str, seq: int) -> tuple[list[Place], list[Effect]]:
        key = layout.log_key(self._disk.id, uuid, seq)
        commits = decode_entry(self._store.get(key), key).commits
        merges = [(commit.merged_uuid, commit.merged_seq) for commit in commits if commit.merged_uuid]
        return merges, [effect for commit in commits for effect in commit.effects]


def in_parallel(call: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yield call(item) in order, some at once, in bounded memory."""
    iterator = iter(items)
    chunk = list(islice(iterator, _CHUNK))
    if not chunk:
        return
    with ThreadPoolExecutor(_PARALLEL, "fanout-reach") as pool:
        while chunk:
            yield from pool.map(call, chunk)
            chunk = list(islice(iterator, _CHUNK))
