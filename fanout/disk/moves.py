"""Moving and copying files and whole directories, without moving data.

Owns that as plans, made for the very tree they are to follow (`Proposal.plan`). Knows no store and no log.
"""

from __future__ import annotations

import msgspec

from fanout.disk.merge import Intent
from fanout.disk.paths import shown
from fanout.disk.state import State
from fanout.errors import Exists, Invalid, NotFound
from fanout.format.tree import DIR, Node

__all__ = ["plan_copy", "plan_move"]


def plan_move(tree: State, source: bytes, target: bytes, *, replace: bool) -> list[Intent]:
    """Return what gives a file or a directory another name; `replace`: in place of a file that has it."""
    found = _found(tree, source, target, replace)
    taken = tree.get(target)
    put = [Intent(target + path[len(source) :], taken if path == source else None, node) for path, node in found]
    return [Intent(path, node, None) for path, node in found] + put


def plan_copy(tree: State, source: bytes, target: bytes, now_ns: int, *, replace: bool) -> list[Intent]:
    """Return what makes a second one of a file or a directory, of now; hard links of what is copied are left alone."""
    found = _found(tree, source, target, replace, same=replace)
    taken = tree.get(target)
    return [
        Intent(
            target + path[len(source) :],
            taken if path == source else None,
            msgspec.structs.replace(node, mtime_ns=now_ns, link=b""),
        )
        for path, node in found
    ]


def _found(tree: State, source: bytes, target: bytes, replace: bool, same: bool = False) -> list[tuple[bytes, Node]]:
    """Return what is at `source`, itself first, if it may go to `target`; `same`: a file may go to itself."""
    node = tree.get(source)
    if node is None:
        raise NotFound(f"there is no {shown(source)!r}")
    if not source:
        raise Invalid.argument("source", "/", "a path below the root of the disk")
    if (target == source and not (same and node.kind != DIR)) or target.startswith(source + b"/"):
        raise Invalid.argument("target", shown(target), "a place outside of the source")
    taken = tree.get(target)
    if taken is not None and (not replace or DIR in (taken.kind, node.kind)):
        raise Exists(f"{shown(target)!r} is already on the disk")
    return [(source, node), *(tree.below(source) if node.kind == DIR else ())]
