"""cold_start: a host that has never seen the disk: until the end of a first `cat` and of a first `grep -r` by an exec.

The disk is on a real S3 server (one is started if FANOUT_TEST_S3_ENDPOINT names none); each run has an empty cache and
a fresh connection. The peers fetch the same files to this host and then run the same command on them: a tar object
streamed into `tar x` (by boto3 in this process, and by the AWS CLI), and one object a file with rclone and the CLI.

The small forms fall back to a local store, where only the shape of the figures means something. Nothing is removed
between the rounds: ext4 gives no inode away again for minutes after it was freed, and looking past thousands of such
costs whatever makes a file next.
"""

from __future__ import annotations

import itertools
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anyio.to_thread

import fanout
from benchmarks import peers, s3_server, trees
from benchmarks.harness import Report, Side, Size, Skip, Stats, interleave

__all__ = ["ABOUT", "COPY_LIMIT", "TAR_LIMIT", "run"]

ABOUT = "an empty cache: first `cat` and first `grep -r` on 20,000 files on S3, beside tar, rclone and the AWS CLI"

#: Most that a first command may take for each millisecond of streaming a tar object into `tar x` and running it there.
TAR_LIMIT = 1.5
#: How many times faster than rclone copying one object a file it has to be.
COPY_LIMIT = 8.0

_FILE_BYTES = 5_000
_CHUNK = 1 << 20
_TIMEOUT_S = 900
#: The AWS CLI hangs now and then while it streams to its output.
_STREAM_S = 60
_COMMANDS = {"cat": "cat {file} | wc -c", "grep": "grep -r 'file {number}$' . | wc -l"}


class _Plan(NamedTuple):
    files: int
    rounds: int
    #: Rounds of the tools that copy one object a file: they are slow, and far off.
    copies: int
    #: Whether the targets are for this size: few files take hardly longer than a connection and a sandbox.
    held: bool


_PLANS = {
    "full": _Plan(20_000, 7, 1, True), "quick": _Plan(2_000, 3, 1, False), "smallest": _Plan(150, 1, 1, False)
}  # fmt: skip

#: One cold exec in a process of its own; prints the milliseconds from its first line on, imports included.
_CHILD = """
import time
started = time.perf_counter()
import sys
from fanout.sync import connect
with connect(store=sys.argv[1], cache_dir=sys.argv[2], s3_endpoint=sys.argv[3] or None) as fo:
    fo.exec(sys.argv[4], disks={"work": fo.disks.get("ws")}).raise_for_status()
    print((time.perf_counter() - started) * 1e3)
"""


class _Source(NamedTuple):
    """Where the disk and what the peers fetch are. `endpoint` is "" for a local store, whose peers copy files."""

    store: str
    endpoint: str
    #: The tar, as a path or as bucket/key; and the tree, one object a file.
    tar: str
    tree: str
    environment: dict[str, str]


async def run(report: Report, size: Size, place: Path) -> None:
    plan = _PLANS[size]
    tree = trees.make_tree(place / "tree", plan.files, _FILE_BYTES)
    tar = place / "tree.tar"
    _call(["tar", "-C", str(tree), "-cf", str(tar), "."])
    if size != "full" and not os.environ.get("FANOUT_TEST_S3_ENDPOINT"):
        report.skip("S3", "starting a server takes too long for this size; on a local store instead, without targets")
        source = _Source(f"file://{place}/store", "", str(tar), str(tree), dict(os.environ))
        await _measure(report, plan, place, source, tree)
        return
    try:
        with (
            s3_server.server(place) as endpoint,
            s3_server.bucket(endpoint, f"fanout-bench-cold-{os.getpid()}") as bucket,
        ):
            source = _Source(
                f"s3://{bucket}/fanout", endpoint, f"{bucket}/tree.tar", f"{bucket}/tree",
                peers.s3_environment(endpoint),
            )  # fmt: skip
            _client(endpoint).upload_file(str(tar), *source.tar.split("/", 1))
            await _measure(report, plan, place, source, tree)
    except Skip as reason:
        report.skip("S3", reason)


