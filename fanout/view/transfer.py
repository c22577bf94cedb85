"""Local trees in and out of a disk: upload and download.

Owns what of a local tree is taken (`.fanoutignore`) and that a download stays inside its directory. Shares reading
with the diff and writing with the views. Knows nothing of commits.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from pathspec import GitIgnoreSpec

from fanout.disk.data import Packer, Reader
from fanout.disk.merge import Intent
from fanout.errors import Invalid, NotFound
from fanout.format.tree import DIR, FILE, SYMLINK, Node, directory, same_node
from fanout.runtime import Runtime, system
from fanout.view.content import Content, LocalFile, pack_files, reusable
from fanout.view.local import Directories, join, shown, user_xattrs
from fanout.view.materialise import host_error, materialise

__all__ = ["IGNORE_FILE", "Bases", "Source", "download", "replacing", "upload_intents"]

#: gitignore patterns in the top directory of an upload; what they match is left out.
IGNORE_FILE = ".fanoutignore"
#: files done, bytes done, files in all (None while that is not known).
Progress = Callable[[int, int, int | None], None]
#: Returns what a tree has at some paths, those left out at which there is nothing.
Bases = Callable[[Iterable[bytes]], Mapping[bytes, Node]]

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Source(Protocol):
    """A tree to download from; `disk.state.State` is one."""

    def get(self, path: bytes) -> Node | None: ...

    def below(self, path: bytes, *, whole: bool) -> Iterator[tuple[bytes, Node]]: ...

    def blob_bytes(self) -> Mapping[bytes, bytes]: ...


def replacing(path: bytes, base: Node | None, node: Node) -> Intent | None:
    """Return the change that puts `node` where `base` is; None where that would change nothing."""
    if same_node(base, node):
        return None
    only_newer = node.kind == DIR and same_node(base, node, times=False)
    weak = only_newer and base is not None and base.mtime_ns < node.mtime_ns
    return Intent(path, base, node, weak=weak)


def upload_intents(
    packer: Packer,
    local: str | Path,
    prefix: bytes,
    *,
    bases: Bases | None = None,
    progress: Progress | None = None,
    runtime: Runtime = system,
) -> list[Intent]:
    """Return the changes that put a local file or directory at `prefix`; contents go to `packer`.

    With `bases`, of the tree as it is, what is there already is left out and its bytes are not stored again (the
    proposal then needs the tree's blobs); it is asked once, before any content is read. Nothing is ever removed.
    Symlinks stay links, hard links stay together, holes stay holes. Owners: the caller's own become 0. Sockets, devices
    and named pipes are left out, and so is what the top directory's `.fanoutignore` matches. `NotFound` and `Invalid`
    for a local path that cannot be read.
    """
    name = os.fspath(local)
    try:
        found = os.stat(name, follow_symlinks=False)
        if stat.S_ISLNK(found.st_mode) and stat.S_ISDIR(os.stat(name).st_mode):
            found = os.stat(name)  # the tree that was named, not the link
        if stat.S_ISDIR(found.st_mode):
            fd = os.open(name, _DIRECTORY)
            try:
                return _Upload(fd, packer, prefix, bases, progress, runtime).tree(found, _ignored(name))
            finally:
                os.close(fd)
        parent, base = os.path.split(os.path.abspath(name))
        fd = os.open(parent, _DIRECTORY)
        try:
            return _Upload(fd, packer, prefix, bases, progress, runtime).one(base, found)
        finally:
            os.close(fd)
    except FileNotFoundError as error:
        raise NotFound(f"local path {name!r} does not exist") from error
    except OSError as error:
        where = os.fsdecode(error.filename) if error.filename else name
        raise Invalid.argument("local", name, f"a tree this user can read; {where!r}: {error.strerror}") from error


def _ignored(top: str) -> Callable[[str, bool], bool]:
    try:
        with open(os.path.join(top, IGNORE_FILE), encoding="utf-8", errors="surrogateescape") as lines:
            patterns = GitIgnoreSpec.from_lines(lines)
    except FileNotFoundError:
        return lambda path, is_directory: False
    return lambda path, is_directory: patterns.match_file(path + "/" if is_directory else path)


class _Upload:
    """One run of `upload_intents`."""

    def __init__(
        self, root_fd: int, packer: Packer, prefix: bytes, bases: Bases | None, progress: Progress | None,
        runtime: Runtime,
    ) -> None:  # fmt: skip
        self._root_fd = root_fd
        self._packer = packer
        self._prefix = prefix
        self._bases = bases
        self._base: Mapping[bytes, Node] = {}
        self._progress = progress
        self._runtime = runtime
        self._uid, self._gid = os.geteuid(), os.getegid()
        self._made: list[tuple[bytes, Node]] = []
        self._files: list[tuple[bytes, LocalFile]] = []
        self._inodes: dict[tuple[int, int], int] = {}
        self._aliases: dict[int, list[bytes]] = {}

    def tree(self, found: os.stat_result, ignored: Callable[[str, bool], bool]) -> list[Intent]:
        with Directories(self._root_fd) as directories:
            if self._prefix:  # the disk's own root keeps its attributes
                self._made.append((self._prefix, self._directory(found, self._root_fd)))
            stack = [b""]
            while stack:
                stack.extend(self._visit(stack.pop(), directories, ignored))
        return self._finish()

    def one(self, name: str, found: os.stat_result) -> list[Intent]:
        path = self._prefix or os.fsencode(name)
        if stat.S_ISLNK(found.st_mode):
            self._made.append((path, self._symlink(name, found, self._root_fd)))
            return self._finish()
        if not stat.S_ISREG(found.st_mode):
            raise Invalid.argument("local", name, "a file, a directory or a symlink")
        self._files.append((path, LocalFile(b"", name, found, None)))
        return self._finish()

    def _visit(self, rel: bytes, directories: Directories, ignored: Callable[[str, bool], bool]) -> list[bytes]:
        inner: list[bytes] = []
        with os.scandir(directories.open(rel)) as entries:
            listed = sorted((os.fsencode(e.name), e.name, e.stat(follow_symlinks=False)) for e in entries)
        for raw_name, name, found in listed:
            here = join(rel, raw_name)
            if ignored(os.fsdecode(here), stat.S_ISDIR(found.st_mode)):
                continue
            path = join(self._prefix, here)
            if stat.S_ISDIR(found.st_mode):
                self._made.append((path, self._directory(found, directories.open(here))))
                inner.append(here)
            elif stat.S_ISREG(found.st_mode):
                self._file(path, LocalFile(rel, name, found, None))
            elif stat.S_ISLNK(found.st_mode):
                # `here` may have pushed this directory's descriptor out: ask again.
                self._made.append((path, self._symlink(name, found, directories.open(rel))))
        return inner

    def _file(self, path: bytes, file: LocalFile) -> None:
        if file.found.st_nlink > 1:
            first = self._inodes.setdefault((file.found.st_dev, file.found.st_ino), len(self._files))
            if first < len(self._files):
                self._aliases.setdefault(first, []).append(path)
                return
        self._files.append((path, file))

    def _finish(self) -> list[Intent]:
        done = [0, 0]

        def count(size: int) -> None:
            done[0] += 1
            done[1] += size
            if self._progress is not None:
                self._progress(done[0], done[1], len(self._files))

        if self._bases is not None:
            aliases = [name for names in self._aliases.values() for name in names]
            self._base = self._bases([*(path for path, _ in self._made), *(path for path, _ in self._files), *aliases])
        files = [file._replace(base=self._base.get(path)) for path, file in self._files]
        reuse = reusable(file.base for file in files)
        contents = pack_files(files, self._root_fd, self._packer, reuse, progress=count)
        for place, (content, (path, file)) in enumerate(zip(contents, self._files, strict=True)):
            if content is None:
                continue  # it went away meanwhile
            names = (path, *self._aliases.get(place, ()))
            node = self._node(file.found, content, self._link_id(names))
            self._made += [(name, node) for name in names]
        intents = (replacing(path, self._base.get(path), node) for path, node in self._made)
        return sorted(filter(None, intents), key=lambda intent: intent.path)

    def _link_id(self, names: tuple[bytes, ...]) -> bytes:
        """Return the identity of a group of hard links: the one it has on the disk, or a fresh one."""
        if len(names) == 1:
            return b""
        known = {base.link if base is not None else b"" for base in map(self._base.get, names)}
        return known.pop() if len(known) == 1 and b"" not in known else self._runtime.token_bytes(16)

    def _node(self, found: os.stat_result, content: Content, link: bytes) -> Node:
        return Node(
            FILE, stat.S_IMODE(found.st_mode), found.st_mtime_ns, content.size, content.data,
            *self._owners(found), link=link, xattrs=content.xattrs, digest=content.digest,
        )  # fmt: skip

    def _directory(self, found: os.stat_result, fd: int) -> Node:
        uid, gid = self._owners(found)
        return Node(
            DIR, stat.S_IMODE(found.st_mode), found.st_mtime_ns, uid=uid, gid=gid, xattrs=user_xattrs(fd)
        )  # fmt: skip

    def _symlink(self, name: str, found: os.stat_result, fd: int) -> Node:
        uid, gid = self._owners(found)
        target = os.fsencode(os.readlink(name, dir_fd=fd))
        return Node(SYMLINK, stat.S_IMODE(found.st_mode), found.st_mtime_ns, uid=uid, gid=gid, target=target)

    def _owners(self, found: os.stat_result) -> tuple[int, int]:
        """An upload by its owner belongs to the disk's root, whoever that is here."""
        uid = 0 if found.st_uid == self._uid else found.st_uid
        gid = 0 if found.st_gid == self._gid else found.st_gid
        return uid, gid


def download(
    reader: Reader, state: Source, path: bytes, local: str | Path, *, progress: Progress | None = None
) -> None:
    """Write the tree at `path`, or one file, to the local directory or file name `local`.

    Files that are there are replaced, and so are links: nothing is ever written through one. Other files stay. A file
    goes into `local` if that is a directory. Set-user-id bits and owners are left out. `NotFound` for a path that the
    tree does not have, `Unavailable` and `Invalid` for what the host refuses.
    """
    node = state.get(path)
    if node is None:
        raise NotFound(f"{shown(path)} does not exist")
    name = os.fspath(local)
    try:
        if node.kind == DIR:
            os.makedirs(name, exist_ok=True)
            cut = len(path) + 1 if path else 0
            found = state.below(path, whole=True)
            entries: Iterator[tuple[bytes, Node]] = ((below[cut:], each) for below, each in found)
            _write(name, node, entries, reader, state, progress)
            return
        if os.path.isdir(name):
            target, base = name, path.rpartition(b"/")[2]
        else:
            target, base = os.path.dirname(os.path.abspath(name)), os.fsencode(os.path.basename(name))
            os.makedirs(target, exist_ok=True)
        _write(target, None, iter([(base, node)]), reader, state, progress)
    except OSError as error:
        raise host_error(error, name) from error


def _write(
    target: str, root: Node | None, entries: Iterator[tuple[bytes, Node]], reader: Reader, state: Source,
    progress: Progress | None,
) -> None:  # fmt: skip
    fd = os.open(target, _DIRECTORY)
    try:
        if root is None:  # the directory is the caller's own: it keeps its attributes
            found = os.fstat(fd)
            root = directory(stat.S_IMODE(found.st_mode), found.st_mtime_ns)
        report = None if progress is None else lambda files, size: progress(files, size, None)
        materialise(fd, root, entries, reader, state.blob_bytes(), replace=True, special_bits=False, progress=report)
    finally:
        os.close(fd)
