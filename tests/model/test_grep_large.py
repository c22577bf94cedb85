"""A search of a large real tree finds what ripgrep finds in it: every line, its number and its bytes.

The tree is the standard library and the packages of this interpreter, or what FANOUT_GREP_TREE names, and a directory
of files that are none of a kind found there. Searched warm without the index of words and with it, after edits, on a
branch, from a second host; and a small tree of tiny pages with patterns made of its own lines, which FANOUT_GREP_SEED
chooses.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import random
import shutil
import site
import sysconfig
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import fanout.sync
from fanout.config import Settings, Tuning
from fanout.errors import Invalid
from fanout.local import LocalFanout
from fanout.run import rule_out
from fanout.store.local import LocalStore
from fanout.view import words
from tests.support.ripgrep import GaveUp, Line, Refused, count, lines_of
from tests.support.searches import Asked, made_up

#: Lines beyond these are counted for each file, and not looked at.
_LINES = 1_000_000
_FIRST = 1000
_EDITS = 300
_RANDOM = 60
_LONGEST = 1 << 20


_PCRE2 = {"syntax": "pcre2"}
_FIXED = {"syntax": "fixed"}
_CASE = {"ignore_case": True}
_WORD = {"word": True}
SEARCHES = [
    # Literals: rare, frequent, absent, in binary files, with what is special elsewhere.
    Asked("homogeneous"), Asked("ImproperlyConfigured"), Asked("zzqqyx"), Asked("deprecat"), Asked("import"),
    Asked("__cxa_finalize"), Asked("GLIBC_2"), Asked("raise ValueError(", _FIXED), Asked("self._", _FIXED),
    Asked("\\d", _FIXED), Asked("*/", _FIXED), Asked("é"), Asked("日本"), Asked("ß", _CASE), Asked("naïve", _CASE),
    Asked("☕"), Asked("\ufeff"), Asked("\r"), Asked("\t\t"), Asked(r"  \\n"),
    # One character, which most lines have, and less than one.
    Asked("e"), Asked("ſ"), Asked("~"), Asked("."), Asked("^"), Asked("x*"), Asked("^$"),
    # Anchors, borders, whole words.
    Asked("^import "), Asked(r"\s+$"), Asked(r"[^\s]\s+\\$"), Asked(r"^\s*$"), Asked(r"\Aimport"), Asked(r"pass\z"),
    Asked(r"\bnil\b"), Asked(r"\Bnil\b"), Asked(r"\b{start}cach"), Asked("cache", _WORD), Asked("_cache", _WORD),
    Asked("co(de|python)", _WORD), Asked(r"-w", _FIXED), Asked("-i", _WORD | _FIXED), Asked("é|à", _WORD),
    # Classes and repeats; expressions that need words in part.
    Asked(r"def (get|set)_[a-z]+_state\("), Asked(r"def \w+_cache\("), Asked(r"\d{4}-\d\d-\d\d"), Asked(r"[A-Z]{9,}_X"),
    Asked(r"class\s+\w+(Error|Exception)\b.*:$"), Asked(r"(?:foo|ba[rz])_\w+"), Asked("[[:xdigit:]]{40}"),
    Asked(r"utf[-_]?8"), Asked("colou?r"), Asked("(?i:kelvin)s?"), Asked("(?:un)?register(?:ed|s)?_all"),
    Asked(r"\x69mportlib"), Asked(r"import\x6cib"), Asked("a{3}"), Asked("(?:ab){2,}"), Asked("(?x) import  lib"),
    # Case: letters that others become, and that are not ASCII.
    Asked("KELVIN", _CASE), Asked("task", _CASE), Asked("(?i)STRASSE|straße"), Asked("homogeneous", _CASE | _WORD),
    Asked("σ", _CASE), Asked("makes?_tasks?", _CASE),
    # Alternatives, of rare and common words, one of nothing.
    Asked("nilpotent|ImproperlyConfigured"), Asked("nilpotent|import"), Asked("nilpotent|x"), Asked("zzqqyx|qqyxzz"),
    Asked("homogeneous|"), Asked("(homo|hetero)geneous|nilpotent"),
    # Unicode and bytes.
    Asked(r"\p{Greek}+"), Asked(r"\p{Han}{3}"), Asked(r"\P{ASCII}"), Asked(r"[^\x00-\x7f]\w"), Asked(r"(?-u:\xff\xfe)"),
    Asked(r"(?-u)\x00\x00[a-z]"), Asked(r"\x00"), Asked(r"\p{Lu}\p{Ll}+é"), Asked(r"(?-u:\w)\W(?-u:\W)é"),
    # The other engine.
    Asked(r"(?<=def )nil\w+(?=\()", _PCRE2), Asked(r"foo(?!\w)", _PCRE2), Asked(r"\b(\w{5,}) \1\b", _PCRE2),
    Asked(r"(?<!\w)homogeneous\K\s", _PCRE2), Asked("homogeneous", _PCRE2), Asked("nilpotent|Improperly", _PCRE2),
    Asked(r"^\Kimport", _PCRE2), Asked(r"(?i)kelvin", _PCRE2), Asked("cache", _PCRE2 | _WORD), Asked(r"\R", _PCRE2),
]  # fmt: skip
#: Of these the ways in which less than all is searched are tried.
NARROW: list[dict[str, Any]] = [
    {"include": ("*.py",)}, {"exclude": ("*.py", "*.pyc")}, {"include": ("*.{json,md,txt}",)}, {"recursive": False},
    {"directory": "/hostile"}, {"directory": "/hostile", "recursive": False}, {"exclude": ("test*", "hostile")},
    {"include": ("**/test*/**",)}, {"include": ("/hostile/**", "*.h")}, {"include": ("[!a-m]*",)},
    {"exclude": ("**/__pycache__",)}, {"include": ("*.so*",)}, {"concurrency": 1}, {"concurrency": 7},
]  # fmt: skip
NARROWLY = [
    Asked("homogeneous"), Asked("import"), Asked(r"def \w+_cache\("), Asked("GLIBC", _CASE),
]  # fmt: skip

#: What real trees have too little of.
HOSTILE: dict[bytes, bytes] = {
    b"empty": b"", b"newline": b"\n", b"newlines": b"\n" * 5, b"no end": b"foo", b"end": b"foo\n", b"cr": b"foo\r",
    b"crlf": b"foo\r\nimport x\r\n\r\n", b"crs": b"foo\rbar\rfoo", b"blank": b"   ", b"blanks": b"foo \nbar\t\n \n",
    b"mark": b"\xef\xbb\xbfimport foo\n", b"marks": b"\xef\xbb\xbf\xef\xbb\xbfimport foo",
    b"mark only": b"\xef\xbb\xbf", b"le marks": b"\xff\xfe\xff\xfe\n\0", b"be marks": b"\xfe\xff" * 3 + b"\0\n",
    b"half a mark": b"\xef\xbb", b"mark inside": b"foo\n\xef\xbb\xbfimport\n",
    b"le": "\ufeffimport foo\nhomogeneous é\n".encode("utf-16-le"),
    b"be": "\ufeffimport foo\nhomogeneous ☕".encode("utf-16-be"), b"le only": b"\xff\xfe",
    b"le odd": b"\xff\xfef\0o\0o\0x",
    b"le nul": "\ufefffoo\0bar\n".encode("utf-16-le"), b"le lone": b"\xff\xfef\0\x00\xd8o\0\n\0import"[:13],
    b"not le": b"\xfeimport foo\n", b"nul": b"\0", b"nul at the end": b"import foo\nhomogeneous\n" + b"\0",
    b"nul late": b"import foo\n" * 2000 + b"\0 homogeneous\n", b"nul first": b"\0\nimport foo\nzzqqyx_\n",
    b"bytes": b"foo \xff\xfe bar\n\xe9 import\n\xc3", b"latin": "naïve café foo\n".encode("latin-1"),
    b"nfd": "cafe\u0301 naïve foo\n".encode(),
    b"kelvin": "\u212aELVIN \u212aelvin KELVIN ta\u017fk ta\u017f\u212a\n".encode(),
    b"cases": "STRASSE straße STRAẞE Σ σ ς ǅ ß\nImport iMPORT \u0130 \u0131\n".encode(),
    b"long": b"x" * 3_000_000 + b" homogeneous " + b"y" * 3_000_000 + b"\nfoo\n", b"long e": "é".encode() * 600_000,
    b"many": b"foo\n" * 100_000, b"separators": "foo\u2028bar\u0085import\x0b\x0cfoo\x1e\n".encode(),
    b"word": b"_cache cache_ x_cache cache-y\ncache\n_cache_\n\xffcache\n\xc3\xa9cache\ncache\xe9\n",
    b"import": b"importlib\nimport\x00lib"[:9], b"c\nd/x\ny": b"import foo\n", b"z\xff": b"import foo\n",
    b"a/b": b"import foo\n", b"a-b": b"import foo\n", b"a.b": b"import foo\n", b"a0": b"import foo\n",
    b"-e": b"import\n",
    b".hidden/.git/config": b"import foo\n", b".gitignore": b"*\n", b".ignore": b"*\n", b".rgignore": b"foo\n*\n",
    "é ☕".encode(): "é ☕ foo\n".encode(), b"n" * 250: b"import foo\n", b"escapes": b"\x1b[31mfoo\x1b[0m\x07\n",
    b"digits": b"7:foo\n12:34:import\n\n3-foo\n--\n",
}  # fmt: skip


class Expected(NamedTuple):
    """What ripgrep says of a search; of the lines, which may be many, a digest beside the first of them."""

    counts: list[tuple[bytes, int]]
    binary: list[bytes]
    total: int
    first: list[Line]
    digest: bytes


class Tree:
    """One state of the tree as files on this host; what ripgrep said of it is remembered until they change."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self._held: dict[bytes, bool] = {}
        self._expected: dict[str, Expected] = {}
        self._counted: list[Asked] = []

    def changed(self) -> None:
        self._held.clear()
        self._expected.clear()

    def check(self, disk: Any, asked: Asked, *, lines: bool = True) -> None:
        """Compare all that a search can bring: counts (of millions of lines once), names, every line, the first."""
        wanted = self._wanted(asked, lines=lines)
        given = {"max_results": _LINES, "max_duration_s": 3600, "max_line_bytes": _LONGEST, **asked.options}
        if wanted.total <= _LINES or asked not in self._counted:
            self._counted.append(asked)
            found = disk.grep(asked.pattern, output="count", **given)
            assert found.stopped_reason == "completed", (asked, found.problems)
            differ([(os.fsencode(match.file), match.count) for match in found.matches], wanted.counts, asked)
            assert [os.fsencode(name) for name in found.binary_files] == wanted.binary[:100], asked
            assert found.binary_count == len(wanted.binary), asked
        if not lines:
            return
        names = disk.grep(asked.pattern, output="files", **given)
        differ([os.fsencode(match.file) for match in names.matches], [path for path, _ in wanted.counts], asked)
        found = disk.grep(asked.pattern, **given)
        assert found.stopped_reason == ("max_results" if wanted.total > _LINES else "completed"), asked
        if digest(map(row, found.matches)) != wanted.digest:
            differ([row(match) for match in found.matches], list(self._lines(asked, wanted.counts)), asked)
        first = disk.grep(asked.pattern, **given | {"max_results": _FIRST})
        assert first.stopped_reason == ("max_results" if wanted.total > _FIRST else "completed"), asked
        differ([row(match) for match in first.matches], wanted.first, asked)

    def _wanted(self, asked: Asked, *, lines: bool) -> Expected:
        key = repr(asked)
        said = self._expected.get(key)
        if said is None or (lines and said.total and not said.first):
            counts, binary = count(self.top, asked.pattern, asked.flags, asked.directory, self._held)
            first: list[Line] = []
            each = self._lines(asked, counts) if lines else iter(())
            of_all = digest(kept(each, first))
            said = self._expected[key] = Expected(counts, binary, sum(n for _, n in counts), first, of_all)
        return said

    def _lines(self, asked: Asked, counts: Sequence[tuple[bytes, int]]) -> Iterator[Line]:
        said = lines_of(self.top, asked.pattern, asked.flags, [path for path, _ in counts])
        return ((path, line, shortened(text)) for path, line, text in itertools.islice(said, _LINES))


