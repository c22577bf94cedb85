"""Frozen values that cross layers and reach users: results, timings, changes, object and disk descriptions.

Owns their names and units. Builds nothing and does no I/O.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, field_serializer, field_validator
from pydantic.alias_generators import to_camel

from fanout.errors import CommandFailed, Conflict

if TYPE_CHECKING:
    from typing import Self

__all__ = [
    "Change",
    "ChangeKind",
    "Checkpoint",
    "Commit",
    "CommitPolicy",
    "DirEntry",
    "Event",
    "Finished",
    "FsckAffected",
    "FsckProblem",
    "FsckReport",
    "GcReport",
    "Grep",
    "GrepMatch",
    "GrepOutput",
    "GrepShard",
    "GrepSyntax",
    "Limit",
    "Lock",
    "Mode",
    "Mount",
    "ObjectInfo",
    "Output",
    "Run",
    "RunCommit",
    "Started",
    "Status",
    "Timing",
    "Usage",
]

ChangeKind = Literal["added", "modified", "attributes", "deleted"]
CommitPolicy = Literal["always", "on_success", "never"]
GrepOutput = Literal["lines", "count", "files"]
GrepSyntax = Literal["rust", "ere", "fixed", "pcre2"]
Mode = Literal["read_only", "conditional", "shared"]
Status = Literal["completed", "timed_out", "killed", "oom"]
Limit = Literal["time", "memory", "disk", "pids"]


class Value(BaseModel):
    """Base of all values: frozen, unknown fields refused, camelCase on the wire."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True, arbitrary_types_allowed=True
    )

    def model_dump_json(self, *, indent: int | None = None, **options: Any) -> str:
        """Return JSON in ASCII; bytes of names that are not UTF-8 are escaped surrogates, as in `os.fsdecode`."""
        return json.dumps(self.model_dump(mode="json", **options), indent=indent)


class Change(Value):
    """One path a commit changed. `path` is relative to the disk's root; undecodable bytes are surrogate escapes."""

    path: str
    kind: ChangeKind


class Commit(Value):
    """One commit in a branch's history.

    `seq` is its place in the log; commits that became durable together share it. `time` is UTC. `exec_id` is the
    exec that made it, if one did. `changes` is empty for a merge or call that changed nothing.
    """

    seq: int
    time: datetime
    author: str
    message: str
    exec_id: str | None
    base_seq: int
    changes: tuple[Change, ...]


class Checkpoint(Value):
    """A named, immutable point of a branch."""

    name: str
    branch: str
    seq: int
    time: datetime


class ObjectInfo(Value):
    """One file of a disk. `size` in bytes; `etag` changes with the content; `last_modified` is its mtime in UTC.

    Directories, listed only where asked for, have a key that ends in `/`.
    """

    key: str
    size: int
    etag: str
    last_modified: datetime
    mode: int
    kind: Literal["file", "directory", "symlink"] = "file"


class DirEntry(Value):
    """One name in a directory. `size` in bytes, `mode` the permission bits, `target` a symbolic link's.

    `etag` changes with a file's content; directories have none.
    """

    name: str
    path: str
    kind: Literal["file", "directory", "symlink"]
    size: int
    mode: int
    mtime_ns: int
    target: str | None = None
    etag: str = ""


class Lock(Value):
    """A checkout that is held. `paths` are the disk's, the root being "/"; `exec_id` holds it since commit `seq`.

    From `expires` (UTC) on, unless renewed before, whoever wants it may break it.
    """

    id: str
    paths: tuple[str, ...]
    exec_id: str
    seq: int
    expires: datetime


class FsckAffected(Value):
    """What cannot be read of one line because of a damaged object. `line` is a branch, `checkpoint …` or `commit …`.

    `everything`: the whole tree. Else `paths`, at most 100 of `count`; where the names themselves are lost, `between`
    is the range they lie in: from the first path up to (not including) the second, which is "" for the end; `spared`
    are the paths in it that were written since and can be read.
    """

    line: str
    paths: tuple[str, ...] = ()
    count: int = 0
    everything: bool = False
    between: tuple[str, str] | None = None
    spared: tuple[str, ...] = ()


