"""Trees and large files to and from a server: packed and unpacked here, as an embedded connection does.

Owns what crosses the wire: packs one by one, each sent again by itself if it has to be, then one commit; nodes and the
pieces of packs that hold their contents, verified here. What was transferred before a cut is not transferred again.
"""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
from anyio.from_thread import BlockingPortal

from fanout import wire
from fanout.api import Progress
from fanout.client.http import Cut, Http
from fanout.config import Tuning
from fanout.disk.data import Packed, Packer, Reader
from fanout.disk.fresh import PackAges
from fanout.disk.receive import check_node
from fanout.errors import Corrupt, Invalid, NotFound, Unavailable
from fanout.format.extents import size_of
from fanout.format.pack import ID_BYTES
from fanout.format.tree import DIR, FILE, Node
from fanout.model import Commit, ObjectInfo
from fanout.run.bridge import Pull
from fanout.runtime import Runtime
from fanout.view import transfer

__all__ = ["download", "put", "upload"]

T = TypeVar("T")
#: Smaller packs than an embedded connection makes: one is what has to be sent again after a cut.
_TUNING = Tuning(pack_bytes=8 << 20)
#: What is handed to a connection at once: it keeps a copy of what it has not sent.
_SLICE = 256 << 10
_ATTEMPTS = 8


async def upload(
    http: Http, runtime: Runtime, disk: str, line: str, local: Path, target: bytes, progress: Progress | None
) -> Commit:
    """Put a local tree at `target`; see `Disk.upload`."""

    def work(far: _Far) -> tuple[list[tuple[bytes, Node]], Packed]:
        packer = far.packer(runtime)
        try:
            intents = transfer.upload_intents(packer, local, target, bases=far.nodes, progress=progress)
            return [(intent.path, intent.node) for intent in intents if intent.node is not None], packer.finish()
        except BaseException:
            packer.abandon()
            raise

    async with _far(http, disk, line) as far:
        nodes, packed = await far.run(work)
    query = {"line": line, "path": target.decode("utf-8", "surrogateescape"), "seq": far.seq}
    committed = await http.call(
        "POST", f"/disks/{disk}/commit", query, content=lambda: _frames(nodes, packed.blobs), key=runtime.hex_id(32)
    )
    return wire.heard(Commit, committed)


async def put(
    http: Http, runtime: Runtime, disk: str, line: str, path: bytes,
    content: bytes | AsyncIterable[bytes] | BinaryIO, mode: int,
) -> ObjectInfo:  # fmt: skip
    """Store one file, however large, in one commit; see `Disk.put_object`."""
    pull = Pull("data", _pieces(content, _TUNING.extent_bytes) if isinstance(content, bytes) else content)

    def work(far: _Far) -> tuple[Node, Packed]:
        packer = far.packer(runtime)
        try:
            refs = packer.add_content(_TUNING.extent_bytes, pull.read)
            packed = packer.finish()
        except BaseException:
            packer.abandon()
            raise
        return Node(FILE, mode, runtime.now_ns(), size_of(refs), refs), packed

    async with _far(http, disk, line) as far:
        try:
            node, packed = await far.run(work)
        finally:
            pull.stop()
    query = {"line": line, "path": path.decode("utf-8", "surrogateescape")}
    stored = await http.call(
        "POST", f"/disks/{disk}/commit", query, content=lambda: _frames([(path, node)], packed.blobs),
        key=runtime.hex_id(32),
    )  # fmt: skip
    return wire.heard(ObjectInfo, stored)


async def download(
    http: Http, disk: str, line: str, source: bytes, local: Path, progress: Progress | None, missing: str
) -> None:
    """Write what is at `source` to a local path; see `Disk.download`. `missing` is said where there is nothing."""

    def work(far: _Far) -> None:
        tree = far.tree(source)
        try:
            if tree.get(source) is None:
                raise NotFound(missing)
            transfer.download(Reader(far, disk), tree, source, local, progress=progress)
        finally:
            tree.close()

    async with _far(http, disk, line) as far:
        await far.run(work)


