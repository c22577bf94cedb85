"""What a REST call is answered with: the envelope, and every error as a status, a code and one sentence.

Owns the mapping from exceptions to answers. Nothing of an unexpected one reaches a caller; observed.py logs it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from fanout import wire
from fanout.errors import TABLE, FanoutError
from fanout.server.state import Draining, Saturated

__all__ = ["BUSY_RETRY_S", "EXPECTED", "Refused", "answer_of", "broken", "failure", "install", "success"]

#: Retry-After of errors that pass by themselves, in seconds.
BUSY_RETRY_S = 1
#: What a route may raise; all else is a mistake of ours.
EXPECTED = (FanoutError, HTTPException, RequestValidationError, Saturated, Draining)
_CODES = {401: "unauthorized", 404: "not_found", 405: "method_not_allowed", 413: "limit"}


class Refused(HTTPException):
    """A request that is answered with this status and code before anything is done."""

    def __init__(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status, message, headers)
        self.code = code


def success(data: object = None, *, status: int = 200, **top: object) -> Response:
    """Answer with `{"success": true, "data": …}` and what else belongs beside `data`."""
    return _json({"success": True, "data": data, **top}, status)


def failure(
    status: int, code: str, message: str, headers: Mapping[str, str] | None = None, *, data: object = None
) -> Response:
    """Answer with `{"success": false, "error": …, "code": …}`, and `data` where there is some all the same."""
    told = {} if data is None else {"data": data}
    return _json({"success": False, "error": message, "code": code, **told}, status, headers)


def answer_of(error: Exception) -> Response:
    """Return what a request that ended with `error` is answered."""
    if isinstance(error, Refused):
        return failure(error.status_code, error.code, error.detail, error.headers)
    if isinstance(error, Saturated):
        return failure(429, "no_capacity", str(error), {"Retry-After": str(error.retry_after_s)})
    if isinstance(error, Draining):
        return failure(503, "runtime_retryable", str(error), {"Retry-After": str(error.retry_after_s)})
    if isinstance(error, FanoutError):
        meaning = TABLE[error.code]
        headers = {"Retry-After": str(BUSY_RETRY_S)} if meaning.retry else {}
        return _json(wire.error_fields(error), meaning.http, headers)
    if isinstance(error, RequestValidationError):
        return failure(400, "invalid", _what_is_invalid(error))
    if isinstance(error, HTTPException):
        code = _CODES.get(error.status_code, "invalid")
        return failure(error.status_code, code, str(error.detail), error.headers)
    return failure(500, "internal", "an internal error; the server's log has it under the X-Request-Id of this answer")


def install(app: FastAPI) -> None:
    """Have `app` answer every error as above."""

    async def handle(request: Request, error: Exception) -> Response:
        return answer_of(error)

    for kind in (Saturated, Draining, FanoutError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, handle)


async def broken(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request that ended with an unexpected error."""
    await answer_of(RuntimeError())(scope, receive, send)


def _what_is_invalid(error: RequestValidationError) -> str:
    """Name the first thing that is wrong, and what was expected; never more of the body than that."""
    first = max(error.errors(), key=lambda each: len(each["loc"]))  # of the forms a value may have, the one meant
    if first["type"] == "json_invalid":
        return f"the body is no JSON: {first.get('ctx', {}).get('error', 'malformed')}"
    where = ".".join(str(part) for part in first["loc"] if part != "body") or "body"
    if first["type"] == "extra_forbidden":
        return f"{where}: there is no such field"
    return f"{where}: {first['msg']}"


def _json(value: Mapping[str, Any], status: int, headers: Mapping[str, str] | None = None) -> Response:
    # ASCII: bytes of names that are not UTF-8 pass as escaped surrogates.
    return Response(json.dumps(value), status, headers, "application/json")
