"""A search cut into shards: which scan files one process searches, and which are built ahead of it.

Owns the cut, which depends on the tree and the number of workers alone, and building ahead. Knows nothing of patterns.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from fanout.disk.paths import shown
from fanout.disk.sharing import Shared, Turns
from fanout.model import GrepShard
from fanout.view.blocks import size_of
from fanout.view.parts import Part
from fanout.view.scan import Stopped
from fanout.view.scan_write import Layout, Recipe
from fanout.view.scans import Held, Scans

__all__ = ["Ahead", "Done", "Shard", "split"]

#: How many threads build scan files: most of the time they wait for the store, or for a core.
_BUILDERS = 18
#: How many requests' worth of stored bytes are in memory, and how many requests are under way: more of them would only
#: be slower each, and the first could be unpacked later.
_HELD = 16
_FETCHING = 6
#: Scan files of about this much together are built by one thread: about one request's worth of compressed text.
_GROUP_BYTES = 12 << 20
_GROUP_PARTS = 64
#: A shard has at least this much to search, if there is so much: a process costs about as much as searching it.
_SHARD_BYTES = 8 << 20
#: And this much at most, so that no worker waits long for another at the end.
_MOST_BYTES = 512 << 20
#: And about so many scan files: each that is held costs a descriptor.
_MOST_FILES = 128
#: What is still to be fetched is searched in small shards, so that the search keeps up with it.
_FETCHED_BYTES = 32 << 20


@dataclass(slots=True)
class Done:
    """What became of a shard."""

    fetched: int = 0
    skipped: int = 0
    files: int = 0
    bytes_scanned: int = 0
    duration_ms: float = 0.0
    problem: str | None = None


@dataclass(slots=True)
class Shard:
    """Some scan files that one process searches, in runs: in each they follow each other in order of paths."""

    runs: list[list[Part]]
    done: Done = field(default_factory=Done)

    @property
    def parts(self) -> list[Part]:
        return [part for run in self.runs for part in run]

    def described(self, host: str) -> GrepShard:
        parts = self.parts
        ends = [part.end for part in parts]
        last = max((end for end in ends if end is not None), default=b"")
        return GrepShard(
            first=shown(min(part.first for part in parts)),
            last="" if None in ends else shown(last.removesuffix(b"\0")),
            pages=len(parts),
            fetched=self.done.fetched,
            skipped=self.done.skipped,
            bytes_scanned=self.done.bytes_scanned,
            duration_ms=self.done.duration_ms,
            host=host,
        )


def split(parts: Sequence[Part], workers: int) -> list[Shard]:
    """Cut parts into shards for so many workers, each with its share of patches, text and binary files, by path."""
    here = [part for part in parts if not part.absent]
    size = sum(map(_weight, here))
    files = sum(not part.ruled_out for part in here)
    count = max(min(-(-size // _SHARD_BYTES), workers), -(-size // _MOST_BYTES), -(-files // _MOST_FILES), 1)
    shards = [Shard([]) for _ in range(count)]
    for place, chain in enumerate(_chains([part for part in here if part.kind == "patch"])):
        shards[place % count].runs.append(chain)
    absent: list[Shard] = []
    for kind in ("text", "binary"):
        mine = [part for part in here if part.kind == kind]
        share = sum(map(_weight, mine)) / count
        for place, run in enumerate(_runs(mine, share, count)):
            if run:
                shards[place].runs += _chains(run)
        absent += [
            Shard(_chains(run)) for run in _runs([p for p in parts if p.kind == kind and p.absent], _FETCHED_BYTES)
        ]
    return [shard for shard in shards if shard.runs] + absent


def _chains(parts: Sequence[Part]) -> list[list[Part]]:
    """Gather parts, sorted by their first paths, into runs in which none overlaps the next."""
    chains: list[list[Part]] = []
    for part in parts:
        for chain in chains:
            end = chain[-1].end
            if end is not None and end <= part.first:
                chain.append(part)
                break
        else:
            chains.append([part])
    return chains


def _weight(part: Part) -> int:
    if part.ruled_out:
        return 0
    return part.size if part.ranges is None else size_of(part.ranges)


def _runs(parts: Sequence[Part], share: float, most: int | None = None) -> Iterator[list[Part]]:
    """Cut parts into runs of about `share` bytes, at most `most` of them."""
    run: list[Part] = []
    have = cuts = 0
    for part in parts:
        if run and have + _weight(part) / 2 > share * (cuts + 1) and (most is None or cuts + 1 < most):
            yield run
            run, cuts = [], cuts + 1
        run.append(part)
        have += _weight(part)
    if run:
        yield run


class Ahead:
    """Builds the scan files that are not there, several at once, in the order in which it is told of them.

    Neighbours are built together, one after the other by one thread: they share what is fetched.
    """

    def __init__(self, scans: Scans, unwanted: Callable[[Part], bool]) -> None:
        self._scans = scans
        self._unwanted = unwanted
        self._pool = ThreadPoolExecutor(_BUILDERS, "fanout-fetch")
        self._turns = Turns(_HELD, _FETCHING, len(os.sched_getaffinity(0)))
        self._gathered: dict[str, list[Part]] = {}
        self._building: dict[str, Future[Held]] = {}

    def add(self, part: Part) -> None:
        """Have a part built, together with those of its kind that come next. For one thread."""
        group = self._gathered.setdefault(part.kind, [])
        group.append(part)
        self._building[part.identity] = Future()
        if sum(each.size for each in group) >= _GROUP_BYTES or len(group) >= _GROUP_PARTS:
            self._submit(part.kind)

    def all_added(self) -> None:
        """Say that no other part comes."""
        for kind in list(self._gathered):
            self._submit(kind)

    def hold(self, part: Part) -> Held:
        """Return a part's scan file, waiting for it where it is being built. `Stopped` where that was given up."""
        building = self._building.pop(part.identity, None)
        if building is not None:
            return building.result()
        return self._scans.hold(part.identity, part.build)

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        for future in self._building.values():
            if future.done() and future.exception() is None:
                future.result().release()

    def _submit(self, kind: str) -> None:
        group = [(part, self._building[part.identity]) for part in self._gathered.pop(kind)]
        self._pool.submit(self._build, group)

    def _build(self, group: Sequence[tuple[Part, Future[Held]]]) -> None:
        """Build some parts. Where one cannot be had those after it are not wanted, either."""
        todo = deque(future for _, future in group)
        failure: BaseException = Stopped()
        laid_out: list[tuple[Part, Recipe, Layout]] = []
        try:
            for part, _ in group:
                self._check(part)
                assert isinstance(part.build, Recipe)
                laid_out.append((part, part.build, part.build.lay_out()))
        except BaseException as error:
            failure = error
        try:
            self._build_together(laid_out, todo)
        except BaseException as error:
            failure = error
        for future in todo:
            future.set_exception(failure)

    def _build_together(self, laid_out: Sequence[tuple[Part, Recipe, Layout]], todo: deque[Future[Held]]) -> None:
        for place, (part, recipe, layout) in enumerate(laid_out):
            if not place:
                wants = [layout.refs for _, _, layout in laid_out]
                frames = Shared(recipe.reader, wants, recipe.blobs, self._turns)
            self._check(part)
            todo[0].set_result(self._scans.hold(part.identity, partial(recipe.write, layout=layout, frames=frames)))
            todo.popleft()

    def _check(self, part: Part) -> None:
        if self._unwanted(part):
            raise Stopped
