"""Scratch directories that are used again hold nothing of who used them before."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

import pytest

from fanout.runtime import Runtime
from fanout.view.scratch import ScratchPool, spread


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pool(tmp_path: Path, clock: Clock) -> ScratchPool:
    numbers = count()
    return ScratchPool(lambda: str(tmp_path / str(next(numbers))), Runtime(monotonic=clock))


def test_it_is_used_again_after_a_rest_and_empty(pool: ScratchPool, clock: Clock) -> None:
    first = pool.take()
    upper = Path(first.upper)
    (upper / "d" / "e").mkdir(parents=True)
    (upper / "d" / "e" / "f").write_text("secret")
    (upper / "link").symlink_to("/etc")
    (Path(first.work) / "work").mkdir(mode=0)
    (Path(first.work) / "incompat" / "volatile").mkdir(parents=True)
    os.setxattr(upper, "user.note", b"secret")
    upper.chmod(0o1777)
    assert pool.keep(first)
    other = pool.take()
    assert other.path != first.path
    clock.now += 2
    again = pool.take()
    assert again == first
    assert os.listdir(again.upper) == []
    assert os.listdir(again.work) == []
    assert [name for name in os.listxattr(again.upper) if not name.startswith("security.")] == []
    assert os.stat(again.upper).st_mode & 0o7777 == 0o755


def test_one_that_grew_is_not_kept(pool: ScratchPool) -> None:
    scratch = pool.take()
    for number in range(500):
        (Path(scratch.upper) / f"{number:0200}").touch()
    if os.stat(scratch.upper).st_size <= 4096:
        pytest.skip("directories of this file system do not grow")
    assert not pool.keep(scratch)


def test_one_with_attribute_flags_is_not_kept(pool: ScratchPool, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = pool.take()
    monkeypatch.setattr("fanout.view.scratch._flags", lambda fd: b"changed")
    assert not pool.keep(scratch)


def test_those_at_rest_are_handed_out_for_removal(pool: ScratchPool, clock: Clock) -> None:
    scratch = pool.take()
    assert pool.keep(scratch)
    assert pool.drain() == [scratch]
    clock.now += 2
    assert pool.take() != scratch


def test_a_file_system_without_groups_is_left_alone(tmp_path: Path) -> None:
    spread(str(tmp_path))
    spread(f"/proc/{os.getpid()}")
    (tmp_path / "d").mkdir()
