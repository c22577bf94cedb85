"""The native API's language: values, errors, calls and trees as JSON or frames, both ways.

Owns names, framing and limits that server and client share; docs/REMOTE.md describes them. Pure: no I/O, no clock.
JSON is ASCII; bytes of names that are not UTF-8 are escaped surrogates, as in `os.fsdecode`.
"""

from __future__ import annotations

import base64
import binascii
import copy
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar, get_args
from urllib.parse import parse_qsl, quote_from_bytes

import msgspec
from pydantic import ValidationError

from fanout import errors
from fanout.errors import (
    Busy,
    CommandFailed,
    Conflict,
    Corrupt,
    Denied,
    Exists,
    FanoutError,
    Invalid,
    Limit,
    NotFound,
    Unavailable,
)
from fanout.format.tree import Node
from fanout.model import CommitPolicy, Event, Finished, GrepOutput, GrepSyntax, Mount, Output, Run, Started, Value

__all__ = [
    "AUTOMATIC",
    "BEAT",
    "HEARTBEAT_S",
    "IDEMPOTENCY",
    "INSTANCE",
    "MAX_FRAME_BYTES",
    "MAX_PATHS",
    "MAX_PATHS_BYTES",
    "NDJSON",
    "PREFIX",
    "RETRY_OF",
    "About",
    "Branching",
    "Checkpointing",
    "Collecting",
    "Creating",
    "Executing",
    "Frames",
    "Grepping",
    "Handle",
    "Header",
    "Looking",
    "Merging",
    "Moving",
    "Verifying",
    "batches",
    "decode_header",
    "decode_looking",
    "decode_nodes",
    "decode_paths",
    "encode_header",
    "encode_nodes",
    "encode_paths",
    "error_fields",
    "error_of",
    "event_fields",
    "event_of",
    "exec_call",
    "exec_fields",
    "frame",
    "grep_fields",
    "heard",
    "json_bytes",
    "json_of",
    "parse_query",
    "plain",
    "query",
    "run_fields",
    "run_of",
    "takes_long_bodies",
    "value_of",
]

#: Where the native API is on a server. A change that old clients would not understand gets another number.
PREFIX = "/api/v1"
#: Seconds after which whoever has nothing to say yet says so.
HEARTBEAT_S = 10.0
#: What is sent then: white space before a JSON document, an empty line among lines, an empty frame among frames.
BEAT = b"\n"
NDJSON = "application/x-ndjson"
#: Names a call, so that repeating it gives the first one's result.
IDEMPOTENCY = "Idempotency-Key"
#: Keys that a client makes up begin so: the server process remembers what came of them, the store does not.
AUTOMATIC = "auto-"
#: Of answers: the server process that gave it. `RETRY_OF`, of requests: this may have reached that process before.
INSTANCE = "Fanout-Instance"
RETRY_OF = "Fanout-Retry-Of"
#: The longest frame, and so the largest inline pack or batch of nodes: that of one file of about 4 TiB.
MAX_FRAME_BYTES = 64 << 20
#: How many paths are looked up in one call, and how many bytes of them.
MAX_PATHS, MAX_PATHS_BYTES = 10_000, 8 << 20
#: Nodes and runs of files that go together.
_BATCH_WEIGHT = 1024

T = TypeVar("T", bound=Value)


# -- values ----------------------------------------------------------------------------------------------------------


class About(Value):
    """What a server says of itself. `api` is the number in `PREFIX`; `instance` names the process."""

    server: Literal["fanout"] = "fanout"
    version: str
    api: int
    instance: str


class Handle(Value):
    """A handle on one line of a disk: `branch`, and the checkpoint's name in `at` where it is one."""

    id: str
    name: str
    branch: str
    at: str | None = None


class Creating(Value):
    """Body of a call that makes a disk."""

    name: str


class Checkpointing(Value):
    """Body of a call that makes a checkpoint; without a name it gets one."""

    name: str | None = None


