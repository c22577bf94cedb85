"""One disk: its branches and checkpoints, its objects, and what can be asked about them.

The deep module of this layer: everything above reaches trees and commits through it. Blocking, thread safe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fanout.config import Tuning
from fanout.disk.branch import Branch
from fanout.disk.data import Packer, Reader
from fanout.disk.fresh import PackAges
from fanout.disk.fsck import Checked, check
from fanout.disk.gc import GRACE_S, KEEP_HISTORY_S, Collected, collect
from fanout.disk.index import WordIndex
from fanout.disk.load import lineage_at
from fanout.disk.merge import Intent, Policy, intent_of
from fanout.disk.moves import plan_copy, plan_move
from fanout.disk.paths import shown
from fanout.disk.proposal import Landed, Proposal
from fanout.disk.receive import Receiver
from fanout.disk.record import create_record
from fanout.disk.state import Difference, Pages, State
from fanout.disk.trim import forget_trimmed
from fanout.disk.uploads import Uploads
from fanout.errors import Conflict, Denied, Exists, Invalid, NotFound
from fanout.format import layout
from fanout.format.entry import (
    BranchRecord,
    CheckpointRecord,
    DiskRecord,
    Entry,
    decode_branch,
    decode_checkpoint,
    encode_branch,
    encode_checkpoint,
)
from fanout.format.extents import cut, size_of
from fanout.format.tree import DIR, FILE, SYMLINK, Node, directory
from fanout.runtime import Runtime
from fanout.store.base import Store

__all__ = ["Disk", "Point"]


@dataclass(frozen=True, slots=True)
class Point:
    """A place in a disk's history: a branch, and a sequence number on it (None: its tail, where it can be written)."""

    branch: Branch
    seq: int | None = None
    checkpoint: str | None = None

    def state(self) -> State:
        """Return the tree there, as fresh as the store has it."""
        return self.branch.refresh() if self.seq is None else self.branch.at(self.seq)


