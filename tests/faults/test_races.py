"""Many at once on one branch: CASE 15 (committers), CASE 17 (readers of a big commit), CASE 18 (a big rename)."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fanout.config import Tuning
from fanout.disk.disk import Disk
from fanout.disk.merge import Intent, Policy
from fanout.disk.proposal import Proposal
from fanout.errors import Conflict
from fanout.format import layout
from fanout.format.tree import FILE, directory
from fanout.store.base import Store
from fanout.store.local import LocalStore
from fanout.store.memory import MemoryStore
from fanout.store.wrap import Metered
from tests import support
from tests.support.disks import UNFOLDED, check_tree, cold, contents, file_node, main, new_disk, put, put_many

SCRIPT = Path(support.__file__).parent / "killed.py"


@pytest.fixture(params=["memory", "local", pytest.param("s3", marks=pytest.mark.s3)])
def store(request: pytest.FixtureRequest) -> Store:
    found: Store = request.getfixturevalue(f"{request.param}_store")
    return found


def numbers(disk: Disk, store: Store) -> list[int]:
    return [layout.seq_of_key(meta.key) for meta in store.list(layout.log_prefix(disk.id, disk.branch().uuid))]


@pytest.mark.parametrize("handles", [1, 8])
def test_32_committers_have_32_effects(store: Store, handles: int) -> None:
    disk = new_disk(store, tuning=Tuning(fold_entries=8, page_entries=8))
    each = [disk if handles == 1 else cold(disk, store) for _ in range(handles)]
    barrier = threading.Barrier(32)

    def commit(n: int) -> int | None:
        mine = each[n % handles]
        base = mine.branch().refresh()
        node, blobs = file_node(mine, b"%d" % n)
        intents = [Intent(b"results", None, directory()), Intent(b"results/%d" % n, None, node)]
        barrier.wait()
        return mine.branch().commit(Proposal(intents, Policy.FIRST_WINS, base.seq, blobs)).seq

    with ThreadPoolExecutor(32) as pool:
        landed = list(pool.map(commit, range(32)))
    for handle in each:
        handle.close()
    state = cold(disk, store).branch().refresh()
    assert contents(disk, state) == {b"results/%d" % n: b"%d" % n for n in range(32)}
    found = numbers(disk, store)
    assert found == list(range(1, len(found) + 1))
    assert set(landed) == set(found)
    assert sum(len(entry.commits) for entry in cold(disk, store).log(main(disk))) == 32
    for handle in each:
        assert contents(disk, handle.branch().refresh()) == contents(disk, state)


def test_of_32_that_want_one_path_one_wins_and_31_know_it(store: Store) -> None:
    disk = new_disk(store)
    handles = [cold(disk, store) for _ in range(4)]
    for handle in handles:
        handle.branch().refresh()

    def commit(n: int) -> bool:
        node, blobs = file_node(handles[n % 4], b"%d" % n)
        try:
            handles[n % 4].branch().commit(Proposal([Intent(b"f", None, node)], Policy.FIRST_WINS, 0, blobs))
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(32) as pool:
        won = [n for n, landed in enumerate(pool.map(commit, range(32))) if landed]
    assert len(won) == 1
    assert contents(disk, cold(disk, store).branch().refresh()) == {b"f": b"%d" % won[0]}
    assert numbers(disk, store) == [1]


def race(url: str, disk: Disk, count: int) -> set[str]:
    """Let four processes commit at once; returns the paths they were told had landed."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), url, disk.id, "race", f"p{n}", str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[2])},
        )
        for n in range(4)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    said: set[str] = set()
    for process in processes:
        out, _ = process.communicate(timeout=100)
        assert process.returncode == 0
        said |= set(out.split()) - {"end"}
    return said


def check_race(disk: Disk, store: Store, said: set[str], count: int) -> None:
    assert len(said) == 4 * count
    fresh = cold(disk, store)
    state = fresh.branch().refresh()
    check_tree(state)
    assert contents(fresh, state) == {path.encode(): path.replace("/", " ").encode() for path in said}
    found = numbers(disk, store)
    assert found == list(range(1, len(found) + 1))
    assert 1 <= len(list(store.list(layout.snap_prefix(disk.id, disk.branch().uuid)))) <= len(found) // 4


def test_four_processes_lose_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, fsync=False)
    disk = new_disk(store)
    check_race(disk, store, race(store.url, disk, 30), 30)


@pytest.mark.s3
def test_four_processes_lose_nothing_on_s3(s3_store: Store) -> None:
    disk = new_disk(s3_store)
    check_race(disk, s3_store, race(s3_store.url, disk, 15), 15)


def test_a_reader_sees_all_of_a_commit_or_nothing(store: Store) -> None:
    disk = new_disk(store, tuning=Tuning(fold_paths=1500))
    put_many(disk, [("d/old", b"")])
    stop = threading.Event()
    seen: set[int] = set()

    def read(fresh: bool) -> None:
        handle = cold(disk, store)
        while not stop.is_set():
            handle = cold(disk, store) if fresh else handle
            state = handle.branch().refresh()
            seen.add(sum(1 for _ in state.below(b"d")))

    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(read, fresh) for fresh in (True, False, False)]
        try:
            for n in range(3):
                put_many(disk, [(f"d/{n}-{i}", b"") for i in range(1000)])
        finally:
            stop.set()
        for reader in readers:
            reader.result()
    disk.close()
    assert seen <= {1, 1001, 2001, 3001}


def test_renaming_a_directory_is_one_entry_and_moves_no_data() -> None:
    store = Metered(MemoryStore())
    disk = new_disk(store, tuning=Tuning(inline_bytes=0))
    put_many(disk, [(f"big/{n % 50}/{n}", b"%d" % n * 100) for n in range(5000)])
    disk.close()
    before, packs = store.usage(), set(store.list(f"disks/{disk.id}/pack/"))
    disk.move(main(disk), b"big", b"new/name")
    used = store.usage() - before
    assert (used["create"], used["put"]) == (1, 0)
    state = cold(disk, store).branch().refresh()
    assert state.get(b"big") is None
    assert not state.has_children(b"big")
    assert sum(1 for _, node in state.below(b"new/name") if node.kind == FILE) == 5000
    disk.close()
    assert set(store.list(f"disks/{disk.id}/pack/")) == packs
    assert contents(disk, state)[b"new/name/7/57"] == b"57" * 100


def test_a_fold_in_the_middle_of_commits_loses_nothing(store: Store) -> None:
    disk = new_disk(store, tuning=UNFOLDED.model_copy(update={"page_entries": 8}))
    folder = cold(disk, store)
    stop = threading.Event()

    def fold() -> None:
        while not stop.is_set():
            for handle in (folder, disk):
                handle.branch().refresh()
                handle.branch().fold()

    with ThreadPoolExecutor(1) as pool:
        folding = pool.submit(fold)
        try:
            for n in range(40):
                put(disk, f"f{n % 25}", b"%d" % n)
                disk.move(main(disk), f"f{n % 25}".encode(), b"moved")
                disk.move(main(disk), b"moved", f"f{n % 25}".encode())
        finally:
            stop.set()
        folding.result()
    wanted = {b"f%d" % (n % 25): b"%d" % n for n in range(40)}
    for handle in (disk, folder, cold(disk, store)):
        assert contents(handle, handle.branch().refresh()) == wanted
