"""What a line must hold for a pattern to match it: words, found without understanding all of the pattern.

Owns reading patterns as far as that goes. Anything uncertain ends it: a pattern of which nothing is known rules out
nothing. Pure.

A pattern is read as alternatives of atoms. Atoms that follow each other and can only match what words are made of
match within one word of the line, so that their own text is an expression for that word: a match of
`def (get|set)_[a-z]+\\(` needs a word that `^(get|set)_[a-z]+$` matches.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from fanout.view.words import SHORTEST

__all__ = ["Atom", "Needs", "needs_of_literal", "needs_of_regex", "word_expressions"]

_WORD = re.compile(r"[0-9A-Za-z_\u0080-\U0010ffff]")
_QUANTIFIERS = "*+?{"
_PUNCTUATION = frozenset(r"""\.+*?()|[]{}^$#&-~/ !"%',:;=@`""")
#: Classes that match ASCII characters of words alone, in pieces.
_CLASS_PIECE = re.compile(r"\\[wd]|[a-z]-[a-z]|[A-Z]-[A-Z]|[0-9]-[0-9]|[0-9A-Za-z_](?!-)")
#: How much a character that is known counts as, one of a class, and a border; what is rarer counts more.
_KNOWN, _ANY, _BORDER = 1.0, 0.25, 1.0
#: An expression that counts less is in nearly every file.
_LEAST_WEIGHT = 3.0
_MAX_REPEATS = 1000
_MAX_LISTS = 3
#: In a line that is one word these match as much, and cost ripgrep a third less.
_CHEAPER = {r"\w+": "(?-u:.)+", r"\w*": "(?-u:.)*", r"\w+?": "(?-u:.)+", r"\w*?": "(?-u:.)*"}


class _Of(IntEnum):
    """What an atom matches: anything; what words are made of in text; in binary files, too; the same, ignoring case."""

    ANYTHING = 0
    WORDS = 1
    ASCII = 2
    FOLDED = 3


class Atom(NamedTuple):
    """A piece of a pattern as it is spelt, quantifier included. It matches `least` bytes or more.

    `border`: it surely matches, and at both ends what is of no word. `inner`: the alternatives of a group that surely
    matches.
    """

    text: str
    of: _Of = _Of.ANYTHING
    least: int = 0
    weight: float = 0.0
    border: bool = False
    inner: tuple[tuple[Atom, ...], ...] = ()


#: For each alternative its atoms; nothing if a pattern was not understood.
Needs = tuple[tuple[Atom, ...], ...]


def needs_of_literal(text: str) -> Needs:
    """Return what a fixed string needs: itself."""
    return (tuple(_literal(char, re.escape(char)) for char in text),)


def needs_of_regex(pattern: str) -> Needs:
    """Return the atoms of a pattern of ripgrep's engine; nothing where it is not understood."""
    try:
        branches, end = _branches(pattern, 0)
        if end < len(pattern):
            raise _Unclear
    except _Unclear:
        return ()
    return branches


def word_expressions(needs: Needs, *, binary: bool, ignore_case: bool) -> list[list[str]]:
    """Return what the words of a line say of whether it can match, as expressions for the lines of a file of words.

    A line that matches has, for each list returned, a word that one of its expressions matches; the first list is
    likely to rule out most. Nothing is returned where nothing is known.
    """
    needed = _Of.FOLDED if binary and ignore_case else _Of.ASCII if binary else _Of.WORDS
    found = _of_branch(needs[0], needed) if len(needs) == 1 else [_of_all(needs, needed)]
    return [list(dict.fromkeys(expressions)) for _, expressions in found if expressions][:_MAX_LISTS]


#: Expressions of which a line needs one, none where that is not known, and how much the least of them counts as.
_Found = tuple[float, list[str]]
_UNKNOWN: _Found = (0.0, [])


def _of_all(branches: Sequence[Sequence[Atom]], needed: _Of) -> _Found:
    """Return what a match of any of some alternatives needs."""
    found = [next(iter(_of_branch(atoms, needed)), _UNKNOWN) for atoms in branches]
    if not all(expressions for _, expressions in found):
        return _UNKNOWN
    return min((weight for weight, _ in found), default=0.0), [each for _, its in found for each in its]


def _of_branch(atoms: Sequence[Atom], needed: _Of) -> list[_Found]:
    """Return all that a match of these atoms needs, the best first."""
    found: list[_Found] = []
    start = 0
    while start < len(atoms):
        end = start
        while end < len(atoms) and atoms[end].of >= needed:
            end += 1
        found.append(_of_run(atoms, start, end) if end > start else _of_all(atoms[start].inner, needed))
        start = max(end, start + 1)
    return sorted((each for each in found if each[1]), key=lambda each: -each[0])


def _of_run(atoms: Sequence[Atom], start: int, end: int) -> _Found:
    """Return the expression of the atoms start <= i < end, which are of one word."""
    run = atoms[start:end]
    if sum(atom.least for atom in run) < SHORTEST:
        return _UNKNOWN
    begins = start > 0 and atoms[start - 1].border
    ends = end < len(atoms) and atoms[end].border
    weight = sum(atom.weight for atom in run) + _BORDER * (begins + ends)
    if weight < _LEAST_WEIGHT:
        return _UNKNOWN
    text = "".join(_CHEAPER.get(atom.text, atom.text) for atom in run)
    return weight, [f"{'^' if begins else ''}{text}{'$' if ends else ''}"]


