"""Everything a store can answer at every step of a commit: one commit, reported once, or an error that says so."""

from __future__ import annotations

import pytest

from fanout.disk.disk import Disk
from fanout.errors import Corrupt, Denied, Exists, FanoutError, NotFound, Unavailable, Unknown
from fanout.format import layout
from fanout.format.entry import decode_entry
from fanout.runtime import Runtime
from fanout.store.base import Store
from fanout.store.memory import MemoryStore
from fanout.store.wrap import Fault, FaultKind, Faulty, Retrying, Wrapper
from tests.support.disks import TINY, UNFOLDED, cold, contents, fixed, get, hasty, main, new_disk, put, put_many

EVER = 10**6


@pytest.fixture
def store() -> Store:
    return MemoryStore()


@pytest.fixture
def disk(store: Store) -> Disk:
    disk = new_disk(store)
    put(disk, "old", b"there before")
    return disk


def through(disk: Disk, store: Store, *faults: Fault) -> tuple[Disk, Faulty]:
    """Open the disk behind a store in which these go wrong, warm."""
    faulty = Faulty(store, *faults, runtime=hasty())
    broken = cold(disk, faulty)
    broken.branch().refresh()
    return broken, faulty


def effects(disk: Disk, store: Store) -> list[str]:
    """Which commits the branch has, as a process that comes later sees it."""
    return [commit.message for entry in cold(disk, store).log(main(disk)) for commit in entry.commits]


# -- CASE 13, 14: a lost answer, and a refusal that left nothing ------------------------------------------------


@pytest.mark.parametrize("kind", ["lost", "echo", "refused", "unavailable"])
@pytest.mark.parametrize("times", [1, 2, 7])
def test_one_commit_reported_once(disk: Disk, store: Store, kind: FaultKind, times: int) -> None:
    broken, faulty = through(disk, store, Fault(kind, "create", key="/log/", times=times))
    put(broken, "new", b"1")
    assert faulty.fired
    assert effects(disk, store) == ["put old", "put new"]
    assert get(cold(disk, store), "new") == get(broken, "new") == b"1"


@pytest.mark.parametrize("kind", ["lost", "echo", "refused"])
@pytest.mark.parametrize("read", [1, 7])
def test_a_read_back_that_fails_at_first(disk: Disk, store: Store, kind: FaultKind, read: int) -> None:
    broken, faulty = through(
        disk, store, Fault(kind, "create", key="/log/"), Fault("unavailable", "get", key="/log/.*2$", times=read)
    )
    put(broken, "new", b"1")
    assert len(faulty.fired) == 1 + read
    assert effects(disk, store) == ["put old", "put new"]


@pytest.mark.parametrize("kind", ["lost", "echo", "refused"])
@pytest.mark.parametrize("read", ["unavailable", "truncated", "corrupted"])
def test_a_read_back_that_fails_for_ever_is_unknown(disk: Disk, store: Store, kind: FaultKind, read: FaultKind) -> None:
    if kind == "refused" and read != "unavailable":
        pytest.skip("there is nothing that could be damaged")
    broken, _ = through(
        disk, store, Fault(kind, "create", key="/log/"), Fault(read, "get", key="/log/.*2$", times=EVER)
    )
    with pytest.raises(Unknown, match="log/"):
        put(broken, "new", b"1")
    landed = ["put old"] if kind == "refused" else ["put old", "put new"]
    assert effects(disk, store) == landed
    healthy = cold(disk, store)
    put(healthy, "next", b"2")
    assert effects(disk, store) == [*landed, "put next"]


def test_a_store_that_always_refuses_is_unknown_and_one_that_is_away_unavailable(disk: Disk, store: Store) -> None:
    for kind, error in (("refused", Unknown), ("unavailable", Unavailable)):
        broken, faulty = through(disk, store, Fault(kind, "create", times=EVER))  # type: ignore[arg-type]
        with pytest.raises(error, match="log/") as raised:
            put(broken, "new", b"1")
        assert type(raised.value) is error
        assert 2 <= len(faulty.fired) <= 20, "tried again, but not for ever"
        assert effects(disk, store) == ["put old"]
        with pytest.raises(error):
            put(broken, "new", b"1")


def test_away_after_an_open_outcome_is_still_unknown(disk: Disk, store: Store) -> None:
    broken, _ = through(
        disk, store, Fault("refused", "create", key="/log/"), Fault("unavailable", "create", nth=2, times=EVER)
    )
    with pytest.raises(Unknown):
        put(broken, "new", b"1")


class Denying(Wrapper):
    def __init__(self, inner: Store, after: int) -> None:
        super().__init__(inner)
        self.left = after

    def create(self, key: str, data: bytes) -> None:
        self.left -= 1
        if self.left < 0:
            raise Denied("no longer")
        raise Unknown("who knows")


@pytest.mark.parametrize(("after", "error"), [(0, Denied), (1, Unknown)])
def test_a_refusal_for_good_is_told_unless_something_is_open(
    disk: Disk, store: Store, after: int, error: type[FanoutError]
) -> None:
    broken = cold(disk, Denying(store, after))
    with pytest.raises(error):
        put(broken, "new", b"1")


