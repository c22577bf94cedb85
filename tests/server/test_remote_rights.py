"""What a key allows, through the remote connection: reading, writing, some disks, administering."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any

import anyio.to_thread
import pytest

from fanout.api import Disk, Fanout
from fanout.client import RemoteFanout
from fanout.config import Settings
from fanout.errors import Denied
from fanout.runtime import system
from fanout.server.keys import Keys
from fanout.store.open import open_store
from tests.support.serving import Running

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def admin(anyio_backend: str, server: Running) -> AsyncIterator[Fanout]:
    async with as_whom(server, server.token) as fo:
        yield fo


@pytest.fixture
async def disk(admin: Fanout) -> Disk:
    disk = await admin.disks.create(f"ws-{uuid.uuid4().hex[:12]}")
    await disk.put_object("f", b"1")
    return disk


def as_whom(server: Running, token: str) -> RemoteFanout:
    return RemoteFanout(Settings.load({}, url=server.url, api_key=token))


async def key(server: Running, **rights: Any) -> str:
    def make() -> str:
        store = open_store(server.store)
        try:
            return Keys(store, system).create(nickname="someone", **rights).token
        finally:
            store.close()

    return await anyio.to_thread.run_sync(make)


async def test_who_may_read_reads(server: Running, admin: Fanout, disk: Disk, tmp_path: Any) -> None:
    await disk.checkpoint("cp")
    async with as_whom(server, await key(server, right="read")) as fo:
        mine = await fo.disks.get(disk.name)
        assert await mine.get_object("f") == b"1"
        assert [item.key async for item in mine.list_objects()] == ["f"]
        await mine.download("/", tmp_path / "out")
        run = await fo.exec("cat f; echo > g", disks={"w": mine.mount(read_only=True)})
        assert (run.stdout, run.ok) == ("1", False)
        assert (await fo.exec("echo hi")).stdout == "hi\n"
        for call in (
            mine.put_object("g", b""),
            mine.put_object("g", b"x" * (5 << 20)),
            mine.delete_object("f"),
            mine.move("/f", "/g"),
            mine.upload(tmp_path / "out", "/up"),
            mine.checkpoint("other"),
            mine.branch("other"),
            mine.merge("main"),
            mine.gc(),
            mine.break_lock("x"),
            fo.exec("true", disks={"w": mine}),
            fo.exec("true", disks={"w": mine.mount(conditional=True)}),
            fo.exec("true", disks={"w": mine.mount(checkout=["f"])}, commit="never"),
            fo.disks.create("mine"),
            fo.disks.delete(disk.name),
        ):
            with pytest.raises(Denied, match="right"):
                await call
        with pytest.raises(Denied):
            [event async for event in fo.stream("true", disks={"w": mine})]
    assert [commit.message async for commit in disk.log()] == ["put f"]


async def test_who_may_see_one_disk_sees_one(server: Running, admin: Fanout, disk: Disk) -> None:
    other = await admin.disks.create(f"ws-{uuid.uuid4().hex[:12]}")
    async with as_whom(server, await key(server, right="write", disks=[disk.id])) as fo:
        assert [each.id async for each in fo.disks.list()] == [disk.id]
        mine = await fo.disks.get(disk.id)
        await mine.put_object("g", b"2")
        assert (await fo.exec("cat g", disks={"w": mine})).stdout == "2"
        for name in (other.name, other.id, "there-is-none"):
            with pytest.raises(Denied):
                await fo.disks.get(name)
        for mount in (other.mount(), other.mount(read_only=True)):
            with pytest.raises(Denied):
                await fo.exec("true", disks={"w": mine, "o": mount})
        with pytest.raises(Denied):
            await fo.disks.delete(disk.id)
    assert [commit.author async for commit in disk.log()] == ["someone", "admin"]


async def test_idempotency_keys_are_each_ones_own(server: Running, admin: Fanout, disk: Disk) -> None:
    word = uuid.uuid4().hex
    async with as_whom(server, await key(server, right="write")) as one:
        mine = await one.exec("echo one", idempotency_key=word)
    theirs = await admin.exec("echo two", idempotency_key=word)
    assert (mine.stdout, theirs.stdout) == ("one\n", "two\n")
    assert (await admin.exec("echo two", idempotency_key=word)).id == theirs.id
