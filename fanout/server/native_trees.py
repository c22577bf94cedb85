"""The native API's trees: nodes and packs out, for downloads; packs and nodes in, for uploads and large files.

Owns what crosses the wire of both. The client packs and unpacks; what it sends is checked by disk/receive.py before a
commit refers to it.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple, TypeVar

import anyio.to_thread
import msgspec
from fastapi import Request, Response

from fanout import wire
from fanout.disk.merge import Policy, intent_of
from fanout.disk.paths import shown, tree_path
from fanout.disk.proposal import Proposal
from fanout.errors import Corrupt, Invalid
from fanout.format.pack import ID_BYTES
from fanout.format.tree import DIR, FILE, Node
from fanout.local_disk import LocalDisk
from fanout.model import Commit, ObjectInfo
from fanout.run.bridge import each
from fanout.run.describe import landed_commit, object_info
from fanout.server.answers import answer_of
from fanout.server.caller import CallerOf
from fanout.server.native_calls import Answer, Call, Native, told
from fanout.server.patient import Patient, Streaming
from fanout.view.transfer import replacing

__all__ = ["add_routes", "file_info"]

T = TypeVar("T")
_FRAMES = "application/vnd.fanout.frames"
_MSGPACK = "application/vnd.msgpack"
_BINARY = "application/octet-stream"
#: The longest piece of a pack that is read in one call.
_MAX_PIECE = 64 << 20


async def file_info(disk: LocalDisk, key: str, start: int, end: int | None) -> ObjectInfo:
    """Describe the file that is about to be read; errors as in `get_object`."""
    await disk.get_object(key, start=start, end=start if end is None else min(start, end))
    info = await disk.head_object(key)
    assert info is not None
    return info


def add_routes(native: Native) -> None:
    async def tree(disk: str, request: Request, caller: CallerOf) -> Response:
        """The nodes of a directory and all below it, in frames, as of commit `seq`; only those after `after`."""
        call = Call(request, caller, of_tree, b"")

        async def frames() -> AsyncGenerator[bytes, None]:
            line = await (await call.line("read")).pinned(call.number("seq"))
            path = tree_path("path", call.text("path", "/"), allow_root=True)
            after = call.perhaps("after")
            start = b"" if after is None else tree_path("after", after)
            async for frame in each(lambda: _tree(line, path, start), 1):
                yield frame

        def failed(error: Exception) -> bytes:
            return wire.frame(b"X", bytes(answer_of(error).body))

        return Streaming(frames(), _FRAMES, native.headers, last=wire.frame(b"E"), failed=failed)

    async def get_pack(disk: str, pack: str, request: Request, caller: CallerOf) -> Response:
        """`length` bytes of a pack from `offset`: frames of files, as the nodes of a tree refer to them."""
        call = Call(request, caller, piece, b"")

        async def work() -> Response:
            line = await call.line("read")
            offset, length = call.number("offset") or 0, call.number("length") or 0
            if not offset >= 0 or not 0 < length <= _MAX_PIECE:
                raise Invalid.argument("length", length, f"1 to {_MAX_PIECE} bytes, of an offset from 0 up")
            read = partial(line.core.receiver.pack_piece, _pack_id(pack), offset, length)
            return Response(await anyio.to_thread.run_sync(read), media_type=_BINARY)

        return Patient(work, native.headers)

    async def put_pack(disk: str, pack: str, request: Request, caller: CallerOf) -> Response:
        """Store a pack that the client made. It is nothing to anybody until a commit refers to it."""
        call = Call(request, caller, ("line",), await request.body())

        async def work() -> Response:
            line = await call.line("write")
            await anyio.to_thread.run_sync(line.core.receiver.store_pack, _pack_id(pack), call.content)
            return told(None)

        return Patient(work, native.headers)

    async def look_up(disk: str, request: Request, caller: CallerOf) -> Response:
        """What a line has at some paths (at most 10,000), as of commit `seq`: its newest, which the answer names."""
        call = Call(request, caller, of_lookup, await request.body())

        async def work() -> Response:
            line = await (await call.line("read")).pinned(call.number("seq"))
            paths = _decoded(wire.decode_paths, call.content)
            if len(paths) > wire.MAX_PATHS:
                raise Invalid(f"body: {len(paths)} paths; at most {wire.MAX_PATHS}")
            nodes = await anyio.to_thread.run_sync(lambda: line.point.state().nodes(paths))
            found = wire.Looking(line.point.seq or 0, tuple(nodes.items()))
            return Response(wire.encode_header(found), media_type=_MSGPACK)

        return Patient(work, native.headers)

    async def commit(disk: str, request: Request, caller: CallerOf) -> Response:
        """Commit nodes whose contents were stored in packs before, or come along as inline packs, in frames.

        With `seq` it is an upload to `path`, made for the tree of that commit; without, one file at `path`.
        """
        native.key_of(request)
        sent = await _sent(request)
        call = Call(request, caller, of_commit, sent.digest)

        async def work(call: Call) -> Answer:
            line = await call.line("write")
            seq, path = call.number("seq"), tree_path("path", call.text("path"), allow_root=True)
            if seq is None:
                return await anyio.to_thread.run_sync(_put, line, path, sent)
            return await anyio.to_thread.run_sync(_upload, line, path, seq, sent)

        return native.once(call, work)

    of_tree, of_lookup, of_commit = ("line", "path", "seq", "after"), ("line", "seq"), ("line", "path!", "seq")
    piece = ("line", "offset", "length!")
    native.add("GET", "/disks/{disk}/tree", tree, tree, "Nodes of a tree", of_tree, None)
    native.add("GET", "/disks/{disk}/packs/{pack}", get_pack, get_pack, "A piece of a pack", piece, None)
    native.add("PUT", "/disks/{disk}/packs/{pack}", put_pack, put_pack, "Store a pack", ("line",), None, _BINARY)
    native.add("POST", "/disks/{disk}/nodes", look_up, look_up, "Nodes at some paths", of_lookup, None, _MSGPACK)
    native.add("POST", "/disks/{disk}/commit", commit, commit, "Commit what was packed", of_commit, None, _FRAMES)


def _tree(line: LocalDisk, path: bytes, after: bytes) -> Iterator[bytes]:
    """Yield the frames of a tree: what is at `path`, then what is below, each inline pack before it is needed."""
    state = line.point.state()
    node = state.get(path)
    yield wire.frame(b"H", wire.encode_header(wire.Header(state.seq, path, node)))
    if node is None:
        return
    blobs, sent = state.blob_bytes(), set[bytes]()
    nodes: Iterable[tuple[bytes, Node]] = [(path, node)]
    if node.kind == DIR:
        begin = max(after + b"\0" if after else b"", path + b"/" if path else b"\x01")
        nodes = state.scan(begin, path + b"0" if path else None, whole=True)
    for batch in wire.batches(nodes):
        for pack in {ref.pack for _, item in batch for ref in item.data}:
            if pack in blobs and pack not in sent:
                sent.add(pack)
                yield wire.frame(b"B", pack + blobs[pack])
        yield wire.frame(b"N", wire.encode_nodes(batch))


class _Sent(NamedTuple):
    """What a commit's body held, and a hash of it."""

    nodes: list[tuple[bytes, Node]]
    blobs: dict[bytes, bytes]
    digest: bytes


