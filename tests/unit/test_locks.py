"""Locks on a branch: overlap, leases, fencing, the line of those who wait, and what may be written under one."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fanout.config import Tuning
from fanout.disk import checkout
from fanout.disk.branch import Branch
from fanout.disk.checkout import LEASE_S, held, locked_paths, overlapping
from fanout.disk.disk import Disk, Point
from fanout.disk.merge import Intent, Policy
from fanout.disk.proposal import Proposal, Waiting
from fanout.errors import Busy, Conflict, LeaseLost, NotFound
from fanout.format.lock import Acquire, Lock, Release, locks_after
from fanout.format.tree import SYMLINK, Node, directory
from fanout.runtime import Runtime, system
from fanout.store.base import Store
from fanout.store.memory import MemoryStore
from fanout.store.wrap import Metered
from tests.support.disks import UNFOLDED, cold, file_node, get, new_disk, put

START_NS = 1_750_000_000 * 10**9


class Clock:
    """A wall clock that stands still until it is told to move; all else is real."""

    def __init__(self) -> None:
        self.now_ns = START_NS
        self.runtime = Runtime(now_ns=lambda: self.now_ns)

    def move(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store() -> Metered:
    return Metered(MemoryStore())


@pytest.fixture
def disk(store: Store, clock: Clock) -> Iterator[Disk]:
    made = new_disk(store, clock.runtime)
    put(made, "src/a", b"a")
    yield made
    made.close()


def acquire(lock_id: str, *paths: bytes, expires_ns: int = START_NS + 60 * 10**9) -> Acquire:
    return Acquire(lock_id, f"exec-{lock_id}", paths, expires_ns)


def lock(*paths: bytes, lock_id: str = "l") -> Lock:
    return Lock(lock_id, "exec", paths, 0, 1)


def write(branch: Branch, path: bytes, lock_id: str = "", policy: Policy = Policy.LAST_WINS) -> None:
    state = branch.known()
    node = Node(SYMLINK, 0o777, 1, target=lock_id.encode() or b"t")
    branch.commit(Proposal([Intent(path, state.get(path), node)], policy, state.seq, lock_id=lock_id, exec_id="me"))


# -- pure --------------------------------------------------------------------------------------------------------------

paths = st.sampled_from([b"", b"a", b"a/b", b"a/b/c", b"a/c", b"ab", b"a-b", b"b"])


def below(above: bytes, path: bytes) -> bool:
    """The slow definition: every part of `above` begins `path`."""
    parts = above.split(b"/") if above else []
    return path.split(b"/")[: len(parts)] == parts if path or not parts else False


@given(st.lists(paths, min_size=1, max_size=3), st.lists(paths, min_size=1, max_size=3))
def test_overlap_is_a_matter_of_parts_and_goes_both_ways(some: list[bytes], others: list[bytes]) -> None:
    expected = any(below(a, b) or below(b, a) for a, b in itertools.product(some, others))
    assert bool(overlapping({"l": lock(*some)}, others)) == expected
    assert bool(overlapping({"l": lock(*others)}, some)) == expected
    assert overlapping({"l": lock(*some)}, some, own="l") == []


@given(paths, paths)
def test_what_is_under_a_lock_is_locked(held_path: bytes, path: bytes) -> None:
    locks = {"l": lock(held_path)}
    there = Intent(path, None, directory())
    assert locked_paths(locks, [there], "") == ([path] if below(held_path, path) else [])
    assert locked_paths(locks, [there], "l") == []
    assert locked_paths(locks, [Intent(path, directory(), directory(), weak=True)], "") == []


def test_a_file_where_a_lock_needs_a_directory_is_locked_too() -> None:
    locks = {"l": lock(b"a/b/new")}
    link = Node(SYMLINK, 0o777, 1, target=b"t")
    assert locked_paths(locks, [Intent(b"a/b", directory(), link)], "") == [b"a/b"]
    assert locked_paths(locks, [Intent(b"a/b", directory(), None)], "") == [], "it can be made again"
    assert locked_paths(locks, [Intent(b"a/c", None, link)], "") == []


def test_locks_after() -> None:
    first = locks_after({}, [acquire("1", b"a")], 5)
    assert first == {"1": Lock("1", "exec-1", (b"a",), START_NS + 60 * 10**9, 5)}
    renewed = locks_after(first, [acquire("1", b"a", expires_ns=9)], 8)
    assert (renewed["1"].seq, renewed["1"].expires_ns) == (5, 9), "a renewal keeps the epoch"
    assert first["1"].expires_ns == START_NS + 60 * 10**9, "values never change"
    both = locks_after(renewed, [Release("1", True), acquire("2", b"a")], 9)
    assert list(both) == ["2"]
    assert locks_after(both, [Release("nobody's")], 10) == both
    assert locks_after(both, [], 11) is both
    again = locks_after(locks_after(both, [Release("2")], 12), [acquire("2", b"a")], 13)
    assert again["2"].seq == 13, "taken again it is a new epoch"


def test_the_lease_is_as_documented() -> None:
    limits = (Path(__file__).parents[2] / "docs/LIMITS.md").read_text()
    assert f"{LEASE_S:.0f} s after its holder's last sign of life, renewed every {LEASE_S / 3:.0f} s" in limits


# -- taking, renewing, breaking ----------------------------------------------------------------------------------------


def test_only_one_holds_a_path(disk: Disk) -> None:
    branch = disk.branch()
    branch.take(acquire("1", b"src"))
    for path in (b"src", b"src/a", b"src/not/there", b""):
        with pytest.raises(Busy, match="exec-1"):
            branch.take(acquire("2", path))
    branch.take(acquire("3", b"srcs", b"other"))
    assert sorted(branch.known().locks) == ["1", "3"]
    branch.release("1")
    branch.take(acquire("2", b"src/a"))
    with pytest.raises(NotFound, match="'1'"):
        branch.release("1")


def test_all_paths_or_none(disk: Disk) -> None:
    branch = disk.branch()
    branch.take(acquire("1", b"b"))
    before = branch.known().seq
    with pytest.raises(Busy):
        branch.take(acquire("2", b"a", b"b"))
    assert branch.known().seq == before
    branch.take(acquire("3", b"a"))


def test_broken_only_after_its_lease(disk: Disk, clock: Clock) -> None:
    branch = disk.branch()
    branch.take(acquire("1", b"src", expires_ns=clock.now_ns + 10**9))
    clock.move(0.999)
    with pytest.raises(Busy):
        branch.take(acquire("2", b"src"))
    clock.move(0.001)
    branch.take(acquire("2", b"src", b"more"))
    assert list(branch.known().locks) == ["2"]
    with pytest.raises(LeaseLost, match="nothing was written"):
        write(branch, b"src/late", lock_id="1")
    with pytest.raises(LeaseLost):
        branch.take(acquire("1", b"src"), renew=True)
    assert branch.known().get(b"src/late") is None
    entry = branch.log.read(branch.known().seq)
    assert entry is not None
    assert entry.commits[0].locks[0] == Release("1", True), "the log says that it was broken"


def test_a_lease_that_ran_out_unnoticed_still_commits(disk: Disk, clock: Clock) -> None:
    """The clock alone takes nothing away: only a break, which is an entry of the log, does."""
    branch = disk.branch()
    branch.take(acquire("1", b"src"))
    clock.move(10_000)
    write(branch, b"src/late", lock_id="1")
    assert branch.known().get(b"src/late") is not None
    assert branch.known().locks == {}


def test_renewed_it_cannot_be_broken(disk: Disk, clock: Clock) -> None:
    branch = disk.branch()
    branch.take(acquire("1", b"src", expires_ns=clock.now_ns + 10**9))
    epoch = branch.known().locks["1"].seq
    clock.move(5)
    branch.take(acquire("1", b"src", expires_ns=clock.now_ns + 10**9), renew=True)
    with pytest.raises(Busy):
        branch.take(acquire("2", b"src"))
    assert branch.known().locks["1"].seq == epoch


def test_the_commit_releases_in_its_own_entry(disk: Disk) -> None:
    branch = disk.branch()
    branch.take(acquire("1", b"src"))
    before = branch.known().seq
    write(branch, b"src/a", lock_id="1")
    assert branch.known().seq == before + 1
    entry = branch.log.read(before + 1)
    assert entry is not None
    assert entry.commits[0].locks == (Release("1"),)
    assert len(entry.commits[0].effects) == 1
    assert branch.known().locks == {}


def test_one_group_takes_in_order(disk: Disk) -> None:
    """Commits of one entry see each other's locks."""
    branch = disk.branch()
    link = Node(SYMLINK, 0o777, 1, target=b"t")
    seq = branch.known().seq
    batch = [
        Waiting(Proposal((), Policy.STRICT, take=acquire("1", b"src")), seq, {}),
        Waiting(Proposal((), Policy.STRICT, take=acquire("2", b"src/a")), seq, {}),
        Waiting(Proposal([Intent(b"src/x", None, link)], Policy.LAST_WINS, seq), seq, {}),
        Waiting(Proposal([Intent(b"src/y", None, link)], Policy.LAST_WINS, seq, lock_id="1"), seq, {}),
        Waiting(Proposal((), Policy.STRICT, take=acquire("3", b"src")), seq, {}),
    ]
    branch._commit_group(batch)
    assert [type(each.error) for each in batch] == [type(None), checkout.Taken, Conflict, type(None), type(None)]
    assert list(branch.known().locks) == ["3"]
    assert branch.known().get(b"src/x") is None
    assert branch.known().get(b"src/y") is not None


