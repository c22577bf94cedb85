"""A tree as object keys: which keys there are, in byte order, a page at a time.

Owns how directories and links show as keys, and grouping by a delimiter. Knows no S3 and no HTTP.

A file or link has its path as its key. A directory has its path and a `/`, but only if it is empty or was made on
purpose as an object; any other only shows in the keys of what is in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fanout.disk.state import State
from fanout.format.facts import facts_of
from fanout.format.tree import DIR, Node

__all__ = ["KeyPage", "is_key_of_directory", "keys_from", "list_keys"]


@dataclass(frozen=True, slots=True)
class KeyPage:
    """One page of a listing: keys with their nodes, and common prefixes, in order; `last` of both if there are more."""

    keys: list[tuple[bytes, Node]]
    prefixes: list[bytes]
    last: bytes | None


def is_key_of_directory(state: State, path: bytes, node: Node) -> bool:
    """Whether `path/` is a key of the tree."""
    return facts_of(node) is not None or not state.has_children(path)


def keys_from(state: State, start: bytes) -> Iterator[tuple[bytes, Node]]:
    """Yield (key, node) of every key >= `start`, in byte order of keys.

    That is not the order of paths: `a-b` comes after the directory `a` and before its key `a/`.
    """
    held: list[tuple[bytes, Node]] = []  # directories whose key's turn has not come, the next one last
    for size in range(1, len(start)):
        if start[size] <= 0x2F:
            path = start[:size]
            node = state.get(path) if path + b"/" >= start else None
            if node is not None and node.kind == DIR:
                held.append((path + b"/", node))
    for path, node in state.scan(start or b"\x01"):
        while held and held[-1][0] < path:
            key, passed = held.pop()
            if not path.startswith(key) or facts_of(passed) is not None:
                yield key, passed
        if node.kind == DIR:
            held.append((path + b"/", node))
        else:
            yield path, node
    yield from reversed(held)


def list_keys(state: State, prefix: bytes, delimiter: bytes, after: bytes, limit: int) -> KeyPage:
    """Return at most `limit` keys and common prefixes that begin with `prefix` and are greater than `after`.

    Keys that have `delimiter` somewhere after the prefix show once, as what is up to it; such a group is passed over
    in one step, however much it holds.
    """
    keys: list[tuple[bytes, Node]] = []
    prefixes: list[bytes] = []
    last = b""
    if limit <= 0:
        return KeyPage(keys, prefixes, None)
    start: bytes | None = max(prefix, after + b"\0") if after else prefix
    if after.startswith(prefix):
        group = _group(after, prefix, delimiter)
        start = _past(group) if group else start
    while start is not None:
        at, start = start, None
        for key, node in keys_from(state, at):
            if not key.startswith(prefix):
                break
            if len(keys) + len(prefixes) == limit:
                return KeyPage(keys, prefixes, last)
            group = _group(key, prefix, delimiter)
            if group:
                prefixes.append(group)
                last, start = group, _past(group)
                break
            keys.append((key, node))
            last = key
    return KeyPage(keys, prefixes, None)


def _group(key: bytes, prefix: bytes, delimiter: bytes) -> bytes:
    at = key.find(delimiter, len(prefix)) if delimiter else -1
    return key[: at + len(delimiter)] if at >= 0 else b""


def _past(group: bytes) -> bytes | None:
    """Return what is greater than every key that begins with `group`; None if nothing can be."""
    head = group.rstrip(b"\xff")
    return head[:-1] + bytes([head[-1] + 1]) if head else None