async def _measure(report: Report, plan: _Plan, place: Path, source: _Source, tree: Path) -> None:
    async with trees.connected(place / "filling", store=source.store, s3_endpoint=source.endpoint or None) as fo:
        await (await fo.disks.create("ws")).upload(tree)
    numbers = itertools.count()
    wanted = _wanted(plan.files)

    def fresh(what: str) -> Path:
        return place / f"{what}-{next(numbers)}"

    cpu: dict[str, list[float]] = {"fanout": [], "tar": []}
    sides: dict[str, Side] = {}
    for name, command in wanted.items():
        sides[f"fanout: {name}"] = partial(_cold_exec, source, command, fresh)
    fetch = _tar_by_boto3 if source.endpoint else _tar_of_file
    sides |= _fetched("tar", partial(fetch, source), wanted, fresh)
    for whose in cpu:
        sides[f"{whose}: cat"] = _with_cpu(sides[f"{whose}: cat"], cpu[whose])
    found = await interleave(sides, plan.rounds)
    at = "S3" if source.endpoint else "local store"
    stats = {name: report.add(f"{name}, {plan.files} files, {at}", values) for name, values in found.items()}
    for name in wanted:
        limit = TAR_LIMIT if source.endpoint and plan.held else None
        report.ratio(f"{name}: fanout / tar", stats[f"fanout: {name}"], stats[f"tar: {name}"], limit)
    burnt = {whose: report.add(f"{whose}: cat, its CPU time", values[1:]) for whose, values in cpu.items()}
    report.ratio("cat: CPU time of fanout / tar", burnt["fanout"], burnt["tar"])
    if source.endpoint:
        await _of_processes(report, plan, source, wanted, fresh)
        await _one_object_a_file(report, plan, source, tree, wanted, fresh, stats)


async def _of_processes(
    report: Report, plan: _Plan, source: _Source, wanted: dict[str, str], fresh: Callable[[str], Path]
) -> None:
    """Whole processes beside each other: a Python that imports fanout, and the AWS CLI piped into tar."""

    async def ours() -> float:
        words = [sys.executable, "-c", _CHILD, source.store, str(fresh("own")), source.endpoint, wanted["cat"]]
        said = await anyio.to_thread.run_sync(_call, words, source.environment | {"PYTHONPATH": _ROOT})
        return float(said)

    try:
        peers.need("aws")
        sides = {"fanout": ours} | _fetched("aws", partial(_tar_by_aws, source), {"cat": wanted["cat"]}, fresh)
        found = await interleave(sides, plan.rounds, warm_up=0)
    except Skip as reason:
        report.skip("aws s3 cp - | tar x", reason)
        return
    mine = report.add("cat in a process of its own, imports included", found["fanout"])
    theirs = report.add("cat after aws s3 cp - | tar x", found["aws: cat"])
    report.ratio("cat, whole processes: fanout / aws s3 cp - | tar x", mine, theirs)


async def _one_object_a_file(
    report: Report, plan: _Plan, source: _Source, tree: Path, wanted: dict[str, str], fresh: Callable[[str], Path],
    ours: dict[str, Stats],
) -> None:  # fmt: skip
    """The tools that copy trees, which keep one object a file."""
    try:
        peers.need("rclone")
        await anyio.to_thread.run_sync(peers.rclone, tree, source.tree, source.environment)
    except Skip as reason:
        report.skip("one object a file", reason)
        return
    for name, fetch in (("rclone copy", _tree_by_rclone), ("aws s3 cp", _tree_by_aws)):
        try:
            sides = _fetched(name, partial(fetch, source), wanted, fresh)
            found = await interleave(sides, plan.copies, warm_up=0)
        except Skip as reason:
            report.skip(name, reason)
            continue
        for command in wanted:
            theirs = report.add(f"{name}: {command}, {plan.files} files, S3", found[f"{name}: {command}"])
            value = theirs.p50 / ours[f"fanout: {command}"].p50
            limit = COPY_LIMIT if name == "rclone copy" and plan.held else None
            report.bound(f"{command}: {name} / fanout", value, limit, unit="x", at_least=True)


async def _cold_exec(source: _Source, command: str, fresh: Callable[[str], Path]) -> float:
    """Return the milliseconds from a new connection with an empty cache to the end of its first exec."""
    cache = fresh("cache")
    started = time.perf_counter()
    async with fanout.connect(store=source.store, cache_dir=cache, s3_endpoint=source.endpoint or None) as fo:
        run = await fo.exec(command, disks={"work": await fo.disks.get("ws")})
        took = (time.perf_counter() - started) * 1e3
    if run.raise_for_status().warm or run.stdout.split() == ["0"]:
        raise RuntimeError(f"{command!r} was not cold or found nothing: {run.stdout!r}")
    return took


