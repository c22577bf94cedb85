"""Writing a tree uses several threads from its first batch on: requests and decompression run side by side."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from fanout.config import Tuning
from fanout.store.memory import MemoryStore
from fanout.store.wrap import Wrapper
from fanout.view import materialise as module
from fanout.view.materialise import materialise
from tests.support.views import Workspace, folder

FILES = 40


class Packs(Wrapper):
    """A store that gives out packs only `together` at a time, and remembers who asked."""

    def __init__(self, together: int) -> None:
        super().__init__(MemoryStore())
        self._barrier = threading.Barrier(together)
        self.armed = False
        self.askers: list[str] = []

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        if self.armed and "/pack/" in key:
            self.askers.append(threading.current_thread().name)
            self._barrier.wait(timeout=10)
        return super().get(key, start, length)


def written(store: Packs, where: Path) -> int:
    # One pack a file, nothing inline: a batch of four files is four requests, a batch of one is one.
    space = Workspace(Tuning(inline_bytes=0, pack_bytes=1, fold_entries=1 << 30), store)
    space.write({b"f%02d" % number: b"content %d" % number for number in range(FILES)})
    store.armed = True
    where.mkdir()
    fd = os.open(where, os.O_RDONLY)
    try:
        materialise(fd, folder(), space.state.below(b""), space.reader, space.state.blob_bytes())
    finally:
        os.close(fd)
    return len(os.listdir(where))


@pytest.mark.parametrize("batch", [1, 4])
def test_a_tree_of_several_batches_is_fetched_by_several_threads(
    batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BATCH_FILES", batch)
    store = Packs(together=2)
    assert written(store, tmp_path / "tree") == FILES
    assert len(store.askers) == FILES
    assert threading.current_thread().name not in store.askers
