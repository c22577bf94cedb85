"""Share links: one file, for whoever has the link, until it expires.

Owns the signature. A link dies with the key that made it, and it is served as a download that no browser runs.
"""

from __future__ import annotations

import hmac
from urllib.parse import quote, urlencode

import anyio.to_thread
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from fanout.disk.disk import Point
from fanout.errors import Invalid, NotFound
from fanout.local_disk import LocalDisk
from fanout.server.answers import Refused, success
from fanout.server.archil.bodies import ShareBody
from fanout.server.archil.disks import line_id
from fanout.server.caller import CallerOf
from fanout.server.keys import ANONYMOUS, Keys, Principal
from fanout.server.state import State

__all__ = ["public", "router"]

router = APIRouter()
#: Routes that ask for no key: the link is one.
public = APIRouter()


@router.post("/disks/{disk}/share", summary="Make a link to one file")
async def share(disk: str, body: ShareBody, request: Request, caller: CallerOf) -> Response:
    """Make a link with which anybody can download one file, as it then is, until the link expires."""
    found = await caller.disk(disk)
    key = body.key.lstrip("/")
    if not key:
        raise Invalid.argument("key", body.key, "the path of a file")
    if await found.head_object(key) is None:
        raise NotFound(f"disk {found.name!r} has no file {key!r}")
    line = line_id(found.id, found.at or found.branch_name)
    expires = caller.state.runtime.now_ns() // 10**9 + body.expires_in
    by = caller.principal.id
    signature = await anyio.to_thread.run_sync(_signature, caller.state.keys, line, key, expires, by)
    query = urlencode({"expires": expires, "by": by, "signature": signature})
    path = f"api/shared/{quote(line, safe='@:')}/{quote(key)}"
    return success({"url": f"{request.base_url}{path}?{query}", "expiresIn": body.expires_in})


@public.get("/shared/{line}/{key:path}", summary="Download a shared file")
async def shared(
    line: str,
    key: str,
    request: Request,
    expires: int = Query(),
    by: str = Query(),
    signature: str = Query(),
) -> Response:
    """Download the file of a share link. 403 for one that is not ours, was altered, has expired or was revoked."""
    state: State = request.app.state.fanout
    right = await anyio.to_thread.run_sync(_signature, state.keys, line, key, expires, by)
    if not hmac.compare_digest(right.encode(), signature.encode("utf-8", "replace")):
        raise Refused(403, "denied", "this link is not one of this server's")
    if expires * 10**9 < state.runtime.now_ns():
        raise Refused(403, "denied", "this link has expired")
    principal = await _maker(state, by)
    disk = await state.disk(principal, line, "read")

    def pinned() -> LocalDisk:
        return LocalDisk(disk.core, Point(disk.point.branch, disk.point.state().seq), principal.author)

    now = await anyio.to_thread.run_sync(pinned)  # what is described is what is sent
    info = await now.head_object(key)
    if info is None:
        raise NotFound("the file of this link is gone")
    name = key.rpartition("/")[2]
    headers = {
        "Content-Length": str(info.size),
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}",
        "X-Content-Type-Options": "nosniff",
        "Content-Security-Policy": "sandbox; default-src 'none'",
        "Cache-Control": "private, no-store",
        "Referrer-Policy": "no-referrer",
    }
    return StreamingResponse(now.read_object(key), headers=headers, media_type="application/octet-stream")


async def _maker(state: State, key_id: str) -> Principal:
    """Return who made a link, for his rights are the link's."""
    if key_id == ANONYMOUS.id and state.anonymous is not None:
        return state.anonymous
    found = await state.keys.by_access_key(key_id)
    if found is None:
        raise Refused(403, "denied", "the key that made this link was removed or has expired")
    return found[0]


def _signature(keys: Keys, line: str, key: str, expires: int, by: str) -> str:
    signed = "\0".join((line, key, str(expires), by))
    return keys.derive("share", signed.encode("utf-8", "surrogateescape")).hex()
