"""Rebasing one commit onto a newer tree: what lands, what conflicts. Pure.

Owns the rules of the mount modes (docs/MERGE.md has them as a table). Knows trees only through `get` and
`has_children`, and nothing of logs, packs or stores.

Two rules stand behind the rest. Directories merge: only what a name holds can conflict. A command destroys
only what it could see: a directory is removed entry by entry, and stays where somebody added to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol

import msgspec

from fanout.format.entry import ADDED, ATTRIBUTES, MODIFIED, TOUCHED, Effect, Put, Remove
from fanout.format.extents import size_of
from fanout.format.tree import DIR, FILE, Node, Ref, directory, parents, same_content, same_node

__all__ = ["Intent", "Policy", "Rebased", "Tree", "diverged", "intent_of", "rebase"]

_ATTRIBUTES = ("mode", "uid", "gid", "xattrs")


class Policy(Enum):
    """How a commit meets paths that somebody else changed since its base.

    FIRST_WINS: they conflict (`shared`). LAST_WINS: they are overwritten (`conditional`). KEEP_THEIRS: this commit's
    change of them is dropped (a merge with `ours`). STRICT: like LAST_WINS for one name, but a file never turns
    into a directory or back (objects).
    """

    FIRST_WINS = "first_wins"
    LAST_WINS = "last_wins"
    KEEP_THEIRS = "keep_theirs"
    STRICT = "strict"


@dataclass(frozen=True, slots=True)
class Intent:
    """One path a commit wants changed: from `base` (what it saw, None: nothing) to `node` (None: removed).

    `weak` marks a node of which only the mtime moved (a directory's, because names in it did): it never conflicts.
    """

    path: bytes
    base: Node | None
    node: Node | None
    weak: bool = False


class Tree(Protocol):
    """What rebasing needs to know of a tree."""

    def get(self, path: bytes) -> Node | None: ...

    def has_children(self, path: bytes) -> bool: ...

    def below(self, path: bytes) -> Iterable[tuple[bytes, Node]]: ...


@dataclass(frozen=True, slots=True)
class Rebased:
    """The effects that land on the tree, or the paths that conflict (then nothing lands)."""

    effects: tuple[Effect, ...]
    conflicts: tuple[bytes, ...]


def intent_of(path: bytes, before: Node | None, after: Node | None) -> Intent:
    """Return the intent that turns `before` into `after`, weak if they differ in mtime only."""
    weak = before is not None and after is not None and same_node(before, after, times=False)
    return Intent(path, before, after, weak)


def diverged(intents: Iterable[Intent], tree: Tree) -> dict[bytes, int]:
    """Return the paths that do not hold in `tree` what the intents saw: what "touched" means to a three-way merge.

    Comparing trees and not logs: a merge's base is a tree that no number on the target's log stands for. A moved
    mtime alone is no divergence.
    """
    return {
        intent.path: MODIFIED for intent in intents if not same_node(intent.base, tree.get(intent.path), times=False)
    }


def rebase(
    intents: Sequence[Intent],
    tree: Tree,
    touched: Mapping[bytes, int],
    policy: Policy,
    *,
    identical_is_clean: bool = False,
    combine: Callable[[Node, Node, Node], tuple[Ref, ...]] = lambda base, node, now: node.data,
) -> Rebased:
    """Fit `intents` onto `tree`. `touched` maps the paths others changed since the intents' base to how.

    `identical_is_clean`: both sides having made the very same change is no conflict (merges, not execs). `combine`
    joins two changes of one file's content (what both saw, mine, what is there now); else mine, the later, wins.
    """
    work = _Work(tree, touched, policy, identical_is_clean, combine)
    strong = [i for i in intents if not i.weak]
    work.see(intents)
    removals = sorted((i for i in strong if i.node is None), key=lambda i: i.path, reverse=True)
    for intent in removals:
        work.remove(intent)
    for intent in sorted((i for i in strong if i.node is not None), key=lambda i: i.path):
        work.put(intent)
    for intent in intents:
        if intent.weak:
            work.touch(intent)
    if work.conflicts:
        return Rebased((), tuple(sorted(work.conflicts)))
    return Rebased(tuple(work.effects.values()), ())


class _Work:
    """The tree as it becomes while one commit's intents are fitted onto it."""

    def __init__(
        self,
        tree: Tree,
        touched: Mapping[bytes, int],
        policy: Policy,
        identical_is_clean: bool,
        combine: Callable[[Node, Node, Node], tuple[Ref, ...]],
    ) -> None:
        self._tree = tree
        self._touched = touched
        self._policy = policy
        self._seen: dict[bytes, Node] = {}
        self._identical_is_clean = identical_is_clean
        self._combine = combine
        self.effects: dict[bytes, Effect] = {}
        self.conflicts: set[bytes] = set()

    def see(self, intents: Sequence[Intent]) -> None:
        """Remember directories as the commit saw them, for those that have to be made again."""
        self._seen = {i.path: i.node for i in intents if i.weak and i.node is not None and i.node.kind == DIR}

    def remove(self, intent: Intent) -> None:
        now = self._get(intent.path)
        if now is None:
            return
        if intent.base is not None and (now.kind == DIR) != (intent.base.kind == DIR):
            # Somebody replaced the thing that was seen; what is there now was never seen.
            self._clash(intent.path)
            return
        if now.kind == DIR:
            if not self._has_children(intent.path) and self._may_change(intent, now):
                self.effects[intent.path] = Remove(intent.path)
        elif self._may_change(intent, now):
            self.effects[intent.path] = Remove(intent.path)

    def put(self, intent: Intent) -> None:
        node = intent.node
        assert node is not None
        now = self._get(intent.path)
        if (
            node.kind == DIR
            and now is not None
            and now.kind == DIR
            and (intent.base is None or intent.base.kind != DIR)
        ):
            return  # both made this directory: the first one's attributes stay
        if now is not None and now.kind == DIR and node.kind != DIR and self._has_children(intent.path):
            if self._policy is not Policy.KEEP_THEIRS:
                self.conflicts.add(intent.path)  # entries that were never seen would be lost
            return
        if self._policy is Policy.STRICT and now is not None and (now.kind == DIR) != (node.kind == DIR):
            self.conflicts.add(intent.path)
            return
        if not self._may_change(intent, now):
            return
        base = intent.base
        if base is not None and now is not None and base.kind == node.kind != now.kind and same_content(base, node):
            return  # only attributes, of something that is no longer there: no reason to destroy what took its place
        merged = self._merge(intent, node, now)
        if not same_node(merged, now) and self._make_parents(intent.path, node.mtime_ns):
            self.effects[intent.path] = Put(intent.path, merged, _change(now, merged))

    def touch(self, intent: Intent) -> None:
        now = self._get(intent.path)
        if now is None or intent.node is None or now.kind != intent.node.kind:
            return
        if now.kind == DIR:
            if now.mtime_ns >= intent.node.mtime_ns:
                return
        elif intent.path in self._touched or now.mtime_ns == intent.node.mtime_ns:
            return
        earlier = self.effects.get(intent.path)
        change: Literal[0, 1, 2, 3] = TOUCHED if now.kind == DIR else ATTRIBUTES
        if isinstance(earlier, Put):
            change = earlier.change
        moved = msgspec.structs.replace(now, mtime_ns=intent.node.mtime_ns)
        self.effects[intent.path] = Put(intent.path, moved, change)

    def _merge(self, intent: Intent, node: Node, now: Node | None) -> Node:
        """Combine my change with what is there: a field I did not change keeps the value others gave it."""
        base = intent.base
        if base is None or now is None or base.kind != node.kind or now.kind != node.kind or now == base:
            return node
        kept = {f: getattr(now, f) for f in _ATTRIBUTES if getattr(node, f) == getattr(base, f)}
        if same_content(base, now):
            return msgspec.structs.replace(node, **kept)
        if same_content(base, node):
            return msgspec.structs.replace(now, **{f: getattr(node, f) for f in _ATTRIBUTES if f not in kept})
        if self._policy is not Policy.LAST_WINS or node.kind != FILE:
            return msgspec.structs.replace(node, **kept)
        data = self._combine(base, node, now)
        digest = node.digest if data is node.data else b""
        return msgspec.structs.replace(node, **kept, data=data, size=size_of(data), digest=digest)

    def _may_change(self, intent: Intent, now: Node | None) -> bool:
        """Apply the policy to one path; records the conflict."""
        if intent.path not in self._touched:
            return True
        if self._identical_is_clean and same_node(now, intent.node, times=False):
            return True
        return self._clash(intent.path)

    def _clash(self, path: bytes) -> bool:
        """Somebody else's change of `path` is in the way; returns whether to go on over it."""
        if self._policy is Policy.FIRST_WINS:
            self.conflicts.add(path)
        return self._policy in (Policy.LAST_WINS, Policy.STRICT)

    def _make_parents(self, path: bytes, mtime_ns: int) -> bool:
        """See that all directories above `path` exist; returns False where the policy forbids it."""
        missing: list[bytes] = []
        for parent in parents(path):
            node = self._get(parent) if parent else None
            if not parent or (node is not None and node.kind == DIR):
                break  # the root always is one, and asking would load the tree's first page
            if node is not None and (self._policy is Policy.STRICT or not self._clash(parent)):
                if self._policy is Policy.STRICT:
                    self.conflicts.add(parent)
                return False
            missing.append(parent)
        for parent in reversed(missing):
            before = self._get(parent)
            made = self._seen.get(parent, directory(0o755, mtime_ns))
            self.effects[parent] = Put(parent, made, _change(before, made))
        return True

    def _get(self, path: bytes) -> Node | None:
        effect = self.effects.get(path)
        if effect is not None:
            return effect.node if isinstance(effect, Put) else None
        return self._tree.get(path)

    def _has_children(self, path: bytes) -> bool:
        if not self.effects:
            return self._tree.has_children(path)
        for below, _ in self._tree.below(path):
            effect = self.effects.get(below)
            if effect is None or isinstance(effect, Put):
                return True
        return False


def _change(before: Node | None, after: Node) -> Literal[0, 1, 2]:
    if before is None:
        return ADDED
    return ATTRIBUTES if same_content(before, after) else MODIFIED
