"""What a host can publish of pages: their own words, those of pages that rest on others', and when it has not all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fanout.config import Tuning
from fanout.disk.disk import Disk
from fanout.format.index import BINARY, RULES, TEXT
from fanout.store.memory import MemoryStore
from fanout.view.cache import HostCache
from fanout.view.own_words import OwnWords
from fanout.view.parts import Wanted, arrange
from fanout.view.scans import Scans
from fanout.view.words import write_words
from tests.support.disks import new_disk, put

TUNING = Tuning(page_entries=64, fold_entries=1 << 30)
EVERYTHING = Wanted(b"", True)


class Host:
    def __init__(self, disk: Disk, directory: Path) -> None:
        self.disk = disk
        self.cache = HostCache(directory, 1 << 30)
        self.scans = Scans(self.cache)

    def search(self, index: bool = True) -> None:
        """Build what a search builds, and (`index`) the words that are written after it."""
        state = self.disk.branch().refresh()
        parts, held = arrange(self.scans, self.disk.id, state, self.disk.reader, EVERYTHING, lambda: False)
        for part in parts:
            if part.absent:
                self.scans.hold(part.identity, part.build).release()
            if index and part.kind != "patch":
                write_words(self.scans.directory(part.identity), part.kind == "binary")
        for each in held:
            each.release()

    def words(self, kind: int = TEXT) -> tuple[int, int, set[bytes]] | None:
        """Files, those left out, and words that could be published of the disk's one page."""
        (page,) = self.disk.branch().refresh().snap.pages
        own = OwnWords(self.scans, self.disk.id)
        found = own.words(page.hash, kind)
        if found is None:
            return None
        facts = own.facts(page.hash, kind)
        assert facts is not None
        assert facts.size == found[0].size
        assert (found[0].page, found[0].kind, found[0].raw) == (page.hash, kind, len(found[1]))
        lines = found[1].split(b"\n")
        assert lines.pop() == b""
        assert lines == sorted(set(lines))
        return found[0].files, found[0].left_out, set(lines)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    disk = new_disk(MemoryStore(), tuning=TUNING)
    for number in range(8):
        put(disk, f"f{number}", b"common word_%d\n" % number * 20)
    put(disk, "binary", b"\0 inside \0" * 20)
    disk.branch().fold()
    host = Host(disk, tmp_path / "cache")
    yield host
    host.cache.close()
    disk.close()


ALL = {b"common", *(b"word_%d" % number for number in range(8))}


def test_own_words_are_there_once_they_were_written(host: Host) -> None:
    assert host.words() is None
    host.search(index=False)
    assert host.words() is None
    host.search()
    assert host.words() == (8, 1, ALL)
    assert host.words(BINARY) == (1, 8, {b"inside"})
    host.cache.evict(0)
    assert host.words() is None


def test_a_page_that_rests_has_the_words_of_what_it_rests_on_and_of_patches(host: Host) -> None:
    host.search()
    put(host.disk, "f3", b"another\xc3\xa9 is here\n")
    put(host.disk, "new-binary", b"\0 second \0")
    host.disk.delete_object(host.disk.point(), b"f4")
    host.disk.branch().fold()
    assert host.words() is None, "nobody looked at it yet"
    host.search(index=False)
    assert host.words() == (7, 2, ALL | {b"another\xc3\xa9", b"here"})
    assert host.words(BINARY) == (2, 7, {b"inside", b"second"})
    put(host.disk, "f3", b"changed once more\n")
    host.search(index=False)
    assert host.words() == (7, 2, ALL | {b"another\xc3\xa9", b"here"}), "the page is the same"


def test_a_file_that_changed_again_before_its_page_was_looked_at_is_nowhere(host: Host) -> None:
    host.search()
    put(host.disk, "f3", b"another\n")
    host.disk.branch().fold()
    put(host.disk, "f3", b"changed once more\n")
    host.search()
    assert host.words() is None


def test_what_is_decoded_is_not_guessed_at(host: Host) -> None:
    host.search()
    put(host.disk, "f3", b"\xff\xfe" + "中文中文".encode("utf-16-le"))
    host.disk.branch().fold()
    host.search()
    assert host.words() is None


def test_words_that_are_not_worth_having_are_not_published(host: Host) -> None:
    host.search()
    (page,) = host.disk.branch().refresh().snap.pages
    path = f"{host.scans.directory(f'{page.hash.hex()[:48]}-text')}/words"
    os.truncate(path, 0)
    assert host.words() is None
    put(host.disk, "f3", b"another\n")
    host.disk.branch().fold()
    host.search(index=False)
    assert host.words() is None, "nor what rests on them"


def test_a_page_without_files_of_a_kind_needs_no_words(tmp_path: Path) -> None:
    disk = new_disk(MemoryStore(), tuning=TUNING)
    put(disk, "empty", b"")
    put(disk, "binary", b"\0 inside \0")
    disk.branch().fold()
    host = Host(disk, tmp_path / "cache")
    host.search(index=False)
    assert host.words() == (0, 1, set())
    host.cache.close()
    disk.close()


@pytest.mark.parametrize(
    ("binary", "words"),
    [
        (False, [b"A_b9", b"\xc3\xa9t\xc3\xa9", b"abc", b"one", b"x\xff\xfe"]),
        (True, [b"A_b9", b"abc", b"one"]),
    ],
)
def test_what_a_word_is(tmp_path: Path, binary: bool, words: list[bytes]) -> None:
    """Hosts believe each other's words: if this has to be changed, format.index.RULES has to be, too."""
    (tmp_path / "data").write_bytes(b"one-ab abc\r\n\tA_b9.\xc3\xa9t\xc3\xa9\0x\xff\xfe;abc\n" + b" \n" * 50)
    assert RULES == 1
    assert write_words(str(tmp_path), binary)
    assert (tmp_path / "words").read_bytes().splitlines() == sorted(words)
