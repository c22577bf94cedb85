"""A disk handle of a remote connection: one line of a disk on a fanout server.

Owns what each call is on the wire. Trees and large files are transfer.py's.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, Literal, TypeVar

from fanout import wire
from fanout.api import Content, Disk, Progress
from fanout.client import transfer
from fanout.client.http import Cut, Http, Method
from fanout.disk.paths import absolute, tree_path
from fanout.errors import Invalid, Unavailable
from fanout.format.layout import check_branch_name, check_name
from fanout.model import (
    Change,
    Checkpoint,
    Commit,
    DirEntry,
    FsckReport,
    GcReport,
    Grep,
    GrepOutput,
    GrepSyntax,
    Lock,
    ObjectInfo,
    Value,
)
from fanout.run import request
from fanout.run.grep_query import check_query
from fanout.runtime import Runtime

__all__ = ["RemoteDisk"]

V = TypeVar("V", bound=Value)
#: Up to here a file is sent in one call; larger ones, and streams, in packs that are sent again one by one.
_WHOLE_BYTES = 4 << 20
_READ_ATTEMPTS = 8


class RemoteDisk(Disk):
    """A disk handle of a remote connection."""

    def __init__(self, http: Http, runtime: Runtime, handle: wire.Handle) -> None:
        self.id = handle.id
        self.name = handle.name
        self.branch_name = handle.branch
        self.at = handle.at
        self._http = http
        self._runtime = runtime

    @property
    def line(self) -> str:
        """The branch or checkpoint that this is a handle on."""
        return self.at or self.branch_name

    # -- objects and trees -----------------------------------------------------------------------------------

    async def upload(self, local: str | Path, remote: str = "/", *, progress: Progress | None = None) -> Commit:
        target = absolute("remote", remote)
        return await transfer.upload(self._http, self._runtime, self.id, self.line, Path(local), target, progress)

    async def download(self, remote: str, local: str | Path, *, progress: Progress | None = None) -> None:
        source = absolute("remote", remote)
        missing = f"remote: disk {self.name!r} has no {remote!r} on {self.line!r}"
        await transfer.download(self._http, self.id, self.line, source, Path(local), progress, missing)

    async def put_object(self, key: str, data: Content, *, mode: int = 0o644) -> ObjectInfo:
        content = request.check_content("data", data)
        path, is_directory = request.check_object(key, mode)
        if is_directory:
            request.check_no_content("data", content)
        if isinstance(content, bytes) and len(content) <= _WHOLE_BYTES:
            query = {"key": key, "mode": mode}
            stored = await self._call("PUT", "object", query, content=content, key=True)
            return wire.heard(ObjectInfo, stored)
        return await transfer.put(self._http, self._runtime, self.id, self.line, path, content, mode)

    async def get_object(self, key: str, *, start: int = 0, end: int | None = None) -> bytes:
        return b"".join([chunk async for chunk in self.read_object(key, start=start, end=end)])

    async def read_object(self, key: str, *, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        tree_path("key", key)
        request.check_range(start, end)
        at, failures = start, 0
        seq: str | None = None
        while True:
            query = {"line": self.line, "key": key, "start": at or None, "end": end, "seq": seq}
            try:
                async with self._http.answer("GET", f"/disks/{self.id}/object", query) as answer:
                    seq = answer.headers.get("fanout-seq")
                    left = int(answer.headers.get("content-length", "-1"))
                    async for part in answer.parts:
                        failures = 0
                        at += len(part)
                        left -= len(part)
                        yield part
                if left:
                    raise Cut(f"{self._http.url}: the file ended early")
                return
            except Cut as cut:
                failures += 1
                if failures >= _READ_ATTEMPTS:
                    raise Unavailable(str(cut)) from cut
                await self._http.pause(failures)

    async def head_object(self, key: str) -> ObjectInfo | None:
        tree_path("key", key.rstrip("/") or "/", allow_root=True)
        found = await self._call("GET", "head", {"key": key})
        return None if found is None else wire.heard(ObjectInfo, found)

    async def stat(self, path: str) -> DirEntry | None:
        absolute("path", path)
        found = await self._call("GET", "stat", {"path": path})
        return None if found is None else wire.heard(DirEntry, found)

    async def delete_object(self, key: str, *, recursive: bool = False) -> None:
        tree_path("key", key.rstrip("/") or "/", allow_root=recursive)
        await self._call("DELETE", "object", {"key": key, "recursive": recursive}, key=True)

    async def move(self, source: str, target: str, *, replace: bool = False) -> Commit:
        return await self._moved("move", source, target, replace)

    async def copy(self, source: str, target: str, *, replace: bool = False) -> Commit:
        return await self._moved("copy", source, target, replace)

    async def _moved(self, what: str, source: str, target: str, replace: bool) -> Commit:
        request.check_move(source, target, replace)
        body = {"source": source, "target": target, "replace": replace}
        return wire.heard(Commit, await self._call("POST", what, body=body, key=True))

    async def list_objects(
        self, prefix: str = "", *, recursive: bool = True, start_after: str = ""
    ) -> AsyncIterator[ObjectInfo]:
        query = {"prefix": prefix, "recursive": recursive, "startAfter": start_after}
        async with aclosing(self._rows("objects", ObjectInfo, query)) as rows:
            async for found in rows:
                yield found

    async def listdir(self, path: str = "/") -> AsyncIterator[DirEntry]:
        absolute("path", path)
        async with aclosing(self._rows("entries", DirEntry, {"path": path})) as rows:
            async for entry in rows:
                yield entry

    async def grep(
        self,
        pattern: str | bytes,
        *,
        directory: str = "/",
        recursive: bool = True,
        syntax: GrepSyntax = "rust",
        ignore_case: bool = False,
        word: bool = False,
        include: Iterable[str] = (),
        exclude: Iterable[str] = (),
        at: str | int | None = None,
        before: int = 0,
        after: int = 0,
        output: GrepOutput = "lines",
        binary: bool = True,
        max_results: int = 1000,
        max_line_bytes: int = 4096,
        max_duration_s: float = 30.0,
        concurrency: int | None = None,
    ) -> Grep:
        options: dict[str, Any] = {
            "directory": directory, "recursive": recursive, "syntax": syntax, "ignore_case": ignore_case,
            "word": word, "include": include, "exclude": exclude, "at": at, "before": before, "after": after,
            "output": output, "binary": binary, "max_results": max_results, "max_line_bytes": max_line_bytes,
            "max_duration_s": max_duration_s, "concurrency": concurrency,
        }  # fmt: skip
        for globs in ("include", "exclude"):
            if not isinstance(options[globs], str | bytes) and isinstance(options[globs], Iterable):
                options[globs] = tuple(options[globs])
        check_query(pattern, **options)
        return wire.heard(Grep, await self._call("POST", "grep", body=wire.grep_fields(pattern, options)))

    # -- history ---------------------------------------------------------------------------------------------

    async def checkpoint(self, name: str | None = None) -> Checkpoint:
        if name is not None:
            check_name("name", name)
        return wire.heard(Checkpoint, await self._call("POST", "checkpoints", body={"name": name}, key=True))

    async def checkpoints(self) -> AsyncIterator[Checkpoint]:
        async with aclosing(self._rows("checkpoints", Checkpoint, {})) as rows:
            async for checkpoint in rows:
                yield checkpoint

    async def branch(self, name: str, *, checkpoint: str | None = None) -> RemoteDisk:
        check_branch_name("name", name)
        if checkpoint is not None:
            check_name("checkpoint", checkpoint)
        made = await self._call("POST", "branches", body={"name": name, "checkpoint": checkpoint}, key=True)
        return RemoteDisk(self._http, self._runtime, wire.heard(wire.Handle, made))

    async def branches(self) -> AsyncIterator[str]:
        async with aclosing(self._http.rows(f"/disks/{self.id}/branches", {"line": self.line})) as rows:
            async for row in rows:
                yield str(row.get("name"))

    async def merge(self, branch: Disk | str, *, on_conflict: Literal["fail", "ours", "theirs"] = "fail") -> Commit:
        if on_conflict not in ("fail", "ours", "theirs"):
            raise Invalid.argument("on_conflict", on_conflict, 'one of "fail", "ours", "theirs"')
        if isinstance(branch, Disk) and branch.id != self.id:
            raise Invalid.argument("branch", repr(branch), f"a branch of the same disk, {self.name!r}")
        source = (branch.at or branch.branch_name) if isinstance(branch, Disk) else str(branch)
        body = {"branch": source, "fromLine": isinstance(branch, Disk), "onConflict": on_conflict}
        return wire.heard(Commit, await self._call("POST", "merge", body=body, key=True))

    async def log(self, *, limit: int | None = None, after: int = 0) -> AsyncIterator[Commit]:
        if limit is not None and limit < 1:
            raise Invalid.argument("limit", limit, "at least 1")
        if after < 0:
            raise Invalid.argument("after", after, "a sequence number of at least 0")
        async with aclosing(self._rows("log", Commit, {"limit": limit, "after": after})) as rows:
            async for commit in rows:
                yield commit

    async def diff(self, before: str | int, after: str | int | None = None) -> AsyncIterator[Change]:
        query = {
            f"{name}Seq" if isinstance(at, int) else name: at for name, at in (("before", before), ("after", after))
        }
        async with aclosing(self._rows("diff", Change, query)) as rows:
            async for change in rows:
                yield change

    # -- locks and care --------------------------------------------------------------------------------------

    async def locks(self) -> list[Lock]:
        return [wire.heard(Lock, lock) for lock in await self._call("GET", "locks")]

    async def break_lock(self, lock: Lock | str) -> None:
        await self._call("DELETE", "locks", {"id": lock.id if isinstance(lock, Lock) else lock}, key=True)

    async def gc(
        self, *, grace_s: float = 24 * 3600.0, keep_history_s: float = 30 * 24 * 3600.0, dry_run: bool = False
    ) -> GcReport:
        body = {"graceS": grace_s, "keepHistoryS": keep_history_s, "dryRun": dry_run}
        return wire.heard(GcReport, await self._call("POST", "gc", body=body, key=True))

    async def fsck(self, *, quick: bool = False) -> FsckReport:
        return wire.heard(FsckReport, await self._call("POST", "fsck", body={"quick": quick}))

    # -- inside ----------------------------------------------------------------------------------------------

    async def _call(
        self, method: Method, what: str, query: dict[str, object] | None = None, *, body: object = None,
        content: bytes | None = None, key: bool = False,
    ) -> Any:  # fmt: skip
        return await self._http.call(
            method, f"/disks/{self.id}/{what}", {"line": self.line, **(query or {})}, body=body, content=content,
            key=self._runtime.hex_id(32) if key else None,
        )  # fmt: skip

    async def _rows(self, what: str, kind: type[V], query: Mapping[str, object]) -> AsyncGenerator[V, None]:
        async with aclosing(self._http.rows(f"/disks/{self.id}/{what}", {"line": self.line, **query})) as rows:
            async for row in rows:
                yield wire.heard(kind, row)