# -- writing under one -------------------------------------------------------------------------------------------------


def upload(disk: Disk) -> object:
    node, blobs = file_node(disk, b"new")
    return disk.apply(disk.point(), [Intent(b"src/up", None, node)], policy=Policy.LAST_WINS, blobs=blobs)


def merge(disk: Disk) -> object:
    put(disk, "src/side", b"x", branch="side")
    return disk.merge(disk.branch(), Point(disk.branch("side")), "theirs")


WRITES: dict[str, Callable[[Disk], object]] = {
    "put": lambda disk: put(disk, "src/a", b"new"),
    "put new": lambda disk: put(disk, "src/deep/er/new", b"new"),
    "mkdir": lambda disk: disk.make_directory(disk.point(), b"src/dir", 0o755),
    "delete": lambda disk: disk.delete_object(disk.point(), b"src/a"),
    "delete above": lambda disk: disk.delete_object(disk.point(), b"src", recursive=True),
    "move away": lambda disk: disk.move(disk.point(), b"src", b"elsewhere"),
    "move in": lambda disk: disk.move(disk.point(), b"free", b"src/free"),
    "upload": upload,
    "merge": merge,
    **{
        policy.value: lambda disk, policy=policy: write(disk.branch(), b"src/a", policy=policy)  # type: ignore[misc]
        for policy in Policy
    },
}


