"""grep: searching a real tree of 94,000 text files: warm, after 1,000 edits, cold; beside ripgrep and git grep.

The files are those of some large Python packages, downloaded by pip as wheels and unpacked, and the standard library.
The peers search them where they lie on this host's file system, in its page cache; a disk that holds the same is
searched through the public interface, from the call to its result, in a connection that is open. The sides of each
ratio run in turn. `rg -uu` looks at hidden and ignored files, as a search of a disk does, and passes binary files
over, which that names.
"""

from __future__ import annotations

import itertools
import os
import random
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import anyio.to_thread

import fanout
from benchmarks import peers, s3_server, trees
from benchmarks.harness import Report, Side, Size, Skip, Stats, interleave
from benchmarks.link import GIGABIT, Link, Linked
from fanout.config import Settings
from fanout.disk.merge import Intent, Policy
from fanout.format import layout
from fanout.local import LocalFanout
from fanout.local_disk import LocalDisk
from fanout.run.ripgrep import program
from fanout.store.open import open_store

__all__ = ["ABOUT", "COLD_LIMIT", "EDITED_LIMIT", "INDEX_LIMIT", "WARM_LIMIT", "run"]

ABOUT = "searching 94,000 real text files: warm, after 1,000 edits, cold; beside rg and git grep on a checkout"

#: How many times faster than rg it has to be, for patterns with fewer than 1,000 matches; and after the edits.
WARM_LIMIT = 10.0
EDITED_LIMIT = 8.0
#: And never slower, for any pattern.
ANY_LIMIT = 1.0
#: Most that a first search on a cold host may take for each millisecond of downloading the packs.
COLD_LIMIT = 1.2
#: How many times faster a rare literal has to be with the index than without, on a disk of 5 GB.
INDEX_LIMIT = 5.0

_PACKAGES = (
    "ansible==10.7.0", "botocore==1.35.90", "Django==5.1.4", "homeassistant==2024.3.3", "oci==2.141.0",
    "plotly==5.24.1", "sympy==1.13.3",
)  # fmt: skip
#: Patterns with under 1,000 matches each, and what they are.
_FEW = {
    "rare word": "homogeneous",
    "absent word": "zzqqyx",
    "literal": "raise ImproperlyConfigured",
    "regex": r"def (get|set)_[a-z]+_state\(",
    "regex, rare words": r"def \w+_cache\(",
    "alternation": "nilpotent|ImproperlyConfigured",
}
_MANY = {
    "a word in many files": "deprecat",
    "every third file": "import",
    "most lines": "e",
    "dates": r"\d{4}-\d\d-\d\d",
}
#: The absent word again, spelt so that nothing is known of what it needs: all is searched.
_UNINDEXED = "(?i:)zzqqyx"
_EDITS = 1000
#: The tree is copied this often for the disk of 5 GB.
_COPIES = 8
_DOWNLOADS_AT_ONCE = 8
#: An absent word that reads less than this finds all else in the index.
_INDEXED_BYTES = 64 << 20


#: Opens a connection that keeps its cache in a directory.
_Host = Callable[[Path], AbstractAsyncContextManager[LocalFanout]]


class _Plan(NamedTuple):
    files: int | None
    rounds: int
    edits: int
    copies: int
    held: bool


_PLANS = {
    "full": _Plan(None, 5, _EDITS, _COPIES, True), "quick": _Plan(4_000, 5, 100, 0, False),
    "smallest": _Plan(150, 1, 5, 0, False),
}  # fmt: skip


