"""Effects of a commit as the changes a user reads. Owns the names of change kinds; pure."""

from __future__ import annotations

from collections.abc import Iterable

from fanout.disk.paths import shown
from fanout.disk.state import Difference, classify
from fanout.format.entry import ADDED, ATTRIBUTES, DELETED, MODIFIED, TOUCHED, Effect, Put
from fanout.model import Change, ChangeKind

__all__ = ["change_of", "changes_of"]

_KINDS: dict[int, ChangeKind] = {ADDED: "added", MODIFIED: "modified", ATTRIBUTES: "attributes", DELETED: "deleted"}


def changes_of(effects: Iterable[Effect]) -> tuple[Change, ...]:
    """Name what effects changed, in order of paths; directories whose mtime merely moved are left out."""
    changes: list[Change] = []
    for effect in effects:
        kind = effect.change if isinstance(effect, Put) else DELETED
        if kind != TOUCHED:
            changes.append(Change(path=shown(effect.path) or "/", kind=_KINDS[kind]))
    return tuple(sorted(changes, key=lambda change: change.path))


def change_of(difference: Difference) -> Change:
    """Name one difference between two trees."""
    kind = _KINDS[classify(difference.before, difference.after)]
    return Change(path=shown(difference.path) or "/", kind=kind)
