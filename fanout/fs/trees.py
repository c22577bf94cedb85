"""Whole directories put, got and copied: one commit or one call, where fsspec would make one for each file.

Owns when that comes to the same: no pattern, no depth, no link on the way, and nothing at the target yet. Else fsspec's
own way is taken, file by file.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable
from glob import has_magic
from typing import Any

import anyio.to_thread
from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.implementations.local import make_path_posix, trailing_sep

from fanout.fs.names import place_of
from fanout.fs.reading import ReadableDisks
from fanout.view.transfer import IGNORE_FILE

__all__ = ["Trees"]


class Trees(ReadableDisks):
    """The part of `FanoutFileSystem` that moves whole directories."""

    async def _put(
        self, lpath: Any, rpath: Any, recursive: bool = False, callback: Any = DEFAULT_CALLBACK,
        batch_size: int | None = None, maxdepth: int | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        if _is_plain(lpath, rpath, recursive, maxdepth) and not kwargs and not self._intrans:
            local = make_path_posix(lpath)
            target = await self._target(local, rpath, trailing_sep(lpath))
            if await anyio.to_thread.run_sync(_is_local_tree, local) and await self._is_free(target):
                key = place_of(target).key
                await self._on(target, lambda disk: disk.upload(local, f"/{key}", progress=_told(callback)))
                self.invalidate_cache(target)
                return None
        return await super()._put(lpath, rpath, recursive, callback, batch_size, maxdepth, **kwargs)

    async def _get(
        self, rpath: Any, lpath: Any, recursive: bool = False, callback: Any = DEFAULT_CALLBACK,
        maxdepth: int | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        if _is_plain(rpath, lpath, recursive, maxdepth) and not kwargs:
            path, local = self._strip_protocol(rpath), make_path_posix(lpath)
            into = not trailing_sep(rpath) and (trailing_sep(local) or os.path.isdir(local))
            target = os.path.join(local, posixpath.basename(path)) if into else local
            if not os.path.lexists(target) and await self._is_tree(path):
                key = place_of(path).key
                await self._on(path, lambda disk: disk.download(f"/{key}", target, progress=_told(callback)))
                return None
        return await super()._get(rpath, lpath, recursive, callback, maxdepth, **kwargs)

    async def _copy(
        self, path1: Any, path2: Any, recursive: bool = False, on_error: str | None = None,
        maxdepth: int | None = None, batch_size: int | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        if _is_plain(path1, path2, recursive, maxdepth):
            source = self._strip_protocol(path1)
            target = await self._target(source, path2, trailing_sep(path1))
            (line, old), (other, new) = place_of(source), place_of(target)
            inside = f"{target}/".startswith(f"{source}/")
            if old and line == other and not inside and await self._is_free(target) and await self._is_tree(source):
                await self._on(target, lambda disk: disk.copy(f"/{old}", f"/{new}"))
                self.invalidate_cache(target)
                return
        await super()._copy(path1, path2, recursive, on_error, maxdepth, batch_size, **kwargs)

    async def _target(self, source: str, path: str, contents: bool) -> str:
        """Return where a directory goes that is put to `path`: into a directory that is there, or its `contents` do."""
        target: str = self._strip_protocol(path)
        if not contents and (trailing_sep(path) or await self._isdir(target)):
            return posixpath.join(target, posixpath.basename(source.rstrip("/")))
        return target

    async def _is_free(self, path: str) -> bool:
        """Whether nothing is at a path, and it is in a directory, or in one that can be made."""
        if not place_of(path).key or await self._exists(path, refresh=True):
            return False
        while path := self._parent(path):
            if await self._exists(path, refresh=True):
                above = await self._info(path, refresh=True)
                return above["type"] == "directory" and "islink" not in above
        return False

    async def _is_tree(self, path: str) -> bool:
        """Whether a path is a directory without links in it."""
        found = await self._find(path, withdirs=True, detail=True)
        top = found.get(path)
        return top is not None and top["type"] == "directory" and not any("islink" in info for info in found.values())


def _is_plain(source: Any, target: Any, recursive: bool, maxdepth: int | None) -> bool:
    both = isinstance(source, str) and isinstance(target, str)
    return both and recursive and maxdepth is None and not has_magic(source)


def _is_local_tree(top: str) -> bool:
    """Whether an upload takes all of a directory, as it is."""
    if not os.path.isdir(top) or os.path.islink(top) or os.path.exists(os.path.join(top, IGNORE_FILE)):
        return False
    for here, directories, files in os.walk(top):
        if any(os.path.islink(os.path.join(here, name)) for name in (*directories, *files)):
            return False
    return True


def _told(callback: Any) -> Callable[[int, int, int | None], None]:
    def progress(files: int, size: int, total: int | None) -> None:
        if total is not None:
            callback.set_size(total)
        callback.absolute_update(files)

    return progress
