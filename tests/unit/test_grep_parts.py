"""The pure parts of searching: globs, extended expressions, what a pattern needs, words, how a tree is cut."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fanout.disk.data import Reader
from fanout.errors import Invalid
from fanout.run.ere import rust_of_ere
from fanout.run.globs import Globs
from fanout.run.grep_plan import split
from fanout.run.needs import needs_of_literal, needs_of_regex, word_expressions
from fanout.run.ripgrep import Search, Source, compile_pattern, program
from fanout.store.memory import MemoryStore
from fanout.view import scan, scan_write
from fanout.view.blocks import both, ranges_of_words, size_of
from fanout.view.parts import Part
from fanout.view.scan_write import Layout, Recipe
from fanout.view.words import SHORTEST, write_words
from tests.support.disks import new_disk


@pytest.mark.parametrize(
    ("glob", "takes", "leaves"),
    [
        ("*.py", [b"a.py", b"d/a.py", b".py"], [b"a.pyc", b"a.py/x"]),
        ("/a", [b"a"], [b"d/a"]),
        ("d/**", [b"d/a", b"d/e/a"], [b"d", b"x/d/a"]),
        ("**/a", [b"a", b"d/e/a"], [b"ba"]),
        ("d/**/a", [b"d/a", b"d/x/y/a"], [b"d/xa"]),
        ("d/*", [b"d/a"], [b"d/e/a"]),
        ("a?c", [b"abc"], [b"a/c", b"ac"]),
        ("[a-c]x", [b"bx"], [b"dx", b"/x"]),
        ("[!a-c]x", [b"dx"], [b"bx"]),
        ("{a,b*}.c", [b"a.c", b"bbb.c"], [b"c.c"]),
        (r"\*", [b"*"], [b"a"]),
        ("a,b", [b"a,b"], [b"a"]),
        ("é*", ["éa".encode()], [b"ea"]),
        ("x\ny", [b"x\ny"], [b"x"]),
    ],
)
def test_globs_take_what_ripgrep_takes(glob: str, takes: list[bytes], leaves: list[bytes]) -> None:
    globs = Globs(include=[glob])
    assert [path for path in (*takes, *leaves) if globs.select(path)] == takes


def test_what_is_excluded_goes_with_all_below() -> None:
    globs = Globs(["*.py"], ["d", "e/", "/f/g"])
    assert globs.select(b"a.py")
    for path in (b"d/a.py", b"x/d/y/a.py", b"e/a.py", b"f/g/a.py", b"a.txt"):
        assert not globs.select(path)
    assert globs.select(b"x/f/g/a.py")
    assert Globs(exclude=["e/"]).select(b"x/e")  # for directories only
    assert globs.select(b"d/a.py", below=1)  # what is searched itself is not judged
    assert not Globs()


@pytest.mark.parametrize(
    ("ere", "rust"),
    [
        ("a.b*c+d?", "a.b*c+d?"),
        ("(a|b){2,3}", "(a|b){2,3}"),
        ("a{,3}", "a{0,3}"),
        ("a{x", r"a\{x"),
        ("*a", "a"),
        ("(*a|+?b)", "(a|b)"),
        (r"\<a\>", r"\b{start}a\b{end}"),
        (r"\.\d\/", r"\.d\/"),
        ("[]a]", r"[\]a]"),
        ("[^]a-c]", r"[^\]a-c]"),
        (r"[\w]", r"[\\w]"),
        ("[[:alpha:]_]", "[[:alpha:]_]"),
        ("[a&&b~~]", r"[a\&\&b\~\~]"),
        ("[a-]", r"[a\-]"),
        ("[[.-.]]", r"[\-]"),
        ("a}", r"a\}"),
    ],
)
def test_extended_expressions(ere: str, rust: str) -> None:
    assert rust_of_ere(ere) == rust


@pytest.mark.parametrize("ere", [r"a\1", "[a", "[[:nope:]]", "a\\", "[[.ab.]]"])
def test_what_the_engine_has_not_is_refused(ere: str) -> None:
    with pytest.raises(Invalid, match="pattern"):
        rust_of_ere(ere)


pieces = st.sampled_from(
    ["a", "b", ".", "[ab]", "[^a]", "(a|b)", "(a*b)", "a{2}", "b{1,2}", "^", "$", "|", "*", "+", "[]a]"]
)


@settings(max_examples=60)
@given(st.lists(pieces, min_size=1, max_size=5), st.lists(st.text("ab]x ", max_size=6), max_size=6))
def test_extended_expressions_match_what_grep_matches(parts: list[str], lines: list[str]) -> None:
    pattern = "".join(parts)
    data = "".join(line + "\n" for line in lines).encode()
    grep = subprocess.run(["grep", "-E", "-e", pattern], input=data, capture_output=True, env={"LC_ALL": "C.UTF-8"})
    if grep.returncode > 1:
        return
    rg = subprocess.run([program().path, "--no-config", "-e", rust_of_ere(pattern)], input=data, capture_output=True)
    if rg.returncode > 1:
        assert re.search(r"[*+}][*+{]|[\^$][*+{]", pattern), rg.stderr  # repeating what is repeated
        return
    assert rg.stdout == grep.stdout


@pytest.mark.parametrize(
    ("pattern", "lists"),
    [
        ("foo", [["foo"]]),
        (r"def \w+_cache\(", [["^(?-u:.)+_cache$"], ["def$"]]),
        ("import|return", [["import", "return"]]),
        ("colou?r", [["colou?r"]]),
        ("abc+d", [["abc+d"]]),
        ("(?i)abc", []),
        ("(abc|x)", []),
        ("(abc|def)", [["(abc|def)"]]),
        ("x(?:abc)?def", [["x(?:abc)?def"]]),
        ("x(?:a.c)?def", [["def"]]),
        ("x(?:abc-)+def", [["abc$"], ["def"]]),
        ("(import os|from os|os) x", []),
        ("(import os|from os)", [["import$", "from$"]]),
        ("abc{0}def", [["abc{0}def"]]),
        ("a{3}", [["a{3}"]]),
        ("(ab|c){2}", []),
        (r"\bget_it\b", [["get_it"]]),
        (r"a\.b\.cde", [["^cde"]]),
        (r"\Qabc", []),
        ("[[:alpha:]]word", [["word"]]),
        ("[]]word", [["word"]]),
        ("[a-c]word", [["[a-c]word"]]),
        ("[A-z]word", [["word"]]),
        ("[^a]word", [["word"]]),
        ("[a-]word", [["word"]]),
        ("abc|d", []),
        ("abc|", []),
        ("(?x) a b c", []),
        (r"\x41bcd", [["bcd"]]),
        (r"\<abc", [["abc"]]),
        ("abc)", []),
        ("(abc", []),
        ("foo??bar", [["foo??bar"]]),
        (r"^abc\d$", [[r"^abc\d$"]]),
        (r"-?abc", [["abc"]]),
        (r"-+abc", [["^abc"]]),
        (r"\s+abc", [["abc"]]),  # it may be a space that is not ASCII, which is of words in text
        (r"\w\w\w", []),
        (r"\w+", []),
        (r" \w?get_\w+_x\w* ", [[r"^\w?get_(?-u:.)+_x(?-u:.)*$"]]),
        (r"\d{4}-\d\d", []),
        ("a{2,", []),
        ("**", []),
    ],
)
def test_what_a_pattern_needs(pattern: str, lists: list[list[str]]) -> None:
    assert word_expressions(needs_of_regex(pattern), binary=False, ignore_case=False) == lists


@pytest.mark.parametrize(
    ("text", "binary", "ignore_case", "lists"),
    [
        ("foo", False, False, [["foo"]]),
        ("a.foo(", False, False, [["^foo$"]]),
        ("foo(", False, False, [["foo$"]]),
        (".foo", False, False, [["^foo"]]),
        ("get foo", False, False, [["get$"], ["^foo"]]),
        ("ab", False, False, []),
        ("éfoo", False, False, [["éfoo"]]),
        ("éfoo", True, False, [["foo"]]),  # there only ASCII is of words
        ("task_id", True, True, [["_id"]]),  # s and k match more than ASCII
        ("(kids", True, True, []),
    ],
)
def test_how_words_are_looked_for(text: str, binary: bool, ignore_case: bool, lists: list[list[str]]) -> None:
    assert word_expressions(needs_of_literal(text), binary=binary, ignore_case=ignore_case) == lists
    assert word_expressions((), binary=False, ignore_case=False) == []
    either = needs_of_literal(text) + needs_of_literal("x")
    assert word_expressions(either, binary=binary, ignore_case=ignore_case) == []


_pieces = st.sampled_from(
    ["a", "b", "ab_", "_", "7", "-", " ", r"\.", "(", ")", "(?:", "|", "?", "+", "*", "{2}", "{0,1}", "[a-b]", r"\w",
     r"\d", ".", "é", "^", "$", r"\b", r"\s", "s", "K", "[^a]", "[_7]"]
)  # fmt: skip


@settings(max_examples=300)
@given(
    st.lists(_pieces, max_size=9).map("".join), st.text("aaabbb_7- .éskK", max_size=14), st.booleans(), st.booleans()
)  # fmt: skip
def test_no_line_that_matches_is_ruled_out(pattern: str, line: str, binary: bool, ignore_case: bool) -> None:
    flags = re.IGNORECASE if ignore_case else 0
    try:
        matches = re.search(pattern, line, flags) is not None
    except re.error:
        return
    words = re.findall("[0-9A-Za-z_]+" if binary else "[0-9A-Za-z_\x80-\uffff]+", line)
    words = [word for word in words if len(word.encode()) >= SHORTEST]
    for either in word_expressions(needs_of_regex(pattern), binary=binary, ignore_case=ignore_case):
        spelt = [expression.replace("(?-u:.)", ".") for expression in either]
        needed = any(re.search(expression, word, flags) for expression in spelt for word in words)
        assert needed or not matches, (either, words)


@given(st.binary(max_size=200), st.booleans())
def test_words_are_all_there(tmp_path_factory: pytest.TempPathFactory, data: bytes, binary: bool) -> None:
    place = tmp_path_factory.mktemp("words")
    (place / "data").write_bytes(data * 3 + b"\n")
    assert write_words(str(place), binary)
    assert not write_words(str(place), binary)
    wanted = rb"[0-9A-Za-z_]{3,}" if binary else rb"[0-9A-Za-z_\x80-\xff]{3,}"
    words = (place / "words").read_bytes().split(b"\n")[:-1]
    assert words == sorted(set(re.findall(wanted, data * 3 + b"\n")))


@given(
    st.lists(st.sampled_from([b"abc", b"de", b"fgh_", b"abc", b" ", b"\n", b"\n", b"-", b"\xff\xfe\xfd"]), max_size=60),
    st.integers(1, 30),
)
def test_places_are_the_blocks_that_have_a_word(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], block: int
) -> None:
    place = tmp_path_factory.mktemp("places")
    data = b"".join(pieces)
    (place / "data").write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fanout.view.words._BLOCK", block)
        write_words(str(place), binary=False)
    words = (place / "words").read_bytes()
    for word in words.split(b"\n")[:-1]:
        line = words.index(b"\n" + word + b"\n") + 1 if not words.startswith(word + b"\n") else 0
        found = ranges_of_words(str(place), [line])
        assert found is not None
        assert all(end <= start for (_, end), (start, _) in pairwise(found))
        inside = b"\n".join(data[start:end] for start, end in found)
        outside = b"\n".join(data[end:start] for (_, end), (start, _) in pairwise(((0, 0), *found, (len(data), 0))))
        lone = rb"(?<![0-9A-Za-z_\x80-\xff])" + re.escape(word) + rb"(?![0-9A-Za-z_\x80-\xff])"
        assert re.search(lone, inside)
        assert not re.search(lone, outside)
        assert all(not start or data[start - 1 : start] == b"\n" for start, _ in found)
    assert ranges_of_words(str(place), [len(words) + 1]) is None
    (place / "places").write_bytes((place / "places").read_bytes()[:20])
    assert ranges_of_words(str(place), [0]) is None
    assert ranges_of_words(f"{place}/gone", [0]) is None


@given(st.lists(st.integers(0, 60), max_size=12), st.lists(st.integers(0, 60), max_size=12))
def test_what_is_in_both_of_two_lists_of_ranges(one: list[int], other: list[int]) -> None:
    def ranges(cuts: list[int]) -> list[tuple[int, int]]:
        ordered = sorted(set(cuts))
        return list(zip(ordered[::2], ordered[1::2], strict=False))

    def covered(of: Sequence[tuple[int, int]]) -> set[int]:
        return {place for start, end in of for place in range(start, end)}

    found = both(ranges(one), ranges(other))
    assert covered(found) == covered(ranges(one)) & covered(ranges(other))
    assert size_of(found) == len(covered(found))


def test_ranges_of_files_are_searched_as_if_nothing_else_was_there(tmp_path: Path) -> None:
    lines = [b"needle %d\n" % number if number % 3 == 0 else b"hay %d\n" % number for number in range(9000)]
    data = b"".join(lines)
    starts = list(accumulate(map(len, lines), initial=0))
    for name in "abcd":
        (tmp_path / name).write_bytes(data)
    some = tuple((starts[at], starts[at + 3]) for at in range(0, 9000, 300))
    sources = [
        Source(str(tmp_path / "a"), some), Source(str(tmp_path / "b"), ()), Source(str(tmp_path / "c")),
        Source(str(tmp_path / "d"), ((0, len(data)),)),
    ]  # fmt: skip
    pattern = compile_pattern("^needle", "", syntax="rust", ignore_case=False, word=False)
    search = Search(program(), pattern, sources)
    whole = [start for start, line in zip(starts, lines, strict=False) if line.startswith(b"needle")]
    assert list(search) == [(0, start) for start, _ in some] + [(n, at) for n in (2, 3) for at in whole]
    assert search.finish() is None

    search = Search(program(), pattern, sources)
    assert next(iter(search)) == (0, 0)
    search.kill()  # while the pipe is full
    assert search.finish() is None

    (tmp_path / "d").write_bytes(data[:1000])
    search = Search(program(), pattern, sources)
    assert len(list(search)) > len(some)
    assert search.finish() == f"{tmp_path}/d cannot be read (it ends early, at 1000)"


RECIPE = Recipe(lambda: Layout(()), Reader(MemoryStore(), "disk"), {}, lambda: False)


def part(name: str, size: int, kind: str = "text", *, here: bool = True) -> Part:
    return Part(kind, name, name.encode(), name.encode() + b"\xff", RECIPE, here, size)  # type: ignore[arg-type]


def test_a_tree_is_cut_into_shards_of_about_the_same_size() -> None:
    parts = [part(f"p{n:03}", 10 << 20) for n in range(60)] + [part(f"p{n:03}", 1 << 20, "binary") for n in range(60)]
    shards = split(parts, 2)
    assert len(shards) == 2
    sizes = [sum(each.size for each in shard.parts) for shard in shards]
    assert max(sizes) - min(sizes) <= 20 << 20
    assert sorted(each.identity for shard in shards for each in shard.parts) == sorted(each.identity for each in parts)
    for shard in shards:
        for run in shard.runs:
            assert all(a.end is not None and a.end <= b.first for a, b in pairwise(run))
    assert len(split([part("a", 1 << 20), part("b", 1 << 20)], 8)) == 1  # too little for more processes
    assert split([], 2) == []


def test_what_is_to_be_fetched_is_searched_in_small_shards() -> None:
    shards = split([part(f"p{n:03}", 10 << 20, here=n < 6) for n in range(40)], 2)
    small = [sum(each.size for each in shard.parts) for shard in shards if not shard.parts[0].here]
    assert len(small) > 8
    assert max(small) <= 40 << 20


@pytest.mark.parametrize(
    "data", [b"", b"a", b"ab", b"a\0b\0\n\0", "é\n☕x".encode("utf-16-le"), b"\x00\xd8a\0", b"a\0b", b"\xff\xfe",
     b"\xff\xfea\0\xff\xfe"],
)  # fmt: skip
@pytest.mark.parametrize("step", [1, 2, 3, 1 << 20])
def test_utf16_is_decoded_a_piece_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, step: int
) -> None:
    monkeypatch.setattr(scan_write, "_STEP", step)
    disk = new_disk(MemoryStore())
    for name, content in ((b"f", b"\xff\xfe" + data), (b"g", b"plain")):
        disk.put_object(disk.point(), name, content, 0o644)
    state = disk.point().state()
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        scan_write.write_scan(fd, scan_write.Layout(list(state.below(b""))), disk.reader, state.blob_bytes())
    finally:
        os.close(fd)
    opened = scan.open_scan(str(tmp_path))
    start, end = opened.span(2)
    assert (opened.files, opened.path(2), opened.in_order) == (2, b"f", False)
    assert (tmp_path / "data").read_bytes()[start:end] == data.removeprefix(b"\xff\xfe").decode(
        "utf-16-le", "replace"
    ).encode()
    assert opened.span(0)[0] == opened.span(0)[1]
    assert opened.row_at(end) == 2
