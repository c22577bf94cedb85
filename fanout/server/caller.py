"""Who makes a request, for routes: the state and the principal that the application put into the request's scope.

Owns reading credentials off a request. Whether they are right is keys.py's to say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request, Security
from fastapi.security import APIKeyHeader
from starlette.types import Scope

from fanout.api import Fanout
from fanout.local_disk import LocalDisk
from fanout.server.answers import Refused
from fanout.server.keys import Principal, Right
from fanout.server.state import State

__all__ = ["Caller", "CallerOf", "principal_of"]


@dataclass(frozen=True, slots=True)
class Caller:
    """What a route works with. `fanout` is the connection in the caller's name."""

    state: State
    principal: Principal

    @property
    def fanout(self) -> Fanout:
        return self.state.acting_as(self.principal)

    async def disk(self, spec: str, right: Right = "read") -> LocalDisk:
        """Open a disk the caller has `right` on; see `State.disk`."""
        return await self.state.disk(self.principal, spec, right)


async def principal_of(state: State, scope: Scope) -> Principal:
    """Return who `Authorization: key-…` (or `Bearer key-…`) names; `Refused` with 401 for nobody."""
    if state.anonymous is not None:
        return state.anonymous
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    headers = {"WWW-Authenticate": 'Bearer realm="fanout"'}
    if not given:
        raise Refused(401, "unauthorized", "send a key: `Authorization: key-…` (fanout keys create)", headers)
    token = given[0].decode("latin-1").strip().removeprefix("Bearer ").strip()
    principal = await state.keys.by_token(token)
    if principal is None:
        raise Refused(401, "unauthorized", "this key is unknown, removed or expired", headers)
    return principal


_header = APIKeyHeader(name="Authorization", description="`key-…`, from `fanout keys create`", auto_error=False)


async def _caller(request: Request, _: Annotated[str | None, Security(_header)]) -> Caller:
    caller: Caller = request.scope["fanout.caller"]
    return caller


#: A route's parameter: `async def route(caller: CallerOf) -> Response`.
CallerOf = Annotated[Caller, Depends(_caller)]
