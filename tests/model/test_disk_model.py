"""A disk against a dict: random writers, policies, branches, merges, folds and cold openings."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fanout.disk.branch import Branch
from fanout.disk.disk import Disk, Point
from fanout.disk.edits import combine
from fanout.disk.merge import Intent, Policy, rebase
from fanout.disk.proposal import Proposal
from fanout.disk.state import State
from fanout.errors import Conflict, Exists, Invalid, NotFound
from fanout.format.entry import Entry, Put
from fanout.format.tree import DIR, FILE, SYMLINK, Node, Ref, directory, parents, same_node
from fanout.store.base import Store
from fanout.store.memory import MemoryStore
from tests.support.disks import TINY, check_refs, check_tree, cold, contents, file_node, fixed, new_disk
from tests.support.trees import DictTree, applied, same_trees

#: What a path holds in the model: kind, mode, and the content, link target or nothing.
Held = tuple[int, int, bytes]
Model = dict[bytes, Held]

paths = st.sampled_from([b"a", b"a/a", b"a/b", b"a/b/a", b"a/b/\xff", b"a/b/c", b"a-b", b"b", b"b/a", b"c", b"c/d/e"])
data = st.sampled_from([b"", b"x", b"y" * 20, b"\0binary", b"two extents and a bit more of it", bytes(range(80))])
branches = st.sampled_from(["main", "side"])
any_branch = st.sampled_from(["main", "main", "side", "side", "more", "most"])
policies = st.sampled_from(list(Policy))
modes = st.sampled_from([0o644, 0o755, 0o600])


def held(disk: Disk, state: State) -> Model:
    files = contents(disk, state)
    return {path: (node.kind, node.mode, files.get(path, node.target)) for path, node in state.scan() if path}


class Writer:
    """Somebody who saw a tree some time ago, in a process of its own or not."""

    def __init__(self, disk: Disk, branch: Branch, turn: int) -> None:
        self.disk = disk
        self.branch = branch
        self.turn = turn
        self.state = branch.refresh()
        self.model = held(disk, self.state)


class DiskMachine(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed: int) -> None:
        note(f"fixed({seed})")
        self.store: Store = MemoryStore()
        self.runtime = fixed(seed)
        self.disk = new_disk(self.store, self.runtime, TINY)
        self.models: dict[str, Model] = {"main": {}}
        self.past: dict[str, tuple[Model, State]] = {}
        self.writers: list[Writer] = []
        self.clock = 0
        self.trees: dict[str, dict[bytes, Node]] = {}
        self.touches: dict[str, list[set[bytes]]] = {}
        for path, content in ((b"a/b/a", b"one"), (b"a/a", b"two"), (b"b", b"y" * 70), (b"c/d/e", b"\0")):
            self.put_object("main", path, content)
        self.create_branch("main", "side")
        self.open_writer("main", separate=False)
        self.open_writer("main", separate=True)
        self.open_writer("side", separate=True)

    def teardown(self) -> None:
        if hasattr(self, "disk"):
            self.disk.close()
            for writer in self.writers:
                writer.disk.close()

    # -- plain calls: the model is exact -------------------------------------------------------------------

    @rule(name=any_branch, path=paths, content=data)
    def put_object(self, name: str, path: bytes, content: bytes) -> None:
        if name not in self.models:
            return
        model = self.models[name]
        in_the_way = model.get(path, (FILE,))[0] == DIR or any(
            model.get(p, (DIR,))[0] != DIR for p in parents(path) if p
        )
        try:
            self.disk.put_object(Point(self.disk.branch(name)), path, content, 0o644)
        except Conflict:
            assert in_the_way
            return
        assert not in_the_way
        for parent in parents(path):
            if parent:
                model.setdefault(parent, (DIR, 0o755, b""))
        model[path] = (FILE, 0o644, content)

    @rule(name=branches, path=paths, recursive=st.booleans())
    def delete_object(self, name: str, path: bytes, recursive: bool) -> None:
        if name not in self.models:
            return
        model = self.models[name]
        below = [p for p in model if p.startswith(path + b"/")]
        try:
            self.disk.delete_object(Point(self.disk.branch(name)), path, recursive=recursive)
        except Invalid:
            assert below
            assert not recursive
            return
        for gone in [path, *below]:
            model.pop(gone, None)

    @rule(name=branches, source=paths, to=paths)
    def move(self, name: str, source: bytes, to: bytes) -> None:
        target = to
        if name not in self.models:
            return
        model = self.models[name]
        try:
            self.disk.move(Point(self.disk.branch(name)), source, target)
        except (NotFound, Exists, Invalid):
            assert source not in model or target in model or (target + b"/").startswith(source + b"/")
            return
        except Conflict:
            assert any(model.get(p, (DIR,))[0] != DIR for p in parents(target) if p)
            return
        for parent in parents(target):
            if parent:
                model.setdefault(parent, (DIR, 0o755, b""))
        for path in [p for p in model if p == source or p.startswith(source + b"/")]:
            model[target + path[len(source) :]] = model.pop(path)

    # -- writers with a tree of their own ------------------------------------------------------------------

    @rule(name=branches, separate=st.booleans())
    def open_writer(self, name: str, separate: bool) -> None:
        if name in self.models and len(self.writers) < 4:
            disk = cold(self.disk, self.store) if separate else self.disk
            self.writers.append(Writer(disk, disk.branch(name), self.turn(name)))

    def turn(self, name: str) -> int:
        """Write down what changed on a branch since the last call; returns how often that was asked."""
        now = dict(self.disk.branch(name).refresh().scan())
        was = self.trees.get(name, {})
        touched = {path for path in was.keys() | now.keys() if not same_node(was.get(path), now.get(path))}
        self.trees[name] = now
        self.touches.setdefault(name, []).append(touched)
        return len(self.touches[name])

    @precondition(lambda self: self.writers)
    @rule(
        which=st.integers(0, 3),
        changes=st.lists(st.tuples(st.sampled_from("wwdmlc"), paths, data, modes), min_size=1, max_size=6),
        policy=policies,
        keep=st.booleans(),
    )
    def commit(self, which: int, changes: list[tuple[str, bytes, bytes, int]], policy: Policy, keep: bool) -> None:
        writer = self.writers[which % len(self.writers)]
        mine = dict(writer.model)
        nodes: dict[bytes, Node] = dict(writer.state.scan())
        blobs: dict[bytes, bytes] = {}
        changed: set[bytes] = set()
        for kind, path, content, mode in changes:
            self.clock += 1
            changed |= self.edit(writer, kind, path, content, mode, mine, nodes, blobs)
        intents = [
            Intent(path, writer.state.get(path), nodes.get(path))
            for path in sorted(changed)
            if not same_node(writer.state.get(path), nodes.get(path))
        ]
        proposal = Proposal(intents, policy, writer.state.seq, blobs, writer.state.blob_bytes())
        name = writer.branch.name
        self.turn(name)
        before, tree = self.models[name], self.trees[name]
        touched = {path: 0 for each in self.touches[name][writer.turn :] for path in each}
        known = {**self.disk.branch(name).known().blob_bytes(), **writer.state.blob_bytes(), **blobs}

        def join(base: Node, node: Node, now: Node) -> tuple[Ref, ...]:
            return combine(
                base, node, now, lambda refs: self.disk.reader.read(refs, known), writer.disk.packer().add, 16
            )

        wanted = rebase(intents, DictTree(tree), touched, policy, combine=join)
        clashed: tuple[bytes, ...]
        try:
            landed = writer.branch.commit(proposal)
        except Conflict as conflict:
            clashed = tuple(map(os.fsencode, conflict.paths))
        else:
            clashed = ()
            assert not wanted.conflicts
            state = self.disk.branch(name).refresh()
            assert same_trees(dict(state.scan()), applied(tree, wanted.effects))
            after = held(self.disk, state)
            if before == writer.model and not touched:
                assert after == mine
            self.models[name] = after
            assert (landed.seq is None) == (not landed.effects)
        assert clashed == wanted.conflicts, (clashed, wanted, touched)
        assert touched or not clashed or policy is Policy.STRICT, "nobody was in the way"
        if not keep:
            self.writers[self.writers.index(writer)] = Writer(writer.disk, writer.branch, self.turn(name))

    def edit(
        self,
        writer: Writer,
        kind: str,
        path: bytes,
        content: bytes,
        mode: int,
        mine: Model,
        nodes: dict[bytes, Node],
        blobs: dict[bytes, bytes],
    ) -> set[bytes]:
        """Do to a private tree what a command would; returns the paths it changed."""
        if any(mine.get(p, (DIR,))[0] != DIR for p in parents(path) if p):
            return set()
        changed = {path}
        below = {p for p in mine if p.startswith(path + b"/")}
        if kind == "c":
            if path not in mine or mine[path][0] == SYMLINK:
                return set()
            mine[path] = (mine[path][0], mode, mine[path][2])
            node = nodes[path]
            nodes[path] = Node(node.kind, mode, self.clock, node.size, node.data)
            return changed
        for gone in below | {path}:
            mine.pop(gone, None)
            nodes.pop(gone, None)
        changed |= below
        if kind == "d":
            return changed
        for parent in parents(path):
            if parent and parent not in mine:
                mine[parent] = (DIR, 0o755, b"")
                nodes[parent] = directory(0o755, self.clock)
                changed.add(parent)
        if kind == "w":
            nodes[path], packed = file_node(writer.disk, content, mode, self.clock)
            blobs.update(packed)
            mine[path] = (FILE, mode, content)
        elif kind == "m":
            nodes[path] = directory(mode, self.clock)
            mine[path] = (DIR, mode, b"")
        else:
            nodes[path] = Node(SYMLINK, 0o777, self.clock, len(content), target=content)
            mine[path] = (SYMLINK, 0o777, content)
        return changed

    # -- branches, checkpoints, merges ---------------------------------------------------------------------

    @precondition(lambda self: len(self.models) < 4)
    @rule(source=branches, name=st.sampled_from(["more", "most"]))
    def create_branch(self, source: str, name: str) -> None:
        if source in self.models and name not in self.models:
            self.disk.create_branch(name, Point(self.disk.branch(source)))
            self.models[name] = dict(self.models[source])

    @precondition(lambda self: len(self.models) < 4)
    @rule(source=st.sampled_from(["side", "more"]), name=st.sampled_from(["more", "most"]), back=st.integers(0, 9))
    def branch_from_the_past(self, source: str, name: str, back: int) -> None:
        if source in self.models and name not in self.models:
            seq = max(0, self.disk.branch(source).refresh().seq - back)
            state = self.disk.branch(source).at(seq)
            made = self.disk.create_branch(name, Point(self.disk.branch(source), seq))
            self.models[name] = held(self.disk, state)
            assert held(self.disk, made.refresh()) == self.models[name]
            assert held(self.disk, cold(self.disk, self.store).branch(name).refresh()) == self.models[name]

    @rule(name=branches)
    def checkpoint(self, name: str) -> None:
        if name in self.models and len(self.past) < 4:
            taken, _ = self.disk.create_checkpoint(None, self.disk.branch(name))
            self.past[taken] = (dict(self.models[name]), self.disk.branch(name).known())

    @rule(into=any_branch, source=any_branch, on_conflict=st.sampled_from(["fail", "ours", "theirs"]))
    def merge(self, into: str, source: str, on_conflict: str) -> None:
        if into == source or into not in self.models or source not in self.models:
            return
        try:
            self.disk.merge(self.disk.branch(into), Point(self.disk.branch(source)), on_conflict)
        except Conflict:
            return
        after = held(self.disk, self.disk.branch(into).known())
        if on_conflict == "fail":
            for path, what in self.models[source].items():
                if path not in self.models[into] and path in after and what[0] != DIR:
                    assert after[path] == what
        self.models[into] = after
        again = self.disk.merge(self.disk.branch(into), Point(self.disk.branch(source)), "fail")
        assert again.seq is None, "the same merge again found something"

    # -- what changes nothing ------------------------------------------------------------------------------

    @rule(name=any_branch, separate=st.booleans())
    def fold(self, name: str, separate: bool) -> None:
        if name in self.models:
            disk = cold(self.disk, self.store) if separate else self.disk
            disk.branch(name).refresh()
            disk.branch(name).fold()

    @rule()
    def reopen(self) -> None:
        self.disk.close()
        self.disk = cold(self.disk, self.store)

    def settle(self) -> None:
        """Folds run in threads; waiting for them makes a failure replay."""
        for disk in [self.disk, *(writer.disk for writer in self.writers)]:
            disk.close()

    @invariant()
    def tree_is_the_model(self) -> None:
        if hasattr(self, "disk"):
            self.settle()
        for name, model in getattr(self, "models", {}).items():
            self.turn(name)
            state = self.disk.branch(name).refresh()
            assert held(self.disk, state) == model
            check_tree(state)
            check_refs(self.store, self.disk, state)
            fresh = cold(self.disk, self.store).branch(name).refresh()
            assert fresh.seq == state.seq
            assert [(p, n.kind, n.mode, n.mtime_ns) for p, n in fresh.scan()] == [
                (p, n.kind, n.mode, n.mtime_ns) for p, n in state.scan()
            ]
            assert held(self.disk, fresh) == model
            assert list(state.diff(fresh)) == []
            self.check_listing(state, model)

    @invariant()
    def past_stays(self) -> None:
        for name, (model, state) in getattr(self, "past", {}).items():
            point = self.disk.point(name)
            then = point.state()
            assert held(self.disk, then) == model
            now = self.disk.branch(point.branch.name).known()
            differing = {d.path for d in then.diff(now)}
            assert differing == {d.path for d in state.diff(now)}
            current = self.models[point.branch.name]
            assert {p for p in current.keys() | model.keys() if current.get(p) != model.get(p)} <= differing

    @invariant()
    def entries_carry_what_they_refer_to(self) -> None:
        for name in getattr(self, "models", {}):
            branch = self.disk.branch(name)
            for entry in branch.history(0, branch.known().seq):
                self.check_entry(entry)

    def check_entry(self, entry: Entry) -> None:
        from fanout.format import layout

        for commit in entry.commits:
            for effect in commit.effects:
                for ref in effect.node.data if isinstance(effect, Put) else ():
                    stored = self.store.head(layout.pack_key(self.disk.id, ref.pack))
                    assert ref.pack in entry.blobs or stored, f"{effect.path!r} in entry {entry.seq}"

    def check_listing(self, state: State, model: Model) -> None:
        for parent in [b"", *(p for p, what in model.items() if what[0] == DIR)]:
            prefix = parent + b"/" if parent else b""
            wanted = sorted(p[len(prefix) :] for p in model if p.startswith(prefix) and b"/" not in p[len(prefix) :])
            assert [name for name, _ in state.children(parent)] == wanted
            assert state.has_children(parent) == bool(wanted)
            if wanted:
                assert [name for name, _ in state.children(parent, wanted[0])] == wanted[1:]


SMALL = settings(max_examples=40, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck))
TestDisk = DiskMachine.TestCase
TestDisk.settings = SMALL


@pytest.mark.soak
class TestDiskForLong(DiskMachine.TestCase):
    settings = settings(SMALL, max_examples=400, stateful_step_count=50)
