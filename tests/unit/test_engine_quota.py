"""How much a command has written: counting hostile trees, and when to look."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from fanout.engine import quota
from fanout.engine.base import Limits
from fanout.engine.bench import Bench, completed
from fanout.engine.bubblewrap import BubblewrapEngine
from fanout.engine.quota import DiskWatch, written_bytes
from fanout.runtime import system

MIB = 1 << 20


def test_blocks_are_counted_not_sizes_nor_what_links_lead_to(tmp_path: Path) -> None:
    layer = tmp_path / "layer"
    (layer / "a" / "b").mkdir(parents=True)
    (tmp_path / "outside").write_bytes(bytes(8 * MIB))
    (layer / "out").symlink_to(tmp_path / "outside")
    (layer / "up").symlink_to(tmp_path)
    with open(layer / "a" / "holes", "wb") as file:
        file.truncate(1 << 40)
    os.mkfifo(layer / "pipe")
    before = written_bytes(str(layer), 1 << 40)
    assert before < MIB
    (layer / "a" / "b" / "data").write_bytes(os.urandom(2 * MIB))
    os.link(layer / "a" / "b" / "data", layer / "again")
    assert 2 * MIB <= written_bytes(str(layer), 1 << 40) - before < 3 * MIB
    assert written_bytes(str(tmp_path / "missing"), 1) == 0


def test_deeper_than_any_path_is_more_than_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota, "MAX_DEPTH", 50)
    fds = len(os.listdir("/proc/self/fd"))
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(quota.MAX_DEPTH + 5):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    assert written_bytes(str(tmp_path), 1 << 40) == (1 << 40) + 1
    assert len(os.listdir("/proc/self/fd")) == fds


def test_a_tree_that_changes_meanwhile_is_counted_without_an_error(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "large").write_bytes(os.urandom(4 * MIB))
    layer = tmp_path / "layer"
    layer.mkdir()
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            (layer / "d").mkdir()
            (layer / "d").rmdir()
            (layer / "d").symlink_to(secret)
            (layer / "d").unlink()

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        assert max(written_bytes(str(layer), 1 << 40) for _ in range(2000)) < MIB
    finally:
        stop.set()
        thread.join()


def test_nothing_is_counted_while_the_file_system_has_as_much_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[str] = []
    monkeypatch.setattr(quota, "written_bytes", lambda layer, enough: counted.append(layer) or 0)
    watch = DiskWatch([str(tmp_path)], 1 << 60, system)
    assert not watch.exceeded()
    watch.next_s = 0
    assert not watch.exceeded()
    assert counted == []
    watch.next_s = watch._count_s = 0
    assert not watch.exceeded()
    assert counted == [str(tmp_path)]


def test_a_command_that_writes_too_much_is_killed(tmp_path: Path) -> None:
    engine = BubblewrapEngine()
    bench = Bench(engine, tmp_path)
    mount = bench.writable(bench.directory())
    try:
        script = "i=0; while :; do head -c 4000000 /dev/urandom > f$i; i=$((i+1)); done"
        outcome = bench.run(script, mount, cwd="/mnt/work", limits=Limits(timeout_s=60, disk_bytes=32 * MIB))
        assert (outcome.exit.status, outcome.exit.exit_code, outcome.exit.limit) == ("killed", None, "disk")
        within = bench.writable(bench.directory())
        limits = Limits(timeout_s=60, disk_bytes=32 * MIB)
        outcome = completed(
            bench.run("head -c 4000000 /dev/urandom > f; sleep 0.5", within, cwd="/mnt/work", limits=limits)
        )
        assert outcome.exit.limit is None
        assert bench.run("sleep 60", limits=Limits(timeout_s=0.1)).exit.limit == "time"
    finally:
        engine.close()
