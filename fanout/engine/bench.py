"""What the conformance suite of engines is made with: running commands on an engine, and judging what came of it.

Owns the bench and the ways to fail. Knows no engine: it is given one.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from fanout.engine.base import Engine, Exit, Limits, Mount, Spec
from fanout.errors import Invalid
from fanout.runtime import Runtime, system

__all__ = ["Bench", "CheckFailed", "Outcome", "completed", "fail", "refused", "same"]


class CheckFailed(AssertionError):
    """An engine does not do what it must."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command did: how it ended and all it wrote."""

    exit: Exit
    stdout: bytes
    stderr: bytes


class Bench:
    """Runs commands on an engine, with directories for their mounts below `scratch`."""

    def __init__(self, engine: Engine, scratch: Path, runtime: Runtime = system) -> None:
        self.engine = engine
        self.scratch = scratch
        self.runtime = runtime
        self._numbers = itertools.count()
        self._sleeps = itertools.count(100_000 + os.getpid() % 100_000)

    def run(self, command: str | Sequence[str | bytes], *mounts: Mount, **settings: Any) -> Outcome:
        """Run a shell script, or an argv, to its end. `settings` are those of `Spec`."""
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else command
        streams: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        settings.setdefault("limits", Limits(timeout_s=60))
        process = self.engine.start(Spec(argv, mounts, **settings))
        ended = process.wait(lambda stream, chunk: streams[stream].append(chunk))
        return Outcome(ended, b"".join(streams["stdout"]), b"".join(streams["stderr"]))

    def directory(self, files: Mapping[str, str] | None = None) -> Path:
        """Make a fresh directory that holds `files`."""
        top = self.scratch / f"d{next(self._numbers)}"
        top.mkdir()
        for name, text in (files or {}).items():
            (top / name).parent.mkdir(parents=True, exist_ok=True)
            (top / name).write_text(text)
        return top

    def writable(self, *lowers: Path, target: str = "/mnt/work") -> Mount:
        """Return a mount with a fresh upper layer."""
        top = self.directory()
        (top / "upper").mkdir()
        (top / "work").mkdir()
        return Mount(target, tuple(map(str, lowers)), str(top / "upper"), str(top / "work"))

    def sleep_word(self) -> str:
        """Return a number of seconds, very long, that no other process on this host sleeps for."""
        return f"7{next(self._sleeps)}"

    def gone(self, word: str) -> None:
        """Fail if a process of this host has `word` among its arguments."""
        for entry in Path("/proc").iterdir():
            try:
                if word.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                    fail(f"process {entry.name} of a command is still alive after it was waited for")
            except OSError:
                continue


def fail(message: str) -> NoReturn:
    """Fail the check."""
    raise CheckFailed(message)


def same(found: object, wanted: object, what: str) -> None:
    """Fail unless both are equal."""
    if found != wanted:
        shown, expected = repr(found)[:300], repr(wanted)[:300]
        fail(f"{what}: {shown}, not {expected}")


def completed(outcome: Outcome, code: int = 0) -> Outcome:
    """Fail unless the command completed with this exit code."""
    said = outcome.stderr[-300:].decode(errors="replace")
    same((outcome.exit.status, outcome.exit.exit_code), ("completed", code), f"end of the command ({said!r})")
    return outcome


def refused(
    bench: Bench, name: str, *mounts: Mount, command: Sequence[str | bytes] = ("/bin/true",), **settings: Any
) -> None:
    """Fail unless the command is refused with `Invalid` that holds `name`, and nothing of it was run."""
    try:
        bench.run(command, *mounts, **settings)
    except Invalid as error:
        if name not in str(error):
            fail(f"the refusal does not name {name!r}: {error}")
    else:
        fail(f"{name!r} was not refused")