class Disk:
    """A disk opened in this process. One instance per process and disk; made by `catalogue.Catalogue`."""

    def __init__(self, store: Store, record: DiskRecord, runtime: Runtime, tuning: Tuning) -> None:
        self.record = record
        self.reader = Reader(store, record.id)
        self.index = WordIndex(store, record.id, runtime)
        self.runtime = runtime
        self.tuning = tuning
        self._store = store
        self._pages = Pages(store, record.id, tuning.page_cache_entries)
        self._ages = PackAges(runtime, tuning.unreferenced_s)
        self.uploads = Uploads(store, record.id, runtime, self._ages, tuning.unreferenced_s)
        self.receiver = Receiver(store, record.id, runtime, self._ages, self.reader)
        self._branches: dict[str, Branch] = {}
        self._lock = threading.Lock()

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def name(self) -> str:
        return self.record.name

    # -- branches and checkpoints ---------------------------------------------------------------------------

    def branch(self, name: str = layout.MAIN) -> Branch:
        """Return the live handle on a branch; `NotFound` names what there is."""
        layout.check_branch_name("branch", name)
        with self._lock:
            known = self._branches.get(name)
        if known is not None:
            return known
        if name == layout.MAIN:
            return self._open_branch(name, BranchRecord(self.record.main, (), self.record.created_ns))
        key = layout.branch_key(self.id, name)
        try:
            record = decode_branch(self._store.get(key), key)
        except NotFound:
            known_names = ", ".join(repr(n) for n in self._some(self.branch_names())) or "none"
            raise NotFound(f"disk {self.name!r} has no branch {name!r}; there are: {known_names}") from None
        return self._open_branch(name, record)

    def branch_names(self) -> Iterator[str]:
        """Yield the names of all branches, rescue branches included, in byte order."""
        return self._names(layout.branch_prefix(self.id))

    def checkpoint_names(self) -> Iterator[str]:
        """Yield the names of all checkpoints, in byte order."""
        return self._names(layout.checkpoint_prefix(self.id))

    def checkpoint_record(self, name: str) -> CheckpointRecord:
        """Return what a checkpoint names; `NotFound` names what there is."""
        layout.check_name("checkpoint", name)
        key = layout.checkpoint_key(self.id, name)
        try:
            return decode_checkpoint(self._store.get(key), key)
        except NotFound:
            known = ", ".join(repr(n) for n in self._some(self.checkpoint_names())) or "none"
            raise NotFound(f"disk {self.name!r} has no checkpoint {name!r}; there are: {known}") from None

    def create_checkpoint(
        self, name: str | None, branch: Branch, seq: int | None = None
    ) -> tuple[str, CheckpointRecord]:
        """Name the branch's tree at `seq` (its tail now by default); `Exists`, and `NotFound` for a seq to come."""
        if name is None:
            name = f"cp-{self.runtime.hex_id(12)}"
        layout.check_name("name", name)
        if name == layout.MAIN or self._store.head(layout.branch_key(self.id, name)):
            raise Exists(f"disk {self.name!r} has a branch called {name!r}; a checkpoint needs a name of its own")
        seq = branch.refresh().seq if seq is None else self._existing(branch, seq)
        # A point at or before the fork lies on an ancestor's log; it is named by the branch all the same.
        record = CheckpointRecord(branch.uuid, seq, self.runtime.now_ns(), branch.name)
        key = layout.checkpoint_key(self.id, name)
        self._create_at(branch, seq, key, encode_checkpoint(record), f"checkpoint {name!r}")
        return name, record

    def create_branch(self, name: str, start: Point, uuid: str | None = None) -> Branch:
        """Start a branch at a point; one small object, whatever the disk's size.

        `uuid` (32 hex digits, random by default) tells who made it: a caller that derives it from what he asked for
        recognises a branch that is there already as his own. `Exists` if the name is taken, `NotFound` for a point to
        come.
        """
        layout.check_branch_name("name", name)
        if self._store.head(layout.checkpoint_key(self.id, name)):
            raise Exists(f"disk {self.name!r} has a checkpoint called {name!r}; a branch needs a name of its own")
        seq = start.branch.refresh().seq if start.seq is None else self._existing(start.branch, start.seq)
        lineage = lineage_at(start.branch.record, seq)
        record = BranchRecord(uuid or self.runtime.hex_id(32), lineage, self.runtime.now_ns())
        key = layout.branch_key(self.id, name)
        self._create_at(start.branch, seq, key, encode_branch(record), f"branch {name!r}")
        return self._open_branch(name, record, start.branch.held(seq))

    @staticmethod
    def _existing(branch: Branch, seq: int) -> int:
        branch.require(seq)
        return seq

    def point(self, at: str | int | None = None, branch: str = layout.MAIN) -> Point:
        """Resolve a branch name, checkpoint name or sequence number of `branch`; None is the branch's tail."""
        if at is None:
            return Point(self.branch(branch))
        if isinstance(at, int):
            if at < 0:
                raise Invalid.argument("at", at, "a checkpoint, a branch, or a sequence number of at least 0")
            return Point(self.branch(branch), at)
        layout.check_branch_name("at", at)
        if at in self._branches or self._store.head(layout.branch_key(self.id, at)):
            return Point(self.branch(at))
        try:
            record = self.checkpoint_record(at)
        except (NotFound, Invalid):  # a rescue branch's name is none for a checkpoint
            raise NotFound(f"disk {self.name!r} has no branch or checkpoint {at!r}") from None
        return Point(self._branch_of(record), record.seq, at)

    def _branch_of(self, record: CheckpointRecord) -> Branch:
        found = self.branch(record.branch)
        if found.uuid != record.branch_uuid:
            raise NotFound(f"branch {record.branch!r}, on which the checkpoint was taken, is gone")
        return found

    # -- writing --------------------------------------------------------------------------------------------

    def packer(self, *, inline: bool = True) -> Packer:
        """Return a fresh writer of file contents."""
        return Packer(self._store, self.id, self.runtime, self.tuning, inline=inline, ages=self._ages)

    def apply(
        self,
        point: Point,
        intents: Sequence[Intent],
        *,
        policy: Policy,
        blobs: dict[bytes, bytes] | None = None,
        seen_blobs: Mapping[bytes, bytes] | None = None,
        base_seq: int | None = None,
        author: str = "",
        message: str = "",
    ) -> Landed:
        """Commit intents to a branch's tail outside any exec. `Denied` for a point that is no tail.

        `seen_blobs` as in `Proposal`: give those of the tree that any node of the intents comes from.
        """
        proposal = Proposal(
            intents,
            policy,
            base_seq=base_seq,
            blobs=blobs or {},
            seen_blobs=seen_blobs or {},
            author=author,
            message=message,
        )
        return self.writable(point).commit(proposal)

    def writable(self, point: Point) -> Branch:
        """Return the branch of a point that can be written; `Denied` for a checkpoint or an earlier commit."""
        if point.seq is not None:
            what = f"checkpoint {point.checkpoint!r}" if point.checkpoint else f"commit {point.seq}"
            raise Denied(f"{what} of disk {self.name!r} cannot be written; start a branch from it")
        return point.branch

    def put_object(self, point: Point, path: bytes, data: bytes, mode: int, author: str = "") -> Node:
        """Store one file and return its node, making the directories it needs.

        `Conflict` where a directory has its name, or a file the name of a directory it needs.
        """
        rest = memoryview(data)

        def read(size: int) -> bytes:
            nonlocal rest
            chunk, rest = bytes(rest[:size]), rest[size:]
            return chunk

        return self.put_content(point, path, len(data), read, mode, author)

    def put_content(
        self, point: Point, path: bytes, size: int, read: Callable[[int], bytes], mode: int, author: str = ""
    ) -> Node:
        """Like `put_object` for a file of about `size` bytes, of which `read(n)` gives the next n until it gives b"".

        Holds a few packs in memory, whatever the size. What `read` raises is raised, and nothing is stored.
        """
        branch = self.writable(point)
        packer = self.packer()
        try:
            refs = packer.add_content(size, read)
            packed = packer.finish()
        except BaseException:
            packer.abandon()
            raise
        node = Node(FILE, mode, self.runtime.now_ns(), size_of(refs), refs)
        intent = Intent(path, None, node)
        proposal = Proposal([intent], Policy.STRICT, blobs=packed.blobs, author=author, message=f"put {shown(path)}")
        branch.commit(proposal)
        return node

    def make_directory(self, point: Point, path: bytes, mode: int, author: str = "") -> Landed:
        """Make a directory and those above it; one that is there stays as it is."""
        intent = Intent(path, None, directory(mode, self.runtime.now_ns()))
        proposal = Proposal([intent], Policy.STRICT, author=author, message=f"mkdir {shown(path)}")
        return self.writable(point).commit(proposal)

    def delete_object(self, point: Point, path: bytes, *, recursive: bool = False, author: str = "") -> Landed:
        """Remove a file, link or empty directory (or, `recursive`, a whole tree); nothing there is success.

        `Invalid` for a directory that is not empty.
        """
        branch = self.writable(point)
        state = branch.refresh()
        node = state.get(path)
        if node is None:
            return Landed(None, (), self.runtime.now_ns())
        intents = [Intent(path, node, None)] if path else []
        if node.kind == DIR:
            below = [Intent(p, n, None) for p, n in state.below(path)]
            if below and not recursive:
                raise Invalid.argument("key", shown(path), "a directory that is not empty is removed only recursively")
            intents += below
        message = f"delete {shown(path)}"
        return branch.commit(Proposal(intents, Policy.LAST_WINS, state.seq, author=author, message=message))

    def move(self, point: Point, source: bytes, target: bytes, author: str = "", *, replace: bool = False) -> Landed:
        """Rename a file or a whole directory in one commit, moving no data.

        `Exists` if the target is there, unless it is a file and, `replace`, so is the source.
        """

        def plan(tree: State) -> Sequence[Intent]:
            return plan_move(tree, source, target, replace=replace)

        return self._planned(point, plan, author, f"move {shown(source)} to {shown(target)}")

    def copy(self, point: Point, source: bytes, target: bytes, author: str = "", *, replace: bool = False) -> Landed:
        """Like `move`, leaving the source where it is. A file that is copied onto itself is touched."""
        now_ns = self.runtime.now_ns()

        def plan(tree: State) -> Sequence[Intent]:
            return plan_copy(tree, source, target, now_ns, replace=replace)

        return self._planned(point, plan, author, f"copy {shown(source)} to {shown(target)}")

    def _planned(self, point: Point, plan: Callable[[State], Sequence[Intent]], author: str, message: str) -> Landed:
        branch = self.writable(point)
        branch.refresh()  # what a plan refuses is refused for good: not for a tree of yesterday
        return branch.commit(Proposal((), Policy.STRICT, author=author, message=message, plan=plan))

    def rescue(self, base: Point, base_seq: int, proposal: Proposal, exec_id: str) -> str:
        """Keep a losing commit on a branch of its own that starts where it started; returns the branch's name."""
        name = f"rescue/{exec_id}"
        branch = self.create_branch(name, Point(base.branch, base_seq))
        branch.commit(replace(proposal, policy=Policy.LAST_WINS, base_seq=base_seq, lock_id=""))
        return name

    def merge(self, into: Branch, source: Point, on_conflict: str, author: str = "") -> Landed:
        """Bring a branch's changes since the common ancestor (or the last merge) into `into`, three-way.

        `on_conflict`: "fail" raises `Conflict`, "ours" keeps `into`'s version, "theirs" takes the source's.
        """
        policies = {"fail": Policy.FIRST_WINS, "ours": Policy.KEEP_THEIRS, "theirs": Policy.LAST_WINS}
        if on_conflict not in policies:
            raise Invalid.argument("on_conflict", on_conflict, 'one of "fail", "ours", "theirs"')
        if source.branch.uuid == into.uuid:
            raise Invalid.argument("branch", source.branch.name, f"another branch than {into.name!r} itself")
        theirs, ours = source.state(), into.refresh()
        base = self._merge_base(into, ours, source.branch, theirs)
        intents = [intent_of(*difference) for difference in base.diff(theirs)]
        if not intents:
            return Landed(None, (), self.runtime.now_ns())
        proposal = Proposal(
            intents,
            policies[on_conflict],
            base_seq=ours.seq,
            seen_blobs=theirs.blob_bytes(),
            author=author,
            message=f"merge {source.branch.name}",
            merged_uuid=source.branch.uuid,
            merged_seq=theirs.seq,
        )
        try:
            return into.commit(proposal)
        except Conflict as conflict:
            raise Conflict(conflict.paths, None, self.name) from None

    @staticmethod
    def _merge_base(into: Branch, ours: State, source: Branch, theirs: State) -> State:
        """Return a tree whose changes both sides hold, the newest that their merges and lineages tell of."""
        brought = ours.merges.get(source.uuid)  # (source's number, ours then)
        taken = theirs.merges.get(into.uuid)  # (ours, source's number then)
        if taken is not None and (brought is None or taken[0] >= brought[1]):
            return into.at(taken[0])
        if brought is not None:
            return source.at(brought[0])
        mine = dict(((into.uuid, ours.seq), *into.record.lineage))
        for uuid, seq in ((source.uuid, theirs.seq), *source.record.lineage):
            if uuid in mine:
                return source.at(min(seq, mine[uuid], theirs.seq))
        return source.at(0)

    # -- asking ---------------------------------------------------------------------------------------------

    def lookup(self, point: Point, path: bytes) -> Node | None:
        """Return the node at a path of a point's tree, or None."""
        return point.state().get(path)

    def file_at(self, point: Point, path: bytes) -> tuple[State, Node]:
        """Return a file's node and the tree it is in; `NotFound`, and `Invalid` for what is no file."""
        state = point.state()
        node = state.get(path)
        if node is None:
            raise NotFound(f"disk {self.name!r} has no {shown(path)!r} on {point.branch.name!r}")
        if node.kind != FILE:
            what = "a symbolic link" if node.kind == SYMLINK else "a directory"
            raise Invalid.argument("key", shown(path), f"it is {what}, not a file")
        return state, node

    def read_file(self, point: Point, path: bytes) -> tuple[Node, bytes]:
        """Return a file's node and whole content; `NotFound` and `Invalid` as in `file_at`."""
        state, node = self.file_at(point, path)
        return node, self.reader.read(node.data, state.blob_bytes())

    def file_chunks(self, point: Point, path: bytes, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Yield a file's bytes from `start` up to `end` (exclusive; its end by default), an extent at a time.

        `NotFound` and `Invalid` as in `file_at`. What is asked for beyond the end of the file is left out.
        """
        state, node = self.file_at(point, path)
        refs = cut(node.data, start, node.size if end is None else end)
        return self.reader.chunks(refs, state.blob_bytes())

    def log(self, point: Point, after: int = 0) -> Iterator[Entry]:
        """Yield the entries that led to a point, oldest first, from `after` on."""
        until = point.branch.refresh().seq if point.seq is None else point.seq
        return point.branch.history(after, until)

    def diff(self, before: Point, after: Point) -> Iterator[Difference]:
        """Yield what differs between two points, in byte order of paths."""
        return before.state().diff(after.state())

    # -- care -----------------------------------------------------------------------------------------------

    def collect(
        self, grace_s: float = GRACE_S, keep_history_s: float = KEEP_HISTORY_S, dry_run: bool = False
    ) -> Collected:
        """Collect the disk's garbage; see gc.py."""
        collected = collect(
            self._store, self.record, self.runtime, grace_s=grace_s, keep_history_s=keep_history_s, dry_run=dry_run
        )
        if not dry_run:
            for branch in list(self._branches.values()):
                branch.relist()
        return collected

    def check(self, *, quick: bool = False) -> Checked:
        """Verify the disk; see fsck.py."""
        return check(self._store, self.record, self.runtime, quick=quick)

    def close(self) -> None:
        """Wait for background work."""
        for branch in list(self._branches.values()):
            branch.settle()

    # -- inside ---------------------------------------------------------------------------------------------

    def _open_branch(self, name: str, record: BranchRecord, state: State | None = None) -> Branch:
        with self._lock:
            branch = self._branches.get(name)
            if branch is None:
                branch = Branch(
                    self._store,
                    self.id,
                    name,
                    record,
                    self._pages,
                    self.runtime,
                    self.tuning,
                    self.reader,
                    state,
                    self._ages,
                )
                self._branches[name] = branch
            return branch

    def _create(self, key: str, data: bytes, what: str) -> None:
        """Store a named record; an answer that was lost is settled by reading back."""
        create_record(self._store, key, data, f"disk {self.name!r} already has a {what}", self.runtime)

    def _create_at(self, branch: Branch, seq: int, key: str, data: bytes, what: str) -> None:
        """Store a record that names the tree of `branch` at `seq`; `Trimmed`, and no record, if that is going."""
        self._create(key, data, what)
        if seq < branch.known().folded_seq or branch.stale:
            uuid, at = lineage_at(branch.record, seq)[0]
            forget_trimmed(self._store, self.id, uuid, at, key)

    def _names(self, prefix: str) -> Iterator[str]:
        return (layout.name_of_key(meta.key, prefix) for meta in self._store.list(prefix))

    @staticmethod
    def _some(names: Iterator[str], limit: int = 10) -> Iterator[str]:
        return (name for _, name in zip(range(limit), names, strict=False))
