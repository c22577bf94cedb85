"""What a search's result looks like on a terminal and in a pipe: as ripgrep shows it.

Owns colours, headings, separators and remarks. Knows no command line beyond the options of `fanout grep`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fanout.model import Grep, GrepMatch

__all__ = ["show", "tell"]

#: What ripgrep paints paths, line numbers and matches with.
_PATH, _NUMBER, _MATCH = "\x1b[35m", "\x1b[32m", "\x1b[1m\x1b[31m"
_PLAIN = "\x1b[0m"
#: Beyond so many lines the matches in them are not looked up again to be painted.
_MAX_PAINTED = 20_000

_Spans = Sequence[tuple[int, int]]


def show(found: Grep, pattern: str, options: Mapping[str, Any], given: Mapping[str, Any], *, of_file: bool) -> None:
    """Print what was found. `given` are the options of the command line, `options` what was asked of the disk."""
    out = _Out(given, of_file=of_file)
    if options["output"] != "lines":
        for match in found.matches:
            out.file(match.file, match.count)
        return
    looked_up = given["only"] or (out.painted and len(found.matches) <= _MAX_PAINTED)
    spans = _spans(found.matches, pattern, options, needed=given["only"]) if looked_up else {}
    with_context = bool(options["before"] or options["after"])
    at = ""
    last = 0  # the last line of this file that was shown
    for place, match in enumerate(found.matches):
        if given["only"] and place not in spans:
            continue  # ripgrep shows nothing of it
        if match.file != at:
            if at:
                out.between_files(with_context)
            at, last = match.file, 0
            out.heading(match.file)
        first = match.line - len(match.before)
        if with_context and last and first > last + 1:
            out.line("--")
        for number, text in enumerate(match.before, first):
            if number > last:
                out.context(match.file, number, text)
        if given["only"]:
            for start, end in spans[place]:
                out.piece(match, start, end)
        else:
            out.match(match, spans.get(place, ()))
        last = match.line
        later = found.matches[place + 1] if place + 1 < len(found.matches) else None
        stop = later.line if later is not None and later.file == at else sys.maxsize
        for number, text in enumerate(match.after, match.line + 1):
            if number < stop:
                out.context(match.file, number, text)
                last = number


class _Out:
    """Standard output: headings and safe text on a terminal, exact bytes in a pipe."""

    def __init__(self, given: Mapping[str, Any], *, of_file: bool) -> None:
        self._terminal = sys.stdout.isatty()
        self.painted = given["pretty"] or given["color"] == "always" or (given["color"] == "auto" and self._may_paint())
        self._named = not of_file if given["named"] is None else given["named"]
        self._headed = self._terminal or given["pretty"] if given["heading"] is None else given["heading"]
        self._numbered = given["numbered"]
        self._null = given["null"]

    def _may_paint(self) -> bool:
        return self._terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def line(self, *parts: str) -> None:
        self._put("".join(parts), "\n")

    def file(self, file: str, count: int | None) -> None:
        """One file of those that match."""
        if count is None:
            self._put(self._path(file), "\0" if self._null else "\n")
        elif self._named:
            self.line(self._path(file), "\0" if self._null else ":", str(count))
        else:
            self.line(str(count))

    def heading(self, file: str) -> None:
        if self._headed and self._named:
            self._put(self._path(file), "\0" if self._null else "\n")

    def between_files(self, with_context: bool) -> None:
        if self._headed:
            self.line("")
        elif with_context:
            self.line("--")

    def match(self, match: GrepMatch, spans: _Spans) -> None:
        end = " […]" if match.truncated and self._terminal else ""
        self._row(match.file, match.line, ":", self._text(match.text_bytes, spans) + end)

    def piece(self, match: GrepMatch, start: int, end: int) -> None:
        """What matches of a line."""
        piece = match.text_bytes[start:end]
        self._row(match.file, match.line, ":", self._text(piece, [(0, len(piece))]))

    def context(self, file: str, number: int, text: str) -> None:
        self._row(file, number, "-", self._text(text.encode("utf-8", "surrogateescape"), ()))

    def _put(self, text: str, end: str) -> None:
        if self._terminal:
            sys.stdout.write(text + end)
        else:
            sys.stdout.flush()
            sys.stdout.buffer.write(os.fsencode(text + end))

    def _path(self, file: str) -> str:
        from fanout.cli.render import name

        return self._paint(_PATH, name(file) if self._terminal else file)

    def _row(self, file: str, number: int, mark: str, text: str) -> None:
        before = self._path(file) + ("\0" if self._null else mark) if self._named and not self._headed else ""
        self.line(before, self._paint(_NUMBER, str(number)) + mark if self._numbered else "", text)

    def _text(self, line: bytes, spans: _Spans) -> str:
        pieces: list[str] = []
        at = 0
        for start, end in spans:
            pieces += [self._safe(line[at:start]), self._paint(_MATCH, self._safe(line[start:end]))]
            at = end
        return "".join([*pieces, self._safe(line[at:])])

    def _safe(self, piece: bytes) -> str:
        from fanout.cli.render import safe

        text = os.fsdecode(piece)
        if not self._terminal:
            return text
        return "\t".join(safe(part) for part in text.removesuffix("\r").split("\t"))

    def _paint(self, colour: str, text: str) -> str:
        return f"{colour}{text}{_PLAIN}" if self.painted and text else text


def _spans(
    matches: Sequence[GrepMatch], pattern: str, options: Mapping[str, Any], *, needed: bool
) -> dict[int, list[tuple[int, int]]]:
    """Return where the matches are in the lines, by asking ripgrep for these lines alone.

    Where there is no ripgrep: nothing, or an error if it is `needed`.
    """
    from fanout.errors import FanoutError
    from fanout.run.grep_query import check_query
    from fanout.run.ripgrep import find_spans, program

    found: dict[int, list[tuple[int, int]]] = {}
    try:
        query = check_query(pattern, **options, directory="/")
        for start in range(0, len(matches), _MAX_PAINTED):
            lines = [match.text_bytes for match in matches[start : start + _MAX_PAINTED]]
            for number, spans in find_spans(program(), query.pattern, lines).items():
                found[start + number] = spans
    except FanoutError:
        if needed:
            raise
        return {}
    return found


def tell(found: Grep, options: Mapping[str, Any]) -> None:
    """Say on standard error what is no line of the result."""
    from fanout.cli.render import name, safe

    for text in _remarks(found, options, name):
        print(f"fanout: {safe(text)}", file=sys.stderr)


def _remarks(found: Grep, options: Mapping[str, Any], name: Callable[[str], str]) -> Iterator[str]:
    for file in found.binary_files:
        yield f"{name(file)}: binary file matches"
    if found.binary_count > len(found.binary_files):
        yield f"and {found.binary_count - len(found.binary_files):,} more binary files match"
    cut = sum(match.truncated for match in found.matches)
    if cut:
        line_bytes = options["max_line_bytes"]
        yield f"{cut:,} of the lines were cut to {line_bytes:,} bytes (-M {16 * line_bytes} shows more)"
    if found.stopped_reason == "max_results":
        more = 10 * options["max_results"]
        yield f"stopped after {len(found.matches):,} results: there are more (-n {more} shows them)"
    elif found.stopped_reason == "deadline":
        yield f"stopped after {options['max_duration_s']:g} s: there may be more (--timeout for longer)"
    elif found.stopped_reason == "incomplete":
        yield f"not everything could be searched: {'; '.join(found.problems)[:500]}"
