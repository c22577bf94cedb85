"""What garbage collection deletes, and what it never does: trees, history, grace, strays, and the records it leaves."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from fanout.disk.disk import Disk, Point
from fanout.disk.merge import Intent, Policy
from fanout.disk.trim import Trimmed
from fanout.errors import Corrupt, Invalid, Limit, NotFound
from fanout.format import layout
from fanout.format.tree import FILE, Node
from fanout.runtime import Runtime
from fanout.store.base import Store
from fanout.store.memory import MemoryStore
from tests.support.disks import (
    TINY,
    check_refs,
    check_tree,
    cold,
    contents,
    get,
    hasty,
    new_disk,
    put,
    put_many,
    reader,
)

DAY_S = 24 * 3600.0


class Clock:
    """One clock for the store and for uptime, moved by hand."""

    def __init__(self) -> None:
        self.now_s = 1_000_000_000.0

    def runtime(self) -> Runtime:
        real = hasty()
        return Runtime(
            now_ns=lambda: int(self.now_s * 1e9),
            uptime=lambda: self.now_s,
            sleep=real.sleep,
            token_bytes=real.token_bytes,
        )


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Store:
    return MemoryStore(runtime=clock.runtime())


@pytest.fixture
def disk(store: Store, clock: Clock) -> Iterator[Disk]:
    disk = new_disk(store, clock.runtime(), TINY)
    yield disk
    disk.close()


def keys(store: Store, what: str) -> set[str]:
    return {meta.key for meta in store.list() if f"/{what}/" in meta.key}


def trees(disk: Disk, store: Store, *names: str) -> dict[str, dict[bytes, bytes]]:
    """Everything that can be read at these points by a process that knows nothing."""
    found = {}
    for name in names:
        fresh = cold(disk, store)
        state = fresh.point(name).state()
        check_tree(state)
        check_refs(store, fresh, state)
        found[name] = contents(fresh, state)
    return found


def grow(disk: Disk, count: int, start: int = 0) -> None:
    """Overwrite a few files again and again."""
    for n in range(start, start + count):
        put(disk, f"d/f{n % 4}", b"%03d" % n * 40)
        disk.branch().settle()


def test_nothing_goes_while_history_is_young(disk: Disk, store: Store, clock: Clock) -> None:
    grow(disk, 12)
    clock.now_s += 29 * DAY_S
    before = {meta.key for meta in store.list()}
    collected = disk.collect()
    assert (collected.packs, collected.snaps, collected.entries, collected.trimmed) == (0, 0, 0, {})
    assert before == {meta.key for meta in store.list()}


def test_old_history_goes_and_every_named_point_stays(disk: Disk, store: Store, clock: Clock) -> None:
    grow(disk, 9)
    disk.create_checkpoint("cp", disk.branch(), 7)
    disk.create_branch("fork", Point(disk.branch(), 5))
    disk.create_branch("busy", Point(disk.branch(), 6))
    grow(disk, 9, 9)
    for n in range(7):
        put(disk, f"only/{n}", b"%d" % n * 50, "busy")
        disk.branch("busy").settle()
    names = ("main", "cp", "fork", "busy")
    before = trees(disk, store, *names)
    log, packs = keys(store, "log"), keys(store, "pack")
    clock.now_s += 31 * DAY_S
    planned = disk.collect(dry_run=True)
    assert keys(store, "log") == log, "a dry run deletes nothing"
    assert not keys(store, "trim") | keys(store, "kept"), "and writes nothing"
    collected = disk.collect()
    assert collected.entries == planned.entries > 5
    assert 0 < collected.packs <= planned.packs
    assert len(packs) - len(keys(store, "pack")) == collected.packs
    assert trees(disk, store, *names) == before
    assert collected.trimmed["main"] > 9
    grow(disk, 8, 50)
    after = trees(disk, store, *names)
    assert after["main"] != before["main"]
    assert {name: after[name] for name in names[1:]} == {name: before[name] for name in names[1:]}


def test_what_was_trimmed_is_not_found_and_says_why(disk: Disk, store: Store, clock: Clock) -> None:
    grow(disk, 12)
    disk.create_checkpoint("cp", disk.branch(), 4)
    clock.now_s += 31 * DAY_S
    boundary = disk.collect().trimmed["main"]
    fresh = cold(disk, store)
    assert fresh.branch().at(4).seq == 4
    assert fresh.branch().at(0).seq == 0
    assert fresh.branch().at(boundary).seq == boundary
    for seq in (1, 2, 5, boundary - 1):
        with pytest.raises(NotFound, match=f"commit {seq} is no longer kept: .* up to {boundary - 1}"):
            fresh.branch().at(seq)
        with pytest.raises(Trimmed):
            fresh.create_checkpoint(f"late-{seq}", fresh.branch(), seq)
        with pytest.raises(Trimmed):
            fresh.create_branch(f"late-{seq}", Point(fresh.branch(), seq))
    assert set(fresh.checkpoint_names()) == {"cp"}
    assert set(fresh.branch_names()) == {"main"}
    fresh.create_branch("from-cp", fresh.point("cp"))
    assert contents(fresh, fresh.point("from-cp").state()) == contents(fresh, fresh.point("cp").state())
    with pytest.raises(Trimmed) as caught:
        list(fresh.branch().history(0, boundary))
    assert caught.value.boundary == boundary - 1
    tail = fresh.branch().known().seq
    assert [entry.seq for entry in fresh.branch().history(boundary - 1, tail)] == list(range(boundary, tail + 1))


def test_a_hole_is_still_damage(disk: Disk, store: Store, clock: Clock) -> None:
    grow(disk, 11)
    disk.create_checkpoint("cp", disk.branch(), 5)
    clock.now_s += 31 * DAY_S
    disk.collect()
    needed = min(keys(store, "log"))
    store.delete([needed])
    with pytest.raises(Corrupt, match="missing"):
        cold(disk, store).point("cp").state()
    before = {meta.key for meta in store.list()}
    clock.now_s += 31 * DAY_S
    with pytest.raises(Corrupt, match=r"nothing was deleted.*fsck"):
        disk.collect()
    assert before == {meta.key for meta in store.list()}


def test_merges_still_find_their_base(disk: Disk, store: Store, clock: Clock) -> None:
    put_many(disk, [(f"base/{n}", b"%d" % n * 40) for n in range(8)])
    disk.create_branch("side", Point(disk.branch()))
    put(disk, "s", b"side 1", "side")
    disk.merge(disk.branch(), disk.point("side"), "fail")
    grow(disk, 8)
    for n in range(6):
        put(disk, f"side/{n}", b"%d" % n * 40, "side")
        disk.branch("side").settle()
    disk.branch("side").fold()
    clock.now_s += 31 * DAY_S
    disk.collect()
    fresh = cold(disk, store)
    fresh.merge(fresh.branch(), fresh.point("side"), "fail")
    assert get(fresh, "side/5") == b"5" * 40
    fresh.merge(fresh.branch("side"), fresh.point("main"), "fail")
    assert contents(fresh, fresh.branch().refresh()) == contents(fresh, fresh.branch("side").refresh())


def test_orphans_go_after_the_grace_by_the_store_s_clock(disk: Disk, store: Store, clock: Clock) -> None:
    put(disk, "a", b"1")
    tail = disk.branch().refresh().seq
    orphan = layout.pack_key(disk.id, b"\x02" * 16)
    page = layout.page_key(disk.id, b"\x03" * 32)
    stray = f"{layout.disk_prefix(disk.id)}pack/no/hex"
    leftover = "probe/0123/race-0"
    for key in (orphan, page, stray, leftover):
        store.put(key, b"x")
    clock.now_s += DAY_S - 1
    assert disk.collect().freed_bytes == 0
    wrong = Runtime(now_ns=lambda: 0, sleep=lambda seconds: None)
    other = Disk(store, disk.record, wrong, TINY)
    assert other.collect().freed_bytes == 0
    clock.now_s += 2
    collected = other.collect()
    assert (collected.packs, collected.pages, collected.probes, collected.freed_bytes) == (2, 1, 1, 4)
    assert not any(store.head(key) for key in (orphan, page, stray, leftover))
    assert not keys(store, "probe")
    assert not list(store.list("probe/")), "the clock was read without leaving anything"
    assert disk.branch().refresh().seq == tail + 1, "the place a late commit would have taken is taken"
    assert not [commit for entry in disk.branch().history(tail, tail + 1) for commit in entry.commits]
    assert disk.collect(grace_s=0).freed_bytes == 0
    assert disk.branch().refresh().seq == tail + 1, "no garbage, no entry"


def test_a_second_collection_finds_nothing_and_a_later_one_goes_on(disk: Disk, store: Store, clock: Clock) -> None:
    grow(disk, 10)
    disk.create_checkpoint("cp", disk.branch(), 4)
    before = trees(disk, store, "cp")
    for round_ in range(3):
        clock.now_s += 31 * DAY_S
        assert disk.collect().entries > 0
        left = {meta.key for meta in store.list()}
        assert disk.collect().freed_bytes == 0
        assert left == {meta.key for meta in store.list()}
        assert trees(disk, store, "cp") == before
        grow(disk, 10, 100 * round_)
    assert len(keys(store, "kept")) == len(keys(store, "trim")) == 1


def test_strays_below_the_boundary_are_ignored_and_go(disk: Disk, store: Store, clock: Clock) -> None:
    grow(disk, 12)
    disk.create_checkpoint("cp", disk.branch(), 5)
    before = trees(disk, store, "main", "cp")
    snap = min(keys(store, "snap"))
    clock.now_s += 31 * DAY_S
    boundary = disk.collect().trimmed["main"]
    stray_log = layout.log_key(disk.id, disk.branch().uuid, 2)
    stray_snap = layout.snap_key(disk.id, disk.branch().uuid, 5)
    assert boundary > 5
    assert not store.head(stray_log)
    assert not store.head(stray_snap)
    store.put(stray_log, b"whatever")
    store.put(stray_snap, b"a snap of a fold that was frozen for a month")
    assert trees(disk, store, "main", "cp") == before
    clock.now_s += 31 * DAY_S
    collected = disk.collect()
    assert (collected.entries, collected.snaps) == (1, 1)
    assert store.head(snap) is not None, "the checkpoint rests on it"
    assert trees(disk, store, "main", "cp") == before


def test_an_old_handle_of_another_process_finds_the_tail(disk: Disk, store: Store, clock: Clock) -> None:
    grow(disk, 2)
    idle, committer, folder = (cold(disk, store) for _ in range(3))
    for each in (idle, committer, folder):
        assert each.branch().refresh().seq == 2
    grow(disk, 16, 2)
    put(disk, "last", b"x")
    clock.now_s += 31 * DAY_S
    boundary = disk.collect().trimmed["main"]
    assert boundary > 3
    tail = disk.branch().refresh().seq
    assert tail >= 19
    assert idle.branch().refresh().seq == tail, "entry 3 is gone, which does not make 2 the tail"
    assert get(idle, "last") == b"x"
    put(committer, "more", b"y")
    assert get(disk, "more") == b"y"
    assert committer.branch().refresh().seq == tail + 1
    folder.branch().fold()
    assert min(layout.seq_of_key(key) for key in keys(store, "snap")) >= boundary


def test_a_handle_that_looked_just_before_rests_on_nothing_that_goes(disk: Disk, store: Store, clock: Clock) -> None:
    grow(disk, 5)
    idle = cold(disk, store, TINY.model_copy(update={"fold_entries": 1 << 30, "page_cache_entries": 1}))
    idle.branch().refresh()
    grow(disk, 16, 5)
    clock.now_s += 31 * DAY_S
    idle.branch().refresh()
    assert disk.collect().snaps > 0
    state = idle.branch().refresh()
    assert contents(idle, state) == trees(disk, store, "main")["main"]
    put(idle, "more", b"y")
    idle.branch().fold()
    assert contents(idle, idle.branch().known()) == trees(disk, store, "main")["main"]


def test_data_that_waited_too_long_is_not_committed(disk: Disk, store: Store, clock: Clock) -> None:
    packer = disk.packer(inline=False)
    refs = packer.add_content(100, reader(b"z" * 100))
    packer.finish()
    clock.now_s += 13 * 3600
    intent = Intent(b"late", None, Node(FILE, 0o644, 1, 100, refs))
    with pytest.raises(Limit, match="nothing was written"):
        disk.apply(disk.point(), [intent], policy=Policy.LAST_WINS)
    assert disk.branch().refresh().seq == 0
    packer = disk.packer(inline=False)
    refs = packer.add_content(100, reader(b"z" * 100))
    packer.finish()
    disk.apply(disk.point(), [Intent(b"a", None, Node(FILE, 0o644, 1, 100, refs))], policy=Policy.LAST_WINS)
    clock.now_s += 13 * 3600
    disk.move(disk.point(), b"a", b"b")  # in use since: old, and no garbage
    assert get(disk, "b") == b"z" * 100


def test_a_fold_never_gives_a_page_the_name_it_had(disk: Disk, store: Store) -> None:
    put(disk, "a", b"1")
    first = disk.branch().fold().snap
    node = disk.branch().refresh().get(b"a")
    disk.delete_object(disk.point(), b"a")
    disk.branch().fold()
    disk.apply(disk.point(), [Intent(b"a", None, node)], policy=Policy.LAST_WINS)
    again = disk.branch().fold()
    assert again.get(b"a") == node
    assert {page.hash for page in first.pages}.isdisjoint(page.hash for page in again.snap.pages)


@pytest.mark.parametrize("wrong", [-1, float("nan"), "1"])
def test_bad_arguments_are_named(disk: Disk, wrong: float) -> None:
    with pytest.raises(Invalid, match="grace_s"):
        disk.collect(grace_s=wrong)
    with pytest.raises(Invalid, match="keep_history_s"):
        disk.collect(keep_history_s=wrong)


def test_on_every_store(any_store: Store) -> None:
    disk = new_disk(any_store, tuning=TINY)
    grow(disk, 7)
    disk.create_checkpoint("cp", disk.branch(), 2)
    before = trees(disk, any_store, "main", "cp")
    orphan = layout.pack_key(disk.id, b"\x02" * 16)
    any_store.put(orphan, b"x")
    assert disk.collect().freed_bytes == 0
    if any_store.url.startswith("s3:"):
        time.sleep(1.1)  # S3 dates objects in whole seconds, and nothing goes that may be younger than the grace
    collected = disk.collect(0, 0)
    assert collected.entries > 0
    assert any_store.head(orphan) is None
    assert trees(disk, any_store, "main", "cp") == before
    assert disk.check().problems == []
    disk.close()