@pytest.mark.parametrize("what", WRITES)
def test_nobody_else_writes_under_a_checkout(disk: Disk, what: str) -> None:
    put(disk, "free", b"free")
    disk.create_branch("side", disk.point())
    branch = disk.branch()
    branch.take(acquire("1", b"src"))
    before = branch.known().seq
    with pytest.raises(Conflict) as caught:
        WRITES[what](disk)
    assert caught.value.paths
    assert all(path == "src" or path.startswith("src/") for path in caught.value.paths)
    assert branch.refresh().seq == before
    put(disk, "free", b"still")  # elsewhere all goes on
    branch.release("1")
    WRITES[what](disk)
    assert branch.known().seq == before + 3


def test_a_path_that_does_not_exist_can_be_held(disk: Disk) -> None:
    branch = disk.branch()
    branch.take(acquire("1", b"new/dir"))
    with pytest.raises(Conflict, match="new/dir/f"):
        put(disk, "new/dir/f", b"")
    with pytest.raises(Conflict, match="'new'"):
        put(disk, "new", b"a file where the checkout needs a directory")
    put(disk, "new/other", b"")
    write(branch, b"new/dir/f", lock_id="1")
    assert branch.known().get(b"new/dir/f") is not None


def test_the_root_can_be_held(disk: Disk) -> None:
    disk.branch().take(acquire("1", b""))
    with pytest.raises(Conflict, match="anywhere"):
        put(disk, "anywhere", b"")


def test_a_branch_inherits_no_locks(disk: Disk, store: Store) -> None:
    disk.branch().take(acquire("1", b"src"))
    fresh = disk.create_branch("fresh", disk.point())
    assert fresh.known().locks == {}
    disk.branch().fold()
    for opened in (disk, cold(disk, store)):
        late = opened.create_branch(f"late-{opened is disk}".lower(), opened.point())
        assert late.refresh().locks == {}
        put(opened, "src/a", b"mine", branch=late.name)
    again = cold(disk, store)
    assert again.branch("fresh").refresh().locks == {}
    put(again, "src/a", b"mine", branch="fresh")
    assert list(again.branch().refresh().locks) == ["1"]


