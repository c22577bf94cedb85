"""What a search asks for: every argument checked before anything starts, patterns turned into ripgrep's syntax.

Owns bounds and messages. Starts nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from fanout.disk.paths import absolute
from fanout.errors import Invalid
from fanout.model import GrepOutput, GrepSyntax
from fanout.run.ere import rust_of_ere
from fanout.run.globs import Globs
from fanout.run.needs import Needs, needs_of_literal, needs_of_regex
from fanout.run.ripgrep import MAX_PATTERN_BYTES, Pattern, compile_pattern

__all__ = [
    "MAX_CONCURRENCY",
    "MAX_CONTEXT",
    "MAX_DURATION_S",
    "MAX_LINE_BYTES",
    "MAX_RESULTS",
    "Query",
    "check_query",
]

MAX_RESULTS = 1_000_000
MAX_DURATION_S = 3600.0
MAX_CONTEXT = 1000
MAX_LINE_BYTES = 1 << 20
MAX_CONCURRENCY = 100


@dataclass(frozen=True, slots=True)
class Query:
    """A search, checked. `directory` is a tree path; `needs` is what is known of its matches."""

    pattern: Pattern
    needs: Needs
    ignore_case: bool
    directory: bytes
    recursive: bool
    globs: Globs
    at: str | int | None
    before: int
    after: int
    output: GrepOutput
    binary: bool
    max_results: int
    max_line_bytes: int
    max_duration_s: float
    concurrency: int | None

    @property
    def prefix(self) -> bytes:
        """What every searched path begins with."""
        return self.directory + b"/" if self.directory else b""

    def selects(self, path: bytes) -> bool:
        """Whether a file below the directory is to be searched."""
        if not self.recursive and b"/" in path[len(self.prefix) :]:
            return False
        return self.globs.select(path, len(self.directory))

    @property
    def selective(self) -> bool:
        """Whether files within the directory can be left out."""
        return bool(self.globs) or not self.recursive


def check_query(
    pattern: str | bytes,
    *,
    directory: str,
    recursive: bool,
    syntax: GrepSyntax,
    ignore_case: bool,
    word: bool,
    include: Iterable[str],
    exclude: Iterable[str],
    at: str | int | None,
    before: int,
    after: int,
    output: GrepOutput,
    binary: bool,
    max_results: int,
    max_line_bytes: int,
    max_duration_s: float,
    concurrency: int | None,
) -> Query:
    """Check everything that can be checked without the disk; `Invalid` names the argument."""
    for name, value in (("recursive", recursive), ("ignore_case", ignore_case), ("word", word), ("binary", binary)):
        if type(value) is not bool:
            raise Invalid.argument(name, value, "True or False")
    if syntax not in ("rust", "ere", "fixed", "pcre2"):
        raise Invalid.argument("syntax", syntax, 'one of "rust", "ere", "fixed", "pcre2"')
    if output not in ("lines", "count", "files"):
        raise Invalid.argument("output", output, 'one of "lines", "count", "files"')
    if at is not None and (not isinstance(at, str | int) or isinstance(at, bool)):
        raise Invalid.argument("at", at, "a checkpoint, a branch, or a sequence number of at least 0")
    if type(max_duration_s) not in (int, float) or not 0 < max_duration_s <= MAX_DURATION_S:  # NaN is neither
        raise Invalid.argument("max_duration_s", max_duration_s, f"more than 0 and at most {MAX_DURATION_S:g} seconds")
    if concurrency is not None:
        _check_int("concurrency", concurrency, 1, MAX_CONCURRENCY)
    compiled, needs = _pattern(pattern, syntax, ignore_case, word)
    return Query(
        pattern=compiled,
        needs=needs,
        ignore_case=ignore_case,
        directory=absolute("directory", directory),
        recursive=recursive,
        globs=Globs(include, exclude),
        at=at,
        before=_check_int("before", before, 0, MAX_CONTEXT),
        after=_check_int("after", after, 0, MAX_CONTEXT),
        output=output,
        binary=binary,
        max_results=_check_int("max_results", max_results, 1, MAX_RESULTS),
        max_line_bytes=_check_int("max_line_bytes", max_line_bytes, 1, MAX_LINE_BYTES),
        max_duration_s=float(max_duration_s),
        concurrency=concurrency,
    )


def _check_int(name: str, value: int, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise Invalid.argument(name, value, f"a whole number from {low:,} to {high:,}")
    return value


def _pattern(pattern: str | bytes, syntax: GrepSyntax, ignore_case: bool, word: bool) -> tuple[Pattern, Needs]:
    if not isinstance(pattern, str | bytes):
        raise Invalid.argument("pattern", pattern, "str or bytes")
    try:
        raw = pattern if isinstance(pattern, bytes) else pattern.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise Invalid.argument("pattern", pattern, "not encodable as UTF-8") from error
    if not raw:
        raise Invalid.argument("pattern", pattern, "not empty; '^' matches every line")
    if len(raw) > MAX_PATTERN_BYTES:
        raise Invalid.argument("pattern", pattern, f"at most {MAX_PATTERN_BYTES:,} bytes")
    if b"\n" in raw:
        raise Invalid.argument("pattern", pattern, "a line is searched at a time, so a pattern cannot hold a newline")
    if syntax == "fixed" and (b"\0" in raw or not _is_utf8(raw)):
        # What no argument of a program can hold is spelt as an expression.
        return compile_pattern(_escaped(raw), pattern, syntax="rust", ignore_case=ignore_case, word=word), ()
    text = _spelt(raw, pattern, syntax)
    if syntax == "ere":
        text = rust_of_ere(text)
    compiled = compile_pattern(text, pattern, syntax=syntax, ignore_case=ignore_case, word=word)
    if syntax == "fixed":
        return compiled, needs_of_literal(text)
    if syntax == "pcre2" and ("\\" in text or "(" in text):
        return compiled, ()  # it has much that the other engine has not
    return compiled, needs_of_regex(text)


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _spelt(raw: bytes, pattern: str | bytes, syntax: GrepSyntax) -> str:
    """Return an expression as text: NUL and bytes that are no UTF-8 become escapes."""
    text = raw.decode("utf-8", "surrogateescape")
    if syntax in ("pcre2", "ere") and not _is_utf8(raw):
        raise Invalid.argument("pattern", pattern, f'valid UTF-8 with syntax "{syntax}"')
    if syntax == "ere":
        if "\0" in text:
            raise Invalid.argument("pattern", pattern, 'no NUL with syntax "ere"')
        return text
    text = text.replace("\0", "\\x00")
    return re.sub("[\udc80-\udcff]", lambda found: f"(?-u:\\x{ord(found[0]) - 0xDC00:02x})", text)


def _escaped(raw: bytes) -> str:
    """Return an expression that matches exactly these bytes."""
    parts = []
    for char in raw.decode("utf-8", "surrogateescape"):
        code = ord(char)
        if 0xDC80 <= code <= 0xDCFF:
            parts.append(f"(?-u:\\x{code - 0xDC00:02x})")
        elif char.isalnum() or char == "_" or code > 127:
            parts.append(char)
        else:
            parts.append(f"\\x{code:02x}")
    return "".join(parts)
