"""`fanout gc` and `fanout fsck`, and the calls of the interface below them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import fanout
from fanout.cli.root import cli
from fanout.errors import NotFound
from fanout.sync import connect

Cli = Callable[..., Result]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"FANOUT_STORE": f"file://{tmp_path}/store", "FANOUT_CACHE_DIR": f"{tmp_path}/cache"}


@pytest.fixture
def run(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    runner = CliRunner()

    def call(*words: str, code: int = 0) -> Result:
        result = runner.invoke(cli, list(words), prog_name="fanout")
        assert result.exit_code == code, (words, result.exit_code, result.output)
        return result

    return call


@pytest.fixture
def ws(run: Cli) -> None:
    """A disk with 70 overwrites of one file, folded once, and a checkpoint in the middle."""
    with connect() as fo:
        disk = fo.disks.create("ws")
        for n in range(40):
            disk.put_object("dir/a", b"%03d" % n * 100)
        disk.checkpoint("mid")
        for n in range(40, 70):
            disk.put_object("dir/a", b"%03d" % n * 100)
        disk.put_object("b\n", os.urandom(300_000))


def packs(environ: dict[str, str]) -> list[Path]:
    return [path for path in Path(environ["FANOUT_STORE"][7:]).rglob("*") if "/pack/" in str(path) and path.is_file()]


@pytest.mark.usefixtures("ws")
def test_an_index_that_is_of_no_use_is_named_and_collected(run: Cli, environ: dict[str, str]) -> None:
    (disk,) = (Path(environ["FANOUT_STORE"][7:]) / "disks").iterdir()
    index = disk / "index" / ("a" * 32)
    index.parent.mkdir()
    index.write_bytes(b"not an index")
    assert f"index/{'a' * 32}: not an index object" in run("fsck", "ws", code=76).stdout
    assert "1 search index: 12 B" in run("gc", "ws", "--grace", "0").stdout
    assert not index.exists()
    assert json.loads(run("gc", "ws", "--json").stdout)["indexes"] == 0
    run("fsck", "ws")


@pytest.mark.usefixtures("ws")
def test_gc_trims_history_and_says_so(run: Cli, environ: dict[str, str]) -> None:
    assert "deleted 0 packs, 0 pages, 0 snaps, 0 log entries: 0 B" in run("gc", "ws").stdout
    Path(environ["FANOUT_STORE"][7:], "disks", "leftover").touch()
    orphan = packs(environ)[0].with_name("0" * 32)
    orphan.write_bytes(b"x" * 2048)
    would = run("gc", "ws", "--grace", "0", "--keep-history", "0", "--dry-run")
    assert would.stdout.startswith("would delete 1 pack, 0 pages, 0 snaps, ")
    assert "history of main begins at commit 64" in would.stdout
    assert orphan.exists()
    report = json.loads(run("gc", "ws", "--grace", "0", "--keep-history", "0", "--json").stdout)
    assert not orphan.exists()
    assert (report["packs"], report["dry_run"], report["trimmed"]) == (1, False, {"main": 64})
    assert report["entries"] == 64 - 40 - 1
    assert report["freed_bytes"] > 2048
    assert run("cat", "ws@mid", "dir/a").stdout == "039" * 100
    assert run("cat", "ws", "dir/a").stdout == "069" * 100
    shown = json.loads(run("log", "ws", "-n", "100", "--json").stdout)
    assert [commit["seq"] for commit in shown] == list(range(71, 63, -1)), "it ends there, and is no damage"
    assert "no damage" in run("fsck", "ws").stdout
    assert "no longer kept" in run("diff", "ws", "50", code=66).stderr


@pytest.mark.usefixtures("ws")
def test_fsck_names_objects_and_paths(run: Cli, environ: dict[str, str]) -> None:
    clean = run("fsck", "ws")
    assert clean.stdout.startswith("no damage: 71 log entries, 1 snap, 1 page, ")
    assert "3 files" in clean.stdout, "two of main, one of the checkpoint"
    big = max(packs(environ), key=lambda path: path.stat().st_size)
    data = big.read_bytes()
    big.write_bytes(data[:60] + bytes([data[60] ^ 1]) + data[61:] if len(data) > 61 else b"")
    found = run("fsck", "ws", code=76)
    lines = found.stdout.splitlines()
    assert lines[0].startswith("disks/")
    assert lines[1] == "  main: b\\n", "escaped, as all names are"
    assert lines[-1].startswith("1 problem: ")
    report = json.loads(run("fsck", "ws", "--json", code=76).stdout)
    (problem,) = report["problems"]
    assert problem["object"].endswith(big.name)
    assert [(a["line"], a["paths"]) for a in problem["affects"]] == [("main", ["b\n"])]
    assert "no damage" in run("fsck", "ws", "--quick").stdout, "the index is whole"
    big.write_bytes(data[: len(data) // 2])
    assert "1 problem" in run("fsck", "ws", "--quick", code=76).stdout
    assert run("cat", "ws", "dir/a").stdout == "069" * 100


def test_bad_calls(run: Cli) -> None:
    assert "no disk 'nope'" in run("gc", "nope", code=66).stderr
    assert "no disk 'nope'" in run("fsck", "nope", code=66).stderr
    assert "--grace" in run("gc", "ws", "--grace", "-1", code=64).stderr
    assert "--keep-history" in run("gc", "ws", "--keep-history", "never", code=64).stderr


@pytest.mark.anyio
async def test_the_interface(tmp_path: Path) -> None:
    where: dict[str, Any] = {"store": f"file://{tmp_path}/s", "cache_dir": tmp_path / "c"}
    async with fanout.connect(**where) as fo:
        disk = await fo.disks.create("d")
        for _ in range(66):
            await disk.put_object("a", os.urandom(200))
    async with fanout.connect(**where) as fo:  # the fold is done
        disk = await fo.disks.get("d")
        old = disk.mount(at=3, read_only=True)
        report = await disk.gc(grace_s=0, keep_history_s=0)
        assert report.trimmed == {"main": 64}
        assert (await disk.fsck()).ok
        assert [commit.seq async for commit in disk.log()] == [66, 65, 64]
        assert [commit.seq async for commit in disk.log(limit=2)] == [66, 65]
        with pytest.raises(NotFound, match="no longer kept"):
            [change async for change in disk.diff(3)]
        with pytest.raises(NotFound, match="no longer kept"):
            await fo.exec("true", disks={"d": old})
        await disk.put_object("a", b"on we go")
        assert await disk.get_object("a") == b"on we go"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
