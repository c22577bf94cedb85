"""What the file system reads: `info`, listings, `find` and contents.

Owns looking at disks for fsspec. What changes them is in system.py; paths and links are names.py's.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, TypeVar

import anyio.to_thread
from fsspec.asyn import AsyncFileSystem, _run_coros_in_chunks, sync
from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.utils import isfilelike, tokenize

from fanout.api import Disk
from fanout.default import connect
from fanout.errors import FanoutError, Invalid, NotFound
from fanout.fs.connection import Connection
from fanout.fs.infos import Info, of_entry, of_link, of_root
from fanout.fs.names import follow, os_error, place_of, refusal
from fanout.model import DirEntry

__all__ = ["ReadableDisks", "concurrently"]

T = TypeVar("T")
S = TypeVar("S")
#: How many directories, links or removals are under way at once.
_AT_ONCE = 32


class ReadableDisks(AsyncFileSystem):  # type: ignore[misc]
    """The part of `FanoutFileSystem` that changes nothing on a disk."""

    protocol = "fanout"
    root_marker = ""

    def __init__(
        self,
        server: str | None = None,
        *,
        url: str | None = None,
        api_key: str | None = None,
        store: str | None = None,
        engine: str | None = None,
        asynchronous: bool = False,
        loop: asyncio.AbstractEventLoop | None = None,
        batch_size: int | None = None,
        use_listings_cache: bool = False,
        listings_expiry_time: float | None = None,
        max_paths: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(
            asynchronous=asynchronous,
            loop=loop,
            batch_size=batch_size,
            use_listings_cache=use_listings_cache,
            listings_expiry_time=listings_expiry_time,
            max_paths=max_paths,
        )
        if server is not None and url is not None:
            raise Invalid.argument("url", url, f"one address, and `server` is {server!r}")
        made = connect(url if server is None else server, api_key=api_key, store=store, engine=engine, **settings)
        self._connection = Connection(made)

    @property
    def fsid(self) -> str:
        """Return a name of what this is connected to."""
        return f"fanout_{tokenize(self.storage_args, self.storage_options)}"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        stripped = super()._strip_protocol(path)
        return stripped if isinstance(stripped, list) else stripped.lstrip("/")

    async def aclose(self) -> None:
        """Close the connection; a later call opens it again."""
        await self._connection.aclose()

    def close(self) -> None:
        """Like `aclose`, blocking."""
        sync(self.loop, self.aclose)

    def invalidate_cache(self, path: str | None = None) -> None:
        """Forget cached listings: all, or those at, below and above `path`."""
        super().invalidate_cache(path)
        if path is None:
            self.dircache.clear()
            return
        path = self._strip_protocol(path)
        for listed in list(self.dircache):
            if listed in ("", path) or listed.startswith(f"{path}/") or path.startswith(f"{listed}/"):
                self.dircache.pop(listed, None)

    def _key(self, path: str) -> str:
        """Return the key of a path that is to name a file."""
        key = place_of(path).key
        if not key:
            raise refusal(errno.EISDIR, path)
        return key

    async def _on(self, path: str, work: Callable[[Disk], Awaitable[T]], *, again: bool = True) -> T:
        """Do something with the line of a path, with Python's errors."""
        try:
            return await self._connection.on(place_of(path).line, work, again=again)
        except FanoutError as error:
            raise os_error(error, path) from error

    # Looking -------------------------------------------------------------------------------------------------

    async def _info(self, path: str, refresh: bool = False, **kwargs: Any) -> Info:
        path = self._strip_protocol(path)
        cached = None if refresh else self._ls_from_cache(path)
        for info in cached or ():
            if info["name"] == path:
                return dict(info)
        line, key = place_of(path)
        if not line:
            return of_root(path)
        if not key:
            return await self._on(path, lambda disk: _done(of_root(path)))
        real, found = await self._on(path, lambda disk: follow(disk, key))
        return of_entry(path, found, None if real == key else real)

    async def _exists(self, path: str, **kwargs: Any) -> bool:
        try:
            await self._info(path, **kwargs)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ELOOP):
                return False
            raise
        return True

    async def _ls(self, path: str, detail: bool = True, refresh: bool = False, **kwargs: Any) -> list[Any]:
        path = self._strip_protocol(path)
        infos = None if refresh else self._ls_from_cache(path)
        if infos is None:
            infos = await self._list(path)
            if [info["name"] for info in infos] != [path]:
                self.dircache[path] = infos
        return [dict(info) for info in infos] if detail else [info["name"] for info in infos]

    async def _list(self, path: str) -> list[Info]:
        line, key = place_of(path)
        if not line:
            try:
                fanout = await self._connection.open()
                return [of_root(disk.name) async for disk in fanout.disks.list()]
            except FanoutError as error:
                raise os_error(error, path) from error

        async def listing(disk: Disk) -> list[Info]:
            try:
                return await _entries(disk, path, key)
            except (NotFound, Invalid):
                real, found = await follow(disk, key)
                if found.kind == "directory":
                    return await _entries(disk, path, real)
                return [of_entry(path, found, None if real == key else real)]

        return await self._on(path, listing)

    async def _find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, prefix: str = "", **kwargs: Any
    ) -> Any:
        detail = kwargs.pop("detail", False)
        if maxdepth is not None and maxdepth < 1:
            raise ValueError("maxdepth must be at least 1")
        path = self._strip_protocol(path)
        try:
            top = await self._info(path)
        except FileNotFoundError:
            return {} if detail else []
        is_file = top["type"] != "directory"
        found: dict[str, Info] = {path: top} if path and (withdirs or is_file) else {}
        level, depth = ([] if is_file else [path]), 0
        while level and (maxdepth is None or depth < maxdepth):
            depth += 1
            inside = [info for listing in await concurrently(level, self._ls) for info in listing]
            if depth == 1 and prefix:
                inside = [info for info in inside if info["name"].rpartition("/")[2].startswith(prefix)]
            level = [info["name"] for info in inside if info["type"] == "directory"]
            found.update((info["name"], info) for info in inside if withdirs or info["type"] != "directory")
        names = sorted(found)
        return {name: found[name] for name in names} if detail else names

    async def _du(self, path: str, total: bool = True, maxdepth: int | None = None, **kwargs: Any) -> Any:
        found = await self._find(path, maxdepth=maxdepth, detail=True, **kwargs)
        sizes = {name: info["size"] for name, info in found.items()}
        return sum(sizes.values()) if total else sizes

    def ukey(self, path: str) -> str:
        """Return the hash of the file's content; of a directory, of what is known of it."""
        info = self.info(path, refresh=True)
        return str(info.get("etag") or tokenize(info))

    def checksum(self, path: str) -> int:
        """Return a number that changes with the file's content."""
        return int(tokenize(self.ukey(path)), 16)

    def modified(self, path: str) -> datetime:
        """Return the mtime, in UTC; a disk as such has none."""
        info = self.info(path)
        if "mtime" not in info:
            raise NotImplementedError(f"{path!r} is a disk: only what is on it has times")
        return datetime.fromtimestamp(info["mtime"], UTC)

    def created(self, path: str) -> datetime:
        """Return when what the file holds was written, which is its mtime: new content is a new file, as in S3."""
        return self.modified(path)

    # Reading -------------------------------------------------------------------------------------------------

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        path = self._strip_protocol(path)
        low, high = start or 0, end
        if low < 0 or (high is not None and high < 0):
            size = (await self._info(path, refresh=True))["size"]
            low = max(size + low, 0) if low < 0 else low
            high = max(size + high, 0) if high is not None and high < 0 else high
        if high is not None and high <= low:
            high = low  # nothing, of something that is there
        return await self._read(path, lambda disk, key: disk.get_object(key, start=low, end=high))

    async def _cat(self, path: Any, recursive: bool = False, on_error: str = "raise", **kwargs: Any) -> Any:
        if recursive and isinstance(path, str) and await self._isdir(path):
            path, recursive = await self._find(path), False  # fsspec would read the directories, too
            if not path:
                return {}
        return await super()._cat(path, recursive=recursive, on_error=on_error, **kwargs)

    async def _read(self, path: str, read: Callable[[Disk, str], Awaitable[T]]) -> T:
        """Read a file, by the key that it has behind any links."""
        key = self._key(path)

        async def work(disk: Disk) -> T:
            try:
                return await read(disk, key)
            except (NotFound, Invalid):
                real, found = await follow(disk, key)
                if found.kind == "directory":
                    raise refusal(errno.EISDIR, path) from None
                if real == key:
                    raise
                return await read(disk, real)

        return await self._on(path, work)

    async def _chunks(self, path: str) -> AsyncIterator[bytes]:
        """Yield a file's content, all of it as it was at the start."""

        async def start(disk: Disk, key: str) -> tuple[bytes, AsyncIterator[bytes]]:
            chunks = disk.read_object(key)
            return await anext(chunks, b""), chunks

        chunk, rest = await self._read(path, start)
        async with aclosing(rest):  # type: ignore[type-var]
            while chunk:
                yield chunk
                try:
                    chunk = await anext(rest, b"")
                except FanoutError as error:
                    raise os_error(error, path) from error

    async def _get_file(self, rpath: str, lpath: Any, callback: Any = DEFAULT_CALLBACK, **kwargs: Any) -> None:
        rpath = self._strip_protocol(rpath)
        info = await self._info(rpath)
        if info["type"] == "directory":
            os.makedirs(lpath, exist_ok=True)
            return
        callback.set_size(info["size"])
        file = lpath if isfilelike(lpath) else open(lpath, "wb")  # noqa: SIM115 - a caller's stays open
        try:
            async with aclosing(self._chunks(rpath)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    await anyio.to_thread.run_sync(file.write, chunk)
                    callback.relative_update(len(chunk))
        finally:
            if file is not lpath:
                file.close()

    def check_unchanged(self, path: str, before: Info) -> None:
        """Raise OSError (ESTALE) if the file is no longer what `before` describes."""
        now = self.info(path, refresh=True)
        if now.get("etag") != before.get("etag"):
            raise OSError(errno.ESTALE, "the file was changed while it was being read", path)


async def _entries(disk: Disk, path: str, key: str) -> list[Info]:
    """Describe what is in a directory, by names below `path`."""

    async def describe(entry: DirEntry) -> Info:
        name = f"{path}/{entry.name}"
        if entry.kind != "symlink":
            return of_entry(name, entry)
        try:
            return of_link(name, entry, (await follow(disk, entry.path.lstrip("/")))[1])
        except (NotFound, OSError):
            return of_link(name, entry, None)

    entries = [entry async for entry in disk.listdir(f"/{key}")]
    if any(entry.kind == "symlink" for entry in entries):
        return await concurrently(entries, describe)
    return [of_entry(f"{path}/{entry.name}", entry) for entry in entries]


async def concurrently(items: Sequence[S], call: Callable[[S], Awaitable[T]]) -> list[T]:
    """Call for each item, some at once; the results in order."""
    results: list[T] = await _run_coros_in_chunks([call(item) for item in items], batch_size=_AT_ONCE)
    return results


async def _done(value: T) -> T:
    return value