@pytest.mark.parametrize("fold", [False, True])
def test_locks_outlive_a_fold_and_a_cold_start(disk: Disk, store: Store, fold: bool) -> None:
    branch = disk.branch()
    branch.take(acquire("1", b"src"))
    put(disk, "free", b"x")
    if fold:
        branch.fold()
    for opened in (disk, cold(disk, store)):
        state = opened.branch().refresh()
        assert state.locks == {"1": Lock("1", "exec-1", (b"src",), START_NS + 60 * 10**9, 2)}
        assert (state.folded_seq == 3) == fold
        with pytest.raises(Conflict):
            put(opened, "src/a", b"")
    write(cold(disk, store).branch(), b"src/a", lock_id="1")
    assert branch.refresh().locks == {}
    branch.fold()
    assert cold(disk, store).branch().refresh().locks == {}


# -- held: waiting, renewing, giving back ------------------------------------------------------------------------------


def hold(branch: Branch, owner: str, *wanted: bytes, wait_s: float = 30.0) -> AbstractContextManager[str]:
    return held(branch, owner, wanted, wait_s, branch._runtime)


def test_held_and_given_back(disk: Disk) -> None:
    branch = disk.branch()
    with hold(branch, "me", b"src", b"src", b"a") as lock_id:
        assert branch.known().locks[lock_id].paths == (b"a", b"src")
    assert branch.known().locks == {}
    with pytest.raises(RuntimeError, match="stop"), hold(branch, "me", b"src"):
        raise RuntimeError("stop")
    assert branch.known().locks == {}
    before = branch.known().seq
    with hold(branch, "me", b"src") as lock_id:
        write(branch, b"src/a", lock_id=lock_id)
    assert branch.known().seq == before + 2, "its commit has released it: no entry more"


@pytest.mark.parametrize("wait_s", [0.0, 0.05])
def test_waiting_is_bounded_and_names_the_holder(disk: Disk, wait_s: float) -> None:
    branch = disk.branch()
    with hold(branch, "the-holder", b"src"):
        began = system.monotonic()
        says = rf"'src' is checked out by the-holder; waited {wait_s * 1e3:.0f} ms"
        with pytest.raises(Busy, match=says), hold(branch, "me", b"src/a", wait_s=wait_s):
            pass
        assert wait_s <= system.monotonic() - began < wait_s + 5
        assert [each.owner for each in branch.known().locks.values()] == ["the-holder"]


def test_no_wait_where_another_process_has_let_go(disk: Disk, store: Store) -> None:
    """With no time to wait, what is known of others' locks is looked up again before it is believed."""
    mine, theirs = disk.branch(), cold(disk, store).branch()
    theirs.take(acquire("1", b"src"))
    mine.refresh()
    theirs.release("1")
    with hold(mine, "me", b"src", wait_s=0):
        pass
    theirs.refresh()
    theirs.take(acquire("2", b"src"))
    with pytest.raises(Busy), hold(mine, "me", b"src", wait_s=0):
        pass


def test_a_lock_of_another_process_is_seen_to_go(disk: Disk, store: Store) -> None:
    theirs = cold(disk, store).branch()
    theirs.take(acquire("1", b"src"))
    timer = threading.Timer(0.05, theirs.release, ("1",))
    timer.start()
    with hold(disk.branch(), "me", b"src"):
        pass
    timer.join()


def test_while_it_waits_it_can_be_called_off(disk: Disk) -> None:
    called = []

    def check() -> None:
        called.append(1)
        if len(called) > 2:
            raise RuntimeError("called off")

    with hold(disk.branch(), "other", b"src"):
        waiting = held(disk.branch(), "me", (b"src",), 30.0, disk.runtime, check)
        with pytest.raises(RuntimeError, match="called off"), waiting:
            pass
        assert len(disk.branch().known().locks) == 1
    with hold(disk.branch(), "next", b"src", wait_s=0):
        pass


def test_renewed_while_it_is_held(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkout, "LEASE_S", 0.3)
    disk = new_disk(store, system)
    branch = disk.branch()
    with hold(branch, "me", b"src") as lock_id:
        seen = {branch.known().locks[lock_id].expires_ns}
        end = system.monotonic() + 20
        while len(seen) < 4 and system.monotonic() < end:
            system.sleep(0.02)
            seen.add(branch.known().locks[lock_id].expires_ns)
        assert len(seen) >= 4
        with pytest.raises(Busy), hold(branch, "other", b"src", wait_s=0):
            pass
        write(branch, b"src/a", lock_id=lock_id)
    assert branch.known().locks == {}


