"""Searching on a host that has nothing, where others published the words: the same answers, and what is not fetched."""

from __future__ import annotations

import random
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from fanout.api import Disk, Fanout
from fanout.config import Tuning
from fanout.disk.catalogue import Catalogue
from fanout.disk.disk import Point
from fanout.errors import Denied
from fanout.format import layout
from fanout.format.tree import page_index
from fanout.local import LocalFanout
from fanout.local_disk import LocalDisk
from fanout.model import Grep
from fanout.run import indexer, publisher
from fanout.store.base import ObjectMeta, Store
from fanout.store.memory import MemoryStore
from fanout.store.wrap import Metered, Wrapper
from fanout.view import parts
from tests.support.connections import connected
from tests.support.disks import hasty

pytestmark = pytest.mark.anyio

TUNING = Tuning(page_entries=8, fold_entries=1 << 30, inline_bytes=0)
#: Text; text and binary files; binary files only.
FILES = {
    **{f"a/{n}": b"alpha word_%d\n" % n * 9 for n in range(8)},
    **{f"b/{n}": (b"\0 beta bin_%d\n" if n % 2 else b"beta word_%d\n") % n * 9 for n in range(8)},
    **{f"c/{n}": b"\0 gamma bin_%d\n" % n * 9 for n in range(8)},
    **{f"d/{n}.py": b"delta Word_%d\n" % n * 9 for n in range(8)},
    **{f"e/none{n:02}": b"" for n in range(16)},
}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def everything_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer, "_MIN_BYTES", 0)
    monkeypatch.setattr(publisher, "LEAST_BYTES", 1)
    monkeypatch.setattr(parts, "LEAST_BYTES", 1)
    monkeypatch.setattr(publisher, "_PAUSE_S", 0.0)
    monkeypatch.setattr(publisher, "_REST_S", 0.0)
    monkeypatch.setattr(publisher, "_SPREAD_S", 0.0)


