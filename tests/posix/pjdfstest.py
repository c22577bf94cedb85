"""Runs the public pjdfstest suite on disks and summarises it.

    FANOUT_PJDFSTEST=FOLDER python -m tests.posix.pjdfstest [GROUP...]     prints a table, then each failure

FOLDER is a built checkout of the suite (the C one: `pjdfstest` beside `tests/`); it is not part of this repository.
Each group runs in three places:

- `exec`: on a disk's mount, inside an exec of the root tier;
- `tmpfs`: on /tmp of the same kind of exec. What fails here too is the sandbox's doing (one user, few capabilities);
- `view`: on the same overlay mounted outside of any sandbox, as the host's root: the disk without the sandbox.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from fanout.engine.overlay import WANTED_OPTIONS
from fanout.runtime import system
from fanout.store.memory import MemoryStore
from fanout.view.cache import HostCache
from fanout.view.view import open_view
from tests.support.connections import connected
from tests.support.disks import new_disk

SUITE = "/opt/pjdfstest"
PLACES = {"exec": "/mnt/w", "tmpfs": "/tmp", "view": "/mnt"}
COUNTS = ("passed", "failed", "missing", "todo")


@dataclass
class Result:
    """What one group of tests came to in one place. `failures` are the suite's own lines, by file.

    `missing` counts planned tests that never said anything, `todo` those the suite itself expects to fail here.
    """

    passed: int = 0
    failed: int = 0
    missing: int = 0
    todo: int = 0
    failures: list[str] = field(default_factory=list)


def folder() -> Path | None:
    """Return the suite's folder, or None where it was not given."""
    given = os.environ.get("FANOUT_PJDFSTEST")
    return Path(given).resolve() if given else None


def why_not(suite: Path | None) -> str | None:
    """Say why the suite cannot run here."""
    if suite is None:
        return "FANOUT_PJDFSTEST is not set: it names a built checkout of pjdfstest"
    if not os.access(suite / "pjdfstest", os.X_OK) or not (suite / "tests").is_dir():
        return f"{suite} holds no pjdfstest program beside tests/: build the suite there"
    return "the root tier needs root" if os.geteuid() != 0 else None


def groups(suite: Path) -> list[str]:
    return sorted(path.name for path in (suite / "tests").iterdir() if path.is_dir())


def summarise(output: str) -> Result:
    """Count a run's lines."""
    result = Result()
    file, planned, said = "", 0, 0
    for line in [*output.splitlines(), "FILE end"]:
        if line.startswith("FILE "):
            if planned > said:
                result.missing += planned - said
                result.failures.append(f"{file}: {planned - said} of {planned} never said anything")
            file, planned, said = line[5:], 0, 0
        elif plan := re.fullmatch(r"1\.\.(\d+)", line):
            planned = int(plan[1])
        elif found := re.match(r"(not )?ok (\d+)", line):
            said += 1
            if found[1] and "# TODO" not in line:
                result.failed += 1
                result.failures.append(f"{file}: {line}")
            elif found[1]:
                result.todo += 1
            else:
                result.passed += 1
    return result


def script(tests: str, group: str, place: str) -> str:
    return (
        f'umask 022; for t in {shlex.quote(tests)}/{shlex.quote(group)}/*.t; do echo "FILE {group}/${{t##*/}}";'
        f" d=$(mktemp -d {place}/pjd.XXXXXX); chmod 755 $d; (cd $d && timeout 300 sh $t 2>/dev/null);"
        f" rm -rf $d; done"
    )


async def in_execs(suite: Path, wanted: Sequence[str], place: str) -> AsyncIterator[tuple[str, Result]]:
    """Yield (group, result) of groups run inside execs."""
    with tempfile.TemporaryDirectory() as top:
        settings = {"host_paths": [f"{suite}:{SUITE}"], "output_bytes": 64 << 20}
        async with connected(MemoryStore(), Path(top) / "cache", **settings) as fo:
            for group in wanted:
                disk = await fo.disks.create(group.replace("_", "-"))
                command = script(f"{SUITE}/tests", group, PLACES[place])
                done = await fo.exec(command, disks={"w": disk}, timeout_s=3600)
                yield group, summarise(done.stdout)


def in_view(suite: Path, group: str) -> Result:
    """Run a group on a view that this process's root mounts by itself."""
    with tempfile.TemporaryDirectory() as top:
        cache = HostCache(Path(top) / "cache", 1 << 30)
        disk = new_disk(MemoryStore(), system)
        with open_view(cache, disk.reader, disk.branch().refresh(), disk_id=disk.id, writable=True) as view:
            mount = view.mount("/w")
            layers = f"lowerdir={':'.join(reversed(mount.lowers))},upperdir={mount.upper},workdir={mount.work}"
            options = ",".join((layers, *WANTED_OPTIONS))
            inner = (
                f"mount -t overlay -o {shlex.quote(options)} overlay /mnt && {script(f'{suite}/tests', group, '/mnt')}"
            )
            done = subprocess.run(["unshare", "-m", "sh", "-c", inner], capture_output=True, text=True, check=False)
        cache.close()
    return summarise(done.stdout)


async def run(suite: Path, wanted: Sequence[str], places: Sequence[str]) -> AsyncIterator[tuple[str, str, Result]]:
    """Yield (place, group, result)."""
    for place in places:
        if place == "view":
            for group in wanted:
                yield place, group, await anyio.to_thread.run_sync(in_view, suite, group)
        else:
            async for group, result in in_execs(suite, wanted, place):
                yield place, group, result


async def main(wanted: Sequence[str]) -> int:
    suite = folder()
    reason = why_not(suite)
    if suite is None or reason:
        print(reason, file=sys.stderr)
        return 2
    said: list[str] = []
    totals: dict[str, Counter[str]] = {place: Counter() for place in PLACES}
    print(f"| place | group | {' | '.join(COUNTS)} |\n|---|---|---|---|---|---|")
    async for place, group, result in run(suite, wanted or groups(suite), list(PLACES)):
        counts = {name: getattr(result, name) for name in COUNTS}
        totals[place].update(counts)
        print(f"| {place} | {group} | {' | '.join(map(str, counts.values()))} |", flush=True)
        said += [f"{place} {failure}" for failure in result.failures]
    for place, count in totals.items():
        print(f"| {place} | all | {' | '.join(str(count[name]) for name in COUNTS)} |")
    print("\n".join(said))
    return 0


if __name__ == "__main__":
    sys.exit(anyio.run(main, sys.argv[1:]))