def test_crossed_paths_do_not_deadlock(store: Store) -> None:
    disk = new_disk(store, system)
    branch = disk.branch()
    inside = [0]

    def work(n: int) -> None:
        wanted = (b"a", b"b", b"c") if n % 2 else (b"c", b"b", b"a")
        with hold(branch, f"exec-{n}", *wanted[: 2 + n % 3 % 2]):
            inside[0] += 1
            assert inside[0] == 1, "b is common to all"
            inside[0] -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(40)))
    assert branch.known().locks == {}


def test_first_come_first_served(store: Metered, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release wakes the next; nobody looks for it again and again."""
    monkeypatch.setattr(checkout, "_POLL_S", (300.0, 300.0))
    disk = new_disk(store, system)
    branch = disk.branch()
    served: list[int] = []
    threads = []
    with hold(branch, "first", b"src"):
        for n in range(10):
            thread = threading.Thread(target=lambda n=n: _serve(branch, n, served))  # type: ignore[misc]
            thread.start()
            threads.append(thread)
            while len(branch.line._waiting) <= n:
                system.sleep(0.001)
        before = store.usage()
    for thread in threads:
        thread.join(60)
    assert served == list(range(10))
    used = (store.usage() - before).requests
    assert used["create"] == 21, "one to take and one to give back, each"
    assert used["get"] <= 30


def _serve(branch: Branch, n: int, served: list[int]) -> None:
    with hold(branch, f"exec-{n}", b"src" if n % 3 else b""):
        served.append(n)


def test_who_wants_something_else_does_not_stand_in_line(disk: Disk) -> None:
    branch = disk.branch()
    with hold(branch, "holder", b"src"):
        waiting = threading.Thread(target=lambda: _serve(branch, 1, []))
        waiting.start()
        while not branch.line._waiting:
            system.sleep(0.001)
        with hold(branch, "elsewhere", b"other", wait_s=0):
            pass
        with pytest.raises(Busy, match="holder"), hold(branch, "behind", b"src/a", wait_s=0.02):
            pass
    waiting.join()


def test_nobody_overtakes_who_came_first(disk: Disk) -> None:
    """Not even to a lock that is free: the first is about to take it."""
    branch = disk.branch()
    with branch.line.join("the-first", (b"src",)):
        with pytest.raises(Busy, match="the-first is to have it first"), hold(branch, "me", b"src/a", wait_s=0.02):
            pass
        with hold(branch, "me", b"other", wait_s=0):
            pass
    with hold(branch, "me", b"src/a", wait_s=0):
        pass


def test_a_free_lock_costs_one_request_each_way(store: Metered) -> None:
    disk = new_disk(store, system)
    branch = disk.branch()
    branch.refresh()
    before = store.usage()
    with hold(branch, "me", b"src") as lock_id:
        taken = store.usage()
        assert {k: v for k, v in (taken - before).requests.items() if v} == {"create": 1}
        write(branch, b"src/a", lock_id=lock_id)
    assert {k: v for k, v in (store.usage() - taken).requests.items() if v} == {"create": 1}


def test_many_contend_across_processes_worth_of_handles(store: Store) -> None:
    """Four handles, as four processes have, and a counter that only the lock protects."""
    disk = new_disk(store, system, Tuning(fold_entries=16))
    put(disk, "n", b"0")
    handles = [cold(disk, store) for _ in range(4)]

    def count(n: int) -> None:
        mine = handles[n % 4]
        branch = mine.branch()
        with hold(branch, f"exec-{n}", b"n") as lock_id:
            state = branch.refresh()
            value = int(get(mine, "n"))
            node, blobs = file_node(mine, b"%d" % (value + 1))
            branch.commit(
                Proposal([Intent(b"n", state.get(b"n"), node)], Policy.FIRST_WINS, state.seq, blobs, lock_id=lock_id)
            )

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(count, range(24)))
    for handle in handles:
        handle.close()
    assert get(cold(disk, store, UNFOLDED), "n") == b"24"


def test_the_history_shows_what_was_done_and_no_locks(disk: Disk) -> None:
    """`log()` leaves out commits that only took or gave back a lock; see api tests for the public form."""
    branch = disk.branch()
    with hold(branch, "me", b"src") as lock_id:
        write(branch, b"src/a", lock_id=lock_id)
    with hold(branch, "me", b"src"):
        pass
    entries = list(branch.history(0, branch.known().seq))
    assert [bool(c.effects) for e in entries for c in e.commits] == [True, False, True, False, False]
    assert [c.message for e in entries for c in e.commits if not c.effects] == [
        "check out src",
        "check out src",
        "release the checkout of me",
    ]
