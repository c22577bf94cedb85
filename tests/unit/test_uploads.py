"""Uploads in parts: what their records promise, and what a collection leaves and takes."""

from __future__ import annotations

import hashlib

import pytest

from fanout.disk.disk import Disk, Point
from fanout.disk.leftovers import UPLOAD_S, list_uploads
from fanout.disk.merge import Intent, Policy
from fanout.disk.objects import plan_put
from fanout.disk.proposal import Proposal
from fanout.disk.state import State
from fanout.disk.uploads import NoUpload
from fanout.disk.writer import ContentWriter
from fanout.errors import Corrupt, Limit
from fanout.format.tree import FILE, Node
from fanout.format.upload import PartRecord, UploadRecord
from fanout.runtime import Runtime
from fanout.store.base import Store
from fanout.store.memory import MemoryStore
from tests.support.disks import TINY, cold, get, new_disk

DAY_S = 86_400.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_750_000_000.0

    def runtime(self) -> Runtime:
        return Runtime(
            now_ns=lambda: int(self.now_s * 1e9),
            monotonic=lambda: self.now_s,
            uptime=lambda: self.now_s,
            sleep=lambda seconds: None,
        )


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Store:
    return MemoryStore(runtime=clock.runtime())


@pytest.fixture
def disk(store: Store, clock: Clock) -> Disk:
    return new_disk(store, clock.runtime(), TINY)


def begin(disk: Disk, path: bytes = b"big") -> str:
    record = UploadRecord(path, disk.runtime.now_ns(), "me", 0o644, 0, 0, ())
    return disk.uploads.begin(disk.branch().uuid, record)


def add(disk: Disk, upload: str, number: int, body: bytes) -> PartRecord:
    began_ns = disk.runtime.now_ns()
    writer = ContentWriter(disk.packer(inline=False))
    writer.write(body)
    refs, blobs = writer.finish()
    assert not blobs
    now_ns = disk.runtime.now_ns()
    part = PartRecord(number, len(body), refs, hashlib.md5(body).digest(), began_ns, now_ns)
    disk.uploads.add_part(disk.branch().uuid, upload, part)
    return part


def complete(disk: Disk, upload: str) -> None:
    uuid = disk.branch().uuid
    record = disk.uploads.get(uuid, upload)
    parts = [part.record for part in disk.uploads.parts(uuid, upload)]
    node = Node(FILE, 0o644, 0, sum(part.size for part in parts), tuple(ref for part in parts for ref in part.data))

    def plan(tree: State) -> list[Intent]:
        disk.uploads.require(uuid, upload, record)
        return plan_put(tree, record.path, node)

    disk.branch().commit(Proposal((), Policy.STRICT, plan=plan))
    disk.uploads.finish(uuid, upload, "etag")


def test_any_process_goes_on(disk: Disk, store: Store, clock: Clock) -> None:
    upload = begin(disk)
    add(disk, upload, 2, b"second" * 20)
    other = cold(disk, store)
    add(other, upload, 1, b"first" * 20)
    clock.now_s += 1
    add(other, upload, 1, b"first again" * 20)
    third = cold(disk, store)
    numbers = [part.record.number for part in third.uploads.parts(third.branch().uuid, upload)]
    assert numbers == [1, 1, 2]
    assert [each[0] for each in third.uploads.under_way(third.branch().uuid)] == [upload]
    complete(third, upload)
    assert get(disk, "big") == b"first" * 20 + b"first again" * 20 + b"second" * 20
    end = disk.uploads.end(disk.branch().uuid, upload)
    assert end is not None
    assert end.etag == "etag"
    with pytest.raises(NoUpload):
        disk.uploads.get(disk.branch().uuid, upload)
    assert [key.rpartition("/")[2] for view in list_uploads(store, disk.id).values() for key in view.keys] == ["end"]


