"""The file trees that benchmarks work on, and disks filled with them.

Owns their shape: names, sizes and contents that look like a source tree's. Made from a fixed seed.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio.to_thread

import fanout
from fanout.disk.merge import Intent, Policy
from fanout.format.tree import FILE, Node, directory
from fanout.local_disk import LocalDisk

__all__ = ["base_of", "connected", "filled", "make_tree", "remove", "words"]

_FILES_PER_DIRECTORY = 100
_MTIME_NS = 1_700_000_000 * 10**9
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
            source.choice(_WORDS) if source.random() < 0.85 else f"{source.getrandbits(24):x}" for _ in range(8)
        )
        parts.append(line)
        have += len(line) + 1
    return ("\n".join(parts) + "\n").encode()[:size]


def make_tree(top: Path, files: int, size: int) -> Path:
    """Write `files` text files of about `size` bytes below `top`, 100 in a directory; returns `top`."""
    top.mkdir(parents=True)
    for path, data in _contents(files, size):
        place = top / os.fsdecode(path)
        if data is None:
            place.mkdir()
        else:
            place.write_bytes(data)
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


async def filled(
    fo: fanout.Fanout, files: int, size: int, name: str = "ws", first: Mapping[str, bytes] | None = None
) -> fanout.Disk:
    """Make a disk that holds what `make_tree` would write, in one commit, after the objects `first`.

    Without writing the tree first: ext4 gives no inode away again for minutes after it was freed, and looking past
    thousands of such costs whatever makes a file next, ourselves and our peers.
    """
    disk = await fo.disks.create(name)
    for key, data in (first or {}).items():
        await disk.put_object(key, data)
    if files:
        assert isinstance(disk, LocalDisk)
        await anyio.to_thread.run_sync(_fill, disk, files, size)
    return disk


def _fill(disk: LocalDisk, files: int, size: int) -> None:
    packer = disk.core.packer()
    intents = []
    for path, data in _contents(files, size):
        if data is None:
            intents.append(Intent(path, None, directory(0o755, _MTIME_NS)))
        else:
            node = Node(FILE, 0o644, _MTIME_NS, len(data), (packer.add(data, text=True),))
            intents.append(Intent(path, None, node))
    packed = packer.finish()
    disk.core.apply(disk.point, intents, policy=Policy.LAST_WINS, blobs=dict(packed.blobs), message="a tree")


def _contents(files: int, size: int) -> Iterator[tuple[bytes, bytes | None]]:
    """Yield (path, bytes) for files and (path, None) for directories, parents first."""
    # Lines are drawn anew for each file: files that were near copies of one another would flatter whoever compresses
    # across files, and no project looks like that.
    lines = words(2 << 20, 1).splitlines(keepends=True)
    source = random.Random(2)
    for number in range(files):
        parent = b"d%04d" % (number // _FILES_PER_DIRECTORY)
        if number % _FILES_PER_DIRECTORY == 0:
            yield parent, None
        text = b"# file %d\n" % number
        while len(text) < size:
            text += b"".join(source.choices(lines, k=1 + (size - len(text)) // 40))
        yield parent + b"/f%06d.txt" % number, text[:size]


def base_of(place: Path) -> Path:
    """Return the materialised tree in the cache below `place`: what a peer mounts as its lower layer."""
    found = sorted((place / "cache" / "base").glob("*/tree"), key=lambda path: path.stat().st_ctime_ns)
    if not found:
        raise RuntimeError("nothing was materialised yet")
    return found[-1]
