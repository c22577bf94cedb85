"""What ripgrep itself says of a directory, for comparison with a search of the disk it was downloaded from.

    rg --no-config --no-ignore --hidden --text

is what a search is to find; files that hold a NUL byte (once decoded, where a byte order mark says how) are only named.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fanout.run.ripgrep import program

__all__ = ["Said", "decoded", "ripgrep"]

_OPTIONS = ("--no-config", "--no-ignore", "--hidden", "--text", "--color=never", "--with-filename", "--null", "-j1")


class Said(NamedTuple):
    """Lines as (path, number, bytes) in byte order of paths, and the names of the binary files that match."""

    lines: list[tuple[bytes, int, bytes]]
    counts: dict[bytes, int]
    binary: list[bytes]


def decoded(data: bytes) -> bytes:
    """Return a file's bytes as ripgrep searches them."""
    if data.startswith(b"\xef\xbb\xbf"):
        return data[3:]
    for mark, name in ((b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be")):
        if data.startswith(mark):
            return data[2:].decode(name, "replace").encode()
    return data


def ripgrep(top: Path, pattern: str, options: Sequence[str] = (), directory: str = "") -> Said:
    """Run ripgrep over a directory below `top`, from `top`; `AssertionError` with what it says if it fails."""
    words = [program().path, *_OPTIONS, "--line-number", "--no-heading", *options, "-e", pattern, "--"]
    done = subprocess.run([*words, f"./{directory}"], cwd=top, capture_output=True, check=False)
    assert done.returncode in (0, 1), done.stderr.decode(errors="replace")
    lines: list[tuple[bytes, int, bytes]] = []
    rest = done.stdout
    while rest:
        path, _, rest = rest.partition(b"\0")
        number, _, rest = rest.partition(b":")
        text, _, rest = rest.partition(b"\n")
        lines.append((path.removeprefix(b"./"), int(number), text))
    nul = {path: b"\0" in decoded((top / os.fsdecode(path)).read_bytes()) for path, _, _ in lines}
    counts: dict[bytes, int] = {}
    for path, _, _ in lines:
        if not nul[path]:
            counts[path] = counts.get(path, 0) + 1
    kept = sorted(line for line in lines if not nul[line[0]])
    return Said(kept, counts, sorted(path for path, held in nul.items() if held))