class Ghostly(Wrapper):
    """Loses the first entry written through it, and stores it only when `appear` is called."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.ghost: tuple[str, bytes] | None = None

    def create(self, key: str, data: bytes) -> None:
        if self.ghost is None and "/log/" in key:
            self.ghost = (key, data)
            raise Unknown("the connection was cut")
        if self.ghost is not None and key == self.ghost[0]:
            self.appear()
        self.inner.create(key, data)

    def appear(self) -> None:
        assert self.ghost is not None
        try:
            self.inner.create(*self.ghost)
        except Exists:
            pass


def test_a_ghost_that_lands_before_the_second_attempt_is_recognised(disk: Disk, store: Store) -> None:
    put(cold(disk, Ghostly(store)), "new", b"1")
    assert effects(disk, store) == ["put old", "put new"]


def test_a_ghost_that_comes_after_all_finds_its_place_taken(disk: Disk, store: Store) -> None:
    class Late(Ghostly):
        def create(self, key: str, data: bytes) -> None:
            if self.ghost is not None:
                self.inner.create(key, data)
            else:
                super().create(key, data)

    late = Late(store)
    put(cold(disk, late), "new", b"1")
    late.appear()
    assert effects(disk, store) == ["put old", "put new"]


def test_a_lost_answer_and_a_rival_in_between(disk: Disk, store: Store) -> None:
    """The first write kept nothing, then somebody else took the place: the retry must not think it is its own."""
    rival = cold(disk, store)

    class Rivalled(Wrapper):
        fired = False

        def create(self, key: str, data: bytes) -> None:
            if not self.fired and "/log/" in key:
                self.fired = True
                put(rival, "rival", b"r")
                raise Unknown("cut")
            self.inner.create(key, data)

    broken = cold(disk, Rivalled(store))
    put(broken, "new", b"1")
    assert effects(disk, store) == ["put old", "put rival", "put new"]


# -- steps before and after the entry ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["unavailable", "refused", "lost"])
def test_a_pack_that_cannot_be_stored_stops_the_commit(disk: Disk, store: Store, kind: FaultKind) -> None:
    faulty = Faulty(store, Fault(kind, "put", key="/pack/", times=EVER))
    broken = cold(disk, faulty, TINY)
    with pytest.raises((Unavailable, Unknown)):
        put_many(broken, [(f"f{n}", bytes([n]) * 100) for n in range(8)])
    assert effects(disk, store) == ["put old"]
    put(cold(disk, store), "next", b"1")


def test_a_fold_that_fails_anywhere_harms_nothing(store: Store) -> None:
    disk = new_disk(store, tuning=UNFOLDED.model_copy(update={"page_entries": 2}))
    put_many(disk, [(f"f{n}", b"%d" % n) for n in range(6)])
    wanted = contents(disk, disk.branch().refresh())
    kinds: tuple[FaultKind, ...] = ("unavailable", "lost", "refused", "echo")
    for key, verb in (("/pack/", "put"), ("/page/", "put"), ("/snap/", "create")):
        for kind in kinds:
            if kind == "echo" and verb == "put":
                continue
            broken = cold(disk, Faulty(store, Fault(kind, verb, key=key, times=EVER)))  # type: ignore[arg-type]
            broken.branch().refresh()
            try:
                broken.branch().fold()
            except (Unavailable, Unknown):
                pass
            for each in (broken, cold(disk, store)):
                assert contents(disk, each.branch().refresh()) == wanted
    put(broken, "more", b"1")
    broken.branch().fold()
    assert contents(disk, cold(disk, store).branch().refresh()) == {**wanted, b"more": b"1"}


def test_a_background_fold_that_fails_is_made_up_for(store: Store) -> None:
    disk = new_disk(store, tuning=TINY)
    faulty = Faulty(store, Fault("unavailable", "create", key="/snap/", times=2))
    broken = cold(disk, faulty)
    for n in range(12):
        put(broken, f"f{n}", b"%d" % n)
        broken.close()
    assert len(faulty.fired) == 2
    assert broken.branch().known().folded_seq > 0


# -- damage -----------------------------------------------------------------------------------------------------


def damage(store: Store, key: str, how: str) -> None:
    data = store.get(key)
    middle = 5 if "/pack/" in key else len(data) // 2  # a pack's footer is not needed for reading
    if how == "missing":
        store.delete([key])
    elif how == "truncated":
        store.put(key, data[:middle])
    else:
        store.put(key, data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])


@pytest.fixture
def folded(store: Store) -> Disk:
    tuning = UNFOLDED.model_copy(update={"page_entries": 2, "inline_bytes": 0, "pack_bytes": 8})
    disk = new_disk(store, tuning=tuning)
    put_many(disk, [(f"f{n}", b"%d" % n * 50) for n in range(6)])
    disk.branch().fold()
    return disk


@pytest.mark.parametrize("how", ["corrupted", "truncated", "missing"])
@pytest.mark.parametrize("where", ["pack", "page"])
def test_damage_is_named_and_everything_else_reads(folded: Disk, store: Store, where: str, how: str) -> None:
    keys = [meta.key for meta in store.list(f"disks/{folded.id}/{where}/")]
    assert len(keys) >= 3
    damage(store, keys[0], how)
    fresh = cold(folded, store)
    good: list[str] = []
    errors: list[Corrupt] = []
    for n in range(6):
        try:
            assert get(fresh, f"f{n}") == b"%d" % n * 50
            good.append(f"f{n}")
        except Corrupt as error:
            errors.append(error)
    assert 1 <= len(errors) <= 2
    assert all(keys[0] in str(error) for error in errors)
    put(fresh, good[0], b"1")
    assert get(cold(folded, store), good[0]) == b"1"


@pytest.mark.parametrize("how", ["corrupted", "truncated", "missing"])
@pytest.mark.parametrize("where", ["log", "snap"])
def test_a_tree_with_a_damaged_history_is_refused_by_name(disk: Disk, store: Store, where: str, how: str) -> None:
    put(disk, "f", b"1")
    if where == "snap":
        disk.branch().fold()
        key = layout.snap_key(disk.id, disk.branch().uuid, 2)
    else:
        key = layout.log_key(disk.id, disk.branch().uuid, 1)
    disk.create_branch("b", disk.point(0))
    damage(store, key, how)
    fresh = cold(disk, store)
    if (where, how) == ("snap", "missing"):
        assert get(fresh, "f") == b"1"  # only a short cut is gone
    else:
        with pytest.raises(Corrupt, match=key):
            get(fresh, "f")
        with pytest.raises(Corrupt, match=key):
            put(fresh, "new", b"1")
    put(fresh, "elsewhere", b"2", "b")
    assert get(cold(disk, store), "elsewhere", "b") == b"2"


def test_an_entry_under_anothers_number_is_refused(disk: Disk, store: Store) -> None:
    keys = [layout.log_key(disk.id, disk.branch().uuid, n) for n in (1, 2)]
    store.create(keys[1], store.get(keys[0]))
    with pytest.raises(Corrupt, match=f"{keys[1]}: says it is entry 1"):
        get(cold(disk, store), "old")


def test_damage_on_the_way_is_not_kept(folded: Disk, store: Store) -> None:
    faulty = Faulty(store, Fault("corrupted", "get", key="/pack/"), Fault("truncated", "get", key="/page/"))
    fresh = cold(folded, faulty)
    with pytest.raises(Corrupt):
        get(fresh, "f0")
    with pytest.raises(Corrupt):
        get(fresh, "f0")
    assert get(fresh, "f0") == b"0" * 50


# -- CASE 28 and everything at once -----------------------------------------------------------------------------


def test_a_minute_of_503_is_bounded_retries_with_jitter(store: Store) -> None:
    slept: list[float] = []
    runtime = fixed(7)
    runtime = Runtime(sleep=slept.append, token_bytes=runtime.token_bytes, uniform=runtime.uniform)
    disk = new_disk(store, runtime)
    put(disk, "old", b"1")
    away = Retrying(Faulty(store, Fault("unavailable", times=EVER)), runtime)
    with pytest.raises(Unavailable):
        put(cold(disk, away), "new", b"1")
    assert 2 < len(slept) < 100
    assert sum(slept) < 120
    assert len(set(slept)) == len(slept), "jitter"
    slept.clear()
    back = Retrying(Faulty(store, Fault("unavailable", times=6)), runtime)
    put(cold(disk, back), "new", b"1")
    assert effects(disk, store) == ["put old", "put new"]


@pytest.mark.parametrize("seed", range(12))
def test_any_faults_at_all_leave_what_was_acknowledged(seed: int) -> None:
    store = MemoryStore()
    runtime = fixed(seed)
    disk = new_disk(store, runtime, TINY)
    acknowledged: dict[bytes, bytes] = {}
    open_: set[bytes] = set()
    handles = [
        cold(disk, Retrying(Faulty(store, seed=seed * 10 + n, rate=0.25, runtime=runtime), runtime, attempts=4))
        for n in range(3)
    ]
    for n in range(60):
        path, data = f"f{n:02}", b"%d" % n * (n % 40)
        try:
            put(handles[n % 3], path, data)
            acknowledged[path.encode()] = data
        except (Unavailable, NotFound):
            pass
        except Unknown:
            open_.add(path.encode())
        handles[n % 3].close()
    found = contents(disk, cold(disk, store).branch().refresh())
    assert {path: found.get(path) for path in acknowledged} == acknowledged
    assert found.keys() - acknowledged.keys() <= open_, "what was refused for certain is not there"
    messages = effects(disk, store)
    assert len(set(messages)) == len(messages), "each once"
    assert len(acknowledged) > 40
    numbers = [
        decode_entry(store.get(m.key), m.key).seq for m in store.list(layout.log_prefix(disk.id, disk.branch().uuid))
    ]
    assert numbers == list(range(1, len(numbers) + 1))
