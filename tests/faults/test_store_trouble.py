"""CASE 28 and its kind, through the public interface: a store that is away for a minute, slow, or cuts its answers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from fanout.errors import Corrupt, FanoutError, Unavailable, Unknown
from fanout.model import Started
from fanout.runtime import Runtime
from fanout.store.base import ObjectMeta, Store
from fanout.store.memory import MemoryStore
from fanout.store.s3 import S3Store
from fanout.store.wrap import Fault, Faulty, Retrying, Wrapper
from tests.support.connections import connected, unprobed
from tests.support.disks import hasty
from tests.support.proxy import Proxy, answering, proxy_to, stored_but_silent
from tests.support.servers import cut, reply

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Skipping:
    """A clock on which sleeping takes no time but counts; `slept` is what was slept."""

    def __init__(self, seed: int) -> None:
        self.slept: list[float] = []
        self._ahead = 0.0
        self.runtime = Runtime(monotonic=self.now, sleep=self.sleep, uniform=Random(seed).uniform)

    def now(self) -> float:
        return time.monotonic() + self._ahead

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self._ahead += seconds


class Away(Wrapper):
    """Answers 503 for a while from `leave` on, as S3 does: of a create or put nobody knows what that means."""

    def __init__(self, inner: Store, clock: Skipping) -> None:
        super().__init__(inner)
        self._clock = clock
        self._until = 0.0
        self.refused = 0

    def leave(self, seconds: float) -> None:
        self._until = self._clock.now() + seconds

    def _check(self, write: bool = False) -> None:
        if self._clock.now() < self._until:
            self.refused += 1
            raise (Unknown if write else Unavailable)("503 SlowDown")

    def create(self, key: str, data: bytes) -> None:
        self._check(True)
        self.inner.create(key, data)

    def put(self, key: str, data: bytes) -> None:
        self._check(True)
        self.inner.put(key, data)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        self._check()
        return self.inner.get(key, start, length)

    def head(self, key: str) -> ObjectMeta | None:
        self._check()
        return self.inner.head(key)

    def list(self, prefix: str = "", start_after: str = "", limit: int | None = None) -> Iterator[ObjectMeta]:
        self._check()
        return self.inner.list(prefix, start_after, limit)

    def delete(self, keys: Sequence[str]) -> None:
        self._check()
        self.inner.delete(keys)


# -- away ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [2, 60, 10_000])
@pytest.mark.parametrize("seed", range(3))
async def test_case_28_a_store_that_answers_503(tmp_path: Path, seed: int, seconds: float) -> None:
    clock = Skipping(seed)
    away = Away(MemoryStore(), clock)
    async with connected(Retrying(away, clock.runtime), tmp_path / "cache", runtime=clock.runtime) as fo:
        disk = await fo.disks.create("ws")
        await disk.put_object("old", b"there before")
        await fo.exec("cat old", disks={"w": disk})
        outcomes: dict[str, FanoutError | None] = {}
        for name, call in (
            ("put", lambda: disk.put_object("new", b"1")),
            ("get", lambda: disk.get_object("old")),
            ("exec", lambda: fo.exec("echo 1 > newer", disks={"w": disk})),
        ):
            away.leave(seconds)
            before, begun = len(clock.slept), clock.now()
            try:
                await call()
                outcomes[name] = None
            except FanoutError as error:
                outcomes[name] = error
            assert outcomes[name] is None or isinstance(outcomes[name], Unavailable | Unknown)
            slept = clock.slept[before:]
            assert 1 <= len(slept) < 120
            assert clock.now() - begun < 400, "bounded"
            assert len(set(slept)) == len(slept), "jitter"
        if seconds < 10:
            assert outcomes == {"put": None, "get": None, "exec": None}
        if seconds <= 60:
            assert outcomes["put"] is None, "a commit under way outlasts a minute"
        else:
            assert isinstance(outcomes["put"], Unknown), "503 does not say that nothing was stored"
            assert isinstance(outcomes["get"], Unavailable)
            assert isinstance(outcomes["exec"], Unavailable)
            assert "503" in str(outcomes["get"])
        away.leave(0)
        landed = {"new": outcomes["put"], "newer": outcomes["exec"]}
        for key, outcome in landed.items():
            assert (await disk.head_object(key) is not None) == (outcome is None)
        await fo.exec("echo 1 > more", disks={"w": disk})
        commits = [commit.message async for commit in disk.log()]
        assert len(commits) == len(set(commits)) == 2 + sum(outcome is None for outcome in landed.values())


async def test_503_while_the_command_ran(tmp_path: Path) -> None:
    clock = Skipping(1)
    away = Away(MemoryStore(), clock)
    async with connected(Retrying(away, clock.runtime), tmp_path / "cache", runtime=clock.runtime) as fo:
        disk = await fo.disks.create("ws")

        async def leaving(seconds: float, command: str) -> None:
            async for event in fo.stream(command, disks={"w": disk}):
                if isinstance(event, Started):
                    away.leave(seconds)

        for command, seconds in (("echo 1 > small; sleep 0.2", 60), ("head -c 1M /dev/urandom > big; sleep 0.2", 10)):
            await leaving(seconds, command)
        assert [o.key async for o in disk.list_objects()] == ["big", "small"]
        with pytest.raises(Unknown) as caught:
            await leaving(10_000, "echo 2 > late; echo out; sleep 0.2")
        run = caught.value.run  # type: ignore[attr-defined]
        assert (run.stdout, run.commits["w"].seq) == ("out\n", None)
        assert "what the command wrote to 'w' may be committed or not" in str(caught.value)
        away.leave(0)
        assert await disk.head_object("late") is None


async def test_a_slow_store_is_only_slow(tmp_path: Path) -> None:
    store = Faulty(MemoryStore(), Fault("slow", times=10**6, seconds=0.03))
    async with connected(store, tmp_path / "cache") as fo:
        disk = await fo.disks.create("ws")
        runs = await fo.map("echo {} > {}; cat {}", range(8), disks={"w": disk.mount(conditional=True)})
        assert [run.stdout for run in runs] == [f"{n}\n" for n in range(8)]
        assert all(run.timing.commit_ms >= 30 and run.timing.mount_ms >= 30 for run in runs)
        assert len([o async for o in disk.list_objects()]) == 8


# -- on the wire of S3 ----------------------------------------------------------------------------------------------


@pytest.fixture
def proxy(moto_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    from botocore.retries.standard import ExponentialBackoff

    monkeypatch.setattr(ExponentialBackoff, "delay_amount", lambda self, context: 0.0)
    with proxy_to(moto_endpoint) as proxy:
        yield proxy


@pytest.fixture
def s3(proxy: Proxy, moto_bucket: str, request: pytest.FixtureRequest) -> Iterator[Store]:
    prefix = f"t/{abs(hash(request.node.nodeid)):x}-{time.monotonic_ns()}"
    made = S3Store(moto_bucket, prefix, endpoint=proxy.endpoint, read_timeout_s=1.5)
    yield Retrying(made, hasty())
    made.close()


@pytest.mark.parametrize("how", ["503", "cut", "silent", "lost"])
async def test_an_entry_whose_put_goes_wrong_lands_once(proxy: Proxy, s3: Store, tmp_path: Path, how: str) -> None:
    answers: dict[str, Any] = {
        "503": reply(503, "SlowDown"),
        "cut": cut,
        "silent": lambda handler: (time.sleep(2), cut(handler)),
        "lost": stored_but_silent(proxy, 2),
    }
    async with connected(s3, tmp_path / "cache", runtime=hasty()) as fo:
        disk = await unprobed(fo, s3)
        await disk.put_object("old", b"there before")
        proxy.rules.append(answering("PUT", "/log/", answers[how], 1))
        run = await fo.exec("cat old > new", disks={"w": disk})
        assert run.commits["w"].seq == 2
        assert await disk.get_object("new") == b"there before"
        assert [c.seq async for c in disk.log()] == [2, 1]
        puts = [path for verb, path in proxy.seen if verb == "PUT" and path.endswith("/log/")]
        assert len(puts) == len(set(puts))


async def test_bodies_that_are_cut_are_asked_for_again(proxy: Proxy, s3: Store, tmp_path: Path) -> None:
    data = Random(1).randbytes(600_000)
    async with connected(s3, tmp_path / "one", runtime=hasty()) as fo:
        disk = await unprobed(fo, s3)
        await disk.put_object("big", data)
        await disk.put_object("small", b"small")
    proxy.bodies += [("cut", "/pack/", 2), ("cut", "/log/", 3), ("cut", "/names/", 2)]
    async with connected(s3, tmp_path / "two", runtime=hasty()) as fo:
        disk = await fo.disks.get("ws")
        assert await disk.get_object("big") == data
        proxy.bodies.append(("cut", "/pack/", 2))
        run = await fo.exec("cat small; wc -c < big; echo > new", disks={"w": disk})
        assert run.stdout == "small600000\n"
        assert run.commits["w"].seq == 3
    assert [count for _, _, count in proxy.bodies] == [0, 0, 0, 0]


@pytest.mark.parametrize("how", ["short", "flipped"])
async def test_damage_on_the_wire_is_named_and_gone_the_next_time(
    proxy: Proxy, s3: Store, tmp_path: Path, how: str
) -> None:
    data = Random(2).randbytes(600_000)
    async with connected(s3, tmp_path / "one", runtime=hasty()) as fo:
        disk = await unprobed(fo, s3)
        await disk.put_object("big", data)
        await disk.put_object("small", b"small")
    proxy.bodies += [(how, "/log/", 1)]
    async with connected(s3, tmp_path / "two", runtime=hasty()) as fo:
        disk = await fo.disks.get("ws")
        with pytest.raises(Corrupt, match="/log/"):
            await fo.exec("cat small", disks={"w": disk})
        proxy.bodies += [(how, "/pack/", 2)]
        with pytest.raises(Corrupt, match="/pack/"):
            await disk.get_object("big")
        with pytest.raises(Corrupt, match="/pack/"):
            await fo.exec("cat small", disks={"w": disk})
        assert await disk.get_object("small") == b"small"
        run = await fo.exec("md5sum < big; echo > new", disks={"w": disk})
        assert run.commits["w"].seq == 3
        assert await disk.get_object("big") == data