async def _sent(request: Request) -> _Sent:
    nodes: list[tuple[bytes, Node]] = []
    blobs: dict[bytes, bytes] = {}
    digest = hashlib.sha256()
    frames = wire.Frames("body")
    ended = False
    async for chunk in request.stream():
        digest.update(chunk)
        for kind, payload in _decoded(lambda data, where: list(frames.feed(data)), chunk):
            if ended:
                raise Invalid("body: there is something after its end")
            if kind == b"N":
                nodes += _decoded(wire.decode_nodes, payload)
            elif kind == b"B" and len(payload) > ID_BYTES:
                blobs[payload[:ID_BYTES]] = payload[ID_BYTES:]
            else:
                ended = kind == b"E"
                if not ended:
                    raise Invalid(f"body: a frame {kind!r} has no place in a commit")
    if not ended:
        raise Invalid("body: it was cut short")
    return _Sent(nodes, blobs, digest.digest())


def _upload(line: LocalDisk, target: bytes, seq: int, sent: _Sent) -> Commit:
    """Commit a tree that was packed for the state at `seq`, as `LocalDisk.upload` does."""
    branch = line.core.writable(line.point)
    state = branch.at(seq)
    below = target + b"/" if target else b""
    if any(path != target and not path.startswith(below) for path, _ in sent.nodes):
        raise Invalid(f"nodes: one is not below {shown(target)!r}")
    line.core.receiver.check(sent.nodes, sent.blobs, state.blob_bytes())
    message = f"upload to /{shown(target)}"
    intents = [intent for path, node in sent.nodes if (intent := replacing(path, state.get(path), node)) is not None]
    proposal = Proposal(
        intents, Policy.LAST_WINS, seq, sent.blobs, state.blob_bytes(), author=line.author, message=message
    )
    return landed_commit(branch.commit(proposal), line.author, message, branch.known().seq)


def _put(line: LocalDisk, path: bytes, sent: _Sent) -> ObjectInfo:
    """Commit one file, as `LocalDisk.put_object` does."""
    if len(sent.nodes) != 1 or sent.nodes[0][0] != path or sent.nodes[0][1].kind != FILE:
        raise Invalid(f"nodes: just one, the file {shown(path)!r}")
    line.core.receiver.check(sent.nodes, sent.blobs)
    node = msgspec.structs.replace(sent.nodes[0][1], mtime_ns=line.core.runtime.now_ns())
    line.core.apply(
        line.point, [intent_of(path, None, node)], policy=Policy.STRICT, blobs=sent.blobs,
        author=line.author, message=f"put {shown(path)}",
    )  # fmt: skip
    return object_info(path, node)


def _pack_id(text: str) -> bytes:
    try:
        identity = bytes.fromhex(text)
    except ValueError:
        identity = b""
    if len(identity) != ID_BYTES:
        raise Invalid.argument("pack", text, f"{2 * ID_BYTES} hex digits")
    return identity


def _decoded(decode: Callable[[bytes, str], T], data: bytes) -> T:
    """Decode a part of the body: what is damaged there is the caller's mistake."""
    try:
        return decode(data, "body")
    except Corrupt as error:
        raise Invalid(str(error)) from None
