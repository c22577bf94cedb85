"""Nodes, commits and checkpoints as the values users read, and the order of listings.

Owns what of a tree is shown and how. Pure but for the pages a tree loads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Literal

from fanout.disk.fsck import Checked
from fanout.disk.paths import shown
from fanout.disk.proposal import Landed
from fanout.disk.state import State
from fanout.format import entry as records
from fanout.format import lock as locking
from fanout.format.tree import DIR, FILE, SYMLINK, Node, content_hash
from fanout.model import Checkpoint, Commit, DirEntry, FsckAffected, FsckProblem, FsckReport, Lock, ObjectInfo
from fanout.run.changes import changes_of

__all__ = [
    "KINDS",
    "checkpoint_of",
    "commit_of",
    "directory_entry",
    "fsck_report",
    "landed_commit",
    "list_tree",
    "lock_of",
    "object_info",
    "only_time",
    "when",
]

KINDS: dict[int, Literal["file", "directory", "symlink"]] = {DIR: "directory", FILE: "file", SYMLINK: "symlink"}


def when(ns: int) -> datetime:
    return datetime.fromtimestamp(ns / 1e9, UTC)


def lock_of(lock: locking.Lock) -> Lock:
    return Lock(
        id=lock.id,
        paths=tuple("/" + shown(path) for path in lock.paths),
        exec_id=lock.owner,
        seq=lock.seq,
        expires=when(lock.expires_ns),
    )


def fsck_report(checked: Checked, quick: bool, duration_ms: float) -> FsckReport:
    problems = tuple(
        FsckProblem(
            object=problem.key,
            what=problem.what,
            affects=tuple(
                FsckAffected(
                    line=each.line,
                    paths=tuple(map(shown, each.paths)),
                    count=each.count,
                    everything=each.everything,
                    between=None if each.between is None else (shown(each.between[0]), shown(each.between[1])),
                    spared=tuple(map(shown, each.spared)),
                )
                for each in problem.affects.values()
            ),
        )
        for problem in checked.problems
    )
    return FsckReport(
        ok=not problems,
        quick=quick,
        problems=problems,
        more_problems=checked.more_problems,
        entries=checked.entries,
        snaps=checked.snaps,
        pages=checked.pages,
        packs=checked.packs,
        files=checked.files,
        bytes_read=checked.bytes_read,
        duration_ms=duration_ms,
    )


def object_info(path: bytes, node: Node) -> ObjectInfo:
    key = shown(path) + ("/" if node.kind == DIR else "")
    size = len(node.target) if node.kind == SYMLINK else node.size
    return ObjectInfo(
        key=key,
        size=size,
        etag="" if node.kind == DIR else content_hash(node).hex(),
        last_modified=when(node.mtime_ns),
        mode=node.mode,
        kind=KINDS[node.kind],
    )


def list_tree(state: State, prefix: bytes, after: bytes, recursive: bool) -> Iterator[ObjectInfo]:
    """Yield what has a key that starts with `prefix` and is greater than `after`, in byte order of keys."""
    if not recursive:
        yield from _one_level(state, prefix, after)
        return
    for path, node in state.scan(max(prefix, after) or b"\x01"):
        if not path.startswith(prefix):
            return
        if node.kind != DIR and path > after:
            yield object_info(path, node)


def _one_level(state: State, prefix: bytes, after: bytes) -> Iterator[ObjectInfo]:
    """List one directory. The key of `a` is `a/` if it is a directory, and then comes after `a-b` and `a.b`."""
    parent, _, begin = prefix.rpartition(b"/")
    inside = parent + b"/" if parent else b""
    if after > inside and not after.startswith(inside):
        return
    seen = after[len(inside) :].partition(b"/")[0] if after.startswith(inside) else b""
    held: list[tuple[bytes, Node]] = []  # directories whose turn has not come: each name begins with the one before
    for size in range(1, len(seen) + 1):
        node = state.get(inside + seen[:size])
        if node is not None and node.kind == DIR and inside + seen[:size] + b"/" > after:
            held.append((seen[:size], node))
    ready: list[tuple[bytes, Node]] = []
    for name, node in state.children(parent, seen):
        while held and held[-1][0] + b"/" < name:
            ready.append(held.pop())
        (held if node.kind == DIR else ready).append((name, node))
        yield from _chosen(ready, begin, inside, after)
        ready.clear()
        if name > begin and not name.startswith(begin):
            break
    yield from _chosen(reversed(held), begin, inside, after)


def _chosen(entries: Iterable[tuple[bytes, Node]], begin: bytes, inside: bytes, after: bytes) -> Iterator[ObjectInfo]:
    for name, node in entries:
        if name.startswith(begin) and inside + name + (b"/" if node.kind == DIR else b"") > after:
            yield object_info(inside + name, node)


def directory_entry(parent: bytes, name: bytes, node: Node) -> DirEntry:
    return DirEntry(
        name=shown(name),
        path="/" + shown(parent + b"/" + name if parent else name),
        kind=KINDS[node.kind],
        size=node.size,
        mode=node.mode,
        mtime_ns=node.mtime_ns,
        target=shown(node.target) if node.kind == SYMLINK else None,
        etag="" if node.kind == DIR else content_hash(node).hex(),
    )


def checkpoint_of(name: str, record: records.CheckpointRecord) -> Checkpoint:
    return Checkpoint(name=name, branch=record.branch, seq=record.seq, time=when(record.created_ns))


def commit_of(seq: int, commit: records.Commit) -> Commit:
    return Commit(
        seq=seq,
        time=when(commit.time_ns),
        author=commit.author,
        message=commit.message,
        exec_id=commit.exec_id or None,
        base_seq=commit.base_seq,
        changes=changes_of(commit.effects),
    )


def landed_commit(landed: Landed, author: str, message: str, seq: int) -> Commit:
    """Describe what became of a call's changes; `seq` is the branch's newest, for a call that changed nothing."""
    return Commit(
        seq=seq if landed.seq is None else landed.seq,
        time=when(landed.time_ns),
        author=author,
        message=message,
        exec_id=None,
        base_seq=seq if landed.seq is None else landed.seq - 1,
        changes=changes_of(landed.effects),
    )


def only_time(before: Node | None, after: Node | None) -> bool:
    """Whether only a directory's mtime differs, which moves with every name in it."""
    return (
        before is not None
        and after is not None
        and before.kind == after.kind == DIR
        and (before.mode, before.uid, before.gid, before.xattrs) == (after.mode, after.uid, after.gid, after.xattrs)
    )