class _Far:
    """The packs and nodes of one line, for blocking code in threads. `seq` is the commit whose nodes were looked up."""

    def __init__(self, http: Http, disk: str, line: str, portal: BlockingPortal) -> None:
        self._http = http
        self._path = f"/disks/{disk}"
        self._disk = disk
        self._line = line
        self._portal = portal
        self.seq: int | None = None

    async def run(self, work: Callable[[_Far], T]) -> T:
        """Run blocking work in a thread. Cancelled, its next use of this fails, and so ends it."""
        try:
            return await anyio.to_thread.run_sync(work, self)
        except concurrent.futures.CancelledError:
            await anyio.lowlevel.checkpoint()  # it is ours
            raise Unavailable("the transfer was cancelled; nothing was committed") from None

    def packer(self, runtime: Runtime) -> Packer:
        """Return what packs for this disk, and stores its packs there as they fill."""
        return Packer(self, self._disk, runtime, _TUNING, ages=PackAges(runtime, _TUNING.unreferenced_s))

    def put(self, key: str, data: bytes) -> None:
        """Store a pack. Its id is random, so that doing it again does no harm."""
        path = f"{self._path}/packs/{key.rpartition('/')[2]}"
        self._call(lambda: self._http.call("PUT", path, {"line": self._line}, content=lambda: _pieces(data, _SLICE)))

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return bytes of a pack."""
        path = f"{self._path}/packs/{key.rpartition('/')[2]}"
        query = {"line": self._line, "offset": start, "length": length}
        return self._call(lambda: self._http.fetch("GET", path, query))

    def nodes(self, paths: Iterable[bytes]) -> Mapping[bytes, Node]:
        """Return the nodes of those paths that are there, all as of one commit."""
        found: dict[bytes, Node] = {}
        batch: list[bytes] = []
        size = 0
        for path in paths:
            if len(batch) == wire.MAX_PATHS or size + len(path) > wire.MAX_PATHS_BYTES:
                found.update(self._look_up(batch))
                batch, size = [], 0
            batch.append(path)
            size += len(path)
        found.update(self._look_up(batch))  # none, perhaps: it is what tells the commit
        return found

    def _look_up(self, paths: list[bytes]) -> tuple[tuple[bytes, Node], ...]:
        body, query = wire.encode_paths(paths), {"line": self._line, "seq": self.seq}
        answer = self._call(lambda: self._http.fetch("POST", f"{self._path}/nodes", query, content=body))
        looked = wire.decode_looking(answer, self._http.url)
        self.seq = looked.seq
        return looked.nodes

    def tree(self, path: bytes) -> _FarTree:
        """Begin to read the tree at `path`."""
        return _FarTree(path, self._frames(path), self._call, self._http.url)

    async def _frames(self, path: bytes) -> AsyncGenerator[tuple[bytes, bytes], None]:
        """Yield the frames of a tree. Cut, it goes on after the last path, in the same commit's tree."""
        query: dict[str, object] = {"line": self._line, "path": "/" + path.decode("utf-8", "surrogateescape")}
        failures = 0
        while True:
            frames = wire.Frames(self._http.url)
            try:
                async with self._http.answer("GET", f"{self._path}/tree", query) as answer:
                    async for part in answer.parts:
                        for kind, payload in frames.feed(part):
                            if kind == b"E":
                                return
                            if kind == b"X":
                                raise wire.error_of(json.loads(payload), 500)
                            if kind == b"N":
                                last = wire.decode_nodes(payload, self._http.url)[-1][0]
                                query["after"] = last.decode("utf-8", "surrogateescape")
                                failures = 0
                            elif kind == b"H":
                                query["seq"] = wire.decode_header(payload, self._http.url).seq
                            yield kind, payload
                raise Cut(f"{self._http.url}: the tree ended early")
            except Cut as cut:
                failures += 1
                if failures >= _ATTEMPTS:
                    raise Unavailable(str(cut)) from cut
                await self._http.pause(failures)

    def _call(self, function: Callable[[], Awaitable[T]]) -> T:
        return self._portal.call(function)


class _FarTree:
    """A tree that is read as it comes, for `view.transfer.download`. What it says is checked, for it may be hostile."""

    def __init__(
        self, path: bytes, frames: AsyncGenerator[tuple[bytes, bytes], None],
        call: Callable[[Callable[[], Awaitable[tuple[bytes, bytes] | None]]], tuple[bytes, bytes] | None], where: str,
    ) -> None:  # fmt: skip
        self._path = path
        self._frames = frames
        self._call = call
        self._where = where
        self._blobs: dict[bytes, bytes] = {}
        first = self._next()
        if first is None or first[0] != b"H":
            raise Corrupt(f"{where}: a tree without a header")
        self._node = wire.decode_header(first[1], where).node
        if self._node is not None and self._node.kind != DIR:
            # A file is one node, which the header holds: what is left are the inline packs that it needs.
            self._node = dict(self._below()).get(path)

    def get(self, path: bytes) -> Node | None:
        return self._node if path == self._path else None

    def below(self, path: bytes, *, whole: bool) -> Iterator[tuple[bytes, Node]]:
        return self._below()

    def blob_bytes(self) -> Mapping[bytes, bytes]:
        """Return the inline packs: those of each node are there before it is yielded."""
        return self._blobs

    def close(self) -> None:
        """Hang up."""

        async def close() -> None:
            await self._frames.aclose()

        self._call(close)

    def _below(self) -> Iterator[tuple[bytes, Node]]:
        while (frame := self._next()) is not None:
            kind, payload = frame
            if kind == b"B" and len(payload) > ID_BYTES:
                self._blobs[payload[:ID_BYTES]] = payload[ID_BYTES:]
            elif kind == b"N":
                for path, node in wire.decode_nodes(payload, self._where):
                    try:
                        check_node(path, msgspec.structs.replace(node, xattrs=()) if node.xattrs else node)
                    except Invalid as error:
                        raise Corrupt(f"{self._where}: {error}") from None
                    yield path, node

    def _next(self) -> tuple[bytes, bytes] | None:
        async def step() -> tuple[bytes, bytes] | None:
            return await anext(self._frames, None)

        return self._call(step)


@asynccontextmanager
async def _far(http: Http, disk: str, line: str) -> AsyncIterator[_Far]:
    http.check_open()
    failure: Exception | None = None
    async with BlockingPortal() as portal:
        try:
            yield _Far(http, disk, line, portal)
        except Exception as error:
            failure = error  # not as a group of one
    if failure is not None:
        raise failure


async def _frames(nodes: list[tuple[bytes, Node]], blobs: Mapping[bytes, bytes]) -> AsyncIterator[bytes]:
    """Yield the body of a commit."""
    for pack, data in blobs.items():
        yield wire.frame(b"B", pack + data)
    for batch in wire.batches(nodes):
        yield wire.frame(b"N", wire.encode_nodes(batch))
    yield wire.frame(b"E")


async def _pieces(data: bytes, size: int) -> AsyncIterator[bytes]:
    view = memoryview(data)
    for at in range(0, len(data), size):
        yield bytes(view[at : at + size])
