"""Locks: who may change what, and how long taking one may take.

Owns overlap of paths, waiting, leases and their renewal. That a lock is checked and released in the very entry
that commits is branch.py's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fanout.disk.merge import Intent
from fanout.disk.paths import shown
from fanout.errors import Busy, FanoutError, LeaseLost
from fanout.format.lock import Acquire, Lock
from fanout.format.tree import parents
from fanout.runtime import Runtime

if TYPE_CHECKING:
    from fanout.disk.branch import Branch

__all__ = ["LEASE_S", "Taken", "held", "locked_paths", "overlapping"]

#: How long a lock outlives its holder's last sign of life; renewed every third of it. Held by tests/unit/test_locks.py.
LEASE_S = 60.0
_POLL_S = (0.01, 0.5)


class Taken(Busy):
    """Somebody else holds a lock that overlaps the wanted one."""

    def __init__(self, lock: Lock) -> None:
        names = ", ".join(repr(shown(path) or "/") for path in lock.paths)
        super().__init__(f"{names} is checked out by {lock.owner}")
        self.lock = lock


def overlapping(locks: Mapping[str, Lock], paths: Iterable[bytes], own: str = "") -> list[Lock]:
    """Return the locks, other than `own`, that cover one of `paths`, lie below it, or are it."""
    wanted = list(paths)
    return [
        lock
        for lock in locks.values()
        if lock.id != own and any(_covers(a, b) or _covers(b, a) for a in lock.paths for b in wanted)
    ]


def locked_paths(locks: Mapping[str, Lock], intents: Sequence[Intent], own: str) -> list[bytes]:
    """Return the paths of `intents` that are under somebody else's checkout: conflicts in every mode."""
    covered = {path for lock in locks.values() if lock.id != own for path in lock.paths}
    if not covered:
        return []
    return [
        intent.path
        for intent in intents
        if not intent.weak and (intent.path in covered or any(parent in covered for parent in parents(intent.path)))
    ]


@contextmanager
def held(
    branch: Branch,
    owner: str,
    paths: Sequence[bytes],
    wait_s: float,
    runtime: Runtime,
    check: Callable[[], None] = lambda: None,
) -> Iterator[str]:
    """Hold one lock on all of `paths` (all or none, so that two calls cannot wait for each other); yields its id.

    Waits at most `wait_s` seconds, then `Busy` names the holder; a lock whose lease ran out is broken. The lease is
    renewed in the background. On exit the lock is released unless a commit has done so already. `check` is called
    while it waits, and may raise.
    """
    lock_id = runtime.hex_id(16)
    _acquire(branch, lock_id, owner, tuple(sorted(set(paths))), wait_s, runtime, check)
    over = threading.Event()
    renewer = threading.Thread(
        target=_renew, args=(branch, lock_id, owner, tuple(paths), runtime, over), name="fanout-lease", daemon=True
    )
    renewer.start()
    try:
        yield lock_id
    finally:
        over.set()
        renewer.join()
        if lock_id in branch.known().locks:
            try:
                branch.release(lock_id)
            except FanoutError:
                pass  # its lease runs out by itself


def _acquire(
    branch: Branch, lock_id: str, owner: str, paths: tuple[bytes, ...], wait_s: float, runtime: Runtime,
    check: Callable[[], None],
) -> None:  # fmt: skip
    deadline = runtime.monotonic() + wait_s
    pause_s = _POLL_S[0]
    while True:
        try:
            branch.take(Acquire(lock_id, owner, paths, runtime.now_ns() + int(LEASE_S * 1e9)))
            return
        except Taken as taken:
            left = deadline - runtime.monotonic()
            check()
            if left <= 0:
                raise Busy(f"{taken}; waited {wait_s * 1e3:.0f} ms (queue_ms)") from None
        runtime.sleep(min(left, runtime.uniform(pause_s / 2, pause_s)))
        pause_s = min(pause_s * 2, _POLL_S[1])
        branch.refresh()


def _renew(
    branch: Branch, lock_id: str, owner: str, paths: tuple[bytes, ...], runtime: Runtime, over: threading.Event
) -> None:
    while not over.wait(LEASE_S / 3):
        try:
            branch.take(Acquire(lock_id, owner, paths, runtime.now_ns() + int(LEASE_S * 1e9)), renew=True)
        except LeaseLost:
            return  # its commit will find out too
        except FanoutError:
            continue


def _covers(above: bytes, path: bytes) -> bool:
    return not above or path == above or path.startswith(above + b"/")
