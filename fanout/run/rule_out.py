"""What a search may skip: scan files, and blocks of them, none of whose words can be part of a match.

Owns asking the files of words (view/words.py). Wherever anything is not known, nothing is skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor

from fanout.run.grep_query import Query
from fanout.run.needs import word_expressions
from fanout.run.ripgrep import Program, lines_that_match
from fanout.view.bases import Kind
from fanout.view.blocks import Range, both, ranges_of_words, size_of
from fanout.view.parts import Part
from fanout.view.published import Matching
from fanout.view.scans import Scans
from fanout.view.words import NAME

__all__ = ["matching_words", "rule_out"]

_KINDS: tuple[Kind, ...] = ("text", "binary")
#: Asking for the words of fewer scan files costs more than searching them.
_MIN_PARTS = 4
#: More words than this of one scan file are in so many of its blocks that looking for these costs more than it saves.
_MAX_WORDS = 200
#: What is to be searched goes through a pipe unless it is the whole scan file, and that is worth it up to this share.
_MAX_SHARE = 0.4
#: Asking for more words is worth it where this much, in bytes, is left for each scan file to ask.
_WORTH_BYTES = 1 << 19


def rule_out(parts: Sequence[Part], query: Query, scans: Scans, found: Program, threads: int) -> None:
    """Mark the parts, and what of them, that the words of their scan files rule out."""
    asked: dict[str, tuple[list[list[str]], dict[str, Part]]] = {}
    for kind in ("text", "binary"):
        lists = word_expressions(query.needs, binary=kind == "binary", ignore_case=query.ignore_case)
        files = asked.setdefault(repr(lists), (lists, {}))[1]
        for part in parts if lists else ():
            if part.kind == kind and part.here:
                path = f"{scans.directory(part.identity)}/{NAME}"
                if _has_words(path):
                    files[path] = part
    worth = [each for each in asked.values() if each[0] and len(each[1]) >= _MIN_PARTS]
    if len(worth) < 2:
        for lists, files in worth:
            _ask(lists, files, query, found, threads)
        return
    with ThreadPoolExecutor(len(worth), "fanout-words") as pool:
        for done in [pool.submit(_ask, lists, files, query, found, threads) for lists, files in worth]:
            done.result()


def _ask(lists: Sequence[list[str]], files: Mapping[str, Part], query: Query, found: Program, threads: int) -> None:
    """Mark the parts of some files of words by what these say."""
    left = dict(files)
    for expressions in lists:
        matching = lines_that_match(
            found, expressions, ignore_case=query.ignore_case, files=list(left), threads=threads, most=_MAX_WORDS
        )
        if matching is None:
            break
        for path, part in left.items():
            _mark(part, os.path.dirname(path), matching.get(path, ()))
        left = {path: part for path, part in left.items() if not part.ruled_out}
        if len(left) < _MIN_PARTS or _left(left.values()) < _WORTH_BYTES * len(left):
            break
    for part in left.values():
        if part.ranges is not None and size_of(part.ranges) > _MAX_SHARE * part.size:
            part.ranges = None


def matching_words(query: Query, found: Program, threads: int) -> Matching | None:
    """Return what tells which files of words have one that a match may need; None where nothing is known of that."""
    needed = {
        kind: word_expressions(query.needs, binary=kind == "binary", ignore_case=query.ignore_case) for kind in _KINDS
    }
    if not needed["text"]:
        return None

    def matching(files: Mapping[str, Kind]) -> Set[str]:
        asked: dict[str, tuple[list[list[str]], list[str]]] = {}
        for path, kind in files.items():
            asked.setdefault(repr(needed[kind]), (needed[kind], []))[1].append(path)
        matched: set[str] = set()
        for lists, paths in asked.values():
            for expressions in lists:
                if not paths:
                    break
                lines = lines_that_match(
                    found, expressions, ignore_case=query.ignore_case, files=paths, threads=threads, most=1
                )
                paths = paths if lines is None else list(lines)
            matched.update(paths)
        return matched

    return matching


def _mark(part: Part, directory: str, lines: Sequence[int]) -> None:
    """Take note of which words, by their lines, a scan file has."""
    ranges: Sequence[Range] | None = ()
    if lines:
        ranges = ranges_of_words(directory, lines) if len(lines) < _MAX_WORDS else None
    if ranges is not None:
        part.ranges = tuple(ranges) if part.ranges is None else both(part.ranges, ranges)
        part.ruled_out = not part.ranges


def _left(parts: Iterable[Part]) -> int:
    return sum(part.size if part.ranges is None else size_of(part.ranges) for part in parts)


def _has_words(path: str) -> bool:
    try:
        return os.stat(path).st_size > 0
    except OSError:
        return False
