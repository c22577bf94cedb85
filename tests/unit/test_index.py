"""Index objects: their layout, reading them by range, and that nothing depends on one: damage, gc, fsck, deletion."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import pytest

from fanout.disk.catalogue import Catalogue
from fanout.disk.disk import Disk
from fanout.disk.index import IndexObject, WordIndex
from fanout.errors import Corrupt, Denied, NotFound, Unavailable, Unknown
from fanout.format import layout
from fanout.format.contexts import compressed, decompressed
from fanout.format.index import BINARY, RULES, TEXT, IndexBuilder, Words, compress_words, decode_footer, decode_words
from fanout.store.base import ObjectMeta, Store
from fanout.store.memory import MemoryStore
from fanout.store.wrap import Metered, Wrapper
from tests.support.disks import TINY, cold, hasty, new_disk, put, put_many
from tests.support.every_request import EveryRequest

T = TypeVar("T")
WORDS = {(b"a" * 32, TEXT): b"one\ntwo\n", (b"a" * 32, BINARY): b"", (b"b" * 32, TEXT): b"three\n" * 50}


def built(words: dict[tuple[bytes, int], bytes], files: int = 3, left_out: int = 1) -> bytes:
    builder = IndexBuilder()
    for (page, kind), raw in words.items():
        builder.add(compress_words(raw), Words(page, kind, 0, 0, len(raw), b"", files, left_out, 1000))
    return builder.finish()


def resealed(data: bytes, change: Callable[[list[Any]], object]) -> bytes:
    """The same object with another footer that matches its checksum."""
    length = int.from_bytes(data[-8:-4], "little")
    footer = msgspec.msgpack.decode(decompressed(data[-24 - length : -24]))
    change(footer)
    packed = compressed(msgspec.msgpack.encode(footer))
    check = hashlib.sha256(packed).digest()[:16]
    return data[: -24 - length] + packed + check + struct.pack("<I", len(packed)) + b"FIXE"


def read(data: bytes) -> dict[tuple[bytes, int], bytes]:
    frames = decode_footer(data, len(data), "it")
    return {(f.page, f.kind): decode_words(data[f.offset : f.offset + f.stored], f, "it") for f in frames}


@pytest.fixture
def store() -> Store:
    return MemoryStore()


@pytest.fixture
def disk(store: Store) -> Iterator[Disk]:
    disk = new_disk(store, tuning=TINY)
    put_many(disk, [(f"d/{n}", b"%d" % n * 30) for n in range(9)])
    disk.branch().fold()
    yield disk
    disk.close()


def pages(disk: Disk) -> list[bytes]:
    return [page.hash for page in disk.branch().refresh().snap.pages]


def index_keys(store: Store) -> list[str]:
    return [meta.key for meta in store.list() if "/index/" in meta.key]


def test_what_was_written_is_read() -> None:
    data = built(WORDS)
    assert read(data) == WORDS
    for frame in decode_footer(data[-400:], len(data), "it"):
        assert (frame.files, frame.left_out, frame.size) == (3, 1, 1000)
    assert read(built({})) == {}


def test_any_damaged_byte_is_noticed() -> None:
    data = built(WORDS)
    for at in range(len(data)):
        for bit in (1, 128):
            changed = data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]
            with pytest.raises(Corrupt, match=r"^it: "):
                read(changed)
    for end in range(len(data)):
        with pytest.raises(Corrupt):
            read(data[:end])


def set_field(number: int, value: object) -> Callable[[list[Any]], object]:
    return lambda footer: footer[1][0].__setitem__(number, value)


LIES: dict[str, Callable[[list[Any]], object]] = {
    "a page that is none": set_field(0, b"a"),
    "another kind": set_field(1, 2),
    "before the first frame": set_field(2, 0),
    "a negative offset": set_field(2, -5),
    "beyond the end": set_field(2, 1 << 40),
    "nothing stored": set_field(3, 0),
    "more than there is": set_field(3, 1 << 40),
    "a bomb": set_field(4, 1 << 40),
    "another size": set_field(4, 5),
    "another hash": set_field(5, b"h" * 32),
    "fewer files than none": set_field(6, -1),
    "left out fewer than none": set_field(7, -1),
    "a text for a number": set_field(8, "many"),
    "one scan file twice": lambda footer: footer[1].append(footer[1][0]),
    "no frames": lambda footer: footer.pop(),
    "not an object": lambda footer: footer.__setitem__(1, 7),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_footer_that_lies_is_not_believed(lie: Callable[[list[Any]], object]) -> None:
    with pytest.raises(Corrupt, match=r"^it: "):
        read(resealed(built(WORDS), lie))


def test_other_rules_say_nothing() -> None:
    data = resealed(built(WORDS), lambda footer: footer.__setitem__(0, RULES + 1))
    assert read(data) == {}
    assert read(resealed(built(WORDS), lambda footer: footer.__setitem__(slice(None), [RULES + 1, "other"]))) == {}


def test_listing_is_one_request_and_one_for_each_new_object() -> None:
    store = Metered(MemoryStore())
    disk = new_disk(store)
    assert disk.index.publish(built(WORDS))
    assert disk.index.publish(built({(b"c" * 32, TEXT): b"x" * 10}))
    for stray in ("z", "0" * 31, "1" * 32 + "/x", "G" * 32):
        store.put(f"{layout.index_prefix(disk.id)}{stray}", built(WORDS))
    store.put(layout.index_key(disk.id, "0" * 32), b"damaged")
    before = store.usage()
    found = disk.index.objects()
    assert [len(each.frames) for each in found] == [3, 1]
    assert found[0].covers == set(WORDS)
    used = store.usage()
    assert dict((used - before).requests) == {"list": 1, "get": 3}
    assert disk.index.objects() == found
    assert dict((store.usage() - used).requests) == {"list": 1}


def test_a_long_footer_takes_a_second_get(disk: Disk, store: Store) -> None:
    metered = Metered(store)
    index = WordIndex(metered, disk.id, hasty())
    scattered = {(hashlib.sha256(b"%d" % n).digest(), TEXT): b"%d" % n for n in range(3000)}
    index.publish(built(scattered))
    before = metered.usage()
    (found,) = index.objects()
    assert found.covers == set(scattered)
    assert dict((metered.usage() - before).requests) == {"list": 1, "get": 2}


def test_frames_come_in_few_requests(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    words = {(n.to_bytes(32, "big"), TEXT): disk.runtime.token_bytes(1000) for n in range(100)}
    disk.index.publish(built(words))
    (found,) = disk.index.objects()
    monkeypatch.setattr("fanout.disk.index._SLICE_BYTES", 10_000)
    slices = disk.index.plan(found, found.frames)
    assert 10 <= len(slices) <= 13
    assert all(piece.end - piece.start <= 11_000 for piece in slices)
    read = {(about.page, about.kind): raw for piece in slices for about, raw in disk.index.fetch(piece)}
    assert read == words
    monkeypatch.setattr("fanout.disk.index._GAP_BYTES", 0)
    assert [len(piece.frames) for piece in disk.index.plan(found, [found.frames[5], found.frames[90]])] == [1, 1]
    disk.index.remove([found])
    with pytest.raises(NotFound):
        list(disk.index.fetch(slices[0]))
    assert disk.index.objects() == []
    disk.index.remove([])


def test_collections_take_what_is_of_no_page_or_damaged(disk: Disk, store: Store) -> None:
    old = pages(disk)
    disk.index.publish(built({(page, TEXT): b"word\n" for page in old}))
    disk.index.publish(built({(b"z" * 32, TEXT): b"word\n"}))
    disk.index.publish(built({(b"z" * 32, TEXT): b"word\n", (old[0], BINARY): b""}))
    kept = {each.identity for each in disk.index.objects() if any(frame.page in old for frame in each.frames)}
    good = store.get(layout.index_key(disk.id, next(iter(kept))))
    store.put(layout.index_key(disk.id, "0" * 32), good[:10] + bytes([good[10] ^ 1]) + good[11:])
    store.put(layout.index_key(disk.id, "1" * 32), b"not one")
    store.put(f"{layout.index_prefix(disk.id)}stray", good)
    assert disk.collect(dry_run=True, grace_s=0).indexes == 4
    assert disk.collect().indexes == 0, "all of it is young"
    assert len(index_keys(store)) == 6
    collected = disk.collect(grace_s=0)
    assert (collected.indexes, collected.packs, collected.pages) == (4, 0, 0)
    assert collected.freed_bytes > 0
    assert {key.rpartition("/")[2] for key in index_keys(store)} == kept


def test_an_index_goes_with_the_pages(disk: Disk, store: Store) -> None:
    disk.index.publish(built({(page, TEXT): b"word\n" for page in pages(disk)}))
    for n in range(9):
        put(disk, f"d/{n}", b"new %d" % n)
    disk.branch().fold()
    disk.branch().settle()
    assert disk.collect(grace_s=0).indexes == 0, "history is kept, and with it its pages"
    assert disk.collect(grace_s=0, keep_history_s=0).indexes == 1
    assert index_keys(store) == []


def test_fsck_names_what_is_wrong(disk: Disk, store: Store) -> None:
    state = disk.branch().refresh()
    counts = {page.hash: sum(node.size > 0 for _, node in state.pages.load(page)) for page in state.snap.pages}
    for page, files in counts.items():
        disk.index.publish(built({(page, TEXT): b"word\n", (b"z" * 32, TEXT): b""}, files, 0))
        disk.index.publish(built({(page, BINARY): b"word\n"}, 0, files))
    for quick in (True, False):
        assert disk.check(quick=quick).problems == []
    first, second, *_ = index_keys(store)
    good = store.get(first)
    store.put(first, good[:10] + bytes([good[10] ^ 1]) + good[11:])
    store.put(second, store.get(second)[:-1])
    lying = layout.index_key(disk.id, "0" * 32)
    store.put(lying, built({(page, TEXT): b"word\n"}, counts[page] + 1, 0))
    assert {problem.key for problem in cold(disk, store).check().problems} == {first, second, lying}
    assert {problem.key for problem in disk.check(quick=True).problems} == {second, lying}
    assert all(not problem.affects for problem in disk.check().problems)


class At(EveryRequest):
    """Does something once, just before a request that `when` says."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.seen = 0
        self.number = -1
        self.then: Callable[[], object] = lambda: None

    def at(self, request: Callable[[], T]) -> T:
        self.seen += 1
        if self.seen - 1 == self.number:
            self.number = -1
            self.then()
        return request()


