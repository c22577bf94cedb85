"""Changes inside a file: found, joined and kept in few runs; against plain bytes, then on disks."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fanout.config import Tuning
from fanout.disk import edits
from fanout.disk.disk import Disk, Point
from fanout.disk.edits import MAX_FRAGMENTS, MAX_RANGES, Edits, combine, compact, find_edits
from fanout.disk.merge import Intent, Policy
from fanout.disk.proposal import Proposal, Waiting
from fanout.errors import Conflict
from fanout.format.extents import hole, size_of
from fanout.format.tree import FILE, HOLE, Node
from fanout.store.memory import MemoryStore
from tests.support.disks import TINY, UNFOLDED, cold, contents, file_node, get, new_disk, put
from tests.support.frames import Frames
from tests.unit.test_merge import DOC

data = st.binary(max_size=40) | st.lists(st.sampled_from([b"\0" * 9, b"abc", b"abd"]), max_size=8).map(b"".join)
pieces = st.lists(st.integers(0, 60), max_size=5)


# -- the model ---------------------------------------------------------------------------------------------------------


def changed(base: bytes, new: bytes) -> list[int]:
    return [i for i, (a, b) in enumerate(zip(base, new, strict=False)) if a != b]


def model(base: bytes, first: bytes, second: bytes) -> bytes:
    """What is left of two changes of `base`, as docs/MERGE.md says it: the definition, byte by byte."""
    if len(second) > len(base) and second.startswith(base):
        return first + second[len(base) :]
    if len(second) != len(base) or second == base:
        return second
    joined = bytearray(first)
    for i in changed(base, second):
        joined += bytes(max(0, i + 1 - len(joined)))
        joined[i] = second[i]
    return bytes(joined)


Step = tuple[str, int, bytes]
steps = st.tuples(st.sampled_from("waatcr"), st.integers(0, 50), st.binary(min_size=1, max_size=6))


def do(content: bytes, step: Step) -> bytes:
    what, at, new = step
    if what == "a":
        return content + new
    if what == "t":
        return content[: at % (len(content) + 1)]
    if what == "r":
        return new
    if what == "c":
        return content + bytes(at)
    at = at % (len(content) + 1)
    return content[:at] + new[: len(content) - at] + content[at + len(new) :]  # in place: never longer


# -- pure --------------------------------------------------------------------------------------------------------------


@given(data, data, pieces, pieces)
def test_find_edits(base: bytes, new: bytes, where: list[int], elsewhere: list[int]) -> None:
    frames = Frames()
    found = find_edits(frames.node(base, where), frames.node(new, elsewhere), frames.read)
    if len(new) > len(base) and new.startswith(base):
        assert found == Edits((), True)
    elif len(new) != len(base):
        assert found == Edits()
    else:
        assert [i for start, end in found.ranges for i in range(start, end)] == changed(base, new)
        assert not found.appended
        assert all(a[1] < b[0] for a, b in zip(found.ranges, found.ranges[1:], strict=False)), "joined where they touch"


@given(data, st.lists(steps, max_size=5), pieces, st.integers(1, 16))
def test_any_changes_one_after_the_other(base: bytes, made: Sequence[Step], where: list[int], extent: int) -> None:
    """Every change was made from `base`, whatever landed before it."""
    frames = Frames()
    start = frames.node(base, where)
    now, expected = start, base
    for number, step in enumerate(made):
        new = do(base, step)
        if new == base:
            continue
        node = frames.node(new, where[number:])
        now = frames.of(combine(start, node, now, frames.read, frames.pack, extent))
        expected = model(base, expected, new)
        assert frames.read(now.data) == expected


def test_what_is_shared_is_not_read() -> None:
    frames = Frames()
    big = tuple(frames.pack(bytes([n]) * 1000) for n in range(1, 101))
    base = frames.of((*big, *hole(6 << 30), *big))
    edited = frames.pack(b"x" + bytes([50]) * 999)
    for node in (
        frames.of((*big[:49], edited, *big[50:], *hole(6 << 30), *big)),
        frames.of((*big[:49], edited, *big[50:], *hole(1 << 30), *hole(5 << 30), *big)),
    ):
        frames.read_bytes = 0
        assert find_edits(base, node, frames.read) == Edits(((49_000, 49_001),))
        assert frames.read_bytes == 2000
    frames.read_bytes = 0
    assert find_edits(base, frames.of((*base.data, edited)), frames.read).appended
    assert frames.read_bytes == 0


def test_a_file_changed_everywhere_was_rewritten() -> None:
    frames = Frames()
    base = frames.node(b"ab" * (MAX_RANGES + 1))
    assert find_edits(base, frames.node(b"xb" * (MAX_RANGES + 1)), frames.read) == Edits()
    assert len(find_edits(base, frames.node(b"xb" * MAX_RANGES + b"ab"), frames.read).ranges) == MAX_RANGES


def test_ranges_join_across_the_steps_of_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edits, "_STEP", 4)
    frames = Frames()
    found = find_edits(frames.node(b"a" * 20), frames.node(b"aa" + b"x" * 14 + b"aaaa"), frames.read)
    assert found.ranges == ((2, 16),)


# -- few runs ----------------------------------------------------------------------------------------------------------


def fragments(node: Node, extent: int) -> int:
    return sum(edits._is_fragment(ref, extent) for ref in node.data)


@pytest.mark.parametrize("how", ["edits", "appends"])
def test_a_file_joined_a_thousand_times_stays_in_few_runs(how: str) -> None:
    frames = Frames()
    extent = 4096
    source = random.Random(7)
    base_data = source.randbytes(16 * extent)
    base = now = frames.of(frames.refs(base_data, range(0, len(base_data), extent)))
    expected = bytearray(base_data)
    frames.packed = 0
    for n in range(1000):
        if how == "edits":
            at = source.randrange(len(base_data))
            new = base_data[:at] + bytes([base_data[at] ^ 1]) + base_data[at + 1 :]
            expected[at] = new[at]
        else:
            new = base_data + b"%06d\n" % n
            expected += b"%06d\n" % n
        first = len(base_data) // extent - 1 if how == "appends" else at // extent
        end = len(new) if how == "appends" else (first + 1) * extent
        edited = new[first * extent : end]
        refs = (*base.data[:first], frames.pack(edited), *base.data[first + 1 :])
        frames.packed -= len(edited)
        now = frames.of(combine(base, frames.of(refs), now, frames.read, frames.pack, extent))
        assert fragments(now, extent) <= MAX_FRAGMENTS
        assert len(now.data) <= MAX_FRAGMENTS + 16 + 4
    assert frames.read(now.data) == bytes(expected)
    assert frames.packed <= 1000 * extent, "no more is packed anew than an exec packs that changes one extent"


def test_packing_anew_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edits, "_COMPACT_BYTES", 10_000)
    frames = Frames()
    extent = 4096
    whole = [frames.pack(bytes([n % 255 + 1]) * extent) for n in range(200)]
    refs = []
    for n, ref in enumerate(whole):
        small = frames.pack(b"%d" % n)
        refs += [*edits.cut((ref,), 0, 2000), small, *edits.cut((ref,), 2000 + small.size, extent)]
    before = frames.read(refs)
    frames.packed = 0
    after = compact(tuple(refs), frames.read, frames.pack, extent)
    assert frames.read(after) == before
    assert 0 < frames.packed <= 10_000
    assert len(after) < len(refs)


def test_runs_between_holes_are_left_alone() -> None:
    """A sparse file of many small runs is what it is: packing it anew would not make them fewer."""
    frames = Frames()
    refs = tuple(ref for n in range(300) for ref in (*hole(1 << 20), frames.pack(b"%d" % n)))
    frames.packed = 0
    assert compact(refs, frames.read, frames.pack, 4 << 20) == refs
    assert frames.packed == 0


@given(st.lists(st.tuples(st.sampled_from("phw"), st.integers(1, 40)), max_size=40), st.integers(1, 64))
def test_compact_changes_no_byte(parts: list[tuple[str, int]], extent: int) -> None:
    frames = Frames()
    refs = []
    for n, (kind, size) in enumerate(parts):
        whole = frames.pack(bytes([n + 1]) * (size + 1))
        refs += hole(size) if kind == "h" else edits.cut((whole,), 1, 1 + size) if kind == "p" else (whole,)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edits, "MAX_FRAGMENTS", 4)
        after = compact(tuple(refs), frames.read, frames.pack, extent)
    assert frames.read(after) == frames.read(refs)
    assert size_of(after) == size_of(refs)
    assert len(after) <= len(refs)
    assert [r.size for r in after if r.pack == HOLE] == [r.size for r in refs if r.pack == HOLE]


# -- on disks ----------------------------------------------------------------------------------------------------------


def change(disk: Disk, new: bytes, base_seq: int, policy: Policy = Policy.LAST_WINS, path: bytes = b"f") -> None:
    """Commit `new` as the content of a file, as an exec does that saw commit `base_seq`."""
    branch = disk.branch()
    state = branch.at(base_seq)
    node, blobs = file_node(disk, new)
    intent = Intent(path, state.get(path), node)
    branch.commit(Proposal([intent], policy, base_seq, blobs, seen_blobs=state.blob_bytes()))


@pytest.mark.parametrize("tuning", [TINY, UNFOLDED, Tuning(fold_entries=2)], ids=["tiny", "unfolded", "folding"])
@pytest.mark.parametrize("fold", [False, True])
@given(base=data, made=st.lists(steps, max_size=4))
def test_commits_that_meet_inside_a_file(tuning: Tuning, fold: bool, base: bytes, made: list[Step]) -> None:
    store = MemoryStore()
    disk = new_disk(store, tuning=tuning)
    put(disk, "f", base)
    expected = base
    for step in made:
        new = do(base, step)
        if new == base:
            continue
        change(disk, new, 1)
        if fold:
            disk.branch().fold()
        expected = model(base, expected, new)
        assert get(disk, "f") == expected
    disk.close()
    assert get(cold(disk, store), "f") == expected


def test_case_20_many_writers_of_one_file() -> None:
    """Fifty from one snapshot, each its own block of ten bytes and, twice, a line at the end."""
    disk = new_disk(MemoryStore(), tuning=TINY)
    base = b"." * 500
    put(disk, "f", base)
    put(disk, "log", b"start\n")
    for n in range(50):
        change(disk, base[: 10 * n] + b"%010d" % n + base[10 * n + 10 :], 2)
    assert get(disk, "f") == b"".join(b"%010d" % n for n in range(50))
    for n in range(50):
        change(disk, b"start\n" + b"line %d\n" % n, 2, path=b"log")
    assert get(disk, "log") == b"start\n" + b"".join(b"line %d\n" % n for n in range(50))
    disk.close()


def test_a_file_that_hundreds_join_stays_readable_and_small() -> None:
    """Past MAX_FRAGMENTS the committer packs it anew; cold readers, folds and memory all see the same bytes."""
    store = MemoryStore()
    disk = new_disk(store, tuning=Tuning(fold_entries=100))
    base = random.Random(1).randbytes(4000)
    put(disk, "f", base)
    expected = bytearray(base)
    for n in range(400):
        at = 10 * n
        new = base[:at] + bytes([base[at] ^ 0xFF]) + base[at + 1 :]
        expected[at] ^= 0xFF
        change(disk, new, 1)
        node = disk.branch().known().get(b"f")
        assert node is not None
        assert len(node.data) <= MAX_FRAGMENTS
    disk.close()
    assert get(disk, "f") == bytes(expected)
    assert get(cold(disk, store), "f") == bytes(expected)


def test_joined_within_one_group() -> None:
    """Commits that become durable together meet as those do that follow each other, packing anew included."""
    store = MemoryStore()
    disk = new_disk(store)
    branch = disk.branch()
    put(disk, "f", b"." * 2000)
    state = branch.known()
    base = state.get(b"f")
    batch = []
    for n in range(300):
        node, blobs = file_node(disk, b"." * 6 * n + b"%d" % (n % 10) + b"." * (1999 - 6 * n))
        proposal = Proposal([Intent(b"f", base, node)], Policy.LAST_WINS, 1, blobs, seen_blobs=state.blob_bytes())
        batch.append(Waiting(proposal, 1, {}))
    branch._commit_group(batch)
    assert [each.error for each in batch] == [None] * 300
    assert branch.known().seq == 2
    expected = b"".join(b"%d....." % (n % 10) for n in range(300)) + b"." * 200
    assert get(disk, "f") == expected
    assert get(cold(disk, store), "f") == expected


def test_all_names_of_a_file_stay_one() -> None:
    store = MemoryStore()
    disk = new_disk(store)
    branch = disk.branch()
    node, blobs = file_node(disk, b"." * 30)
    linked = Node(FILE, 0o644, 1, 30, node.data, link=b"L" * 16)
    disk.apply(Point(branch), [Intent(n, None, linked) for n in (b"a", b"b")], policy=Policy.LAST_WINS, blobs=blobs)
    for n in range(2):
        state = branch.at(1)
        new, blobs = file_node(disk, b"." * 10 * n + b"%d" % n * 10 + b"." * (20 - 10 * n))
        both = Node(FILE, 0o644, 2 + n, 30, new.data, link=b"L" * 16)
        intents = [Intent(name, state.get(name), both) for name in (b"a", b"b")]
        branch.commit(Proposal(intents, Policy.LAST_WINS, 1, blobs, seen_blobs=state.blob_bytes()))
    a, b = branch.known().get(b"a"), branch.known().get(b"b")
    assert a == b
    assert get(disk, "a") == b"0" * 10 + b"1" * 10 + b"." * 10


@pytest.mark.parametrize("on_conflict", ["fail", "ours", "theirs"])
def test_merges_of_branches(on_conflict: str) -> None:
    """Merges decide whole files: a mixture of two branches' bytes is what nobody wrote."""
    disk = new_disk(MemoryStore(), tuning=TINY)
    put(disk, "f", b"." * 40)
    put(disk, "log", b"start\n")
    side = disk.create_branch("side", Point(disk.branch()))
    put(disk, "f", b"1" * 10 + b"." * 30)
    put(disk, "log", b"start\none\n")
    put(disk, "f", b"." * 5 + b"2" * 10 + b"." * 25, branch="side")
    put(disk, "log", b"start\ntwo\n", branch="side")
    if on_conflict == "fail":
        with pytest.raises(Conflict) as caught:
            disk.merge(disk.branch(), Point(side), on_conflict)
        assert caught.value.paths == ("f", "log")
        return
    disk.merge(disk.branch(), Point(side), on_conflict)
    theirs = (b"." * 5 + b"2" * 10 + b"." * 25, b"start\ntwo\n")
    assert (get(disk, "f"), get(disk, "log")) == (
        theirs if on_conflict == "theirs" else (b"1" * 10 + b"." * 30, b"start\none\n")
    )


