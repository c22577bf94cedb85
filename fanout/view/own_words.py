"""The words of a disk's pages as this host could publish them.

Owns putting them together: those beside the page's scan file; or, of a page that rests on others' scan files
(bases.py), those of the scan files it rests on with those of what lies in patches. That is more than the page has, and
never less. Knows no store.
"""

from __future__ import annotations

import os

from fanout.format.index import BINARY, MAX_RAW_BYTES, TEXT, Words
from fanout.format.tree import content_hash
from fanout.view.bases import Kind, Rested
from fanout.view.published import identity_of
from fanout.view.scan import DECODED
from fanout.view.scans import Facts, Scans
from fanout.view.words import NAME, PLACES, words_of

__all__ = ["OwnWords"]

_LOCK_S = 1.0
_KINDS: dict[int, Kind] = {TEXT: "text", BINARY: "binary"}


class OwnWords:
    """What this host has of the words of one disk's pages. Blocking."""

    def __init__(self, scans: Scans, disk_id: str) -> None:
        self._scans = scans
        self._known = scans.known(disk_id)

    def facts(self, page: bytes, kind: int) -> Facts | None:
        """Return what there is to say of a page's files of one kind; None where this host has not all of the words."""
        identity = identity_of(page, _KINDS[kind])
        own = self._scans.facts(identity)
        if own is not None and (not own.files or self._has_words(identity)):
            return own
        rested = self._rested(identity)
        if rested is None or not all(map(self._has_words, rested.live)):
            return None
        left_out = self._files(page, BINARY if kind == TEXT else TEXT)
        if left_out is None:
            return None
        size = sum(node.size + 1 for _, node in rested.missing)
        for base, live in rested.live.items():
            facts = self._scans.facts(base)
            size += facts.size * len(live) // max(facts.files, 1) if facts is not None else 0
        return Facts(_count(rested), left_out, size)

    def words(self, page: bytes, kind: int) -> tuple[Words, bytes] | None:
        """Return the words of a page's files of one kind, and what is to be said of them, if they are of use."""
        identity = identity_of(page, _KINDS[kind])
        facts = self.facts(page, kind)
        if facts is None:
            return None
        words = b""
        if facts.files:  # then no words means that they were not worth having
            words = (self._read(identity) if self._has_words(identity) else self._put_together(identity, kind)) or b""
            if not 0 < len(words) <= MAX_RAW_BYTES:
                return None
        return Words(page, kind, 0, 0, len(words), b"", *facts), words

    def _files(self, page: bytes, kind: int) -> int | None:
        """How many files of a kind a page has."""
        identity = identity_of(page, _KINDS[kind])
        facts = self._scans.facts(identity)
        if facts is not None:
            return facts.files
        rested = self._rested(identity)
        return None if rested is None else _count(rested)

    def _rested(self, identity: str) -> Rested | None:
        if not self._known.lock.acquire(timeout=_LOCK_S):
            return None
        try:
            return self._known.rested.get(identity)
        finally:
            self._known.lock.release()

    def _has_words(self, identity: str) -> bool:
        return os.path.exists(f"{self._scans.directory(identity)}/{PLACES}")

    def _read(self, identity: str) -> bytes | None:
        held = self._scans.hold_if_there(identity)
        if held is None:
            return None
        try:
            with open(f"{held.lease.path}/{NAME}", "rb") as file:
                return file.read()
        except OSError:
            return None
        finally:
            held.release()

    def _put_together(self, identity: str, kind: int) -> bytes | None:
        rested = self._rested(identity)
        if rested is None:
            return None
        together: set[bytes] = set()
        for base in rested.live:
            words = self._read(base)
            if not words:
                return None
            together.update(words.splitlines())
        for path, node in rested.missing:
            words = self._read_patched(path, content_hash(node))
            if words is None:
                return None
            together |= words_of(words, kind == BINARY)
        together.discard(b"")
        return b"\n".join(sorted(together)) + b"\n" if together else b""

    def _read_patched(self, path: bytes, content: bytes) -> bytes | None:
        """Return what is searched of a file that lies in a patch."""
        place = self._known.patched.get((path, content))
        held = self._scans.hold_if_there(place[0]) if place is not None else None
        if held is None or place is None:
            return None
        try:
            scan, number = held.scan, place[1]
            if number >= scan.files or scan.path(number) != path or scan.flags_of(number) & DECODED:
                return None
            start, end = scan.extent(number, number + 1)
            with open(scan.data_path, "rb") as file:
                file.seek(start)
                return file.read(end - start)
        except OSError:
            return None
        finally:
            held.release()


def _count(rested: Rested) -> int:
    return sum(map(len, rested.live.values())) + len(rested.missing)