class Recorded(Wrapper):
    """Remembers what kinds of objects are asked for."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.asked: list[str] = []

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        self.asked.append([*key.split("/"), ""][2])
        return super().get(key, start, length)

    def list(self, prefix: str = "", start_after: str = "", limit: int | None = None) -> Iterator[ObjectMeta]:
        self.asked.append("LIST " + [*prefix.split("/"), ""][2])
        return super().list(prefix, start_after, limit)


@pytest.fixture
def store() -> Store:
    return MemoryStore()


@pytest.fixture
async def disk(store: Store, tmp_path: Path) -> AsyncIterator[LocalDisk]:
    """A folded disk whose words were published, on the host that did it."""
    async with connected(store, tmp_path / "warm", tuning=TUNING) as fo:
        disk = await fo.disks.create("ws")
        assert isinstance(disk, LocalDisk)
        for path, data in FILES.items():
            await disk.put_object(path, data)
        disk.core.branch().fold()
        await search_and_publish(disk)
        assert len(index_keys(store)) == 1
        yield disk


async def search_and_publish(disk: Disk) -> Grep:
    assert isinstance(disk, LocalDisk)
    assert disk._searcher is not None
    assert disk._searcher.publisher is not None
    found = await disk.grep("alpha")
    await anyio.to_thread.run_sync(disk._searcher.publisher.settle)
    return found


def index_keys(store: Store) -> list[str]:
    return [meta.key for meta in store.list() if "/index/" in meta.key]


def pages_of(disk: LocalDisk, *paths: str) -> set[bytes]:
    """The pages that these paths are in."""
    pages = disk.core.branch().known().snap.pages
    return {pages[page_index(pages, path.encode())].hash for path in paths}


async def cold(store: Store, place: Path, pattern: str, disk: str = "ws", index: bool = True, **options: Any) -> Grep:
    """Search as a process on a fresh host does."""
    async with connected(store, place, tuning=TUNING, grep_index=index) as fo:
        return await fo.grep(disk, pattern, **options)


def same(one: Grep, two: Grep) -> None:
    for name in ("matches", "binary_files", "binary_count", "files_scanned", "stopped_reason", "problems"):
        assert getattr(one, name) == getattr(two, name), name


SEARCHES: list[tuple[str, dict[str, Any]]] = [
    ("absent", {}),
    ("word_3", {}),
    ("a", {}),
    ("bin_5", {}),
    ("WORD_3", {"ignore_case": True}),
    ("alpha|delta", {}),
    ("beta", {"binary": False}),
    ("gamma", {"binary": False}),
    ("absent", {"binary": False}),
    ("absent", {"directory": "/b"}),
    ("word_2", {"directory": "/a"}),
    ("absent", {"include": ["*.py"]}),
    ("Word_1", {"include": ["*.py"], "output": "files"}),
    ("absent", {"exclude": ["a/"]}),
    ("absent", {"recursive": False}),
    ("beta|gamma", {"output": "count"}),
    ("word_", {"max_results": 3}),
    (r"\w+_4", {}),
    (r"(?=word)word_1", {"syntax": "pcre2"}),
    ("absent(", {"syntax": "fixed"}),
]


@pytest.mark.parametrize(("pattern", "options"), SEARCHES, ids=str)
async def test_a_cold_host_finds_the_same(
    disk: LocalDisk, store: Store, tmp_path: Path, pattern: str, options: dict[str, Any]
) -> None:
    with_index = await cold(store, tmp_path / "one", pattern, **options)
    same(with_index, await cold(store, tmp_path / "two", pattern, index=False, **options))
    same(with_index, await cold(store, tmp_path / "one", pattern, **options))  # its second search, in a new process
    same(with_index, await disk.grep(pattern, **options))


async def test_what_is_nowhere_costs_three_requests_more_than_opening(
    disk: LocalDisk, store: Store, tmp_path: Path
) -> None:
    recorded = Recorded(store)
    found = await cold(recorded, tmp_path / "c", "absent")
    assert (found.files_scanned, found.bytes_scanned) == (32, 0)
    pages = len(pages_of(disk, *FILES))
    assert sum(shard.skipped for shard in found.shards) == sum(shard.pages for shard in found.shards) > pages > 3
    assert sum(shard.fetched for shard in found.shards) == 0
    assert recorded.asked.count("index") == 2  # the footer, and all words
    assert recorded.asked.count("LIST index") == 1
    assert not {"page", "pack"} & set(recorded.asked)
    used = len(recorded.asked)
    recorded.asked.clear()
    same(found, await cold(recorded, tmp_path / "c", "absent"))
    assert not {"page", "pack", "index", "LIST index"} & set(recorded.asked)
    assert len(recorded.asked) == used - 3
    recorded.asked.clear()
    await cold(recorded, tmp_path / "d", "(?i:)absent")  # spelt so that nothing is known of it
    assert {"page", "pack"} <= set(recorded.asked)
    assert not {"index", "LIST index"} & set(recorded.asked)


async def test_only_pages_that_may_match_are_fetched(disk: LocalDisk, store: Store, tmp_path: Path) -> None:
    recorded = Recorded(store)
    async with connected(recorded, tmp_path / "c", tuning=TUNING) as fo:
        found = await fo.grep("ws", "bin_5")
        assert found.binary_files == ("b/5", "c/5")
        pages = pages_of(disk, "b/5", "c/5")
        assert recorded.asked.count("page") == sum(shard.fetched for shard in found.shards) == len(pages) == 2
        recorded.asked.clear()
        found = await fo.grep("ws", "beta word_4")
        assert [match.file for match in found.matches][:1] == ["b/4"]
        assert found.files_scanned == 32
        assert sum(shard.fetched for shard in found.shards) == 1, "its text was passed over before"


async def test_changes_since_are_patched(disk: LocalDisk, store: Store, tmp_path: Path) -> None:
    await disk.put_object("a/3", b"changed word_99\n")
    await disk.put_object("z/new", b"new word_99\n")
    await disk.put_object("c/0", b"text now\n")
    await disk.delete_object("d/1.py")
    await disk.put_object("b/4", b"")
    for number, (pattern, options) in enumerate([*SEARCHES, ("word_99", {}), ("text now", {}), ("Word_1", {})]):
        with_index = await cold(store, tmp_path / f"one{number}", pattern, **options)
        same(with_index, await cold(store, tmp_path / f"two{number}", pattern, index=False, **options))
    recorded = Recorded(store)
    found = await cold(recorded, tmp_path / "c", "word_99")
    assert [match.file for match in found.matches] == ["a/3", "z/new"]
    changed = pages_of(disk, "a/3", "z/new", "c/0", "d/1.py", "b/4")
    assert recorded.asked.count("page") == len(changed), "to count what is looked at, where something changed"
    assert found.files_scanned == 31


async def test_a_host_asks_for_many_changed_pages_not_for_few(
    disk: LocalDisk, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded(store)
    async with connected(recorded, tmp_path / "other", tuning=TUNING, grep_index=False) as fo:
        await fo.grep("ws", "alpha")
    for number, path in enumerate(sorted(FILES)):
        if number % 3 == 0:
            await disk.put_object(path, b"edited word_55\n")
    disk.core.branch().fold()
    await search_and_publish(disk)
    for many, asks in ((100, 0), (1, 1)):
        monkeypatch.setattr(parts, "_MANY_PAGES", many)
        shutil.copytree(tmp_path / "other", tmp_path / f"copy{many}")
        recorded.asked.clear()
        found = await cold(recorded, tmp_path / f"copy{many}", "absent")
        assert recorded.asked.count("LIST index") == asks
        assert ("page" in recorded.asked) != asks
        same(found, await disk.grep("absent"))


async def test_branches_and_old_commits_have_the_same_pages(disk: LocalDisk, store: Store, tmp_path: Path) -> None:
    await disk.checkpoint("then")
    branch = disk.core.create_branch("b", Point(disk.core.branch()))
    disk.core.put_object(Point(branch), b"a/1", b"on the branch word_77\n", 0o644)
    for number in range(8):
        await disk.put_object(f"d/{number}.py", b"later word_%d\n" % number)
    disk.core.branch().fold()
    for name in ("ws@b", "ws@then", "ws"):
        for number, pattern in enumerate(("absent", "word_77", "later", "Word_5")):
            recorded = Recorded(store)
            found = await cold(recorded, tmp_path / f"one{number}{name}", pattern, disk=name)
            same(found, await cold(store, tmp_path / f"two{number}{name}", pattern, disk=name, index=False))
            if pattern == "absent" and name != "ws":
                assert recorded.asked.count("pack") == (name == "ws@b"), "what the log holds is patched"


async def test_an_index_that_is_damaged_or_gone_changes_nothing(disk: LocalDisk, store: Store, tmp_path: Path) -> None:
    (key,) = index_keys(store)
    good = store.get(key)
    expected = await disk.grep("word_3")
    for number, data in enumerate((good[:50] + bytes([good[50] ^ 1]) + good[51:], good[:-9], b"", good[::-1])):
        store.put(key, data)
        same(expected, await cold(store, tmp_path / f"c{number}", "word_3"))
    store.delete([key])
    same(expected, await cold(store, tmp_path / "c", "word_3"))


async def test_a_cold_host_publishes_nothing_new(disk: LocalDisk, store: Store, tmp_path: Path) -> None:
    before = index_keys(store)
    async with connected(store, tmp_path / "c", tuning=TUNING) as fo:
        for pattern in ("absent", "alpha", "(?i:)word_3"):
            other = await fo.disks.get("ws")
            await other.grep(pattern)
            await search_and_publish(other)
    assert index_keys(store) == before
    await search_and_publish(disk)
    assert index_keys(store) == before


async def test_what_is_new_is_published_too_and_gathered_in_the_end(
    disk: LocalDisk, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "_MANY", 3)
    monkeypatch.setattr(publisher, "_SOME", 2)
    counts = []
    for number in range(5):
        for name in range(8):
            await disk.put_object(f"n{number}/{name}", b"new word_%d%d\n" % (number, name) * 20)
        disk.core.branch().fold()
        await search_and_publish(disk)
        await search_and_publish(disk)
        counts.append(len(index_keys(store)))
        recorded = Recorded(store)
        found = await cold(recorded, tmp_path / f"c{number}", "absent")
        assert found.files_scanned == 32 + 8 * (number + 1)
        assert "pack" not in recorded.asked, "pages that rest on others' scan files are published, too"
    assert max(counts) == 3
    assert sorted(counts) != counts, "some were replaced"
    before = index_keys(store)
    old = LocalDisk(disk.core, disk.core.point(33), "", disk._searcher)
    await search_and_publish(old)
    assert set(before) <= set(index_keys(store)), "an old commit is no measure of what is of use"
    assert disk.core.check().problems == []


async def test_what_hosts_published_at_once_is_there_once_in_the_end(disk: LocalDisk, store: Store) -> None:
    (key,) = index_keys(store)
    for number in range(9):
        store.put(layout.index_key(disk.id, f"{number:032}"), store.get(key))
    await search_and_publish(disk)
    assert index_keys(store) == [layout.index_key(disk.id, f"{0:032}")]


class Refusing(Wrapper):
    """Lets nothing be written below index/."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.tried = 0

    def put(self, key: str, data: bytes) -> None:
        if "/index/" in key:
            self.tried += 1
            raise Denied("read-only")
        super().put(key, data)