class _Unclear(Exception):
    pass


def _branches(pattern: str, at: int) -> tuple[Needs, int]:
    """Read alternatives up to the end of the pattern or of a group, and return where that is."""
    branches: list[list[Atom]] = [[]]
    while at < len(pattern) and pattern[at] != ")":
        if pattern[at] == "|":
            branches.append([])
            at += 1
            continue
        atom, end = _atom(pattern, at)
        least, most, after = _quantifier(pattern, end)
        branches[-1].append(_repeated(atom, pattern[at:after], least, most))
        at = after
    return tuple(tuple(branch) for branch in branches), at


def _repeated(atom: Atom, text: str, least: int, most: int | None) -> Atom:
    if least == most == 1:
        return atom
    times = min(least, _MAX_REPEATS)
    if atom.of is _Of.ANYTHING:
        return Atom(text, border=atom.border and least > 0, inner=atom.inner if least else ())
    return Atom(text, atom.of, atom.least * times, atom.weight * times)


def _atom(pattern: str, at: int) -> tuple[Atom, int]:
    """Return an atom without its quantifier, and where it ends."""
    char = pattern[at]
    if char == "\\":
        return _escape(pattern, at)
    if char == "[":
        return _class(pattern, at)
    if char == "(":
        return _group(pattern, at)
    if char in "^$":  # a line ends there, and so does a word
        return Atom(char, border=True), at + 1
    if char == ".":
        return Atom(char), at + 1
    if char in _QUANTIFIERS:
        raise _Unclear  # with nothing to repeat
    return _literal(char, char), at + 1


def _literal(char: str, text: str) -> Atom:
    if not _WORD.match(char):
        return Atom(text, border=True)
    # Ignoring case these match characters that are not ASCII, too: the long s and the Kelvin sign.
    of = _Of.WORDS if char >= "\x80" else _Of.ASCII if char in "kKsS" else _Of.FOLDED
    return Atom(text, of, 1, _KNOWN)


def _escape(pattern: str, at: int) -> tuple[Atom, int]:
    char = pattern[at + 1 : at + 2]
    text = pattern[at : at + 2]
    if char and char in _PUNCTUATION:
        return _literal(char, text), at + 2
    if char in ("w", "d"):
        return Atom(text, _Of.WORDS, 1, _ANY), at + 2
    if char in ("W", "D", "s", "S", "B", "A", "z", "<", ">", "r", "t", "f", "v", "a"):
        return Atom(text), at + 2
    if char == "b" and pattern[at + 2 : at + 3] != "{":
        return Atom(text), at + 2
    if char == "b":
        end = _after(pattern, "}", at)
    elif char == "x" and re.match(r"[0-9A-Fa-f]{2}", pattern[at + 2 :]):
        end = at + 4
    elif char in ("p", "P"):
        end = _after(pattern, "}", at) if pattern[at + 2 : at + 3] == "{" else at + 3
    else:
        raise _Unclear
    return Atom(pattern[at:end]), end


def _after(pattern: str, char: str, at: int) -> int:
    end = pattern.find(char, at)
    if end < 0:
        raise _Unclear
    return end + 1


def _class(pattern: str, at: int) -> tuple[Atom, int]:
    end = _class_end(pattern, at)
    body = pattern[at + 1 : end - 1]
    pieces = _CLASS_PIECE.findall(body)
    if "".join(pieces) != body:
        return Atom(pattern[at:end]), end
    of = _Of.WORDS if "\\" in body else _Of.FOLDED if re.fullmatch(r"[0-9_-]*", body) else _Of.ASCII
    return Atom(pattern[at:end], of, 1, _ANY), end


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


def _group(pattern: str, at: int) -> tuple[Atom, int]:
    """Read a group. One that sets flags may change the meaning of all that follows."""
    opened = re.match(r"\(\?(:|P?<[A-Za-z_][0-9A-Za-z_.\[\]]*>)|\((?!\?)", pattern[at:])
    if opened is None:
        raise _Unclear
    branches, end = _branches(pattern, at + opened.end())
    if not pattern.startswith(")", end):
        raise _Unclear
    end += 1
    text = pattern[at:end]
    of = min((atom.of for branch in branches for atom in branch), default=_Of.FOLDED)
    if of is _Of.ANYTHING:
        return Atom(text, inner=branches), end
    least = min(sum(atom.least for atom in branch) for branch in branches)
    weight = min(sum(atom.weight for atom in branch) for branch in branches)
    return Atom(text, of, least, weight), end


def _quantifier(pattern: str, at: int) -> tuple[int, int | None, int]:
    """Return how often an atom is there, at least and at most, and where that was said, with what makes it lazy."""
    char = pattern[at : at + 1]
    if char == "{":
        end = _after(pattern, "}", at)
        bounds = re.fullmatch(r"\{(\d+)(,(\d*))?\}", pattern[at:end])
        if bounds is None:
            raise _Unclear
        least = int(bounds[1])
        most = int(bounds[3]) if bounds[3] else None if bounds[2] else least
    elif char and char in "*+?":
        end = at + 1
        least, most = (1 if char == "+" else 0), (1 if char == "?" else None)
    else:
        return 1, 1, at
    if pattern.startswith(("?", "+"), end):
        end += 1
    if pattern[end : end + 1] and pattern[end] in "*+?{":
        raise _Unclear
    return least, most, end
