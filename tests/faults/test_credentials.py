"""Credentials that expire in the middle: Denied without a secret in it, nothing lost, and fresh ones go on."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from fanout.api import Disk, Fanout
from fanout.errors import Denied, FanoutError
from fanout.model import Run
from fanout.store.base import Store
from fanout.store.s3 import S3Store
from fanout.store.wrap import Retrying
from tests.support.connections import connected, unprobed
from tests.support.disks import hasty
from tests.support.proxy import Proxy, once, proxy_to

pytestmark = pytest.mark.anyio

OLD = {
    "AWS_ACCESS_KEY_ID": "AKOLD",
    "AWS_SECRET_ACCESS_KEY": "oldsecretoldsecret",
    "AWS_SESSION_TOKEN": "oldtokenoldtoken",
}
NEW = {
    "AWS_ACCESS_KEY_ID": "AKNEW",
    "AWS_SECRET_ACCESS_KEY": "newsecretnewsecret",
    "AWS_SESSION_TOKEN": "newtokennewtoken",
}
SECRETS = re.compile("oldsecret|oldtoken|newsecret|newtoken")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def proxy(moto_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    give(monkeypatch, OLD)
    with proxy_to(moto_endpoint) as proxy:
        proxy.accepted = {"AKOLD"}
        proxy.message = "The security token oldtokenoldtoken included in the request is expired (oldsecretoldsecret)"
        yield proxy


@pytest.fixture
def store(proxy: Proxy, moto_bucket: str) -> Iterator[Store]:
    made = opened(proxy, moto_bucket)
    yield made
    made.close()


def opened(proxy: Proxy, bucket: str, prefix: str = "") -> Store:
    return Retrying(S3Store(bucket, f"t/{prefix or uuid.uuid4().hex}", endpoint=proxy.endpoint), hasty())


def give(patch: pytest.MonkeyPatch, credentials: dict[str, str]) -> None:
    for name, value in credentials.items():
        patch.setenv(name, value)


def expire(proxy: Proxy) -> None:
    proxy.accepted = {"AKNEW"}


def assert_clear(error: BaseException, *words: str) -> None:
    """The message names the place and the reason; no secret is in it or in what it came from."""
    assert isinstance(error, Denied)
    for word in words:
        assert word in str(error)
    assert not SECRETS.search(f"{error} {error!r}")


async def messages(disk: Disk) -> list[str]:
    return [commit.message async for commit in disk.log()]


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidAccessKeyId"])
async def test_every_call_says_denied_until_there_are_fresh_ones(
    proxy: Proxy, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    async with connected(store, tmp_path / "cache", runtime=hasty()) as fo:
        disk = await unprobed(fo, store)
        await disk.put_object("old", b"there before")
        assert (await fo.exec("cat old", disks={"w": disk})).stdout == "there before"
        expire(proxy)
        proxy.refusal = code
        for call in (
            lambda: disk.put_object("new", b"1"),
            lambda: disk.get_object("old"),
            lambda: fo.exec("cat old", disks={"w": disk}),
            lambda: disk.checkpoint("cp"),
            lambda: fo.disks.get("ws"),
        ):
            with pytest.raises(Denied) as caught:
                await call()
            head = "head of" in str(caught.value)  # whose answer has no body
            assert_clear(caught.value, "s3://", "403 Forbidden" if head else f"403 {code}")
            assert not hasattr(caught.value, "run")
        give(monkeypatch, NEW)
        # The same connection goes on.
        assert await disk.get_object("old") == b"there before"
        assert await disk.head_object("new") is None
        await disk.put_object("new", b"2")
        run = await fo.exec("cat old new; echo 3 > newer", disks={"w": disk})
        assert run.stdout == "there before2"
        assert await messages(disk) == [run.command, "put new", "put old"]


@pytest.mark.parametrize("step", ["pack", "log"])
@pytest.mark.parametrize("known", [True, False], ids=["fresh-at-once", "fresh-later"])
async def test_expired_while_a_command_ran(
    proxy: Proxy, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, known: bool
) -> None:
    command = f"head -c {1 << 20 if step == 'pack' else 100} /dev/urandom > new; echo out; exit 3"
    async with connected(store, tmp_path / "cache", runtime=hasty()) as fo:
        disk = await unprobed(fo, store)
        await disk.put_object("old", b"there before")

        def change() -> None:
            expire(proxy)
            if known:
                give(monkeypatch, NEW)

        proxy.rules.append(once("PUT", f"/{step}/", change))
        if known:
            # Others have been written down by whoever renews them: nobody notices.
            run = await fo.exec(command, disks={"w": disk})
            assert run.commits["w"].seq == 2
        else:
            with pytest.raises(Denied) as caught:
                await fo.exec(command, disks={"w": disk})
            assert_clear(caught.value, "ExpiredToken", f"/{step}/", "what the command wrote to 'w' is not committed")
            lost: Run = caught.value.run  # type: ignore[attr-defined]
            assert (lost.stdout, lost.exit_code, lost.status) == ("out\n", 3, "completed")
            assert lost.commits["w"].seq is None
            give(monkeypatch, NEW)
            assert await messages(disk) == ["put old"]
            assert await disk.head_object("new") is None
            run = await fo.exec(command, disks={"w": disk})
        assert run.commits["w"].seq == 2
        assert await messages(disk) == [command, "put old"]
        assert await disk.get_object("old") == b"there before"


async def test_of_a_group_each_gets_its_own_run(
    proxy: Proxy, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(store, tmp_path / "cache", runtime=hasty()) as fo:
        disk = await unprobed(fo, store)
        await fo.exec("true", disks={"w": disk})
        proxy.rules.append(once("PUT", "/log/", lambda: expire(proxy)))
        errors: list[FanoutError] = []

        async def one(fo: Fanout, n: int) -> None:
            with pytest.raises(Denied) as caught:
                await fo.exec(f"echo {n} > {n}; echo {n}", disks={"w": disk})
            errors.append(caught.value)

        async with anyio.create_task_group() as group:
            for n in range(6):
                group.start_soon(one, fo, n)
        runs: list[Run] = [error.run for error in errors]  # type: ignore[attr-defined]
        assert sorted(run.stdout for run in runs) == [f"{n}\n" for n in range(6)], "one error for several callers"
        for error in errors:
            assert_clear(error, "ExpiredToken")
            assert str(error).count("what the command wrote") == 1
        give(monkeypatch, NEW)
        assert await messages(disk) == []
        await disk.put_object("f", b"1")


async def test_another_connection_goes_on(
    proxy: Proxy, moto_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = uuid.uuid4().hex
    store = opened(proxy, moto_bucket, prefix)
    async with connected(store, tmp_path / "cache", runtime=hasty()) as fo:
        disk = await unprobed(fo, store)
        await disk.upload(_tree(tmp_path), "/tree")
        expire(proxy)
        with pytest.raises(Denied):
            await disk.upload(_tree(tmp_path), "/again")
    store.close()
    give(monkeypatch, NEW)
    store = opened(proxy, moto_bucket, prefix)
    async with connected(store, tmp_path / "cache", runtime=hasty()) as fo:
        disk = await fo.disks.get("ws")
        assert [o.key async for o in disk.list_objects()] == [f"tree/{n}" for n in range(3)]
        await disk.upload(_tree(tmp_path), "/again")
        assert (await fo.exec("cat again/* | wc -c", disks={"w": disk})).stdout == "900000\n"
    store.close()


def _tree(tmp_path: Path) -> Path:
    (tmp_path / "tree").mkdir(exist_ok=True)
    for n in range(3):
        (tmp_path / "tree" / str(n)).write_bytes(os.urandom(300_000))
    return tmp_path / "tree"
