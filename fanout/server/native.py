"""The native API: everything of `fanout.Fanout` and `fanout.Disk` over HTTP, for fanout's own client and others.

Owns the routes about disks, objects, history and care. Execs are native_exec.py's, trees native_trees.py's;
docs/REMOTE.md describes all of them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

import fanout
from fanout import wire
from fanout.local_disk import LocalDisk
from fanout.model import Value
from fanout.server import native_exec, native_trees
from fanout.server.caller import CallerOf
from fanout.server.native_calls import Answer, Call, Native, handle_of, told
from fanout.server.patient import Patient, Streaming
from fanout.server.state import State

__all__ = ["native_api"]

#: Up to here a body is read before it is stored, so that a retry can be told from another call.
_WHOLE_BYTES = 16 << 20
_SHARED_MODE = 0o644


def native_api(state: State) -> Native:
    """Return the routes below `wire.PREFIX`."""
    native = Native(APIRouter(prefix=wire.PREFIX, tags=["native"]), state.runtime)
    for add in (_disks, _objects, _listings, _history, _care, native_exec.add_routes, native_trees.add_routes):
        add(native)
    return native


def _disks(native: Native) -> None:
    async def about(request: Request, caller: CallerOf) -> Response:
        """What this server is."""
        answer = told(wire.About(version=fanout.__version__, api=1, instance=native.instance))
        answer.headers.update(native.headers)
        return answer

    async def disks(request: Request, caller: CallerOf) -> Response:
        """One line of JSON for each disk that the key may see, in order of names."""
        call = Call(request, caller, ("skip",), b"")

        async def handles() -> AsyncIterator[Value]:
            async for disk in caller.fanout.disks.list():
                if caller.principal.sees(disk.id):
                    yield handle_of(disk)

        return native.listing_of(handles(), call)

    async def create(request: Request, caller: CallerOf) -> Response:
        """Make a disk; only an administrator may."""

        async def work(call: Call) -> Answer:
            caller.principal.require_admin()
            return await caller.fanout.disks.create(call.body(wire.Creating).name)

        return native.once(Call(request, caller, (), await request.body()), work)

    async def open_disk(request: Request, caller: CallerOf) -> Response:
        """Open `name`, `name@branch`, `name@checkpoint`, or the same with an id."""
        call = Call(request, caller, ("name!",), b"")

        async def work() -> Response:
            return told(await caller.disk(call.text("name")))

        return Patient(work, native.headers)

    async def delete(disk: str, request: Request, caller: CallerOf) -> Response:
        """Delete a disk with all its history; only an administrator may."""

        async def work(call: Call) -> Answer:
            caller.principal.require_admin()
            await caller.fanout.disks.delete(disk)
            return None

        return native.once(Call(request, caller, (), b""), work)

    native.add("GET", "", about, about, "About this server", (), None)
    native.add("GET", "/disks", disks, disks, "List disks", ("skip",), None)
    native.add("POST", "/disks", create, create, "Create a disk", (), wire.Creating)
    native.add("GET", "/disk", open_disk, open_disk, "Open a disk, branch or checkpoint", ("name!",), None)
    native.add("DELETE", "/disks/{disk}", delete, delete, "Delete a disk", (), None)


def _objects(native: Native) -> None:
    async def get_object(disk: str, request: Request, caller: CallerOf) -> Response:
        """Bytes `start` up to `end` (exclusive) of a file as of commit `seq`: the newest, which the answer names."""
        call = Call(request, caller, read, b"")
        line = await (await call.line("read")).pinned(call.number("seq"))
        key, start, end = call.text("key"), call.number("start") or 0, call.number("end")
        info = await native_trees.file_info(line, key, start, end)
        size = max(min(info.size, info.size if end is None else end) - start, 0)

        async def chunks() -> AsyncGenerator[bytes, None]:
            parts: Any = line.read_object(key, start=start, end=end)
            async with aclosing(parts):
                async for part in parts:
                    yield part

        told = {"Content-Length": str(size), "ETag": f'"{info.etag}"', "Fanout-Seq": str(line.point.seq)}
        return Streaming(chunks(), "application/octet-stream", {**native.headers, **told}, beating=False)

    async def put_object(disk: str, request: Request, caller: CallerOf) -> Response:
        """Store the body, of any length, as one file in one commit. `mode`: permission bits, as a decimal number."""
        length = request.headers.get("content-length", "")
        whole = length.isdigit() and int(length) <= _WHOLE_BYTES

        async def store(call: Call) -> Answer:
            line, mode = await call.line("write"), call.number("mode")
            content = call.content if whole else request.stream()
            return await line.put_object(call.text("key"), content, mode=_SHARED_MODE if mode is None else mode)

        call = Call(request, caller, put, await request.body() if whole else b"")
        if whole:
            return native.once(call, store)
        native.key_of(request)
        return told(await store(call))

    read, put = ("line", "key!", "start", "end", "seq"), ("line", "key!", "mode")
    native.add("GET", "/disks/{disk}/object", get_object, get_object, "Read a file", read, None)
    binary = "application/octet-stream"
    native.add("PUT", "/disks/{disk}/object", put_object, put_object, "Store a file", put, None, binary)

    @native.write("/disks/{disk}/object", "Remove a file or directory", "key!", "recursive", method="DELETE")
    async def delete_object(disk: LocalDisk, call: Call) -> Answer:
        await disk.delete_object(call.text("key"), recursive=call.truth("recursive"))
        return None

    @native.read("/disks/{disk}/head", "Describe a file", "key!")
    async def head_object(disk: LocalDisk, call: Call) -> Answer:
        return await disk.head_object(call.text("key"))

    @native.read("/disks/{disk}/stat", "Describe whatever has a path", "path!")
    async def stat(disk: LocalDisk, call: Call) -> Answer:
        return await disk.stat(call.text("path"))

    @native.write("/disks/{disk}/move", "Rename a file or directory", body=wire.Moving)
    async def move(disk: LocalDisk, call: Call) -> Answer:
        body = call.body(wire.Moving)
        return await disk.move(body.source, body.target, replace=body.replace)

    @native.write("/disks/{disk}/copy", "Copy a file or directory, moving no data", body=wire.Moving)
    async def copy(disk: LocalDisk, call: Call) -> Answer:
        body = call.body(wire.Moving)
        return await disk.copy(body.source, body.target, replace=body.replace)


def _listings(native: Native) -> None:
    @native.rows("/disks/{disk}/objects", "List files by prefix", "prefix", "recursive", "startAfter")
    def list_objects(disk: LocalDisk, call: Call) -> AsyncIterator[Value | str]:
        recursive = call.truth("recursive", True)
        return disk.list_objects(call.text("prefix"), recursive=recursive, start_after=call.text("startAfter"))

    @native.rows("/disks/{disk}/entries", "List a directory", "path")
    def listdir(disk: LocalDisk, call: Call) -> AsyncIterator[Value | str]:
        return disk.listdir(call.text("path", "/"))

    @native.rows("/disks/{disk}/log", "List commits, newest first", "limit", "after")
    def log(disk: LocalDisk, call: Call) -> AsyncIterator[Value | str]:
        return disk.log(limit=call.number("limit"), after=call.number("after") or 0)

    @native.rows(
        "/disks/{disk}/diff", "List what differs between two points", "before", "beforeSeq", "after", "afterSeq"
    )
    def diff(disk: LocalDisk, call: Call) -> AsyncIterator[Value | str]:
        before, after = call.number("beforeSeq"), call.number("afterSeq")
        return disk.diff(
            call.text("before") if before is None else before, call.perhaps("after") if after is None else after
        )

    @native.rows("/disks/{disk}/checkpoints", "List checkpoints")
    def checkpoints(disk: LocalDisk, call: Call) -> AsyncIterator[Value | str]:
        return disk.checkpoints()

    @native.rows("/disks/{disk}/branches", "List branches")
    def branches(disk: LocalDisk, call: Call) -> AsyncIterator[Value | str]:
        return disk.branches()


def _history(native: Native) -> None:
    @native.write("/disks/{disk}/checkpoints", "Name a line as it is now", body=wire.Checkpointing)
    async def checkpoint(disk: LocalDisk, call: Call) -> Answer:
        return await disk.checkpoint(call.body(wire.Checkpointing).name)

    @native.write("/disks/{disk}/branches", "Start a branch", body=wire.Branching)
    async def branch(disk: LocalDisk, call: Call) -> Answer:
        body = call.body(wire.Branching)
        return await disk.branch(body.name, checkpoint=body.checkpoint)

    @native.write("/disks/{disk}/merge", "Bring another branch's changes into this one", body=wire.Merging)
    async def merge(disk: LocalDisk, call: Call) -> Answer:
        body = call.body(wire.Merging)
        source = await call.caller.disk(f"{disk.id}@{body.branch}") if body.from_line else body.branch
        return await disk.merge(source, on_conflict=body.on_conflict)


def _care(native: Native) -> None:
    @native.read("/disks/{disk}/locks", "Locks that are held")
    async def locks(disk: LocalDisk, call: Call) -> Answer:
        return list(await disk.locks())

    @native.write("/disks/{disk}/locks", "Take a lock from its holder", "id!", method="DELETE")
    async def break_lock(disk: LocalDisk, call: Call) -> Answer:
        await disk.break_lock(call.text("id"))
        return None

    @native.write("/disks/{disk}/gc", "Delete what nothing refers to", body=wire.Collecting)
    async def gc(disk: LocalDisk, call: Call) -> Answer:
        return await disk.gc(**call.body(wire.Collecting).model_dump(exclude_none=True))

    @native.read("/disks/{disk}/grep", "Search a line", method="POST", body=wire.Grepping)
    async def grep(disk: LocalDisk, call: Call) -> Answer:
        options = call.body(wire.Grepping).options()
        with call.caller.state.exec():
            return await disk.grep(**options)

    @native.read("/disks/{disk}/fsck", "Verify a disk", method="POST", body=wire.Verifying)
    async def fsck(disk: LocalDisk, call: Call) -> Answer:
        return await disk.fsck(quick=call.body(wire.Verifying).quick)
