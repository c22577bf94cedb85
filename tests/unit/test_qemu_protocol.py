"""The frames between host and guest: whole, cut, and hostile."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fanout.engine.qemu import protocol
from fanout.engine.qemu.protocol import HEADER, MAX_PAYLOAD, Address, BadFrame, Frame, Frames, Kind, Request

FROM_GUEST = [kind for kind in Kind if kind >= Kind.READY]


@given(st.lists(st.tuples(st.sampled_from(FROM_GUEST), st.binary(max_size=300))), st.integers(1, 50))
def test_frames_survive_any_cut(sent: list[tuple[Kind, bytes]], step: int) -> None:
    stream = b"".join(protocol.encode(kind, payload) for kind, payload in sent)
    frames = Frames()
    found = [frame for at in range(0, len(stream), step) for frame in frames.feed(stream[at : at + step])]
    assert found == [Frame(kind, payload) for kind, payload in sent]


def test_frames_that_are_taken_one_by_one_are_not_given_twice() -> None:
    frames = Frames()
    stream = b"".join(protocol.encode(Kind.STDOUT, bytes([i])) for i in range(3))
    for frame in frames.feed(stream):
        assert frame.payload == b"\0"
        break
    assert [frame.payload for frame in frames.feed(b"")] == [b"\1", b"\2"]


@given(st.binary(max_size=200))
def test_hostile_bytes_are_frames_or_refused(data: bytes) -> None:
    try:
        for frame in Frames().feed(data):
            assert frame.kind in FROM_GUEST
            assert len(frame.payload) <= MAX_PAYLOAD
    except BadFrame:
        pass


@pytest.mark.parametrize(
    "head",
    [
        HEADER.pack(Kind.STDOUT, MAX_PAYLOAD + 1),
        HEADER.pack(0, 0),
        HEADER.pack(Kind.RUN, 0),
        HEADER.pack(255, 0),
        b"\x42\1\0\0" + bytes(4),
    ],
    ids=["too long", "zero", "ours", "unknown", "not zero between"],
)
def test_a_head_that_no_agent_sends(head: bytes) -> None:
    with pytest.raises(BadFrame):
        list(Frames().feed(head))


@given(st.binary(max_size=64))
def test_hostile_payloads(payload: bytes) -> None:
    for decode in (protocol.check_ready, protocol.decode_credit, protocol.decode_exit, protocol.decode_refusal):
        try:
            decode(payload)
        except BadFrame:
            pass


def test_an_end_is_read() -> None:
    report = protocol.decode_exit(struct.pack("<BBBBiQQQ", 1, 1, 0, 1, 9, 1_500_000, 4096, 250_000_000))
    assert report == ("signaled", 9, True, False, True, 1.5, 4096, 0.25)
    with pytest.raises(BadFrame):
        protocol.decode_exit(struct.pack("<BBBBiQQQ", 3, 0, 0, 0, 0, 0, 0, 0))
    with pytest.raises(BadFrame):
        protocol.decode_exit(struct.pack("<BBBBiQQQ", 0, 0, 0, 0, -1, 0, 0, 0))


def test_a_long_request_is_cut_into_frames() -> None:
    request = Request([b"a" * 100_000, b"b"], [b"X=" + b"y" * 100_000])
    stream = protocol.encode_request(request)
    at, kinds, fields = 0, [], b""
    while at < len(stream):
        kind, length = HEADER.unpack_from(stream, at)
        kinds.append(kind)
        fields += stream[at + HEADER.size : at + HEADER.size + length]
        at += HEADER.size + length
    assert kinds == [Kind.REQUEST] * (len(kinds) - 1) + [Kind.RUN]
    assert len(kinds) > 3
    assert fields.startswith(struct.pack("<BI", 1, 100_000) + b"aaa")


def test_addresses_are_sent_as_the_kernel_takes_them() -> None:
    stream = protocol.encode_request(Request([b"x"], network=Address("10.0.2.15", 24, "10.0.2.2")))
    assert b"\x09\x0c\0\0\0" + bytes([10, 0, 2, 15, 255, 255, 255, 0, 10, 0, 2, 2]) in stream


def test_a_frame_of_ours_is_never_too_long() -> None:
    with pytest.raises(ValueError, match="at most"):
        protocol.encode(Kind.STDIN, bytes(MAX_PAYLOAD + 1))
