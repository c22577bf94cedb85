"""`fanout grep`: a ripgrep user's command line, turned into searches of a disk.

Owns the options and what they mean together. Finds nothing itself; what a result looks like is grep_show.py's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from fanout.cli.app import disk_argument, json_option, run_async, session

if TYPE_CHECKING:
    from fanout.api import Disk
    from fanout.model import Grep

__all__ = ["grep"]

#: What a backslash stands before, which is no letter that is looked for.
_ESCAPES = re.compile(r"\\(?:[pPxuU]\{[^}]*\}|.)", re.DOTALL)


def _most(context: click.Context, parameter: click.Parameter, value: str) -> int:
    """Read the value of -n, which for grep and ripgrep has none."""
    try:
        return int(value)
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is no number: it says how many results to stop after; lines are numbered without it"
        ) from None


def _quietly(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """An option that ripgrep needs for what is so in any case."""
    return click.option(*names, is_flag=True, hidden=True, expose_value=False)


@click.command(short_help="Search the files of a disk.")
@disk_argument
@click.argument("words", metavar="PATTERN [PATH]...", nargs=-1)
@click.option(
    "-n", "--max", "max_results", metavar="MAX", callback=_most, default="1000", help="Stop after so many (1000)."
)
@click.option("-e", "--regexp", "patterns", metavar="PATTERN", multiple=True, help="A pattern; several match either.")
@click.option("-i", "--ignore-case", "case", flag_value="ignore", help="Letters match in either case.")
@click.option("-s", "--case-sensitive", "case", flag_value="sensitive", help="They do not (the default).")
@click.option("-S", "--smart-case", "case", flag_value="smart", help="They do if PATTERN has no capital letter.")
@click.option("-w", "--word", "--word-regexp", "word", is_flag=True, help="Only whole words match.")
@click.option("-x", "--line-regexp", "whole_line", is_flag=True, help="Only whole lines match.")
@click.option("-F", "--fixed-strings", "fixed", is_flag=True, help="PATTERN is a plain string.")
@click.option("-E", "--ere", is_flag=True, help="PATTERN is a POSIX extended regular expression, as for grep -E.")
@click.option("-P", "--pcre2", is_flag=True, help="PATTERN is a PCRE2 expression (look-around, back references).")
@click.option("-A", "--after-context", "after", metavar="NUM", type=int, help="Show so many lines after a match.")
@click.option("-B", "--before-context", "before", metavar="NUM", type=int, help="Show so many lines before a match.")
@click.option(
    "-C", "--context", "around", metavar="NUM", type=int, default=0, help="Show so many lines around a match."
)
@click.option("-o", "--only-matching", "only", is_flag=True, help="Show only what matches of a line, each by itself.")
@click.option("-l", "--files-with-matches", "files", is_flag=True, help="Print only the names of files that match.")
@click.option("-c", "--count", "counts", is_flag=True, help="Print how many lines match in each file.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing: the exit code tells.")
@click.option(
    "-g", "--glob", "globs", metavar="GLOB", multiple=True, help="Only these files; with ! in front, not these."
)
@click.option("--at", metavar="AT", help="A checkpoint, branch or commit number to search instead of the newest.")
@click.option("--no-recursive", is_flag=True, help="Only the files of PATH itself.")
@click.option("--no-binary", is_flag=True, help="Leave binary files out; else those that match are named.")
@click.option("--timeout", metavar="SECONDS", type=float, default=30.0, help="Stop after so long (30).")
@click.option("-j", "--threads", "concurrency", metavar="NUM", type=int, help="Search with so many processes.")
@click.option(
    "-M",
    "--max-columns",
    "line_bytes",
    metavar="NUM",
    type=int,
    default=4096,
    help="Cut lines to so many bytes (4096).",
)
@click.option("-H/-I", "--with-filename/--no-filename", "named", default=None, help="Print names of files, or not.")
@click.option(
    "--line-number/--no-line-number", " /-N", "numbered", default=True, help="Print numbers of lines, or not."
)
@click.option("--heading/--no-heading", default=None, help="Names above their lines, or in front of each (in a pipe).")
@click.option("-0", "--null", is_flag=True, help="End names with NUL.")
@click.option("--color", type=click.Choice(["auto", "always", "never"]), default="auto", help="When to use colours.")
@click.option("-p", "--pretty", is_flag=True, help="Colours and headings in a pipe, too.")
@_quietly("-u", "--unrestricted")
@_quietly("-.", "--hidden")
@_quietly("--no-ignore")
@_quietly("--no-config")
@json_option
@click.pass_context
def grep(context: click.Context, /, spec: str, words: Sequence[str], as_json: bool, **given: Any) -> int:
    """Search the files of DISK (below PATH) for lines that match PATTERN, in ripgrep's syntax.

    On a terminal matches are shown under the name of their file, in a pipe as file:line:text. Hidden and ignored files
    are searched, too. Exit code 0: something matches; 1: nothing does; 65: nothing was found, but not all was searched.
    """
    patterns = tuple(given["patterns"])
    if not patterns:
        if not words:
            raise click.UsageError("Missing argument 'PATTERN'.")
        patterns, words = (words[0],), words[1:]
    pattern, options = _options(patterns, given)

    async def work() -> int:
        async with session(context) as fo:
            disk = await fo.disks.get(spec)
            found, of_file = await _search(disk, pattern, list(words) or ["/"], options)
        if as_json:
            from fanout.cli.render import json_document

            json_document(found.model_dump(mode="json"))
        elif not given["quiet"]:
            from fanout.cli.grep_show import show

            show(found, pattern, options, given, of_file=of_file)
        if not given["quiet"]:
            from fanout.cli.grep_show import tell

            tell(found, options)
        return _exit_code(found)

    return run_async(work)


def _exit_code(found: Grep) -> int:
    """Return 0 for a match, 1 for none; that nothing was found in part of the tree is neither."""
    from fanout.errors import TABLE

    if found.matches or found.binary_files:
        return 0
    return 1 if found.stopped_reason == "completed" else TABLE["limit"].exit


async def _search(disk: Disk, pattern: str, paths: Sequence[str], options: dict[str, Any]) -> tuple[Grep, bool]:
    """Search each of the paths, one after the other, and return what all found, and whether it was a single file."""
    from fanout.runtime import system

    until_s = system.monotonic() + options["max_duration_s"]
    all_found: list[Grep] = []
    of_file = False
    left = options["max_results"]
    for path in paths:
        # A path after the last result that is shown is only asked whether there is more.
        bounds = {"max_results": max(left, 1), "max_duration_s": max(until_s - system.monotonic(), 0.001)}
        found, of_file = await _search_path(disk, pattern, path, {**options, **(bounds if all_found else {})})
        if left <= 0 and found.matches:
            found = found.model_copy(update={"matches": (), "stopped_reason": "max_results"})
        all_found.append(found)
        left -= len(found.matches)
        if found.stopped_reason in ("max_results", "deadline"):
            break
    return _joined(all_found), of_file and len(paths) == 1


async def _search_path(disk: Disk, pattern: str, path: str, options: dict[str, Any]) -> tuple[Grep, bool]:
    """Search below a directory, or one file, whatever the globs say of it; the second value tells which."""
    from fanout.errors import Invalid

    place = "/" + path.removeprefix("./").strip("/") if path != "." else "/"
    try:
        return await disk.grep(pattern, **options, directory=place), False
    except Invalid:
        entry = await disk.stat(place) if place != "/" and ".." not in place.split("/") else None
        if entry is None or entry.kind != "file":
            raise
    alone = {"recursive": False, "include": (re.sub(r"([\\*?\[\]{}!,])", r"\\\1", place),), "exclude": ()}
    return await disk.grep(pattern, **options | alone, directory=place.rpartition("/")[0] or "/"), True


def _joined(found: Sequence[Grep]) -> Grep:
    """Return results of searches as one."""
    if len(found) == 1:
        return found[0]
    binary = [name for each in found for name in each.binary_files]
    stopped = [each.stopped_reason for each in found if each.stopped_reason != "completed"]
    return found[0].model_copy(
        update={
            "matches": tuple(match for each in found for match in each.matches),
            "stopped_reason": stopped[-1] if stopped else "completed",
            "files_scanned": sum(each.files_scanned for each in found),
            "bytes_scanned": sum(each.bytes_scanned for each in found),
            "duration_ms": sum(each.duration_ms for each in found),
            "binary_files": tuple(binary),
            "binary_count": sum(each.binary_count for each in found),
            "shards": tuple(shard for each in found for shard in each.shards),
            "problems": tuple(problem for each in found for problem in each.problems),
        }
    )


def _options(patterns: Sequence[str], given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Turn the command line into a pattern and the options of `Disk.grep`."""
    from fanout.errors import Invalid

    syntaxes = [name for name in ("fixed", "ere", "pcre2") if given[name]]
    if len(syntaxes) > 1:
        raise Invalid("-F, -E and -P exclude each other: PATTERN has one syntax")
    if given["files"] and given["counts"]:
        raise Invalid("-l and -c exclude each other: names or counts")
    pattern, syntax = _one_pattern(patterns, syntaxes[0] if syntaxes else "rust", whole_line=given["whole_line"])
    at = given["at"]
    around = given["around"]
    return pattern, {
        "recursive": not given["no_recursive"],
        "syntax": syntax,
        "ignore_case": given["case"] == "ignore" or (given["case"] == "smart" and not any(map(_has_capital, patterns))),
        "word": given["word"],
        "include": tuple(glob for glob in given["globs"] if not glob.startswith("!")),
        "exclude": tuple(glob[1:] for glob in given["globs"] if glob.startswith("!")),
        "at": int(at) if at is not None and at.isascii() and at.isdigit() else at,
        "before": 0 if given["only"] else around if given["before"] is None else given["before"],
        "after": 0 if given["only"] else around if given["after"] is None else given["after"],
        "output": "files" if given["files"] or given["quiet"] else "count" if given["counts"] else "lines",
        "binary": not given["no_binary"],
        "max_results": 1 if given["quiet"] else given["max_results"],
        "max_line_bytes": given["line_bytes"],
        "max_duration_s": given["timeout"],
        "concurrency": given["concurrency"],
    }


def _one_pattern(patterns: Sequence[str], syntax: str, *, whole_line: bool) -> tuple[str, str]:
    """Return a pattern, and its syntax, that matches what any of the patterns matches."""
    if len(patterns) == 1 and not whole_line:
        return patterns[0], syntax
    if syntax == "fixed":
        patterns, syntax = [_escaped(pattern) for pattern in patterns], "rust"
    group = "(%s)" if syntax == "ere" else "(?:%s)"
    joined = "|".join(group % pattern for pattern in patterns)
    return f"^{group % joined}$" if whole_line else joined, syntax


def _escaped(text: str) -> str:
    """Return an expression that matches exactly this text."""
    return "".join(
        rf"\x{ord(char):02x}" if char.isascii() and not char.isalnum() and char != "_" else char for char in text
    )


def _has_capital(pattern: str) -> bool:
    return any(char.isupper() for char in _ESCAPES.sub("", pattern))