async def test_a_store_that_refuses_is_asked_once(disk: LocalDisk, store: Store, tmp_path: Path) -> None:
    store.delete(index_keys(store))
    refusing = Refusing(store)
    async with connected(refusing, tmp_path / "warm", tuning=TUNING) as fo:
        other = await fo.disks.get("ws")
        for _ in range(3):
            same(await search_and_publish(other), await disk.grep("alpha"))
    assert refusing.tried == 1


async def test_the_switch_turns_both_off(disk: LocalDisk, store: Store, tmp_path: Path) -> None:
    recorded = Recorded(store)
    await cold(recorded, tmp_path / "c", "absent", index=False)
    assert not {"index", "LIST index"} & set(recorded.asked)
    store.delete(index_keys(store))
    async with connected(store, tmp_path / "warm", tuning=TUNING, grep_index=False) as fo:
        assert isinstance(fo, LocalFanout)
        assert (await fo.grep("ws", "alpha")).files_scanned == 32
        assert fo._searcher.publisher is None
    assert index_keys(store) == []


async def test_a_disk_deleted_meanwhile_stays_deleted(disk: LocalDisk, store: Store, tmp_path: Path) -> None:
    store.delete(index_keys(store))

    class Deleting(Wrapper):
        def put(self, key: str, data: bytes) -> None:
            if "/index/" in key:
                Catalogue(store, hasty(), TUNING).delete("ws")
            super().put(key, data)

    async with connected(Deleting(store), tmp_path / "warm", tuning=TUNING) as fo:
        await search_and_publish(await fo.disks.get("ws"))
    left = {key.split("/")[2] for meta in store.list("disks/") if (key := meta.key)}
    assert left <= {"log"}, "seals stay, nothing else does"


