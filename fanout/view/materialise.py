"""Writes a stored tree into a local directory: in parallel from packs, verified, with bounded memory.

Owns how nodes become files. The tree may be hostile: names are checked, no symlink is followed, nothing is
written outside of the given directory. Knows nothing of caches or mounts.

Owners: the disk's 0/0 is the process's own user and group, which all files get; other owners stay recorded in the
disk only. Modes are set as recorded, set-user-id bits included where `special_bits` allows it (a view: its files
lie in a private directory and are mounted nosuid); a download leaves those bits out.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from fanout.disk.data import Reader, Slice
from fanout.errors import Corrupt, FanoutError, Limit, Unavailable
from fanout.format.tree import DIR, FILE, HOLE, SYMLINK, Node, Ref, content_hash
from fanout.view.local import Directories, remove_tree, shown

__all__ = ["Written", "host_error", "materialise"]

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_REOPEN = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
#: More would only get in each other's way: writing small files is mostly Python, whose threads take turns.
_THREADS = 4
#: How much is planned at once: ranged reads are grouped within one batch.
_BATCH_FILES = 4096
_BATCH_BYTES = 32 << 20
#: What a file or directory is counted as beside its blocks.
_INODE_BYTES = 512
_BLOCK = 4096
_TIME_MAX_NS = 2**62


class Written(NamedTuple):
    """How much was written: names, and bytes of disk space (estimated in whole blocks)."""

    files: int
    space_bytes: int


class _Piece(NamedTuple):
    """One run of one file that waits for its frame. `node` set means: the whole file, not created yet."""

    path: bytes
    node: Node | None
    ref: Ref
    offset: int


def materialise(
    root_fd: int,
    root: Node,
    entries: Iterable[tuple[bytes, Node | None]],
    reader: Reader,
    blobs: Mapping[bytes, bytes],
    *,
    replace: bool = False,
    special_bits: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Written:
    """Write `entries` (paths relative to the root, in byte order, parents first) below `root_fd`.

    None for a node writes a whiteout. `replace` puts away what is already there under these names (a directory
    stays for a directory). The root itself gets `root`'s attributes. `progress(files, bytes)` is called now and then.
    Raises `Corrupt` for what cannot be a tree, `Unavailable` where the host is full, `Limit` for names it cannot hold.
    """
    build = _Build(root_fd, reader, blobs, replace, special_bits, progress)
    try:
        for path, node in entries:
            build.add(path, node)
        return build.finish(root)
    finally:
        build.close()


def host_error(error: OSError, what: str) -> FanoutError:
    """Translate what the host answered while `what` was written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Unavailable(f"{what}: the host's file system is full ({error.strerror})")
    if error.errno == errno.ENAMETOOLONG:
        return Limit(f"{what}: the host's file system does not take a name that long")
    if error.errno == errno.EEXIST:
        return Corrupt(f"{what}: two entries have this name")
    return Unavailable(f"{what}: {error.strerror}")


