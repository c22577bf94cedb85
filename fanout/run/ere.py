"""POSIX extended regular expressions, as `grep -E` takes them, spelt for ripgrep's engine.

Owns the translation. GNU's additions (`\\w`, `\\<`, `{,n}`) are taken; back references are not: that engine has none.
"""

from __future__ import annotations

from fanout.errors import Invalid

__all__ = ["rust_of_ere"]

_CLASSES = frozenset(
    ("alnum", "alpha", "blank", "cntrl", "digit", "graph", "lower", "print", "punct", "space", "upper", "xdigit")
)
#: GNU's escapes and what they are called there; every other escaped character stands for itself.
_ESCAPES = {
    "w": r"\w", "W": r"\W", "s": r"\s", "S": r"\S", "b": r"\b", "B": r"\B", "<": r"\b{start}", ">": r"\b{end}",
    "`": r"\A", "'": r"\z",
}  # fmt: skip
_SPECIAL = frozenset(r"\.+*?()|[]{}^$#&-~/ " + "\t")


def rust_of_ere(pattern: str) -> str:
    """Return the pattern in ripgrep's syntax; `Invalid` for back references and malformed brackets."""
    out: list[str] = []
    at = 0
    starts = True  # here a `*` has nothing to repeat, and so means nothing
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            piece, at = _escape(pattern, at)
        elif char == "[":
            piece, at = _bracket(pattern, at)
        elif char in "*+?" and starts:
            piece, at = "", at + 1
        elif char == "{":
            piece, at = _braces(pattern, at, starts)
        elif char in "}]":
            piece, at = "\\" + char, at + 1
        else:
            piece, at = char, at + 1
        out.append(piece)
        starts = (char in "(|^" and piece == char) or (starts and not piece)
    return "".join(out)


def _refuse(pattern: str, what: str) -> Invalid:
    return Invalid.argument("pattern", pattern, what)


def _escape(pattern: str, at: int) -> tuple[str, int]:
    if at + 1 == len(pattern):
        raise _refuse(pattern, f"it does not compile: nothing follows the backslash, at {at}")
    char = pattern[at + 1]
    if char.isdigit() and char != "0":
        raise _refuse(pattern, f'a back reference, at {at}: use syntax "pcre2" for these')
    piece = _ESCAPES.get(char)
    if piece is None:
        piece = _literal(char)
    return piece, at + 2


def _literal(char: str) -> str:
    return "\\" + char if char in _SPECIAL else char


def _braces(pattern: str, at: int, starts: bool) -> tuple[str, int]:
    """An interval such as {2,5} or {,3}; any other brace stands for itself, as GNU has it."""
    end = pattern.find("}", at)
    low, comma, high = pattern[at + 1 : end].partition(",") if end > 0 else ("", "", "")
    numbers = [part for part in (low, high) if part]
    if end < 0 or starts or not (low or comma) or not all(part.isascii() and part.isdigit() for part in numbers):
        return "\\{", at + 1
    return "{" + (low or "0") + comma + high + "}", end + 1


def _bracket(pattern: str, at: int) -> tuple[str, int]:
    """A bracket expression: in POSIX a backslash is an ordinary character there, and `]` is one in first place."""
    start = at
    at += 1
    negated = pattern.startswith("^", at)
    at += negated
    out = ["[^" if negated else "["]
    first = True
    while True:
        if at >= len(pattern):
            raise _refuse(pattern, f"it does not compile: the bracket is not closed, at {start}")
        char = pattern[at]
        if char == "]" and not first:
            return "".join(out) + "]", at + 1
        first = False
        if char == "[" and pattern[at + 1 : at + 2] in (":", ".", "="):
            kind = pattern[at + 1]
            end = pattern.find(kind + "]", at + 2)
            name = pattern[at + 2 : end] if end > 0 else ""
            if kind == ":" and name in _CLASSES:
                out.append(f"[:{name}:]")
            elif kind != ":" and len(name) == 1:
                out.append("\\" + name if name in _SPECIAL else name)
            else:
                raise _refuse(pattern, f"it does not compile: no such character class, at {at}")
            at = end + 2
            continue
        ranges = char == "-" and out[-1] not in ("[", "[^") and pattern[at + 1 : at + 2] not in ("", "]")
        out.append("-" if ranges else _literal(char))
        at += 1
