"""One branch of a disk in this process: its newest known tree, group commit, and folding.

Owns the order of things between a commit's arrival and its acknowledgement. Blocking and thread safe. The
rules of what lands are in merge.py, the protocol in log.py.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from fanout.config import Tuning
from fanout.disk.fold import fold
from fanout.disk.log import Log
from fanout.disk.merge import Intent, Policy, Rebased, rebase
from fanout.disk.state import Pages, State
from fanout.errors import Conflict, Corrupt, FanoutError, NotFound
from fanout.format import layout
from fanout.format.entry import DELETED, TOUCHED, BranchRecord, Commit, Effect, Entry, Put
from fanout.format.tree import Snap, decode_snap
from fanout.runtime import Runtime
from fanout.store.base import Store

__all__ = ["Branch", "Landed", "Proposal", "load_state"]

#: How many recent entries' touched paths are remembered, so that rebasing needs no request.
_RECENT_ENTRIES = 4096


@dataclass(frozen=True, slots=True)
class Proposal:
    """One commit that wants to land: what to change, what it had seen, and by which policy it meets others.

    `base_seq` None means it has seen the tail (plain object calls). `blobs` are its new inline packs; `seen_blobs`
    those of the tree it started from, of which its nodes may still refer to some.
    """

    intents: Sequence[Intent]
    policy: Policy
    base_seq: int | None = None
    blobs: Mapping[bytes, bytes] = field(default_factory=dict)
    seen_blobs: Mapping[bytes, bytes] = field(default_factory=dict)
    author: str = ""
    message: str = ""
    exec_id: str = ""
    merged_uuid: str = ""
    merged_seq: int = 0


@dataclass(frozen=True, slots=True)
class Landed:
    """Where a proposal ended up. `seq` is None if it changed nothing (the tree already was as it wanted)."""

    seq: int | None
    effects: tuple[Effect, ...]
    time_ns: int


class _Waiting:
    """A proposal in the queue and, later, its outcome."""

    __slots__ = ("done", "error", "landed", "proposal")

    def __init__(self, proposal: Proposal) -> None:
        self.proposal = proposal
        self.done = False
        self.landed: Landed | None = None
        self.error: BaseException | None = None


class Branch:
    """The live handle on one branch. One instance per process and branch; see `Disk.branch`."""

    def __init__(
        self,
        store: Store,
        disk_id: str,
        name: str,
        record: BranchRecord,
        pages: Pages,
        runtime: Runtime,
        tuning: Tuning,
    ) -> None:
        self.name = name
        self.record = record
        self.log = Log(store, disk_id, record.uuid, runtime)
        self._store = store
        self._disk_id = disk_id
        self._pages = pages
        self._runtime = runtime
        self._tuning = tuning
        self._state: State | None = None
        self._state_lock = threading.Lock()
        self._refresh_lock = threading.Lock()
        self._refresh_started = 0
        self._refresh_done = 0
        self._queue: list[_Waiting] = []
        self._queue_changed = threading.Condition()
        self._leading = False
        self._writers = 0
        self._touched: OrderedDict[int, dict[bytes, int]] = OrderedDict()
        self._folder: threading.Thread | None = None

    @property
    def uuid(self) -> str:
        return self.record.uuid

    # -- reading -------------------------------------------------------------------------------------------

    def known(self) -> State:
        """Return the newest tree this process has seen; no request unless it has seen none."""
        state = self._state
        return state if state is not None else self.refresh()

    def refresh(self) -> State:
        """Return the branch's tree as it is now or later; one request where nothing is new.

        Callers that arrive while another's request has not been sent yet share it.
        """
        ticket = self._refresh_started
        with self._refresh_lock:
            if self._refresh_done > ticket and self._state is not None:
                return self._state
            self._refresh_started += 1
            mine = self._refresh_started
            state = self._state
            if state is None:
                fresh = load_state(self._store, self._disk_id, self.record, self._pages, self._runtime)
                with self._state_lock:
                    self._state = self._state or fresh
            else:
                self._advance(list(self.log.after(state.seq)))
            self._refresh_done = mine
            assert self._state is not None
            return self._state

    def at(self, seq: int) -> State:
        """Return the tree as it was right after entry `seq`; `NotFound` for one that is not there (yet)."""
        state = self.known()
        if seq == state.seq:
            return state
        if seq > state.seq:
            state = self.refresh()
        if seq > state.seq or seq < 0:
            raise NotFound(f"branch {self.name!r} has no commit {seq}; its newest is {state.seq}")
        return load_state(self._store, self._disk_id, self.record, self._pages, self._runtime, seq)

    def history(self, after: int, until: int) -> Iterator[Entry]:
        """Yield the entries after < seq <= until of this branch and of the lineage it grew from, in order."""
        for uuid, low, high in reversed(list(spans(self.record, until))):
            assert high is not None
            if high > after:
                log = self.log if uuid == self.uuid else Log(self._store, self._disk_id, uuid, self._runtime)
                yield from log.after(max(low, after), high)

    def touched(self, after: int, until: int) -> dict[bytes, int]:
        """Return the paths changed by the entries after < seq <= until, and how (TOUCHED left out)."""
        paths: dict[bytes, int] = {}
        with self._state_lock:
            recent = [self._touched.get(seq) for seq in range(after + 1, until + 1)]
        if None in recent:
            recent = [_touched_by(entry) for entry in self.history(after, until)]
        for each in recent:
            paths.update(each or {})
        return paths

    # -- writing -------------------------------------------------------------------------------------------

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Announce that a commit may come: while several are announced, commits wait for one another a little."""
        with self._queue_changed:
            self._writers += 1
        try:
            yield
        finally:
            with self._queue_changed:
                self._writers -= 1
                self._queue_changed.notify_all()

    def commit(self, proposal: Proposal) -> Landed:
        """Make a proposal durable, together with others that arrive meanwhile; returns when it is.

        `Conflict` (without a rescue branch), `Unavailable` and `Unknown` as in log.py.
        """
        mine = _Waiting(proposal)
        with self._queue_changed:
            self._queue.append(mine)
            self._queue_changed.notify_all()
        while self._lead_or_wait(mine):
            pass
        if mine.error is not None:
            raise mine.error
        assert mine.landed is not None
        return mine.landed

    def _lead_or_wait(self, mine: _Waiting) -> bool:
        """Wait until `mine` is done or nobody leads; then lead one group. Returns whether to go on."""
        with self._queue_changed:
            while self._leading and not mine.done:
                self._queue_changed.wait()
            if mine.done:
                return False
            self._leading = True
            self._gather()
            batch = self._take()
        try:
            self._commit_group(batch)
        finally:
            with self._queue_changed:
                self._leading = False
                for waiting in batch:
                    waiting.done = True
                self._queue_changed.notify_all()
        return not mine.done

    def _gather(self) -> None:
        """Hold the group open while announced writers keep arriving, for a bounded time."""
        now = self._runtime.monotonic()
        deadline, quiet_at = now + self._tuning.group_wait_s, now + self._tuning.group_gap_s
        while len(self._queue) < min(self._writers, self._tuning.group_commits) and now < min(deadline, quiet_at):
            before = len(self._queue)
            self._queue_changed.wait(min(deadline, quiet_at) - now)
            now = self._runtime.monotonic()
            if len(self._queue) > before:
                quiet_at = now + self._tuning.group_gap_s

    def _take(self) -> list[_Waiting]:
        size = count = 0
        for waiting in self._queue:
            size += sum(map(len, waiting.proposal.blobs.values()))
            if count and (size > self._tuning.group_bytes or count >= self._tuning.group_commits):
                break
            count += 1
        batch, self._queue = self._queue[:count], self._queue[count:]
        return batch

    def _commit_group(self, batch: list[_Waiting]) -> None:
        try:
            state = self.known()
            landed: list[tuple[_Waiting, Landed]] = []

            def build(seq: int, write_id: bytes) -> Entry | None:
                landed.clear()
                entry = self._build(batch, seq, write_id, landed)
                return entry

            entry = self.log.append(state.seq, build, self._advance)
            if entry is not None:
                self._advance([entry])
            for waiting, outcome in landed:
                waiting.landed = outcome
                waiting.error = None
            self._maybe_fold()
        except BaseException as error:
            for waiting in batch:
                if waiting.error is None and waiting.landed is None:
                    waiting.error = error

    def _build(
        self, batch: list[_Waiting], seq: int, write_id: bytes, landed: list[tuple[_Waiting, Landed]]
    ) -> Entry | None:
        """Rebase every proposal of a group onto the tail, one after the other; conflicts fall out of the group."""
        state = self.known()
        now_ns = self._runtime.now_ns()
        working = state
        commits: list[Commit] = []
        blobs: dict[bytes, bytes] = {}
        grouped: dict[bytes, int] = {}
        for waiting in batch:
            proposal = waiting.proposal
            waiting.error = None
            try:
                result = self._rebase(proposal, working, state.seq, grouped)
            except FanoutError as error:
                waiting.error = error
                continue
            if result.conflicts:
                waiting.error = Conflict([path.decode("utf-8", "surrogateescape") for path in result.conflicts])
                continue
            if not result.effects:
                landed.append((waiting, Landed(None, (), now_ns)))
                continue
            base_seq = state.seq if proposal.base_seq is None else proposal.base_seq
            commit = Commit(
                now_ns, proposal.author, proposal.message, proposal.exec_id, base_seq, result.effects,
                proposal.merged_uuid, proposal.merged_seq,
            )  # fmt: skip
            commits.append(commit)
            blobs.update(_carried(result.effects, proposal.blobs, proposal.seen_blobs, state.blob_bytes()))
            landed.append((waiting, Landed(seq, result.effects, now_ns)))
            if len(batch) > 1:
                working = _with_effects(working, result.effects)
                grouped.update(_touched_by_effects(result.effects))
        return Entry(write_id, seq, now_ns, tuple(commits), blobs) if commits else None

    def _rebase(self, proposal: Proposal, tree: State, tail: int, grouped: Mapping[bytes, int]) -> Rebased:
        touched: dict[bytes, int] = {}
        if proposal.base_seq is not None:
            touched = self.touched(proposal.base_seq, tail)
            touched.update(grouped)
        merging = bool(proposal.merged_uuid)
        return rebase(proposal.intents, tree, touched, proposal.policy, identical_is_clean=merging)

    def _advance(self, entries: Sequence[Entry]) -> None:
        with self._state_lock:
            assert self._state is not None
            news = [entry for entry in entries if entry.seq > self._state.seq]
            if not news:
                return
            self._state = self._state.apply(news)
            for entry in news:
                self._touched[entry.seq] = _touched_by(entry)
            while len(self._touched) > _RECENT_ENTRIES:
                self._touched.popitem(last=False)

    # -- folding -------------------------------------------------------------------------------------------

    def _maybe_fold(self) -> None:
        state = self.known()
        tuning = self._tuning
        due = (
            state.seq - state.folded_seq >= tuning.fold_entries
            or sum(len(data) for _, data in state.blobs.values()) >= tuning.fold_bytes
            or len(state.changes) >= tuning.fold_paths
        )
        if due and (self._folder is None or not self._folder.is_alive()):
            self._folder = threading.Thread(target=self._fold_quietly, name="fanout-fold", daemon=True)
            self._folder.start()

    def _fold_quietly(self) -> None:
        try:
            self.fold()
        except FanoutError:
            pass  # nothing depends on a fold: the next commit tries again

    def fold(self) -> State:
        """Write the newest known tree as a snap, rewriting only touched pages; returns the tree resting on it."""
        state = self.known()
        snap = fold(self._store, self._disk_id, self.uuid, state, self._runtime, self._tuning)
        with self._state_lock:
            assert self._state is not None
            if snap.seq > self._state.folded_seq or self._state.snap.seq == 0:
                self._state = self._state.onto(snap)
            return self._state

    def settle(self) -> None:
        """Wait for a fold that is under way."""
        folder = self._folder
        if folder is not None:
            folder.join()


