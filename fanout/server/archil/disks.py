"""Disks of the dialect: list, create, describe, delete.

Owns how a disk is described. A branch's or checkpoint's id is the disk's with `@name` after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice

import anyio
import anyio.to_thread
from fastapi import APIRouter, Query, Response

from fanout.disk.catalogue import Catalogue
from fanout.disk.merge import Intent, Policy
from fanout.errors import Exists, NotFound
from fanout.format.tree import Node, directory
from fanout.local_disk import LocalDisk
from fanout.run.describe import when
from fanout.server.answers import Refused, success
from fanout.server.archil.bodies import DiskBody, RootAttributes
from fanout.server.caller import Caller, CallerOf

__all__ = ["line_id", "router", "timestamp"]

#: The most disks of one page.
PAGE = 100
#: How many records are fetched from the store at once for a page.
_AT_ONCE = 16
_DEFAULT_ROOT_MODE = 0o755
router = APIRouter()


@router.get("/disks", summary="List disks")
async def list_disks(
    caller: CallerOf,
    limit: int = Query(PAGE, ge=1, description="Page size; at most 100 are given."),
    cursor: str = "",
    name: str | None = None,
) -> Response:
    """List disks in order of names. `nextCursor` goes on; `name` finds the one of that name."""
    if name is not None:
        try:
            found = [await caller.disk(name)] if "@" not in name and ":" not in name else []
        except NotFound:
            found = []
        return success([described(disk) for disk in found])
    if caller.principal.disks is not None:
        return await _own(caller, caller.principal.disks, min(limit, PAGE), cursor)
    catalogue = caller.state.fanout.catalogue
    visible: list[LocalDisk] = []
    last, more, limit = cursor, True, min(limit, PAGE)
    while more and len(visible) < limit:
        batch = partial(_batch, catalogue, last, limit - len(visible))
        names = await anyio.to_thread.run_sync(batch)
        more = len(names) == limit - len(visible)
        last = names[-1] if names else last
        visible += await _open(caller, names)
    return success([described(disk) for disk in visible], nextCursor=last if more and last else None)


async def _own(caller: Caller, ids: Iterable[str], limit: int, cursor: str) -> Response:
    """Answer with a page of the disks that a key is for: those alone are looked at."""
    disks = sorted(await _open(caller, list(ids)), key=lambda disk: disk.name)
    left = [disk for disk in disks if disk.name > cursor]
    page = left[:limit]
    return success([described(disk) for disk in page], nextCursor=page[-1].name if len(left) > limit else None)


@router.post("/disks", status_code=201, summary="Create a disk")
async def create_disk(body: DiskBody, caller: CallerOf) -> Response:
    """Create a disk and a key for it alone, which is shown here only. The same call again: 200, without a key."""
    caller.principal.require_admin()
    if body.mounts:
        raise Refused(501, "not_implemented", "mounts: this server keeps disks in its own store only")
    if body.allowed_ips:
        raise Refused(501, "not_implemented", NO_ALLOWED_IPS)
    try:
        await caller.fanout.disks.create(body.name)
    except Exists:
        disk = await caller.disk(body.name)
        wanted = body.root_attrs
        if wanted is not None and await anyio.to_thread.run_sync(_root, disk) != _dressed(wanted, disk):
            raise Exists(f"there is a disk called {body.name!r} already, with another root directory") from None
        return success({"diskId": disk.id, "authorizedUsers": []})
    disk = await caller.disk(body.name)
    if body.root_attrs is not None:
        await anyio.to_thread.run_sync(_dress_root, disk, body.root_attrs, caller.principal.author)
    make = partial(caller.state.keys.create, nickname=f"{body.name} token"[:256], right="write", disks=[disk.id])
    made = await anyio.to_thread.run_sync(make)
    user = {
        "type": "token", "token": made.token, "identifier": made.record.id, "nickname": made.record.nickname,
        "createdAt": timestamp(made.record.created_ns),
    }  # fmt: skip
    return success({"diskId": disk.id, "authorizedUsers": [user]}, status=201)


@router.get("/disks/{disk}", summary="Describe a disk")
async def get_disk(disk: str, caller: CallerOf) -> Response:
    """Describe a disk, or a branch of it (`dsk-…@branch`)."""
    return success(described(await caller.disk(disk)))


@router.delete("/disks/{disk}", summary="Delete a disk")
async def delete_disk(disk: str, caller: CallerOf) -> Response:
    """Delete a disk with all its branches and history, and the keys that were for it alone."""
    found = await caller.disk(disk)
    caller.principal.require_admin()
    if "@" in disk:
        raise Refused(501, "not_implemented", "branches and checkpoints stay as long as their disk does")
    await caller.fanout.disks.delete(found.id)
    await anyio.to_thread.run_sync(caller.state.keys.forget_disk, found.id)
    return success()


NO_ALLOWED_IPS = (
    "allowedIps: this server does not look at addresses, which a proxy before it would hide; "
    "restrict them in front of it (an empty list is taken)"
)


def described(disk: LocalDisk) -> dict[str, object]:
    """Return a disk as the dialect has it."""
    line = disk.at or (disk.branch_name if disk.branch_name != "main" else "")
    return {
        "id": line_id(disk.id, line),
        "name": f"{disk.name}@{line}" if line else disk.name,
        "organization": "fanout",
        "status": "available",
        "provider": "fanout",
        "region": "local",
        "createdAt": timestamp(disk.core.record.created_ns),
        "allowedIps": [],
        "mounts": [],
    }


def line_id(disk_id: str, line: str) -> str:
    """Return what a branch or checkpoint is called wherever a disk's id is asked for; it has no `/` in it."""
    return f"{disk_id}@{line.replace('/', ':')}" if line and line != "main" else disk_id


def timestamp(ns: int) -> str:
    """Return nanoseconds since the epoch as the dialect has times: ISO 8601 in UTC, milliseconds."""
    return when(ns).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _batch(catalogue: Catalogue, after: str, count: int) -> list[str]:
    return list(islice(catalogue.names(after), count))


async def _open(caller: Caller, names: Sequence[str]) -> list[LocalDisk]:
    """Open disks, several at a time; those deleted meanwhile are left out."""
    found: dict[str, LocalDisk] = {}
    gate = anyio.Semaphore(_AT_ONCE)

    async def one(name: str) -> None:
        async with gate:
            try:
                found[name] = await caller.state.fanout.disks.get(name)
            except NotFound:
                pass

    async with anyio.create_task_group() as group:
        for name in names:
            group.start_soon(one, name)
    return [found[name] for name in names if name in found]


def _root(disk: LocalDisk) -> tuple[int, int, int]:
    node = disk.point.state().get(b"")
    return (node.uid, node.gid, node.mode) if node is not None else (0, 0, _DEFAULT_ROOT_MODE)


def _dressed(wanted: RootAttributes, disk: LocalDisk) -> tuple[int, int, int]:
    mode = _DEFAULT_ROOT_MODE if wanted.mode is None else wanted.mode
    return wanted.uid or 0, wanted.gid or 0, mode


def _dress_root(disk: LocalDisk, wanted: RootAttributes, author: str) -> None:
    uid, gid, mode = _dressed(wanted, disk)
    state = disk.point.state()
    old: Node = state.get(b"") or directory()
    node = Node(old.kind, mode, old.mtime_ns, uid=uid, gid=gid, xattrs=old.xattrs)
    intent = Intent(b"", old, node)
    disk.core.apply(
        disk.point, [intent], policy=Policy.LAST_WINS, base_seq=state.seq, author=author, message="root directory"
    )
