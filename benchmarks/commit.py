"""commit: what making changes durable costs: one small file, and 10,000 new files of 8 KiB written by one exec.

The peers move the same 10,000 files: `tar | zstd` into one local file, and the usual tools into the same S3 server.
Only the commit counts for fanout, not the command that wrote the files; its peers start from files too.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks import peers, s3_server, trees
from benchmarks.harness import Report, Side, Size, Skip, Stats, interleave, timed
from fanout import Disk, Fanout, Settings
from fanout.local import LocalFanout
from fanout.store.open import open_store
from fanout.store.wrap import Metered

__all__ = ["ABOUT", "run"]

ABOUT = "one small file, and 10,000 new ones, beside tar | zstd, rclone and the AWS CLI"

#: Most that a commit of one small file may take on a local store, in ms.
SMALL_LIMIT_MS = 10.0
#: Most that the commit of 10,000 files may take for each millisecond of `tar | zstd`.
TAR_LIMIT = 2.0
#: How many times faster than copying tools it has to be on S3.
COPY_LIMIT = 10.0

_FILE_BYTES = 8 << 10
_SEEN_AT = "/opt/tree"


class _Plan(NamedTuple):
    small: int
    files: int
    rounds: int
    #: Rounds on S3: 0 leaves it out unless a server was given.
    copies: int


_PLANS = {"full": _Plan(100, 10_000, 7, 2), "quick": _Plan(30, 10_000, 3, 0), "smallest": _Plan(2, 100, 1, 0)}


async def run(report: Report, size: Size, place: Path) -> None:
    plan = _PLANS[size]
    tree = trees.make_tree(place / "tree", plan.files, _FILE_BYTES)
    await _small(report, plan, place)
    async with trees.connected(place / "many", host_paths=(f"{tree}:{_SEEN_AT}",)) as fo:
        ours = await _writer(fo)
        sides: dict[str, Side] = {
            "fanout": ours,
            "tar | zstd": timed(lambda: peers.tar_zstd(tree, place / "tree.tar.zst")),
            "tar | zstd -1 -T0": timed(lambda: peers.tar_zstd(tree, place / "tree.tar.zst", "-1", "-T0")),
        }
        try:
            found = await interleave(sides, plan.rounds)
        except Skip as reason:
            report.skip("tar | zstd", reason)
        else:
            mine = report.add(f"{plan.files} files: commit_ms, local store", found.pop("fanout"))
            for name, values in found.items():
                theirs = report.add(f"{plan.files} files: {name}", values)
                limit = TAR_LIMIT if name == "tar | zstd" else None
                report.ratio(f"{plan.files} files: commit / {name}", mine, theirs, limit)
    if not plan.copies and not os.environ.get("FANOUT_TEST_S3_ENDPOINT"):
        report.skip("S3", "starting a server takes too long for this size; FANOUT_TEST_S3_ENDPOINT may name one")
        return
    try:
        with s3_server.server(place) as endpoint, s3_server.bucket(endpoint, f"fanout-bench-{os.getpid()}") as bucket:
            await _on_s3(report, plan, place, tree, endpoint, bucket)
    except Skip as reason:
        report.skip("S3", reason)


async def _small(report: Report, plan: _Plan, place: Path) -> None:
    """One changed file, by exec and by put_object, on a local store; and the requests of each."""
    settings = Settings(store=f"file://{place}/small/store", cache_dir=place / "small" / "cache")
    metered = Metered(open_store(settings.store))
    async with LocalFanout(settings, store=metered) as fo:
        disk = await trees.filled(fo, 50, 400, "small")
        await _one_small(report, fo, disk, metered, plan.small, "local store", SMALL_LIMIT_MS)
    metered.close()


async def _one_small(
    report: Report, fo: Fanout, disk: Disk, metered: Metered, rounds: int, where: str, limit_ms: float | None
) -> None:
    commits: list[float] = []
    puts: list[float] = []
    exec_requests: list[float] = []
    put_requests: list[float] = []
    await fo.exec("echo first > changed.txt", disks={"work": disk})
    for number in range(rounds):
        before = metered.usage()
        run = await fo.exec(f"echo {number} > changed.txt", disks={"work": disk})
        used = metered.usage() - before
        commits.append(run.raise_for_status().timing.commit_ms)
        exec_requests.append(used["create"] + used["put"])
        before = metered.usage()
        started = time.perf_counter()
        await disk.put_object("object.txt", f"{number}\n")
        puts.append((time.perf_counter() - started) * 1e3)
        put_requests.append((metered.usage() - before).total)
    mine = report.add(f"one file: commit_ms of an exec, {where}", commits)
    report.bound(f"one file: commit of an exec, {where}", mine.p50, limit_ms)
    mine = report.add(f"one file: put_object, {where}", puts)
    report.bound(f"one file: put_object, {where}", mine.p50, limit_ms)
    # A median: now and then a fold in the background sends requests of its own.
    report.bound(f"one file: writes of an exec, {where}", Stats.of(exec_requests).p50, 1, unit="requests")
    report.bound(f"one file: requests of put_object, {where}", Stats.of(put_requests).p50, 1, unit="requests")


async def _writer(fo: Fanout) -> Side:
    """Return a side that has an exec write the tree on a fresh branch, and gives its commit_ms."""
    disk = await fo.disks.create("many")
    await disk.put_object("about.txt", b"a disk\n")
    numbers = iter(range(1 << 20))

    async def ours() -> float:
        branch = await disk.branch(f"round-{next(numbers)}")
        run = await fo.exec(f"cp -r {_SEEN_AT} copy", disks={"work": branch})
        return run.raise_for_status().timing.commit_ms

    return ours


async def _on_s3(report: Report, plan: _Plan, place: Path, tree: Path, endpoint: str, bucket: str) -> None:
    settings = Settings(
        store=f"s3://{bucket}/fanout", s3_endpoint=endpoint, cache_dir=place / "s3-cache",
        host_paths=(f"{tree}:{_SEEN_AT}",),
    )  # fmt: skip
    metered = Metered(open_store(settings.store, s3_endpoint=endpoint))
    try:
        async with LocalFanout(settings, store=metered) as fo:
            disk = await trees.filled(fo, 50, 400, "small-s3")
            await _one_small(report, fo, disk, metered, plan.small, "S3", None)
            environment = peers.s3_environment(endpoint)
            numbers = iter(range(1 << 20))
            sides: dict[str, Side] = {
                "fanout": await _writer(fo),
                "rclone copy": timed(lambda: peers.rclone(tree, f"{bucket}/rclone/{next(numbers)}", environment)),
                "aws s3 cp": timed(lambda: peers.aws(tree, f"{bucket}/aws/{next(numbers)}", environment)),
            }
            for name, side in list(sides.items()):
                try:
                    await side() if name == "fanout" else peers.need(name.split()[0])
                except Skip as reason:
                    report.skip(name, reason)
                    del sides[name]
            found = await interleave(sides, max(plan.copies, 1), warm_up=0)
    finally:
        metered.close()
    mine = report.add(f"{plan.files} files: commit_ms, S3", found.pop("fanout"))
    for name, values in found.items():
        theirs = report.add(f"{plan.files} files: {name}", values)
        label = f"{plan.files} files, S3: {name} / commit"
        report.bound(label, theirs.p50 / mine.p50, COPY_LIMIT, unit="x", at_least=True)
