"""Published words on a host that has nothing else: what is asked of the store, what is kept, what is not believed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from pathlib import Path

import pytest

from fanout.disk.index import WordIndex
from fanout.errors import Denied, Unavailable
from fanout.format import layout
from fanout.format.index import BINARY, TEXT, IndexBuilder, Words, compress_words
from fanout.format.tree import PageRef
from fanout.runtime import Runtime
from fanout.store.base import ObjectMeta, Store
from fanout.store.memory import MemoryStore
from fanout.store.wrap import Metered, Wrapper
from fanout.view.bases import Kind
from fanout.view.cache import HostCache
from fanout.view.published import Published, Told, identity_of
from fanout.view.scan import Stopped
from tests.support.disks import hasty, new_disk

PAGES = [PageRef(b"%d" % n, bytes([n]) * 32, 10, 100) for n in range(1, 9)]


class Host:
    """A host with a cache and a clock of its own, on a store whose requests are counted."""

    def __init__(self, store: Store, disk_id: str, directory: Path) -> None:
        self.now_s = 1000.0
        self.store = Metered(store)
        self.index = WordIndex(self.store, disk_id, hasty())
        self.cache = HostCache(directory, 1 << 30, Runtime(monotonic=lambda: self.now_s))
        self.published = Published(self.cache)
        self.asked: list[set[Kind]] = []
        self._mark = self.store.usage()

    def tell(self, word: bytes, pages: list[PageRef] = PAGES, *, binary: bool = True) -> dict[str, Told]:
        def matching(files: Mapping[str, Kind]) -> Set[str]:
            self.asked.append(set(files.values()))
            return {path for path in files if word in Path(path).read_bytes().split(b"\n")}

        return self.published.tell(self.index, matching, pages, binary, lambda: False)

    def requests(self) -> dict[str, int]:
        used, self._mark = self.store.usage() - self._mark, self.store.usage()
        return dict(used.requests)


def publish(index: WordIndex, pages: list[PageRef], **changes: int) -> None:
    builder = IndexBuilder()
    for page in pages:
        number = page.hash[0]
        # The last page has binary files, too.
        both = number == 8
        facts = {"files": 5, "left_out": int(both), "size": 1000, **changes}
        words = b"all\nword%d\n" % number
        builder.add(compress_words(words), Words(page.hash, TEXT, 0, 0, len(words), b"", **facts))
        if both:
            builder.add(compress_words(b"bin\n"), Words(page.hash, BINARY, 0, 0, 4, b"", 1, 5, 10))
    assert index.publish(builder.finish())


@pytest.fixture
def store() -> Store:
    return MemoryStore()


@pytest.fixture
def disk_id(store: Store) -> str:
    return new_disk(store).id


@pytest.fixture
def host(store: Store, disk_id: str, tmp_path: Path) -> Iterator[Host]:
    host = Host(store, disk_id, tmp_path / "cache")
    yield host
    host.cache.close()


def left(told: dict[str, Told]) -> set[str]:
    return {identity for identity, each in told.items() if not each.ruled_out}


def test_a_cold_host_asks_once_and_keeps_the_words(host: Host, tmp_path: Path, store: Store) -> None:
    publish(host.index, PAGES)
    host.requests()
    told = host.tell(b"word3")
    assert len(told) == 9
    assert left(told) == {identity_of(PAGES[2].hash, "text")}
    assert told[identity_of(PAGES[7].hash, "text")].facts == (5, 1, 1000)
    assert host.requests() == {"list": 1, "get": 2}  # the footer, and all frames
    assert left(host.tell(b"bin")) == {identity_of(PAGES[7].hash, "binary")}
    assert left(host.tell(b"all", binary=False)) == {identity_of(page.hash, "text") for page in PAGES}
    assert host.asked == [{"text", "binary"}, {"text", "binary"}, {"text"}]
    other = Host(store, host.index.disk_id, tmp_path / "cache")  # another process
    assert left(other.tell(b"word3")) == left(told)
    assert other.requests() == host.requests() == {}
    other.cache.close()


def test_few_pages_are_few_frames_and_are_kept_too(host: Host) -> None:
    publish(host.index, PAGES)
    host.requests()
    assert left(host.tell(b"word3", PAGES[2:4])) == {identity_of(PAGES[2].hash, "text")}
    assert host.requests() == {"list": 1, "get": 2}
    (name,) = host.cache.those_there("words", "")
    assert len(list(Path(host.cache.tree_path("words", name)).iterdir())) == 3
    host.tell(b"word3", PAGES[2:4])
    assert host.requests() == {}
    assert len(host.tell(b"word3")) == 9
    assert host.requests() == {"get": 1}
    assert len(host.cache.those_there("words", "")) == 2


def test_nothing_published_is_one_listing_a_minute(host: Host) -> None:
    for _ in range(3):
        assert host.tell(b"all") == {}
    assert host.requests() == {"list": 1}
    publish(host.index, PAGES)
    host.requests()
    assert host.tell(b"all") == {}
    assert host.requests() == {}
    host.now_s += 61
    assert len(host.tell(b"all")) == 9
    assert host.asked == [{"text", "binary"}]


def test_several_objects_are_put_together(host: Host) -> None:
    publish(host.index, PAGES[:6])
    publish(host.index, PAGES[4:7])
    assert len(host.tell(b"all")) == 7
    assert left(host.tell(b"word7")) == {identity_of(PAGES[6].hash, "text")}


def test_files_without_words_need_no_question(host: Host) -> None:
    publish(host.index, PAGES[:2], files=0)
    assert all(each.ruled_out for each in host.tell(b"all").values())
    assert host.asked == []


def test_counts_that_cannot_be_are_not_believed(host: Host) -> None:
    publish(host.index, PAGES, files=11)
    assert host.tell(b"absent", PAGES[:7]) == {}
    publish(host.index, PAGES, files=10)
    host.now_s += 61
    assert len(host.tell(b"absent", PAGES[:7])) == 7


def test_a_damaged_or_vanished_object_is_as_if_it_were_not_there(host: Host, store: Store) -> None:
    publish(host.index, PAGES)
    (meta,) = store.list(layout.index_prefix(host.index.disk_id))
    good = store.get(meta.key)
    store.put(meta.key, good[:10] + bytes([good[10] ^ 1]) + good[11:])
    for _ in range(2):
        assert host.tell(b"all") == {}
    assert host.requests()["get"] == 2, "the footer and its frames, once"
    publish(host.index, PAGES[:7])
    host.now_s += 61
    assert len(host.tell(b"all")) == 7
    host.cache.evict(0)
    for meta in list(store.list(layout.index_prefix(host.index.disk_id))):
        store.delete([meta.key])
    assert host.tell(b"all") == {}
    assert host.cache.those_there("words", "") == []


@pytest.mark.parametrize("error", [Unavailable("away"), Denied("no")])
@pytest.mark.parametrize("verb", ["get", "list"])
def test_a_store_that_says_no_is_no_error(
    store: Store, disk_id: str, tmp_path: Path, error: Exception, verb: str
) -> None:
    class Refusing(Wrapper):
        def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
            if verb == "get" and "/index/" in key:
                raise error
            return self.inner.get(key, start, length)

        def list(self, prefix: str = "", start_after: str = "", limit: int | None = None) -> Iterator[ObjectMeta]:
            if verb == "list":
                raise error
            return self.inner.list(prefix, start_after, limit)

    publish(WordIndex(store, disk_id, hasty()), PAGES)
    host = Host(Refusing(store), disk_id, tmp_path / "c")
    assert host.tell(b"all") == {}
    host.cache.close()


def test_a_search_that_is_stopped_leaves_nothing_half(host: Host) -> None:
    publish(host.index, PAGES)
    with pytest.raises(Stopped):
        host.published.tell(host.index, lambda files: set(), PAGES, True, lambda: True)
    assert host.cache.those_there("words", "") == []
    assert len(host.tell(b"all")) == 9


def test_words_of_another_disk_are_not_asked(host: Host, store: Store) -> None:
    other = new_disk(store, name="other")
    publish(WordIndex(store, other.id, hasty()), PAGES)
    assert host.tell(b"all") == {}
