"""The file system itself: what each of fsspec's operations changes on a disk, and in how many commits.

Owns writing, moving and removing for fsspec. Looking and reading are reading.py's, open files file.py's.
"""

from __future__ import annotations

import errno
import os
import posixpath
import shutil
import stat
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from glob import has_magic
from pathlib import Path
from typing import Any

import anyio.to_thread
from fsspec.asyn import sync_wrapper
from fsspec.callbacks import DEFAULT_CALLBACK

from fanout.api import Content, Disk
from fanout.errors import Conflict, FanoutError, NotFound
from fanout.fs.file import FanoutFile, FanoutTransaction, Staged
from fanout.fs.infos import Info, of_entry
from fanout.fs.names import os_error, place_of, refusal
from fanout.fs.reading import concurrently
from fanout.fs.trees import Trees

__all__ = ["FanoutFileSystem"]


class FanoutFileSystem(Trees):
    """Disks for fsspec: `fanout://disk/path`, `fanout://disk@branch/path`, `fanout://disk@checkpoint/path` (read-only).

    `api_key`, `store`, `engine` and further settings are those of `fanout.connect`; nothing is opened before the first
    call. A server's address is `server`, or `url`, which functions of fsspec that have one themselves cannot pass on.
    Errors are Python's own (`FileNotFoundError`, `PermissionError`, …) with fanout's as their cause.
    Listings are not cached unless `use_listings_cache` is set: others write to the same disk.
    """

    transaction_type = FanoutTransaction

    # Writing -------------------------------------------------------------------------------------------------

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **kwargs: Any) -> FanoutFile:
        return FanoutFile(self, path, mode, block_size=block_size, **kwargs)

    async def _to_write(self, path: str, mode: str) -> Info | None:
        """See before anything is written that it can be; return what is there if the mode has to know."""
        key = self._key(path)

        async def check(disk: Disk) -> Info | None:
            if disk.at is not None:
                raise PermissionError(errno.EACCES, f"checkpoint {disk.at!r} cannot be written", path)
            found = await disk.stat(f"/{key}") if mode in ("ab", "xb") else None
            if found is None:
                return None
            if mode == "xb":
                raise refusal(errno.EEXIST, path)
            if found.kind == "directory":
                raise refusal(errno.EISDIR, path)
            return of_entry(path, found)

        return await self._on(path, check)

    async def _store(self, path: str, data: Content, *, exclusive: bool = False, mode: int = 0o644) -> None:
        """Make a file hold `data`, in one commit."""
        key = self._key(path)

        async def put(disk: Disk) -> None:
            if exclusive and await disk.stat(f"/{key}") is not None:
                raise refusal(errno.EEXIST, path)
            await disk.put_object(key, data, mode=mode)

        # What comes bit by bit is gone after one attempt.
        await self._change(path, put, again=isinstance(data, bytes))

    async def _change(self, path: str, work: Callable[[Disk], Awaitable[Any]], *, again: bool = True) -> None:
        """Do something that makes a file of `path`."""

        async def change(disk: Disk) -> None:
            try:
                await work(disk)
            except Conflict as conflict:
                there = await disk.stat(f"/{self._key(path)}")
                is_directory = there is not None and there.kind == "directory"
                raise refusal(errno.EISDIR if is_directory else errno.ENOTDIR, path) from conflict

        await self._on(path, change, again=again)
        self.invalidate_cache(path)

    async def _store_together(self, files: Iterable[Staged]) -> None:
        """Store files that belong together: in one commit on each line."""
        lines: dict[str, dict[str, Staged]] = {}
        for file in files:
            line, key = place_of(file.path)
            lines.setdefault(line, {})[key] = file
        for line, by_key in lines.items():
            with tempfile.TemporaryDirectory(prefix="fanout-") as top:
                await self._on(line, lambda disk, by_key=by_key, top=top: _upload(disk, by_key, Path(top)))  # type: ignore[misc]
            for file in by_key.values():
                self.invalidate_cache(file.path)

    async def _pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        path = self._strip_protocol(path)
        if self._intrans:
            staged = await self._stage(path, mode)
            staged.file.write(value)
        else:
            await self._store(path, bytes(value), exclusive=mode == "create")

    async def _put_file(
        self, lpath: str, rpath: str, callback: Any = DEFAULT_CALLBACK, mode: str = "overwrite", **kwargs: Any
    ) -> None:
        rpath = self._strip_protocol(rpath)
        if os.path.isdir(lpath):
            await self._makedirs(rpath, exist_ok=True)
            return
        with open(lpath, "rb") as file:
            found = os.fstat(file.fileno())
            callback.set_size(found.st_size)
            if self._intrans:
                staged = await self._stage(rpath, mode)
                await anyio.to_thread.run_sync(shutil.copyfileobj, file, staged.file)
            else:
                permissions = stat.S_IMODE(found.st_mode) & 0o777
                await self._store(rpath, file, exclusive=mode == "create", mode=permissions)
        callback.relative_update(found.st_size)

    async def _stage(self, path: str, mode: str) -> Staged:
        await self._to_write(path, "xb" if mode == "create" else "wb")
        staged = Staged(self, path)
        self.transaction.files.append(staged)
        return staged

    async def _touch(self, path: str, truncate: bool = True, **kwargs: Any) -> None:
        """Make an empty file, or (not `truncate`) give one that is there the present time, its content unchanged."""
        path = self._strip_protocol(path)
        if truncate or not await self._exists(path):
            await self._store(path, b"")
        else:
            key = f"/{self._key(path)}"
            await self._change(path, lambda disk: disk.copy(key, key, replace=True))

    touch = sync_wrapper(_touch)

    async def _cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)
        info = await self._info(source, refresh=True)
        if info["type"] == "directory":
            await self._makedirs(target, exist_ok=True)
        elif place_of(source).line != place_of(target).line:
            await self._store(target, self._chunks(source), mode=info["mode"])
        else:
            old, new = info.get("destination") or self._key(source), self._key(target)
            await self._change(target, lambda disk: disk.copy(f"/{old}", f"/{new}", replace=True))

    async def _mv(
        self, path1: Any, path2: Any, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any
    ) -> None:
        """Move a file or a directory: in one commit, moving no data, if it stays on its line; else by copying it."""
        plain = isinstance(path1, str) and isinstance(path2, str) and maxdepth is None and not has_magic(path1)
        if plain and not path1.endswith("/"):
            source, target = self._strip_protocol(path1), self._strip_protocol(path2)
            if path2.endswith("/") or (source != target and await self._isdir(target)):
                target = posixpath.join(target, posixpath.basename(source))
            if source == target:
                return
            (line, old), (other, new) = place_of(source), place_of(target)
            if line == other and old and new:
                await self._change(target, lambda disk: disk.move(f"/{old}", f"/{new}", replace=True))
                self.invalidate_cache(source)
                return
        await self._copy(path1, path2, recursive=recursive, maxdepth=maxdepth, on_error="raise")
        await self._rm(path1, recursive=recursive, maxdepth=maxdepth)

    mv = sync_wrapper(_mv)

    async def _mv_file(self, path1: str, path2: str) -> None:
        await self._mv(path1, path2)

    # Directories and removing --------------------------------------------------------------------------------

    async def _mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """Make a directory; or a disk, where that is all the path names."""
        path = self._strip_protocol(path)
        if await self._exists(path, refresh=True):
            raise refusal(errno.EEXIST, path)
        parent = self._parent(path)
        if not create_parents and not await self._isdir(parent):
            raise refusal(errno.ENOENT, parent)
        await self._make_directory(path)

    async def _makedirs(self, path: str, exist_ok: bool = False) -> None:
        path = self._strip_protocol(path)
        try:
            info = await self._info(path, refresh=True)
        except FileNotFoundError:
            try:
                await self._make_directory(path)
            except FileExistsError:
                if not exist_ok:
                    raise
            return
        if not exist_ok or info["type"] != "directory":
            raise refusal(errno.EEXIST, path)

    async def _make_directory(self, path: str) -> None:
        line, key = place_of(path)
        if key:
            await self._store(f"{path}/", b"")
            return
        try:
            fanout = await self._connection.open()
            await fanout.disks.create(line)
        except FanoutError as error:
            raise os_error(error, path) from error
        self.invalidate_cache("")

    async def _rmdir(self, path: str) -> None:
        """Remove an empty directory; or an empty disk, if it has no other branches and no checkpoints."""
        path = self._strip_protocol(path)
        info = await self._info(path, refresh=True)
        if info["type"] != "directory":
            raise refusal(errno.ENOTDIR, path)
        if await self._list(path):
            raise refusal(errno.ENOTEMPTY, path)
        key = place_of(path).key
        if key:
            await self._on(path, lambda disk: disk.delete_object(key))
        else:
            await self._on(path, lambda disk: self._delete_disk(disk, path))
        self.invalidate_cache(path)

    rmdir = sync_wrapper(_rmdir)

    async def _delete_disk(self, disk: Disk, path: str) -> None:
        branches = [name async for name in disk.branches()]
        if place_of(path).line != disk.name or len(branches) > 1 or [name async for name in disk.checkpoints()]:
            raise refusal(errno.ENOTEMPTY, path)
        fanout = await self._connection.open()
        await fanout.disks.delete(disk.name)
        self._connection.forget(disk.name)

    async def _rm(
        self,
        path: Any,
        recursive: bool = False,
        batch_size: int | None = None,
        maxdepth: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Remove files, or whole trees in one commit each. A disk is emptied and stays."""
        if recursive and maxdepth is not None:
            paths = await self._expand_path(path, recursive=True, maxdepth=maxdepth)
            await self._remove_to_depth(paths)
            return
        paths = await self._expand_path(path)
        if recursive:  # what is below another of them goes with it
            known = set(paths)
            paths = [each for each in paths if known.isdisjoint(_above(each))]
        await concurrently(paths, lambda each: self._remove(each, recursive))

    async def _rm_file(self, path: str, **kwargs: Any) -> None:
        await self._remove(self._strip_protocol(path), recursive=False)

    async def _remove(self, path: str, recursive: bool) -> None:
        line, key = place_of(path)

        async def remove(disk: Disk) -> None:
            found = await disk.stat(f"/{key}") if key else None
            if key and found is None:
                raise NotFound(f"disk {disk.name!r} has no {key!r}")
            if not recursive and (found is None or found.kind == "directory"):
                raise refusal(errno.EISDIR, path)
            await disk.delete_object(key or "/", recursive=recursive)

        if not line:
            raise refusal(errno.EACCES, path)
        await self._on(path, remove)
        self.invalidate_cache(path)

    async def _remove_to_depth(self, paths: Sequence[str]) -> None:
        """Remove files, then from the deepest up the directories that are empty without them."""
        for each in reversed(paths):
            try:
                if await self._isdir(each):
                    await self._rmdir(each)
                else:
                    await self._remove(each, recursive=False)
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:
                    raise


def _above(path: str) -> Iterator[str]:
    while path := posixpath.dirname(path):
        yield path


async def _upload(disk: Disk, by_key: dict[str, Staged], top: Path) -> None:
    """Store staged files by way of a local tree that looks like them, in one commit."""
    directories: set[str] = set()
    for key, staged in by_key.items():
        staged.file.flush()
        (top / key).parent.mkdir(parents=True, exist_ok=True)
        os.chmod(staged.name, 0o644)
        os.link(staged.name, top / key)
        directories.update(map(str, list(Path(key).parents)[:-1]))
    for directory in directories:
        found = await disk.stat(f"/{directory}")
        (top / directory).chmod(found.mode if found is not None and found.kind == "directory" else 0o755)
    await disk.upload(top, "/")
