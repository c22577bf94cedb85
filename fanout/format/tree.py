"""Nodes, pages and snaps: what a file tree looks like when it is stored.

Owns the values and their encoding, and the pure functions that split and search sorted pages. A tree is a
sorted map from path to node. Paths are raw bytes without a leading slash; the root directory is b"".
Byte order of whole paths is the order everywhere, as in S3 listings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import msgspec

from fanout.format import envelope
from fanout.format.lock import Lock

__all__ = [
    "DIR",
    "FILE",
    "HOLE",
    "SYMLINK",
    "Node",
    "PageRef",
    "Ref",
    "Snap",
    "content_hash",
    "decode_page",
    "decode_snap",
    "directory",
    "encode_page",
    "encode_snap",
    "page_index",
    "parents",
    "root_id",
    "same_content",
    "same_node",
    "split_pages",
    "subtree_end",
]

DIR, FILE, SYMLINK = 0, 1, 2
#: The pack id of a hole: `raw` zero bytes that are stored nowhere.
HOLE = b""


class Ref(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where one run of a file's bytes is stored: a frame of a pack.

    `stored` == `raw` means the frame is the bytes themselves, else it is one zstd frame.
    `hash` is SHA-256 of the raw bytes. `pack` == HOLE stands for `raw` zero bytes (offset, stored and hash empty).
    `skip` and `length` select a part of the frame's raw bytes, all of it by default (`length` -1).
    """

    pack: bytes
    offset: int
    stored: int
    raw: int
    hash: bytes
    skip: int = 0
    length: int = -1

    @property
    def size(self) -> int:
        """How many bytes of the file this reference stands for."""
        return self.raw if self.length < 0 else self.length


class Node(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One name in a tree: a directory, a file or a symbolic link.

    `mode` holds the permission bits only (07777). `mtime_ns` counts from the epoch. `data` lists the refs of a
    file in order; their sizes add up to `size`. `target` is a symlink's. Nodes of one branch that share a
    non-empty `link` are hard links of one file. `digest` is SHA-256 of the content of a file whose bytes are part of a
    frame that it shares with others, else empty.
    """

    kind: int
    mode: int
    mtime_ns: int
    size: int = 0
    data: tuple[Ref, ...] = ()
    uid: int = 0
    gid: int = 0
    target: bytes = b""
    link: bytes = b""
    xattrs: tuple[tuple[bytes, bytes], ...] = ()
    digest: bytes = b""


class PageRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One page of a snap: its first path, its hash (and so its key), its entries and its bytes as stored."""

    first: bytes
    hash: bytes
    count: int
    stored: int


class Snap(msgspec.Struct, frozen=True, array_like=True):
    """A whole tree at one sequence number. `files` counts files and links, `bytes` their logical size.

    `merges` says for each branch that was merged in: (its uuid, its last sequence number brought, and ours then).
    `locks` are those held then.
    """

    seq: int
    pages: tuple[PageRef, ...]
    files: int
    bytes: int
    merges: tuple[tuple[str, int, int], ...] = ()
    locks: tuple[Lock, ...] = ()


_page_decoder = msgspec.msgpack.Decoder(tuple[tuple[bytes, Node], ...])
_snap_decoder = msgspec.msgpack.Decoder(Snap)


def directory(mode: int = 0o755, mtime_ns: int = 0) -> Node:
    """Return a directory node."""
    return Node(DIR, mode, mtime_ns)


def content_hash(node: Node) -> bytes:
    """Return a file's content identity: SHA-256 of its bytes where that is known, else SHA-256 over its runs.

    Equal hashes mean equal bytes; different hashes of many-run files can still be equal bytes.
    """
    if node.digest:
        return node.digest
    if not node.data:
        return hashlib.sha256(b"").digest()
    if len(node.data) == 1 and node.data[0].length < 0 and node.data[0].pack != HOLE:
        return node.data[0].hash
    digest = hashlib.sha256()
    for ref in node.data:
        digest.update(b"%d %d %d " % (ref.raw, ref.skip, ref.size) + ref.hash)
    return digest.digest()


def same_content(a: Node, b: Node) -> bool:
    """Whether two nodes hold the same thing, whatever their attributes and times."""
    if a.kind != b.kind:
        return False
    if a.kind == SYMLINK:
        return a.target == b.target
    return a.kind == DIR or (a.size == b.size and content_hash(a) == content_hash(b))


def same_node(a: Node | None, b: Node | None, *, times: bool = True) -> bool:
    """Whether two nodes are equal up to where their bytes are stored and, without `times`, up to mtime."""
    if a is None or b is None:
        return a is b
    return (
        (a.kind, a.mode, a.uid, a.gid, a.size) == (b.kind, b.mode, b.uid, b.gid, b.size)
        and (a.target, a.link, a.xattrs) == (b.target, b.link, b.xattrs)
        and (not times or a.mtime_ns == b.mtime_ns)
        and same_content(a, b)
    )


def parents(path: bytes) -> Iterator[bytes]:
    """Yield the directories above `path`, nearest first, ending with the root b"" (nothing for the root)."""
    while path:
        path = path.rpartition(b"/")[0]
        yield path


def subtree_end(path: bytes) -> bytes:
    """Return the first key after everything below `path`: ranges are [path + b"/", subtree_end(path))."""
    return path + b"0"  # b"0" follows b"/"


def encode_page(entries: Iterable[tuple[bytes, Node]], salt: bytes = b"") -> tuple[bytes, bytes]:
    """Return a page's (hash, bytes); the hash is SHA-256 of the stored bytes and names the object.

    A random `salt` makes its name one that no page ever had: garbage collection may be about to delete an equal one.
    """
    data = envelope.encode(envelope.PAGE, tuple(entries), salt)
    return hashlib.sha256(data).digest(), data


def decode_page(data: bytes, key: str) -> tuple[tuple[bytes, Node], ...]:
    """Decode a page; `Corrupt` names `key`."""
    return envelope.decode(envelope.PAGE, data, _page_decoder, key)


def encode_snap(snap: Snap) -> bytes:
    return envelope.encode(envelope.SNAP, snap)


def decode_snap(data: bytes, key: str) -> Snap:
    """Decode a snap; `Corrupt` names `key`."""
    return envelope.decode(envelope.SNAP, data, _snap_decoder, key)


def root_id(pages: Iterable[PageRef]) -> str:
    """Return the identity of a whole tree, the same for equal page lists of any branch: 64 hex digits."""
    return hashlib.sha256(b"".join(page.hash for page in pages)).hexdigest()


def page_index(pages: tuple[PageRef, ...], path: bytes) -> int:
    """Return the index of the page whose range holds `path` (0 where `path` sorts before all)."""
    low, high = 0, len(pages)
    while low < high:
        middle = (low + high) // 2
        if pages[middle].first <= path:
            low = middle + 1
        else:
            high = middle
    return max(low - 1, 0)


def split_pages(entries: list[tuple[bytes, Node]], page_entries: int) -> Iterator[list[tuple[bytes, Node]]]:
    """Cut sorted entries into runs of about equal length, none longer than `page_entries`."""
    if not entries:
        return
    parts = -(-len(entries) // page_entries)
    size, extra = divmod(len(entries), parts)
    start = 0
    for part in range(parts):
        stop = start + size + (part < extra)
        yield entries[start:stop]
        start = stop
