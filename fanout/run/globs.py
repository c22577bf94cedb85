"""Globs that choose files, as ripgrep's `-g` has them.

Owns their syntax (that of gitignore, and `{a,b}`) and what including and excluding mean. Pure; paths are bytes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from fanout.errors import Invalid

__all__ = ["MAX_GLOBS", "Globs"]

MAX_GLOBS = 1000
_MAX_GLOB_BYTES = 4096


class Globs:
    """Which files to take: those that match any of `include` (all, if there are none), but for what is excluded.

    A glob without a slash is one for names; with one it is for paths from the disk's root. `**` crosses directories,
    `*` and `?` do not. What an `exclude` matches is left out with everything below it; one that ends in `/` is for
    directories only. False where it takes every file.
    """

    def __init__(self, include: Iterable[str] = (), exclude: Iterable[str] = ()) -> None:
        self.key = (_checked("include", include), _checked("exclude", exclude))
        self._files, _ = _compiled("include", self.key[0])
        self._gone, self._directories_gone = _compiled("exclude", self.key[1])

    def __bool__(self) -> bool:
        return any(self.key)

    def select(self, path: bytes, below: int = 0) -> bool:
        """Whether to take a file. The searched directory itself, the first `below` bytes of the path, is not judged."""
        if self.key[0] and (self._files is None or self._files.fullmatch(path) is None):
            return False
        if self._gone is not None and self._gone.fullmatch(path) is not None:
            return False
        if self._directories_gone is None:
            return True
        end = path.rfind(b"/")
        while end > below:
            if self._directories_gone.fullmatch(path, 0, end) is not None:
                return False
            end = path.rfind(b"/", 0, end)
        return True


def _checked(argument: str, globs: Iterable[str]) -> tuple[str, ...]:
    if isinstance(globs, str | bytes):
        raise Invalid.argument(argument, globs, "several globs: a list or tuple of strings")
    listed = tuple(globs)
    if len(listed) > MAX_GLOBS:
        raise Invalid.argument(argument, f"{len(listed)} globs", f"at most {MAX_GLOBS:,}")
    for glob in listed:
        if not isinstance(glob, str) or not glob.strip("/") or len(glob) > _MAX_GLOB_BYTES or "\0" in glob:
            raise Invalid.argument(argument, glob, "globs such as '*.py', 'src/**', '{a,b}.txt'")
        if glob.startswith("!"):
            raise Invalid.argument(
                argument, glob, "no `!` in front (`\\!` for one in a name): there are include and exclude"
            )
    return listed


def _compiled(argument: str, globs: tuple[str, ...]) -> tuple[re.Pattern[bytes] | None, re.Pattern[bytes] | None]:
    """Return one expression for files and one for directories; None where nothing is left to match."""
    files, directories = [], []
    for glob in globs:
        expression = _translate(argument, glob)
        directories.append(expression)
        if not glob.endswith("/"):
            files.append(expression)
    return _joined(files), _joined(directories)


def _joined(expressions: list[bytes]) -> re.Pattern[bytes] | None:
    return re.compile(b"|".join(b"(?:%s)" % each for each in expressions), re.DOTALL) if expressions else None


def _translate(argument: str, glob: str) -> bytes:
    """Return an expression that matches whole paths. Bytes that need no character class stand for themselves."""
    try:
        body = os.fsencode(glob.removesuffix("/"))
    except UnicodeEncodeError as error:
        raise Invalid.argument(argument, glob, "not encodable as a file name") from error
    anchored = b"/" in body
    body = body.removeprefix(b"/")
    out = [] if anchored else [b"(?:.*/)?"]
    at = depth = 0
    while at < len(body):
        char = body[at : at + 1]
        at += 1
        if char == b"*":
            end = at
            while body[end : end + 1] == b"*":
                end += 1
            piece, at = _stars(body, at - 1, end)
        elif char == b"?":
            piece = b"[^/]"
        elif char == b"[":
            piece, at = _class(argument, glob, body, at)
        elif char == b"{":
            depth += 1
            piece = b"(?:"
        elif char == b"}" and depth:
            depth -= 1
            piece = b")"
        elif char == b"," and depth:
            piece = b"|"
        elif char == b"\\" and at < len(body):
            piece = re.escape(body[at : at + 1])
            at += 1
        elif char == b"\\":
            raise Invalid.argument(argument, glob, "a glob that does not end in a backslash")
        else:
            piece = re.escape(char)
        out.append(piece)
    if depth:
        raise Invalid.argument(argument, glob, "a glob whose braces are closed")
    return b"".join(out)


def _stars(body: bytes, start: int, end: int) -> tuple[bytes, int]:
    """`**` as a whole part of the path crosses directories; any other stars stay within one."""
    alone_before = start == 0 or body[start - 1 : start] == b"/"
    if end - start == 2 and alone_before:
        if end == len(body):
            return b".*" if start == 0 else b".+", end
        if body[end : end + 1] == b"/":
            return b"(?:.*/)?", end + 1
    return b"[^/]*", end


def _class(argument: str, glob: str, body: bytes, at: int) -> tuple[bytes, int]:
    negated = body[at : at + 1] in (b"!", b"^")
    at += negated
    end = body.find(b"]", at + 1)
    if end < 0:
        raise Invalid.argument(argument, glob, "a glob whose brackets are closed")
    inside = body[at:end]
    parts = [b"[^/" if negated else b"(?!/)["]
    place = 0
    while place < len(inside):
        low = inside[place]
        if inside[place + 1 : place + 2] == b"-" and place + 2 < len(inside):
            high = inside[place + 2]
            if high < low:
                raise Invalid.argument(argument, glob, "a glob whose ranges go up")
            parts.append(b"\\x%02x-\\x%02x" % (low, high))
            place += 3
        else:
            parts.append(b"\\x%02x" % low)
            place += 1
    return b"".join(parts) + b"]", end + 1
