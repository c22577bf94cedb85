"""Execs, searches, their results and errors as JSON, both ways: all of it arrives as it was.

Owns what becomes of exact bytes and of exceptions on the way. Pure.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from fanout import errors
from fanout.errors import (
    Busy,
    CommandFailed,
    Conflict,
    Denied,
    Exists,
    FanoutError,
    Invalid,
    Limit,
    NotFound,
    Unavailable,
)
from fanout.model import Event, Finished, Mount, Output, Run, Started
from fanout.wire.values import Executing, Grepping, heard, load_bytes, plain, store_bytes, value_of

__all__ = [
    "error_fields",
    "error_of",
    "event_fields",
    "event_of",
    "exec_call",
    "exec_fields",
    "grep_fields",
    "run_fields",
    "run_of",
]

# -- errors ----------------------------------------------------------------------------------------------------------

_CLASSES: dict[str, type[FanoutError]] = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, FanoutError) and kind.__module__ == errors.__name__
}
#: What an answer means that says no code we know. All else is the server's own trouble.
_BY_STATUS: Mapping[int, type[FanoutError]] = {
    400: Invalid, 401: Denied, 403: Denied, 404: NotFound, 405: Invalid, 409: Exists, 413: Limit, 422: Invalid,
    429: Busy, 500: FanoutError, 501: Invalid, 502: Unavailable, 503: Unavailable, 504: Unavailable,
}  # fmt: skip


def error_fields(error: FanoutError) -> dict[str, Any]:
    """Return an error's answer: the envelope with its code, its message and all it carries."""
    fields: dict[str, Any] = {"success": False, "error": str(error), "code": error.code}
    if isinstance(error, Conflict):
        fields |= _conflict_fields(error)
    run = getattr(error, "run", None)
    if isinstance(run, Run):
        fields["run"] = run_fields(run)
    notes = getattr(error, "__notes__", ())
    if notes:
        fields["notes"] = list(notes)
    return fields


def error_of(fields: Mapping[str, Any], status: int) -> FanoutError:
    """Return the error that an answer stands for; one of an unknown code is what its status says."""
    message = str(fields.get("error") or f"HTTP {status}")
    kind = _CLASSES.get(str(fields.get("code"))) or _BY_STATUS.get(status, Unavailable if status >= 500 else Invalid)
    run = run_of(fields["run"]) if isinstance(fields.get("run"), Mapping) else None
    error: FanoutError
    if kind is Conflict:
        error = _conflict_of(fields)
    elif kind is CommandFailed:
        error = CommandFailed(message, run)
    else:
        error = kind(message)
    if run is not None:
        error.run = run  # type: ignore[attr-defined]
    for note in fields.get("notes", ()):
        error.add_note(str(note))
    return error


def _conflict_fields(conflict: Conflict) -> dict[str, Any]:
    return {"paths": list(conflict.paths), "rescueBranch": conflict.rescue_branch, "disk": conflict.disk}


def _conflict_of(fields: Mapping[str, Any]) -> Conflict:
    return Conflict(tuple(fields.get("paths", ())), fields.get("rescueBranch"), fields.get("disk") or "")


# -- execs -----------------------------------------------------------------------------------------------------------

#: Options of an exec that pass as they are, by their name on the wire.
_OPTIONS: Mapping[str, str] = {
    "cwd": "cwd", "env": "env", "timeoutS": "timeout_s", "network": "network", "commit": "commit", "cpus": "cpus",
    "memoryMib": "memory_mib",
}  # fmt: skip
_STDIN_AS_TEXT = 64 << 10


def exec_fields(command: str, mounts: Mapping[str, Mount], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of an exec. `options` are those of `Fanout.exec`, checked; `stdin` is bytes."""
    fields: dict[str, Any] = {"command": command, "disks": {name: plain(mount) for name, mount in mounts.items()}}
    for name, option in _OPTIONS.items():
        if option in options:
            fields[name] = options[option]
    stdin = options.get("stdin") or b""
    if len(stdin) > _STDIN_AS_TEXT:  # escapes can make text six times as long
        fields["stdinBase64"] = base64.b64encode(stdin).decode("ascii")
    elif stdin:
        store_bytes(fields, "stdin", stdin)
    return fields


def exec_call(fields: object) -> tuple[str, Mapping[str, Mount], dict[str, Any]]:
    """Return the command, mounts and other options of an exec's body; `Invalid` for what makes none."""
    given = value_of(Executing, fields)
    options: dict[str, Any] = {option: getattr(given, option) for option in _OPTIONS.values()}
    options["stdin"] = load_bytes({"stdin": given.stdin, "stdinBase64": given.stdin_base64}, "stdin")
    return given.command, given.disks, options


def grep_fields(pattern: str | bytes, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a search, its arguments checked."""
    fields = plain(Grepping(**options))
    if isinstance(pattern, str):
        return {**fields, "pattern": pattern}
    del fields["pattern"], fields["patternBase64"]
    store_bytes(fields, "pattern", bytes(pattern))
    return fields


def run_fields(run: Run) -> dict[str, Any]:
    """Return a run as JSON has it, its output exact."""
    fields = run.model_dump(by_alias=True, exclude={"stdout_bytes", "stderr_bytes"})
    store_bytes(fields, "stdout", run.stdout_bytes)
    store_bytes(fields, "stderr", run.stderr_bytes)
    return fields


def run_of(fields: Mapping[str, Any]) -> Run:
    """Return the run that `run_fields` described."""
    values = {name: value for name, value in fields.items() if not name.startswith(("stdout", "stderr"))}
    for stream in ("stdout", "stderr"):
        values[f"{stream}Bytes"] = load_bytes(fields, stream)
        for detail in ("Truncated", "Total"):
            values[stream + detail] = fields.get(stream + detail)
    if values.get("conflict") is not None:
        values["conflict"] = _conflict_of(values["conflict"])
    values["commits"] = {
        name: {**commit, "conflict": _conflict_of(commit["conflict"])} if commit.get("conflict") else commit
        for name, commit in fields.get("commits", {}).items()
    }
    return heard(Run, values)


def event_fields(event: Event) -> dict[str, Any]:
    """Return one line of a stream."""
    if isinstance(event, Output):
        # The text cannot be told from this chunk's bytes: characters are never split.
        fields: dict[str, Any] = {"event": "output", "stream": event.stream}
        store_bytes(fields, "data", event.data)
        if fields.get("data") != event.text:
            fields["text"] = event.text
        return fields
    if isinstance(event, Started):
        return {"event": "started", **plain(event)}
    return {"event": "finished", "run": run_fields(event.run)}


def event_of(fields: Mapping[str, Any]) -> Event:
    """Return the event that a line describes; a line that is an error raises it."""
    kind = fields.get("event")
    if kind == "output":
        data = load_bytes(fields, "data")
        text = fields.get("text", fields.get("data", ""))
        return heard(Output, {"stream": fields.get("stream"), "data": data, "text": text})
    if kind == "started":
        return heard(Started, {name: value for name, value in fields.items() if name != "event"})
    if kind == "finished":
        return Finished(run=run_of(fields["run"]))
    raise error_of(fields, 500)