async def test_closing_ends_what_is_under_way(disk: LocalDisk, store: Store, tmp_path: Path) -> None:
    store.delete(index_keys(store))
    async with connected(store, tmp_path / "warm", tuning=TUNING) as fo:
        assert isinstance(fo, LocalFanout)
        assert fo._searcher.publisher is not None
        fo._searcher.publisher.stop()
        await fo.grep("ws", "alpha")
    assert index_keys(store) == []


async def test_small_trees_ask_for_nothing(disk: LocalDisk, store: Store, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(parts, "LEAST_BYTES", 1 << 20)
    monkeypatch.setattr(publisher, "LEAST_BYTES", 1 << 20)
    recorded = Recorded(Metered(store))
    await cold(recorded, tmp_path / "c", "absent")
    assert "LIST index" not in recorded.asked
    assert layout.index_prefix(disk.id) in index_keys(store)[0]


#: UTF-16 and UTF-8 marks, words with letters that are not ASCII, bytes that are no UTF-8, a NUL far from the beginning.
CONTENTS = [
    b"needle %d\n", b"\xff\xfe" + "needle é %d\n".encode("utf-16-le"), b"\xef\xbb\xbfneedle %d", b"",
    "wörter needle %d\n".encode(), b"\xffneedle\xff %d\n", b"\0needle %d\n", b"x" * 9000 + b"\nneedle %d \0\n",
    b"no_match %d\n" * 30,
]  # fmt: skip
PATTERNS: list[tuple[str, dict[str, Any]]] = [
    ("needle", {}), ("NEEDLE", {"ignore_case": True}), ("wörter", {}), ("no_match", {}), (r"needle [37]\b", {}),
    (r"needle\w* 1\d", {}), ("é 2", {}), ("absent", {}), ("absent|wört", {"output": "count"}),
    ("eedl", {"directory": "/d1"}), ("needle", {"include": ["*1"], "output": "files"}), ("word", {"word": True}),
]  # fmt: skip


@pytest.mark.parametrize("seed", range(2))
async def test_random_changes(store: Store, tmp_path: Path, seed: int) -> None:
    print(f"seed {seed}")
    source = random.Random(seed)
    async with connected(store, tmp_path / "warm", tuning=TUNING) as fo:
        disk = await fo.disks.create("ws")
        assert isinstance(disk, LocalDisk)
        for step in range(4):
            for _ in range(60 if step == 0 else 9):
                path = f"d{source.randrange(4)}/f{source.randrange(12)}"
                data = source.choice(CONTENTS)
                if source.random() < 0.2:
                    await disk.delete_object(path)
                else:
                    await disk.put_object(path, data.replace(b"%d", b"%d" % source.randrange(40)))
            if source.random() < 0.7 or step == 0:
                disk.core.branch().fold()
            await search_and_publish(disk)
            await search_and_publish(disk)
            for number, (pattern, options) in enumerate(source.sample(PATTERNS, 5)):
                place = tmp_path / f"{step}-{number}"
                found = await cold(store, place, pattern, **options)
                same(found, await cold(store, tmp_path / f"{step}-{number}-without", pattern, index=False, **options))
                another = source.choice(PATTERNS)
                same(await cold(store, place, another[0], **another[1]), await disk.grep(another[0], **another[1]))
    assert index_keys(store)


async def test_several_hosts_at_once(disk: LocalDisk, store: Store, tmp_path: Path) -> None:
    async def one(fo: Fanout) -> None:
        for pattern in ("absent", "word_3", "bin_5"):
            found = await fo.grep("ws", pattern)
            assert found.files_scanned == 32

    async with (
        connected(store, tmp_path / "c") as first,
        connected(store, tmp_path / "c") as second,
        anyio.create_task_group() as group,
    ):
        for number in range(6):
            group.start_soon(one, (first, second)[number % 2])