class Branching(Value):
    """Body of a call that makes a branch, from a checkpoint or else from the line of the call."""

    name: str
    checkpoint: str | None = None


class Merging(Value):
    """Body of a merge. `branch` is a branch, or (`from_line`) any line of the disk, a checkpoint included."""

    branch: str
    from_line: bool = False
    on_conflict: Literal["fail", "ours", "theirs"] = "fail"


class Moving(Value):
    """Body of a rename or a copy; both paths are absolute."""

    source: str
    target: str
    replace: bool = False


class Executing(Value):
    """Body of an exec; what is left out is as in `Fanout.exec`. `stdin` is text, or bytes in `stdinBase64`."""

    command: str
    disks: Mapping[str, Mount] = {}
    cwd: str | None = None
    env: Mapping[str, str] | None = None
    stdin: str | None = None
    stdin_base64: str | None = None
    timeout_s: float = 300.0
    network: bool = False
    commit: CommitPolicy = "always"
    cpus: float | None = None
    memory_mib: float | None = None


class Collecting(Value):
    """Body of a garbage collection; seconds."""

    grace_s: float | None = None
    keep_history_s: float | None = None
    dry_run: bool = False


class Grepping(Value):
    """Body of a search; what is left out is as in `Disk.grep`. A pattern that is no text is in `patternBase64`."""

    pattern: str | None = None
    pattern_base64: str | None = None
    directory: str = "/"
    recursive: bool = True
    syntax: GrepSyntax = "rust"
    ignore_case: bool = False
    word: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    at: str | int | None = None
    before: int = 0
    after: int = 0
    output: GrepOutput = "lines"
    binary: bool = True
    max_results: int = 1000
    max_line_bytes: int = 4096
    max_duration_s: float = 30.0
    concurrency: int | None = None

    def options(self) -> dict[str, Any]:
        """Return the arguments of `Disk.grep`."""
        given = {name: getattr(self, name) for name in type(self).model_fields if not name.startswith("pattern")}
        encoded = {"pattern": self.pattern, "patternBase64": self.pattern_base64}
        pattern = _load_bytes(encoded, "pattern") if self.pattern is None else self.pattern
        return {"pattern": pattern, **given}


class Verifying(Value):
    """Body of a verification."""

    quick: bool = False


def plain(value: Value) -> dict[str, Any]:
    """Return a value's fields as JSON has them."""
    return value.model_dump(mode="json", by_alias=True)


def value_of(kind: type[T], fields: object) -> T:
    """Return the value that `fields` describe; `Invalid` says which field is wrong."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "body"
        if first["type"] == "extra_forbidden":
            raise Invalid(f"{where}: there is no such field") from None
        raise Invalid.argument(where, first.get("input"), first["msg"]) from None


def heard(kind: type[T], fields: object) -> T:
    """Return the value that an answer describes; fields that only a newer server knows are passed over."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        unknown = [each["loc"] for each in error.errors() if each["type"] == "extra_forbidden"]
        if not unknown:
            raise Corrupt(f"the answer is no {kind.__name__}: {error.errors()[0]['msg']}") from None
    known = copy.deepcopy(fields)
    for *above, name in unknown:
        inner: Any = known
        for step in above:
            inner = inner[step]
        del inner[name]
    return heard(kind, known)


def json_bytes(value: object) -> bytes:
    """Return JSON without needless white space."""
    return _encode_json(value).encode("ascii")


_encode_json = json.JSONEncoder(separators=(",", ":")).encode


