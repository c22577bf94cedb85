"""Which scan files a search may skip: those none of whose words can be part of a match.

Owns asking the files of words (view/words.py). Wherever anything is not known, nothing is skipped.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from fanout.run.grep_query import Query
from fanout.run.needs import word_expressions
from fanout.run.ripgrep import Program, files_that_match
from fanout.view.parts import Part
from fanout.view.scans import Scans
from fanout.view.words import NAME

__all__ = ["rule_out"]

#: Asking for the words of fewer scan files costs more than searching them.
_MIN_PARTS = 4


def rule_out(parts: Sequence[Part], query: Query, scans: Scans, found: Program, threads: int) -> None:
    """Mark the parts that the words of their scan files rule out."""
    asked: dict[tuple[str, ...], dict[str, Part]] = {}
    for kind in ("text", "binary"):
        expressions = word_expressions(query.needs, binary=kind == "binary", ignore_case=query.ignore_case)
        if expressions is None:
            continue
        files = asked.setdefault(tuple(expressions), {})
        for part in parts:
            if part.kind == kind and part.here:
                path = f"{scans.directory(part.identity)}/{NAME}"
                if _has_words(path):
                    files[path] = part
    for of_either, files in asked.items():
        if len(files) < _MIN_PARTS:
            continue
        matching = files_that_match(found, of_either, ignore_case=query.ignore_case, files=list(files), threads=threads)
        if matching is not None:
            for path, part in files.items():
                part.ruled_out = path not in matching


def _has_words(path: str) -> bool:
    try:
        return os.stat(path).st_size > 0
    except OSError:
        return False
