"""A disk in memory, and trees as plain values to compare: from a disk, a local directory, or inside a sandbox."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fanout.config import Tuning
from fanout.disk.branch import Branch
from fanout.disk.catalogue import Catalogue
from fanout.disk.data import Packer, Reader
from fanout.disk.disk import Disk
from fanout.disk.merge import Intent, Policy
from fanout.disk.proposal import Landed, Proposal
from fanout.disk.state import State
from fanout.format.tree import DIR, FILE, Node, directory
from fanout.runtime import Runtime, seeded
from fanout.store.base import Store
from fanout.store.memory import MemoryStore

TINY = Tuning(page_entries=8, inline_bytes=600, small_file_bytes=300, extent_bytes=128, pack_bytes=2000, fold_entries=5)


class Item(NamedTuple):
    """One name as a command sees it. `group`: all names of the same file, where there are several."""

    kind: str
    mode: int
    mtime_ns: int
    content: str
    group: tuple[bytes, ...]


Contents = dict[bytes, Item]


class Workspace:
    """One disk with one branch."""

    def __init__(
        self, tuning: Tuning | None = None, store: Store | None = None, runtime: Runtime | None = None
    ) -> None:
        self.store = store or MemoryStore()
        self.disk: Disk = Catalogue(self.store, runtime or seeded(1), tuning or Tuning()).create("ws")
        self.branch: Branch = self.disk.branch()

    @property
    def reader(self) -> Reader:
        return self.disk.reader

    @property
    def state(self) -> State:
        return self.branch.known()

    def packer(self) -> Packer:
        return self.disk.packer()

    def commit(self, intents: Sequence[Intent], packer: Packer | None = None, base: State | None = None) -> Landed:
        blobs = packer.finish().blobs if packer else {}
        base = base or self.state
        return self.branch.commit(
            Proposal(intents, Policy.FIRST_WINS, base_seq=base.seq, blobs=blobs, seen_blobs=base.blob_bytes())
        )

    def write(self, files: Mapping[bytes, bytes | Node | None]) -> State:
        """Commit files (bytes), any nodes, or removals (None)."""
        packer = self.packer()
        intents = []
        for path, what in files.items():
            node = what
            if isinstance(what, bytes):
                refs = packer.add_content(len(what), _reading(what))
                node = Node(FILE, 0o644, 1_600_000_000_123_456_789, len(what), refs)
            assert not isinstance(node, bytes)
            intents.append(Intent(path, self.state.get(path), node))
        self.commit(intents, packer)
        return self.state

    def read(self, path: bytes) -> bytes:
        node = self.state.get(path)
        assert node is not None, path
        return self.reader.read(node.data, self.state.blob_bytes())

    def close(self) -> None:
        self.disk.close()


def _reading(data: bytes) -> Callable[[int], bytes]:
    position = 0

    def read(size: int) -> bytes:
        nonlocal position
        start = position
        position += size
        return data[start:position]

    return read


def folder(mode: int = 0o755, mtime_ns: int = 1_500_000_000_000_000_001) -> Node:
    return directory(mode, mtime_ns)


def of_state(state: State, reader: Reader, below: bytes = b"") -> Contents:
    """Return what a disk holds below a directory."""
    cut = len(below) + 1 if below else 0
    groups: dict[bytes, list[bytes]] = {}
    nodes = {path[cut:]: node for path, node in state.below(below)}
    for path, node in nodes.items():
        if node.link:
            groups.setdefault(node.link, []).append(path)
    tree: Contents = {}
    for path, node in nodes.items():
        group = tuple(groups.get(node.link, ())) if node.link else ()
        if node.kind == DIR:
            tree[path] = Item("d", node.mode, 0, "", ())
        elif node.kind == FILE:
            digest = hashlib.sha256(reader.read(node.data, state.blob_bytes())).hexdigest()
            tree[path] = Item("f", node.mode, node.mtime_ns, digest, group if len(group) > 1 else ())
        else:
            tree[path] = Item("l", 0o777, node.mtime_ns, os.fsdecode(node.target), ())
    return tree


def of_directory(top: str | Path) -> Contents:
    """Return what a local directory holds."""
    root = os.fsencode(top)
    tree: Contents = {}
    inodes: dict[bytes, int] = {}
    for where, names, files in os.walk(root):
        for name in names + files:
            full = os.path.join(where, name)
            path = os.path.relpath(full, root)
            found = os.lstat(full)
            mode = stat.S_IMODE(found.st_mode)
            if stat.S_ISDIR(found.st_mode):
                tree[path] = Item("d", mode, 0, "", ())
            elif stat.S_ISLNK(found.st_mode):
                tree[path] = Item("l", 0o777, found.st_mtime_ns, os.fsdecode(os.readlink(full)), ())
            elif stat.S_ISREG(found.st_mode):
                digest = hashlib.sha256(Path(os.fsdecode(full)).read_bytes()).hexdigest()
                tree[path] = Item("f", mode, found.st_mtime_ns, digest, ())
                inodes[path] = found.st_ino
    return _grouped(tree, inodes)


#: Prints what `of_listing` reads: every name but `.`, then the hashes of all files. POSIX sh, GNU find.
LISTING = (
    r"find . -mindepth 1 -printf '%y %m %T@ %i %P\t%l\n'; echo ==; "
    r"find . -type f -exec sha256sum {} +; echo ===="
)


def of_listing(text: str) -> Contents:
    """Return the tree that `LISTING` printed in a sandbox (names without tabs and newlines)."""
    head, _, hashes = text.partition("==\n")
    digests = {}
    for line in hashes.splitlines():
        digest, _, path = line.partition("  ./")
        digests[path.encode()] = digest
    tree: Contents = {}
    inodes: dict[bytes, int] = {}
    for line in head.splitlines():
        kind, mode, when, inode, rest = line.split(" ", 4)
        name, _, target = rest.partition("\t")
        seconds, _, fraction = when.partition(".")
        mtime_ns = int(seconds) * 10**9 + int(fraction[:9].ljust(9, "0"))
        encoded = name.encode()
        if kind == "d":
            tree[encoded] = Item("d", int(mode, 8), 0, "", ())
        elif kind == "l":
            tree[encoded] = Item("l", 0o777, mtime_ns, target, ())
        else:
            tree[encoded] = Item("f", int(mode, 8), mtime_ns, digests[encoded], ())
            inodes[encoded] = int(inode)
    return _grouped(tree, inodes)


def _grouped(tree: Contents, inodes: Mapping[bytes, int]) -> Contents:
    names: dict[int, list[bytes]] = {}
    for path, inode in sorted(inodes.items()):
        names.setdefault(inode, []).append(path)
    for group in names.values():
        if len(group) > 1:
            for path in group:
                tree[path] = tree[path]._replace(group=tuple(group))
    return tree
