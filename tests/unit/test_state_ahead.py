"""Reading a whole tree: pages are loaded ahead in parallel, in order, and no further than they are wanted."""

from __future__ import annotations

import threading

import pytest

from fanout.disk.disk import Disk
from fanout.disk.state import State
from fanout.errors import Corrupt
from fanout.format import layout
from fanout.store.base import Store
from fanout.store.memory import MemoryStore
from fanout.store.wrap import Wrapper
from tests.support.disks import UNFOLDED, cold, new_disk, put, put_many

_TUNING = UNFOLDED.model_copy(update={"page_entries": 2})


class Watched(Wrapper):
    """A store that counts pages, holds the first one back until another is asked for, and says whether one was."""

    def __init__(self, inner: Store, patience_s: float = 0.0) -> None:
        super().__init__(inner)
        self._patience_s = patience_s
        self._second = threading.Event()
        self.pages = 0

    @property
    def overlapped(self) -> bool:
        return self._second.is_set()

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        if "/page/" in key:
            self.pages += 1
            if self.pages == 1:
                self._second.wait(self._patience_s)
                self._patience_s = 0.0
            elif self._patience_s:
                self._second.set()
        return super().get(key, start, length)


@pytest.fixture
def disk() -> Disk:
    disk = new_disk(MemoryStore(), tuning=_TUNING)
    put_many(disk, [(f"{top}/{number:02}", b"x") for top in "abcd" for number in range(20)])
    disk.branch().fold()
    put(disk, "b/07x", b"later")
    put(disk, "zz", b"last")
    return disk


def tree(disk: Disk, store: Store) -> State:
    return cold(disk, store).branch().refresh()


def test_a_whole_tree_is_the_same_read_ahead_or_not(disk: Disk) -> None:
    store = disk._store
    for path in (b"", b"b", b"d", b"zz", b"none"):
        assert list(tree(disk, store).below(path, whole=True)) == list(tree(disk, store).below(path))


def test_pages_are_loaded_at_the_same_time(disk: Disk) -> None:
    ahead, one_by_one = Watched(disk._store, 10), Watched(disk._store, 0.05)
    assert len(list(tree(disk, ahead).below(b"", whole=True))) == 86
    assert ahead.overlapped
    assert len(list(tree(disk, one_by_one).below(b""))) == 86
    assert not one_by_one.overlapped


def test_who_stops_early_leaves_no_thread_and_did_not_read_it_all(disk: Disk) -> None:
    store = Watched(disk._store)
    state = tree(disk, store)
    before = threading.active_count()
    entries = state.below(b"", whole=True)
    next(entries)
    entries.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before
    assert 1 <= store.pages <= 12 < len(state.snap.pages)


def test_a_page_that_is_gone_is_named(disk: Disk) -> None:
    store = disk._store
    gone = layout.page_key(disk.id, tree(disk, store).snap.pages[20].hash)
    store.delete([gone])
    with pytest.raises(Corrupt, match=gone):
        list(tree(disk, store).below(b"", whole=True))