def _with_cpu(side: Side, kept: list[float]) -> Side:
    """Keep what a side's process and its children use, in ms; the server's time is in neither."""

    def used() -> float:
        return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))

    async def run() -> float:
        before = used()
        took = await side()
        kept.append((used() - before) * 1e3)
        return took

    return run


def _fetched(
    name: str, fetch: Callable[[Path], None], wanted: dict[str, str], fresh: Callable[[str], Path]
) -> dict[str, Side]:
    """Return a side a command for a peer: the first fetches and runs its command, the others reuse what it fetched.

    Each gives the time of the fetch and of its own command.
    """
    last: list[tuple[Path, float]] = []

    def side(command: str, first: bool) -> float:
        if first:
            target = fresh(name.split()[0])
            target.mkdir()
            started = time.perf_counter()
            fetch(target)
            last[:] = [(target, time.perf_counter() - started)]
        target, fetched_s = last[0]
        started = time.perf_counter()
        if _call(["/bin/bash", "-c", command], cwd=target).split() == ["0"]:
            raise RuntimeError(f"{name}: {command!r} found nothing")
        return (fetched_s + time.perf_counter() - started) * 1e3

    return {
        f"{name}: {what}": partial(anyio.to_thread.run_sync, side, command, number == 0)
        for number, (what, command) in enumerate(wanted.items())
    }


def _wanted(files: int) -> dict[str, str]:
    """Return the commands, made for a file in the middle."""
    number = files // 2
    return {name: text.format(file=f"d*/f{number:06d}.txt", number=number) for name, text in _COMMANDS.items()}


# -- how the peers fetch ------------------------------------------------------------------------------------------


@contextmanager
def _untar(target: Path) -> Iterator[Any]:
    """Yield the input of a `tar x` in `target`; waits for it and raises where it failed."""
    tar = subprocess.Popen(["tar", "-x", "-C", str(target)], stdin=subprocess.PIPE)
    assert tar.stdin is not None
    with tar.stdin as pipe:
        yield pipe
    if tar.wait() != 0:
        raise RuntimeError("tar failed")


def _tar_by_boto3(source: _Source, target: Path) -> None:
    bucket, key = source.tar.split("/", 1)
    with _untar(target) as pipe:
        body = _client(source.endpoint).get_object(Bucket=bucket, Key=key)["Body"]
        for chunk in body.iter_chunks(_CHUNK):
            pipe.write(chunk)


def _tar_of_file(source: _Source, target: Path) -> None:
    with _untar(target) as pipe, open(source.tar, "rb") as tar:
        while chunk := tar.read(_CHUNK):
            pipe.write(chunk)


def _tar_by_aws(source: _Source, target: Path) -> None:
    command = f"set -o pipefail; aws s3 cp --only-show-errors s3://{source.tar} - | tar -x"
    _call(["/bin/bash", "-c", command], source.environment, cwd=target, timeout_s=_STREAM_S)


def _tree_by_rclone(source: _Source, target: Path) -> None:
    words = ["rclone", "copy", "--transfers", "16", "--checkers", "16", "--fast-list", "--s3-no-check-bucket"]
    _call([*words, f":s3:{source.tree}", str(target)], source.environment)


def _tree_by_aws(source: _Source, target: Path) -> None:
    peers.need("aws")
    words = ["aws", "s3", "cp", "--recursive", "--only-show-errors"]
    _call([*words, f"s3://{source.tree}", str(target)], source.environment)


_ROOT = str(Path(__file__).resolve().parent.parent)


def _client(endpoint: str) -> Any:
    import boto3

    # A session of its own, as each connection of fanout has: boto3's default one remembers what it has parsed.
    return boto3.session.Session().client("s3", endpoint_url=endpoint, region_name="us-east-1")


def _call(
    words: list[str], environment: dict[str, str] | None = None, cwd: Path | None = None, timeout_s: float = _TIMEOUT_S
) -> str:
    """Run a program and return what it said; at the end of its time all it started is killed, and `Skip`."""
    with subprocess.Popen(
        words, env=environment, cwd=cwd, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise Skip(f"{words[0]} did not end within {timeout_s:g} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        raise RuntimeError(f"{words[0]} gave {process.returncode}: {err.strip()[-500:]}")
    return out
