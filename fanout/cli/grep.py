"""`fanout grep`: searching a disk, shown as ripgrep shows it.

Owns what a result looks like on a terminal and in a pipe. Finds nothing itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from fanout.cli.app import disk_argument, json_option, run_async, session

if TYPE_CHECKING:
    from fanout.model import Grep, GrepMatch

__all__ = ["grep"]

#: What ripgrep paints paths, line numbers and matches with.
_PATH, _NUMBER, _MATCH = "\x1b[35m", "\x1b[32m", "\x1b[1m\x1b[31m"
_PLAIN = "\x1b[0m"
#: Beyond so many lines the matches in them are not looked up again to be painted.
_MAX_PAINTED = 20_000


@click.command(short_help="Search the files of a disk.")
@disk_argument
@click.argument("pattern", metavar="PATTERN")
@click.argument("directory", metavar="[DIR]", default="/")
@click.option("-n", "--max", "max_results", metavar="MAX", type=int, default=1000, help="Stop after so many (1000).")
@click.option("-i", "--ignore-case", is_flag=True, help="Letters match in either case.")
@click.option("-w", "--word", is_flag=True, help="Only whole words match.")
@click.option("-F", "fixed", is_flag=True, help="PATTERN is a plain string.")
@click.option("-E", "ere", is_flag=True, help="PATTERN is a POSIX extended regular expression, as for grep -E.")
@click.option("-P", "pcre2", is_flag=True, help="PATTERN is a PCRE2 expression (look-around, back references).")
@click.option("-A", "after", metavar="NUM", type=int, default=None, help="Show so many lines after a match.")
@click.option("-B", "before", metavar="NUM", type=int, default=None, help="Show so many lines before a match.")
@click.option("-C", "context_lines", metavar="NUM", type=int, default=0, help="Show so many lines around a match.")
@click.option("-l", "files", is_flag=True, help="Print only the names of files that match.")
@click.option("-c", "counts", is_flag=True, help="Print how many lines match in each file.")
@click.option("-g", "globs", metavar="GLOB", multiple=True, help="Only these files; with ! in front, not these.")
@click.option("--at", metavar="AT", help="A checkpoint, branch or commit number to search instead of the newest.")
@click.option("--no-recursive", is_flag=True, help="Only the files of DIR itself.")
@click.option("--no-binary", is_flag=True, help="Leave binary files out; else those that match are named.")
@click.option("--timeout", metavar="SECONDS", type=float, default=30.0, help="Stop after so long (30).")
@click.option("-j", "concurrency", metavar="NUM", type=int, default=None, help="Search with so many processes.")
@click.option("--color", type=click.Choice(["auto", "always", "never"]), default="auto", help="When to use colours.")
@json_option
@click.pass_context
def grep(context: click.Context, /, spec: str, pattern: str, directory: str, as_json: bool, **given: Any) -> int:
    """Search the files below DIR of DISK for lines that match PATTERN (ripgrep's syntax).

    On a terminal matches are shown under the name of their file, in a pipe as file:line:text. Hidden and ignored files
    are searched, too. Exit code 0: something matches; 1: nothing does.
    """
    options = _options(directory, given)

    async def work() -> int:
        async with session(context) as fo:
            disk = await fo.disks.get(spec)
            found = await disk.grep(pattern, **options)
        if as_json:
            from fanout.cli.render import json_document

            json_document(found.model_dump(mode="json"))
        else:
            painted = given["color"] == "always" or (given["color"] == "auto" and sys.stdout.isatty())
            _show(found, pattern, options, terminal=sys.stdout.isatty(), painted=painted)
        _tell(found, options)
        return 0 if found.matches or found.binary_files else 1

    return run_async(work)


def _options(directory: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the command line's options into those of `Disk.grep`."""
    from fanout.errors import Invalid

    syntaxes = [name for name in ("fixed", "ere", "pcre2") if given[name]]
    if len(syntaxes) > 1:
        raise Invalid("-F, -E and -P exclude each other: PATTERN has one syntax")
    if given["files"] and given["counts"]:
        raise Invalid("-l and -c exclude each other: names or counts")
    at = given["at"]
    around = given["context_lines"]
    return {
        "directory": directory if directory.startswith("/") else "/" + directory.removeprefix("./"),
        "recursive": not given["no_recursive"],
        "syntax": syntaxes[0] if syntaxes else "rust",
        "ignore_case": given["ignore_case"],
        "word": given["word"],
        "include": tuple(glob for glob in given["globs"] if not glob.startswith("!")),
        "exclude": tuple(glob[1:] for glob in given["globs"] if glob.startswith("!")),
        "at": int(at) if at is not None and at.isascii() and at.isdigit() else at,
        "before": around if given["before"] is None else given["before"],
        "after": around if given["after"] is None else given["after"],
        "output": "files" if given["files"] else "count" if given["counts"] else "lines",
        "binary": not given["no_binary"],
        "max_results": given["max_results"],
        "max_duration_s": given["timeout"],
        "concurrency": given["concurrency"],
    }


def _show(found: Grep, pattern: str, options: Mapping[str, Any], *, terminal: bool, painted: bool) -> None:
    out = _Out(terminal, painted)
    if options["output"] != "lines":
        for match in found.matches:
            lines = "" if match.count is None else f":{match.count}"
            out.line(out.path(match.file), lines)
        return
    spans = _spans(found.matches, pattern, options) if painted else {}
    with_context = bool(options["before"] or options["after"])
    at = ""
    last = 0  # the last line of this file that was shown
    for place, match in enumerate(found.matches):
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

    def __init__(self, terminal: bool, painted: bool) -> None:
        self._terminal = terminal
        self._painted = painted

    def line(self, *parts: str) -> None:
        if self._terminal:
            print("".join(parts))
        else:
            sys.stdout.flush()
            sys.stdout.buffer.write(os.fsencode("".join(parts)) + b"\n")

    def path(self, file: str) -> str:
        from fanout.cli.render import name

        return self._paint(_PATH, name(file) if self._terminal else file)

    def heading(self, file: str) -> None:
        if self._terminal:
            self.line(self.path(file))

    def between_files(self, with_context: bool) -> None:
        if self._terminal:
            self.line("")
        elif with_context:
            self.line("--")

    def match(self, match: GrepMatch, spans: Sequence[tuple[int, int]]) -> None:
        self._row(match.file, match.line, ":", self._text(match.text_bytes, spans), " […]" if match.truncated else "")

    def context(self, file: str, number: int, text: str) -> None:
        self._row(file, number, "-", self._text(text.encode("utf-8", "surrogateescape"), ()), "")

    def _row(self, file: str, number: int, mark: str, text: str, end: str) -> None:
        before = "" if self._terminal else self.path(file) + mark
        self.line(before, self._paint(_NUMBER, str(number)), mark, text, end if self._terminal else "")

    def _text(self, line: bytes, spans: Sequence[tuple[int, int]]) -> str:
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
        return f"{colour}{text}{_PLAIN}" if self._painted and text else text


def _spans(matches: Sequence[GrepMatch], pattern: str, options: Mapping[str, Any]) -> dict[int, list[tuple[int, int]]]:
    """Return where the matches are in the lines, by asking ripgrep for these lines alone; nothing where it is not."""
    from fanout.errors import FanoutError
    from fanout.run.grep_query import check_query
    from fanout.run.ripgrep import find_spans, program

    if len(matches) > _MAX_PAINTED:
        return {}
    try:
        query = check_query(pattern, **{"max_line_bytes": 4096, **options})
        found = find_spans(program(), query.pattern, [match.text_bytes for match in matches])
    except FanoutError:
        return {}
    return found


def _tell(found: Grep, options: Mapping[str, Any]) -> None:
    """Say on standard error what is no line of the result."""
    from fanout.cli.render import name, safe

    for text in _remarks(found, options, name):
        print(f"fanout: {safe(text)}", file=sys.stderr)


def _remarks(found: Grep, options: Mapping[str, Any], name: Callable[[str], str]) -> Iterator[str]:
    for file in found.binary_files:
        yield f"{name(file)}: binary file matches"
    if found.binary_count > len(found.binary_files):
        yield f"and {found.binary_count - len(found.binary_files):,} more binary files match"
    if found.stopped_reason == "max_results":
        more = 10 * options["max_results"]
        yield f"stopped after {len(found.matches):,} results: there are more (-n {more} shows them)"
    elif found.stopped_reason == "deadline":
        yield f"stopped after {options['max_duration_s']:g} s: there may be more (--timeout for longer)"
    elif found.stopped_reason == "incomplete":
        yield f"not everything could be searched: {'; '.join(found.problems)[:500]}"
