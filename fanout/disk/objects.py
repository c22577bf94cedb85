"""Objects on a tree: what putting and deleting keys means for directories.

Owns that as plans, made for the very tree they are to follow (`Proposal.plan`). Knows no S3 and no store.
"""

from __future__ import annotations

from collections.abc import Iterable

from fanout.disk.merge import Intent
from fanout.disk.paths import shown
from fanout.disk.state import State
from fanout.errors import Conflict
from fanout.format.facts import facts_of, with_facts
from fanout.format.tree import DIR, Node, directory, parents

__all__ = ["NameIsDirectory", "ParentIsFile", "plan_put", "plan_removal"]


class NameIsDirectory(Conflict):
    """A directory has the name that a file is to get."""


class ParentIsFile(Conflict):
    """A file has the name of a directory that a key needs."""


def plan_put(tree: State, path: bytes, node: Node) -> list[Intent]:
    """Return what makes `path` hold `node`, with the directories it needs, which get its owner.

    `NameIsDirectory` and `ParentIsFile`: a file never takes a directory's place, nor a directory a file's.
    """
    now = tree.get(path)
    if now is not None and now.kind == DIR and node.kind != DIR:
        raise NameIsDirectory([shown(path)])
    if now is not None and now.kind != DIR and node.kind == DIR:
        raise ParentIsFile([shown(path)])
    intents = [Intent(path, now, node)]
    if now is None:
        for parent in parents(path):
            above = tree.get(parent) if parent else None
            if not parent or (above is not None and above.kind == DIR):
                break
            if above is not None:
                raise ParentIsFile([shown(parent)])
            intents.append(Intent(parent, None, _made_for(node)))
    return intents


def plan_removal(tree: State, keys: Iterable[bytes]) -> list[Intent]:
    """Return what removes these keys; what is not there is removed already.

    A directory that gets empty goes, too, unless it is an object itself: a prefix without keys is nothing. The key of a
    directory with something in it is only forgotten.
    """
    intents: dict[bytes, Intent] = {}
    directories: list[tuple[bytes, Node]] = []
    for key in keys:
        path = key.removesuffix(b"/")
        node = tree.get(path)
        if not path or node is None or (node.kind == DIR) != key.endswith(b"/"):
            continue
        if node.kind == DIR:
            directories.append((path, node))
        else:
            intents[path] = Intent(path, node, None)
    for path, node in sorted(directories, reverse=True):
        if _is_emptied(tree, path, intents):
            intents[path] = Intent(path, node, None)
        elif facts_of(node) is not None:
            intents[path] = Intent(path, node, with_facts(node, None))
    above = {path.rpartition(b"/")[0] for path, intent in intents.items() if intent.node is None}
    for start in sorted(above, key=len, reverse=True):
        for path in (start, *parents(start)):
            node = tree.get(path)
            if not path or node is None or path in intents or facts_of(node) is not None:
                break
            if not _is_emptied(tree, path, intents):
                break
            intents[path] = Intent(path, node, None)
    return list(intents.values())


def _is_emptied(tree: State, path: bytes, intents: dict[bytes, Intent]) -> bool:
    """Whether everything in a directory is going."""
    for name, _ in tree.children(path):
        intent = intents.get(path + b"/" + name)
        if intent is None or intent.node is not None:
            return False
    return True


def _made_for(node: Node) -> Node:
    made = directory(0o755, node.mtime_ns)
    return made if not node.uid and not node.gid else Node(DIR, 0o755, node.mtime_ns, uid=node.uid, gid=node.gid)
