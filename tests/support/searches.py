"""Searches, and patterns that are made up of a tree's own lines: pieces of lines, spelt as expressions.

Owns how a text can be spelt. Knows nothing of who searches.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from tests.support.ripgrep import flags

__all__ = ["Asked", "made_up"]

_NOTHING: Mapping[str, Any] = MappingProxyType({})
#: How a pattern can begin and end around a piece of a line.
_AROUND = [
    ("", ""), ("", ""), ("", ""), (r"\b", ""), ("", r"\b"), (r"\b", r"\b"), ("^.*", ""), (".*", ".*$"), ("x?", "s*"),
    ("(?:", ")"), ("(?:", "|zzqqyx)"), ("", "|zzqqyx"), ("zzqqyx|", ""), ("(?:nowhere_|", ")"), ("(?i)", ""),
    ("(?:x|(?:y|", "))"), ("(?s:", ")"), ("(?:", "){1}"), ("(?:", ")?"), (r"(?:\w+\W+)?", ""), (r"\w", ""), ("", r"\w"),
    (r"\B", ""), ("", r"\b{end}"), ("(?:)", ""), ("(?m:^|.)", "(?:$|.)"),
]  # fmt: skip
_MIDDLES = [".*", ".+?", r"(?:\w|\W)*", ".{0,40}", r"[^\n]*", r"\P{Greek}*"]


class Asked(NamedTuple):
    """One search: a pattern, and the options of `Disk.grep` that are not the default."""

    pattern: str
    options: Mapping[str, Any] = _NOTHING

    @property
    def flags(self) -> list[str]:
        return flags(self.options.get("syntax", "rust"), self.options)

    @property
    def directory(self) -> str:
        return str(self.options.get("directory", "/")).strip("/")

    def with_options(self, more: Mapping[str, Any]) -> Asked:
        return Asked(self.pattern, {**self.options, **more})


def made_up(top: Path, chance: random.Random, number: int) -> Iterator[Asked]:
    """Yield so many searches, most of which match something below `top`."""
    files = sorted(path for path in top.rglob("*") if path.is_file() and not path.is_symlink())
    while number:
        text = _piece(chance.choice(files).read_bytes(), chance)
        if text:
            number -= 1
            yield _spelt(text, chance)


def _piece(data: bytes, chance: random.Random) -> str:
    """Return a piece of a line of a file, or nothing."""
    start = chance.randrange(len(data)) if data else 0
    line = data[start : start + 300].split(b"\n")[-1 if chance.random() < 0.3 else 0]
    text = line.decode(errors="ignore").replace("\0", "")
    text = text.strip() if chance.random() < 0.7 else text
    return text[: chance.randint(2, 40)]


def _spelt(text: str, chance: random.Random) -> Asked:
    options: dict[str, Any] = {}
    options |= {"ignore_case": True} if chance.random() < 0.3 else {}
    options |= {"word": True} if chance.random() < 0.2 else {}
    if chance.random() < 0.2:
        return Asked(text.swapcase() if "ignore_case" in options else text, options | {"syntax": "fixed"})
    options |= {"syntax": "pcre2"} if chance.random() < 0.15 else {}
    runs = ["".join(run) for _, run in itertools.groupby(text, _is_of_word)]
    pieces = [(_word if _is_of_word(run[0]) else _between)(run, chance) for run in runs]
    if len(pieces) > 2 and chance.random() < 0.3:
        pieces[chance.randrange(1, len(pieces) - 1)] = chance.choice(_MIDDLES)
    before, after = chance.choice(_AROUND)
    return Asked(before + "".join(pieces) + after, options)


def _word(word: str, chance: random.Random) -> str:
    """Spell a run of what words are made of."""
    half = chance.randint(0, len(word))
    head, tail = word[:half], word[half:]
    if word.isascii() and chance.random() < 0.1:
        return "".join(char if chance.random() < 0.5 else "[A-Za-z0-9_]" for char in word)
    return chance.choice(
        [
            word, word, word, rf"{head}\w*", rf"\w*{tail}", rf"\w{{{len(word)}}}", f"(?:{word}|zzqqyx)",
            f"{head}(?:{tail}|_x)", f"({word})+", f"(?i:{word})", f"(?i){word}(?-i)", f"{head}(?:{tail})?",
            f"(?:{head}){{1,2}}{tail}", "".join(f"[{char}]" for char in word), f"[{''.join(sorted(set(word)))}]+",
            "".join(rf"\x{{{ord(char):x}}}" for char in word), f"{head}.{tail[1:]}", f"{head}{tail[:1]}?{tail[1:]}",
            f"{head}{tail[:1]}*{tail[1:]}", rf"\b{word}", rf"{word}\b", f"(?:(?:{head})(?:{tail}))", rf"{head}\w+",
            rf"[\w.]*{tail}", f"(?:{head}|{tail})+", f"(?P<name>{word})", f"{head}(?:)+{tail}",
        ]
    )  # fmt: skip


def _between(run: str, chance: random.Random) -> str:
    """Spell a run of what words are not made of."""
    codes = "".join(rf"\x{{{ord(char):x}}}" for char in run)
    plain = "".join(rf"\{char}" if char.isascii() and char.isprintable() and char != " " else char for char in run)
    return chance.choice(
        [codes, plain, plain, plain, r"\W+", r"\W*", ".", rf"(?:{plain})?", f"(?:{codes})*", rf"\s*{plain}", r"[^a-z]+"]
    )


def _is_of_word(char: str) -> bool:
    return char.isalnum() or char == "_"
