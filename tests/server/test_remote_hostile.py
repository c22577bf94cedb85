"""Clients and servers that mean harm: nothing outside of the target is written, no tree is made that cannot be one."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from fanout import wire
from fanout.client import RemoteFanout
from fanout.client.disk import RemoteDisk
from fanout.config import Settings, Tuning
from fanout.disk.data import Packer
from fanout.errors import Corrupt, FanoutError
from fanout.format.pack import PackBuilder, encode_frame, pack_id
from fanout.format.tree import DIR, FILE, HOLE, SYMLINK, Node, Ref
from fanout.runtime import Runtime, system
from fanout.store.memory import MemoryStore
from tests.support.servers import ScriptedServer, reply
from tests.support.serving import Running

DISK = wire.Handle(id="dsk-0123456789abcdef", name="ws", branch="main")


# -- clients ---------------------------------------------------------------------------------------------------------


class Raw:
    """A disk of the server, spoken to without the client."""

    def __init__(self, server: Running) -> None:
        headers = {"Authorization": server.token}
        self.http = httpx.Client(base_url=server.url + wire.PREFIX, headers=headers, timeout=60)
        made = self.http.post("/disks", json={"name": f"ws-{uuid.uuid4().hex[:12]}"}).json()["data"]
        self.path = f"/disks/{made['id']}"

    def commit(self, nodes: list[tuple[bytes, Node]], blobs: dict[bytes, bytes] | None = None, **query: Any) -> Any:
        body = b"".join(wire.frame(b"B", pack + data) for pack, data in (blobs or {}).items())
        body += wire.frame(b"N", wire.encode_nodes(nodes)) + wire.frame(b"E")
        return self.commit_body(body, **query)

    def commit_body(self, body: bytes, **query: Any) -> Any:
        return self.http.post(f"{self.path}/commit", params={"path": "/", "seq": 0, **query}, content=body)

    def log(self) -> list[str]:
        lines = self.http.get(f"{self.path}/log").text.splitlines()
        return [line for line in lines if "message" in line]


@pytest.fixture
def raw(server: Running) -> Iterator[Raw]:
    raw = Raw(server)
    yield raw
    raw.http.close()


def packed(data: bytes, *, share: bool = False) -> tuple[dict[bytes, bytes], Ref]:
    """Return an inline pack and a reference to its only frame."""
    packer = Packer(MemoryStore(), "dsk-0000000000000000", system, Tuning())
    ref = packer.add(data, True)
    return dict(packer.finish().blobs), ref


BLOBS, REF = packed(b"0123456789")
FILE_OF = Node(FILE, 0o644, 1, 10, (REF,))


def but(**fields: Any) -> Node:
    return msgspec.structs.replace(FILE_OF, **fields)


def ref_but(**fields: Any) -> Node:
    ref = msgspec.structs.replace(REF, **fields)
    return but(data=(ref,), size=ref.size)


@pytest.mark.parametrize(
    ("path", "node"),
    [
        (b"../f", FILE_OF),
        (b"/etc/f", FILE_OF),
        (b"a/../../f", FILE_OF),
        (b"a//f", FILE_OF),
        (b"", FILE_OF),
        (b"a\0f", FILE_OF),
        (b"n" * 256, FILE_OF),
        (b"f", but(kind=3)),
        (b"f", but(kind=7)),
        (b"f", but(mode=0o100644)),
        (b"f", but(mode=-1)),
        (b"f", but(uid=-1)),
        (b"f", but(gid=2**40)),
        (b"f", but(mtime_ns=2**63 - 1)),
        (b"f", but(size=11)),
        (b"f", but(size=-10)),
        (b"f", but(target=b"/etc/passwd")),
        (b"f", but(link=b"short")),
        (b"f", but(digest=b"x" * 32)),
        (b"f", but(digest=b"short")),
        (b"f", but(xattrs=((b"security.capability", b"x"),))),
        (b"f", but(xattrs=((b"user.overlay.opaque", b"y"),))),
        (b"f", but(xattrs=((b"user.a", b"1"), (b"user.a", b"2")))),
        (b"f", but(xattrs=((b"user.a", b"x" * 70_000),))),
        (b"f", ref_but(hash=b"h" * 32)),
        (b"f", ref_but(offset=5)),
        (b"f", ref_but(offset=-1)),
        (b"f", ref_but(stored=3)),
        (b"f", ref_but(raw=11)),
        (b"f", ref_but(raw=1 << 40)),
        (b"f", ref_but(skip=5, length=6)),
        (b"f", ref_but(skip=-1, length=3)),
        (b"f", ref_but(length=-7)),
        (b"f", ref_but(pack=b"p" * 16)),
        (b"f", ref_but(pack=b"short")),
        (b"f", but(data=(Ref(HOLE, 1, 0, 10, b""),))),
        (b"f", but(data=(Ref(HOLE, 0, 0, 10, b"h" * 32),))),
        (b"f", but(data=(Ref(HOLE, 0, 0, -10, b""),), size=-10)),
        (b"f", Node(DIR, 0o755, 0, size=5)),
        (b"f", Node(DIR, 0o755, 0, data=(REF,))),
        (b"f", Node(SYMLINK, 0o777, 0)),
        (b"f", Node(SYMLINK, 0o777, 0, target=b"a\0b")),
        (b"f", Node(SYMLINK, 0o777, 0, target=b"t" * 5000)),
    ],
    ids=lambda value: None if isinstance(value, Node) else repr(value[:12]),
)
def test_nodes_that_no_tree_can_have(raw: Raw, path: bytes, node: Node) -> None:
    answer = raw.commit([(path, node)], BLOBS)
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid"), answer.text
    assert raw.log() == []


def test_what_a_tree_can_have_is_taken(raw: Raw) -> None:
    """So that the refusals above are for what they say."""
    digest = hashlib.sha256(b"345").digest()
    part = but(data=(msgspec.structs.replace(REF, skip=3, length=3),), size=3, digest=digest)
    nodes = [
        (b"d", Node(DIR, 0o755, 0)),
        (b"d/link", Node(SYMLINK, 0o777, 0, target=b"../../x")),
        (b"f", FILE_OF),
        (b"g", part),
    ]
    answer = raw.commit(nodes, BLOBS)
    assert answer.status_code == 200, answer.text
    assert raw.http.get(f"{raw.path}/object", params={"key": "g"}).content == b"345"
    assert raw.http.get(f"{raw.path}/object", params={"key": "f"}).content == b"0123456789"


def test_commits_that_are_none(raw: Raw) -> None:
    twice = wire.frame(b"N", wire.encode_nodes([(b"f", FILE_OF), (b"f", FILE_OF)]))
    for body in (
        b"",
        b"noise",
        wire.frame(b"N", wire.encode_nodes([(b"f", FILE_OF)])),
        twice + wire.frame(b"E"),
        wire.frame(b"N", b"\xc1") + wire.frame(b"E"),
        wire.frame(b"X", b"") + wire.frame(b"E"),
        wire.frame(b"B", b"short") + wire.frame(b"E"),
        wire.frame(b"E") + wire.frame(b"E"),
    ):
        answer = raw.commit_body(body)
        assert (answer.status_code, answer.json()["code"]) == (400, "invalid"), body
    assert raw.commit([(b"elsewhere/f", FILE_OF)], BLOBS, path="/here").status_code == 400
    assert raw.commit([], seq=5).status_code == 404
    assert raw.log() == []


def test_packs_that_are_none(raw: Raw) -> None:
    builder = PackBuilder(pack_id(os.urandom(16), True))
    frame, digest = encode_frame(b"some text")
    builder.add(frame, 9, digest)
    good = builder.finish()
    path = f"{raw.path}/packs/{builder.id.hex()}"
    liar = PackBuilder(builder.id)
    liar.add(frame, 9, b"h" * 32)
    bomb = PackBuilder(builder.id)
    bomb.add(frame, 1 << 40, digest)
    for body in (b"", b"noise", good[:-1], good[:20] + b"!" + good[21:], liar.finish(), bomb.finish()):
        assert raw.http.put(path, content=body).status_code == 400, body[:40]
    assert raw.http.put(f"{raw.path}/packs/short", content=good).status_code == 400
    assert raw.http.put(path, content=good).status_code == 200
    assert raw.http.put(path, content=good).status_code == 200, "its own echo"
    other = PackBuilder(builder.id)
    other.add(*(lambda made: (made[0], 5, made[1]))(encode_frame(b"other")))
    assert raw.http.put(path, content=other.finish()).status_code == 409, "a pack is never replaced"
    assert raw.http.get(path, params={"offset": 4, "length": len(frame)}).content == frame
    assert raw.http.get(path, params={"offset": 4}).status_code == 400
    assert raw.http.get(path, params={"offset": 0, "length": 1 << 40}).status_code == 400


# -- servers ---------------------------------------------------------------------------------------------------------


def answering(tree: bytes, pack: bytes) -> Callable[[BaseHTTPRequestHandler], None]:
    about = json.dumps({"success": True, "data": {"server": "fanout", "version": "1", "api": 1, "instance": "i"}})

    def answer(handler: BaseHTTPRequestHandler) -> None:
        body = tree if "/tree" in handler.path else pack if "/packs/" in handler.path else about.encode()
        reply(200, body=body)(handler)

    return answer


HEAD = wire.frame(b"H", wire.encode_header(wire.Header(1, b"", Node(DIR, 0o755, 0))))


@pytest.mark.parametrize(
    "nodes",
    [
        [(b"../evil", FILE_OF)],
        [(b"/tmp/evil", FILE_OF)],
        [(b"link", Node(SYMLINK, 0o777, 0, target=b"..")), (b"link/evil", FILE_OF)],
        [(b"d", Node(DIR, 0o755, 0)), (b"d/../../evil", FILE_OF)],
        [(b"nowhere/evil", FILE_OF)],
        [(b"f", FILE_OF), (b"f/evil", FILE_OF)],
        [(b"evil", ref_but(raw=1 << 40, length=10))],
        [(b"evil", ref_but(hash=b"h" * 32))],
        [(b"evil", but(size=1 << 50))],
        [(b"evil", but(kind=9))],
    ],
)
@pytest.mark.anyio
async def test_a_hostile_server_writes_nothing_outside(nodes: list[tuple[bytes, Node]], tmp_path: Path) -> None:
    server = ScriptedServer()
    blobs = b"".join(wire.frame(b"B", pack + data) for pack, data in BLOBS.items())
    tree = HEAD + blobs + wire.frame(b"N", wire.encode_nodes(nodes)) + wire.frame(b"E")
    server.script = [answering(tree, b"noise")] * 5
    target = tmp_path / "in" / "target"
    runtime = Runtime(uniform=lambda low, high: low)
    try:
        async with RemoteFanout(Settings.load({}, url=server.endpoint), runtime=runtime) as fo:
            with pytest.raises(Corrupt):
                await RemoteDisk(fo.http, runtime, DISK).download("/", target)
    finally:
        server.close()
    assert sorted(os.listdir(tmp_path)) == ["in"]
    assert os.listdir(tmp_path / "in") == ["target"]
    assert not [path for path in tmp_path.rglob("*evil*") if path.stat().st_size]


@pytest.mark.anyio
async def test_a_server_of_noise(tmp_path: Path) -> None:
    """Whatever it says, the error is one of ours."""
    runtime = Runtime(uniform=lambda low, high: low)
    for tree in (
        b"",
        b"noise",
        b"N\xff\xff\xff\xff",
        wire.frame(b"N", b""),
        HEAD + b"Z\0\0\0\0",
        wire.frame(b"H", b"\xc1"),
    ):
        server = ScriptedServer()
        server.script = [answering(tree, b"")] * 20
        try:
            async with RemoteFanout(Settings.load({}, url=server.endpoint), runtime=runtime) as fo:
                with pytest.raises(FanoutError):
                    await RemoteDisk(fo.http, runtime, DISK).download("/", tmp_path / "target")
        finally:
            server.close()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
