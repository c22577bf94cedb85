"""Keeping output within bounds: exact up to the cap, head and tail beyond it; text never splits a character."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fanout.run.output import Capture, TextStream


def chunks_of(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


def expected(data: bytes, cap: int) -> bytes:
    if len(data) <= cap:
        return data
    marker = f"\n[... {len(data) - cap} bytes left out ...]\n".encode()
    return data[: cap // 2] + marker + data[len(data) - (cap - cap // 2) :]


@given(cap=st.integers(1, 40), data=st.binary(max_size=200), cuts=st.lists(st.integers(0, 1000), max_size=30))
def test_any_chunks(cap: int, data: bytes, cuts: list[int]) -> None:
    capture = Capture(cap)
    for chunk in chunks_of(data, cuts):
        capture.feed(chunk)
    assert capture.value() == expected(data, cap)
    assert (capture.total, capture.truncated) == (len(data), len(data) > cap)


@pytest.mark.parametrize("cap", [1024, 1025])
@pytest.mark.parametrize("over", [-1, 0, 1])
def test_around_the_cap(cap: int, over: int) -> None:
    data = bytes(i % 251 for i in range(cap + over))
    capture = Capture(cap)
    capture.feed(data)
    assert capture.value() == expected(data, cap)
    assert capture.truncated is (over > 0)


def test_memory_is_bounded() -> None:
    capture = Capture(1000)
    for _ in range(5000):
        capture.feed(b"x" * 7)
        held = len(capture._head) + len(capture._tail)
        assert held <= 1500 + 7
    assert capture.total == 35000


@given(text=st.text(max_size=60), cuts=st.lists(st.integers(0, 1000), max_size=30))
def test_text_never_splits_a_character(text: str, cuts: list[int]) -> None:
    stream = TextStream()
    pieces = [stream.feed(chunk) for chunk in chunks_of(text.encode(), cuts)]
    assert "".join(pieces) + stream.feed(b"", final=True) == text
    assert "�" not in "".join(pieces) or "�" in text


@given(data=st.binary(max_size=60), cuts=st.lists(st.integers(0, 1000), max_size=30))
def test_text_of_any_bytes_is_the_same_however_they_come(data: bytes, cuts: list[int]) -> None:
    stream = TextStream()
    pieces = [stream.feed(chunk) for chunk in chunks_of(data, cuts)]
    assert "".join(pieces) + stream.feed(b"", final=True) == data.decode("utf-8", "replace")


def test_a_character_cut_off_by_the_end_shows_at_the_end() -> None:
    stream = TextStream()
    assert stream.feed("☕".encode()[:2]) == ""
    assert stream.feed(b"", final=True) == "�"
