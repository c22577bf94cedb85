"""When words are published, and which objects a new one replaces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fanout.disk.index import IndexObject
from fanout.errors import FanoutError, Unavailable
from fanout.format.index import TEXT, Words
from fanout.format.tree import PageRef
from fanout.run import publisher
from fanout.run.publisher import Publisher, _cut, _doubles, _to_replace
from fanout.runtime import Runtime
from fanout.store.memory import MemoryStore
from fanout.view.cache import HostCache
from fanout.view.scans import Scans
from tests.support.disks import new_disk

SMALL, LARGE = 1 << 20, 20 << 20
TREE = {(bytes([n]) * 32, TEXT) for n in range(100)}


def holding(size: int, live: int, dead: int = 0) -> IndexObject:
    pages = [bytes([n]) * 32 for n in [*range(live), *range(200, 200 + dead)]]
    frames = tuple(Words(page, TEXT, 4, 1, 1, b"", 1, 0, 1) for page in pages)
    return IndexObject(f"{size}-{live}-{dead}", size, frames)


@pytest.mark.parametrize(
    ("objects", "replaced"),
    [
        ([holding(SMALL, 5)] * 7, 0),
        ([holding(SMALL, 5)] * 8, 8),
        ([holding(LARGE, 5)] * 12, 0),
        ([*[holding(LARGE, 5)] * 6, *[holding(SMALL, 5)] * 3], 0),
        ([*[holding(LARGE, 5)] * 6, *[holding(SMALL, 5)] * 4], 4),
        ([*[holding(LARGE, 5)] * 7, holding(LARGE, 2, 3)], 1),
        ([*[holding(LARGE, 5)] * 7, holding(LARGE, 3, 3)], 0),
        ([*[holding(LARGE, 0, 9)] * 5, *[holding(SMALL, 0, 1)] * 2], 0),
        ([*[holding(LARGE, 0, 9)] * 5, *[holding(SMALL, 0, 1)] * 3], 8),
    ],
)
def test_what_a_new_object_replaces(objects: list[IndexObject], replaced: int) -> None:
    assert len(_to_replace(objects, TREE)) == replaced


def test_what_others_hold_is_double() -> None:
    one, two, three = holding(LARGE, 5), holding(SMALL, 5, 1), holding(SMALL, 3)
    assert _doubles([one, two, three]) == [three]
    assert _doubles([two, one, three]) == [one, three]
    assert _doubles([one]) == []


def test_objects_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "_OBJECT_BYTES", 2000)
    words = [b"%d\n" % n * 100 for n in range(5)]
    each = [(Words(bytes([n]) * 32, TEXT, 0, 0, len(raw), b"", 1, 0, 1), raw) for n, raw in enumerate(words)]
    assert len(list(_cut(iter(each)))) == 1
    monkeypatch.setattr(publisher, "_OBJECT_BYTES", 1)
    assert len(list(_cut(iter(each)))) == 5
    assert list(_cut(iter([]))) == []


class Watched(Publisher):
    """Counts the looks at a disk instead of looking."""

    looks = 0
    error: Exception | None = None

    def _publish(self, *_: object) -> float:
        self.looks += 1
        if self.error is not None:
            raise self.error
        return 300.0


class Clock:
    now_s = 100.0


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[tuple[Watched, Clock]]:
    clock = Clock()
    cache = HostCache(tmp_path, 1 << 30)
    runtime = Runtime(monotonic=lambda: clock.now_s, uniform=lambda low, high: low)
    yield Watched(Scans(cache), runtime, lambda: None), clock
    cache.close()


def want(one: Watched, size: int = 1 << 30) -> int:
    index = new_disk(MemoryStore()).index
    index.disk_id = "dsk-1"
    one.want(index, [PageRef(b"", b"a" * 32, 1, 1)], size, newest=True)
    one.settle()
    return one.looks


def test_a_disk_is_looked_at_now_and_then(watched: tuple[Watched, Clock]) -> None:
    one, clock = watched
    assert want(one, 1000) == 0, "too small"
    assert want(one) == 1
    clock.now_s += 299
    assert want(one) == 1
    clock.now_s += 2
    assert want(one) == 2


@pytest.mark.parametrize("error", [Unavailable("away"), OSError(5, "broken")])
def test_what_failed_is_not_tried_again(watched: tuple[Watched, Clock], error: FanoutError) -> None:
    one, clock = watched
    one.error = error
    assert want(one) == 1
    clock.now_s += 1e6
    assert want(one) == 1


def test_nothing_begins_once_it_is_stopped(watched: tuple[Watched, Clock]) -> None:
    one, _ = watched
    one.stop()
    assert want(one) == 0
    one.close()
