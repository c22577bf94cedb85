"""Publishes the words of a tree's pages in the background, so that hosts that have nothing of it can search it.

Owns when that is worth it, and what an index object replaces. Nothing depends on its success: a store that refuses is
not asked again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from fanout.disk.index import IndexObject, WordIndex
from fanout.errors import Corrupt, FanoutError, NotFound
from fanout.format.index import BINARY, TEXT, IndexBuilder, Words, compress_words
from fanout.format.tree import PageRef
from fanout.runtime import Runtime
from fanout.view.own_words import OwnWords
from fanout.view.published import LEAST_BYTES
from fanout.view.scans import Facts, Scans

__all__ = ["Publisher"]

#: Where an index object is cut.
_OBJECT_BYTES = 32 << 20
#: From so many objects on, those are replaced that are small, if there are some, or mostly of pages of another tree.
_MANY = 8
_SMALL_BYTES = 16 << 20
_SOME = 4
#: A disk is looked at again after so long, and after something of it was published.
_PAUSE_S = 30.0
_REST_S = 300.0
#: Hosts that begin together look for what others published not quite together.
_SPREAD_S = 5.0
_CLOSE_S = 1.0

Place = tuple[bytes, int]


class _Job(NamedTuple):
    of: WordIndex
    pages: tuple[PageRef, ...]
    newest: bool


class Publisher:
    """One thread at a time, and only while there is something to do. `settle` waits for the words on this host."""

    def __init__(self, scans: Scans, runtime: Runtime, settle: Callable[[], None]) -> None:
        self._scans = scans
        self._runtime = runtime
        self._settle = settle
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._jobs: dict[str, _Job] = {}
        #: When a disk is to be looked at next.
        self._next_s: dict[str, float] = {}
        self._closed = threading.Event()

    def want(self, index: WordIndex, pages: Sequence[PageRef], size: int, *, newest: bool) -> None:
        """Have the words of a tree's pages published, as far as this host has them; `size` is about its bytes.

        `newest` says that it is that of a branch now: what others hold of the disk may be measured by it.
        """
        now_s = self._runtime.monotonic()
        with self._lock:
            if self._closed.is_set() or size < LEAST_BYTES or now_s < self._next_s.get(index.disk_id, now_s):
                return
            self._next_s[index.disk_id] = now_s + _PAUSE_S
            self._jobs[index.disk_id] = _Job(index, tuple(pages), newest)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fanout-publish", daemon=True)
                self._thread.start()

    def settle(self) -> None:
        """Wait until what is under way is done."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def stop(self) -> None:
        """Begin nothing any more."""
        with self._lock:
            self._closed.set()

    def close(self) -> None:
        """End what is under way; a request to the store that takes long is left to its own end."""
        self.stop()
        thread = self._thread
        if thread is not None:
            thread.join(_CLOSE_S)

    def _run(self) -> None:
        while True:
            self._settle()
            self._closed.wait(self._runtime.uniform(0.0, _SPREAD_S))
            with self._lock:
                if self._closed.is_set() or not self._jobs:
                    self._thread = None
                    return
                disk_id, job = self._jobs.popitem()
            try:
                pause_s = self._publish(*job)
            except (FanoutError, OSError):
                pause_s = float("inf")
            with self._lock:
                self._next_s[disk_id] = self._runtime.monotonic() + pause_s

    def _publish(self, index: WordIndex, pages: Sequence[PageRef], newest: bool) -> float:
        """Publish what is worth it; returns when to look at the disk again, in seconds from now."""
        own = OwnWords(self._scans, index.disk_id)
        tree = [(page.hash, kind) for page in pages for kind in (TEXT, BINARY)]
        mine = {
            place: facts.size for place in tree if (facts := own.facts(*place)) is not None and _tells(place, facts)
        }
        if sum(mine.values()) < LEAST_BYTES:
            return _PAUSE_S
        objects = index.objects()
        if len(objects) >= _MANY:
            double = _doubles(objects)
            index.remove(double)
            objects = [each for each in objects if each not in double]
        published = {place for each in objects for place in each.covers}
        new = [place for place in mine if place not in published]
        if sum(mine[place] for place in new) < LEAST_BYTES:
            return _PAUSE_S
        replaced = _to_replace(objects, set(tree)) if newest else []
        for data in _cut(self._words(own, index, new, set(tree), replaced)):
            if self._closed.is_set():
                return _PAUSE_S
            if not index.publish(data):
                return float("inf")
        if not self._closed.is_set():
            index.remove(replaced)
        return _REST_S

    def _words(
        self, own: OwnWords, index: WordIndex, new: Sequence[Place], tree: set[Place], replaced: Sequence[IndexObject]
    ) -> Iterator[tuple[Words, bytes]]:
        """Yield new words of this host's, and what is of the tree in objects that are to be replaced."""
        done: set[Place] = set()
        for place in new:
            found = own.words(*place)
            if found is not None and not self._closed.is_set():
                done.add(place)
                yield found
        for each in replaced:
            wanted = [frame for frame in each.frames if (frame.page, frame.kind) in tree - done]
            done |= {(frame.page, frame.kind) for frame in wanted}
            for piece in index.plan(each, wanted):
                if self._closed.is_set():
                    return
                try:
                    yield from index.fetch(piece)
                except (Corrupt, NotFound):
                    continue


def _tells(place: Place, facts: Facts) -> bool:
    """Whether somebody would ask: a page without binary files says so with its text ones."""
    return place[1] == TEXT or facts.files > 0


def _doubles(objects: Sequence[IndexObject]) -> list[IndexObject]:
    """Return which objects hold nothing that those before them do not; whoever looks finds the same ones."""
    double: list[IndexObject] = []
    covered: set[Place] = set()
    for each in objects:
        if each.covers <= covered:
            double.append(each)
        covered |= each.covers
    return double


def _to_replace(objects: Sequence[IndexObject], tree: set[Place]) -> list[IndexObject]:
    """Return which objects one with what they have of a tree would replace."""
    if len(objects) < _MANY:
        return []
    dead = [each for each in objects if 2 * len(each.covers & tree) < len(each.frames)]
    small = [each for each in objects if each.size < _SMALL_BYTES and each not in dead]
    return [*dead, *(small if len(small) >= _SOME else ())]


def _cut(words: Iterator[tuple[Words, bytes]]) -> Iterator[bytes]:
    """Put words into objects of a size that is not too large."""
    builder = IndexBuilder()
    for about, raw in words:
        builder.add(compress_words(raw), about)
        if builder.size >= _OBJECT_BYTES:
            yield builder.finish()
            builder = IndexBuilder()
    if builder.frames:
        yield builder.finish()
