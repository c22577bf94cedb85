"""commit_storm: 1,000 writers commit one file each to one branch, from one process and from four.

All writers start in one instant; each waits until its file is durable. Afterwards a fresh connection reads the log:
every file must be there with its content, and every commit must be in it once. Entries are what the commits were
gathered into, and what a store of many writers has to take.

The peers make as many files durable with as many threads and nothing else: no tree, no history, no atomicity across
hosts. Locally a file written, synced and renamed into place; on S3 one PUT for each.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.to_thread

import fanout
from benchmarks import s3_server, trees
from benchmarks.harness import Report, Side, Size, Skip, interleave

__all__ = ["ABOUT", "PER_ENTRY", "RATE_LIMIT", "run"]

ABOUT = "1,000 writers committing one file each to one branch, from one and from four processes"

#: How many commits a second one process has to reach on a local store.
RATE_LIMIT = 300.0
#: How many commits one entry has to hold at least on S3, on average.
PER_ENTRY = 10.0

_PROCESSES = 4
#: How many blocking calls an event loop runs at once: so many threads the peers have, too.
_THREADS = 40
_TIMEOUT_S = 600


class _Plan(NamedTuple):
    writers: int
    #: Execs, each in its own sandbox, on the local store from one process.
    execs: int
    rounds: int
    #: Whether the targets are for this size.
    held: bool


_PLANS = {"full": _Plan(1000, 200, 5, True), "quick": _Plan(1000, 50, 2, True), "smallest": _Plan(24, 3, 1, False)}


async def run(report: Report, size: Size, place: Path) -> None:
    plan = _PLANS[size]
    await _storm(report, plan, place, f"file://{place}/store", "", partial(_write_files, place / "files"))
    await _execs(report, plan, place)
    if size != "full" and not os.environ.get("FANOUT_TEST_S3_ENDPOINT"):
        report.skip("S3", "starting a server takes too long for this size; FANOUT_TEST_S3_ENDPOINT may name one")
        return
    try:
        with (
            s3_server.server(place) as endpoint,
            s3_server.bucket(endpoint, f"fanout-bench-storm-{os.getpid()}") as bucket,
        ):
            put = partial(_put_objects, endpoint, bucket, itertools.count())
            await _storm(report, plan, place, f"s3://{bucket}/fanout", endpoint, put)
    except Skip as reason:
        report.skip("S3", reason)


async def _storm(
    report: Report, plan: _Plan, place: Path, store: str, endpoint: str, peer: Callable[[int], None]
) -> None:
    """Measure one and four processes, and the peer, in turn, on one store."""
    entries: dict[int, list[float]] = {1: [], _PROCESSES: []}
    numbers = itertools.count()

    def ours(processes: int) -> float:
        name = f"storm-{next(numbers)}"
        took, made = _processes(store, endpoint, place, name, plan.writers, processes)
        entries[processes].append(plan.writers / made)
        return took

    def theirs() -> float:
        started = time.perf_counter()
        peer(plan.writers)
        return (time.perf_counter() - started) * 1e3

    sides: dict[str, Side] = {
        "1 process": partial(anyio.to_thread.run_sync, ours, 1),
        f"{_PROCESSES} processes": partial(anyio.to_thread.run_sync, ours, _PROCESSES),
        "peer": partial(anyio.to_thread.run_sync, theirs),
    }
    found = await interleave(sides, plan.rounds, warm_up=0)
    at = "S3" if endpoint else "local store"
    bare = "one PUT for each" if endpoint else "a synced file for each, renamed"
    stats = {name: report.add(f"{plan.writers} writers, {name}, {at}", found[name]) for name in sides if name != "peer"}
    theirs_ms = report.add(f"{plan.writers} writers, {bare}", found["peer"])
    for processes, name in ((1, "1 process"), (_PROCESSES, f"{_PROCESSES} processes")):
        rate = plan.writers / stats[name].p50 * 1e3
        limit = RATE_LIMIT if processes == 1 and not endpoint and plan.held else None
        report.bound(f"{name}, {at}: commits a second", rate, limit, unit="/s", at_least=True)
        limit = PER_ENTRY if endpoint and plan.held else None
        report.bound(f"{name}, {at}: commits an entry", min(entries[processes]), limit, unit="", at_least=True)
        report.ratio(f"{name} / {bare}", stats[name], theirs_ms)


async def _execs(report: Report, plan: _Plan, place: Path) -> None:
    """Commits of whole execs: each starts a sandbox, which bounds the rate, and the entries must still be few."""
    async with trees.connected(place / "execs") as fo:
        disk = await trees.filled(fo, 50, 400)
        await fo.exec("true", disks={"work": disk})
        started = time.perf_counter()
        mount = disk.mount(conditional=True)
        runs = await fo.map("echo {} > {}.txt", range(plan.execs), disks={"work": mount}, max_in_flight=plan.execs)
        took = time.perf_counter() - started
        landed = [run.raise_for_status().commits["work"].seq for run in runs]
        for number in range(plan.execs):
            if await disk.get_object(f"{number}.txt") != b"%d\n" % number:
                raise RuntimeError(f"the file of exec {number} is not there")
    report.add(f"{plan.execs} execs, local store: commit_ms of one", [run.timing.commit_ms for run in runs])
    report.bound(f"{plan.execs} execs, local store: execs a second", plan.execs / took, unit="/s", at_least=True)
    report.bound(f"{plan.execs} execs, local store: commits an entry", plan.execs / len({*landed}), unit="")


# -- the writers --------------------------------------------------------------------------------------------------


def _processes(store: str, endpoint: str, place: Path, name: str, writers: int, processes: int) -> tuple[float, int]:
    """Have `writers` commit from so many processes at once; returns the milliseconds and the number of entries."""
    shares = [range(number, writers, processes) for number in range(processes)]
    anyio.run(_prepare, store, endpoint, place, name)
    with ExitStack() as stack:
        children = [stack.enter_context(_Child(store, endpoint, place, name, share)) for share in shares]
        for child in children:
            child.ready()
        started = time.perf_counter()
        for child in children:
            child.go()
        for child in children:
            child.finish()
        took = (time.perf_counter() - started) * 1e3
    return took, anyio.run(_entries, store, endpoint, place, name, writers)


async def _prepare(store: str, endpoint: str, place: Path, name: str) -> None:
    async with _connected(store, endpoint, place) as fo:
        await fo.disks.create(name)


async def _entries(store: str, endpoint: str, place: Path, name: str, writers: int) -> int:
    """Check every file and every commit with a fresh connection; returns how many entries there are."""
    async with _connected(store, endpoint, place) as fo:
        disk = await fo.disks.get(name)
        commits = [commit async for commit in disk.log()]
        seqs = {commit.seq for commit in commits}
        added = sorted(change.path for commit in commits for change in commit.changes if change.path.endswith(".txt"))
        expected = sorted(_path(number) for number in range(writers))
        listed = sorted([item.key async for item in disk.list_objects("out/")])
        if added != expected or listed != expected or seqs != set(range(1, len(seqs) + 1)):
            raise RuntimeError(f"{len(commits)} commits in {len(seqs)} entries, {len(listed)} of {writers} files")
        for number in range(0, writers, 37):
            if await disk.get_object(_path(number)) != _content(number):
                raise RuntimeError(f"{_path(number)} holds something else")
    return len(seqs)


def _connected(store: str, endpoint: str, place: Path) -> fanout.Fanout:
    return fanout.connect(store=store, cache_dir=place / "cache", s3_endpoint=endpoint or None)


def _path(number: int) -> str:
    return f"out/{number:04d}.txt"


def _content(number: int) -> bytes:
    return b"writer %d\n" % number


class _Child:
    """A process whose writers wait for a line before they start."""

    def __init__(self, store: str, endpoint: str, place: Path, name: str, share: range) -> None:
        words = [sys.executable, "-m", "benchmarks.commit_storm", store, endpoint, str(place), name]
        root = Path(__file__).resolve().parent.parent
        self._process = subprocess.Popen(
            [*words, json.dumps([share.start, share.stop, share.step])], cwd=root, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.communicate()

    def ready(self) -> None:
        """Wait until it is connected."""
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            self.finish()

    def go(self) -> None:
        """Let its writers start."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def finish(self) -> None:
        """Wait for its last writer; raises where one failed."""
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "done\n":
            _, err = self._process.communicate(timeout=_TIMEOUT_S)
            raise RuntimeError(f"a process of writers failed: {err.strip()[-800:]}")