def test_a_collection_keeps_open_uploads_for_a_week(disk: Disk, store: Store, clock: Clock) -> None:
    upload = begin(disk)
    add(disk, upload, 1, b"data" * 50)
    assert disk.check().problems == []
    clock.now_s += UPLOAD_S - 100
    disk.collect()
    complete(disk, upload)
    disk.branch().fold()
    clock.now_s += 2 * DAY_S
    disk.collect()
    assert get(cold(disk, store), "big") == b"data" * 50
    assert list_uploads(store, disk.id) == {}, "it ended more than a day ago"


@pytest.mark.parametrize("how", ["aborted", "forgotten"])
def test_a_collection_takes_what_is_over(disk: Disk, store: Store, clock: Clock, how: str) -> None:
    upload = begin(disk)
    add(disk, upload, 1, b"data" * 50)
    packs = list(store.list(f"disks/{disk.id}/pack/"))
    assert packs
    if how == "aborted":
        disk.uploads.finish(disk.branch().uuid, upload, "")
        clock.now_s += DAY_S - 10
    else:
        clock.now_s += UPLOAD_S + DAY_S - 10
    disk.collect()
    assert list(store.list(f"disks/{disk.id}/pack/")) == packs, "a commit of it may be on its way"
    clock.now_s += 20
    assert disk.collect(dry_run=True).packs == len(packs)
    disk.collect()
    assert list(store.list(f"disks/{disk.id}/pack/")) == []
    assert list_uploads(store, disk.id) == {}
    with pytest.raises(NoUpload):
        complete(disk, upload)


def test_an_abort_stops_a_commit_that_was_planned_before(disk: Disk, store: Store) -> None:
    """The commit loses its place to another one, and asks again before it tries the next."""
    upload = begin(disk)
    add(disk, upload, 1, b"data" * 50)
    uuid = disk.branch().uuid
    record = disk.uploads.get(uuid, upload)
    asked = 0

    def plan(tree: State) -> list[Intent]:
        nonlocal asked
        asked += 1
        disk.uploads.require(uuid, upload, record)
        if asked == 1:
            other = cold(disk, store)
            other.put_object(Point(other.branch()), b"else", b"x", 0o644)
            other.uploads.finish(uuid, upload, "")
        return plan_put(tree, b"big", Node(FILE, 0o644, 0))

    with pytest.raises(NoUpload):
        disk.branch().commit(Proposal((), Policy.STRICT, plan=plan))
    assert asked == 2
    assert disk.branch().refresh().get(b"big") is None


def test_a_part_that_was_recorded_late_is_none(disk: Disk, clock: Clock) -> None:
    upload = begin(disk)
    part = add(disk, upload, 1, b"data" * 50)
    clock.now_s += disk.tuning.unreferenced_s + 10
    packed = ContentWriter(disk.packer(inline=False))
    packed.write(b"x" * 50)
    refs, _ = packed.finish()
    late = PartRecord(2, 50, refs, b"", part.stored_ns, part.modified_ns)
    clock.now_s += disk.tuning.unreferenced_s + 10
    with pytest.raises(Limit, match="may be gone"):
        disk.uploads.add_part(disk.branch().uuid, upload, late)
    slow = PartRecord(3, part.size, part.data, part.md5, part.stored_ns, part.modified_ns)
    disk.uploads.add_part(disk.branch().uuid, upload, slow)  # as by a process that was frozen just before
    numbers = [each.record.number for each in disk.uploads.parts(disk.branch().uuid, upload)]
    assert numbers == [1]


def test_ids_that_are_none(disk: Disk) -> None:
    for upload in ("", "x", "../../disk", "0" * 31, "A" * 32):
        with pytest.raises(NoUpload):
            disk.uploads.get(disk.branch().uuid, upload)
        assert disk.uploads.end(disk.branch().uuid, upload) is None


def test_damage_is_told(disk: Disk, store: Store) -> None:
    upload = begin(disk)
    key = next(iter(next(iter(list_uploads(store, disk.id).values())).keys))
    store.put(key, b"FANU" + bytes(40))
    with pytest.raises(Corrupt):
        disk.uploads.get(disk.branch().uuid, upload)
