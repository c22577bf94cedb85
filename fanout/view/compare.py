"""What differs between the tree of a base and the tree that is wanted, and whether that is little enough for a delta.

Owns the bounds of a delta, and remembering the comparisons made last: every exec asks for the same pair until the
branch moves on. Knows nothing of directories.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator

from fanout.disk.state import Difference, State

__all__ = ["Differences", "path_limit", "within"]

#: A delta holds at most this many paths, or this part of the disk's files if that is more ...
_DELTA_PATHS = 2000
_DELTA_PART = 8
#: ... and this many bytes of file content.
_DELTA_BYTES = 64 << 20
_REMEMBERED = 8


class Differences:
    """Compares trees. Thread safe; those who ask for the same at once wait for one answer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, str, bytes], list[Difference] | None] = OrderedDict()

    def small(self, base: State, state: State, scope: bytes) -> list[Difference] | None:
        """Return what differs below `scope` from `base` to `state`, or None if that is too much for a delta.

        Two trees may be equal although their identities differ: one of them was folded.
        """
        key = (base.identity, state.identity, scope)
        with self._lock:
            if key not in self._known:
                self._known[key] = _small_difference(base, state, scope)
                while len(self._known) > _REMEMBERED:
                    self._known.popitem(last=False)
            self._known.move_to_end(key)
            return self._known[key]


def path_limit(state: State) -> int:
    """Return how many paths a delta onto this tree may hold."""
    return max(_DELTA_PATHS, state.snap.files // _DELTA_PART)


def within(differences: Iterator[Difference], scope: bytes) -> Iterator[Difference]:
    """Leave out what does not lie in the directory `scope`."""
    for each in differences:
        if not scope or each.path == scope or each.path.startswith(scope + b"/"):
            yield each


def _small_difference(base: State, state: State, scope: bytes) -> list[Difference] | None:
    shared = {page.hash for page in base.snap.pages} & {page.hash for page in state.snap.pages}
    apart = sum(page.count for tree in (base, state) for page in tree.snap.pages if page.hash not in shared)
    if apart > 64 * path_limit(state):
        return None  # finding out would cost more than a new base
    changed: list[Difference] = []
    size = 0
    for each in within(base.diff(state), scope):
        changed.append(each)
        size += each.after.size if each.after is not None else 0
        if len(changed) > path_limit(state) or size > _DELTA_BYTES:
            return None
    return changed
