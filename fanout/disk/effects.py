"""What effects and entries touch, refer to and carry: plain questions about a commit's parts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fanout.format.entry import DELETED, TOUCHED, Effect, Entry, Put

__all__ = ["carried", "packs_of", "text", "touched_by", "touched_by_effects"]


def text(value: str) -> str:
    """Return text that UTF-8 can hold: names that are none of it arrive as surrogate escapes."""
    return value.encode("utf-8", "backslashreplace").decode()


def carried(effects: Sequence[Effect], *sources: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Return the inline packs that effects refer to.

    An entry carries all of them, even those that an earlier entry carried: a fold in another process may have moved
    that one's data into packs already, and then a cold reader never sees the earlier entry.
    """
    packs = packs_of(effects)
    found: dict[bytes, bytes] = {}
    for source in sources:
        found.update({pack: source[pack] for pack in packs & source.keys()})
    return found


def packs_of(effects: Sequence[Effect]) -> set[bytes]:
    """Return the packs that effects refer to."""
    return {ref.pack for effect in effects if isinstance(effect, Put) for ref in effect.node.data}


def touched_by(entry: Entry) -> dict[bytes, int]:
    """Return the paths an entry changed, and how (TOUCHED left out)."""
    paths: dict[bytes, int] = {}
    for commit in entry.commits:
        paths.update(touched_by_effects(commit.effects))
    return paths


def touched_by_effects(effects: Sequence[Effect]) -> dict[bytes, int]:
    """Return the paths effects changed, and how (TOUCHED left out)."""
    return {
        effect.path: effect.change if isinstance(effect, Put) else DELETED
        for effect in effects
        if not (isinstance(effect, Put) and effect.change == TOUCHED)
    }
