"""Disks as a whole: the catalogue, branches, checkpoints, merges, what a commit says."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fanout.disk.catalogue import Catalogue
from fanout.disk.disk import Disk, Point
from fanout.disk.merge import Intent, Policy
from fanout.disk.proposal import Proposal
from fanout.errors import Conflict, Denied, Exists, FanoutError, Invalid, NotFound, Unavailable
from fanout.format import layout
from fanout.format.entry import is_seal
from fanout.format.tree import Node
from fanout.runtime import Runtime
from fanout.store.base import Store
from fanout.store.memory import MemoryStore
from fanout.store.wrap import Fault, Faulty
from tests.support.disks import TINY, UNFOLDED, cold, contents, file_node, get, hasty, main, new_disk, put, put_many


@pytest.fixture
def store() -> Store:
    return MemoryStore()


@pytest.fixture
def disk(store: Store) -> Disk:
    return new_disk(store)


# -- the catalogue ----------------------------------------------------------------------------------------------


def test_create_get_list_delete(store: Store) -> None:
    disks = Catalogue(store, hasty(), UNFOLDED)
    made = disks.create("ws")
    other = Catalogue(store, hasty(), UNFOLDED)
    assert other.get("ws").id == other.get(made.id).id == made.id
    assert list(other.names()) == ["ws"]
    put(made, "f", b"1")
    assert get(other.get("ws"), "f") == b"1"
    other.delete("ws")
    assert all(is_seal(store.get(meta.key)) for meta in store.list()), "only the log is sealed"
    for gone in ("ws", made.id):
        with pytest.raises(NotFound, match=gone):
            other.get(gone)
        with pytest.raises(NotFound, match=gone):
            disks.get(gone)
    assert disks.create("ws").id != made.id


def test_eight_creators_of_one_name_have_one_winner(store: Store) -> None:
    barrier = threading.Barrier(8)

    def create(_: int) -> str | None:
        disks = Catalogue(store, hasty(), UNFOLDED)
        barrier.wait()
        try:
            return disks.create("ws").id
        except Exists:
            return None

    with ThreadPoolExecutor(8) as pool:
        won = [made for made in pool.map(create, range(8)) if made]
    assert len(won) == 1
    assert Catalogue(store, hasty(), UNFOLDED).get("ws").id == won[0]
    left = {meta.key.split("/")[1] for meta in store.list("disks/")}
    assert left == set(won), "what the losers made is gone"


@pytest.mark.parametrize("nth", range(1, 4))
def test_an_interrupted_delete_can_be_called_again(store: Store, nth: int) -> None:
    Catalogue(store, hasty(), TINY).create("other")
    kept = {meta.key for meta in store.list()}
    disk = Catalogue(store, hasty(), TINY).create("ws")
    put_many(disk, [(f"f{n}", b"x" * 100) for n in range(10)])
    disk.close()
    broken = Faulty(store, Fault("unavailable", "delete", nth=nth, times=1))
    try:
        Catalogue(broken, hasty(), TINY).delete("ws")
    except Unavailable:
        Catalogue(store, hasty(), TINY).delete("ws")
    left = {meta.key for meta in store.list() if not meta.key.startswith("probe/")} - kept
    assert kept <= {meta.key for meta in store.list()}
    assert left, "the log is sealed"
    assert all(is_seal(store.get(key)) for key in left)


@pytest.mark.parametrize("behind", [0, 1, 3])
@pytest.mark.parametrize("sleepy", [False, True])
def test_who_holds_a_deleted_disk_open_commits_nothing(store: Store, behind: int, sleepy: bool) -> None:
    """However many commits of others he has missed, and even if he was frozen until no seal can be counted on."""
    late_s = 0.0
    clock = Runtime(uptime=lambda: late_s, sleep=lambda seconds: None)
    mine = Catalogue(store, clock, UNFOLDED).create("ws")
    put(mine, "a", b"1")
    mine.create_branch("b", main(mine))
    put(mine, "a", b"2", branch="b")
    theirs = Catalogue(store, hasty(), UNFOLDED)
    for n in range(behind):
        put(theirs.get("ws"), f"n{n}", b"x")
    theirs.delete("ws")
    fresh = theirs.create("ws")
    if sleepy:
        for meta in list(store.list(f"disks/{mine.id}/")):
            store.delete([meta.key])  # as if they had been too old to be sealed
        late_s = UNFOLDED.stale_s + 1
    with pytest.raises(NotFound, match="deleted"):
        put(mine, "lost", b"2")
    with pytest.raises(NotFound, match="deleted"):
        put(mine, "lost", b"2", branch="b")
    with pytest.raises(NotFound, match="deleted"):
        mine.branch().refresh()
    assert not list(fresh.branch().refresh().below(b""))
    with pytest.raises(NotFound):
        theirs.get(mine.id)


def test_a_commit_that_races_a_deletion_is_before_it_or_refused(store: Store) -> None:
    disk = Catalogue(store, hasty(), UNFOLDED).create("ws")
    stop = threading.Event()
    outcome: list[str] = []

    def commit() -> None:
        n = 0
        while not stop.is_set():
            try:
                put(disk, f"f{n}", b"x")
            except NotFound as error:
                outcome.append(str(error))
                return
            n += 1

    writers = [threading.Thread(target=commit) for _ in range(4)]
    for writer in writers:
        writer.start()
    Catalogue(store, hasty(), UNFOLDED).delete("ws")
    for writer in writers:
        writer.join(timeout=20)
    stop.set()
    assert len(outcome) == 4
    assert all("deleted" in each for each in outcome)
    assert all(is_seal(store.get(meta.key)) for meta in store.list(f"disks/{disk.id}/"))


@pytest.mark.parametrize("kind", ["lost", "echo", "refused", "unavailable"])
def test_a_lost_answer_never_says_exists(store: Store, kind: str) -> None:
    for key in ("names/", "/disk$", "/branch/", "/checkpoint/"):
        faulty = Faulty(store, Fault(kind, "create", key=key))  # type: ignore[arg-type]
        name = f"{kind}-{len(list(store.list('names/')))}"
        made = Catalogue(faulty, hasty(), UNFOLDED).create(name)
        made.create_branch("b", main(made))
        made.create_checkpoint("c", made.branch())
        assert len(faulty.fired) == 1
        with pytest.raises(Exists):
            Catalogue(store, hasty(), UNFOLDED).create(name)
        with pytest.raises(Exists):
            made.create_branch("b", main(made))


# -- branches and checkpoints -----------------------------------------------------------------------------------


def test_branches_and_checkpoints_are_apart(disk: Disk, store: Store) -> None:
    put(disk, "f", b"1")
    disk.create_checkpoint("base", disk.branch())
    put(disk, "f", b"2")
    disk.create_branch("b", disk.point("base"))
    put(disk, "f", b"branch", "b")
    for each in (disk, cold(disk, store)):
        assert get(each, "f") == b"2"
        assert get(each, "f", "b") == b"branch"
        assert each.read_file(each.point("base"), b"f")[1] == b"1"
    with pytest.raises(Denied, match="start a branch from it"):
        disk.put_object(disk.point("base"), b"f", b"", 0o644)
    assert list(disk.branch_names()) == ["b", "main"]
    assert list(disk.checkpoint_names()) == ["base"]
    for taken in ("b", "base", "main"):
        with pytest.raises(Exists):
            disk.create_branch(taken, main(disk))
        with pytest.raises(Exists):
            disk.create_checkpoint(taken, disk.branch())


def test_numbers_go_on_and_a_branch_from_before_the_fork_is_one_of_the_ancestor(disk: Disk, store: Store) -> None:
    for n in range(1, 4):
        put(disk, f"m{n}", b"")
    disk.branch().fold()
    side = disk.create_branch("side", main(disk))
    put(disk, "s4", b"", "side")
    put(disk, "m4", b"")
    assert side.known().seq == disk.branch().known().seq == 4
    early = disk.create_branch("early", Point(side, 2))
    assert early.record.lineage == ((disk.branch().uuid, 2),)
    assert set(contents(disk, cold(disk, store).branch("early").refresh())) == {b"m1", b"m2"}
    put(disk, "e3", b"", "early")
    assert [e.commits[0].message for e in disk.log(Point(disk.branch("early")))] == ["put m1", "put m2", "put e3"]
    assert [e.seq for e in disk.log(Point(side), after=2)] == [3, 4]


def test_what_is_to_come_cannot_be_named(disk: Disk) -> None:
    put(disk, "f", b"1")
    with pytest.raises(NotFound, match="its newest is 1"):
        disk.create_checkpoint("c", disk.branch(), 2)
    with pytest.raises(NotFound):
        disk.create_branch("b", Point(disk.branch(), 2))
    with pytest.raises(NotFound):
        disk.point(5).state()
    with pytest.raises(NotFound, match="'main'"):
        disk.branch("nothing")


def test_a_rescue_keeps_what_lost(disk: Disk, store: Store) -> None:
    put(disk, "f", b"base")
    base = disk.branch().refresh()
    put(disk, "f", b"first")
    node, blobs = file_node(disk, b"second")
    proposal = Proposal([Intent(b"f", base.get(b"f"), node)], Policy.FIRST_WINS, base.seq, blobs, base.blob_bytes())
    with pytest.raises(Conflict) as conflict:
        disk.branch().commit(proposal)
    assert conflict.value.paths == ("f",)
    name = disk.rescue(main(disk), base.seq, proposal, "x1")
    fresh = cold(disk, store)
    assert get(fresh, "f", name) == b"second"
    assert get(fresh, "f") == b"first"
    with pytest.raises(Conflict):
        disk.merge(disk.branch(), disk.point(name), "fail")
    disk.merge(disk.branch(), disk.point(name), "theirs")
    assert get(fresh, "f") == b"second"


# -- merges -----------------------------------------------------------------------------------------------------


@pytest.fixture
def two(disk: Disk) -> Disk:
    put(disk, "f", b"v0")
    put(disk, "g", b"v0")
    disk.create_branch("b", main(disk))
    return disk


def merge(disk: Disk, into: str, source: str, how: str = "fail") -> int | None:
    return disk.merge(disk.branch(into), disk.point(source), how).seq


def test_a_second_merge_does_not_overwrite_what_the_source_never_saw(two: Disk) -> None:
    put(two, "f", b"main's")
    put(two, "new", b"b's", "b")
    merge(two, "main", "b")
    put(two, "f", b"b's", "b")
    with pytest.raises(Conflict) as conflict:
        merge(two, "main", "b")
    assert conflict.value.paths == ("f",)
    assert get(two, "f") == b"main's"


def test_a_branch_kept_up_to_date_merges_back_cleanly(two: Disk) -> None:
    put(two, "f", b"main 1")
    put(two, "new", b"b's", "b")
    merge(two, "b", "main")
    put(two, "f", b"main 2")
    merge(two, "main", "b")
    assert get(two, "f") == b"main 2"
    assert get(two, "new") == b"b's"
    put(two, "f", b"main 3")
    merge(two, "b", "main")
    assert get(two, "f", "b") == b"main 3"


def test_the_same_change_on_both_sides_is_clean_even_after_a_fold(two: Disk, store: Store) -> None:
    put(two, "f", b"equal")
    put(two, "f", b"equal", "b")
    cold(two, store).branch().fold()
    two.branch().refresh()
    merge(two, "main", "b")
    merge(two, "b", "main")
    assert get(two, "f", "b") == b"equal"


def test_ours_is_remembered(two: Disk, store: Store) -> None:
    put(two, "f", b"main's")
    put(two, "f", b"b's", "b")
    assert merge(two, "main", "b", "ours") is not None
    assert get(two, "f") == b"main's"
    assert merge(two, "main", "b", "fail") is None
    two.branch().fold()
    fresh = cold(two, store)
    assert fresh.branch().refresh().merges == two.branch().known().merges != {}
    put(fresh, "g", b"b's", "b")
    merge(fresh, "main", "b", "fail")
    assert (get(fresh, "f"), get(fresh, "g")) == (b"main's", b"b's")


def test_directories_whose_times_moved_do_not_conflict(two: Disk) -> None:
    for branch in ("main", "b"):
        state = two.branch(branch).refresh()
        node, blobs = file_node(two, branch.encode())
        two.make_directory(Point(two.branch(branch)), b"d", 0o755)
        moved = Node(0, 0o755, two.runtime.now_ns())
        intents = [
            Intent(b"d/" + branch.encode(), None, node),
            Intent(b"d", two.branch(branch).known().get(b"d"), moved, weak=True),
        ]
        two.apply(
            Point(two.branch(branch)), intents, policy=Policy.FIRST_WINS, blobs=blobs, seen_blobs=state.blob_bytes()
        )
    merge(two, "main", "b")
    assert [n for n, _ in two.branch().known().children(b"d")] == [b"b", b"main"]


def test_merges_refuse_what_they_cannot_do(two: Disk) -> None:
    with pytest.raises(Invalid, match="on_conflict"):
        merge(two, "main", "b", "maybe")
    with pytest.raises(Invalid, match="branch"):
        merge(two, "main", "main")


# -- commits ----------------------------------------------------------------------------------------------------


def test_undecodable_names_and_texts_are_committed(disk: Disk, store: Store) -> None:
    disk.put_object(main(disk), b"\xff\n", b"1", 0o644, author="\udcfe")
    assert disk.read_file(main(cold(disk, store)), b"\xff\n")[1] == b"1"
    (entry,) = disk.log(main(disk))
    assert (entry.commits[0].author, entry.commits[0].message) == ("\\udcfe", "put \\udcff\n")


def test_a_conflict_with_the_past_is_none(disk: Disk, store: Store) -> None:
    put(disk, "a", b"file")
    stale = cold(disk, store)
    stale.branch().refresh()
    disk.delete_object(main(disk), b"a")
    put(stale, "a/b", b"1")
    assert get(disk, "a/b") == b"1"


def test_doing_nothing_is_decided_at_the_tail(disk: Disk, store: Store) -> None:
    disk.make_directory(main(disk), b"d", 0o755)
    stale = cold(disk, store)
    stale.branch().refresh()
    disk.delete_object(main(disk), b"d")
    stale.make_directory(main(stale), b"d", 0o755)
    assert disk.branch().refresh().get(b"d") is not None


GROUPING = UNFOLDED.model_copy(update={"group_gap_s": 2.0, "group_wait_s": 2.0})


def together(disk: Disk, count: int) -> list[FanoutError | int | None]:
    """Commit to one path `count` times at once, as one group; returns what each was told."""
    base = disk.branch().refresh()
    announced = threading.Barrier(count)

    def commit(n: int) -> FanoutError | int | None:
        node, blobs = file_node(disk, b"%d" % n, mtime_ns=n)
        intents = [Intent(b"f", base.get(b"f"), node), Intent(b"d/%d" % n, None, node)]
        with disk.branch().writing(disk.runtime.monotonic()):
            announced.wait()
            try:
                return disk.branch().commit(Proposal(intents, Policy.FIRST_WINS, base.seq, blobs, age_s=1.0)).seq
            except FanoutError as error:
                return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(commit, range(count)))


def test_in_a_group_too_the_first_wins(store: Store) -> None:
    disk = new_disk(store, tuning=GROUPING)
    put(disk, "f", b"0")
    told = together(disk, 4)
    assert [type(each) for each in told].count(Conflict) == 3
    assert len(list(store.list(layout.log_prefix(disk.id, disk.branch().uuid)))) == 2
    (won,) = [n for n, each in enumerate(told) if each == 2]
    assert contents(disk, cold(disk, store).branch().refresh()) == {b"f": b"%d" % won, b"d/%d" % won: b"%d" % won}


def test_a_group_that_did_not_land_reports_no_conflict_with_itself(store: Store) -> None:
    disk = new_disk(store, tuning=GROUPING)
    put(disk, "f", b"0")
    broken = Faulty(store, Fault("unavailable", "create", times=100))
    told = together(cold(disk, broken), 4)
    assert {type(each) for each in told} == {Unavailable}


def test_a_bug_in_one_group_does_not_stop_the_branch(disk: Disk) -> None:
    with pytest.raises(AttributeError):
        disk.branch().commit(Proposal([None], Policy.FIRST_WINS))  # type: ignore[list-item]
    put(disk, "f", b"1")
    assert get(disk, "f") == b"1"


def test_mount_points_of_names_are_checked(disk: Disk) -> None:
    with pytest.raises(Invalid):
        disk.create_branch("rescue", main(disk))
    assert layout.MAIN in disk.branch_names()
