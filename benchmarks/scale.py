"""scale: 1,000, 100,000 and 1,000,000 files: open, stat, listing, a one-file commit, a branch, and a first exec.

Each disk is built through the disk layer in batches, 50 files in a directory, and each round of measurements runs in
a fresh process, the sizes in turn, each operation on a connection that has nothing in memory. All but the exec must
not depend on the size; the exec sees one directory of 50 files through a subdirectory mount, its cache empty.

The peer is git with the same trees: plumbing on a bare repository and an index, so that it never has to look at a
working tree. Its commit writes the whole index.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.to_thread

import fanout
from benchmarks import peers, trees
from benchmarks.harness import Report, Side, Size, Skip, Stats, interleave, timed
from fanout import Disk
from fanout.disk.merge import Intent, Policy
from fanout.format.tree import FILE, Node, directory
from fanout.local_disk import LocalDisk

__all__ = ["ABOUT", "EXEC_LIMIT_MS", "FLAT_LIMIT", "MEMORY_LIMIT_MB", "run"]

ABOUT = "1,000 to 1,000,000 files: open, stat, list, commit, branch, a first exec in a subdirectory"

#: Most that one operation may take on a large disk, for each millisecond on the smallest.
FLAT_LIMIT = 2.0
#: Most that a process may hold at any time, of those that build a disk and of those that use it, in MB.
MEMORY_LIMIT_MB = 600.0
#: Most that a first exec in a subdirectory of 50 files may take with an empty cache, from connecting to its result.
EXEC_LIMIT_MS = 1000.0

_IN_DIRECTORY = 50
_DIRECTORIES = 100
_BATCH = 50_000
_CONTENTS = 16
_FILE_BYTES = 400
_MTIME_NS = 1_700_000_000 * 10**9
_TIMEOUT_S = 900
_OPERATIONS = ("open", "stat", "list", "commit", "branch")


class _Plan(NamedTuple):
    sizes: tuple[int, ...]
    #: Fresh processes for each size, and how often each does everything but opening.
    processes: int
    times: int
    git: int


_PLANS = {
    "full": _Plan((1_000, 100_000, 1_000_000), 9, 5, 3),
    "quick": _Plan((1_000, 50_000), 5, 5, 2),
    "smallest": _Plan((50, 150), 1, 1, 1),
}


async def run(report: Report, size: Size, place: Path) -> None:
    plan = _PLANS[size]
    for files in plan.sizes:
        built = await _child("build", _store(place, files), place / "cache", files)
        report.add(f"{files} files: building the disk", [built["ms"]])
        report.bound(f"{files} files: peak memory of the builder", built["peak_mb"], MEMORY_LIMIT_MB, unit="MB")
    await _operations(report, plan, place)
    try:
        peers.need("git")
        await _git(report, plan, place)
    except Skip as reason:
        report.skip("git", reason)


async def _operations(report: Report, plan: _Plan, place: Path) -> None:
    """Measure in fresh processes, the sizes in turn."""
    found: dict[tuple[int, str], list[float]] = {}
    numbers = itertools.count()
    for _ in range(plan.processes):
        for files in plan.sizes:
            seed = next(numbers)
            used = await _child("use", _store(place, files), place / "cache", files, seed, plan.times)
            cold = await _child("exec", _store(place, files), place / f"exec-{seed}", files, seed)
            for name, value in {**used, **cold}.items():
                found.setdefault((files, name), []).extend(value if isinstance(value, list) else [value])
    stats: dict[tuple[int, str], Stats] = {}
    for name in (*_OPERATIONS, "exec"):
        for files in plan.sizes:
            label = "first exec in a directory of 50" if name == "exec" else name
            stats[files, name] = report.add(f"{label}, {files} files", found[files, name])
    small, *large = plan.sizes
    for name in _OPERATIONS:
        for files in large:
            report.ratio(f"{name}: {files} / {small} files", stats[files, name], stats[small, name], FLAT_LIMIT)
    for files in plan.sizes:
        report.bound(f"first exec, {files} files", stats[files, "exec"].p50, EXEC_LIMIT_MS)
        report.bound(f"peak memory of a user, {files} files", max(found[files, "peak_mb"]), MEMORY_LIMIT_MB, unit="MB")


def _store(place: Path, files: int) -> str:
    return f"file://{place}/store-{files}"


# -- the same in git ----------------------------------------------------------------------------------------------


async def _git(report: Report, plan: _Plan, place: Path) -> None:
    sides: dict[str, Side] = {}
    for files in plan.sizes:
        git = _Git(place / f"git-{files}.git", files)
        await anyio.to_thread.run_sync(git.build)
        for name in ("stat", "list", "commit", "branch"):
            sides[f"git: {name}, {files} files"] = timed(getattr(git, name))
    found = await interleave(sides, plan.git)
    stats = {name: report.add(name, values) for name, values in found.items()}
    small, *_, large = plan.sizes
    for name in ("stat", "list", "commit", "branch"):
        mine, other = stats[f"git: {name}, {large} files"], stats[f"git: {name}, {small} files"]
        report.ratio(f"git: {name}: {large} / {small} files", mine, other)


class _Git:
    """A bare repository with the same tree, and an index of it."""

    def __init__(self, place: Path, files: int) -> None:
        self._files = files
        self._place = place
        self._numbers = itertools.count()
        self._random = random.Random(files)
        self._environment = os.environ | {
            "GIT_DIR": str(place), "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull,
            **{f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
        }  # fmt: skip

    def build(self) -> None:
        """Make the repository; the stream goes into git as it is made."""
        self._call("init", "-q", "--bare", "--initial-branch=main")
        words = ["git", "fast-import", "--quiet"]
        with subprocess.Popen(words, stdin=subprocess.PIPE, env=self._environment) as importer:
            assert importer.stdin is not None
            for mark in range(_CONTENTS):
                data = trees.words(_FILE_BYTES, mark)
                importer.stdin.write(b"blob\nmark :%d\ndata %d\n%s\n" % (mark + 1, len(data), data))
            importer.stdin.write(b"commit refs/heads/main\ncommitter a <a@b> 1700000000 +0000\ndata 1\nx\n")
            for number, (path, is_file) in enumerate(_paths(self._files)):
                if is_file:
                    importer.stdin.write(b"M 100644 :%d %s\n" % (number % _CONTENTS + 1, path))
        if importer.returncode != 0:
            raise RuntimeError("git fast-import failed")
        self._call("read-tree", "main")

    def stat(self) -> None:
        self._call("ls-tree", "main", "--", _some_file(self._random, self._files))

    def list(self) -> None:
        self._call("ls-tree", "main", "--", _some_directory(self._random, self._files) + "/")

    def commit(self) -> None:
        """What `git add FILE` and `git commit` do, without looking at any other file."""
        number = next(self._numbers)
        blob = self._call("hash-object", "-w", "--stdin", given=f"{number}\n")
        path = f"{_some_directory(self._random, self._files)}/new-{number}"
        self._call("update-index", "--add", "--cacheinfo", f"100644,{blob},{path}")
        commit = self._call("commit-tree", "-p", "main", "-m", "one file", self._call("write-tree"))
        self._call("update-ref", "refs/heads/main", commit)

    def branch(self) -> None:
        self._call("branch", f"branch-{next(self._numbers)}", "main")

    def _call(self, *words: str, given: str = "") -> str:
        done = subprocess.run(
            ["git", *words], env=self._environment, input=given, capture_output=True, text=True, check=False,
            timeout=_TIMEOUT_S,
        )  # fmt: skip
        if done.returncode != 0:
            raise RuntimeError(f"git {words[0]} gave {done.returncode}: {done.stderr.strip()[-300:]}")
        return done.stdout.strip()


# -- the tree -----------------------------------------------------------------------------------------------------


def _paths(files: int) -> Iterator[tuple[bytes, bool]]:
    """Yield (path, whether it is a file), parents first."""
    for number in range(files):
        place, at = divmod(number, _IN_DIRECTORY)
        top, below = divmod(place, _DIRECTORIES)
        if at == 0:
            if below == 0:
                yield b"d%03d" % top, False
            yield b"d%03d/s%02d" % (top, below), False
        yield b"d%03d/s%02d/f%07d.txt" % (top, below, number), True


def _some_directory(source: random.Random, files: int) -> str:
    top, below = divmod(source.randrange(max(files // _IN_DIRECTORY, 1)), _DIRECTORIES)
    return f"d{top:03d}/s{below:02d}"


def _some_file(source: random.Random, files: int) -> str:
    number = source.randrange(files)
    top, below = divmod(number // _IN_DIRECTORY, _DIRECTORIES)
    return f"d{top:03d}/s{below:02d}/f{number:07d}.txt"


def _fill(disk: LocalDisk, files: int) -> None:
    """Commit the tree in batches, folding after each as a long-lived writer has it done."""
    for batch in _batches(_paths(files)):
        packer = disk.core.packer()
        refs = [packer.add(trees.words(_FILE_BYTES, seed), text=True) for seed in range(_CONTENTS)]
        intents = [
            Intent(path, None, Node(FILE, 0o644, _MTIME_NS, _FILE_BYTES, (refs[number % _CONTENTS],)))
            if is_file
            else Intent(path, None, directory(0o755, _MTIME_NS))
            for number, (path, is_file) in enumerate(batch)
        ]
        packed = packer.finish()
        disk.core.apply(disk.point, intents, policy=Policy.LAST_WINS, blobs=dict(packed.blobs), message="a batch")
        disk.point.branch.settle()
    disk.point.branch.fold()


def _batches(paths: Iterator[tuple[bytes, bool]]) -> Iterator[list[tuple[bytes, bool]]]:
    while batch := list(itertools.islice(paths, _BATCH)):
        yield batch


# -- what runs in processes of its own ----------------------------------------------------------------------------


async def _child(what: str, *arguments: object) -> dict[str, Any]:
    words = [sys.executable, "-m", "benchmarks.scale", what, *map(str, arguments)]
    root = Path(__file__).resolve().parent.parent

    def work() -> dict[str, Any]:
        done = subprocess.run(words, cwd=root, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
        if done.returncode != 0:
            raise RuntimeError(f"{what}: {done.stderr.strip()[-800:]}")
        said: dict[str, Any] = json.loads(done.stdout)
        return said

    return await anyio.to_thread.run_sync(work)


async def _build(store: str, cache: str, files: int) -> dict[str, Any]:
    started = time.perf_counter()
    async with fanout.connect(store=store, cache_dir=cache) as fo:
        disk = await fo.disks.create("ws")
        assert isinstance(disk, LocalDisk)
        await anyio.to_thread.run_sync(_fill, disk, files)
    return {"ms": (time.perf_counter() - started) * 1e3, "peak_mb": _peak_mb()}


async def _use(store: str, cache: str, files: int, seed: int, times: int) -> dict[str, Any]:
    """Each operation on a connection of its own, with no page of the tree in memory: what a small disk's few pages
    would otherwise spare it is no matter of size.
    """
    source = random.Random(seed)

    async def listing(disk: Disk) -> int:
        return len([entry async for entry in disk.listdir("/" + _some_directory(source, files))])

    operations: dict[str, Callable[[Disk, int], Awaitable[object]]] = {
        "stat": lambda disk, _: disk.head_object(_some_file(source, files)),
        "list": lambda disk, _: listing(disk),
        "commit": lambda disk, n: disk.put_object(f"{_some_directory(source, files)}/new-{seed}-{n}", b"new\n"),
        "branch": lambda disk, n: disk.branch(f"branch-{seed}-{n}"),
    }
    found: dict[str, Any] = {name: [] for name in _OPERATIONS}
    for number in range(times):
        for name, call in operations.items():
            started = time.perf_counter()
            async with fanout.connect(store=store, cache_dir=cache) as fo:
                disk = await fo.disks.get("ws")
                await disk.locks()  # the newest tree, by its list of pages
                found["open"].append((time.perf_counter() - started) * 1e3)
                started = time.perf_counter()
                if not await call(disk, number):
                    raise RuntimeError(f"{name} found nothing")
                found[name].append((time.perf_counter() - started) * 1e3)
    return found | {"peak_mb": _peak_mb()}


async def _exec(store: str, cache: str, files: int, seed: int) -> dict[str, Any]:
    where = _some_directory(random.Random(seed), files)
    started = time.perf_counter()
    async with fanout.connect(store=store, cache_dir=cache) as fo:
        disk = await fo.disks.get("ws")
        run = await fo.exec("cat f*.txt | wc -c", disks={"work": disk.mount(subdirectory=where)})
        took = (time.perf_counter() - started) * 1e3
    if run.raise_for_status().warm or run.stdout.strip() != str(_IN_DIRECTORY * _FILE_BYTES):
        raise RuntimeError(f"the exec was not cold or saw something else: {run.stdout!r}")
    return {"exec": took, "peak_mb": _peak_mb()}


def _peak_mb() -> float:
    """Return the most this process has held, by the kernel; see the memory benchmark for why not by getrusage."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmHWM"))


def _main(what: str, store: str, cache: str, *numbers: str) -> None:
    works: dict[str, Callable[..., Awaitable[dict[str, Any]]]] = {"build": _build, "use": _use, "exec": _exec}
    print(json.dumps(anyio.run(partial(works[what], store, cache, *map(int, numbers)))))


if __name__ == "__main__":
    _main(*sys.argv[1:])
