"""Arithmetic on references, against the same arithmetic on bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fanout.format.extents import cut, hole, size_of, splice
from fanout.format.tree import HOLE
from tests.support.frames import Frames

contents = st.binary(max_size=60) | st.lists(st.sampled_from([b"\0" * 7, b"abcde", b"\0x"]), max_size=8).map(b"".join)
pieces = st.lists(st.integers(0, 60), max_size=6)
bounds = st.lists(st.integers(0, 80), max_size=10, unique=True).map(sorted)


def disjoint(places: list[int]) -> list[tuple[int, int]]:
    return list(zip(places[::2], places[1::2], strict=False))


@given(contents, pieces, st.integers(0, 70), st.integers(0, 70))
def test_cut(data: bytes, where: list[int], start: int, end: int) -> None:
    frames = Frames()
    refs = frames.refs(data, where)
    part = cut(refs, start, end)
    assert frames.read(part) == data[start:end]
    assert size_of(part) == len(data[start:end])
    low, high = sorted((start // 2, end // 2))
    assert frames.read(cut(part, low, high)) == data[start:end][low:high], "a part of a part"


@given(contents, contents, pieces, pieces, bounds)
def test_splice(mine: bytes, other: bytes, where: list[int], elsewhere: list[int], places: list[int]) -> None:
    frames = Frames()
    expected = bytearray(mine)
    ranges = [(start, end) for start, end in disjoint(places) if end <= len(other)]
    for start, end in ranges:
        expected += bytes(max(0, start - len(expected)))
        expected[start:end] = other[start:end]
    joined = splice(frames.refs(mine, where), frames.refs(other, elsewhere), ranges)
    assert frames.read(joined) == bytes(expected)
    assert all(ref.size for ref in joined)


@given(contents, pieces, bounds)
def test_a_splice_of_a_file_with_itself_leaves_no_trace(data: bytes, where: list[int], places: list[int]) -> None:
    refs = Frames().refs(data, where)
    ranges = [(start, end) for start, end in disjoint(places) if end <= len(data)]
    joined = splice(refs, refs, ranges)
    assert [ref for ref in joined if ref.pack != HOLE] == [ref for ref in refs if ref.pack != HOLE]


def test_holes_are_never_stored() -> None:
    frames = Frames()
    refs = frames.refs(b"x")
    joined = splice(refs, (*hole(6 << 30), *refs), [(6 << 30, (6 << 30) + 1)])
    assert [(ref.pack == HOLE, ref.size) for ref in joined] == [(False, 1), (True, (6 << 30) - 1), (False, 1)]
    assert hole(0) == ()
    assert cut(joined, 1 << 30, 2 << 30) == hole(1 << 30)


def test_many_ranges_take_one_pass() -> None:
    """4,096 changes of a file of 4,096 extents: quadratic, this would be 17 million steps."""
    frames = Frames()
    old = tuple(frames.pack(b"%08d" % n) for n in range(4096))
    new = tuple(frames.pack(b"%08d" % -n) for n in range(4096))
    seen = 0

    class Counting(tuple):  # type: ignore[type-arg]
        def __getitem__(self, at):  # type: ignore[no-untyped-def]
            nonlocal seen
            seen += 1
            return super().__getitem__(at)

    joined = splice(Counting(old), Counting(new), [(8 * n, 8 * n + 4) for n in range(4096)])
    assert size_of(joined) == 8 * 4096
    assert seen < 12 * 4096