class FsckProblem(Value):
    """One damaged or missing object: its key in the store, what is wrong, and what that affects (nothing, perhaps)."""

    object: str
    what: str
    affects: tuple[FsckAffected, ...] = ()


class FsckReport(Value):
    """The result of verifying a disk: `ok`, or problems (at most 1,000; `more_problems` counts the rest).

    Counts are of objects looked at; `files` of those in all branches and checkpoints, each tree once.
    """

    ok: bool
    quick: bool
    problems: tuple[FsckProblem, ...]
    more_problems: int
    entries: int
    snaps: int
    pages: int
    packs: int
    files: int
    bytes_read: int
    duration_ms: float


class GcReport(Value):
    """What a garbage collection deleted, or would delete (`dry_run`): numbers of objects, and `freed_bytes` of them.

    `indexes` are those of searches. `kept_packs` and `kept_bytes` are the packs that stay. `trimmed` says by branch
    name which commit is the oldest that can still be read without a checkpoint.
    """

    dry_run: bool
    packs: int
    pages: int
    snaps: int
    entries: int
    indexes: int = 0
    probes: int
    freed_bytes: int
    kept_packs: int
    kept_bytes: int
    trimmed: Mapping[str, int]
    duration_ms: float


class GrepMatch(Value):
    """One matching line; with output "count" or "files" one file (`line` 0, `text` empty, `count` its matching lines).

    `file` is relative to the disk's root, undecodable bytes as surrogate escapes; `line` counts from 1. `text` is the
    line without its newline, undecodable bytes replaced; `raw` its exact bytes where `text` is not them. `truncated`:
    the line is longer than was asked for and was cut. `before` and `after` are the lines around it.
    """

    file: str
    line: int
    text: str = ""
    raw: bytes | None = None
    truncated: bool = False
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    count: int | None = None

    @property
    def text_bytes(self) -> bytes:
        """The line's exact bytes."""
        return self.text.encode() if self.raw is None else self.raw

    @field_serializer("raw", when_used="json")
    def _raw(self, value: bytes | None) -> str | None:
        return None if value is None else base64.b64encode(value).decode()

    @field_validator("raw", mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        return base64.b64decode(value) if isinstance(value, str) else value


class GrepShard(Value):
    """One part of a search: the paths from `first` to `last`, where it ran, bytes scanned and milliseconds.

    `pages` is how many ranges of the tree it covers (each is one file of the host's scan cache), `fetched` how many of
    them were not on the host before, `skipped` how many the index ruled out.
    """

    first: str
    last: str
    pages: int
    fetched: int
    skipped: int
    bytes_scanned: int
    duration_ms: float
    host: str


class Grep(Value):
    """The result of a search: `matches` in byte order of paths, then by line.

    `stopped_reason`: "completed" (these are all), "max_results" (there may be more), "deadline" (time was up: what was
    found until then), "incomplete" (something could not be searched: `problems` says what). `files_scanned` and
    `bytes_scanned` count what was looked at, `binary_files` are those that match and hold a NUL byte (at most 100 of
    `binary_count`): they are named, not shown.
    """

    matches: tuple[GrepMatch, ...]
    stopped_reason: Literal["completed", "max_results", "deadline", "incomplete"]
    files_scanned: int
    bytes_scanned: int
    duration_ms: float
    binary_files: tuple[str, ...] = ()
    binary_count: int = 0
    shards: tuple[GrepShard, ...] = ()
    problems: tuple[str, ...] = ()


class Mount(Value):
    """How one exec sees one disk; made by `Disk.mount`, which documents the fields."""

    disk: str
    branch: str
    mode: Mode
    subdirectory: str | None = None
    checkout: tuple[str, ...] = ()
    queue_ms: float | None = None
    at: str | int | None = None


class Timing(Value):
    """Where one exec's time went, in milliseconds.

    `queue_ms` runs from arrival until the command starts; its parts are `wait_ms` (for a slot), `lock_ms` (for
    checkouts), `mount_ms` (finding the newest tree and making it visible) and `start_ms` (the sandbox). `execute_ms`
    is the command, `commit_ms` making its writes durable, `total_ms` arrival to result.
    """

    queue_ms: float
    wait_ms: float
    lock_ms: float
    mount_ms: float
    start_ms: float
    execute_ms: float
    commit_ms: float
    total_ms: float


class Usage(Value):
    """What one exec used: user plus system CPU seconds of all its processes, peak resident bytes of the largest."""

    cpu_s: float
    max_rss_bytes: int


class RunCommit(Value):
    """What became of one mount's writes.

    `base_seq` is what the command saw. `seq` is where its writes landed and `changes` what they were: both None if
    nothing was written, if the commit policy left it out, or if it conflicted (then `conflict` says so). `skipped` are
    paths the command left behind that no disk can hold: sockets, named pipes and devices.
    """

    base_seq: int
    seq: int | None = None
    changes: tuple[Change, ...] | None = None
    conflict: Conflict | None = None
    skipped: tuple[str, ...] = ()

    @field_serializer("conflict")
    def _conflict(self, value: Conflict | None) -> dict[str, Any] | None:
        return _conflict_fields(value)


class Run(Value):
    """The result of one exec. A command that fails is a result, not an exception.

    `exit_code` is None when the command did not exit by itself; death by signal n is 128+n, as in a shell.
    `stdout_bytes` and `stderr_bytes` are exact up to the cap (1 MiB a stream by default); beyond it they hold head
    and tail with a marker between, `stdout_truncated` says so and `stdout_total` counts all bytes.
    `commits` has one entry for each mounted disk. `warm` says whether the host had the tree already, and a
    machine, where the engine boots those. `limit` is the one that the command met, as far as the host tells; one that
    wrote too much ("disk": half of what was free of the host's file system when it started) is killed and commits
    nothing.
    """

    id: str
    command: str
    status: Status
    exit_code: int | None
    stdout_bytes: bytes
    stderr_bytes: bytes
    stdout_truncated: bool
    stderr_truncated: bool
    stdout_total: int
    stderr_total: int
    timing: Timing
    usage: Usage
    engine: str
    host: str
    warm: bool
    commits: Mapping[str, RunCommit]
    conflict: Conflict | None = None
    limit: Limit | None = None

    @property
    def ok(self) -> bool:
        """Whether the command completed with exit code 0."""
        return self.status == "completed" and self.exit_code == 0

    @property
    def stdout(self) -> str:
        """Standard output as text, undecodable bytes replaced."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """Standard error as text, undecodable bytes replaced."""
        return self.stderr_bytes.decode("utf-8", "replace")

    def raise_for_status(self) -> Self:
        """Return self if all went well; else raise `Conflict` or `CommandFailed`."""
        if not self.ok:
            how = f"exit code {self.exit_code}" if self.status == "completed" else self.status.replace("_", " ")
            tail = self.stderr.strip().rpartition("\n")[2][-500:]
            raise CommandFailed(f"{self.command!r}: {how}" + (f": {tail}" if tail else ""), self)
        if self.conflict is not None:
            raise self.conflict
        return self

    @field_serializer("conflict")
    def _conflict(self, value: Conflict | None) -> dict[str, Any] | None:
        return _conflict_fields(value)

    @field_serializer("stdout_bytes", "stderr_bytes", when_used="json")
    def _text(self, value: bytes) -> str:
        return value.decode("utf-8", "replace")


class Started(Value):
    """The command is being started: `id` names the exec; `queue_ms` as in its `Timing`, seen a moment earlier."""

    id: str
    queue_ms: float


class Output(Value):
    """Some output, as it arrived: `data` exact, `text` decoded across chunk borders (characters are never split)."""

    stream: Literal["stdout", "stderr"]
    data: bytes
    text: str

    @field_serializer("data", when_used="json")
    def _text(self, value: bytes) -> str:
        return value.decode("utf-8", "replace")


class Finished(Value):
    """The exec is over, its writes committed."""

    run: Run


Event = Started | Output | Finished


def _conflict_fields(value: Conflict | None) -> dict[str, Any] | None:
    if value is None:
        return None
    return {"paths": list(value.paths), "rescueBranch": value.rescue_branch, "disk": value.disk}
