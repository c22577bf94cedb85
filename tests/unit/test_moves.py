"""Moving and copying on the tree that the commit follows: what is taken, what is refused, and that no data moves."""

from __future__ import annotations

import pytest

from fanout.disk.disk import Disk, Point
from fanout.disk.merge import Intent, Policy
from fanout.errors import Exists, Invalid, NotFound
from fanout.format.tree import FILE, SYMLINK, Node
from fanout.store.base import Store
from tests.support.disks import new_disk


@pytest.fixture
def disk(memory_store: Store) -> Disk:
    return new_disk(memory_store)


@pytest.fixture
def main(disk: Disk) -> Point:
    return disk.point()


def put(disk: Disk, main: Point, *keys: str) -> None:
    for key in keys:
        disk.put_object(main, key.encode(), key.encode(), 0o640)


def names(main: Point) -> list[str]:
    return [path.decode() for path, node in main.state().below(b"") if node.kind == FILE]


def test_a_file_takes_the_place_of_another_only_if_it_may(disk: Disk, main: Point) -> None:
    put(disk, main, "a", "b", "c")
    with pytest.raises(Exists):
        disk.move(main, b"a", b"b")
    with pytest.raises(Exists):
        disk.copy(main, b"a", b"b")
    assert disk.move(main, b"a", b"b", replace=True).seq is not None
    assert disk.copy(main, b"b", b"c", replace=True).seq is not None
    assert names(main) == ["b", "c"]
    assert disk.read_file(main, b"c")[1] == b"a"


@pytest.mark.parametrize("operation", ["move", "copy"])
def test_a_directory_neither_takes_a_place_nor_gives_its_own(disk: Disk, main: Point, operation: str) -> None:
    put(disk, main, "d/x", "e/y", "f")
    act = getattr(disk, operation)
    for source, target in ((b"d", b"e"), (b"d", b"f"), (b"f", b"d")):
        with pytest.raises(Exists):
            act(main, source, target, replace=True)
    for target in (b"d", b"d/in"):
        with pytest.raises(Invalid):
            act(main, b"d", target, replace=True)
    with pytest.raises(NotFound):
        act(main, b"gone", b"g")
    with pytest.raises(Invalid):
        act(main, b"", b"g")
    assert names(main) == ["d/x", "e/y", "f"]


def test_a_copy_is_one_commit_of_the_same_data_with_a_life_of_its_own(disk: Disk, main: Point) -> None:
    put(disk, main, "d/x", "d/deep/y")
    linked = Node(FILE, 0o644, 1, link=b"0" * 16)
    intents = [Intent(b"d/h1", None, linked), Intent(b"d/h2", None, linked)]
    intents.append(Intent(b"d/l", None, Node(SYMLINK, 0o777, 1, target=b"x")))
    disk.apply(main, intents, policy=Policy.STRICT)
    before = main.state()
    landed = disk.copy(main, b"d", b"new/place/d2")
    after = main.state()
    assert landed.seq == before.seq + 1 == after.seq
    assert names(main) == [
        "d/deep/y",
        "d/h1",
        "d/h2",
        "d/x",
        *(f"new/place/d2/{n}" for n in ("deep/y", "h1", "h2", "x")),
    ]
    old, new = after.get(b"d/x"), after.get(b"new/place/d2/x")
    assert old is not None
    assert new is not None
    assert (new.data, new.mode) == (old.data, old.mode)
    assert new.mtime_ns > old.mtime_ns
    copied = after.get(b"new/place/d2/h1")
    assert copied is not None
    assert copied.link == b""
    link = after.get(b"new/place/d2/l")
    assert link is not None
    assert link.target == b"x"
    put(disk, main, "new/place/d2/x")
    assert disk.read_file(main, b"d/x")[1] == b"d/x"


def test_a_file_copied_onto_itself_is_touched(disk: Disk, main: Point) -> None:
    put(disk, main, "a")
    before = main.state().get(b"a")
    disk.copy(main, b"a", b"a", replace=True)
    after = main.state().get(b"a")
    assert before is not None
    assert after is not None
    assert after.mtime_ns > before.mtime_ns
    assert after.data == before.data
    with pytest.raises(Invalid):
        disk.copy(main, b"a", b"a")


def test_what_another_process_put_at_the_target_is_seen(memory_store: Store, disk: Disk, main: Point) -> None:
    put(disk, main, "a")
    other = Disk(memory_store, disk.record, disk.runtime, disk.tuning)
    put(other, other.point(), "b", "sub/c")
    with pytest.raises(Exists):
        disk.move(main, b"a", b"b")
    disk.move(main, b"sub", b"moved")
    assert names(main) == ["a", "b", "moved/c"]