def kept(lines: Iterable[Line], first: list[Line]) -> Iterator[Line]:
    """Pass lines on, and keep the first of them."""
    for line in lines:
        if len(first) < _FIRST:
            first.append(line)
        yield line


def digest(lines: Iterable[Line]) -> bytes:
    """Return what tells lists of lines apart."""
    of_all = hashlib.blake2b()
    for path, line, text in lines:
        of_all.update(b"%d %d %d " % (len(path), line, len(text)) + path + text)
    return of_all.digest()


def check_made_up(tree: Tree, disk: Any, asked: Asked) -> None:
    """Compare what a pattern finds that may be none: then both refuse it."""
    try:
        tree.check(disk, asked, lines=False)
    except GaveUp:
        return
    except Refused:
        with pytest.raises(Invalid):
            disk.grep(asked.pattern, **asked.options)


def row(match: Any) -> Line:
    assert match.text == match.text_bytes.decode(errors="replace")
    if not match.truncated:
        return os.fsencode(match.file), match.line, match.text_bytes
    assert _LONGEST - 4 < len(match.text_bytes) <= _LONGEST
    return os.fsencode(match.file), match.line, match.text_bytes[: _LONGEST - 4]


def shortened(text: bytes) -> bytes:
    """What `row` shows of a line that was cut."""
    return text if len(text) <= _LONGEST else text[: _LONGEST - 4]


