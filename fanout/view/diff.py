"""The diff: what a command left in its writable layer, as the changes a commit makes.

Owns reading overlayfs' layer format (whiteouts, opaque directories, redirects, copied-up files, its hard-link
index) and comparing it with the tree the command saw. The layer is hostile: it is walked by descriptor, no link is
followed, any depth. Knows nothing of how a layer was mounted or what becomes of the changes.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from fanout.disk.data import Packer, Reader
from fanout.disk.merge import Intent
from fanout.disk.state import State
from fanout.format.facts import reserved
from fanout.format.tree import DIR, FILE, HOLE, SYMLINK, Node, same_content, same_node
from fanout.runtime import Runtime, system
from fanout.view.content import Content, LocalFile, Reuse, pack_files, reusable, same_bytes
from fanout.view.links import Handles, indexed_files, origin_handle
from fanout.view.local import Directories, is_whiteout, join, user_xattrs

__all__ = ["Found", "diff_upper"]

#: Overlayfs' notes: `trusted.` where root mounted it, `user.` in a user namespace.
_NAMESPACES = ("trusted.overlay.", "user.overlay.")
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Found:
    """The changes, in byte order of paths, and the paths that no disk can hold (sockets, devices, named pipes)."""

    intents: list[Intent]
    skipped: tuple[bytes, ...]


class _File(NamedTuple):
    """A regular file of the layer: where it appears on the disk, and where to read it."""

    path: bytes
    local: LocalFile
    #: Where the tree has its bytes if the layer holds attributes only.
    metacopy: bytes | None


class _Directory(NamedTuple):
    """A directory of the layer that waits for its turn.

    `rel` is its path in the layer, `path` on the disk. `source` is the directory of the tree whose entries show
    through, None if none do. `replaced`: the tree's own entries below `path` are gone unless seen again.
    """

    rel: bytes
    path: bytes
    source: bytes | None
    replaced: bool
    found: os.stat_result


def diff_upper(
    upper: str,
    state: State,
    packer: Packer,
    reader: Reader,
    *,
    subdirectory: bytes = b"",
    work: str | None = None,
    lowers: Sequence[str] = (),
    xattr_prefix: str | None = None,
    runtime: Runtime = system,
) -> Found:
    """Compare the layer in the directory `upper`, which lay over `subdirectory` of `state`, with that tree.

    New contents go to `packer`. The processes that wrote the layer must be dead. `work` and `lowers` (lowest first) are
    the mount's other directories, needed for hard links of theirs. `xattr_prefix` is where overlayfs kept its notes
    ("trusted.overlay." or "user.overlay."), by default either.
    """
    fd = os.open(upper, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        spaces = _NAMESPACES if xattr_prefix is None else (xattr_prefix,)
        return _Diff(fd, state, subdirectory, packer, reader, runtime, spaces, work, lowers).run()
    finally:
        os.close(fd)


class _Diff:
    """One run of `diff_upper`: first the walk, which reads no contents, then the files, then the removals."""

    def __init__(
        self, root_fd: int, state: State, prefix: bytes, packer: Packer, reader: Reader, runtime: Runtime,
        spaces: tuple[str, ...], work: str | None, lowers: Sequence[str],
    ) -> None:  # fmt: skip
        self._root_fd = root_fd
        self._state = state
        self._prefix = prefix
        self._packer = packer
        self._reader = reader
        self._runtime = runtime
        self._spaces = spaces
        self._work = work
        self._lowers = lowers
        self._handles: Handles | None = None
        self._uid, self._gid = os.geteuid(), os.getegid()
        self._directories = Directories(root_fd, unlock=True)
        self._files: list[_File] = []
        self._replaced: list[bytes] = []
        self._seen: set[bytes] = set()
        self._removed: dict[bytes, Node] = {}
        self._changed: dict[bytes, Intent] = {}
        self._skipped: list[bytes] = []
        #: Where linked files of renamed directories are now, by where the tree has them.
        self._moved: dict[bytes, list[bytes]] = {}

    def run(self) -> Found:
        try:
            self._walk()
        finally:
            self._directories.close()
        for root in self._replaced:
            for path, node in self._state.below(root):
                if path not in self._seen:
                    self._removed[path] = node
        self._take_files()
        intents = [Intent(path, node, None) for path, node in self._removed.items()]
        intents.extend(self._changed.values())
        intents.sort(key=lambda intent: intent.path)
        return Found(intents, tuple(self._skipped))

    # -- the walk --------------------------------------------------------------------------------------------

    def _walk(self) -> None:
        root = _Directory(b"", self._prefix, self._prefix, False, os.fstat(self._root_fd))
        self._compare_directory(root, self._root_fd)
        stack = [root]
        while stack:
            stack.extend(self._visit(stack.pop()))

    def _visit(self, directory: _Directory) -> list[_Directory]:
        """Take one directory's entries; returns the directories among them."""
        inner: list[_Directory] = []
        names: set[bytes] = set()
        with os.scandir(self._directories.open(directory.rel)) as entries:
            listed = sorted((os.fsencode(e.name), e.name, e.stat(follow_symlinks=False)) for e in entries)
        for name, local_name, found in listed:
            names.add(name)
            path = join(directory.path, name)
            if stat.S_ISDIR(found.st_mode):
                inner.append(self._enter(directory, name, found))
                continue
            base = self._state.get(path)
            if base is not None and base.kind == DIR and not directory.replaced:
                self._removed.update(self._state.below(path))  # no directory stands here any more
            if stat.S_ISREG(found.st_mode):
                self._take_file(directory, path, local_name, found, base)
            elif stat.S_ISLNK(found.st_mode):
                self._put(path, base, self._symlink(directory, local_name, found, base))
            else:
                if not is_whiteout(found):
                    self._skipped.append(path)
                if base is not None and not directory.replaced:
                    self._removed[path] = base
        if directory.source is not None and (directory.replaced or directory.source != directory.path):
            self._show_through(directory, names)
        return inner

    def _enter(self, parent: _Directory, name: bytes, found: os.stat_result) -> _Directory:
        """Find out what shows through a directory of the layer, and compare its attributes."""
        rel, path = join(parent.rel, name), join(parent.path, name)
        fd = self._directories.open(rel)
        notes = _notes(fd, self._spaces)
        source: bytes | None
        if notes.get("opaque") == b"y":
            source = None
        elif "redirect" in notes:
            source = self._redirected(parent.source, notes["redirect"])
        else:
            source = join(parent.source, name) if parent.source is not None else None
        if source is not None:
            below = self._state.get(source)
            if below is None or below.kind != DIR:
                source = None
        replaced = parent.replaced
        if source != path and not replaced:
            base = self._state.get(path)
            if base is not None and base.kind == DIR:
                self._replaced.append(path)
                replaced = True
        directory = _Directory(rel, path, source, replaced, found)
        self._compare_directory(directory, fd)
        return directory

    def _redirected(self, source: bytes | None, redirect: bytes) -> bytes | None:
        """Return where a renamed directory was: absolute in the mount, or a name beside it."""
        if redirect.startswith(b"/"):
            return join(self._prefix, redirect.strip(b"/"))
        return join(source, redirect) if source is not None else None

    def _compare_directory(self, directory: _Directory, fd: int) -> None:
        path, found = directory.path, directory.found
        self._seen.add(path)
        base = self._state.get(path)
        shaped = base if base is not None and base.kind == DIR else None
        node = Node(
            DIR, stat.S_IMODE(found.st_mode), found.st_mtime_ns,
            uid=self._owner(found.st_uid, shaped, "uid"), gid=self._owner(found.st_gid, shaped, "gid"),
            xattrs=_with_reserved(user_xattrs(fd), shaped),
        )  # fmt: skip
        if shaped is None:
            self._changed[path] = Intent(path, base, node)
        elif (node.mode, node.uid, node.gid, node.xattrs) != (shaped.mode, shaped.uid, shaped.gid, shaped.xattrs):
            self._changed[path] = Intent(path, shaped, node)
        elif node.mtime_ns != shaped.mtime_ns:
            # Changes below move the time forward; only a command that means it sets it back.
            self._changed[path] = Intent(path, shaped, node, weak=node.mtime_ns > shaped.mtime_ns)

    def _show_through(self, directory: _Directory, names: set[bytes]) -> None:
        """Put what a renamed directory had in the tree under its new name: the same nodes, no data is read."""
        source, path = directory.source, directory.path
        assert source is not None
        cut = len(source) + 1 if source else 0
        for old, node in self._state.below(source):
            rest = old[cut:]
            if rest.partition(b"/")[0] not in names:
                new = join(path, rest)
                self._put(new, self._state.get(new), node)
                if node.link:
                    self._moved.setdefault(old, []).append(new)

    def _put(self, path: bytes, base: Node | None, node: Node) -> None:
        self._seen.add(path)
        if not same_node(base, node):
            self._changed[path] = Intent(path, base, node)

    def _symlink(self, directory: _Directory, name: str, found: os.stat_result, base: Node | None) -> Node:
        target = os.fsencode(os.readlink(name, dir_fd=self._directories.open(directory.rel)))
        return Node(
            SYMLINK, stat.S_IMODE(found.st_mode) if base is None or base.kind != SYMLINK else base.mode,
            found.st_mtime_ns, target=target,
            uid=self._owner(found.st_uid, base, "uid"), gid=self._owner(found.st_gid, base, "gid"),
        )  # fmt: skip

    def _owner(self, found: int, base: Node | None, which: str) -> int:
        """Translate an owner: the process's own is what the disk says, or its root."""
        if found != (self._uid if which == "uid" else self._gid):
            return found
        return int(getattr(base, which)) if base is not None else 0

    # -- files -----------------------------------------------------------------------------------------------

    def _take_file(
        self, directory: _Directory, path: bytes, name: str, found: os.stat_result, base: Node | None
    ) -> None:
        self._seen.add(path)
        metacopy = None
        if found.st_size and not found.st_blocks:
            metacopy = self._metacopy(directory, name)
        self._files.append(_File(path, LocalFile(directory.rel, name, found, base), metacopy))

    def _metacopy(self, directory: _Directory, name: str) -> bytes | None:
        """Return where a file's bytes are if overlayfs copied up its attributes only."""
        try:
            file_fd = os.open(name, _READ, dir_fd=self._directories.open(directory.rel))
        except OSError:
            return None
        try:
            notes = _notes(file_fd, self._spaces)
        finally:
            os.close(file_fd)
        if "metacopy" not in notes:
            return None
        if "redirect" in notes:
            return self._redirected(directory.source, notes["redirect"])
        return join(directory.source, os.fsencode(name)) if directory.source is not None else None

    def _take_files(self) -> None:
        by_inode: dict[tuple[int, int], list[_File]] = {}
        groups: list[list[_File]] = []
        for file in self._files:
            found = file.local.found
            if found.st_nlink == 1:
                groups.append([file])
                continue
            names = by_inode.setdefault((found.st_dev, found.st_ino), [])
            if not names:
                groups.append(names)
            names.append(file)
        contents = pack_files(
            [names[0].local for names in groups], self._root_fd, self._packer, self._reusable(), unlocking=True
        )
        for names, content in zip(groups, contents, strict=True):
            if content is None:
                continue
            if names[0].local.found.st_nlink == 1:
                self._put_single(names[0], content)
            else:
                self._put_group(self._root_fd, names, content)
        self._take_index(by_inode.keys())

    def _take_index(self, seen: Collection[tuple[int, int]]) -> None:
        """Take the files that only overlayfs' index holds: changed under a name that is gone, seen under others."""
        if self._work is None:
            return
        hidden = [
            LocalFile(b"", name, found, None)
            for name, found in indexed_files(self._work)
            if (found.st_dev, found.st_ino) not in seen
        ]
        if not hidden:
            return
        fd = os.open(f"{self._work}/index", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            contents = pack_files(hidden, fd, self._packer, self._reusable())
            for local, content in zip(hidden, contents, strict=True):
                if content is not None:
                    self._put_group(fd, [_File(b"", local, None)], content, nameless=True)
        finally:
            os.close(fd)

    def _reusable(self) -> Reuse:
        """Index the stored runs that files of the layer may still hold: of what they replace, and of what is gone."""
        return reusable([*(file.local.base for file in self._files), *self._removed.values()])

    def _put_single(self, file: _File, content: Content) -> None:
        base = file.local.base
        node = self._file_node(self._root_fd, base, content, file)
        if not same_node(base, node):
            self._put(file.path, base, msgspec.structs.replace(node, link=b"") if node.link else node)

    def _put_group(self, root_fd: int, names: list[_File], content: Content, *, nameless: bool = False) -> None:
        """Record one file under all its names, those included that only the index knows of."""
        first = names[0]
        bases = {} if nameless else {file.path: file.local.base for file in names}
        indexed = nameless or first.local.found.st_nlink > len(names)
        if indexed:
            bases.update(self._aliases(root_fd, first, bases))
        # One file is one node, best told from what the tree had under one of its names.
        known = next((base for base in bases.values() if base is not None and base.kind == FILE), None)
        node = self._file_node(root_fd, known, content, first)
        if any(not same_node(base, node) for base in bases.values()):
            node = msgspec.structs.replace(node, link=self._link_id(bases, indexed))
            for path, base in bases.items():
                self._put(path, base, node)

    def _file_node(self, root_fd: int, base: Node | None, content: Content, file: _File) -> Node:
        found = file.local.found
        same = base if base is not None and base.kind == FILE else None
        data, size, digest = content.data, content.size, content.digest
        if file.metacopy is not None:
            origin = self._state.get(file.metacopy)
            if origin is not None and origin.kind == FILE:
                data, size, digest = origin.data, origin.size, origin.digest
        elif same is not None and same.size == size and same.data != data and self._is_cut_otherwise(same):
            blobs = self._state.blob_bytes()
            if same_bytes(self._reader, blobs, same, data, root_fd, file.local):
                data, digest = same.data, same.digest
        node = Node(
            FILE, stat.S_IMODE(found.st_mode), found.st_mtime_ns, size, data,
            uid=self._owner(found.st_uid, same, "uid"), gid=self._owner(found.st_gid, same, "gid"),
            link=same.link if same is not None else b"", xattrs=content.xattrs, digest=digest,
        )  # fmt: skip
        if same is None or not same.xattrs or not same_content(same, node):
            return node
        return msgspec.structs.replace(node, xattrs=_with_reserved(node.xattrs, same))

    def _is_cut_otherwise(self, node: Node) -> bool:
        """Whether the hashes of a stored content's runs say nothing of an equal one that was cut into extents anew."""
        extent = self._packer.tuning.extent_bytes
        parts = any(ref.length >= 0 or ref.pack == HOLE for ref in node.data)
        return not node.digest and (parts or any(ref.raw != extent for ref in node.data[:-1]))

    def _aliases(
        self, root_fd: int, first: _File, names: Mapping[bytes, Node | None]
    ) -> Iterator[tuple[bytes, Node | None]]:
        """Yield the names under which a lower file is seen through the index, and what the tree had there."""
        with Directories(root_fd) as directories:
            fd = os.open(first.local.name, _READ, dir_fd=directories.open(first.local.parent))
        try:
            origin = _notes(fd, self._spaces).get("origin")
        finally:
            os.close(fd)
        cut = len(self._prefix) + 1 if self._prefix else 0
        if self._handles is None:
            linked = (path[cut:] for path, node in self._state.below(self._prefix) if node.link)
            self._handles = Handles(self._lowers, linked)
        for rest in self._handles.names(origin_handle(origin)):
            path = join(self._prefix, rest)
            if path not in self._seen and path not in self._removed:
                yield path, self._state.get(path)
            for new in self._moved.get(path, ()):
                if new not in names:
                    yield new, self._state.get(new)

    def _link_id(self, bases: Mapping[bytes, Node | None], indexed: bool) -> bytes:
        """Choose the identity of a group of hard links: none for a single name, a fresh one for a new group."""
        if len(bases) == 1:
            return b""
        known = {base.link if base is not None else b"" for base in bases.values()}
        if len(known) == 1 and b"" not in known and indexed:
            return known.pop()
        return self._runtime.token_bytes(16)


def _notes(fd: int, spaces: tuple[str, ...]) -> dict[str, bytes]:
    """Return overlayfs' own attributes of an open file or directory, by their last name."""
    try:
        names = os.listxattr(fd)
    except OSError:
        return {}
    return {name[len(space) :]: os.getxattr(fd, name) for name in names for space in spaces if name.startswith(space)}


def _with_reserved(xattrs: tuple[tuple[bytes, bytes], ...], base: Node | None) -> tuple[tuple[bytes, bytes], ...]:
    """Add what no mount shows and no command can change: it stays as it was."""
    kept = reserved(base) if base is not None and base.xattrs else ()
    return tuple(sorted((*kept, *xattrs))) if kept else xattrs
