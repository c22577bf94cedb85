"""Values and bodies of calls as JSON, both ways.

Owns their names on the wire and what is refused or passed over. Pure. JSON is ASCII; bytes of names that are not UTF-8
are escaped surrogates, as in `os.fsdecode`.
"""

from __future__ import annotations

import base64
import binascii
import copy
import json
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from fanout.errors import Corrupt, Invalid
from fanout.model import CommitPolicy, GrepOutput, GrepSyntax, Mount, Value

__all__ = [
    "About",
    "Branching",
    "Checkpointing",
    "Collecting",
    "Creating",
    "Executing",
    "Grepping",
    "Handle",
    "Merging",
    "Moving",
    "Verifying",
    "heard",
    "json_bytes",
    "json_of",
    "load_bytes",
    "plain",
    "store_bytes",
    "value_of",
]

T = TypeVar("T", bound=Value)


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
        pattern = load_bytes(encoded, "pattern") if self.pattern is None else self.pattern
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


def store_bytes(fields: dict[str, Any], name: str, data: bytes) -> None:
    """Put bytes among JSON fields: as text where that is exact, else as `…Base64`."""
    try:
        fields[name] = data.decode("utf-8")
    except UnicodeDecodeError:
        fields[name + "Base64"] = base64.b64encode(data).decode("ascii")


def load_bytes(fields: Mapping[str, Any], name: str) -> bytes:
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