def differ(got: Sequence[Any], wanted: Sequence[Any], asked: object) -> None:
    """Fail with what is missing and what is too much, where two lists differ."""
    if list(got) == list(wanted):
        return
    has, wants = set(got), set(wanted)
    missing = [each for each in wanted if each not in has]
    extra = [each for each in got if each not in wants]
    raise AssertionError(f"{asked}: {len(missing)} missing {missing[:5]!r}; {len(extra)} too much {extra[:5]!r}")


def fold(disk: Any) -> None:
    branch = disk._inner.point.branch
    branch.settle()
    if branch.known().changes:
        branch.fold()


def without_index(disk: Any) -> None:
    """No words are written for what this connection searches."""
    disk.grep("zzqqyx", max_duration_s=3600)
    disk._inner._searcher.indexer.close()


def index(disk: Any) -> None:
    """Have words written of all that can be searched; a process writes those of so many scan files."""
    read = -1
    while (found := disk.grep("zzqqyx", max_duration_s=3600)).bytes_scanned != read:
        read = found.bytes_scanned
        disk._inner._searcher.indexer.settle()
    assert sum(shard.skipped for shard in found.shards)


@contextlib.contextmanager
def connected(store: Path, cache: Path, tuning: Tuning | None = None) -> Iterator[Any]:
    loaded = Settings(store=f"file://{store}", cache_dir=cache, tuning=tuning or Tuning())
    with fanout.sync.Fanout(LocalFanout(loaded, store=LocalStore(store, fsync=False))) as fo:
        yield fo


