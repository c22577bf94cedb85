"""Garbage collection beside everything else: killed anywhere, twice at once, and with others at work at any moment.

CASE 16: what a killed commit left goes after the grace.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from fanout.disk.disk import Disk, Point
from fanout.disk.trim import Trimmed
from fanout.errors import Limit, Unavailable, Unknown
from fanout.format import layout
from fanout.store.base import Store
from fanout.store.local import LocalStore
from fanout.store.memory import MemoryStore
from fanout.store.wrap import Fault, Faulty
from tests import support
from tests.support.disks import TINY, check_refs, check_tree, cold, contents, get, hasty, new_disk, put
from tests.support.every_request import EveryRequest
from tests.support.late import HASTY

T = TypeVar("T")
SCRIPT = Path(support.__file__).parent / "late.py"


class Died(BaseException):
    """The process is no more."""


class Hooked(EveryRequest):
    """Calls `action` just before the k-th request."""

    def __init__(self, inner: Store, k: int, action: Callable[[], None]) -> None:
        super().__init__(inner)
        self._k = k
        self._action = action
        self.count = 0
        self._lock = threading.Lock()

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:  # as a process can be killed between two keys of one request
            self.at(lambda key=key: self.inner.delete([key]))  # type: ignore[misc]

    def at(self, request: Callable[[], T]) -> T:
        with self._lock:
            self.count += 1
            if self.count == self._k:
                self._action()
        return request()


class Dying(Hooked):
    """No request from the k-th on is made."""

    def __init__(self, inner: Store, k: int) -> None:
        super().__init__(inner, 0, lambda: None)
        self._last = k

    def at(self, request: Callable[[], T]) -> T:
        with self._lock:
            self.count += 1
            if self.count >= self._last:
                raise Died
        return request()


def aged() -> tuple[MemoryStore, Disk]:
    """A disk with history, points to keep, garbage of every kind, and a grace of nothing at all."""
    store = MemoryStore()
    disk = new_disk(store, tuning=TINY)
    for n in range(11):
        put(disk, f"f{n % 3}", b"%02d" % n * 30)
        disk.branch().settle()
    disk.create_checkpoint("cp", disk.branch(), 4)
    disk.create_branch("fork", Point(disk.branch(), 5))
    put(disk, "own", b"o" * 80, "fork")
    disk.close()  # a fold that still ran would lose what it stored to a grace of nothing
    store.put(layout.pack_key(disk.id, b"\x02" * 16), b"orphan")
    return store, disk


POINTS = ("main", "cp", "fork")


def trees(disk: Disk, store: Store, names: Sequence[str] = POINTS) -> dict[str, dict[bytes, bytes]]:
    found = {}
    for name in names:
        fresh = cold(disk, store)
        state = fresh.point(name).state()
        check_tree(state)
        check_refs(store, fresh, state)
        found[name] = contents(fresh, state)
    return found


def every_request(make: Callable[[int], Store | None]) -> int:
    """Call `make` for k = 1, 2, ... until it returns None; returns how far that was."""
    k = 1
    while make(k) is not None:
        k += 1
    return k


def test_killed_at_every_request_it_can_be_repeated() -> None:
    store, disk = aged()
    before = trees(disk, store)
    cold(disk, store).collect(0, 0)
    whole = {kind: len([m for m in store.list() if f"/{kind}/" in m.key]) for kind in ("pack", "page", "snap")}

    def killed(k: int) -> Store | None:
        store, disk = aged()
        dying = Dying(store, k)
        try:
            cold(disk, dying).collect(0, 0)
            return None
        except Died:
            pass
        assert trees(disk, store) == before
        cold(disk, store).collect(0, 0)
        assert trees(disk, store) == before
        left = {kind: len([m for m in store.list() if f"/{kind}/" in m.key]) for kind in whole}
        assert left == whole
        return store

    assert every_request(killed) > 40


@pytest.mark.parametrize("kind", ["lost", "echo", "refused", "unavailable"])
def test_faulty_answers_never_cost_data(kind: str) -> None:
    for verb in ("create", "put", "get", "list", "delete"):
        for nth in (1, 2, 3, 7):
            store, disk = aged()
            before = trees(disk, store)
            faulty = Faulty(store, Fault(kind, verb, nth=nth))  # type: ignore[arg-type]
            with contextlib.suppress(Unavailable, Unknown):
                Disk(faulty, disk.record, hasty(), TINY).collect(0, 0)
            assert trees(disk, store) == before
            cold(disk, store).collect(0, 0)
            assert trees(disk, store) == before


def during(act: Callable[[Disk, Store], None], check: Callable[[Disk, Store], None]) -> int:
    """Let something happen at each moment of a collection, and look at what is left after it and after another."""

    def once(k: int) -> Store | None:
        store, disk = aged()
        other = cold(disk, store)
        other.branch().refresh()
        hooked = Hooked(store, k, lambda: act(other, store))
        cold(disk, hooked).collect(0, 0)
        other.close()
        for _ in range(2):
            check(disk, store)
            cold(disk, store).collect(0, 0)
        check(disk, store)
        return store if hooked.count >= k else None

    return every_request(once)


def test_a_checkpoint_made_meanwhile_is_refused_or_kept() -> None:
    kept = refused = 0

    def act(other: Disk, store: Store) -> None:
        nonlocal kept, refused
        try:
            other.create_checkpoint("mid", other.branch(), 6)
            kept += 1
        except Trimmed:
            refused += 1

    def check(disk: Disk, store: Store) -> None:
        trees(disk, store)
        fresh = cold(disk, store)
        if "mid" in fresh.checkpoint_names():
            state = fresh.point("mid").state()
            check_refs(store, fresh, state)
            assert contents(fresh, state)[b"f2"] == b"05" * 30

    during(act, check)
    assert kept > 20
    assert refused > 20


def test_a_branch_made_meanwhile_from_an_old_point_is_refused_or_kept() -> None:
    def act(other: Disk, store: Store) -> None:
        try:
            other.create_branch("mid", Point(other.branch(), 7))
            put(other, "mine", b"m" * 70, "mid")
        except Trimmed:
            assert "mid" not in cold(other, store).branch_names()

    def check(disk: Disk, store: Store) -> None:
        trees(disk, store)
        fresh = cold(disk, store)
        if "mid" in fresh.branch_names():
            state = fresh.point("mid").state()
            check_refs(store, fresh, state)
            found = contents(fresh, state)
            assert (found[b"f0"], found[b"mine"]) == (b"06" * 30, b"m" * 70)

    during(act, check)


def test_commits_and_folds_meanwhile_are_kept() -> None:
    def act(other: Disk, store: Store) -> None:
        # All at one moment, as a grace of nothing would take the packs of a commit under way.
        for n in range(4):
            put(other, f"new/{n}", b"%d" % n * 90)
            other.branch().settle()
        other.delete_object(other.point(), b"f1")
        other.branch().fold()

    def check(disk: Disk, store: Store) -> None:
        found = trees(disk, store)["main"]
        if b"new/0" in found:
            assert b"f1" not in found
            assert [found[b"new/%d" % n] for n in range(4)] == [b"%d" % n * 90 for n in range(4)]

    during(act, check)


def test_two_collections_at_once() -> None:
    store, disk = aged()
    before = trees(disk, store)
    during(
        lambda other, store: void(cold(other, store).collect(0, 0)),
        lambda disk, store: void(trees(disk, store) == before or pytest.fail("a tree changed")),
    )


def void(value: object) -> None:
    """For lambdas that are called for what they do."""


def test_everything_at_once(tmp_path: Path) -> None:
    """Writers, folds and two collectors for a while, with history that is old after a second."""
    store = LocalStore(tmp_path, fsync=False)
    tuning = TINY.model_copy(update={"stale_s": 0.3, "unreferenced_s": 0.8})
    disk = new_disk(store, tuning=tuning)
    until = time.monotonic() + 4
    expected: dict[bytes, bytes] = {}
    failures: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            while time.monotonic() < until:
                work()
        except BaseException as error:
            failures.append(error)

    def writer(who: str) -> Callable[[], None]:
        handle, count = cold(disk, store), 0

        def work() -> None:
            nonlocal count
            path, data = f"{who}/{count % 7}", f"{who} {count}".encode() * 9
            try:
                put(handle, path, data)
            except Limit:  # this machine was too busy
                return
            expected[path.encode()] = data
            assert get(handle, path) == data
            count += 1

        return work

    def collector() -> None:
        cold(disk, store).collect(grace_s=1.7, keep_history_s=1.7)
        time.sleep(0.05)

    threads = [threading.Thread(target=guarded, args=(writer(who),)) for who in "ab"]
    threads += [threading.Thread(target=guarded, args=(collector,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    cold(disk, store).collect(0, 0)
    assert trees(disk, store, ["main"])["main"] == expected
    assert cold(disk, store).collect(0, 0).trimmed["main"] > 0
    store.close()


class Frozen:
    """A committing process that has stopped itself between its last check and its create."""

    def __init__(self, root: Path, disk: Disk, path: str, size: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(root), disk.id, path, str(size)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[2])},
        )
        _, status = os.waitpid(self.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), status

    def thaw(self) -> str:
        os.kill(self.process.pid, signal.SIGCONT)
        said, _ = self.process.communicate(timeout=60)
        return said.strip()


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalStore]:
    store = LocalStore(tmp_path, fsync=False)
    yield store
    store.close()


def test_a_frozen_committer_does_not_bring_a_trimmed_number_back(local: LocalStore, tmp_path: Path) -> None:
    disk = new_disk(local, tuning=HASTY)
    put(disk, "first", b"1")
    frozen = Frozen(tmp_path, disk, "late", 5)
    for n in range(9):
        put(disk, f"f{n % 2}", b"%d" % n * 40)
        disk.branch().settle()
    time.sleep(0.3)
    boundary = disk.collect(0.1, 0.1).trimmed["main"]
    trimmed = layout.log_key(disk.id, disk.branch().uuid, 2)
    assert boundary > 2
    assert local.head(trimmed) is None
    assert frozen.thaw() == "committed"
    assert local.head(trimmed) is not None, "it did come too late, or this tests nothing"
    fresh = cold(disk, local)
    state = fresh.branch().refresh()
    assert contents(fresh, state)[b"late"] == b"f" * 5, "what was acknowledged is there"
    assert state.seq > 10
    assert get(disk, "late") == b"f" * 5
    disk.collect(0, 0)
    assert local.head(trimmed) is None


def test_a_frozen_committer_whose_data_was_collected_commits_nothing(local: LocalStore, tmp_path: Path) -> None:
    disk = new_disk(local, tuning=HASTY)
    put(disk, "first", b"1")
    frozen = Frozen(tmp_path, disk, "late", 500)
    assert list(local.list(f"{layout.disk_prefix(disk.id)}pack/"))
    time.sleep(0.3)
    assert disk.collect(0.1, 0.1).packs > 0
    assert frozen.thaw().startswith("limit ")
    fresh = cold(disk, local)
    assert contents(fresh, fresh.branch().refresh()) == {b"first": b"1"}