class _Build:
    """One run of `materialise`. Directories and symlinks are made at once by the caller's thread, data by workers."""

    def __init__(
        self,
        root_fd: int,
        reader: Reader,
        blobs: Mapping[bytes, bytes],
        replace: bool,
        special_bits: bool,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._root_fd = root_fd
        self._reader = reader
        self._blobs = blobs
        self._replace = replace
        self._mode_mask = 0o7777 if special_bits else 0o1777
        self._progress = progress
        self._umask = _umask()
        self._mine = Directories(root_fd)
        self._local = threading.local()
        self._opened: list[Directories] = [self._mine]
        self._directories: dict[bytes, Node | None] = {b"": None}
        self._links: dict[tuple[object, ...], bytes] = {}
        self._aliases: list[tuple[bytes, bytes]] = []
        self._large: list[tuple[bytes, Node]] = []
        self._frames: dict[tuple[bytes, int], list[_Piece]] = {}
        self._planned = 0
        self._planned_bytes = 0
        self._pool: ThreadPoolExecutor | None = None
        self._slots = threading.BoundedSemaphore(_THREADS)
        self._running: list[Future[None]] = []
        self._failure: BaseException | None = None
        self.files = 0
        self.content = 0
        self.space = 0

    # -- what the caller's thread does -----------------------------------------------------------------------

    def add(self, path: bytes, node: Node | None) -> None:
        parent, _, name = path.rpartition(b"/")
        if name in (b"", b".", b"..") or b"\0" in path or path.startswith(b"/"):
            raise Corrupt(f"{shown(path)} is not a path of a tree")
        if parent not in self._directories:
            raise Corrupt(f"{shown(path)}: what it lies in is not a directory")
        self.files += 1
        self.content += node.size if node is not None else 0
        self.space += _INODE_BYTES
        try:
            if node is None:
                os.mknod(name, stat.S_IFCHR, 0, dir_fd=self._mine.open(parent))
            elif node.kind == FILE:
                self._add_file(path, node)
            elif node.kind == DIR:
                self._make_directory(parent, name)
                self._directories[path] = node
                self.space += _BLOCK
            elif node.kind == SYMLINK:
                self._make_symlink(parent, name, node)
            else:
                raise Corrupt(f"{shown(path)} is of unknown kind {node.kind}")
        except OSError as error:
            raise host_error(error, shown(path)) from error

    def _make_directory(self, parent: bytes, name: bytes) -> None:
        fd = self._mine.open(parent)
        try:
            os.mkdir(name, 0o700, dir_fd=fd)
        except FileExistsError:
            if not self._replace:
                raise
            found = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if not stat.S_ISDIR(found.st_mode):
                os.unlink(name, dir_fd=fd)
                os.mkdir(name, 0o700, dir_fd=fd)
            elif found.st_mode & 0o700 != 0o700:
                os.chmod(name, 0o700, dir_fd=fd)

    def _make_symlink(self, parent: bytes, name: bytes, node: Node) -> None:
        fd = self._mine.open(parent)
        if not node.target or b"\0" in node.target:
            raise Corrupt(f"{shown(parent + b'/' + name)}: no symlink can point to {node.target!r}")
        try:
            os.symlink(node.target, name, dir_fd=fd)
        except FileExistsError:
            if not self._replace:
                raise
            remove_tree(fd, name)
            os.symlink(node.target, name, dir_fd=fd)
        when = _clamped(node.mtime_ns)
        os.utime(name, ns=(when, when), dir_fd=fd, follow_symlinks=False)

    def _add_file(self, path: bytes, node: Node) -> None:
        if node.link:
            # Names that say they are one file but hold something else (a merge can part them) stay apart.
            same = (node.link, content_hash(node), node.size, node.mode, node.mtime_ns, node.xattrs)
            first = self._links.setdefault(same, path)
            if first is not path:
                self._aliases.append((path, first))
                return
        self.space += -(-node.size // _BLOCK) * _BLOCK
        data = node.data
        if len(data) == 1 and data[0].pack != HOLE and data[0].size == node.size:
            self._plan(_Piece(path, node, data[0], 0))
        elif not data and not node.size:
            self._whole(self._mine, path, node, b"")
        else:
            self._add_large(path, node)

    def _add_large(self, path: bytes, node: Node) -> None:
        if sum(ref.size for ref in node.data) != node.size:
            raise Corrupt(f"{shown(path)}: its {len(node.data)} runs do not add up to {node.size} bytes")
        parent, _, name = path.rpartition(b"/")
        fd = self._create(self._mine.open(parent), name, 0o600)
        try:
            os.ftruncate(fd, node.size)
        finally:
            os.close(fd)
        self._large.append((path, node))
        offset = 0
        for ref in node.data:
            if ref.pack == HOLE:
                self.space -= ref.size
            else:
                self._plan(_Piece(path, None, ref, offset))
            offset += ref.size

    def _plan(self, piece: _Piece) -> None:
        ref = piece.ref
        waiting = self._frames.setdefault((ref.pack, ref.offset), [])
        if not waiting:
            self._planned_bytes += ref.stored
        elif waiting[0].ref.hash != ref.hash:
            raise Corrupt(f"{shown(piece.path)}: its frame has another hash than {shown(waiting[0].path)} says")
        waiting.append(piece)
        self._planned += 1
        if self._planned >= _BATCH_FILES or self._planned_bytes >= _BATCH_BYTES:
            self._flush()

    def _flush(self, *, last: bool = False) -> None:
        """Hand what was planned to the workers, waiting while they have enough to do."""
        frames = self._frames
        self._frames, self._planned, self._planned_bytes = {}, 0, 0
        slices = self._reader.plan(waiting[0].ref for waiting in frames.values())
        if last and len(slices) == 1 and self._pool is None:
            self._write_slice(slices[0], frames, self._mine)  # a small tree: no thread is worth its start
            return
        for piece in slices:
            self._slots.acquire()
            if self._failure is not None:
                self._slots.release()
                raise self._failure
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_THREADS, "fanout-view")
            self._running.append(self._pool.submit(self._work, piece, frames))
        if self._progress:
            self._progress(self.files, self.content)

    def finish(self, root: Node) -> Written:
        self._flush(last=True)
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None
        if self._failure is not None:
            raise self._failure
        path = b""
        try:
            for path, first in self._aliases:
                self._link(path, first)
            for path, node in self._large:
                self._finish_large(path, node)
            self._directories[b""] = root
            for path in sorted(self._directories, reverse=True):
                made = self._directories[path]
                if made is not None:
                    self._finish_open(self._mine.open(path), made)
                    self._mine.forget(path)
        except OSError as error:
            raise host_error(error, shown(path)) from error
        if self._progress:
            self._progress(self.files, self.content)
        return Written(self.files, max(self.space, 0))

    def close(self) -> None:
        if self._pool is not None:
            self._failure = self._failure or RuntimeError("abandoned")
            self._pool.shutdown(wait=True, cancel_futures=True)
        for directories in self._opened:
            directories.close()

    def _link(self, path: bytes, first: bytes) -> None:
        parent, _, name = path.rpartition(b"/")
        source, _, source_name = first.rpartition(b"/")
        source_fd = self._mine.open(source)
        fd = self._mine.open(parent)
        if self._replace:
            remove_tree(fd, name)
        os.link(source_name, name, src_dir_fd=source_fd, dst_dir_fd=fd, follow_symlinks=False)

    def _finish_large(self, path: bytes, node: Node) -> None:
        parent, _, name = path.rpartition(b"/")
        fd = os.open(name, _REOPEN, dir_fd=self._mine.open(parent))
        try:
            self._finish_open(fd, node)
        finally:
            os.close(fd)

    # -- what workers do -------------------------------------------------------------------------------------

    def _work(self, piece: Slice, frames: Mapping[tuple[bytes, int], list[_Piece]]) -> None:
        try:
            if self._failure is None:
                directories: Directories | None = getattr(self._local, "directories", None)
                if directories is None:
                    directories = self._local.directories = Directories(self._root_fd)
                    self._opened.append(directories)
                self._write_slice(piece, frames, directories)
        except BaseException as error:
            self._failure = self._failure or error
        finally:
            self._slots.release()

    def _write_slice(
        self, piece: Slice, frames: Mapping[tuple[bytes, int], list[_Piece]], directories: Directories
    ) -> None:
        path = b""
        try:
            for ref, raw in self._reader.fetch(piece, self._blobs):
                for path, node, mine, offset in frames[ref.pack, ref.offset]:
                    part = raw if mine.length < 0 else raw[mine.skip : mine.skip + mine.length]
                    if len(part) != mine.size:
                        raise Corrupt(f"{shown(path)}: a run of {mine.size} bytes lies outside of its frame")
                    if node is not None:
                        self._whole(directories, path, node, part)
                    else:
                        self._part(directories, path, part, offset)
        except OSError as error:
            raise host_error(error, shown(path)) from error

    def _whole(self, directories: Directories, path: bytes, node: Node, raw: bytes | memoryview) -> None:
        parent, _, name = path.rpartition(b"/")
        mode = node.mode & self._mode_mask
        fd = self._create(directories.open(parent), name, mode & 0o777)
        try:
            _write(fd, raw, 0)
            if mode & (self._umask | 0o7000):
                os.fchmod(fd, mode)
            if node.xattrs:
                _set_xattrs(fd, node)
            when = _clamped(node.mtime_ns)
            os.utime(fd, ns=(when, when))
        finally:
            os.close(fd)

    def _part(self, directories: Directories, path: bytes, part: bytes, offset: int) -> None:
        parent, _, name = path.rpartition(b"/")
        fd = os.open(name, _REOPEN, dir_fd=directories.open(parent))
        try:
            _write(fd, part, offset)
        finally:
            os.close(fd)

    def _create(self, parent_fd: int, name: bytes, mode: int) -> int:
        try:
            return os.open(name, _CREATE, mode, dir_fd=parent_fd)
        except FileExistsError:
            if not self._replace:
                raise
            remove_tree(parent_fd, name)
            return os.open(name, _CREATE, mode, dir_fd=parent_fd)

    def _finish_open(self, fd: int, node: Node) -> None:
        _set_xattrs(fd, node)
        os.fchmod(fd, node.mode & self._mode_mask)
        when = _clamped(node.mtime_ns)
        os.utime(fd, ns=(when, when))


def _write(fd: int, data: bytes | memoryview, offset: int) -> None:
    written = os.pwrite(fd, data, offset) if offset else os.write(fd, data)
    while written < len(data):
        written += os.pwrite(fd, memoryview(data)[written:], offset + written)


def _set_xattrs(fd: int, node: Node) -> None:
    for name, value in node.xattrs:
        if name.startswith(b"user.") and not name.startswith(b"user.overlay.") and b"\0" not in name:
            try:
                os.setxattr(fd, name, value)
            except OSError as error:
                if error.errno != errno.EOPNOTSUPP:
                    raise


def _clamped(mtime_ns: int) -> int:
    return max(-_TIME_MAX_NS, min(mtime_ns, _TIME_MAX_NS))


def _umask() -> int:
    """Read the process's umask without changing it, which would be seen by other threads."""
    with open("/proc/self/status", "rb") as status:
        for line in status:
            if line.startswith(b"Umask:"):
                return int(line.split()[1], 8)
    return 0o777  # unknown: every mode is set explicitly