def plant(top: Path) -> None:
    for name, data in HOSTILE.items():
        path = top / "hostile" / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (top / "hostile" / "link").symlink_to("end")
    (top / "hostile" / "links").symlink_to("a")
    (top / "hostile" / "dangling").symlink_to("nowhere")


def gather(top: Path) -> None:
    named = os.environ.get("FANOUT_GREP_TREE")
    if named:
        shutil.copytree(named, top, symlinks=True)
    else:
        places = [Path(sysconfig.get_path("stdlib")), *map(Path, site.getsitepackages())]
        for number, place in enumerate(place for place in places if place.is_dir()):
            ignore = shutil.ignore_patterns("site-packages", "dist-packages", "__pycache__", "*.a")
            shutil.copytree(place, top / f"lib{number}", symlinks=True, ignore=ignore)
    for path in list(top.rglob(".fanoutignore")):
        path.unlink()
    plant(top)


@pytest.mark.soak
def test_a_large_tree(tmp_path: Path) -> None:
    seed = seeded()
    tree = Tree(tmp_path / "tree")
    gather(tree.top)
    with connected(tmp_path / "store", tmp_path / "cache") as fo:
        disk = fo.disks.create("ws")
        disk.upload(tree.top)
        fold(disk)
        without_index(disk)
        started = time.monotonic()
        for asked in SEARCHES:
            tree.check(disk, asked)
        say("warm, without the index", disk, len(SEARCHES), started)
    with connected(tmp_path / "store", tmp_path / "cache") as fo:
        disk = fo.disks.get("ws")
        index(disk)
        started = time.monotonic()
        for asked in SEARCHES:
            tree.check(disk, asked)
        for asked, options in itertools.product(NARROWLY, NARROW):
            tree.check(disk, asked.with_options(options), lines=len(options) > 1)
        say("warm, with the index", disk, len(SEARCHES) + len(NARROWLY) * len(NARROW), started)
        started = time.monotonic()
        for asked in made_up(tree.top, random.Random(seed), _RANDOM):
            check_made_up(tree, disk, asked.with_options({"exclude": ("/hostile/long*",)}))
        say("patterns made of lines", disk, _RANDOM, started)
        before = disk.checkpoint("before")
        branch = disk.branch("try", checkpoint=before.name)
        searched_while_edited(tree, branch, random.Random(seed))
        started = time.monotonic()
        for asked in SEARCHES:
            tree.check(branch, asked)
        for asked, options in itertools.product(NARROWLY[2:], NARROW):
            tree.check(branch, asked.with_options(options), lines=False)
        say(f"a branch, after {_EDITS} edits", branch, len(SEARCHES) + 2 * len(NARROW), started)
        fold(branch)
        index(branch)
        started = time.monotonic()
        for asked in SEARCHES:
            tree.check(branch, asked, lines=False)
        say("the same, folded", branch, len(SEARCHES), started)
    started = time.monotonic()
    cold = [asked.with_options(options) for asked in NARROWLY[1:3] for options in NARROW[:6]]
    for number, asked in enumerate([*cold, *SEARCHES[:3]]):
        with connected(tmp_path / "store", tmp_path / f"cold{number}") as fo:
            tree.check(fo.disks.get("ws@try"), asked, lines=False)
        shutil.rmtree(tmp_path / f"cold{number}")
    with connected(tmp_path / "store", tmp_path / "cold") as fo:
        disk = fo.disks.get("ws@try")
        for asked in cold + SEARCHES:
            tree.check(disk, asked, lines=False)
        say("hosts that knew nothing", disk, 2 * len(cold) + 3 + len(SEARCHES), started)
        copy = Tree(tmp_path / "copy")
        gathered = fo.disks.get("ws")
        gathered.download("/", copy.top)
        started = time.monotonic()
        for asked in cold + SEARCHES[::4]:
            copy.check(gathered, asked, lines=False)
        say("the branch it came from, beside its download", gathered, len(cold + SEARCHES[::4]), started)


