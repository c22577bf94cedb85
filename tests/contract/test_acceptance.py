"""The job as it was asked for: many execs at once on one disk, one script whatever the store."""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

import fanout
from fanout.errors import Conflict
from tests.support.guests import with_image
from tests.support.serving import Running

#: The very same script for every store: what differs are its arguments.
SCRIPT = """
import asyncio, json, sys
import fanout

async def main(count, where):
    async with fanout.connect(**where) as fo:
        disk = await fo.disks.create("express")
        await disk.put_object("express/package.json", b"{}")
        await disk.checkpoint("base")
        runs = await asyncio.gather(*[
            fo.exec(f"mkdir -p ../results && echo {i} > ../results/{i}.txt; ls; echo $?", cwd="/mnt/work/express",
                    disks={"work": disk.mount(conditional=True)})
            for i in range(count)
        ])
        keys = [o.key async for o in disk.list_objects("results/")]
        data = [await disk.get_object(f"results/{i}.txt") for i in range(count)]
        print(json.dumps({
            "outputs": sorted({r.stdout for r in runs}),
            "conflicts": sum(r.conflict is not None for r in runs),
            "files": len(keys),
            "right": data == [f"{i}\\n".encode() for i in range(count)],
            "entries": len({r.commits["work"].seq for r in runs}),
            "log": len({c.seq async for c in disk.log(after=1)}),
            "commits": len([c async for c in disk.log(after=1)]),
            "diff": len([c async for c in disk.diff("base") if c.path.startswith("results/")]),
            "queue": all(r.timing.queue_ms > 0 for r in runs),
        }))

asyncio.run(main(int(sys.argv[1]), json.loads(sys.argv[2])))
"""


def run_script(count: int = 50, at_most: int = 5, **where: str) -> None:
    words = [sys.executable, "-c", SCRIPT, str(count), json.dumps(where)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    entries = result.pop("entries")
    assert result == {
        "outputs": ["package.json\n0\n"],
        "conflicts": 0,
        "files": count,
        "right": True,
        "log": entries,
        "commits": count,
        "diff": count,
        "queue": True,
    }
    assert entries <= at_most, f"{count} execs that ran together took {entries} entries of the log"


def test_fifty_on_a_local_store(tmp_path: Path) -> None:
    run_script(store=f"file://{tmp_path}/store", cache_dir=f"{tmp_path}/cache")


def test_fifty_in_memory(tmp_path: Path) -> None:
    run_script(store="memory://", cache_dir=f"{tmp_path}/cache")


def test_eight_in_vms(tmp_path: Path) -> None:
    """They end one after the other, as the cores get to them, and commit as they end."""
    cache = with_image(tmp_path / "cache")
    run_script(8, 8, store="memory://", cache_dir=str(cache), engine="qemu")


def test_fifty_on_a_server(remote_server: Running) -> None:
    run_script(url=remote_server.url, api_key=remote_server.token)


def test_fifty_on_moto(moto_endpoint: str, moto_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FANOUT_S3_ENDPOINT", moto_endpoint)
    run_script(store=f"s3://{moto_bucket}/{uuid.uuid4().hex}", cache_dir=f"{tmp_path}/cache")


@pytest.mark.s3
def test_fifty_on_a_real_s3_server(
    s3_endpoint: str, s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    run_script(store=f"s3://{s3_bucket}/{uuid.uuid4().hex}", cache_dir=f"{tmp_path}/cache")


@pytest.mark.parametrize("place", ["embedded", "qemu", "remote"])
def test_three_fixes_side_by_side_and_the_winner_merged(
    place: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The other half of the job: branches, a winner, and the losers gone from sight but not lost."""
    where = {"store": "memory://", "cache_dir": str(tmp_path)}
    if place == "remote":
        server: Running = request.getfixturevalue("remote_server")
        where = {"url": server.url, "api_key": server.token}
    elif place == "qemu":
        where = {**where, "cache_dir": str(with_image(tmp_path / "cache")), "engine": "qemu"}

    async def work() -> None:
        async with fanout.connect(**where) as fo:
            disk = await fo.disks.create(f"ws-{uuid.uuid4().hex[:12]}")
            await disk.put_object("src/add.sh", "echo $(($1 - $2))\n")
            await disk.checkpoint("base")
            fixes = {"a": "echo $(($1 * $2))", "b": "echo $(($1 + $2))", "c": "exit 1"}
            branches = {name: await disk.branch(name, checkpoint="base") for name in fixes}
            runs = await asyncio.gather(
                *[
                    fo.exec(
                        f'echo {shlex.quote(fix)} > src/add.sh; [ "$(sh src/add.sh 2 3)" = 5 ]',
                        disks={"w": branches[name]},
                    )
                    for name, fix in fixes.items()
                ]
            )
            winners = [name for name, run in zip(fixes, runs, strict=True) if run.ok]
            assert winners == ["b"]
            commit = await disk.merge(branches["b"])
            assert [change.path for change in commit.changes] == ["src/add.sh"]
            assert await disk.get_object("src/add.sh") == b"echo $(($1 + $2))\n"
            with pytest.raises(Conflict):
                await disk.merge(branches["a"])
            assert await branches["a"].get_object("src/add.sh") == b"echo $(($1 * $2))\n"

    asyncio.run(work())
