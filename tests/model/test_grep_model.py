"""A search finds exactly what ripgrep finds in a download: random trees, changes, branches, patterns and options.

Pages, packs, extents and patches are tiny, so that every way in which a tree can lie on the host is taken. What failed
can be run again from the blob that is printed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

import fanout.sync
from fanout.config import Settings, Tuning
from fanout.disk.merge import Intent, Policy
from fanout.errors import Conflict, Exists, FanoutError, Invalid, NotFound
from fanout.format.extents import hole, size_of, splice
from fanout.format.tree import FILE, Node
from fanout.local import LocalFanout
from fanout.local_disk import LocalDisk
from fanout.run import publisher, rule_out
from fanout.store.memory import MemoryStore
from fanout.view import bases, parts, words
from tests.support.ripgrep import Said, decoded, flags, ripgrep

TUNING = Tuning(
    page_entries=4, fold_entries=5, inline_bytes=300, small_file_bytes=64, extent_bytes=48, pack_bytes=300,
    group_wait_s=0.0, group_gap_s=0.0,
)  # fmt: skip

NAMES = [
    "a", "b.py", "c.txt", "d/a", "d/b.py", "d-e", "d/é ☕", "d/e/f.py", ".hidden", "d/.git/x", "z\udcff", "-n", "a b",
    "x\ny", "e/1", "e/2", "e/3.py", "f", "g/1", "g/2", "h",
]  # fmt: skip
names = st.sampled_from(NAMES)
pieces = st.sampled_from(
    [
        b"foo", b"foo", b"bar", b"Foo_bar", b" foo ", b"foobar", b"f", b"", b"", b"\r", b"\t", "é".encode(),
        "☕foo".encode(), b"\xff", b"\xc3", b"foo\xc3", b"o" * 90, b"x" * 200, b"aaaaaaaaaaaaaaaaaaaaaaaab",
        b"\xef\xbb\xbf",
        b"TODO: foo",
    ]
)  # fmt: skip
separators = st.sampled_from([b"\n", b"\n", b"\n", b" ", b"\r\n", b"\n\n", b"", b"\0"])


@st.composite
def contents(draw: st.DrawFn) -> bytes:
    head = draw(
        st.sampled_from([b"", b"", b"", b"", b"", b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff", b"\n", b"\xef\xbb"])
    )
    body = b"".join(piece + separator for piece, separator in draw(st.lists(st.tuples(pieces, separators), max_size=8)))
    if head in (b"\xff\xfe", b"\xfe\xff") and draw(st.booleans()):
        body = body.decode(errors="replace").encode("utf-16-le" if head == b"\xff\xfe" else "utf-16-be")
    return head + body


steps = st.one_of(
    st.tuples(st.just("put"), names, contents()),
    st.tuples(st.just("put"), names, contents()),
    st.tuples(st.just("put"), names, contents()),
    st.tuples(st.just("delete"), names, st.just(b"")),
    st.tuples(st.just("delete"), st.sampled_from(["d", "d/e", "d/.git"]), st.just(b"")),
    st.tuples(st.just("move"), names, names),
    st.tuples(st.just("move"), st.just("d"), st.sampled_from(["q", "a0/d"])),
    st.tuples(st.just("splice"), names, st.tuples(names, st.integers(0, 300), st.integers(0, 60))),
    st.tuples(st.just("hole"), names, st.integers(0, 200)),
    st.tuples(st.just("copy"), names, names),
    st.tuples(st.just("branch"), st.just(""), st.just(b"")),
    st.tuples(st.just("touch"), names, st.just(b"")),
    st.tuples(st.just("fold"), st.just(""), st.just(b"")),
    st.tuples(st.just("fold"), st.just(""), st.just(b"")),
)

RUST = [
    "foo", "^foo", "foo$", r"\Afoo", r"foo\z", r"\bfoo\b", "^$", "^", "$", "x*", "o+", "(?i)FOO", "foo|bar", ".", "..+",
    "[^f]", r"\s", r"\r", r"\w+$", "(?s).foo", r"(?-u:\xff)", r"(?-u:\xc3)", "é", "☕", r"\p{L}+", r"\S+\s+\S+",
    "(?-m:^)foo",
    r"\Bo", "^.{4}$", "(foo|o{3})", r"[[:upper:]]", r"(?m)^o", r"^\s*$", "a{20,}b", "\ufeff", r"\x00", ".foo",
    "foo.", r"\bo", "Foo_bar", "oobar", r"[A-Z]\w+_bar", r"(foo|bar)\w+", r"\bfoo\b.*bar", "TODO: foo", "TODO|Foo_",
    "x{90}", r"^foobar$", "☕foo|aab", r"foo\s+bar",
]  # fmt: skip
PCRE2 = [
    r"(?<=o)b",
    "foo(?!b)",
    r"(f)(o)\2",
    r"^foo\b",
    r"\Afoo",
    r"foo\z",
    r"foo\Z",
    "^$",
    r"(?<!\w)foo",
    r"o\Kb",
    ".",
    r"\X$",
]
FIXED = ["foo", "o", ".", "", " ", "☕", "\r", "é", "bar", "-n", "(", "aab", "Foo_bar", " foo ", "TODO: foo"]
searches = st.one_of(
    st.tuples(st.just("rust"), st.sampled_from(RUST)),
    st.tuples(st.just("rust"), st.sampled_from(RUST)),
    st.tuples(st.just("pcre2"), st.sampled_from(PCRE2)),
    st.tuples(st.just("fixed"), st.sampled_from(FIXED)),
)
options = st.fixed_dictionaries(
    {
        "ignore_case": st.booleans(),
        "word": st.booleans(),
        "directory": st.sampled_from(["/", "/", "/", "/d", "/d/e", "/q"]),
        "recursive": st.sampled_from([True, True, True, False]),
        "include": st.sampled_from(
            [(), (), (), ("*.py",), ("d/**",), ("/a",), ("*.{py,txt}", "?"), ("[!ad]*",), ("d",)]
        ),
        "exclude": st.sampled_from([(), (), (), ("*.py",), ("d",), ("/d/e",), ("e/",), ("**/a",), ("d/*",), (".*",)]),
        "concurrency": st.sampled_from([None, 1, 3]),
        "output": st.sampled_from(["lines", "lines", "lines", "count", "files"]),
        "max_results": st.sampled_from([1000, 1000, 1000, 1, 2, 3]),
        "binary": st.sampled_from([True, True, False]),
    }
)
#: What is on the disk at first, and then in turn changes and a search.
histories = st.tuples(
    st.lists(contents(), min_size=len(NAMES), max_size=len(NAMES)),
    st.lists(st.tuples(st.lists(steps, max_size=5), searches, options), min_size=2, max_size=6),
)


@pytest.fixture
def tiny_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_PATCH_BYTES", 120)
    monkeypatch.setattr(parts, "_PATCH_FILES", 3)
    monkeypatch.setattr(parts, "_MAX_PATCHES", 3)
    monkeypatch.setattr(parts, "_EAGER_BYTES", 200)
    monkeypatch.setattr(bases, "_PATCHED_SHARE", 0.6)
    monkeypatch.setattr(words, "_BLOCK", 40)
    monkeypatch.setattr(rule_out, "_MIN_PARTS", 1)
    monkeypatch.setattr(rule_out, "_MAX_SHARE", 1.0)
    monkeypatch.setattr(rule_out, "_WORTH_BYTES", 0)
    for module in (parts, publisher):
        monkeypatch.setattr(module, "LEAST_BYTES", 1)
    for name in ("_PAUSE_S", "_REST_S", "_SPREAD_S"):
        monkeypatch.setattr(publisher, name, 0.0)


@contextlib.contextmanager
def connection(top: Path, store: MemoryStore, cache: str = "cache") -> Iterator[Any]:
    inner = LocalFanout(Settings(cache_dir=top / cache, tuning=TUNING, store="memory://"), store=store)
    with fanout.sync.Fanout(inner) as fo:
        yield fo


def fold(disk: Any) -> None:
    branch = disk._inner.point.branch
    branch.settle()
    branch.fold()


def apply(disk: Any, step: tuple[str, Any, Any]) -> None:
    """Make one change; what cannot be done (a name that is taken by a directory, say) changes nothing."""
    kind, name, more = step
    inner = disk._inner
    assert isinstance(inner, LocalDisk)
    with contextlib.suppress(Conflict, Exists, NotFound, Invalid):
        if kind == "put":
            disk.put_object(name, more)
        elif kind == "delete":
            disk.delete_object(name, recursive=True)
        elif kind == "move":
            disk.move("/" + name, "/" + more)
        elif kind in ("splice", "hole", "copy", "touch"):
            state = inner.point.state()
            path = os.fsencode(name)
            node = state.get(path)
            if node is None or node.kind != FILE:
                return
            intents = rewritten(state, path, node, kind, more)
            inner.core.apply(inner.point, intents, policy=Policy.LAST_WINS, seen_blobs=state.blob_bytes())


def rewritten(state: Any, path: bytes, node: Node, kind: str, more: Any) -> list[Intent]:
    if kind == "touch":
        return [Intent(path, node, Node(FILE, 0o600, 7, node.size, node.data, digest=node.digest))]
    if kind == "copy":
        target = os.fsencode(more)
        return [] if state.get(target) is not None else [Intent(target, None, node)]
    if kind == "hole":
        data = (*node.data, *hole(more))
    else:
        other, start, length = more
        source = state.get(os.fsencode(other))
        if source is None or source.kind != FILE:
            return []
        data = splice(node.data, source.data, [(min(start, source.size), min(start + length, source.size))])
    return [Intent(path, node, Node(FILE, node.mode, node.mtime_ns, size_of(data), data))]


def expected(top: Path, syntax: str, pattern: str, given: dict[str, Any]) -> Said:
    return ripgrep(top, pattern, flags(syntax, given), given["directory"].strip("/"))


def compare(disk: Any, top: Path, syntax: str, pattern: str, given: dict[str, Any]) -> None:
    directory = given["directory"].strip("/")
    if directory and not (top / directory).is_dir():
        with pytest.raises((NotFound, Invalid)):
            disk.grep(pattern, syntax=syntax, **given)
        return
    said = expected(top, syntax, pattern, given)
    found = disk.grep(pattern, syntax=syntax, **given)
    most = given["max_results"]
    if given["output"] == "lines":
        wanted: list[Any] = said.lines
        got: list[Any] = [(os.fsencode(m.file), m.line, m.text_bytes) for m in found.matches]
        check_text(top, found.matches)
    else:
        wanted = sorted(said.counts.items()) if given["output"] == "count" else [(p, None) for p in sorted(said.counts)]
        got = [(os.fsencode(m.file), m.count) for m in found.matches]
    if not given["binary"] and len(wanted) <= most:
        # Which files count as binary depends on how they came to be; those with no NUL at all (UTF-16 has) are text.
        text = {path: b"\0" not in (top / os.fsdecode(path)).read_bytes() for path, *_ in wanted}
        assert [item for item in got if text[item[0]]] == [item for item in wanted if text[item[0]]]
    elif given["binary"]:
        assert got == wanted[:most]
        assert found.stopped_reason == ("max_results" if len(wanted) > most else "completed")
        if len(wanted) <= most:
            assert found.binary_files == tuple(map(os.fsdecode, said.binary))


def check_text(top: Path, matches: Any) -> None:
    for match in matches:
        lines = decoded((top / match.file).read_bytes()).split(b"\n")
        assert lines[match.line - 1] == match.text_bytes
        assert match.text == match.text_bytes.decode(errors="replace")
        assert not match.truncated


def index(top: Path) -> None:
    """Write the words of all scan files there are."""
    for data in (top / "cache" / "scan").glob("*/tree/data"):
        words.write_words(str(data.parent), data.parent.parent.name.endswith("binary"))


def publish(disk: Any) -> None:
    """Wait until the words of what was searched are in the store."""
    searcher = disk._inner._searcher
    assert searcher is not None
    assert searcher.publisher is not None
    searcher.publisher.settle()


def play(first: list[bytes], history: list[Any]) -> None:
    top = Path(tempfile.mkdtemp(prefix="fanout-grep-"))
    try:
        store = MemoryStore()
        with connection(top, store) as fo, contextlib.ExitStack() as stack:
            disk = fo.disks.create("d")
            for name, content in zip(NAMES, first, strict=True):
                if content:
                    disk.put_object(name, content)
            fold(disk)
            for number, (changes, (syntax, pattern), given) in enumerate(history):
                for place, step in enumerate(changes):
                    if step[0] == "branch":
                        disk = disk.branch(f"b{number}-{place}") if number % 2 else fo.disks.get("d")
                    else:
                        apply(disk, step)
                        if step[0] == "fold":
                            fold(disk)
                if number == 2:  # another process: it knows only what is on the host
                    fo = stack.enter_context(connection(top, store))
                    disk = fo.disks.get(f"d@{disk.branch_name}")
                copy = top / f"copy{number}"
                disk.download("/", copy)
                if not number:
                    note(repr(first))
                note(f"{number}: {changes} {syntax} {pattern!r} {given}")
                note(repr({str(p.relative_to(copy)): p.read_bytes() for p in copy.rglob("*") if p.is_file()}))
                if not pattern:
                    with pytest.raises(Invalid):
                        disk.grep(pattern, syntax=syntax, **given)
                    continue
                compare(disk, copy, syntax, pattern, given)
                if number != 1:
                    index(top)
                    compare(disk, copy, syntax, pattern, given)
                    publish(disk)
                    with connection(top, store, f"cold{number}") as other:  # it has nothing but what was published
                        there = other.disks.get(f"d@{disk.branch_name}")
                        compare(there, copy, syntax, pattern, given)
                        compare(there, copy, syntax, pattern, given)
    except FanoutError as error:
        raise AssertionError(repr(error)) from error
    finally:
        shutil.rmtree(top, ignore_errors=True)


quick = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
long = settings(quick, max_examples=500)


@quick
@given(histories)
def test_it_finds_what_ripgrep_finds_in_a_download(tiny_patches: None, history: tuple[list[bytes], list[Any]]) -> None:
    play(*history)


@pytest.mark.soak
@long
@given(histories)
def test_it_finds_what_ripgrep_finds_for_long(tiny_patches: None, history: tuple[list[bytes], list[Any]]) -> None:
    play(*history)
