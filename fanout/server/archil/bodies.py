"""What the dialect's calls may hold. Unknown fields and wrong types are refused, naming the field.

Owns the fields' names, types and bounds. What is in them is for others to check.
"""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Header
from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

__all__ = [
    "Addresses",
    "Body",
    "BranchBody",
    "DiskBody",
    "ErrorAnswer",
    "ExecBody",
    "ExecManyBody",
    "GrepBody",
    "IdempotencyKey",
    "MountBody",
    "RevokeBody",
    "RootAttributes",
    "ShareBody",
    "TokenBody",
    "UserBody",
]

#: More disks than this in one exec are a mistake.
_MAX_MOUNTS = 64
#: A header: the same call again under it gives the first one's result, on every server of the bucket.
IdempotencyKey = Annotated[str | None, Header(alias="Idempotency-Key", min_length=1, max_length=255)]
_Id = Annotated[int, Field(ge=0, le=2**32 - 2)]


class Body(BaseModel):
    """Base of all bodies: camelCase, strict, nothing unknown."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, alias_generator=to_camel)


class ErrorAnswer(BaseModel):
    """Every error: a sentence for people, a stable code for programs."""

    success: Literal[False]
    error: str
    code: str


class RootAttributes(Body):
    """Owner and mode of a new disk's root directory."""

    uid: _Id | None = None
    gid: _Id | None = None
    mode: int | None = Field(None, ge=0, le=0o7777)


class DiskBody(Body):
    name: str
    mounts: list[dict[str, object]] | None = Field(None, description="Buckets to mount; this server has none.")
    allowed_ips: list[str] | None = None
    root_attrs: RootAttributes | None = None


class Addresses(Body):
    allowed_ips: list[str]


class UserBody(Body):
    type: str
    nickname: str = ""
    principal: str | None = None


class TokenBody(Body):
    name: str
    description: str | None = None


class ExecBody(Body):
    command: str


class MountBody(Body):
    """How one disk is mounted. `queueMs` bounds the wait for `checkoutPaths`, in milliseconds."""

    disk: str
    read_only: bool = False
    conditional: bool = False
    subdirectory: str | None = None
    queue_ms: int | None = None
    checkout_paths: list[str] | None = None


class ExecManyBody(Body):
    """`disks`: by the path below /mnt/archil where each is seen, a disk's id or how to mount it."""

    disks: dict[str, str | MountBody] = Field(max_length=_MAX_MOUNTS)
    command: str


class GrepBody(Body):
    directory: str = ""
    pattern: str
    recursive: bool = False
    max_duration_seconds: int = Field(30, ge=1, le=30)
    concurrency: int = Field(50, ge=1, le=100)
    max_results: int = Field(1000, ge=1, le=10_000)


class BranchBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    branch_name: str
    from_checkpoint_name: str
    from_branch: str | None = None


class RevokeBody(Body):
    client_id: str
    inode_id: int


class ShareBody(Body):
    """`expiresIn`: seconds, a day by default, a week at most."""

    key: str
    expires_in: int = Field(86_400, ge=1, le=604_800)
