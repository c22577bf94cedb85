"""One branch of a disk in this process: its newest known tree, group commit, and folding.

Owns the order of things between a commit's arrival and its acknowledgement. Blocking and thread safe. The
rules of what lands are in merge.py, the protocol in log.py.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from fanout.config import Tuning
from fanout.disk.checkout import Line, Taken, locked_paths, overlapping
from fanout.disk.data import Packer, Reader
from fanout.disk.edits import combine
from fanout.disk.effects import carried, packs_of, text, touched_by, touched_by_effects
from fanout.disk.fold import fold
from fanout.disk.fresh import PackAges
from fanout.disk.group import Group
from fanout.disk.load import load_state, newest_snap, spans
from fanout.disk.log import Deleted, Log
from fanout.disk.merge import Policy, Rebased, diverged, rebase
from fanout.disk.paths import shown
from fanout.disk.proposal import Landed, Proposal, Waiting
from fanout.disk.state import Pages, State
from fanout.disk.trim import Trimmed, fence
from fanout.errors import Conflict, Corrupt, FanoutError, LeaseLost, NotFound, Unavailable, Unknown
from fanout.format import layout
from fanout.format.entry import BranchRecord, Commit, Entry, Put
from fanout.format.lock import Acquire, LockOp, Release, locks_after
from fanout.format.tree import Node, Ref, Snap
from fanout.runtime import Runtime
from fanout.store.base import Store

__all__ = ["Branch"]

#: How many recent entries' touched paths are remembered, so that rebasing needs no request; and how many paths.
_RECENT_ENTRIES = 4096
_RECENT_PATHS = 1 << 18
#: How many earlier trees (of checkpoints, mostly) a branch keeps open.
_PAST_STATES = 8
#: How often a commit starts again because its process was frozen for so long that the log was trimmed under it.
_TRIMMED_UNDER_US = 3


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
        reader: Reader,
        state: State | None = None,
        ages: PackAges | None = None,
    ) -> None:
        self.name = name
        self.record = record
        self.log = Log(store, disk_id, record.uuid, runtime)
        self._store = store
        self._disk_id = disk_id
        self._pages = pages
        self._runtime = runtime
        self._tuning = tuning
        self._reader = reader
        self._state = None if state is None else state.unlocked()
        self._past: OrderedDict[int, State] = OrderedDict()
        self._state_lock = threading.Lock()
        self._refresh_lock = threading.Lock()
        self._refresh_started = 0
        self._refresh_done = 0
        self._group = Group(runtime, tuning)
        self._touched: OrderedDict[int, dict[bytes, int]] = OrderedDict()
        self._touched_paths = 0
        self._folder: threading.Thread | None = None
        self.line = Line()
        self._looked_at = 0
        self._ages = ages
        self._listed_s = runtime.uptime()

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
                self._listed_s = self._runtime.uptime()
                fresh = load_state(self._store, self._disk_id, self.record, self._pages, self._runtime)
                with self._state_lock:
                    self._state = self._state or fresh
            else:
                if not self.stale:
                    self._advance(list(self.log.after(self.known().seq)))
                if self.stale:  # perhaps frozen just here: what was absent may have been trimmed
                    self.relist()
                if self._state is not state:
                    self._adopt_if_far(self.known())
            self._refresh_done = mine
            assert self._state is not None
            return self._state

    @property
    def stale(self) -> bool:
        """Whether what is known of the log is too old to be believed without `relist`: docs/GC.md says why."""
        return self._runtime.uptime() - self._listed_s > self._tuning.stale_s

    def relist(self) -> int:
        """Look where the log is trimmed, advance to its tail and rest on the newest snap; returns the boundary.

        Two listings, a look for the disk, and what is new. A tree from below the boundary is loaded anew: the entry
        after it is gone, which makes it no tail.
        """
        listed_s = self._runtime.uptime()
        boundary = fence(self._store, self._disk_id, self.uuid)
        if self._store.head(layout.disk_key(self._disk_id)) is None:
            raise Deleted(f"the disk {self._disk_id} was deleted")
        behind = self.known().seq < boundary
        if not behind:
            try:
                self._advance(list(self.log.after(self.known().seq)))
                self._adopt(self.known())
            except Trimmed:
                behind = True  # since just now
        if behind:
            fresh = load_state(self._store, self._disk_id, self.record, self._pages, self._runtime)
            with self._state_lock:
                self._state = max(fresh, self._state or fresh, key=lambda tree: tree.seq)
                self._touched.clear()
                self._touched_paths = 0
                self._past.clear()
        self._listed_s = listed_s
        return boundary

    def at(self, seq: int) -> State:
        """Return the tree as it was right after entry `seq`; `NotFound` for one that is not there (yet)."""
        state = self.require(seq)
        if seq == state.seq:
            return state
        return self._past_at(seq)

    def _past_at(self, seq: int) -> State:
        past = self.held(seq)
        if past is None:
            past = load_state(self._store, self._disk_id, self.record, self._pages, self._runtime, seq)
            with self._state_lock:
                self._past[seq] = past
                while len(self._past) > _PAST_STATES:
                    self._past.popitem(last=False)
        return past

    def require(self, seq: int) -> State:
        """Return a tree at or after entry `seq`, so that it is sure to exist; `NotFound`."""
        try:
            state = self.known()
            if seq > state.seq:
                state = self.refresh()
        except Corrupt:
            state = self._past_at(seq)  # what came later is damaged, this need not be
        if seq > state.seq or seq < 0:
            raise NotFound(f"branch {self.name!r} has no commit {seq}; its newest is {state.seq}")
        return state

    def held(self, seq: int) -> State | None:
        """Return the tree at `seq` if this process has it open, without any request."""
        with self._state_lock:
            if self._state is not None and self._state.seq == seq:
                return self._state
            past = self._past.get(seq)
            if past is not None:
                self._past.move_to_end(seq)
            return past

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
            held = after + 1 in self._touched or after >= until
            seqs = range(after + 1, until + 1) if held else ()
            recent = [self._touched.get(seq) for seq in seqs]
        if None in recent or not held:
            recent = [touched_by(entry) for entry in self.history(after, until)]
        for each in recent:
            paths.update(each or {})
        return paths

    # -- writing -------------------------------------------------------------------------------------------

    def writing(self, since_s: float) -> AbstractContextManager[None]:
        """Announce that a commit may come of a call that arrived at `since_s` (monotonic); see `Group.writing`."""
        return self._group.writing(since_s)

    def commit(self, proposal: Proposal) -> Landed:
        """Make a proposal durable, together with others that arrive meanwhile; returns when it is.

        `Conflict` (without a rescue branch), `Unavailable` and `Unknown` as in log.py.
        """
        seen = proposal.base_seq or 0
        touched: Mapping[bytes, int] = {}
        if proposal.base_seq is not None and not proposal.merged_uuid:
            # Here and not in the group: after a long command this may read many entries, and others need not wait.
            seen = max(seen, self.known().seq)
            touched = self.touched(proposal.base_seq, seen)
        mine = Waiting(proposal, seen, touched)
        self._group.land(mine, self._commit_group)
        if mine.error is not None:
            raise mine.error
        assert mine.landed is not None
        return mine.landed

    def take(self, acquire: Acquire, *, renew: bool = False) -> None:
        """Take a lock, or renew the one of this id. `Taken` (a `Busy`) if another is in the way, `LeaseLost`."""
        names = ", ".join(shown(path) or "/" for path in acquire.paths)
        message = f"{'renew' if renew else 'check out'} {names}"
        held = acquire.id if renew else ""
        self.commit(Proposal((), Policy.STRICT, exec_id=acquire.owner, message=message, lock_id=held, take=acquire))

    def release(self, lock_id: str, *, broken: bool = False, author: str = "") -> None:
        """Give a lock back, or break somebody else's, whose commit then fails; `NotFound` if it is not held."""
        lock = self.refresh().locks.get(lock_id)
        if lock is None:
            raise NotFound(f"branch {self.name!r} has no lock {lock_id!r}")
        message = f"{'break' if broken else 'release'} the checkout of {lock.owner}"
        self.commit(Proposal((), Policy.STRICT, author=author, message=message, free=Release(lock_id, broken)))

    def _commit_group(self, batch: list[Waiting]) -> None:
        try:
            landed: list[tuple[Waiting, Landed]] = []

            def build(seq: int, write_id: bytes) -> Entry | None:
                landed.clear()
                return self._build(batch, seq, write_id, landed)

            entry = self._append(build)
            was_due = self._fold_due(self.known())
            if entry is not None:
                self._advance([entry])
            for waiting, outcome in landed:
                if self._ages is not None:
                    self._ages.forget(packs_of(outcome.effects))
                waiting.landed = outcome
                waiting.error = None
            if entry is not None:
                self._maybe_fold(entry.seq, was_due)
        except BaseException as error:
            failure = error if isinstance(error, Exception) else Unknown("interrupted while committing")
            for waiting in batch:
                # A conflict may be with another of this group, and so stands only if that may have landed.
                if waiting.landed is None and (waiting.error is None or not isinstance(failure, Unknown)):
                    waiting.error = failure if len(batch) == 1 else _one_of(failure)
            if failure is not error:
                raise

    def _append(self, build: Callable[[int, bytes], Entry | None]) -> Entry | None:
        """Append to the log as it is now: an entry that took the place of a trimmed one is none, and goes again."""
        for _ in range(_TRIMMED_UNDER_US):
            if self.stale:
                self.relist()
            state = self.known()
            try:
                entry = self.log.append(state.seq, build, self._advance)
            except Trimmed:
                if not self.stale:
                    raise
                continue
            if not self.stale or self.relist() < (state.seq + 1 if entry is None else entry.seq):
                return entry
        raise Unavailable(f"branch {self.name!r} is trimmed faster than this process can follow; nothing was written")

    def _build(
        self, batch: list[Waiting], seq: int, write_id: bytes, landed: list[tuple[Waiting, Landed]]
    ) -> Entry | None:
        """Rebase every proposal of a group onto the tail, one after the other; conflicts fall out of the group."""
        state = self.known()
        now_ns = self._runtime.now_ns()
        changes = dict(state.changes)
        working = state
        commits: list[Commit] = []
        blobs: dict[bytes, bytes] = {}
        grouped: dict[bytes, int] = {}
        for waiting in batch:
            proposal = waiting.proposal
            waiting.error = None
            try:
                if proposal.plan is not None:
                    proposal = replace(proposal, intents=proposal.plan(working))
                operations = self._lock_operations(proposal, working, now_ns)
                result = self._rebase(proposal, waiting, working, state.seq, grouped, blobs)
                if self._ages is not None:
                    self._ages.check(packs_of(result.effects))
            except FanoutError as error:
                waiting.error = error
                continue
            if result.conflicts:
                waiting.error = Conflict([path.decode("utf-8", "surrogateescape") for path in result.conflicts])
                continue
            if not result.effects and not proposal.merged_uuid and not operations:
                landed.append((waiting, Landed(None, (), now_ns)))
                continue
            base_seq = state.seq if proposal.base_seq is None else proposal.base_seq
            commit = Commit(
                now_ns, text(proposal.author), text(proposal.message), proposal.exec_id, base_seq, result.effects,
                proposal.merged_uuid, proposal.merged_seq, operations,
            )  # fmt: skip
            commits.append(commit)
            blobs.update(carried(result.effects, proposal.blobs, proposal.seen_blobs, state.blob_bytes()))
            landed.append((waiting, Landed(seq, result.effects, now_ns)))
            if len(batch) > 1:
                for effect in result.effects:
                    changes[effect.path] = (seq, effect.node if isinstance(effect, Put) else None)
                locks = locks_after(working.locks, operations, seq)
                working = State(state.pages, state.snap, state.seq, changes, state.blobs, state.merges, locks)
                grouped.update(touched_by_effects(result.effects))
        return Entry(write_id, seq, now_ns, tuple(commits), blobs) if commits else None

    def _lock_operations(self, proposal: Proposal, tree: State, now_ns: int) -> tuple[LockOp, ...]:
        """Check a proposal against the locks that are held; returns what it does to them."""
        own = proposal.lock_id
        if own and own not in tree.locks:
            raise LeaseLost(f"the checkout of {proposal.exec_id} was broken before its commit; nothing was written")
        locked = locked_paths(tree.locks, proposal.intents, own)
        if locked:
            raise Conflict([path.decode("utf-8", "surrogateescape") for path in locked])
        if proposal.take is not None:
            in_the_way = overlapping(tree.locks, proposal.take.paths, proposal.take.id)
            for lock in in_the_way:
                if lock.expires_ns > now_ns:
                    raise Taken(lock)
            return (*(Release(lock.id, True) for lock in in_the_way), proposal.take)
        if proposal.free is not None:
            return (proposal.free,)
        return (Release(own),) if own else ()

    def _rebase(
        self,
        proposal: Proposal,
        waiting: Waiting,
        tree: State,
        tail: int,
        grouped: Mapping[bytes, int],
        blobs: dict[bytes, bytes],
    ) -> Rebased:
        """Fit one proposal onto a tree; `blobs` are those of the entry so far, and get what had to be packed anew."""
        merging = bool(proposal.merged_uuid)
        packer = Packer(self._store, self._disk_id, self._runtime, self._tuning)
        known: dict[bytes, bytes] = {}
        joined: dict[tuple[tuple[Ref, ...], ...], tuple[Ref, ...]] = {}

        def read(refs: tuple[Ref, ...]) -> bytes:
            if not known:
                known.update({**tree.blob_bytes(), **blobs, **proposal.seen_blobs, **proposal.blobs})
            return self._reader.read(refs, known)

        def join(base: Node, node: Node, now: Node) -> tuple[Ref, ...]:
            if merging:
                return node.data  # a mixture of two branches' bytes is what nobody wrote
            key = base.data, node.data, now.data
            if key not in joined:  # all names of a hard-linked file get the same
                joined[key] = combine(base, node, now, read, packer.add, self._tuning.extent_bytes)
            return joined[key]

        touched: Mapping[bytes, int] = {}
        if merging:
            touched = diverged(proposal.intents, tree)
        elif proposal.base_seq is not None:
            touched = {**waiting.touched, **self.touched(waiting.seen, tail), **grouped}
        try:
            result = rebase(proposal.intents, tree, touched, proposal.policy, identical_is_clean=merging, combine=join)
            blobs.update(packer.finish().blobs)
        except BaseException:
            packer.abandon()
            raise
        return result

    def _advance(self, entries: Sequence[Entry]) -> None:
        with self._state_lock:
            assert self._state is not None
            news = [entry for entry in entries if entry.seq > self._state.seq]
            if not news:
                return
            self._state = self._state.apply(news)
            for entry in news:
                self._touched[entry.seq] = paths = touched_by(entry)
                self._touched_paths += len(paths)
            while len(self._touched) > _RECENT_ENTRIES or self._touched_paths > _RECENT_PATHS:
                _, old = self._touched.popitem(last=False)
                self._touched_paths -= len(old)
        self.line.wake()

    # -- folding -------------------------------------------------------------------------------------------

    def _fold_due(self, state: State) -> bool:
        tuning = self._tuning
        return (
            state.seq - state.folded_seq >= tuning.fold_entries
            or sum(len(data) for _, data in state.blobs.values()) >= tuning.fold_bytes
            or len(state.changes) >= tuning.fold_paths
        )

    def _maybe_fold(self, seq: int, was_due: bool) -> None:
        """Fold after writing entry `seq` if it is this writer's turn.

        Of many processes on one branch the one whose entry made a fold due does it; if that one failed or died,
        the writer of a certain later entry steps in. All others would only write the same tree again.
        """
        state = self.known()
        if not self._fold_due(state):
            return
        mine = not was_due or (seq - state.folded_seq) % max(1, self._tuning.fold_entries // 4) == 0
        if mine and (self._folder is None or not self._folder.is_alive()):
            self._folder = threading.Thread(target=self._fold_quietly, name="fanout-fold", daemon=True)
            self._folder.start()

    def _fold_quietly(self) -> None:
        try:
            if self._fold_due(self._adopt(self.known())):
                self.fold()
        except FanoutError:
            pass  # nothing depends on a fold: a later commit tries again

    def fold(self) -> State:
        """Write the newest known tree as a snap, rewriting only touched pages; returns the tree resting on it."""
        if self.stale:
            self.relist()
        state = self.known()
        return self._rest_on(fold(self._store, self._disk_id, self.uuid, state, self._runtime, self._tuning))

    def _adopt_if_far(self, state: State) -> None:
        """Let go of changes that others have folded: who only reads would otherwise carry them for ever."""
        step = self._tuning.fold_entries
        if state.seq - state.folded_seq >= 2 * step and state.seq - self._looked_at >= step:
            self._looked_at = state.seq
            self._adopt(state)

    def _adopt(self, state: State) -> State:
        """Rest the known tree on the newest snap up to `state`, whoever wrote it. A listing, and a get if there is."""
        snap = newest_snap(self._store, self._disk_id, self.uuid, state.seq, after=state.folded_seq)
        return self.known() if snap is None else self._rest_on(snap)

    def _rest_on(self, snap: Snap) -> State:
        with self._state_lock:
            assert self._state is not None
            if snap.seq > self._state.folded_seq:
                self._state = self._state.onto(snap)
            return self._state

    def settle(self) -> None:
        """Wait for a fold that is under way."""
        folder = self._folder
        if folder is not None:
            folder.join()


def _one_of(failure: Exception) -> Exception:
    """Return a copy for one of several callers, who add to it what they know (an exec its `run`)."""
    if not isinstance(failure, FanoutError):
        return failure
    mine = copy.copy(failure)
    mine.__cause__ = failure
    return mine
