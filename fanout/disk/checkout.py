"""Locks: who may change what, and how long taking one may take.

Owns overlap of paths, waiting in line, leases and their renewal. That a lock is checked and released in the very entry
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
from fanout.format.tree import DIR, parents
from fanout.runtime import Runtime

if TYPE_CHECKING:
    from fanout.disk.branch import Branch

__all__ = ["LEASE_S", "Line", "Taken", "held", "locked_paths", "overlapping"]

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
    return [lock for lock in locks.values() if lock.id != own and _overlap(lock.paths, wanted)]


def locked_paths(locks: Mapping[str, Lock], intents: Sequence[Intent], own: str) -> list[bytes]:
    """Return the paths of `intents` that are under somebody else's checkout: conflicts in every mode.

    So is what would leave a checkout without a place: a file where it needs a directory.
    """
    covered = {path for lock in locks.values() if lock.id != own for path in lock.paths}
    if not covered:
        return []
    above = {parent for path in covered for parent in parents(path)}
    return [
        intent.path
        for intent in intents
        if not intent.weak
        and (
            intent.path in covered
            or any(parent in covered for parent in parents(intent.path))
            or (intent.path in above and intent.node is not None and intent.node.kind != DIR)
        )
    ]


class _Waiter:
    """One call that waits for locks; `before` counts those that came earlier and want the same."""

    def __init__(self, owner: str, paths: tuple[bytes, ...], before: int) -> None:
        self.owner = owner
        self.paths = paths
        self.before = before
        self.changed = threading.Event()


class Line:
    """Who in this process waits for locks of one branch: first come, first served where their paths overlap.

    Only the first asks the store; the others wait until it is their turn, or their time is up. Thread safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[_Waiter] = []

    @contextmanager
    def join(self, owner: str, paths: tuple[bytes, ...]) -> Iterator[_Waiter]:
        """Stand in the line for as long as the context lasts."""
        with self._lock:
            mine = _Waiter(owner, paths, sum(_overlap(paths, other.paths) for other in self._waiting))
            self._waiting.append(mine)
        try:
            yield mine
        finally:
            with self._lock:
                place = self._waiting.index(mine)
                del self._waiting[place]
                for other in self._waiting[place:]:
                    if _overlap(paths, other.paths):
                        other.before -= 1
                        if not other.before:
                            other.changed.set()

    def ahead(self, mine: _Waiter) -> str:
        """Return the owner of the first in line before `mine`, or "" where there is none any more."""
        with self._lock:
            earlier = self._waiting[: self._waiting.index(mine)]
        return next((other.owner for other in earlier if _overlap(mine.paths, other.paths)), "")

    def wake(self) -> None:
        """The branch has changed: those whose turn it is look again."""
        if not self._waiting:
            return
        with self._lock:
            for waiter in self._waiting:
                if not waiter.before:
                    waiter.changed.set()


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
    with branch.line.join(owner, paths) as mine:
        if _holder(branch, paths, runtime) is not None:
            branch.refresh()  # what is known may be old
        while True:
            mine.changed.clear()
            holder = None
            if not mine.before:
                holder = _take(branch, Acquire(lock_id, owner, paths, runtime.now_ns() + int(LEASE_S * 1e9)), runtime)
                if holder is None:
                    return
            check()
            left_s = deadline - runtime.monotonic()
            if left_s <= 0:
                raise _busy(branch, mine, holder or _holder(branch, paths, runtime), wait_s)
            # A release by this process wakes us; one by another is seen by looking.
            if not mine.changed.wait(min(left_s, runtime.uniform(pause_s / 2, pause_s))) and not mine.before:
                branch.refresh()
            pause_s = min(pause_s * 2, _POLL_S[1])


def _take(branch: Branch, acquire: Acquire, runtime: Runtime) -> Lock | None:
    """Take a lock; returns None, or who holds one that is in the way. Asks the store only where none is known of."""
    holder = _holder(branch, acquire.paths, runtime)
    if holder is None:
        try:
            branch.take(acquire)
        except Taken as taken:
            holder = taken.lock
    return holder


def _holder(branch: Branch, paths: tuple[bytes, ...], runtime: Runtime) -> Lock | None:
    """Return a lock known to be in the way and not to be broken yet."""
    now_ns = runtime.now_ns()
    locks = overlapping(branch.known().locks, paths)
    return next((lock for lock in locks if lock.expires_ns > now_ns), None)


def _busy(branch: Branch, mine: _Waiter, holder: Lock | None, wait_s: float) -> Busy:
    waited = f"waited {wait_s * 1e3:.0f} ms (queue_ms)"
    if holder is not None:
        return Busy(f"{Taken(holder)}; {waited}")
    names = ", ".join(repr(shown(path) or "/") for path in mine.paths)
    ahead = branch.line.ahead(mine)
    return Busy(f"{names}: {ahead or 'another exec'} is to have it first; {waited}")


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


def _overlap(some: Iterable[bytes], others: Iterable[bytes]) -> bool:
    return any(_covers(a, b) or _covers(b, a) for a in some for b in others)


def _covers(above: bytes, path: bytes) -> bool:
    return not above or path == above or path.startswith(above + b"/")
