"""All routes of the dialect in one router, and those that are not there yet.

Owns the list.
"""

from __future__ import annotations

from fastapi import APIRouter, Response

from fanout.server.answers import Refused
from fanout.server.archil import access, branches, disks, execs, share
from fanout.server.archil.bodies import ErrorAnswer
from fanout.server.caller import CallerOf

__all__ = ["public", "router"]

_ERRORS: dict[int | str, dict[str, object]] = {
    status: {"model": ErrorAnswer} for status in (400, 401, 403, 404, 405, 409, 413, 422, 429, 500, 501, 503, 504)
}
#: What asks for no key.
public = APIRouter(prefix="/api", tags=["archil"], responses=_ERRORS)
public.include_router(share.public)
router = APIRouter(prefix="/api", tags=["archil"], responses=_ERRORS)
for _part in (disks, execs, branches, access, share):
    router.include_router(_part.router)

_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


@router.api_route("/sandboxes", methods=_METHODS, include_in_schema=False)
@router.api_route("/sandboxes/{rest:path}", methods=_METHODS, include_in_schema=False)
async def sandboxes(caller: CallerOf, rest: str = "") -> Response:
    raise Refused(501, "not_implemented", "sandboxes: this server runs single commands only; use exec")


@router.api_route("/images", methods=_METHODS, include_in_schema=False)
@router.api_route("/images/{rest:path}", methods=_METHODS, include_in_schema=False)
async def images(caller: CallerOf, rest: str = "") -> Response:
    raise Refused(501, "not_implemented", "images: commands of this server see the system of its host")