def test_sparse_and_many_extents() -> None:
    disk = new_disk(MemoryStore(), tuning=TINY)
    branch = disk.branch()
    head, tail = os.urandom(100), os.urandom(100)
    size = (6 << 30) + 200

    def made(first: bytes, last: bytes) -> tuple[Node, dict[bytes, bytes]]:
        one, blobs = file_node(disk, first)
        two, more = file_node(disk, last)
        return Node(FILE, 0o644, 1, size, (*one.data, *hole(6 << 30), *two.data)), {**blobs, **more}

    node, blobs = made(head, tail)
    disk.apply(Point(branch), [Intent(b"f", None, node)], policy=Policy.LAST_WINS, blobs=blobs)
    state = branch.known()
    for first, last in ((b"x" + head[1:], tail), (head, tail[:-1] + b"y")):
        new, blobs = made(first, last)
        intent = Intent(b"f", state.get(b"f"), new)
        branch.commit(Proposal([intent], Policy.LAST_WINS, 1, blobs, seen_blobs=state.blob_bytes()))
    now = branch.known().get(b"f")
    assert now is not None
    assert now.size == size
    held = branch.known().blob_bytes()
    stored = [(disk.reader.read((ref,), held) if ref.pack != HOLE else b"") for ref in now.data]
    assert b"".join(stored) == b"x" + head[1:] + tail[:-1] + b"y"
    disk.close()


