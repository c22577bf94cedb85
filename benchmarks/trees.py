"""The file trees that benchmarks work on, and disks filled with them.

Owns their shape: names, sizes and contents that look like a source tree's. Made from a fixed seed.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import fanout

__all__ = ["base_of", "connected", "filled", "make_tree", "remove", "words"]

_FILES_PER_DIRECTORY = 100
_WORDS = (
    *("return", "import", "self", "value", "const", "function", "if", "else", "for", "in", "class", "def", "async"),
    *("await", "None", "True", "error", "result", "path", "name", "index", "length", "string", "number", "object"),
)


def words(size: int, seed: int) -> bytes:
    """Return `size` bytes of text that compresses about as source code does (to a third or a quarter)."""
    source = random.Random(seed)
    parts: list[str] = []
    have = 0
    while have < size:
        indent = " " * source.choice((0, 4, 8))
        line = indent + " ".join(
            source.choice(_WORDS) if source.random() < 0.7 else f"{source.getrandbits(40):x}" for _ in range(8)
        )
        parts.append(line)
        have += len(line) + 1
    return ("\n".join(parts) + "\n").encode()[:size]


def make_tree(top: Path, files: int, size: int) -> Path:
    """Write `files` text files of about `size` bytes below `top`, 100 in a directory; returns `top`."""
    blocks = [words(size, seed) for seed in range(16)]
    for number in range(files):
        directory = top / f"d{number // _FILES_PER_DIRECTORY:04}"
        if number % _FILES_PER_DIRECTORY == 0:
            directory.mkdir(parents=True)
        head = b"# file %d\n" % number
        block = blocks[number % len(blocks)]
        (directory / f"f{number:06}.txt").write_bytes((head + block)[:size])
    return top


def remove(top: Path) -> None:
    """Remove a directory; what overlayfs leaves in work directories may be without any permission."""
    shutil.rmtree(top, ignore_errors=True)


@asynccontextmanager
async def connected(place: Path, **settings: Any) -> AsyncIterator[fanout.Fanout]:
    """Open an embedded connection that keeps everything below `place`, on a local store unless told otherwise."""
    settings.setdefault("store", f"file://{place}/store")
    async with fanout.connect(cache_dir=place / "cache", **settings) as fo:
        yield fo


async def filled(fo: fanout.Fanout, place: Path, files: int, size: int, name: str = "ws") -> fanout.Disk:
    """Make a disk that holds a tree of `files` files.

    The tree itself stays in `place` to the end: ext4 gives no inode away again for a minute or more after it was
    freed, and looking past thousands of such costs whatever makes a file next, ourselves and our peers.
    """
    disk = await fo.disks.create(name)
    if files:
        await disk.upload(make_tree(place / f"tree-{name}", files, size), "/")
    return disk


def base_of(place: Path) -> Path:
    """Return the materialised tree in the cache below `place`: what a peer mounts as its lower layer."""
    found = sorted((place / "cache" / "base").glob("*/tree"), key=lambda path: path.stat().st_ctime_ns)
    if not found:
        raise RuntimeError("nothing was materialised yet")
    return found[-1]
