"""Frames made many at a time are the frames made one by one."""

from __future__ import annotations

import hashlib

import pytest

from fanout.format import pack
from fanout.format.pack import decode_frame, encode_frame, encode_frames
from fanout.format.tree import Ref

RAWS = [b"a" * 8192, b"short", bytes(range(256)) * 3, b"x" * 33, hashlib.sha256(b"1").digest() * 1, b"the same\n" * 500]


@pytest.mark.parametrize("batches", [True, False])
def test_many_frames_are_each_readable(batches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not batches:
        monkeypatch.setattr(pack, "_BATCHES", False)
    frames = encode_frames(RAWS)
    assert [digest for _, digest in frames] == [encode_frame(raw)[1] for raw in RAWS]
    for raw, (frame, digest) in zip(RAWS, frames, strict=True):
        assert len(frame) <= len(raw)
        assert decode_frame(frame, Ref(b"p" * 16, 0, len(frame), len(raw), digest), "here") == raw


def test_no_frames() -> None:
    assert encode_frames([]) == []
    assert encode_frames([b"1", b"22"]) == [encode_frame(b"1"), encode_frame(b"22")]