def spans(record: BranchRecord, until: int | None) -> Iterator[tuple[str, int, int | None]]:
    """Yield (branch uuid, after, to), newest first: whose log holds which entries up to `until` (None: the tail)."""
    chain: tuple[tuple[str, int | None], ...] = ((record.uuid, until), *record.lineage)
    for place, (uuid, high) in enumerate(chain):
        oldest = place + 1 == len(chain)
        low = 0 if oldest else record.lineage[place][1]
        if until is not None:
            high = until if high is None else min(high, until)
            if high <= low and not oldest:
                continue  # the point is older than this branch
        yield uuid, low, high


def load_state(
    store: Store, disk_id: str, record: BranchRecord, pages: Pages, runtime: Runtime, seq: int | None = None
) -> State:
    """Load a branch's tree at `seq` (None: the tail) from the newest snap at or before it and the log after."""
    state = State(pages, Snap(0, (), 0, 0), 0, {}, {})
    todo: list[tuple[str, int | None]] = []
    for uuid, _, high in spans(record, seq):
        todo.append((uuid, high))
        snap = _newest_snap(store, disk_id, uuid, high)
        if snap is not None:
            state = State(pages, snap, snap.seq, {}, {})
            break
    for uuid, high in reversed(todo):
        state = state.apply(Log(store, disk_id, uuid, runtime).after(state.seq, high))
    return state


