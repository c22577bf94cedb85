"""The format: what is encoded is decoded, and no damage of stored bytes goes unnoticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from fanout.errors import Corrupt, Invalid
from fanout.format import envelope, layout
from fanout.format.entry import (
    BranchRecord,
    CheckpointRecord,
    Commit,
    DiskRecord,
    Entry,
    Put,
    Remove,
    decode_branch,
    decode_checkpoint,
    decode_disk,
    decode_entry,
    encode_branch,
    encode_checkpoint,
    encode_disk,
    encode_entry,
)
from fanout.format.pack import (
    PackBuilder,
    decode_footer,
    decode_frame,
    encode_frame,
    is_text,
    is_text_pack,
    pack_id,
)
from fanout.format.tree import (
    FILE,
    HOLE,
    SYMLINK,
    Node,
    PageRef,
    Ref,
    Snap,
    content_hash,
    decode_page,
    decode_snap,
    directory,
    encode_page,
    encode_snap,
    page_index,
    parents,
    same_content,
    same_node,
    split_pages,
    subtree_end,
)

REF = Ref(b"p" * 16, 4, 7, 9, b"h" * 32)
PART = Ref(b"q" * 16, 4, 7, 9, b"h" * 32, 2, 5)
NODE = Node(FILE, 0o4755, -1, 14, (REF, PART), 1000, 2**31, b"", b"link", ((b"user.a", b"\0\xff"),))
LINK = Node(SYMLINK, 0o777, 2**62, target=b"\xff/..")
ENTRY = Entry(
    b"w" * 16,
    7,
    123,
    (
        Commit(1, "a", "☕", "", 3, (Put(b"\xff", NODE, 1), Remove(b"gone"), Put(b"l", LINK))),
        Commit(2, "", "", "x", 6, (), "0" * 32, 5),
    ),
    {b"p" * 16: b"blob"},
)
SNAP = Snap(9, (PageRef(b"", b"h" * 32, 2, 99),), 1, 14, (("0" * 32, 5, 7),))
DISK = DiskRecord("dsk-0123456789abcdef", "ws", 5, ("create_only",), "f" * 32)
BRANCH = BranchRecord("a" * 32, (("b" * 32, 9), ("c" * 32, 4)), 6)
CHECKPOINT = CheckpointRecord("a" * 32, 9, 7, "main")

Codec = tuple[Any, bytes, Callable[[bytes, str], Any]]
CODECS: dict[str, Codec] = {
    "entry": (ENTRY, encode_entry(ENTRY), decode_entry),
    "snap": (SNAP, encode_snap(SNAP), decode_snap),
    "page": (((b"", directory()), (b"a", NODE)), encode_page([(b"", directory()), (b"a", NODE)])[1], decode_page),
    "disk": (DISK, encode_disk(DISK), decode_disk),
    "branch": (BRANCH, encode_branch(BRANCH), decode_branch),
    "checkpoint": (CHECKPOINT, encode_checkpoint(CHECKPOINT), decode_checkpoint),
}


@pytest.fixture(params=CODECS)
def codec(request: pytest.FixtureRequest) -> Codec:
    return CODECS[request.param]


def damaged(decode: Callable[[bytes, str], Any], data: bytes) -> None:
    with pytest.raises(Corrupt, match="some/key"):
        decode(data, "some/key")


def test_round_trip(codec: Codec) -> None:
    value, data, decode = codec
    assert decode(data, "k") == value


def test_every_flipped_byte_is_noticed(codec: Codec) -> None:
    _, data, decode = codec
    for at in range(len(data)):
        for bit in (0x01, 0x80):
            damaged(decode, data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])


def test_every_truncation_is_noticed(codec: Codec) -> None:
    _, data, decode = codec
    for length in range(len(data)):
        damaged(decode, data[:length])


def test_anything_appended_is_noticed(codec: Codec) -> None:
    _, data, decode = codec
    damaged(decode, data + b"\0")


def test_an_object_of_another_kind_is_refused(codec: Codec) -> None:
    _, _, decode = codec
    for _, other, its in CODECS.values():
        if its is not decode:
            with pytest.raises(Corrupt, match="some/key: holds an object of kind"):
                decode(other, "some/key")


def test_a_version_to_come_is_refused_by_name(codec: Codec) -> None:
    _, data, decode = codec
    with pytest.raises(Corrupt, match="some/key: format version 2 is unknown; this fanout reads version 1"):
        decode(data[:4] + b"\x02" + data[5:], "some/key")


def test_what_is_no_object_at_all_is_refused(codec: Codec) -> None:
    damaged(codec[2], b"")
    damaged(codec[2], b"<?xml version='1.0'?><Error/>")


@pytest.mark.parametrize("tag", [0, 3, 4, 99])
def test_an_unknown_effect_is_refused_and_says_what_may_be_the_reason(tag: int) -> None:
    raw = [b"w" * 16, 7, 123, [[1, "", "", "", 3, [[tag, b"path", b"whatever"]]]], {}]
    with pytest.raises(Corrupt, match=r"some/key: holds what this fanout does not know.*newer"):
        decode_entry(envelope.encode(envelope.ENTRY, raw), "some/key")


def test_fields_appended_by_a_newer_writer_are_ignored() -> None:
    raw = [*msgspec.to_builtins(BRANCH), "more"]
    assert decode_branch(envelope.encode(envelope.BRANCH, raw), "k") == BRANCH


def test_a_checksum_of_rubbish_is_no_excuse() -> None:
    raw = envelope.encode(envelope.ENTRY, {"not": "an entry"})
    damaged(decode_entry, raw)
    payload = b"no zstd frame"
    import hashlib

    head = b"FANE\x01" + hashlib.sha256(payload).digest()[:16]
    damaged(decode_entry, head + payload)


def test_the_envelope_is_laid_out_as_documented() -> None:
    import hashlib

    data = encode_branch(BRANCH)
    assert data[:5] == b"FANB\x01"
    assert data[5:21] == hashlib.sha256(data[21:]).digest()[:16]
    assert msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(data[21:]), type=BranchRecord) == BRANCH


# -- packs ------------------------------------------------------------------------------------------------------


def small_pack() -> tuple[bytes, list[tuple[Ref, bytes]]]:
    builder = PackBuilder(pack_id(bytes(range(16)), True))
    held = []
    for raw in (b"", b"x", b"line\n" * 40, bytes(range(64))):
        frame, digest = encode_frame(raw)
        held.append((builder.add(frame, len(raw), digest), raw))
    return builder.finish(), held


def test_frames_are_where_their_refs_and_the_footer_say() -> None:
    pack, held = small_pack()
    assert [(r.offset, r.stored, r.raw, r.hash) for r, _ in held] == list(decode_footer(pack, "k"))
    for ref, raw in held:
        assert decode_frame(pack[ref.offset : ref.offset + ref.stored], ref, "k") == raw


def test_every_damaged_byte_of_a_pack_is_noticed() -> None:
    pack, held = small_pack()
    for at in range(len(pack)):
        bad = pack[:at] + bytes([pack[at] ^ 0x20]) + pack[at + 1 :]
        hit = [ref for ref, _ in held if ref.offset <= at < ref.offset + ref.stored]
        for ref in hit:
            with pytest.raises(Corrupt, match="some/pack"):
                decode_frame(bad[ref.offset : ref.offset + ref.stored], ref, "some/pack")
        if not hit:
            damaged(decode_footer, bad)


def test_every_truncated_pack_and_frame_is_noticed() -> None:
    pack, held = small_pack()
    for length in range(len(pack)):
        damaged(decode_footer, pack[:length])
    for ref, _ in held:
        for length in range(ref.stored):
            with pytest.raises(Corrupt, match="some/pack"):
                decode_frame(pack[ref.offset : ref.offset + length], ref, "some/pack")


def test_a_frame_that_claims_to_be_huge_is_not_unpacked() -> None:
    frame = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    with pytest.raises(Corrupt, match="some/pack"):
        decode_frame(frame, Ref(b"p" * 16, 0, len(frame), 4096, b"h" * 32), "some/pack")


@given(st.binary(max_size=2000))
def test_any_bytes_survive_a_frame(raw: bytes) -> None:
    frame, digest = encode_frame(raw)
    assert len(frame) <= len(raw)
    assert decode_frame(frame, Ref(b"p", 0, len(frame), len(raw), digest), "k") == raw


@given(st.binary(min_size=16, max_size=16), st.booleans())
def test_a_pack_id_says_whether_it_holds_text(random: bytes, text: bool) -> None:
    assert is_text_pack(pack_id(random, text)) is text
    assert len(pack_id(random, text)) == 16


def test_text_is_what_has_no_nul_in_its_first_8_kib() -> None:
    assert is_text(b"")
    assert is_text("☕\xff".encode("latin-1", "ignore") + b"\xff\xfe")
    assert not is_text(b"a\0")
    assert not is_text(b"a" * 8191 + b"\0")
    assert is_text(b"a" * 8192 + b"\0")


# -- trees ------------------------------------------------------------------------------------------------------


@given(st.integers(0, 60), st.integers(2, 9))
def test_split_pages_keeps_all_in_order_and_fills_evenly(count: int, most: int) -> None:
    entries = [(b"%04d" % n, directory()) for n in range(count)]
    pages = list(split_pages(entries, most))
    assert [entry for page in pages for entry in page] == entries
    assert all(0 < len(page) <= most for page in pages)
    if pages:
        assert max(map(len, pages)) - min(map(len, pages)) <= 1
        assert len(pages) == -(-count // most)


@given(st.sets(st.binary(min_size=1, max_size=3), min_size=1, max_size=30), st.binary(max_size=3))
def test_page_index_finds_the_page_that_would_hold_a_path(firsts: set[bytes], path: bytes) -> None:
    pages = tuple(PageRef(first, b"h", 1, 1) for first in sorted(firsts))
    index = page_index(pages, path)
    assert index == 0 or pages[index].first <= path
    assert index + 1 == len(pages) or path < pages[index + 1].first


@given(st.binary(min_size=1, max_size=4).filter(lambda p: b"\0" not in p), st.binary(min_size=1, max_size=3))
def test_a_subtree_is_one_range(path: bytes, below: bytes) -> None:
    assert path + b"/" <= path + b"/" + below < subtree_end(path)
    for other in (path, path + b"-", path + b".x", path + b"0", path + b"0/x"):
        assert not path + b"/" <= other < subtree_end(path)


def test_parents_end_with_the_root() -> None:
    assert list(parents(b"a/b/c")) == [b"a/b", b"a", b""]
    assert list(parents(b"a")) == [b""]
    assert list(parents(b"")) == []


def test_sameness() -> None:
    moved = Ref(b"z" * 16, 99, 7, 9, REF.hash)
    a, b = Node(FILE, 0o644, 1, 9, (REF,)), Node(FILE, 0o644, 1, 9, (moved,))
    assert same_node(a, b), "where the bytes are stored is no difference"
    assert same_content(a, Node(FILE, 0o600, 5, 9, (moved,)))
    assert not same_node(a, Node(FILE, 0o644, 2, 9, (moved,)))
    assert same_node(a, Node(FILE, 0o644, 2, 9, (moved,)), times=False)
    assert not same_node(a, None)
    assert same_node(None, None)
    assert not same_content(Node(SYMLINK, 0o777, 0, target=b"a"), Node(SYMLINK, 0o777, 0, target=b"b"))
    assert not same_content(directory(), a)
    assert not same_content(a, Node(FILE, 0o644, 1, 5, (PART,)))


def test_content_hashes_tell_different_files_apart() -> None:
    hole = Ref(HOLE, 0, 0, 9, b"")
    nodes = [
        Node(FILE, 0o644, 0),
        Node(FILE, 0o644, 0, 9, (REF,)),
        Node(FILE, 0o644, 0, 5, (PART,)),
        Node(FILE, 0o644, 0, 9, (hole,)),
        Node(FILE, 0o644, 0, 18, (REF, hole)),
        Node(FILE, 0o644, 0, 18, (hole, REF)),
    ]
    assert len({content_hash(node) for node in nodes}) == len(nodes)


# -- keys -------------------------------------------------------------------------------------------------------


def test_log_keys_sort_as_their_numbers_and_can_be_read_back() -> None:
    numbers = [0, 1, 9, 10, 99, 10**12, layout.SEQ_MAX]
    keys = [layout.log_key("dsk-0", "u", n) for n in numbers]
    assert keys == sorted(keys)
    assert [layout.seq_of_key(key) for key in keys] == numbers
    assert all(layout.is_seq_key(key) for key in keys)
    assert not layout.is_seq_key("disks/dsk-0/log/u/.DS_Store")


@pytest.mark.parametrize("name", ["", "A", "-a", "a/b", "a b", ".", "..", "é", "a" * 64, None, 3, b"a", "a\n"])
def test_names_that_are_refused(name: object) -> None:
    for check in (layout.check_name, layout.check_branch_name):
        with pytest.raises(Invalid, match="name is"):
            check("name", name)


def test_branch_names_may_be_rescues_but_not_their_folder() -> None:
    assert layout.check_branch_name("name", "rescue/x-1") == "rescue/x-1"
    for bad in ("rescue", "rescue/", "rescue/a/b", "other/a"):
        with pytest.raises(Invalid):
            layout.check_branch_name("name", bad)
    with pytest.raises(Invalid):
        layout.check_name("name", "rescue/x-1")
