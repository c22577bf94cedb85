"""Verifying a disk end to end: every object that anything needs, its hashes, its references, and that they agree.

Owns what is checked, in one pass over the logs, one over the trees and one over the packs, in bounded memory. What the
damage affects is damage.py's. Changes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

from fanout.disk.damage import Damage, Line, Problem, verify_page
from fanout.disk.index import damaged_indexes
from fanout.disk.reach import LogView, in_parallel, list_logs
from fanout.disk.state import Pages, State
from fanout.errors import Corrupt, NotFound
from fanout.format import layout
from fanout.format.entry import (
    BranchRecord,
    CheckpointRecord,
    DiskRecord,
    Entry,
    Put,
    decode_branch,
    decode_checkpoint,
    decode_disk,
    decode_entry,
)
from fanout.format.extents import size_of
from fanout.format.pack import decode_footer, decode_frame, is_text_pack
from fanout.format.tree import DIR, FILE, HOLE, SYMLINK, Node, PageRef, Ref, decode_snap, parents, subtree_end
from fanout.format.trim import Kept, decode_kept
from fanout.runtime import Runtime
from fanout.store.base import ObjectMeta, Store
from fanout.store.wrap import Metered

__all__ = ["Checked", "check"]

#: The end of a pack: checksum, length and magic of its footer.
_TRAILER = 24
_HEAD = b"FPK1"
_ATTEMPTS = 3

T = TypeVar("T")


@dataclass(slots=True)
class Checked:
    """What was looked at, and every problem. `files` counts those of all branches and checkpoints, each tree once."""

    problems: list[Problem] = field(default_factory=list)
    more_problems: int = 0
    entries: int = 0
    snaps: int = 0
    pages: int = 0
    packs: int = 0
    files: int = 0
    bytes_read: int = 0


def check(store: Store, record: DiskRecord, runtime: Runtime, *, quick: bool = False) -> Checked:
    """Verify a disk. `quick` leaves out decoding the frames of packs: that is, it does not read file contents.

    Errors other than damage (`Unavailable`, `Denied`) are raised.
    """
    for attempt in range(_ATTEMPTS):
        run = _Check(store, record, runtime, quick)
        checked = run.run()
        # A collection beside us takes away what we have seen listed; look again before crying wolf.
        if not checked.problems or attempt == _ATTEMPTS - 1 or not run.trimmed_meanwhile():
            break
    return checked


class _Check:
    def __init__(self, store: Store, record: DiskRecord, runtime: Runtime, quick: bool) -> None:
        self._store = Metered(store)
        self._disk = record
        self._quick = quick
        self._logs = list_logs(self._store, record)
        self._damage = Damage(self._store, record.id, self._logs, runtime)
        self._branches: dict[str, BranchRecord] = {}
        self._checkpoints: dict[str, CheckpointRecord] = {}
        self._pages = Pages(self._store, record.id, 16 << 10)
        self._seen_pages: dict[bytes, tuple[bytes, int, int]] = {}
        self._searched: dict[bytes, tuple[int, int]] = {}  # how many text and binary files of a page are searched
        self._refs: dict[bytes, set[int]] = {}
        self._trees: set[str] = set()
        self._counted: set[str] = set()
        self._lock = threading.Lock()
        self._result = Checked()

    def run(self) -> Checked:
        self._check_disk_records()
        self._load_records()
        for uuid, view in self._logs.items():
            self._check_log(uuid, view)
        for line in self._lines():
            self._check_tree(line)
        self._check_packs()
        self._damage.trace(self._lines(), self._history(), self._kept_entries())
        for key, what in damaged_indexes(self._store, self._disk.id, self._searched, quick=self._quick):
            self._damage.add(key, f"{what}; nothing needs it, it may be deleted")
        self._result.problems = list(self._damage.problems.values())
        self._result.more_problems = self._damage.more
        self._result.bytes_read = self._store.usage().bytes_read
        return self._result

    def trimmed_meanwhile(self) -> bool:
        now = list_logs(self._store, self._disk)
        return any(now[uuid].records != view.records for uuid, view in self._logs.items() if uuid in now)

    # -- records ------------------------------------------------------------------------------------------------

    def _check_disk_records(self) -> None:
        for key in (layout.disk_key(self._disk.id), layout.name_key(self._disk.name)):
            found = self._load(key, lambda data, key: decode_disk(data, key))
            if found is not None and found != self._disk:
                self._damage.add(key, f"is of disk {found.id} called {found.name!r}; another record says otherwise")
            if found is None:
                self._damage.everything(key, "the disk, if opened by " + ("id" if key.endswith("/disk") else "name"))

    def _load_records(self) -> None:
        def load(prefix: str, into: dict[str, T], what: str, decode: Callable[[bytes, str], T]) -> None:
            for meta in self._store.list(prefix):
                found = self._load(meta.key, decode)
                name = layout.name_of_key(meta.key, prefix)
                if found is None:
                    self._damage.everything(meta.key, f"{what}{name}")
                else:
                    into[name] = found

        load(layout.branch_prefix(self._disk.id), self._branches, "", decode_branch)
        load(layout.checkpoint_prefix(self._disk.id), self._checkpoints, "checkpoint ", decode_checkpoint)
        main_key = layout.branch_key(self._disk.id, layout.MAIN)
        main = self._branches.get(layout.MAIN)
        if main is None and main_key not in self._damage.problems:
            self._damage.add(main_key, "is missing")
        if main is not None and (main.uuid != self._disk.main or main.lineage):
            self._damage.add(main_key, f"is not the branch {self._disk.main} of the disk's record")
        # What is called main is found without its record.
        self._branches[layout.MAIN] = BranchRecord(self._disk.main, (), self._disk.created_ns)
        for record in self._branches.values():
            view = self._logs.setdefault(record.uuid, LogView())
            view.fork = record.lineage[0][1] if record.lineage else 0
        self._check_unnamed_logs()
        for uuid, view in self._logs.items():
            self._load_kept(uuid, view)
        by_uuid = {record.uuid: record for record in self._branches.values()}
        for name, checkpoint in self._checkpoints.items():
            key = layout.checkpoint_key(self._disk.id, name)
            if checkpoint.branch_uuid not in by_uuid:
                self._damage.add(key, f"names a branch that is not there, {checkpoint.branch!r}")
                self._damage.everything(key, f"checkpoint {name}")

    def _check_unnamed_logs(self) -> None:
        named = {record.uuid for record in self._branches.values()}
        prefix = layout.branch_prefix(self._disk.id)
        lost = any(key.startswith(prefix) for key in self._damage.problems)
        for uuid, view in self._logs.items():
            if uuid not in named and (view.entries or view.snaps):
                view.fork = min([*view.entries, *view.snaps]) - 1
                if not lost:
                    self._damage.add(f"{prefix}?", f"no record names the branch {uuid}, which has commits")

    def _load_kept(self, uuid: str, view: LogView) -> None:
        """Load what a log keeps below its boundary; a record that is lost is made up from what has to be kept."""
        fence = max(view.fences, default=0)
        if view.records:
            key = layout.kept_key(self._disk.id, uuid, view.records[-1])
            view.record = self._load(key, decode_kept) or self._guess_kept(uuid, view, view.records[-1])
        elif any(seq not in view.entries for seq in range(view.fork + 1, fence + 1)):
            self._damage.add(layout.kept_key(self._disk.id, uuid, fence), "is missing, although the log is trimmed")
            view.record = self._guess_kept(uuid, view, fence)
        view.boundary = view.record.boundary
        for base in {view.boundary, *view.record.points.values()} - {0}:
            if base not in view.snaps:
                self._damage.add(layout.snap_key(self._disk.id, uuid, base), "is missing")

    def _guess_kept(self, uuid: str, view: LogView, boundary: int) -> Kept:
        named = [place for record in self._branches.values() for place in record.lineage]
        named += [(checkpoint.branch_uuid, checkpoint.seq) for checkpoint in self._checkpoints.values()]
        return Kept(boundary, {seq: view.base_of(seq) or 0 for of, seq in named if of == uuid and seq < boundary})

    def _load(self, key: str, decode: Callable[[bytes, str], T]) -> T | None:
        """Get and decode an object; None, and a problem, if it is not there or damaged."""
        try:
            return decode(self._store.get(key), key)
        except NotFound:
            self._damage.add(key, "is missing")
        except Corrupt as error:
            self._damage.add(key, str(error).removeprefix(f"{key}: "))
        return None

    # -- lines --------------------------------------------------------------------------------------------------

    def _lines(self) -> Iterator[Line]:
        for name, record in self._branches.items():
            yield Line(name, record, None, layout.branch_key(self._disk.id, name))
        by_uuid = {record.uuid: record for record in self._branches.values()}
        for name, checkpoint in self._checkpoints.items():
            if checkpoint.branch_uuid in by_uuid:
                key = layout.checkpoint_key(self._disk.id, name)
                yield Line(f"checkpoint {name}", by_uuid[checkpoint.branch_uuid], checkpoint.seq, key)

    def _history(self) -> Iterator[Line]:
        for name, record in self._branches.items():
            view = self._logs[record.uuid]
            for seq in sorted({*view.snaps, *view.entries}):
                if seq >= view.boundary and seq > view.fork:
                    yield Line(f"commit {seq} of {name}", record, seq)

    def _kept_entries(self) -> Iterator[tuple[str, str, int]]:
        for name, record in self._branches.items():
            view = self._logs[record.uuid]
            yield from ((name, record.uuid, seq) for seq in view.entries if view.record.holds_entry(seq))

    # -- logs ---------------------------------------------------------------------------------------------------

    def _check_log(self, uuid: str, view: LogView) -> None:
        """Check one log from its boundary on, with the snaps on the way, and the islands below that points need."""
        first = max(view.boundary, view.fork + 1)
        islands = {
            seq
            for point, base in view.record.points.items()
            for seq in range(max(base, view.fork) + 1, point + 1)
            if seq < first
        }
        wanted = [*sorted(islands), *range(first, max(view.tail, *view.snaps, 0) + 1)]
        for seq in view.entries:
            if seq <= view.fork:
                self._damage.add(
                    layout.log_key(self._disk.id, uuid, seq), f"is before the branch began, at {view.fork}"
                )
        state = self._start(uuid, view)
        snaps = sorted(seq for seq in view.snaps if view.record.holds_snap(seq))
        writes: set[int] = set()
        pending: list[Entry] = []
        todo = iter(snaps)
        snap = next(todo, None)
        while snap is not None and snap < first:
            self._check_snap(uuid, snap, None)
            snap = next(todo, None)
        for seq, entry in in_parallel(lambda seq: (seq, self._load_log(uuid, view, seq)), wanted):
            if entry is not None:
                self._check_entry(uuid, seq, entry, writes)
            if seq < first:
                continue
            if entry is None or (state is not None and entry.seq != seq):
                state, pending = None, []
            elif state is not None:
                pending.append(entry)
                if len(pending) >= 256:
                    state, pending = state.apply(pending), []
            while snap is not None and snap <= seq:
                before = state.apply(pending) if state is not None and snap == seq else None
                state, pending = self._check_snap(uuid, snap, before), []
                snap = next(todo, None)

    def _start(self, uuid: str, view: LogView) -> State | None:
        """Return the tree a log begins with; None for a trimmed one, which begins with a snap."""
        record = next((each for each in self._branches.values() if each.uuid == uuid), None)
        if view.boundary or record is None:
            return None
        chain = self._damage.chain(Line("", record, view.fork))
        if chain is None or any(key in self._damage.problems for key in chain.keys(self._disk.id)):
            return None
        try:
            return self._damage.state(chain).unlocked()
        except (Corrupt, NotFound):
            return None  # it is reported where it belongs

    def _load_log(self, uuid: str, view: LogView, seq: int) -> Entry | None:
        key = layout.log_key(self._disk.id, uuid, seq)
        if seq not in view.entries and self._store.head(key) is None:
            self._damage.add(key, "is missing, although the log goes on")
            return None
        return self._load(key, decode_entry)

    def _check_entry(self, uuid: str, seq: int, entry: Entry, writes: set[int]) -> None:
        self._result.entries += 1
        key = layout.log_key(self._disk.id, uuid, seq)
        if entry.seq != seq:
            self._damage.add(key, f"says it is entry {entry.seq}")
        write = hash(entry.write_id)
        if write in writes:
            self._damage.add(key, "has the write id of an earlier entry: it was written twice")
        writes.add(write)
        carried: dict[bytes, set[int]] = {}
        for pack, blob in entry.blobs.items():
            try:
                carried[pack] = set(self._frames(blob, f"{key}: its inline pack {pack.hex()}"))
            except Corrupt as error:
                self._damage.add(key, str(error).removeprefix(f"{key}: "))
                carried[pack] = set()
        for commit in entry.commits:
            for effect in commit.effects:
                if isinstance(effect, Put):
                    self._check_node(key, effect.path, effect.node)
                    for ref in effect.node.data:
                        if ref.pack in carried and _print(ref) not in carried[ref.pack]:
                            self._damage.add(key, f"{effect.path!r} refers to what its inline pack does not hold")
                        elif ref.pack not in carried:
                            self._want(ref)

    # -- trees --------------------------------------------------------------------------------------------------

    def _check_snap(self, uuid: str, seq: int, before: State | None) -> State | None:
        """Check a snap and its pages, and that it is `before`, the log replayed; returns its tree, if it is whole."""
        key = layout.snap_key(self._disk.id, uuid, seq)
        snap = self._load(key, decode_snap)
        if snap is None:
            return None
        self._result.snaps += 1
        if snap.seq != seq:
            self._damage.add(key, f"says it is the snap of {snap.seq}")
            return None
        fresh = [page for page in snap.pages if page.hash not in self._seen_pages]
        for page, summary in in_parallel(self._check_page, fresh):
            self._seen_pages[page.hash] = summary
        if any(page.hash in self._damage.bad_pages for page in snap.pages):
            return None
        for one, two in pairwise(snap.pages):
            if self._seen_pages[one.hash][0] >= two.first:
                self._damage.add(key, f"its pages overlap at {two.first!r}")
                return None
        files = sum(self._seen_pages[page.hash][1] for page in snap.pages)
        size = sum(self._seen_pages[page.hash][2] for page in snap.pages)
        if (files, size) != (snap.files, snap.bytes):
            self._damage.add(key, f"counts {snap.files} files of {snap.bytes} bytes; there are {files} of {size}")
        state = State(self._pages, snap, seq, {}, {})
        if before is not None:
            self._compare(key, before, state)
            if before.locks != state.locks or before.merges != state.merges:
                self._damage.add(key, "has other locks or merges than the log says")
        return state

    def _compare(self, key: str, before: State, state: State) -> None:
        try:
            different = next(before.diff(state), None)
        except (Corrupt, NotFound):
            return  # what it begins with is damaged, and is reported where that was found
        if different is not None:
            self._damage.add(key, f"differs at {different.path!r} from what the log says")

    def _check_page(self, page: PageRef) -> tuple[PageRef, tuple[bytes, int, int]]:
        """Check one page; returns its last path, its files and their bytes."""
        key = layout.page_key(self._disk.id, page.hash)
        entries = self._load(key, lambda data, key: verify_page(data, page, key))
        if entries is None:
            self._damage.bad_pages.add(page.hash)
            return page, (b"", 0, 0)
        with self._lock:
            self._result.pages += 1
            for path, node in entries:
                self._check_node(key, path, node)
                for ref in node.data:
                    self._want(ref)
        texts = [not n.data or is_text_pack(n.data[0].pack) for _, n in entries if n.kind == FILE and n.size > 0]
        self._searched[page.hash] = sum(texts), len(texts) - sum(texts)
        files = [node for _, node in entries if node.kind != DIR]
        return page, (entries[-1][0], len(files), sum(node.size for _, node in entries))

    def _check_node(self, key: str, path: bytes, node: Node) -> None:
        wrong = ""
        if node.kind not in (DIR, FILE, SYMLINK):
            wrong = f"is of kind {node.kind}"
        elif node.kind == FILE and size_of(node.data) != node.size:
            wrong = f"has {node.size} bytes, its parts {size_of(node.data)}"
        elif node.kind != FILE and node.data:
            wrong = "is no file and has contents"
        elif any(ref.length >= 0 and (ref.skip < 0 or ref.skip + ref.length > ref.raw) for ref in node.data):
            wrong = "refers beyond the end of a run"
        if wrong:
            self._damage.add(key, f"{path!r} {wrong}")

    def _check_tree(self, line: Line) -> None:
        """Check that what lies in a directory lies in one. Each folded tree once, then what changed since."""
        chain = self._damage.chain(line)
        if chain is None:
            self._damage.add(line.key, "names a commit that is no longer kept")
            self._damage.everything(line.key, line.label)
            return
        try:
            state = self._damage.state(chain)
            where = next(reversed(list(chain.keys(self._disk.id))), layout.branch_prefix(self._disk.id))
            if state.root_id not in self._trees:
                self._trees.add(state.root_id)
                folded = State(self._pages, state.snap, state.snap.seq, {}, {})
                for path, above in _misplaced(folded.scan()):
                    self._damage.add(where, f"{path!r} is there, and {above!r} is no directory")
            if state.identity not in self._counted:
                self._counted.add(state.identity)
                self._result.files += state.snap.files + sum(
                    _is_file(node) - _is_file(state.folded(path)) for path, (_, node) in state.changes.items()
                )
            for path, (_, node) in state.changes.items():
                if node is not None:
                    above = next(parents(path), b"")
                    parent = state.get(above) if path else None
                    if path and (parent is None or parent.kind != DIR):
                        self._damage.add(where, f"{path!r} is there, and {above!r} is no directory")
                if (node is None or node.kind != DIR) and path and state.has_children(path):
                    self._damage.add(where, f"{path!r} is no directory, and something is in it")
        except (Corrupt, NotFound) as error:
            if not self._damage.problems:
                self._damage.add(line.key, f"names a tree that cannot be read: {error}")
                self._damage.everything(line.key, line.label)

    # -- packs --------------------------------------------------------------------------------------------------

    def _want(self, ref: Ref) -> None:
        if ref.pack != HOLE:
            self._refs.setdefault(ref.pack, set()).add(_print(ref))

    def _check_packs(self) -> None:
        # Listed last: what was referred to when we read it is there now.
        listed = {meta.key: meta for meta in self._store.list(f"{layout.disk_prefix(self._disk.id)}pack/")}
        for problem in in_parallel(lambda pack: self._check_pack(pack, listed), sorted(self._refs)):
            if problem is not None:
                pack, what = problem
                self._damage.bad_packs.add(pack)
                self._damage.add(layout.pack_key(self._disk.id, pack), what)

    def _check_pack(self, pack: bytes, listed: dict[str, ObjectMeta]) -> tuple[bytes, str] | None:
        key = layout.pack_key(self._disk.id, pack)
        meta = listed.get(key) or self._store.head(key)
        if meta is None:
            return pack, "is missing"
        with self._lock:
            self._result.packs += 1
        try:
            frames = set(self._frames_of(key, meta.size))
        except (Corrupt, NotFound) as error:
            return pack, str(error).removeprefix(f"{key}: ")
        lost = len(self._refs[pack] - frames)
        return (pack, f"{lost} of the frames that are referred to are not in it") if lost else None

    def _frames_of(self, key: str, size: int) -> Iterable[int]:
        if not self._quick:
            return self._frames(self._store.get(key), key)
        trailer = self._store.get(key, max(size - _TRAILER, 0), _TRAILER)
        length = int.from_bytes(trailer[-8:-4], "little") + _TRAILER
        end = self._store.get(key, max(size - length, 0), length)
        index = decode_footer(_HEAD + end, key)
        if any(offset + stored > size - length for offset, stored, _, _ in index):
            raise Corrupt(f"{key}: is shorter than its index says")
        return (hash(frame) for frame in index)

    def _frames(self, pack: bytes, where: str) -> Iterator[int]:
        """Yield what identifies each frame of a pack, verified; `Corrupt` for the first that is damaged."""
        for frame in decode_footer(pack, where):
            if not self._quick:
                start, stored = frame[:2]
                decode_frame(memoryview(pack)[start : start + stored], Ref(b"", *frame), where)
            yield hash(frame)


def _is_file(node: Node | None) -> bool:
    return node is not None and node.kind != DIR


def _print(ref: Ref) -> int:
    """Return what identifies the frame of a reference within its pack, in 8 bytes."""
    return hash((ref.offset, ref.stored, ref.raw, ref.hash))


def _misplaced(nodes: Iterable[tuple[bytes, Node]]) -> Iterator[tuple[bytes, bytes]]:
    """Yield (path, its parent) where the parent is no directory, in one pass over a tree in byte order."""
    above: list[bytes] = []
    for path, node in nodes:
        while above and subtree_end(above[-1]) <= path:
            above.pop()
        parent = next(parents(path), None)
        if parent and parent not in above:
            yield path, parent
        if node.kind == DIR and path:
            above.append(path)