def searched_while_edited(tree: Tree, disk: Any, chance: random.Random) -> None:
    """Make edits on the disk and in the tree, and search now and then."""
    files = sorted(path for path in tree.top.rglob("*") if path.is_file() and not path.is_symlink())
    chance.shuffle(files)
    often = [Asked("homogeneous"), Asked("zzqqyx"), Asked("^# edited"), Asked("nilpotent|ImproperlyConfigured")]
    for number in range(_EDITS):
        path = files.pop()
        key = os.fsdecode(os.fsencode(path.relative_to(tree.top)))
        kind = chance.choice(["append", "append", "change", "new", "delete", "move", "replace", "binary"])
        target = path.with_name(f"{path.name[:200]}.{number}")
        if kind == "delete":
            path.unlink()
            disk.delete_object(key)
        elif kind == "move":
            path.rename(target)
            disk.move("/" + key, "/" + os.fsdecode(os.fsencode(target.relative_to(tree.top))))
        else:
            data = path.read_bytes()
            data = {
                "append": data + b"\n# edited: zzqqyx homogeneous(\n", "change": data.replace(b"e", b"3"),
                "new": b"# edited\nImproperlyConfigured", "replace": data[len(data) // 2 :],
                "binary": data + b"\0 homogeneous\n",
            }[kind]  # fmt: skip
            path = target if kind == "new" else path
            path.write_bytes(data)
            disk.put_object(os.fsdecode(os.fsencode(path.relative_to(tree.top))), data)
        if number % 60 == 40:
            tree.changed()
            for asked in often:
                tree.check(disk, asked)
    big = max((path for path in tree.top.iterdir() if path.is_dir() and path.name != "hostile"), key=lambda p: p.name)
    big.rename(tree.top / "moved")
    disk.move("/" + big.name, "/moved")
    tree.changed()


def seeded() -> int:
    seed = int(os.environ.get("FANOUT_GREP_SEED") or random.randrange(1 << 30))
    print(f"FANOUT_GREP_SEED={seed}", flush=True)
    return seed


def say(when: str, disk: Any, searches: int, started: float) -> None:
    found = disk.grep("(?i:)zzqqyx", max_duration_s=3600)
    took = time.monotonic() - started
    print(f"{when}: {searches} searches of {found.files_scanned:,} files are the same ({took:.0f} s)", flush=True)


@pytest.mark.parametrize("number", [40, pytest.param(1500, marks=pytest.mark.soak)])
def test_patterns_made_of_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The index of words rules out nothing that matches: tiny pages, so that most of them can be ruled out."""
    monkeypatch.setattr(words, "_BLOCK", 500)
    monkeypatch.setattr(rule_out, "_MIN_PARTS", 1)
    monkeypatch.setattr(rule_out, "_MAX_SHARE", 1.0)
    monkeypatch.setattr(rule_out, "_WORTH_BYTES", 0)
    chance = random.Random(seeded())
    tree = Tree(tmp_path / "tree")
    stdlib = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in stdlib.rglob("*") if path.suffix in (".py", ".pyc", ".txt") and path.is_file())
    for path in chance.sample(files, 150):
        target = tree.top / path.relative_to(stdlib)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    plant(tree.top)
    for name in ("long", "long e", "many"):
        (tree.top / "hostile" / name).unlink()
    with connected(tmp_path / "store", tmp_path / "cache", Tuning(page_entries=4, fold_entries=4)) as fo:
        disk = fo.disks.create("ws")
        disk.upload(tree.top)
        fold(disk)
        disk.grep("zzqqyx")
        for data in (tmp_path / "cache" / "scan").glob("*/tree/data"):
            words.write_words(str(data.parent), data.parent.parent.name.endswith("binary"))
        assert sum(shard.skipped for shard in disk.grep("zzqqyx").shards) > 50
        for asked in made_up(tree.top, chance, number):
            check_made_up(tree, disk, asked)