def test_two_that_both_make_a_file_do_not_join() -> None:
    disk = new_disk(MemoryStore())
    put(disk, "other", b"")
    for new in (b"one\n", b"two\n"):
        change(disk, new, 1)
    assert get(disk, "f") == b"two\n"


#: What docs/MERGE.md says under "Inside a file": what the first does, the second, and what the file then holds.
BASE = b"0123456789"
OPERATIONS: dict[str, Callable[[str], bytes | None]] = {
    "write bytes 2-5": lambda who: b"01" + (b"aaaa" if who == "first" else b"bbbb") + b"6789",
    "write bytes 4-7": lambda who: b"0123" + (b"aaaa" if who == "first" else b"bbbb") + b"89",
    "append": lambda who: BASE + (b"A" if who == "first" else b"B"),
    "truncate to 4": lambda who: BASE[:4],
    "rewrite": lambda who: b"new by " + who.encode(),
    "delete": lambda who: None,
}


def meet(first: str, second: str) -> str:
    disk = new_disk(MemoryStore())
    put(disk, "f", BASE)
    for who, what in (("first", first), ("second", second)):
        new = OPERATIONS[what](who)
        branch = disk.branch()
        state = branch.at(1)
        node, blobs = file_node(disk, new) if new is not None else (None, {})
        intent = Intent(b"f", state.get(b"f"), node)
        branch.commit(Proposal([intent], Policy.LAST_WINS, 1, blobs, seen_blobs=state.blob_bytes()))
    found = contents(disk, disk.branch().known()).get(b"f")
    return "gone" if found is None else f"`{found.decode().replace(chr(0), '.')}`"


def table() -> str:
    lines = ["| first \\ then | " + " | ".join(OPERATIONS) + " |", "|---|" + "---|" * len(OPERATIONS)]
    lines += [f"| {first} | " + " | ".join(meet(first, then) for then in OPERATIONS) + " |" for first in OPERATIONS]
    return "\n".join(lines) + "\n"


def test_the_documented_table_is_what_happens() -> None:
    text = DOC.read_text()
    begin, end = "<!-- inside: tests/unit/test_edits.py -->\n", "<!-- end of inside -->"
    documented = text[text.index(begin) + len(begin) : text.index(end)]
    assert documented == table(), "write it anew with: python -m tests.unit.test_edits"


if __name__ == "__main__":
    print(table(), end="")
