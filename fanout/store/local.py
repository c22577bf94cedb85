"""A store in a local directory: one file an object, made durable with fsync and create-only with link(2).

Owns the layout below its root: the key is the path, and `+tmp` (no part of a key can be that) holds the
files being written. Knows nothing of what the bytes mean. Several processes may use one root at once; a
network file system must have atomic link(2) and close-to-open consistency.

A writer fsyncs its file before the name appears and the directory before it returns. A reader may see an
object whose creator has not returned yet; a power cut can still take that object away. On ext4 a small
create costs about 0.5 ms, two journal commits; the kernel already merges those of concurrent writers.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from typing import NoReturn

from fanout.errors import Denied, Exists, FanoutError, Invalid, NotFound, Unavailable, Unknown
from fanout.runtime import Runtime, system
from fanout.store.base import ObjectMeta, Store, check_key, check_list, check_range, is_key

__all__ = ["LocalStore"]

_TMP = "+tmp"
_TMP_AGE_NS = 24 * 3600 * 10**9
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: O_NONBLOCK: opening a stray FIFO must not hang. It changes nothing for regular files.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_ATTEMPTS = 100


class LocalStore(Store):
    """Objects as files below `root`, which is made (mode 0700) where it is missing.

    `fsync=False` gives up durability against a power cut, not atomicity; for tests and caches.
    Symbolic links below the root are never followed. Errors: those of `Store`; a full disk is `Unavailable`.
    """

    def __init__(self, root: str | os.PathLike[str], *, fsync: bool = True, runtime: Runtime = system) -> None:
        self.root = os.path.realpath(os.fspath(root))
        self.url = f"file://{self.root}"
        self._fsync = fsync
        self._runtime = runtime
        self._synced: set[str] = set()
        self._lock = threading.Lock()
        try:
            self._make_root()
            self._root_fd = os.open(self.root, _DIRECTORY)
        except OSError as error:
            self._raise(error, "the directory itself")
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(_TMP, 0o700, dir_fd=self._root_fd)
            self._tmp_fd = os.open(_TMP, _DIRECTORY, dir_fd=self._root_fd)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                os.close(self._root_fd)
                self._raise(error, _TMP)
            self._tmp_fd = -1  # readable at least; writes say Denied
        self._sweep()

    def create(self, key: str, data: bytes) -> None:
        check_key(key)
        if self.head(key) is not None:
            raise Exists(f"{self.url}: {key} is already there")
        self._write(key, data, replace=False)

    def put(self, key: str, data: bytes) -> None:
        check_key(key)
        self._write(key, data, replace=True)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        check_key(key)
        check_range(start, length)
        try:
            with self._open(key) as fd:
                size = os.fstat(fd).st_size
                return _read(fd, start, max(0, size - start) if length is None else min(length, size - start))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFound(f"{self.url}: no object {key}") from error
        except OSError as error:
            self._raise(error, key)

    def head(self, key: str) -> ObjectMeta | None:
        check_key(key)
        folder, name = _split(key)
        try:
            with self._folder(folder) as fd:
                return _meta(key, os.stat(name, dir_fd=fd, follow_symlinks=False))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self._raise(error, key)

    def list(self, prefix: str = "", start_after: str = "", limit: int | None = None) -> Iterator[ObjectMeta]:
        check_list(prefix, start_after, limit)
        return self._limited(prefix, start_after, limit)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
        by_folder: dict[str, builtins.list[str]] = {}
        for key in keys:
            folder, name = _split(key)
            by_folder.setdefault(folder, []).append(name)
        for folder, names in by_folder.items():
            self._delete_in(folder, names)

    def close(self) -> None:
        with self._lock:
            for fd in (self._root_fd, self._tmp_fd):
                if fd >= 0:
                    os.close(fd)
            self._root_fd = self._tmp_fd = -1

    # Writing

    def _write(self, key: str, data: bytes, *, replace: bool) -> None:
        if self._tmp_fd < 0:
            raise Denied(f"{self.url}: the directory cannot be written to")
        temporary = self._runtime.hex_id()
        try:
            try:
                self._write_temporary(temporary, data)
                self._publish(temporary, key, replace=replace)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=self._tmp_fd)
        except FileExistsError as error:
            if not replace and self.head(key) is not None:
                raise Exists(f"{self.url}: {key} is already there") from error
            self._raise(error, key)
        except OSError as error:
            self._raise(error, key)

    def _write_temporary(self, name: str, data: bytes) -> None:
        fd = os.open(name, _WRITE, 0o600, dir_fd=self._tmp_fd)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            if self._fsync:
                os.fsync(fd)
        finally:
            os.close(fd)

    def _publish(self, temporary: str, key: str, *, replace: bool) -> None:
        folder, name = _split(key)
        for attempt in range(_ATTEMPTS):
            try:
                with self._folder(folder, make=True) as fd:
                    if replace:
                        os.rename(temporary, name, src_dir_fd=self._tmp_fd, dst_dir_fd=fd)
                    else:
                        os.link(temporary, name, src_dir_fd=self._tmp_fd, dst_dir_fd=fd)
                    self._sync_published(fd, key)
                return
            except FileNotFoundError:  # a delete emptied the folder and took it away under us
                if attempt == _ATTEMPTS - 1:
                    raise

    def _sync_published(self, fd: int, key: str) -> None:
        if self._fsync:
            try:
                os.fsync(fd)
            except OSError as error:
                raise Unknown(f"{self.url}: {key} may not be durable: {error}") from error

    def _delete_in(self, folder: str, names: Sequence[str]) -> None:
        try:
            with self._folder(folder) as fd:
                for name in names:
                    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                        os.unlink(name, dir_fd=fd)
                if self._fsync:
                    os.fsync(fd)
            self._prune(folder)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            self._raise(error, folder)

    def _prune(self, folder: str) -> None:
        """Remove the directories that are empty now; a creator in need of one makes it again."""
        while folder:
            parent, name = _split(folder)
            with self._folder(parent) as fd:
                try:
                    os.rmdir(name, dir_fd=fd)
                except FileNotFoundError:
                    pass
                except OSError as error:
                    if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
                        return
                    raise
            with self._lock:
                self._synced.discard(folder)
            folder = parent

    # Walking

    @contextlib.contextmanager
    def _folder(self, folder: str, *, make: bool = False) -> Iterator[int]:
        """Open a folder step by step, never through a link. FileNotFoundError where there is none."""
        fd = self._root_fd
        try:
            path = ""
            for part in folder.split("/") if folder else ():
                path = f"{path}/{part}" if path else part
                if make:
                    self._make(fd, part, path)
                below = self._enter(fd, part, path)
                if fd != self._root_fd:
                    os.close(fd)
                fd = below
            yield fd
        finally:
            if fd != self._root_fd:
                os.close(fd)

    def _make(self, parent_fd: int, part: str, path: str) -> None:
        if path in self._synced:
            try:
                os.stat(part, dir_fd=parent_fd, follow_symlinks=False)
                return
            except FileNotFoundError:
                pass
        with contextlib.suppress(FileExistsError):
            os.mkdir(part, 0o700, dir_fd=parent_fd)
        if self._fsync:  # also when another process made it: that one may not have come to its fsync yet
            os.fsync(parent_fd)
        with self._lock:
            self._synced.add(path)

    def _enter(self, parent_fd: int, part: str, path: str) -> int:
        try:
            return os.open(part, _DIRECTORY, dir_fd=parent_fd)
        except NotADirectoryError:
            # A link and a file give the same error; only the link is worth a word of its own.
            if stat.S_ISLNK(os.stat(part, dir_fd=parent_fd, follow_symlinks=False).st_mode):
                raise Invalid(f"{self.url}: {path} is a symbolic link; links are never followed") from None
            raise

    @contextlib.contextmanager
    def _open(self, key: str) -> Iterator[int]:
        folder, name = _split(key)
        with self._folder(folder) as fd:
            file = os.open(name, _READ, dir_fd=fd)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise FileNotFoundError(errno.ENOENT, "not a regular file", key)
            yield file
        finally:
            os.close(file)

    def _limited(self, prefix: str, start_after: str, limit: int | None) -> Iterator[ObjectMeta]:
        if limit == 0:
            return
        folder, slash, _ = prefix.rpartition("/")
        try:
            for count, meta in enumerate(self._walk(folder + slash, prefix, start_after), 1):
                yield meta
                if count == limit:
                    return
        except OSError as error:
            self._raise(error, prefix)

    def _walk(self, base: str, prefix: str, start_after: str) -> Iterator[ObjectMeta]:
        """Yield what is below the folder `base` ("" or with its slash), sorted by the whole key.

        A directory sorts as its name with the slash, so that `a-b` comes before `a/b` as in a bucket. Names
        before the start are dropped before the sort: going on near the end of a long folder is one readdir.
        """
        try:
            with self._folder(base[:-1]) as fd:
                entries = []
                with os.scandir(fd) as scan:
                    for entry in scan:
                        full = base + entry.name
                        if entry.is_dir(follow_symlinks=False):
                            full += "/"
                            wanted = full > start_after or start_after.startswith(full)
                            wanted = wanted and (full.startswith(prefix) or prefix.startswith(full))
                        else:
                            wanted = full > start_after and full.startswith(prefix)
                        if wanted:
                            entries.append(full)
                entries.sort()
        except (FileNotFoundError, NotADirectoryError):
            return
        begin, count = 0, 16
        while begin < len(entries):
            for found in self._stat(base, entries[begin : begin + count]):
                if isinstance(found, str):
                    yield from self._walk(found, prefix, start_after)
                else:
                    yield found
            begin, count = begin + count, min(2 * count, 1024)

    def _stat(self, base: str, entries: Sequence[str]) -> builtins.list[ObjectMeta | str]:
        """Return the metadata of the files in one folder that are still there; folders as they came."""
        found: builtins.list[ObjectMeta | str] = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), self._folder(base[:-1]) as fd:
            for full in entries:
                if not is_key(full.rstrip("/")):
                    continue
                if full.endswith("/"):
                    found.append(full)
                    continue
                with contextlib.suppress(FileNotFoundError):
                    meta = _meta(full, os.stat(full[len(base) :], dir_fd=fd, follow_symlinks=False))
                    found += [meta] if meta else []
        return found

    # The root

    def _make_root(self) -> None:
        missing = []
        path = self.root
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
            if self._fsync:
                parent = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    os.fsync(parent)
                finally:
                    os.close(parent)

    def _sweep(self) -> None:
        """Remove what crashed writers left behind more than a day ago."""
        if self._tmp_fd < 0:
            return
        before = self._runtime.now_ns() - _TMP_AGE_NS
        with contextlib.suppress(OSError), os.scandir(self._tmp_fd) as scan:
            for entry in scan:
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_mtime_ns < before:
                        os.unlink(entry.name, dir_fd=self._tmp_fd)

    def _raise(self, error: OSError, what: str) -> NoReturn:
        raise _translate(self.url, error, what) from error


def _translate(url: str, error: OSError, what: str) -> FanoutError:
    text = f"{url}: {what}: {os.strerror(error.errno) if error.errno else error}"
    match error.errno:
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return Denied(text)
        case errno.ENOTDIR | errno.EISDIR | errno.EEXIST | errno.ENOTEMPTY:
            return Invalid(f"{text}: no key continues another, and a store is a directory")
        case errno.ELOOP:
            return Invalid(f"{text}: links are never followed")
        case errno.ENAMETOOLONG:
            return Invalid(text)
        case _:
            return Unavailable(text)


def _split(path: str) -> tuple[str, str]:
    folder, _, name = path.rpartition("/")
    return folder, name


def _meta(key: str, status: os.stat_result) -> ObjectMeta | None:
    return ObjectMeta(key, status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None


def _read(fd: int, start: int, length: int) -> bytes:
    parts = []
    while length > 0 and (part := os.pread(fd, length, start)):
        parts.append(part)
        start += len(part)
        length -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
