"""Trees as plain dicts, and what a commit of one onto another does: the merge rules without logs and stores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fanout.disk.merge import Intent, Policy, Rebased, diverged, intent_of, rebase
from fanout.format.entry import TOUCHED, Effect, Put
from fanout.format.tree import DIR, Node, directory, parents, same_node

Plain = Mapping[bytes, Node]


class DictTree:
    """A `merge.Tree` over a dict."""

    def __init__(self, nodes: Plain) -> None:
        self.nodes = dict(nodes)

    def get(self, path: bytes) -> Node | None:
        return self.nodes.get(path) or (None if path else directory())

    def below(self, path: bytes) -> Iterator[tuple[bytes, Node]]:
        prefix = path + b"/" if path else b""
        return ((p, n) for p, n in sorted(self.nodes.items()) if p.startswith(prefix) and p != path)

    def has_children(self, path: bytes) -> bool:
        return next(self.below(path), None) is not None


def intents_between(base: Plain, mine: Plain) -> list[Intent]:
    """What a view's diff finds: one intent for each path that differs."""
    return [
        intent_of(path, base.get(path), mine.get(path))
        for path in sorted(base.keys() | mine.keys())
        if not same_node(base.get(path), mine.get(path))
    ]


def touched_by(effects: Sequence[Effect]) -> dict[bytes, int]:
    return {e.path: 0 for e in effects if not (isinstance(e, Put) and e.change == TOUCHED)}


def applied(tree: Plain, effects: Sequence[Effect]) -> dict[bytes, Node]:
    nodes = dict(tree)
    for effect in effects:
        if isinstance(effect, Put):
            nodes[effect.path] = effect.node
        else:
            nodes.pop(effect.path, None)
    return nodes


def land(base: Plain, theirs: Plain, mine: Plain, policy: Policy, *, merging: bool = False) -> Rebased:
    """Commit `theirs` and then `mine`, both made from `base`; returns what became of `mine`."""
    first = rebase(intents_between(base, theirs), DictTree(base), {}, Policy.FIRST_WINS)
    assert not first.conflicts
    assert same_trees(applied(base, first.effects), theirs)
    intents = intents_between(base, mine)
    tree = DictTree(theirs)
    touched = diverged(intents, tree) if merging else touched_by(first.effects)
    return rebase(intents, tree, touched, policy, identical_is_clean=merging)


def same_trees(a: Plain, b: Plain, *, times: bool = True) -> bool:
    return a.keys() == b.keys() and all(same_node(a[p], b[p], times=times) for p in a)


def unreachable(tree: Plain) -> list[bytes]:
    """Paths whose parents are missing or no directories."""

    def is_directory(path: bytes) -> bool:
        return not path or (path in tree and tree[path].kind == DIR)

    return [path for path in tree if not all(map(is_directory, parents(path)))]