async def run(report: Report, size: Size, place: Path) -> None:
    plan = _PLANS[size]
    tree = place / "tree"
    await anyio.to_thread.run_sync(_gather, tree, plan.files, place / "wheels")
    git = _Git(tree, place / "git")
    with ExitStack() as stack:
        store, endpoint = _store(report, size, place, stack)
        async with trees.connected(place / "filling", store=store, s3_endpoint=endpoint) as fo:
            disk = await fo.disks.create("ws")
            await disk.upload(tree)
            _settled(disk)
            facts = await disk.grep("zzqqyx", max_duration_s=600)
            report.notes.append(f"{facts.files_scanned:,} files, {facts.bytes_scanned / 1e6:,.0f} MB to search")
            await anyio.to_thread.run_sync(_index, disk)
            await _warm(report, plan, disk, tree, None, "without the index", {"absent word": _UNINDEXED})
            await _warm(report, plan, disk, tree, git, "warm", _FEW, WARM_LIMIT)
            await _warm(report, plan, disk, tree, git, "warm", _MANY, ANY_LIMIT)
        await _cold(report, plan, store, endpoint, place)
        async with trees.connected(place / "filling", store=store, s3_endpoint=endpoint) as fo:
            disk = await fo.disks.get("ws")
            await _edit(disk, tree, plan.edits)
            first = await _ours(disk, _FEW["literal"])
            report.add(f"first search after {plan.edits} edits", [first])
            await _warm(report, plan, disk, tree, None, f"after {plan.edits} edits", _FEW, EDITED_LIMIT)
            if plan.copies:
                await _large(report, plan, disk)


async def _warm(
    report: Report, plan: _Plan, disk: fanout.Disk, tree: Path, git: _Git | None, when: str,
    patterns: Mapping[str, str], limit: float | None = None,
) -> None:  # fmt: skip
    for what, pattern in patterns.items():
        sides: dict[str, Side] = {
            "fanout": partial(_ours, disk, pattern),
            "rg": partial(anyio.to_thread.run_sync, _rg, tree, pattern),
        }
        if git is not None and plan.held:
            sides["git grep"] = partial(anyio.to_thread.run_sync, git.grep, pattern)
        cpu: dict[str, list[float]] = {name: [] for name in sides}
        found = await interleave({name: _with_cpu(side, cpu[name]) for name, side in sides.items()}, plan.rounds)
        stats = {name: report.add(f"{when}: {what}, {name}", values) for name, values in found.items()}
        held = limit if plan.held else None
        _faster(report, f"{when}: {what} ({pattern}): rg / fanout", stats["rg"], stats["fanout"], held)
        used = {name: Stats.of(values) for name, values in cpu.items()}
        _faster(report, f"{when}: {what}, CPU time: rg / fanout", used["rg"], used["fanout"], None)
        if "git grep" in stats:
            _faster(report, f"{when}: {what}: git grep / fanout", stats["git grep"], stats["fanout"], None)


def _faster(report: Report, label: str, theirs: Stats, ours: Stats, limit: float | None) -> None:
    report.bound(label, theirs.p50 / ours.p50, limit, unit="x", at_least=True)


def _with_cpu(side: Side, kept: list[float]) -> Side:
    """Keep what a side's processes use, in ms: on a busy machine that says more than the time that passes."""

    def used() -> float:
        return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))

    async def run() -> float:
        before = used()
        took = await side()
        kept.append((used() - before) * 1e3)
        return took

    return run


async def _ours(disk: fanout.Disk, pattern: str) -> float:
    started = time.perf_counter()
    found = await disk.grep(pattern, max_duration_s=600)
    took = (time.perf_counter() - started) * 1e3
    if found.stopped_reason not in ("completed", "max_results"):
        raise RuntimeError(f"{pattern!r}: {found.stopped_reason}")
    return took


def _rg(tree: Path, pattern: str) -> float:
    words = [program().path, "--no-config", "-uu", "--line-number", "-e", pattern, "--", "."]
    return _piped(words, tree, {})


class _Git:
    """The tree as a git checkout, its repository beside it."""

    def __init__(self, tree: Path, repository: Path) -> None:
        self._tree = tree
        self._environment = {"GIT_DIR": str(repository), "GIT_WORK_TREE": str(tree), "HOME": str(repository)}
        peers.need("git")
        for words in (["git", "init", "-q"], ["git", "add", "-A", "-f", "."]):
            subprocess.run(words, cwd=tree, env={**os.environ, **self._environment}, check=True, capture_output=True)

    def grep(self, pattern: str) -> float:
        words = ["git", "grep", "--line-number", "-I", "--perl-regexp", "-e", pattern]
        return _piped(words, self._tree, self._environment)


