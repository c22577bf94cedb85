"""The host cache: one builder, many users, bounded, and nothing half-built is ever used."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fanout.errors import Corrupt, Invalid, Unavailable
from fanout.view.cache import HostCache


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[HostCache]:
    made = HostCache(tmp_path / "cache", 1000)
    yield made
    made.close()


def builder(size: int = 10, content: bytes = b"x") -> Callable[[int], int]:
    def build(root_fd: int) -> int:
        fd = os.open("f", os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd=root_fd)
        os.write(fd, content)
        os.close(fd)
        return size

    return build


def never(root_fd: int) -> int:
    raise AssertionError("built again")


def left(cache: HostCache, kind: str = "base") -> list[str]:
    return sorted(os.listdir(f"{cache.dir}/{kind}"))


def test_built_once_then_warm(cache: HostCache) -> None:
    first = cache.lease("base", "a", builder())
    assert not first.warm
    assert Path(first.path, "f").read_bytes() == b"x"
    second = cache.lease("base", "a", never)
    assert second.warm
    first.release()
    first.release()
    second.release()
    third = cache.lease("base", "a", never)
    assert third.warm
    third.release()


def test_the_directory_is_private(cache: HostCache) -> None:
    assert stat.S_IMODE(os.stat(cache.dir).st_mode) == 0o700


def test_many_threads_one_builder(cache: HostCache) -> None:
    built: list[int] = []
    gate = threading.Barrier(8)

    def build(root_fd: int) -> int:
        built.append(1)
        return builder()(root_fd)

    def use() -> None:
        gate.wait()
        cache.lease("base", "a", build).release()

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == [1]


def test_a_failed_build_leaves_nothing_and_can_be_repeated(cache: HostCache) -> None:
    def fail(root_fd: int) -> int:
        builder()(root_fd)
        raise Corrupt("bad bytes")

    for _ in range(2):
        with pytest.raises(Corrupt):
            cache.lease("base", "a", fail)
    assert left(cache) == []
    assert os.listdir(f"{cache.dir}/tmp") == []
    cache.lease("base", "a", builder()).release()


def test_the_least_recently_used_goes_first(cache: HostCache) -> None:
    for number, name in enumerate("abc"):
        cache.lease("base", name, builder(400)).release()
        os.utime(f"{cache.dir}/lease/base-{name}", (number, number))
        if name == "b":
            cache.lease("base", "a", never).release()  # used again: b is the oldest now
    assert left(cache) == ["a", "c"]


def test_what_is_leased_stays(cache: HostCache) -> None:
    held = cache.lease("base", "a", builder(900))
    cache.lease("base", "b", builder(900)).release()
    cache.evict()
    assert "a" in left(cache)
    cache.evict(0)
    assert left(cache) == ["a"]
    held.release()
    cache.evict(0)
    assert left(cache) == []
    assert not os.listdir(f"{cache.dir}/lease")


def test_deltas_go_before_bases(cache: HostCache) -> None:
    base = cache.lease("base", "old", builder(600))
    cache.lease("delta", "new", builder(600)).release()
    base.release()
    os.utime(f"{cache.dir}/lease/base-old", (1, 1))
    cache.evict()
    assert (left(cache), left(cache, "delta")) == (["old"], [])


def test_idle_deltas_are_few(tmp_path: Path) -> None:
    cache = HostCache(tmp_path, 1 << 30)
    for number in range(100):
        cache.lease("delta", f"{number:03}", builder(1)).release()
    cache.evict()
    assert len(left(cache, "delta")) == 64
    assert "099" in left(cache, "delta")
    cache.close()


def test_a_full_disk_is_tried_again_after_making_room(cache: HostCache) -> None:
    cache.lease("base", "old", builder()).release()

    def build(root_fd: int) -> int:
        if left(cache) == ["old"]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return builder()(root_fd)

    cache.lease("base", "new", build).release()
    assert left(cache) == ["new"]


def test_a_disk_that_stays_full_is_named(cache: HostCache) -> None:
    def build(root_fd: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(Unavailable, match=cache.dir):
        cache.lease("base", "a", build)
    assert left(cache) == []


def test_scratch_is_removed_whatever_is_in_it(cache: HostCache) -> None:
    scratch = cache.scratch()
    here = scratch.upper
    for _ in range(40):
        here += "/" + "d" * 50
        os.mkdir(here)
        Path(here, "f").touch()
        os.symlink("/etc", f"{here}/l")
        os.mkfifo(f"{here}/p")
    os.chmod(f"{scratch.upper}/{'d' * 50}", 0)
    cache.discard(scratch.path)
    cache.close()
    assert os.listdir(f"{cache.dir}/trash") == os.listdir(f"{cache.dir}/upper") == []
    assert os.path.exists("/etc")


DIES = """
import os, sys
from fanout.view.cache import HostCache
cache = HostCache(sys.argv[1], 1000)
cache.scratch()
def build(fd):
    if sys.argv[2] == "building":
        print("ready", flush=True)
        sys.stdin.read()
    return 1
lease = cache.lease("base", "a", build)
print("ready", flush=True)
sys.stdin.read()
"""


def child(cache: Path, how: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", DIES, str(cache), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    living = child(tmp_path, "using")
    try:
        dead = child(tmp_path, "using")
        end(dead)
        assert len(os.listdir(tmp_path / "upper")) == 2
        cache = HostCache(tmp_path, 1000)
        assert len(os.listdir(tmp_path / "upper")) == 1
        assert len(os.listdir(tmp_path / "owner")) == 2
        cache.close()
    finally:
        end(living)


def test_another_process_s_lease_is_respected(tmp_path: Path) -> None:
    using = child(tmp_path, "using")
    cache = HostCache(tmp_path, 1000)
    try:
        cache.evict(0)
        assert left(cache) == ["a"]
        lease = cache.lease("base", "a", never)
        assert lease.warm
        lease.release()
    finally:
        end(using)
    cache.evict(0)
    assert left(cache) == []
    cache.close()


def test_killed_while_building(tmp_path: Path) -> None:
    building = child(tmp_path, "building")
    cache = HostCache(tmp_path, 1000)
    done: list[bool] = []
    waiting = threading.Thread(target=lambda: done.append(cache.lease("base", "a", builder()).warm))
    waiting.start()
    waiting.join(0.1)
    assert not done  # it waits for the other process
    end(building)
    waiting.join(10)
    assert done == [False]
    cache.close()
    HostCache(tmp_path, 1000).close()
    assert os.listdir(tmp_path / "tmp") == []


def test_trees_of_another_boot_are_not_believed(tmp_path: Path) -> None:
    first = HostCache(tmp_path, 1000)
    first.lease("base", "a", builder()).release()
    first.close()
    (tmp_path / "base" / "a" / "entry").write_text("10 another-boot")
    second = HostCache(tmp_path, 1000)
    assert not second.lease("base", "a", builder()).warm
    second.close()


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Invalid, match="cache_dir"):
        HostCache(tmp_path / "file" / "cache", 1000)