def test_a_deleted_disk_leaves_no_index_whenever_it_is_published() -> None:
    """The whole publication falls between any two requests of the deletion, and the deletion between any two of it."""
    number = 0
    while True:
        inner = MemoryStore()
        disk = new_disk(inner)
        store = At(inner)
        deleting = Catalogue(store, hasty(), TINY)
        store.number = number
        store.then = lambda disk=disk: disk.index.publish(built(WORDS))  # type: ignore[misc]
        deleting.delete("d")
        if store.number >= 0:
            break
        assert index_keys(inner) == [], f"published before request {number}"
        number += 1
    assert number > 5
    for number in range(2):
        inner = MemoryStore()
        store = At(inner)
        disk = new_disk(inner)
        other = Catalogue(inner, hasty(), TINY)
        store.number, store.then = number, lambda other=other: other.delete("d")  # type: ignore[misc]
        assert not WordIndex(store, disk.id, hasty()).publish(built(WORDS))
        assert index_keys(inner) == []


def test_only_the_largest_are_looked_at(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fanout.disk.index._MOST", 2)
    for n in range(1, 5):
        disk.index.publish(built({(bytes([n, m]) * 16, TEXT): disk.runtime.token_bytes(10) for m in range(n)}))
    assert [len(each.frames) for each in disk.index.objects()] == [4, 3]


def test_what_a_process_knows_is_bounded(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fanout.disk.index._KNOWN", 2)
    for n in range(4):
        disk.index.publish(built({(bytes([n]) * 32, TEXT): b"word\n"}))
    assert len(disk.index.objects()) == 4
    assert len(disk.index._known) == 2
    assert all(isinstance(each, IndexObject) for each in disk.index._known.values())


def test_publishing_at_any_moment_of_a_collection() -> None:
    number = 0
    while True:
        inner = MemoryStore()
        disk = new_disk(inner, tuning=TINY)
        put_many(disk, [(f"d/{n}", b"%d" % n * 30) for n in range(9)])
        disk.branch().fold()
        put(disk, "d/1", b"new" * 30)
        disk.branch().fold()
        store = At(inner)
        store.number = number
        words = {(page, TEXT): b"word\n" for page in pages(disk)}
        store.then = lambda disk=disk, words=words: disk.index.publish(built(words, 0, 0))  # type: ignore[misc]
        Disk(store, disk.record, hasty(), TINY).collect(0, 0)
        if store.number >= 0:
            break
        (found,) = disk.index.objects()
        assert found.covers == words.keys(), f"published before request {number}"
        assert {problem.key for problem in disk.check().problems} <= set(index_keys(inner)), "its counts are made up"
        number += 1
    assert number > 10


def test_a_collection_that_meets_a_vanishing_index() -> None:
    """Another host replaces an object between the listing and the look at it."""
    inner = MemoryStore()
    disk = new_disk(inner, tuning=TINY)
    put_many(disk, [(f"d/{n}", b"%d" % n * 30) for n in range(9)])
    disk.index.publish(built({(b"z" * 32, TEXT): b"word\n"}))
    objects = disk.index.objects()

    class Vanishing(Wrapper):
        def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
            disk.index.remove(objects)
            return super().get(key, start, length)

    assert Disk(Vanishing(inner), disk.record, hasty(), TINY).collect(0, 0).indexes == 0
    disk.index.publish(built(WORDS))
    objects = disk.index.objects()
    assert WordIndex(Vanishing(inner), disk.id, hasty()).objects() == []
    disk.index.publish(built(WORDS))
    objects = disk.index.objects()
    assert Disk(Vanishing(inner), disk.record, hasty(), TINY).check().problems == []


@pytest.mark.parametrize("verb", ["put", "head"])
@pytest.mark.parametrize("error", [Unavailable("away"), Unknown("perhaps"), Denied("no")])
def test_an_index_that_may_be_stored_is_taken_back(verb: str, error: Exception) -> None:
    inner = MemoryStore()
    disk = new_disk(inner)

    class Ambiguous(Wrapper):
        def put(self, key: str, data: bytes) -> None:
            if verb == "head" or isinstance(error, Unknown):
                super().put(key, data)
            if verb == "put":
                raise error

        def head(self, key: str) -> ObjectMeta | None:
            raise error

    with pytest.raises(type(error)):
        WordIndex(Ambiguous(inner), disk.id, hasty()).publish(built(WORDS))
    kept = verb == "head" and isinstance(error, Denied)
    assert len(index_keys(inner)) == kept, "a refusal says nothing about the disk"
