"""What damage means: which paths of which branches and checkpoints cannot be read because of a damaged object.

Owns naming them exactly, by asking for each reference whether its bytes are still there. Finding damage is fsck.py's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from fanout.disk.load import spans
from fanout.disk.log import Log
from fanout.disk.reach import LogView
from fanout.disk.state import Pages, State
from fanout.errors import Corrupt, NotFound
from fanout.format import layout
from fanout.format.entry import BranchRecord, Put, decode_entry
from fanout.format.pack import decode_frame
from fanout.format.tree import HOLE, Node, PageRef, Ref, Snap, decode_page, decode_snap
from fanout.runtime import Runtime
from fanout.store.base import Store

__all__ = ["MAX_PATHS", "Affected", "Chain", "Damage", "Line", "Problem", "verify_page"]

#: How many paths are named for one object on one branch or checkpoint; all are counted.
MAX_PATHS = 100
#: How many problems are reported; all are counted.
MAX_PROBLEMS = 1000
#: How many whole packs that look damaged are held while their references are tried.
_PACKS_HELD = 2
#: How many older snaps are asked for the names that a damaged page held.
_OLDER_SNAPS = 3


@dataclass(slots=True)
class Affected:
    """What cannot be read of one line. `between`: the page that names the paths is lost, and with it all of a range
    but the `spared` paths.
    """

    line: str
    paths: list[bytes] = field(default_factory=list)
    count: int = 0
    everything: bool = False
    between: tuple[bytes, bytes] | None = None
    spared: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class Problem:
    """One damaged or missing object."""

    key: str
    what: str
    affects: dict[str, Affected] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Line:
    """A tree that somebody can ask for: a branch's tail (`seq` None), a checkpoint, or an earlier commit.

    `key` is that of the record which names it.
    """

    label: str
    record: BranchRecord
    seq: int | None
    key: str = ""


@dataclass(frozen=True, slots=True)
class Chain:
    """What a line's tree is made of: a snap's (uuid, number), and the entries after it as (uuid, after, to)."""

    snap: tuple[str, int] | None
    entries: tuple[tuple[str, int, int], ...]

    def keys(self, disk_id: str) -> Iterator[str]:
        """Yield the keys of them all."""
        if self.snap is not None:
            yield layout.snap_key(disk_id, *self.snap)
        for uuid, after, until in self.entries:
            yield from (layout.log_key(disk_id, uuid, seq) for seq in range(after + 1, until + 1))


class Damage:
    """The problems found so far, by key, and what they affect."""

    def __init__(self, store: Store, disk_id: str, logs: Mapping[str, LogView], runtime: Runtime) -> None:
        self.problems: dict[str, Problem] = {}
        self.more = 0
        self.bad_pages: set[bytes] = set()
        self.bad_packs: set[bytes] = set()
        self._store = store
        self._disk_id = disk_id
        self._logs = logs
        self._runtime = runtime
        self._pages = Pages(store, disk_id, 16 << 10)
        self._held: dict[bytes, bytes] = {}
        self._tried: dict[tuple[bytes, int, int, bytes], bool] = {}
        self._hits: dict[bytes, list[tuple[bytes, bytes]]] = {}

    def add(self, key: str, what: str) -> Problem | None:
        """Note a problem of an object; a second one of the same object adds to its text. None: too many."""
        found = self.problems.get(key)
        if found is not None:
            if what not in found.what:
                found.what += f"; {what}"
            return found
        if len(self.problems) >= MAX_PROBLEMS:
            self.more += 1
            return None
        found = self.problems[key] = Problem(key, what)
        return found

    def everything(self, key: str, line: str) -> None:
        """Note that nothing of a line can be read because of an object."""
        problem = self.problems.get(key)
        if problem is not None:
            problem.affects[line] = Affected(line, everything=True)

    def trace(self, lines: Iterable[Line], history: Iterable[Line], entries: Iterable[tuple[str, str, int]]) -> None:
        """Find what the problems affect: of branches and checkpoints, and if it is nothing of those, of history.

        `entries` are all entries that are kept, as (branch name, uuid, number).
        """
        if not self.problems:
            return
        for line in lines:
            self._trace_line(line, self.problems.keys())
        silent = {key for key, problem in self.problems.items() if not problem.affects}
        if not silent:
            return
        for line in history:
            self._trace_line(line, silent)
        silent &= {key for key in silent if not self.problems[key].affects}
        if not silent & {layout.pack_key(self._disk_id, pack) for pack in self.bad_packs}:
            return
        for name, uuid, seq in entries:
            key = layout.log_key(self._disk_id, uuid, seq)
            if key not in self.problems:
                for commit in decode_entry(self._store.get(key), key).commits:
                    nodes = ((e.path, e.node) for e in commit.effects if isinstance(e, Put))
                    self._note(f"commit {seq} of {name}", self._bad(nodes, {}), silent)

    def _trace_line(self, line: Line, wanted: Iterable[str]) -> None:
        chain = self.chain(line)
        if chain is None:
            return
        broken = [key for key in (*chain.keys(self._disk_id), *self._asked(chain)) if key in self.problems]
        for key in broken:
            if key in wanted:
                self.everything(key, line.label)
        if broken:
            return
        try:
            state = self.state(chain)
        except (Corrupt, NotFound):
            return  # a problem of its own, reported where it was found
        ends = [page.first for page in state.snap.pages[1:]]
        for index, page in enumerate(state.snap.pages):
            end = ends[index] if index < len(ends) else None
            if page.hash in self.bad_pages:
                self._trace_page(line, chain, state, page, end)
            elif self.bad_packs:
                hits = [hit for hit in self._page_hits(page) if hit[0] not in state.changes]
                self._note(line.label, hits, wanted)
        changed = ((path, node) for path, (_, node) in state.changes.items() if node is not None)
        self._note(line.label, self._bad(changed, state.blobs), wanted)

    def _trace_page(self, line: Line, chain: Chain, state: State, page: PageRef, end: bytes | None) -> None:
        """Name what a damaged page holds, from an older tree and the log, if they still tell."""
        key = layout.page_key(self._disk_id, page.hash)
        if key not in self.problems:
            return
        affected = self.problems[key].affects.setdefault(line.label, Affected(line.label))
        names = self._names_from_before(line, chain, page.first, end)
        if names is None:
            affected.between = page.first, end if end is not None else b""
            affected.spared = [
                path for path in sorted(state.changes) if page.first <= path and (end is None or path < end)
            ]
            affected.count += page.count
        for path in names or ():
            if path not in state.changes:
                _name(affected, path)

    def _asked(self, chain: Chain) -> Iterator[str]:
        """Yield the keys of the records that a reader asks what a point below the newest snap rests on."""
        for uuid, _, until in chain.entries:
            view = self._logs.get(uuid, LogView())
            if view.records and any(seq > until for seq in view.snaps):
                yield layout.kept_key(self._disk_id, uuid, view.records[-1])

    def _names_from_before(self, line: Line, chain: Chain, start: bytes, end: bytes | None) -> list[bytes] | None:
        """Return the paths in a range of a snap's tree without reading the snap: an older one and the log have them."""
        if chain.snap is None:
            return None
        uuid, seq = chain.snap
        for base in [*sorted((s for s in self._logs[uuid].snaps if s < seq), reverse=True)[:_OLDER_SNAPS], 0]:
            earlier = self.chain(Line("", line.record, seq), below=max(base + 1, 1))
            if earlier is None or any(key in self.problems for key in earlier.keys(self._disk_id)):
                continue
            try:
                return [path for path, _ in self.state(earlier).scan(start, end)]
            except (Corrupt, NotFound):
                continue
        return None

    def chain(self, line: Line, below: int | None = None) -> Chain | None:
        """Return what a line's tree is made of, from a snap before `below` if given; None if it was trimmed."""
        parts: list[tuple[str, int, int]] = []
        for uuid, low, high in spans(line.record, line.seq):
            view = self._logs.get(uuid, LogView())
            until = view.tail if high is None else high
            until = max(until, low)
            base = view.base_of(until)
            if base is None:
                return None
            if below is not None and base >= below:
                base = max((seq for seq in view.snaps if seq < below), default=0)
                if base < view.record.boundary:
                    return None
            parts.append((uuid, max(base, low), until))
            if base:
                return Chain((uuid, base), tuple(reversed(parts)))
        return Chain(None, tuple(reversed(parts)))

    def state(self, chain: Chain) -> State:
        """Load the tree that a chain makes."""
        snap = Snap(0, (), 0, 0)
        if chain.snap is not None:
            key = layout.snap_key(self._disk_id, *chain.snap)
            snap = decode_snap(self._store.get(key), key)
        state = State(self._pages, snap, snap.seq, {}, {})
        for uuid, after, until in chain.entries:
            state = state.apply(Log(self._store, self._disk_id, uuid, self._runtime).after(after, until))
        return state

    # -- which references are lost ------------------------------------------------------------------------------

    def _page_hits(self, page: PageRef) -> list[tuple[bytes, bytes]]:
        found = self._hits.get(page.hash)
        if found is None:
            entries = self._pages.load(page, keep=False)
            found = self._hits[page.hash] = list(self._bad(entries, {}))
        return found

    def _bad(self, nodes: Iterable[tuple[bytes, Node]], blobs: Mapping[bytes, object]) -> Iterator[tuple[bytes, bytes]]:
        """Yield (path, pack) for each node that needs bytes of a damaged pack that are lost."""
        for path, node in nodes:
            for pack in {ref.pack for ref in node.data if ref.pack in self.bad_packs and ref.pack not in blobs}:
                if any(self._lost(ref) for ref in node.data if ref.pack == pack):
                    yield path, pack

    def _lost(self, ref: Ref) -> bool:
        place = (ref.pack, ref.offset, ref.stored, ref.hash)
        if ref.pack == HOLE:
            return False
        if place not in self._tried:
            key = layout.pack_key(self._disk_id, ref.pack)
            try:
                if ref.pack not in self._held:
                    while len(self._held) >= _PACKS_HELD:
                        self._held.pop(next(iter(self._held)))
                    self._held[ref.pack] = self._store.get(key)
                decode_frame(memoryview(self._held[ref.pack])[ref.offset : ref.offset + ref.stored], ref, key)
                self._tried[place] = False
            except (Corrupt, NotFound):
                self._tried[place] = True
        return self._tried[place]

    def _note(self, label: str, hits: Iterable[tuple[bytes, bytes]], wanted: Iterable[str]) -> None:
        for path, pack in hits:
            key = layout.pack_key(self._disk_id, pack)
            if key in wanted and key in self.problems:
                _name(self.problems[key].affects.setdefault(label, Affected(label)), path)


def _name(affected: Affected, path: bytes) -> None:
    if len(affected.paths) < MAX_PATHS:
        if path in affected.paths:
            return
        affected.paths.append(path)
    affected.count += 1


def verify_page(data: bytes, page: PageRef, key: str) -> tuple[tuple[bytes, Node], ...]:
    """Return a page's entries, everything about them checked; `Corrupt` says what is wrong."""
    if hashlib.sha256(data).digest() != page.hash:
        raise Corrupt("does not match its hash")
    entries = decode_page(data, key)
    if len(data) != page.stored or len(entries) != page.count or not entries or entries[0][0] != page.first:
        raise Corrupt("is not the page that the snap describes")
    if any(one[0] >= two[0] for one, two in pairwise(entries)):
        raise Corrupt("is not sorted")
    return entries
