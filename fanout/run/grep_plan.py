"""A search cut into shards: which scan files one process searches, and which are built ahead of it.

Owns the cut, which depends on the tree and the number of workers alone, and building ahead. Knows nothing of patterns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from fanout.disk.paths import shown
from fanout.model import GrepShard
from fanout.view.scan import Stopped
from fanout.view.scans import Held, Part, Scans

__all__ = ["Ahead", "Done", "Shard", "split"]

#: How many scan files are built at once: most of the time they wait for the store.
_BUILDERS = 6
#: Shards a worker, where all scan files are there: so that none has to wait long for the others at the end.
_SHARDS_A_WORKER = 2
#: What is still to be fetched is searched in small shards, so that the search keeps up with it.
_FETCHED_FILES = 2048
#: More scan files than this are never held at once by one shard: each costs a descriptor.
_MAX_PARTS = 128


@dataclass(slots=True)
class Done:
    """What became of a shard."""

    fetched: int = 0
    files: int = 0
    bytes_scanned: int = 0
    duration_ms: float = 0.0
    problem: str | None = None


@dataclass(slots=True)
class Shard:
    """Some scan files that one process searches. `ordered`: they follow each other in order of paths."""

    parts: list[Part]
    ordered: bool = True
    done: Done = field(default_factory=Done)

    def described(self, host: str) -> GrepShard:
        end = self.parts[-1].end
        return GrepShard(
            first=shown(self.parts[0].first),
            last="" if end is None else shown(end),
            pages=len(self.parts),
            fetched=self.done.fetched,
            skipped=0,
            bytes_scanned=self.done.bytes_scanned,
            duration_ms=self.done.duration_ms,
            host=host,
        )


def split(parts: Sequence[Part], workers: int) -> list[Shard]:
    """Cut parts into shards for so many workers: patches first, then text, then binary files, each by path."""
    shards = [Shard(chain) for chain in _chains([part for part in parts if part.kind == "patch"])]
    if len(shards) > 2:
        shards = [Shard([part for shard in shards for part in shard.parts], ordered=False)]
    for kind in ("text", "binary"):
        mine = [part for part in parts if part.kind == kind]
        each = -(-sum(part.weight for part in mine) // (_SHARDS_A_WORKER * workers))
        shards += [Shard(run) for run in _runs(mine, each)]
    return shards


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


def _runs(parts: Sequence[Part], weight: int) -> Iterator[list[Part]]:
    run: list[Part] = []
    have = 0
    for part in parts:
        limit = weight if part.here else min(weight, _FETCHED_FILES)
        if run and (have + part.weight > limit or len(run) >= _MAX_PARTS or run[-1].here != part.here):
            yield run
            run, have = [], 0
        run.append(part)
        have += part.weight
    if run:
        yield run


class Ahead:
    """Builds the scan files that are not there, several at once, in the order in which shards will ask for them."""

    def __init__(self, scans: Scans, shards: Sequence[Shard], unwanted: Callable[[Part], bool]) -> None:
        self._scans = scans
        self._unwanted = unwanted
        absent = [part for shard in shards for part in shard.parts if not part.here]
        self._pool = ThreadPoolExecutor(_BUILDERS, "fanout-fetch") if len(absent) > 1 else None
        self._building: dict[str, Future[Held]] = {}
        if self._pool is not None:
            self._building = {part.identity: self._pool.submit(self._build, part) for part in absent}

    def hold(self, part: Part) -> Held:
        """Return a part's scan file, waiting for it where it is being built. `Stopped` where that was given up."""
        building = self._building.pop(part.identity, None)
        return self._scans.hold(part) if building is None else building.result()

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._pool is None:
            return
        for future in self._building.values():
            future.cancel()
        self._pool.shutdown(wait=True)
        for future in self._building.values():
            if not future.cancelled() and future.exception() is None:
                future.result().release()

    def _build(self, part: Part) -> Held:
        if self._unwanted(part):
            raise Stopped
        return self._scans.hold(part)