def _piped(words: list[str], directory: Path, environment: Mapping[str, str]) -> float:
    """Return the milliseconds until a peer has said all it found."""
    started = time.perf_counter()
    done = subprocess.run(words, cwd=directory, env={**os.environ, **environment}, capture_output=True, check=False)
    took = (time.perf_counter() - started) * 1e3
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{words[0]}: {done.stderr[-300:].decode(errors='replace')}")
    return took


async def _cold(report: Report, plan: _Plan, store: str, endpoint: str | None, place: Path) -> None:
    """A first search of everything by a host that knows nothing, beside getting the packs and nothing else.

    Both in a connection that is open. Once with the words that the host before published, once as if it had not; each
    as near to the store as this host is, and by a link of the speed that hosts have.
    """
    at = "S3 on this host" if endpoint else "local store"
    for form, published in (("index published", True), ("nothing published", False)):
        if published and not await _is_published(store, endpoint, place):
            report.skip(f"cold, {form}", "the tree is too small for an index")
            continue
        for link in (None, GIGABIT):
            open_ = partial(_host, store, endpoint, link, published)
            how = at if link is None else f"{at} by {link.name}"
            sides: dict[str, Side] = {
                "fanout": partial(_first_search, open_, published, place), "packs": partial(_packs_alone, open_, place)
            }  # fmt: skip
            found = await interleave(sides, plan.rounds if published else max(plan.rounds // 2, 1))
            mine = report.add(f"cold, {form}: first search, {how}", found["fanout"])
            packs = report.add(f"cold, {form}: packs alone, {how}", found["packs"])
            limit = COLD_LIMIT if plan.held and endpoint else None
            report.ratio(f"cold, {form}, {how}: fanout / downloading the packs", mine, packs, limit)


@asynccontextmanager
async def _host(
    store: str, endpoint: str | None, link: Link | None, published: bool, cache: Path
) -> AsyncIterator[LocalFanout]:
    """A connection of a host that reaches the store by a link."""
    settings = Settings.load(store=store, s3_endpoint=endpoint, cache_dir=cache, grep_index=published)
    nearest = open_store(store, s3_endpoint=endpoint)
    try:
        fo = LocalFanout(settings, store=nearest if link is None else Linked(nearest, link))
        async with fo:
            yield fo
    finally:
        nearest.close()


async def _first_search(open_: _Host, published: bool, place: Path) -> float:
    cache = Path(tempfile.mkdtemp(prefix="cold-", dir=place))
    async with open_(cache) as fo:
        started = time.perf_counter()
        found = await fo.grep("ws", _FEW["absent word"], max_duration_s=600)
        took = (time.perf_counter() - started) * 1e3
    # Or the next one would be timed while this one's 600 MB are written to the disk.
    await anyio.to_thread.run_sync(shutil.rmtree, cache)
    if found.stopped_reason != "completed" or (sum(shard.fetched for shard in found.shards) == 0) != published:
        raise RuntimeError("it was not cold, or not all of it")
    return took


async def _packs_alone(open_: _Host, place: Path) -> float:
    async with open_(place / "none") as fo:
        disk = await fo.disks.get("ws")
        return await anyio.to_thread.run_sync(_download, fo, disk.id)


async def _is_published(store: str, endpoint: str | None, place: Path) -> bool:
    async with fanout.connect(store=store, cache_dir=place / "none", s3_endpoint=endpoint) as fo:
        disk = await fo.disks.get("ws")
        assert isinstance(disk, LocalDisk)
        return bool(await anyio.to_thread.run_sync(disk.core.index.objects))


def _download(fo: LocalFanout, disk_id: str) -> float:
    store = fo._store
    keys = [meta.key for meta in store.list(f"{layout.disk_prefix(disk_id)}pack/")]
    started = time.perf_counter()
    with ThreadPoolExecutor(_DOWNLOADS_AT_ONCE) as pool:
        for done in [pool.submit(store.get, key) for key in keys]:
            done.result()
    return (time.perf_counter() - started) * 1e3


async def _edit(disk: fanout.Disk, tree: Path, edits: int) -> None:
    """Add a line to so many files, on the disk and in the tree, each in a commit of its own."""
    files = sorted(path for path in tree.rglob("*") if path.is_file() and not path.is_symlink())
    for path in random.Random(5).sample(files, min(edits, len(files))):
        with path.open("ab") as file:
            file.write(b"\n# edited: raise ImproperlyConfigured(\n")
        await disk.put_object(os.fsdecode(os.fsencode(path.relative_to(tree))), path.read_bytes())
    _settled(disk)


async def _large(report: Report, plan: _Plan, disk: fanout.Disk) -> None:
    """A rare literal on a disk of 5 GB (the tree several times over, stored once), without and with the index."""
    assert isinstance(disk, LocalDisk)
    await anyio.to_thread.run_sync(_multiply, disk, plan.copies)
    await disk.grep("zzqqyx", max_duration_s=3600)
    for _ in range(100):
        found_by = await disk.grep("zzqqyx", max_duration_s=600)
        if found_by.bytes_scanned < _INDEXED_BYTES:
            break
        await anyio.to_thread.run_sync(_index, disk)
    sides: dict[str, Side] = {"without": partial(_ours, disk, _UNINDEXED), "with": partial(_ours, disk, "zzqqyx")}
    found = await interleave(sides, plan.rounds)
    stats = {
        name: report.add(f"a rare literal on {plan.copies + 1} trees, {name} the index", found[name]) for name in found
    }
    _faster(report, "a rare literal on 5 GB: without / with the index", stats["without"], stats["with"], INDEX_LIMIT)


def _multiply(disk: LocalDisk, copies: int) -> None:
    state = disk.point.state()
    whole = list(state.below(b"", whole=True))
    for copy in range(copies):
        prefix = b"copy%d/" % copy
        intents = [Intent(prefix + path, None, node) for path, node in whole]
        disk.core.apply(disk.point, intents, policy=Policy.LAST_WINS, seen_blobs=state.blob_bytes())
        _settled(disk)


def _settled(disk: fanout.Disk) -> None:
    """Have the tree folded, as it is soon after a large commit."""
    assert isinstance(disk, LocalDisk)
    disk.core.branch().settle()
    if disk.core.branch().known().changes:
        disk.core.branch().fold()


def _index(disk: fanout.Disk) -> None:
    """Wait for the words of what was searched, and for their publication."""
    assert isinstance(disk, LocalDisk)
    assert disk._searcher is not None
    assert disk._searcher.publisher is not None
    disk._searcher.indexer.settle()
    disk._searcher.publisher.settle()


def _store(report: Report, size: Size, place: Path, stack: ExitStack) -> tuple[str, str | None]:
    if size == "full" or os.environ.get("FANOUT_TEST_S3_ENDPOINT"):
        try:
            endpoint = stack.enter_context(s3_server.server(place))
            bucket = stack.enter_context(s3_server.bucket(endpoint, f"fanout-bench-grep-{os.getpid()}"))
            return f"s3://{bucket}/fanout", endpoint
        except Skip as reason:
            report.skip("S3", reason)
    return f"file://{place}/store", None


def _gather(tree: Path, files: int | None, wheels: Path) -> None:
    """Fill `tree`: with everything, or with the first files of the standard library alone."""
    ignore: Callable[..., set[str]] = shutil.ignore_patterns("__pycache__", "site-packages", "*.so", "*.a")
    stdlib = Path(sysconfig.get_path("stdlib"))
    if files is None:
        _download_wheels(wheels)
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(tree / wheel.name.partition("-")[0])
        shutil.copytree(stdlib, tree / "stdlib", ignore=ignore, symlinks=True)
        return
    for path in itertools.islice(sorted(stdlib.rglob("*.py")), files):
        target = tree / path.relative_to(stdlib)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def _download_wheels(wheels: Path) -> None:
    words = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(wheels)]
    done = subprocess.run([*words, *_PACKAGES], capture_output=True, text=True, check=False, timeout=600)
    if done.returncode != 0:
        raise Skip(f"pip cannot download the packages: {done.stderr.strip()[-300:]}")
