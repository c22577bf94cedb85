"""Who may use a disk, in the dialect: its tokens, account-level tokens, addresses, and delegations (our locks).

Owns how these map to keys and locks, which do the work.
"""

from __future__ import annotations

import hashlib
from functools import partial

import anyio.to_thread
from fastapi import APIRouter, Query, Response

from fanout.errors import Invalid, NotFound
from fanout.format.key import KeyRecord
from fanout.model import Lock
from fanout.server.answers import Refused, success
from fanout.server.archil.bodies import Addresses, RevokeBody, TokenBody, UserBody
from fanout.server.archil.disks import NO_ALLOWED_IPS, timestamp
from fanout.server.caller import CallerOf

__all__ = ["router"]

router = APIRouter()


@router.post("/disks/{disk}/users", status_code=201, summary="Make a token for a disk")
async def add_user(disk: str, body: UserBody, caller: CallerOf) -> Response:
    """Make a key that may read and write this disk and nothing else. The token is shown here only."""
    found = await caller.disk(disk)
    caller.principal.require_admin()
    if body.type != "token":
        raise Refused(501, "not_implemented", f"type {body.type[:40]!r}: this server knows users of type 'token' only")
    make = partial(caller.state.keys.create, nickname=body.nickname, right="write", disks=[found.id])
    made = await anyio.to_thread.run_sync(make)
    return success(
        {"type": "token", "token": made.token, "identifier": made.record.id, **_told(made.record)}, status=201
    )


@router.delete("/disks/{disk}/users/{kind}", summary="Remove a token of a disk")
async def remove_user(disk: str, kind: str, caller: CallerOf, identifier: str = Query()) -> Response:
    """Remove a key that was made for this disk."""
    found = await caller.disk(disk)
    caller.principal.require_admin()
    keys = caller.state.keys
    record = await anyio.to_thread.run_sync(keys.get, identifier)
    if kind != "token" or record.disks != (found.id,):
        raise NotFound(f"disk {found.name!r} has no {kind} {identifier!r}")
    await anyio.to_thread.run_sync(keys.delete, identifier)
    return success()


@router.get("/tokens", summary="List account-level tokens")
async def list_tokens(caller: CallerOf, limit: int = Query(1000, ge=1, le=1000), cursor: str | None = None) -> Response:
    """List all keys, oldest first; the tokens themselves are never shown again."""
    caller.principal.require_admin()
    records = await anyio.to_thread.run_sync(caller.state.keys.list)
    start = 0
    if cursor is not None:
        start = next((number + 1 for number, record in enumerate(records) if record.id == cursor), -1)
        if start < 0:
            raise Invalid.argument("cursor", cursor, "what an earlier page gave as nextCursor")
    page = records[start : start + limit]
    more = page[-1].id if start + limit < len(records) else None
    return success({"tokens": [{"id": record.id, **_told(record)} for record in page]}, nextCursor=more)


@router.post("/tokens", status_code=201, summary="Make an account-level token")
async def create_token(body: TokenBody, caller: CallerOf) -> Response:
    """Make an administrator's key. The token is shown here only."""
    caller.principal.require_admin()
    make = partial(caller.state.keys.create, nickname=body.name, description=body.description or "", right="admin")
    made = await anyio.to_thread.run_sync(make)
    return success({"id": made.record.id, "token": made.token, **_told(made.record)}, status=201)


@router.delete("/tokens/{key_id}", summary="Remove a token")
async def delete_token(key_id: str, caller: CallerOf) -> Response:
    """Remove a key. Other servers on the same bucket honour it for some seconds more."""
    caller.principal.require_admin()
    await anyio.to_thread.run_sync(caller.state.keys.delete, key_id)
    return success()


@router.get("/disks/{disk}/allowed-ips", summary="Addresses a disk is limited to: none")
async def get_allowed_ips(disk: str, caller: CallerOf) -> Response:
    await caller.disk(disk)
    return success({"allowedIps": []})


@router.put("/disks/{disk}/allowed-ips", summary="Limit a disk to addresses: only an empty list is taken")
async def set_allowed_ips(disk: str, body: Addresses, caller: CallerOf) -> Response:
    await caller.disk(disk)
    caller.principal.require_admin()
    if body.allowed_ips:
        raise Refused(501, "not_implemented", NO_ALLOWED_IPS)
    return success({"allowedIps": []})


@router.get("/disks/{disk}/delegations", summary="List checkouts that are held")
async def list_delegations(disk: str, caller: CallerOf) -> Response:
    """List the paths that running execs hold locks on. `isOrphaned`: the holder no longer renews its lock."""
    found = await caller.disk(disk)
    now_ns = caller.state.runtime.now_ns()
    delegations = [
        {
            "clientId": lock.exec_id,
            "inodeId": _inode(lock, path),
            "path": path,
            "isPending": False,
            "isOrphaned": lock.expires.timestamp() * 1e9 < now_ns,
        }
        for lock in await found.locks()
        for path in lock.paths
    ]
    return success({"delegations": delegations})


@router.post("/disks/{disk}/revoke-delegation", summary="Take a checkout from its holder")
async def revoke_delegation(disk: str, body: RevokeBody, caller: CallerOf) -> Response:
    """Break the lock that a delegation belongs to, with all its paths; its holder's commit fails with LeaseLost."""
    found = await caller.disk(disk, "write")
    for lock in await found.locks():
        if lock.exec_id == body.client_id and any(_inode(lock, path) == body.inode_id for path in lock.paths):
            await found.break_lock(lock)
            return success()
    raise NotFound(f"disk {found.name!r} has no such delegation; it may have been released")


def _inode(lock: Lock, path: str) -> int:
    """Return a number that stands for one path of one lock (53 bits: JSON numbers are floats to many)."""
    return int.from_bytes(hashlib.sha256(f"{lock.id}\0{path}".encode("utf-8", "surrogateescape")).digest()[:6])


def _told(record: KeyRecord) -> dict[str, object]:
    return {
        "name": record.nickname,
        "nickname": record.nickname,
        "description": record.description,
        "right": record.right,
        "disks": None if record.disks is None else list(record.disks),
        "createdAt": timestamp(record.created_ns),
        "expiresAt": timestamp(record.expires_ns) if record.expires_ns else None,
    }