def json_of(data: bytes) -> Any:
    """Return what JSON stands for; `Invalid` where it is none."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Invalid(f"the body is no JSON: {error}") from None


def _store_bytes(fields: dict[str, Any], name: str, data: bytes) -> None:
    """Put bytes among JSON fields: as text where that is exact, else as `…Base64`."""
    try:
        fields[name] = data.decode("utf-8")
    except UnicodeDecodeError:
        fields[name + "Base64"] = base64.b64encode(data).decode("ascii")


def _load_bytes(fields: Mapping[str, Any], name: str) -> bytes:
    text, encoded = fields.get(name), fields.get(name + "Base64")
    if text is not None and encoded is not None:
        raise Invalid(f"{name} and {name}Base64 are both set: one of them")
    if encoded is not None:
        try:
            return base64.b64decode(encoded, validate=True)
        except (binascii.Error, TypeError, ValueError):
            raise Invalid(f"{name}Base64 is no base64") from None
    if text is None:
        return b""
    if not isinstance(text, str):
        raise Invalid.argument(name, text, "text")
    return text.encode("utf-8", "surrogateescape")


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
        _store_bytes(fields, "stdin", stdin)
    return fields


def exec_call(fields: object) -> tuple[str, Mapping[str, Mount], dict[str, Any]]:
    """Return the command, mounts and other options of an exec's body; `Invalid` for what makes none."""
    given = value_of(Executing, fields)
    options: dict[str, Any] = {option: getattr(given, option) for option in _OPTIONS.values()}
    options["stdin"] = _load_bytes({"stdin": given.stdin, "stdinBase64": given.stdin_base64}, "stdin")
    return given.command, given.disks, options