async def _write(store: str, endpoint: str, place: Path, name: str, share: range) -> None:
    """What a child does: its writers are tasks of one event loop."""
    async with _connected(store, endpoint, place) as fo:
        disk = await fo.disks.get(name)
        await disk.head_object("nothing")
        print("ready", flush=True)
        sys.stdin.readline()
        async with anyio.create_task_group() as group:
            for number in share:
                group.start_soon(disk.put_object, _path(number), _content(number))
        print("done", flush=True)


# -- the peers ----------------------------------------------------------------------------------------------------


def _write_files(place: Path, writers: int) -> None:
    """One file for each writer: written, synced, renamed into place, and its directory synced."""
    place.mkdir(exist_ok=True)
    directory = os.open(place, os.O_RDONLY | os.O_DIRECTORY)

    def write(number: int) -> None:
        temporary = f".{number}"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644, dir_fd=directory)
        try:
            os.write(fd, _content(number))
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, f"{number}.txt", src_dir_fd=directory, dst_dir_fd=directory)
        os.fsync(directory)

    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(write, range(writers)))
    finally:
        os.close(directory)


def _put_objects(endpoint: str, bucket: str, rounds: itertools.count[int], writers: int) -> None:
    """One object for each writer."""
    import boto3
    from botocore.config import Config

    config = Config(max_pool_connections=_THREADS, request_checksum_calculation="when_required")
    client: Any = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", config=config)
    prefix = f"raw/{next(rounds)}"

    def put(number: int) -> None:
        client.put_object(Bucket=bucket, Key=f"{prefix}/{_path(number)}", Body=_content(number), IfNoneMatch="*")

    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(put, range(writers)))


if __name__ == "__main__":
    _store, _endpoint, _place, _name, _share = sys.argv[1:]
    anyio.run(_write, _store, _endpoint, Path(_place), _name, range(*json.loads(_share)))
