"""What ripgrep itself says of a directory, for comparison with a search of a disk that holds the same.

    rg --no-config --no-ignore --hidden --text

is what a search is to find; files that hold a NUL byte (once decoded, where a byte order mark says how) are only named.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fanout.run.ripgrep import program

__all__ = ["Counted", "GaveUp", "Line", "Refused", "Said", "count", "decoded", "flags", "lines_of", "ripgrep"]

_OPTIONS = ("--no-config", "--no-ignore", "--hidden", "--text", "--color=never", "--with-filename", "--null", "-j2")
#: How many bytes of names one run is given: the arguments of a program are bounded.
_NAMES_BYTES = 500_000
#: Some patterns take a time that grows with the square of a line's length, and lines can have millions of bytes.
_LONGEST_S = 120.0

Line = tuple[bytes, int, bytes]


class Said(NamedTuple):
    """Lines as (path, number, bytes) in byte order of paths, and the names of the binary files that match."""

    lines: list[Line]
    counts: dict[bytes, int]
    binary: list[bytes]


class Counted(NamedTuple):
    """How many lines match in each text file, in byte order of paths, and the names of the binary files that match."""

    counts: list[tuple[bytes, int]]
    binary: list[bytes]


class Refused(Exception):
    """ripgrep does not take a pattern."""


class GaveUp(Exception):
    """PCRE2 met a limit of its own on some line, or it took too long: there is no answer to compare with."""


def decoded(data: bytes) -> bytes:
    """Return a file's bytes as ripgrep searches them."""
    if data.startswith(b"\xef\xbb\xbf"):
        return data[3:]
    for mark, name in ((b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be")):
        if data.startswith(mark):  # the decoder takes a second one for the mark again
            return data[2:].removeprefix(mark).decode(name, "replace").encode()
    return data


def flags(syntax: str, given: Mapping[str, Any]) -> list[str]:
    """Return ripgrep's options for those of `Disk.grep`; what is not given is as there."""
    # PCRE2 looks beyond the end of a file that ends within a character. What it finds there is memory that is left
    # from another file, unless the file is mapped.
    words = {"rust": [], "pcre2": ["-P", "--mmap"], "fixed": ["-F"]}[syntax]
    words += ["-i"] if given.get("ignore_case") else []
    words += ["-w"] if given.get("word") else []
    words += [] if given.get("recursive", True) else ["--max-depth=1"]
    for glob in given.get("include", ()):
        words += ["-g", glob]
    for glob in given.get("exclude", ()):
        words += ["-g", "!" + glob]
    return words


def ripgrep(top: Path, pattern: str, options: Sequence[str] = (), directory: str = "") -> Said:
    """Run ripgrep over a directory below `top`, from `top`; `AssertionError` with what it says if it fails."""
    found = list(_lines(_run(top, pattern, ["--line-number", "--no-heading", *options], [f"./{directory}"])))
    nul = {path: _has_nul(top, path) for path, _, _ in found}
    counts: dict[bytes, int] = {}
    for path, _, _ in found:
        if not nul[path]:
            counts[path] = counts.get(path, 0) + 1
    kept = sorted(line for line in found if not nul[line[0]])
    return Said(kept, counts, sorted(path for path, held in nul.items() if held))


def count(top: Path, pattern: str, options: Sequence[str], directory: str, held: dict[bytes, bool]) -> Counted:
    """Have ripgrep count. `held`, of one state of the tree, remembers which files hold a NUL byte."""
    said = _run(top, pattern, ["--count", *options], [f"./{directory}"])
    text: list[tuple[bytes, int]] = []
    binary: list[bytes] = []
    at = 0
    while at < len(said):
        name_end = said.index(b"\0", at)
        line_end = said.index(b"\n", name_end)
        path, number = said[at:name_end].removeprefix(b"./"), int(said[name_end + 1 : line_end])
        at = line_end + 1
        if path not in held:
            held[path] = _has_nul(top, path)
        if held[path]:
            binary.append(path)
        else:
            text.append((path, number))
    return Counted(sorted(text), sorted(binary))


def lines_of(top: Path, pattern: str, options: Sequence[str], paths: Sequence[bytes]) -> Iterator[Line]:
    """Yield the lines that match in these files, in byte order of paths. The files are in that order already."""
    start = 0
    while start < len(paths):
        end, size = start, 0
        while end < len(paths) and size < _NAMES_BYTES:
            size += len(paths[end])
            end += 1
        names = [os.fsdecode(b"./" + path) for path in paths[start:end]]
        yield from sorted(_lines(_run(top, pattern, ["--line-number", "--no-heading", *options], names)))
        start = end


def _lines(said: bytes) -> Iterator[Line]:
    at = 0
    while at < len(said):
        name_end = said.index(b"\0", at)
        number_end = said.index(b":", name_end)
        line_end = said.find(b"\n", number_end)
        line_end = len(said) if line_end < 0 else line_end
        yield (
            said[at:name_end].removeprefix(b"./"),
            int(said[name_end + 1 : number_end]),
            said[number_end + 1 : line_end],
        )
        at = line_end + 1


def _run(top: Path, pattern: str, options: Sequence[str], names: Sequence[str]) -> bytes:
    words = [program().path, *_OPTIONS, *options, "-e", pattern, "--", *names]
    try:
        done = subprocess.run(words, cwd=top, capture_output=True, check=False, timeout=_LONGEST_S)
    except subprocess.TimeoutExpired as error:
        raise GaveUp(f"{pattern!r} takes ripgrep longer than {_LONGEST_S:g} s") from error
    message = done.stderr.decode(errors="replace")
    if "match limit exceeded" in message:
        raise GaveUp(message)
    if done.returncode == 2 and not done.stdout and "No such file" not in message:
        raise Refused(message)
    assert done.returncode in (0, 1), message
    return done.stdout


def _has_nul(top: Path, path: bytes) -> bool:
    return b"\0" in decoded((top / os.fsdecode(path)).read_bytes())
