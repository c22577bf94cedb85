"""Verifying a disk: whatever is damaged, exactly what cannot be read is named, and everything else reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from fanout.disk.damage import Problem
from fanout.disk.disk import Disk, Point
from fanout.disk.fsck import Checked
from fanout.disk.merge import Intent, Policy
from fanout.errors import FanoutError
from fanout.format import layout
from fanout.format.entry import CheckpointRecord, Entry, Put, decode_entry, encode_checkpoint, encode_entry
from fanout.format.lock import Acquire
from fanout.format.tree import DIR, FILE, HOLE, Node, Ref, Snap, decode_snap, directory, encode_page, encode_snap
from fanout.store.base import Store
from fanout.store.memory import MemoryStore
from tests.support.disks import TINY, cold, contents, file_node, new_disk, put, put_many

Damager = Callable[[Store, str], None]


def flip(store: Store, key: str) -> None:
    data = store.get(key)
    middle = len(data) // 2
    store.put(key, data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])


def flip_first(store: Store, key: str) -> None:
    data = store.get(key)
    store.put(key, bytes([data[0] ^ 1]) + data[1:])


def truncate(store: Store, key: str) -> None:
    data = store.get(key)
    store.put(key, data[: len(data) * 2 // 3])


def delete(store: Store, key: str) -> None:
    store.delete([key])


DAMAGES = (flip, flip_first, truncate, delete)


@pytest.fixture
def store() -> Store:
    return MemoryStore()


@pytest.fixture
def disk(store: Store) -> Iterator[Disk]:
    """Folded and unfolded commits, shared packs, inline data, branches with and without commits, a merge, a lock."""
    disk = new_disk(store, tuning=TINY)
    put_many(disk, [(f"base/{n}", b"%d" % n * 30) for n in range(9)])
    for n in range(5):
        put(disk, f"d{n % 2}/f", b"%d" % n * (50 if n % 2 else 90))
        disk.branch().settle()
    disk.create_checkpoint("cp", disk.branch(), 4)
    disk.create_branch("fork", Point(disk.branch(), 5))
    disk.create_branch("busy", Point(disk.branch(), 5))
    for n in range(4):
        put(disk, f"busy/{n}", b"b%d" % n * 40, "busy")
        disk.branch("busy").settle()
    disk.merge(disk.branch(), disk.point("busy"), "fail")
    disk.delete_object(disk.point(), b"base/3")
    disk.branch().settle()
    disk.branch().fold()
    disk.branch().take(Acquire("0" * 16, "exec", (b"base",), 2**62))
    node, blobs = file_node(disk, b"tiny")
    parts = (*node.data, Ref(HOLE, 0, 0, 6, b""))
    sparse = Node(FILE, 0o600, 1, 10, parts)
    disk.apply(disk.point(), [Intent(b"sparse", None, sparse)], policy=Policy.LAST_WINS, blobs=blobs)
    yield disk
    disk.close()


LINES = {"main": "main", "fork": "fork", "busy": "busy", "checkpoint cp": "cp"}


def trees(disk: Disk, store: Store) -> dict[str, dict[bytes, bytes]]:
    return {line: contents(disk, cold(disk, store).point(at).state()) for line, at in LINES.items()}


def unreadable(disk: Disk, store: Store, expected: dict[str, dict[bytes, bytes]]) -> dict[str, set[bytes] | None]:
    """Try every path of every line; None: the line cannot be opened. What can be read must be right."""
    lost: dict[str, set[bytes] | None] = {}
    for line, tree in expected.items():
        fresh = cold(disk, store)
        try:
            state = fresh.point(LINES[line]).state()
        except FanoutError:
            lost[line] = None
            continue
        bad = set()
        for path, data in tree.items():
            try:
                node = state.get(path)
                assert node is not None
                assert fresh.reader.read(node.data, state.blob_bytes()) == data, "wrong bytes, and no error"
            except FanoutError:
                bad.add(path)
        if bad:
            lost[line] = bad
    return lost


def named(checked: Checked, expected: dict[str, dict[bytes, bytes]]) -> dict[str, set[bytes] | None]:
    """What the report says cannot be read, in the same form."""
    lost: dict[str, set[bytes] | None] = {}
    for problem in checked.problems:
        for affected in problem.affects.values():
            if affected.line not in expected:
                continue
            files = expected[affected.line]
            if affected.everything:
                lost[affected.line] = None
                continue
            found = {path for path in affected.paths if path in files}
            if affected.between is not None:
                start, end = affected.between
                found |= {path for path in files if start <= path and (not end or path < end)}
                found -= set(affected.spared)
            else:
                assert affected.count == len(affected.paths)
            if lost.get(affected.line, set()) is not None and found:
                lost[affected.line] = (lost.get(affected.line) or set()) | found
    return lost


def objects(store: Store, *kinds: str) -> list[str]:
    return [meta.key for meta in store.list("disks/") if meta.key.split("/")[2] in kinds and meta.size]


def damaged(disk: Disk, store: Store, key: str, damage: Damager, expected: dict[str, dict[bytes, bytes]]) -> Checked:
    """Damage one object, compare the report with what can be read, and repair it."""
    good = store.get(key)
    damage(store, key)
    try:
        checked = cold(disk, store).check()
        assert named(checked, expected) == unreadable(disk, store, expected), (key, damage.__name__)
        return checked
    finally:
        store.put(key, good)


def test_a_good_disk_is_good(disk: Disk, store: Store) -> None:
    for quick in (False, True):
        checked = disk.check(quick=quick)
        assert checked.problems == []
        assert checked.files == sum(len(tree) for tree in trees(disk, store).values())
    counts = {kind: len(objects(store, kind)) for kind in ("log", "snap")}
    assert (checked.entries, checked.snaps) == (counts["log"], counts["snap"])
    assert 0 < disk.check(quick=True).bytes_read < disk.check().bytes_read


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_every_object_damaged_in_turn(disk: Disk, store: Store, damage: Damager) -> None:
    expected = trees(disk, store)
    silent = []
    tails = {max((key for key in objects(store, "log") if uuid in key), default="") for uuid in uuids(disk)}
    for key in objects(store, "log", "snap", "page", "pack"):
        if damage is delete and key in tails:
            continue  # nothing tells of a last entry that is gone: the branch ends before it
        checked = damaged(disk, store, key, damage, expected)
        mine = [problem for problem in checked.problems if problem.key == key]
        if not mine:
            silent.append(key)
        elif "/page/" in key:
            assert all(affected.between is None for affected in mine[0].affects.values()), "the log knows the names"
        assert len(checked.problems) == len(mine), "one damaged object, one problem"
    snaps, needed = set(objects(store, "snap")), set(objects(store, "log", "snap", "page", "pack"))
    if damage is delete:
        # A tree needs no snap while it has its whole log; what only that snap refers to is garbage then.
        assert set(silent) <= snaps | garbage(disk, store, needed)
    else:
        assert set(silent) <= garbage(disk, store, needed)


def uuids(disk: Disk) -> list[str]:
    return [disk.branch(name).uuid for name in ("main", "fork", "busy")]


def garbage(disk: Disk, store: Store, keys: set[str]) -> set[str]:
    """What a collection would delete that keeps all history."""
    copy = MemoryStore()
    for meta in store.list():
        copy.put(meta.key, store.get(meta.key))
    Disk(copy, disk.record, disk.runtime, TINY).collect(0, 10**9)
    return {key for key in keys if copy.head(key) is None}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_every_object_of_a_trimmed_disk(disk: Disk, store: Store, damage: Damager) -> None:
    disk.collect(0, 0)
    expected = trees(disk, store)
    assert disk.check().problems == []
    tails = {max((key for key in objects(store, "log") if uuid in key), default="") for uuid in uuids(disk)}
    for key in objects(store, "log", "snap", "page", "pack", "kept"):
        if damage is delete and key in tails:
            continue
        checked = damaged(disk, store, key, damage, expected)
        if not (damage is delete and "/snap/" in key):
            assert key in {problem.key for problem in checked.problems}, key


def test_history_is_checked_too(disk: Disk, store: Store) -> None:
    """A pack that only an overwritten version needs."""
    old = disk.branch().at(2).get(b"d0/f")
    assert old is not None
    key = layout.pack_key(disk.id, old.data[0].pack)
    assert key in objects(store, "pack")
    delete(store, key)
    (problem,) = disk.check().problems
    assert problem.key == key
    assert problem.affects["commit 2 of main"].paths == [b"d0/f"]
    assert not LINES.keys() & problem.affects.keys()


def test_records(disk: Disk, store: Store) -> None:
    for kind, key, label in (
        ("branch", layout.branch_key(disk.id, "busy"), "busy"),
        ("checkpoint", layout.checkpoint_key(disk.id, "cp"), "checkpoint cp"),
        ("disk", layout.disk_key(disk.id), "the disk, if opened by id"),
        ("names", layout.name_key("d"), "the disk, if opened by name"),
    ):
        good = store.get(key)
        flip(store, key)
        checked = cold(disk, store).check()
        (problem,) = [each for each in checked.problems if each.key == key]
        assert problem.affects[label].everything, kind
        store.put(key, good)
    main_key = layout.branch_key(disk.id, layout.MAIN)
    good = store.get(main_key)
    store.put(main_key, store.get(layout.branch_key(disk.id, "busy")))
    assert [problem.key for problem in disk.check().problems] == [main_key]
    store.put(main_key, good)
    store.put(layout.disk_key(disk.id), b"".join([store.get(layout.name_key("d"))]))
    assert disk.check().problems == []
    other = new_disk(MemoryStore(), name="d")
    store.put(layout.name_key("d"), other._store.get(layout.name_key("d")))
    (problem,) = disk.check().problems
    assert "another record says otherwise" in problem.what
    store.put(layout.name_key("d"), store.get(layout.disk_key(disk.id)))
    store.delete([layout.branch_key(disk.id, "busy")])
    assert any("no record names the branch" in problem.what for problem in cold(disk, store).check().problems)


def only(checked: Checked) -> Problem:
    (problem,) = checked.problems
    return problem


def rewrite(disk: Disk, store: Store, seq: int, change: Callable[[Entry], Entry], uuid: str = "") -> str:
    key = layout.log_key(disk.id, uuid or disk.record.main, seq)
    store.put(key, encode_entry(change(decode_entry(store.get(key), key))))
    return key


def test_whole_objects_that_lie(store: Store) -> None:
    """Objects with a right checksum that say what cannot be so."""
    disk = new_disk(store)
    put(disk, "d/a", b"1")
    put(disk, "b", b"2")
    put(disk, "c", b"3")
    uuid = disk.record.main
    first = decode_entry(store.get(layout.log_key(disk.id, uuid, 1)), "1")

    def lies(what: str, seq: int, change: Callable[[Entry], Entry]) -> None:
        key = layout.log_key(disk.id, uuid, seq)
        good = store.get(key)
        rewrite(disk, store, seq, change)
        problem = only(cold(disk, store).check())
        assert what in problem.what
        store.put(key, good)

    lies("says it is entry 7", 2, lambda e: Entry(e.write_id, 7, e.time_ns, e.commits, e.blobs))
    lies("written twice", 2, lambda e: Entry(first.write_id, 2, e.time_ns, e.commits, e.blobs))
    lies("inline pack", 2, lambda e: Entry(e.write_id, 2, e.time_ns, e.commits, dict.fromkeys(e.blobs, b"x" * 40)))

    def put_node(path: bytes, node: Node) -> Callable[[Entry], Entry]:
        def change(entry: Entry) -> Entry:
            commit = entry.commits[0]
            effects = (*commit.effects, Put(path, node))
            fields = (commit.time_ns, commit.author, commit.message, commit.exec_id, commit.base_seq, effects)
            return Entry(entry.write_id, entry.seq, entry.time_ns, (type(commit)(*fields),), entry.blobs)

        return change

    lies("is no directory", 3, put_node(b"no/where", directory()))
    lies("something is in it", 3, put_node(b"d", Node(FILE, 0o644, 1)))
    lies("has 5 bytes, its parts 0", 3, put_node(b"x", Node(FILE, 0o644, 1, 5)))
    lies("is of kind 9", 3, put_node(b"x", Node(9, 0o644, 1)))
    lies("no file and has contents", 3, put_node(b"x", Node(DIR, 0o755, 1, 0, (Ref(HOLE, 0, 0, 0, b""),))))
    lies("beyond the end", 3, put_node(b"x", Node(FILE, 0o644, 1, 4, (Ref(HOLE, 0, 0, 4, b"", 2, 4),))))
    store.put(layout.checkpoint_key(disk.id, "cp"), encode_checkpoint(CheckpointRecord("f" * 32, 1, 1, "gone")))
    assert "names a branch that is not there" in only(cold(disk, store).check()).what
    store.put(layout.checkpoint_key(disk.id, "cp"), encode_checkpoint(CheckpointRecord(uuid, 9, 1, "main")))
    assert only(cold(disk, store).check()).affects["checkpoint cp"].everything


def test_a_snap_that_is_not_the_log(store: Store) -> None:
    disk = new_disk(store)
    put(disk, "a", b"1")
    put(disk, "d/b", b"2")
    state = disk.branch().fold()
    key = layout.snap_key(disk.id, disk.record.main, 2)
    good = store.get(key)
    snap = decode_snap(good, key)

    def told(what: str, **changed: object) -> None:
        fields = {name: getattr(snap, name) for name in Snap.__struct_fields__} | changed
        store.put(key, encode_snap(Snap(**fields)))
        assert what in "; ".join(problem.what for problem in cold(disk, store).check().problems)
        store.put(key, good)

    told("counts 7 files", files=7)
    told("counts 2 files of 9 bytes", bytes=9)
    told("says it is the snap of 3", seq=3)
    told("other locks or merges", merges=(("f" * 32, 1, 1),))
    told("differs at b'a'", pages=())
    entries = [item for item in state.scan() if item[0] != b"d"]
    digest, data = encode_page(entries)
    store.put(layout.page_key(disk.id, digest), data)
    page = snap.pages[0]
    moved = type(page)(entries[0][0], digest, len(entries), len(data))
    told("b'd/b' is there, and b'd' is no directory", pages=(moved,))
    told("is not the page that the snap describes", pages=(type(page)(b"zz", digest, len(entries), len(data)),))
    told("pages overlap", pages=(page, type(page)(page.first, page.hash, page.count, page.stored)))


def test_many_paths_are_counted_and_some_named(store: Store) -> None:
    disk = new_disk(store)
    put_many(disk, [(f"f{n:04}", b"same pack %d" % n * 20) for n in range(150)])
    disk.branch().fold()
    for key in objects(store, "pack"):
        delete(store, key)
    problems = cold(disk, store).check().problems
    assert sum(problem.affects["main"].count for problem in problems if "main" in problem.affects) == 150
    assert max(len(problem.affects["main"].paths) for problem in problems if "main" in problem.affects) == 100
    assert {p.key for p in cold(disk, store).check(quick=True).problems} == {p.key for p in problems}
