"""Every error fanout raises, and ONE table that says what each means to HTTP, S3, a shell and a retry loop.

Owns the error tree and its mappings. Knows nothing of who raises or renders an error.
Errors are grouped by what the caller does next, not by the layer they come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

__all__ = [
    "TABLE",
    "Busy",
    "CommandFailed",
    "Conflict",
    "Corrupt",
    "Denied",
    "EngineUnavailable",
    "Exists",
    "FanoutError",
    "Invalid",
    "LeaseLost",
    "Limit",
    "Meaning",
    "NotFound",
    "Unavailable",
    "Unknown",
    "meaning",
]


class FanoutError(Exception):
    """Base of every error of fanout; `.code` is stable and safe to match on."""

    code: ClassVar[str] = "internal"


class NotFound(FanoutError):
    """The disk, branch, checkpoint, object or path does not exist."""

    code = "not_found"


class Exists(FanoutError):
    """The name is taken, or a create-only object is already there."""

    code = "exists"


class Invalid(FanoutError):
    """An argument is malformed or out of range; nothing was started."""

    code = "invalid"

    @classmethod
    def argument(cls, name: str, value: object, allowed: str) -> Invalid:
        """Build the standard message: which argument, what it was, what is allowed."""
        shown = repr(value)
        if len(shown) > 200:
            shown = shown[:197] + "..."
        return cls(f"{name} is {shown}: {allowed}")


class Denied(FanoutError):
    """The credentials do not allow this."""

    code = "denied"


class Conflict(FanoutError):
    """Somebody else changed the same paths first; nothing of the losing commit reached the branch.

    `paths` lists what clashed. `rescue_branch` is the branch that holds the loser's changes, or None
    where nothing needed keeping (a merge, whose source branch is still there).
    """

    code = "conflict"

    def __init__(self, paths: Sequence[str], rescue_branch: str | None = None, disk: str = "") -> None:
        self.paths = tuple(paths)
        self.rescue_branch = rescue_branch
        self.disk = disk
        shown = ", ".join(repr(p) for p in self.paths[:5]) + (", ..." if len(self.paths) > 5 else "")
        kept = f"; the changes are kept on branch {rescue_branch!r}" if rescue_branch else ""
        where = f" on disk {disk!r}" if disk else ""
        super().__init__(f"{len(self.paths)} conflicting path(s){where}: {shown}{kept}")

    def __reduce__(self) -> tuple[type[Conflict], tuple[tuple[str, ...], str | None, str]]:
        return (type(self), (self.paths, self.rescue_branch, self.disk))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Conflict):
            return NotImplemented
        return self.__reduce__() == other.__reduce__()

    def __hash__(self) -> int:
        return hash(self.__reduce__()[1])


class Busy(FanoutError):
    """A lock or a slot was not free within the time allowed; trying again later can help."""

    code = "busy"


class LeaseLost(FanoutError):
    """A lock this commit relied on was broken; nothing was written."""

    code = "lease_lost"


class Limit(FanoutError):
    """A documented limit (see docs/LIMITS.md) would be exceeded."""

    code = "limit"


class Unavailable(FanoutError):
    """The store did not answer, or answered that it cannot now; nothing was changed."""

    code = "unavailable"


class EngineUnavailable(FanoutError):
    """The engine cannot run on this host; the message says what would help."""

    code = "engine_unavailable"


class Unknown(FanoutError):
    """The outcome of a write could not be learned: it may or may not have landed."""

    code = "unknown"


class Corrupt(FanoutError):
    """Stored bytes are not what was written; the message names the object or path."""

    code = "corrupt"


class CommandFailed(FanoutError):
    """Raised by `Run.raise_for_status()` for a command that did not complete with exit code 0.

    `run` is the `fanout.Run` it came from.
    """

    code = "command_failed"

    def __init__(self, message: str, run: object = None) -> None:
        super().__init__(message)
        self.run = run


class Meaning(NamedTuple):
    """What one error code means outside Python."""

    http: int
    s3: str
    exit: int
    retry: bool


#: code -> HTTP status, S3 error code, CLI exit code, whether the same call may succeed later unchanged.
#: Exit codes start at 64 (sysexits.h), so that they stay apart from a command's own small codes.
TABLE: dict[str, Meaning] = {
    "internal": Meaning(500, "InternalError", 70, False),
    "not_found": Meaning(404, "NoSuchKey", 66, False),
    "exists": Meaning(409, "BucketAlreadyExists", 73, False),
    "invalid": Meaning(400, "InvalidArgument", 64, False),
    "denied": Meaning(403, "AccessDenied", 77, False),
    "conflict": Meaning(409, "OperationAborted", 75, False),
    "busy": Meaning(503, "SlowDown", 75, True),
    "lease_lost": Meaning(409, "OperationAborted", 75, False),
    "limit": Meaning(413, "EntityTooLarge", 65, False),
    "unavailable": Meaning(503, "ServiceUnavailable", 69, True),
    "engine_unavailable": Meaning(503, "ServiceUnavailable", 69, False),
    "unknown": Meaning(500, "InternalError", 74, False),
    "corrupt": Meaning(500, "InternalError", 76, False),
    "command_failed": Meaning(422, "InvalidRequest", 1, False),
}


def meaning(error: BaseException) -> Meaning:
    """Return the table row of an error; anything that is not a FanoutError is `internal`."""
    return TABLE[error.code if isinstance(error, FanoutError) else "internal"]