def grep_fields(pattern: str | bytes, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a search, its arguments checked."""
    fields = plain(Grepping(**options))
    if isinstance(pattern, str):
        return {**fields, "pattern": pattern}
    del fields["pattern"], fields["patternBase64"]
    _store_bytes(fields, "pattern", bytes(pattern))
    return fields


def run_fields(run: Run) -> dict[str, Any]:
    """Return a run as JSON has it, its output exact."""
    fields = run.model_dump(by_alias=True, exclude={"stdout_bytes", "stderr_bytes"})
    _store_bytes(fields, "stdout", run.stdout_bytes)
    _store_bytes(fields, "stderr", run.stderr_bytes)
    return fields


def run_of(fields: Mapping[str, Any]) -> Run:
    """Return the run that `run_fields` described."""
    values = {name: value for name, value in fields.items() if not name.startswith(("stdout", "stderr"))}
    for stream in ("stdout", "stderr"):
        values[f"{stream}Bytes"] = _load_bytes(fields, stream)
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
        _store_bytes(fields, "data", event.data)
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
        data = _load_bytes(fields, "data")
        text = fields.get("text", fields.get("data", ""))
        return heard(Output, {"stream": fields.get("stream"), "data": data, "text": text})
    if kind == "started":
        return heard(Started, {name: value for name, value in fields.items() if name != "event"})
    if kind == "finished":
        return Finished(run=run_of(fields["run"]))
    raise error_of(fields, 500)


def takes_long_bodies(path: str) -> bool:
    """Whether a call to this path brings a file or tree: its body may be as long as an object."""
    return path.startswith(PREFIX + "/disks/") and path.rpartition("/")[2] in ("object", "commit")


# -- query strings ---------------------------------------------------------------------------------------------------


def query(values: Mapping[str, object]) -> str:
    """Return `?name=value&…` of what is not None: text of any bytes (surrogate escapes), true and false."""
    parts = []
    for name, value in values.items():
        if value is not None:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            parts.append(f"{name}={quote_from_bytes(text.encode('utf-8', 'surrogateescape'), safe='/')}")
    return "?" + "&".join(parts) if parts else ""


def parse_query(raw: bytes, names: Iterable[str]) -> dict[str, str]:
    """Return the values of a query string; `Invalid` for a name that is not in `names`, or that comes twice."""
    known = set(names)
    values: dict[str, str] = {}
    try:
        pairs = parse_qsl(raw.decode("latin-1"), keep_blank_values=True, errors="surrogateescape")
    except ValueError as error:
        raise Invalid(f"the query is malformed: {error}") from None
    for name, value in pairs:
        if name not in known:
            raise Invalid.argument("query", name, f"one of {', '.join(sorted(known))}")
        if name in values:
            raise Invalid(f"{name} is given twice")
        values[name] = value
    return values


# -- trees -----------------------------------------------------------------------------------------------------------

#: What a frame holds: a header, an inline pack, nodes with their paths, the end, an error as JSON.
Kind = Literal[b"H", b"B", b"N", b"E", b"X"]
_KINDS = frozenset(get_args(Kind))
_HEAD = struct.Struct("<cI")


class Header(msgspec.Struct, frozen=True):
    """What begins a tree. `seq` is the commit it is of, `node` what is at `path` itself (None: nothing)."""

    seq: int
    path: bytes = b""
    node: Node | None = None


class Looking(msgspec.Struct, frozen=True):
    """The answer to a lookup: the commit it was done at, and the paths that are there with their nodes."""

    seq: int
    nodes: tuple[tuple[bytes, Node], ...]


_nodes = msgspec.msgpack.Decoder(tuple[tuple[bytes, Node], ...])
_paths = msgspec.msgpack.Decoder(tuple[bytes, ...])
_header = msgspec.msgpack.Decoder(Header)
_looking = msgspec.msgpack.Decoder(Looking)
_encoder = msgspec.msgpack.Encoder()


def frame(kind: Kind, payload: bytes = b"") -> bytes:
    """Return one frame: a letter, the payload's length (u32, little endian), the payload."""
    return _HEAD.pack(kind, len(payload)) + payload


class Frames:
    """Cuts a stream of bytes into frames. Heartbeats between them are dropped; `Corrupt` for what is no frame."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Take the next bytes and yield (kind, payload) of the frames that are complete now."""
        self._held += data
        at = 0
        while True:
            while self._held[at : at + 1] == BEAT:
                at += 1
            if len(self._held) - at < _HEAD.size:
                break
            kind, length = _HEAD.unpack_from(self._held, at)
            if kind not in _KINDS or length > MAX_FRAME_BYTES:
                raise Corrupt(f"{self._where}: no frame of a tree begins with {bytes(self._held[at : at + 5])!r}")
            if len(self._held) - at - _HEAD.size < length:
                break
            at += _HEAD.size + length
            yield kind, bytes(self._held[at - length : at])
        del self._held[:at]


def batches(nodes: Iterable[tuple[bytes, Node]]) -> Iterator[list[tuple[bytes, Node]]]:
    """Cut nodes into batches that fit into a frame: some hundred files, fewer of large ones."""
    batch: list[tuple[bytes, Node]] = []
    weight = 0
    for item in nodes:
        batch.append(item)
        weight += 1 + len(item[1].data)
        if weight >= _BATCH_WEIGHT:
            yield batch
            batch, weight = [], 0
    if batch:
        yield batch


def encode_nodes(nodes: Iterable[tuple[bytes, Node]]) -> bytes:
    """Return a batch of nodes with their paths."""
    return _encoder.encode(tuple(nodes))


def decode_nodes(data: bytes, where: str) -> tuple[tuple[bytes, Node], ...]:
    """Return a batch of nodes; `Corrupt` names `where`. Whether they make a tree is for whoever uses them to see."""
    return _decoded(_nodes, data, where)


def encode_paths(paths: Iterable[bytes]) -> bytes:
    """Return a list of paths."""
    return _encoder.encode(tuple(paths))


def decode_paths(data: bytes, where: str) -> tuple[bytes, ...]:
    """Return a list of paths; `Corrupt` names `where`."""
    return _decoded(_paths, data, where)


def encode_header(header: Header | Looking) -> bytes:
    return _encoder.encode(header)


def decode_header(data: bytes, where: str) -> Header:
    return _decoded(_header, data, where)


def decode_looking(data: bytes, where: str) -> Looking:
    return _decoded(_looking, data, where)


D = TypeVar("D")


def _decoded(decoder: msgspec.msgpack.Decoder[D], data: bytes, where: str) -> D:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Corrupt(f"{where}: {error}") from None