def _newest_snap(store: Store, disk_id: str, uuid: str, until: int | None) -> Snap | None:
    newest: str | None = None
    for meta in store.list(layout.snap_prefix(disk_id, uuid)):
        if until is not None and layout.seq_of_key(meta.key) > until:
            break
        newest = meta.key
    if newest is None:
        return None
    try:
        snap = decode_snap(store.get(newest), newest)
    except NotFound as error:
        raise Corrupt(f"{newest} was listed but cannot be read") from error
    if snap.seq != layout.seq_of_key(newest):
        raise Corrupt(f"{newest}: says it is the snap of {snap.seq}")
    return snap


def _with_effects(state: State, effects: Sequence[Effect]) -> State:
    """The tree of a group under construction: `state` with effects that have no entry yet."""
    changes = dict(state.changes)
    for effect in effects:
        changes[effect.path] = (state.seq + 1, effect.node if isinstance(effect, Put) else None)
    return State(state.pages, state.snap, state.seq, changes, state.blobs)


def _carried(effects: Sequence[Effect], *sources: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Return the inline packs that effects refer to.

    An entry carries all of them, even those that an earlier entry carried: a fold in another process may have moved
    that one's data into packs already, and then a cold reader never sees the earlier entry.
    """
    packs = {ref.pack for effect in effects if isinstance(effect, Put) for ref in effect.node.data}
    carried: dict[bytes, bytes] = {}
    for source in sources:
        carried.update({pack: source[pack] for pack in packs & source.keys()})
    return carried


def _touched_by(entry: Entry) -> dict[bytes, int]:
    paths: dict[bytes, int] = {}
    for commit in entry.commits:
        paths.update(_touched_by_effects(commit.effects))
    return paths


def _touched_by_effects(effects: Sequence[Effect]) -> dict[bytes, int]:
    return {
        effect.path: effect.change if isinstance(effect, Put) else DELETED
        for effect in effects
        if not (isinstance(effect, Put) and effect.change == TOUCHED)
    }
