"""Trees: looking up, listing, comparing, resting on other snaps; folding and its pages; files with holes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fanout.config import Tuning
from fanout.disk.data import Reader
from fanout.disk.disk import Disk, Point
from fanout.disk.load import lineage_at, spans
from fanout.disk.state import State, classify
from fanout.errors import Corrupt, Invalid, NotFound
from fanout.format import layout
from fanout.format.entry import ADDED, ATTRIBUTES, DELETED, MODIFIED, BranchRecord
from fanout.format.tree import FILE, HOLE, Node, Ref, directory
from fanout.store.base import Store
from fanout.store.memory import MemoryStore
from tests.support.disks import (
    TINY,
    UNFOLDED,
    check_refs,
    check_tree,
    cold,
    contents,
    get,
    main,
    new_disk,
    put,
    put_many,
)


def tree(disk: Disk) -> State:
    return disk.branch().refresh()


@pytest.fixture
def store() -> Store:
    return MemoryStore()


@pytest.fixture(params=["unfolded", "folded", "half"])
def state(request: pytest.FixtureRequest, store: Store) -> State:
    disk = new_disk(store, tuning=UNFOLDED.model_copy(update={"page_entries": 2}))
    put_many(disk, [(name, b"x") for name in ("a", "a-b", "a.b", "d/x", "d/y/z", "d0")])
    if request.param != "unfolded":
        disk.branch().fold()
    put(disk, "d/new", b"n")
    put(disk, "gone", b"")
    disk.delete_object(main(disk), b"gone")
    if request.param == "folded":
        disk.branch().fold()
    return tree(disk)


def test_listing_in_byte_order(state: State) -> None:
    assert [n for n, _ in state.children(b"")] == [b"a", b"a-b", b"a.b", b"d", b"d0"]
    assert [n for n, _ in state.children(b"d")] == [b"new", b"x", b"y"]
    assert [n for n, _ in state.children(b"", start_after=b"a-b")] == [b"a.b", b"d", b"d0"]
    assert [n for n, _ in state.children(b"", start_after=b"d")] == [b"d0"]
    assert [n for n, _ in state.children(b"a")] == []
    assert [p for p, _ in state.below(b"d")] == [b"d/new", b"d/x", b"d/y", b"d/y/z"]
    assert [p for p, _ in state.scan(b"a-b", b"d/x")] == [b"a-b", b"a.b", b"d", b"d/new"]
    assert [p for p, _ in state.scan()] == sorted(p for p, _ in state.scan())


def test_looking_up(state: State) -> None:
    assert state.get(b"gone") is None
    assert state.get(b"d/y/z") is not None
    assert state.get(b"") == directory()
    assert state.get(b"zzz") is None
    assert state.has_children(b"d/y")
    assert not state.has_children(b"d/x")


def test_a_set_root_is_kept(store: Store) -> None:
    disk = new_disk(store)
    disk.make_directory(main(disk), b"d", 0o755)
    disk.branch().fold()
    fresh = cold(disk, store)
    assert tree(fresh).get(b"") == directory()
    assert [p for p, _ in tree(fresh).below(b"")] == [b"d"]


def test_resting_on_a_newer_snap_changes_nothing(store: Store) -> None:
    disk = new_disk(store)
    states = []
    for n in range(4):
        put(disk, f"f{n}", b"%d" % n)
        put(disk, "same", b"%d" % n)
        states.append(tree(disk))
    other = cold(disk, store)
    other.branch().fold()
    snap = tree(other).snap
    for before in states[-1:]:
        after = before.onto(snap)
        assert after.seq == before.seq
        assert not after.changes
        assert not after.blobs
        assert list(before.diff(after)) == []
    put(disk, "later", b"l")
    put(disk, "same", b"later")
    before = tree(disk)
    after = before.onto(snap)
    assert set(after.changes) == {b"later", b"same"}
    assert contents(disk, after) == contents(disk, before)


def test_a_hole_in_the_log_is_noticed(store: Store) -> None:
    disk = new_disk(store)
    for n in range(6):
        put(disk, f"f{n}", b"")
    key = layout.log_key(disk.id, disk.branch().uuid, 3)
    store.delete([key])
    with pytest.raises(Corrupt, match=key):
        tree(cold(disk, store))
    with pytest.raises(Corrupt, match=key):
        list(disk.log(Point(disk.branch())))


def test_strays_in_the_bucket_are_no_reason_to_fail(store: Store) -> None:
    disk = new_disk(store)
    put(disk, "f", b"1")
    disk.branch().fold()
    for prefix in (layout.log_prefix, layout.snap_prefix):
        store.create(prefix(disk.id, disk.branch().uuid) + ".DS_Store", b"")
        store.create(prefix(disk.id, disk.branch().uuid) + "zz", b"")
    assert get(cold(disk, store), "f") == b"1"


def test_a_page_under_anothers_key_is_noticed(store: Store) -> None:
    disk = new_disk(store, tuning=UNFOLDED.model_copy(update={"page_entries": 2}))
    put_many(disk, [(f"f{n}", b"%d" % n) for n in range(4)])
    pages = disk.branch().fold().snap.pages
    assert len(pages) == 2
    store.put(layout.page_key(disk.id, pages[0].hash), store.get(layout.page_key(disk.id, pages[1].hash)))
    fresh = cold(disk, store)
    with pytest.raises(Corrupt, match="does not match its hash"):
        get(fresh, "f0")
    assert get(fresh, "f3") == b"3"


def test_differences_are_named() -> None:
    a, b = Node(FILE, 0o644, 1), Node(FILE, 0o600, 1)
    other = Node(FILE, 0o644, 1, 1, (Ref(b"p", 0, 1, 1, b"h"),))
    assert [classify(*pair) for pair in ((None, a), (a, None), (a, b), (a, other))] == [
        ADDED, DELETED, ATTRIBUTES, MODIFIED,
    ]  # fmt: skip


# -- folding ----------------------------------------------------------------------------------------------------


def test_pages_split_as_a_tree_grows_and_merge_as_it_shrinks(store: Store) -> None:
    disk = new_disk(store, tuning=UNFOLDED.model_copy(update={"page_entries": 8}))
    put_many(disk, [(f"f{n:03}", b"%d" % n) for n in range(100)])
    pages = disk.branch().fold().snap.pages
    assert 13 <= len(pages) <= 25
    assert all(page.count <= 8 for page in pages)
    for n in range(100):
        if n % 20:
            disk.delete_object(main(disk), b"f%03d" % n)
    state = disk.branch().fold()
    assert [p for p, _ in state.scan()] == [b"f%03d" % n for n in range(0, 100, 20)]
    assert len(state.snap.pages) == 1
    check_tree(tree(cold(disk, store)))


def test_a_fold_rewrites_only_what_changed(store: Store) -> None:
    disk = new_disk(store, tuning=UNFOLDED.model_copy(update={"page_entries": 8}))
    put_many(disk, [(f"f{n:03}", b"%d" % n) for n in range(100)])
    before = {page.hash for page in disk.branch().fold().snap.pages}
    put(disk, "f050", b"new")
    after = {page.hash for page in disk.branch().fold().snap.pages}
    assert len(after - before) == 1
    assert len(before - after) == 1


def test_a_snap_counts_files_and_bytes(store: Store) -> None:
    disk = new_disk(store, tuning=TINY)
    put_many(disk, [(f"d/f{n}", b"12345") for n in range(10)])
    disk.delete_object(main(disk), b"d/f3")
    put(disk, "d/f4", b"1")
    disk.close()
    snap = disk.branch().fold().snap
    assert (snap.files, snap.bytes) == (9, 41)
    disk.delete_object(main(disk), b"d", recursive=True)
    snap = disk.branch().fold().snap
    assert (snap.files, snap.bytes, snap.pages) == (0, 0, ())


def test_inline_data_moves_to_packs_and_later_commits_still_carry_it(store: Store) -> None:
    disk = new_disk(store)
    put(disk, "a", b"inline")
    base = tree(disk)
    cold(disk, store).branch().fold()
    disk.move(main(disk), b"a", b"b")  # knows nothing of the fold
    fresh = cold(disk, store)
    assert not [m for m in store.list(layout.log_prefix(disk.id, disk.branch().uuid)) if m.key.endswith("3")]
    assert get(fresh, "b") == b"inline"
    check_refs(store, fresh, tree(fresh))
    fresh.branch().fold()
    state = tree(cold(disk, store))
    assert not state.blobs
    check_refs(store, disk, state)
    assert contents(disk, state) == {b"b": b"inline"}
    assert contents(disk, base) == {b"a": b"inline"}


def test_a_process_that_only_reads_lets_go_of_what_others_folded(store: Store) -> None:
    tuning = Tuning(fold_entries=4)
    writer = new_disk(store, tuning=tuning)
    reader = cold(writer, store)
    for n in range(40):
        put(writer, f"f{n}", b"%d" % n)
        writer.close()
        assert len(tree(reader).changes) <= 3 * tuning.fold_entries
    assert contents(reader, tree(reader)) == {b"f%d" % n: b"%d" % n for n in range(40)}


def test_of_many_processes_one_folds(store: Store) -> None:
    tuning = Tuning(fold_entries=8)
    first = new_disk(store, tuning=tuning)
    others = [cold(first, store) for _ in range(5)]
    for n in range(80):
        put(others[n % 5], f"f{n}", b"x")
        for each in others:
            each.close()
    snaps = list(store.list(layout.snap_prefix(first.id, first.branch().uuid)))
    assert 5 <= len(snaps) <= 12
    assert len(contents(first, tree(first))) == 80


# -- contents ---------------------------------------------------------------------------------------------------


def test_a_huge_hole_is_read_in_pieces(store: Store) -> None:
    reader = Reader(store, "dsk-0")
    hole = Ref(HOLE, 0, 0, 6 << 30, b"")
    chunks = reader.chunks([hole], {})
    first = next(chunks)
    assert 0 < len(first) <= 1 << 20
    assert not any(first)
    assert sum(map(len, reader.chunks([Ref(HOLE, 0, 0, (3 << 20) + 5, b"", 2, (2 << 20) + 3)], {}))) == (2 << 20) + 3


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 31, 32, 33, 127, 128, 129, 1000])
@pytest.mark.parametrize("head", [b"text", b"\0bin"])
def test_contents_of_every_size_come_back(store: Store, size: int, head: bytes) -> None:
    disk = new_disk(store, tuning=TINY)
    data = (head + bytes(range(1, 256)) * 4)[:size]
    put(disk, "f", data)
    assert get(disk, "f") == get(cold(disk, store), "f") == data
    disk.branch().fold()
    assert get(cold(disk, store), "f") == data


def test_text_and_binary_go_into_separate_packs(store: Store) -> None:
    disk = new_disk(store, tuning=UNFOLDED.model_copy(update={"inline_bytes": 0}))
    put_many(disk, [("t1", b"text"), ("b1", b"\0"), ("t2", b"more"), ("b2", b"\0\0")])
    packs = {p: n.data[0].pack for p, n in tree(disk).scan()}
    assert packs[b"t1"] == packs[b"t2"] != packs[b"b1"] == packs[b"b2"]


def test_objects_and_their_errors(store: Store) -> None:
    disk = new_disk(store)
    put(disk, "d/f", b"1")
    with pytest.raises(NotFound):
        get(disk, "nothing")
    with pytest.raises(Invalid, match="it is a directory"):
        get(disk, "d")
    with pytest.raises(Invalid, match="source"):
        disk.move(main(disk), b"", b"d/x")
    assert disk.delete_object(main(disk), b"nothing").seq is None


@pytest.mark.parametrize("gone", [range(6), range(7, 13), range(14, 20), [0, 1, 2, 3, 4, 5, 14, 15, 16, 17, 18]])
def test_what_is_left_of_a_page_joins_its_neighbour(store: Store, gone: Sequence[int]) -> None:
    disk = new_disk(store, tuning=UNFOLDED.model_copy(update={"page_entries": 8}))
    put_many(disk, [(f"f{n:02}", b"%d" % n) for n in range(20)])
    assert [page.count for page in disk.branch().fold().snap.pages] == [7, 7, 6]
    for n in gone:
        disk.delete_object(main(disk), b"f%02d" % n)
    state = disk.branch().fold()
    assert [p for p, _ in state.scan()] == [b"f%02d" % n for n in range(20) if n not in gone]
    assert len(state.snap.pages) == 2
    assert sum(page.count for page in state.snap.pages) == state.snap.files == 20 - len(gone)


def test_no_ancestor_counts_beyond_where_its_child_began() -> None:
    careless = BranchRecord("new", (("parent", 5), ("root", 10)), 0)
    assert list(spans(careless, None)) == [("new", 5, None), ("root", 0, 5)]
    assert lineage_at(careless, 3) == (("root", 3),)
