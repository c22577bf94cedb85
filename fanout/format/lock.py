"""Locks as the log records them: taken, renewed, released, broken.

Owns their values. Which locks a branch has is a function of its log alone; clocks decide only when one may be broken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

__all__ = ["Acquire", "Lock", "LockOp", "Release", "locks_after"]


class Acquire(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Take exclusive, recursive locks on `paths` as one lock `id`, or renew it: it may be broken after `expires_ns`.

    `owner` is the exec that holds it.
    """

    id: str
    owner: str
    paths: tuple[bytes, ...]
    expires_ns: int


class Release(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The lock `id` is gone: given back by its holder, or `broken` by somebody else."""

    id: str
    broken: bool = False


LockOp = Acquire | Release


class Lock(msgspec.Struct, frozen=True, array_like=True):
    """A lock that is held. `seq` is the entry that took it: its epoch."""

    id: str
    owner: str
    paths: tuple[bytes, ...]
    expires_ns: int
    seq: int


def locks_after(locks: Mapping[str, Lock], operations: Iterable[LockOp], seq: int) -> Mapping[str, Lock]:
    """Return the locks held after `operations` of entry `seq`."""
    held: dict[str, Lock] | None = None
    for operation in operations:
        held = dict(locks) if held is None else held
        if isinstance(operation, Release):
            held.pop(operation.id, None)
        else:
            since = held[operation.id].seq if operation.id in held else seq
            held[operation.id] = Lock(operation.id, operation.owner, operation.paths, operation.expires_ns, since)
    return locks if held is None else held
