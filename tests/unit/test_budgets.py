"""How many requests things cost: counted, not timed. docs/LIMITS.md and docs/FORMAT.md quote these."""

from __future__ import annotations

import pytest

from fanout.disk.catalogue import Catalogue
from fanout.disk.disk import Disk, Point
from fanout.disk.merge import Intent, Policy
from fanout.disk.proposal import Proposal
from fanout.errors import Conflict
from fanout.format.tree import FILE, Node
from fanout.store.memory import MemoryStore
from fanout.store.wrap import Metered, Usage
from tests.support.disks import UNFOLDED, cold, file_node, get, hasty, main, new_disk, put, put_many


class Counted:
    """A disk whose requests are counted."""

    def __init__(self) -> None:
        self.store = Metered(MemoryStore())
        self.disk = new_disk(self.store)
        put(self.disk, "d/f", b"1" * 1000)
        self.mark = self.store.usage()

    def since(self) -> dict[str, int]:
        used: Usage = self.store.usage() - self.mark
        self.mark = self.store.usage()
        return dict(used.requests)


@pytest.fixture
def counted() -> Counted:
    return Counted()


def test_a_small_commit_is_one_put(counted: Counted) -> None:
    node, blobs = file_node(counted.disk, b"x" * (200 << 10))
    proposal = Proposal([Intent(b"new", None, node)], Policy.LAST_WINS, 1, blobs)
    counted.disk.branch().commit(proposal)
    assert counted.since() == {"create": 1}
    put(counted.disk, "d/f", b"2")
    assert counted.since() == {"create": 1}
    counted.disk.make_directory(main(counted.disk), b"e/f", 0o755)
    assert counted.since() == {"create": 1}


def test_a_commit_to_a_tail_that_moved_once_is_two_puts_and_two_gets(counted: Counted) -> None:
    other = cold(counted.disk, counted.store)
    put(other, "theirs", b"1")
    counted.since()
    put(counted.disk, "mine", b"1")
    assert counted.since() == {"create": 2, "get": 2}  # what is there, and whether more is


def test_a_big_commit_is_its_packs_and_one_put(counted: Counted) -> None:
    disk = cold(counted.disk, counted.store, UNFOLDED.model_copy(update={"pack_bytes": 1 << 20}))
    disk.branch().refresh()
    counted.since()
    put_many(disk, [(f"f{n}", bytes([n]) + counted.disk.runtime.token_bytes(100 << 10)) for n in range(30)])
    used = counted.since()
    assert used.pop("create") == 1
    assert 3 <= used.pop("put") <= 5
    assert not used


def test_nothing_new_is_one_get_and_one_new_entry_two(counted: Counted) -> None:
    counted.disk.branch().refresh()
    assert counted.since() == {"get": 1}
    other = cold(counted.disk, counted.store)
    for new, cost in ((1, {"get": 2}), (2, {"get": 2, "list": 1}), (9, {"get": 9, "list": 1})):
        for n in range(new):
            put(other, f"{new}-{n}", b"")
        counted.since()
        counted.disk.branch().refresh()
        assert counted.since() == cost


def test_a_conflict_is_decided_by_one_get(counted: Counted) -> None:
    with pytest.raises(Conflict):
        counted.disk.branch().commit(Proposal([Intent(b"d/f", None, Node(FILE, 0o600, 1))], Policy.FIRST_WINS, 0))
    assert counted.since() == {"get": 1}


def test_a_branch_or_checkpoint_is_one_put_and_a_look_at_the_names(counted: Counted) -> None:
    counted.disk.create_branch("b", main(counted.disk))
    assert counted.since() == {"create": 1, "get": 1, "head": 1}
    put(counted.disk, "on-b", b"1", "b")
    assert counted.since() == {"create": 1}, "the new branch is open without a request"
    counted.disk.create_checkpoint("c", counted.disk.branch())
    assert counted.since() == {"create": 1, "get": 1, "head": 1}
    counted.disk.create_branch("b2", Point(counted.disk.branch(), 1))
    assert counted.since() == {"create": 1, "head": 1}, "a point that is known needs no look"


@pytest.mark.parametrize("size", [10, 100_000, 120_000])
def test_a_cold_read_of_one_small_file_is_four_gets_and_two_listings(counted: Counted, size: int) -> None:
    tuning = UNFOLDED.model_copy(update={"page_entries": 16})
    disk = cold(counted.disk, counted.store, tuning)
    put_many(disk, [(f"f{n}", counted.disk.runtime.token_bytes(size)) for n in range(20)])
    disk.branch().fold()
    counted.since()
    fresh = Catalogue(counted.store, hasty(), tuning).get("d")
    assert len(get(fresh, "f7")) == size
    assert counted.since() == {"get": 4, "list": 2}  # name, snap, page, pack; snaps, log
    get(fresh, "f7")
    assert counted.since() == {"get": 1}, "warm: is there a newer entry?"


def test_a_checkpoint_is_opened_once(counted: Counted) -> None:
    counted.disk.create_checkpoint("c", counted.disk.branch())
    put(counted.disk, "later", b"")
    counted.disk.read_file(counted.disk.point("c"), b"d/f")
    counted.since()
    counted.disk.read_file(counted.disk.point("c"), b"d/f")
    used = counted.since()
    assert used.pop("head", 0) <= 1
    assert used == {"get": 1}


def test_reading_up_to_a_number_lists_nothing_beyond(counted: Counted) -> None:
    disk: Disk = counted.disk
    for n in range(30):
        put(disk, f"f{n}", b"")
    counted.since()
    assert len(list(cold(disk, counted.store).branch().history(0, 3))) == 3
    assert counted.since() == {"get": 3}
