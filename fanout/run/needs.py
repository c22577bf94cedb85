"""What a line must hold for a pattern to match it: words, found without understanding all of the pattern.

Owns reading patterns as far as that goes. Anything uncertain ends it: a pattern of which nothing is known rules out
nothing. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fanout.view.words import SHORTEST

__all__ = ["Need", "needs_of_literal", "needs_of_regex", "word_expressions"]

_WORD = re.compile(r"[0-9A-Za-z_\u0080-\U0010ffff]+")
_ASCII_WORD = re.compile(r"[0-9A-Za-z_]+")
#: Under ignore_case these match characters that are not ASCII, too: the long s and the Kelvin sign.
_ASCII_WORD_FOLDED = re.compile(r"[0-9A-JL-RT-Za-jl-rt-z_]+")
_QUANTIFIERS = "*+?{"
_PUNCTUATION = frozenset(r"""\.+*?()|[]{}^$#&-~/ !"%',:;=@`""")


@dataclass(frozen=True, slots=True)
class Need:
    """One literal that every match (of one alternative) holds, as text."""

    text: str


def needs_of_literal(text: str) -> tuple[Need, ...]:
    """Return what a fixed string needs: itself."""
    return (Need(text),)


def needs_of_regex(pattern: str) -> tuple[Need, ...]:
    """Return literals of which every match holds one, for a pattern of ripgrep's engine; nothing if that is not known.

    For each alternative it is the one with the longest word in it.
    """
    try:
        branches = _branches(pattern)
    except _Unclear:
        return ()
    found = []
    for literals in branches:
        best = max(literals, key=_longest, default="")
        if _longest(best) < SHORTEST:
            return ()
        found.append(Need(best))
    return tuple(found)


def word_expressions(needs: tuple[Need, ...], *, binary: bool, ignore_case: bool) -> list[str] | None:
    """Return expressions for the lines of a file of words: where none matches, no match is. None: nothing is known."""
    expressions = []
    for need in needs:
        folded = binary and ignore_case
        words = _ASCII_WORD_FOLDED if folded else _ASCII_WORD if binary else _WORD
        best = ""
        longest = SHORTEST - 1
        for found in words.finditer(need.text):
            start, end = found.span()
            if end - start <= longest:
                continue
            longest = end - start
            before, after = need.text[start - 1 : start], need.text[end : end + 1]
            begins = "^" if before and _ends_word(before, folded) else ""
            ends = "$" if after and _ends_word(after, folded) else ""
            best = f"{begins}{found[0]}{ends}"
        if not best:
            return None
        expressions.append(best)
    return expressions or None


def _ends_word(char: str, folded: bool) -> bool:
    """Whether a character surely is none of a word: not where it could stand for one, and only ASCII."""
    return char < "\x80" and not (char.isalnum() or char == "_") and not (folded and char in "kKsS")


def _longest(text: str) -> int:
    return max((len(word) for word in _WORD.findall(text)), default=0)


class _Unclear(Exception):
    pass


def _branches(pattern: str) -> list[list[str]]:
    """Split a pattern at its outermost `|`, and each part into the literals that must be there."""
    branches: list[list[str]] = [[]]
    run: list[str] = []

    def end_run() -> None:
        if run:
            branches[-1].append("".join(run))
            run.clear()

    at = 0
    while at < len(pattern):
        char = pattern[at]
        literal, end = _atom(pattern, at)
        quantifier, after = _quantifier(pattern, end)
        if char == "|":
            end_run()
            branches.append([])
        elif not literal or quantifier in ("*", "?", "{"):
            end_run()
        else:
            run.append(literal)
            if quantifier:  # one of them is there for certain, and then perhaps more
                end_run()
        at = after if char != "|" else end
    end_run()
    return branches


def _atom(pattern: str, at: int) -> tuple[str, int]:
    """Return (the character that an atom stands for, or "" where it is something else; where it ends)."""
    char = pattern[at]
    if char == "\\":
        return _escape(pattern, at)
    if char == "[":
        return "", _class_end(pattern, at)
    if char == "(":
        return "", _group_end(pattern, at)
    if char in ").^$|":
        if char == ")":
            raise _Unclear
        return "", at + 1
    if char in _QUANTIFIERS:
        raise _Unclear  # with nothing to repeat
    return char, at + 1


def _escape(pattern: str, at: int) -> tuple[str, int]:
    char = pattern[at + 1 : at + 2]
    if char in _PUNCTUATION:
        return char, at + 2
    if char in ("w", "W", "d", "D", "s", "S", "B", "A", "z", "<", ">", "r", "t", "f", "v", "a"):
        return "", at + 2
    if char == "b" and pattern[at + 2 : at + 3] != "{":
        return "", at + 2
    if char == "b":
        return "", _after(pattern, "}", at)
    if char == "x" and re.match(r"[0-9A-Fa-f]{2}", pattern[at + 2 :]):
        return "", at + 4
    if char in ("p", "P"):
        return "", _after(pattern, "}", at) if pattern[at + 2 : at + 3] == "{" else at + 3
    raise _Unclear


def _after(pattern: str, char: str, at: int) -> int:
    end = pattern.find(char, at)
    if end < 0:
        raise _Unclear
    return end + 1


def _class_end(pattern: str, at: int) -> int:
    """Return where a class ends, classes within it included."""
    depth = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            at += 2
            continue
        if char == "[":
            depth += 1
            at += 1 + pattern.startswith("^", at + 1)
            while pattern.startswith("-", at):
                at += 1
            at += pattern.startswith("]", at)  # one in first place is meant
            continue
        at += 1
        if char == "]":
            depth -= 1
            if not depth:
                return at
    raise _Unclear


def _group_end(pattern: str, at: int) -> int:
    """Return where a group ends. One that sets flags may change the meaning of all that follows."""
    if pattern.startswith("(?", at) and re.match(r"\(\?(:|P?<[A-Za-z_][0-9A-Za-z_.\[\]]*>)", pattern[at:]) is None:
        raise _Unclear
    depth = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            at += 2
            continue
        if char == "[":
            at = _class_end(pattern, at)
            continue
        at += 1
        if char == "(":
            depth += 1
            # Flags set within a group end with it; only what is outside of groups is used.
        elif char == ")":
            depth -= 1
            if not depth:
                return at
    raise _Unclear


def _quantifier(pattern: str, at: int) -> tuple[str, int]:
    """Return the quantifier at a place ("" if there is none) and where it ends, with what makes it lazy."""
    char = pattern[at : at + 1]
    if char == "{":
        end = _after(pattern, "}", at)
    elif char and char in "*+?":
        end = at + 1
    else:
        return "", at
    if pattern.startswith(("?", "+"), end):
        end += 1
    if pattern[end : end + 1] and pattern[end] in "*+?{":
        raise _Unclear
    return char, end
