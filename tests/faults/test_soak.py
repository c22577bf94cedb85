"""Processes with caches of their own race on one branch: contiguous numbers, every effect there exactly once, no
acknowledged write lost. What is right is read off the log by a plain model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import pytest

from fanout.disk.disk import Disk
from fanout.format import layout
from fanout.format.entry import Entry, Put, decode_entry
from fanout.format.tree import FILE
from fanout.store.base import Store
from fanout.store.local import LocalStore
from tests import support
from tests.support.connections import connected
from tests.support.disks import check_refs, check_tree, cold, contents, new_disk, put
from tests.support.writer import HOT, digest

SCRIPT = Path(support.__file__).parent / "writer.py"
START = 1 + HOT  # what the test itself commits first


def race(where: str, tmp_path: Path, counts: list[int], seed: int) -> list[list[dict[str, Any]]]:
    """Let processes write at once; returns what each was told, in order."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), where, str(tmp_path / f"cache{n}"), f"p{n}", str(count), str(seed + n)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[2])},
        )
        for n, count in enumerate(counts)
    ]  # fmt: skip
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        with ThreadPoolExecutor(len(processes)) as pool:  # nobody is to wait for a full pipe
            said = list(pool.map(_told, processes))
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return said


def _told(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    assert process.stdout is not None
    lines = process.stdout.read().splitlines()
    assert process.wait(60) == 0
    assert lines[-1] == "end"
    return [json.loads(line) for line in lines[:-1]]


def entries(disk: Disk, store: Store) -> Iterator[Entry]:
    for place, meta in enumerate(store.list(layout.log_prefix(disk.id, disk.record.main)), 1):
        entry = decode_entry(store.get(meta.key), meta.key)
        assert layout.seq_of_key(meta.key) == entry.seq == place, "a hole in the log"
        yield entry


def check(disk: Disk, store: Store, said: list[dict[str, Any]]) -> None:
    """Replay the log into a dict, and hold everything that was said against it."""
    tree: dict[bytes, Any] = {}
    puts: Counter[tuple[str, str]] = Counter()  # (path, hash of the content)
    deletes: Counter[str] = Counter()
    touched: dict[str, list[tuple[int, int]]] = {}  # path -> its changes as (entry, place in it)
    landed: dict[tuple[str, str], tuple[int, int, int]] = {}
    execs: Counter[str] = Counter()
    commits = 0
    for entry in entries(disk, store):
        for place, commit in enumerate(entry.commits):
            commits += 1
            execs[commit.exec_id] += 1
            if commit.message.startswith("delete "):
                deletes[commit.message.removeprefix("delete ")] += 1
            for effect in commit.effects:
                path = os.fsdecode(effect.path)
                if isinstance(effect, Put):
                    tree[effect.path] = effect.node
                    if effect.node.kind == FILE:
                        key = path, effect.node.data[0].hash.hex() if len(effect.node.data) == 1 else ""
                        puts[key] += 1
                        landed[key] = entry.seq, place, commit.base_seq
                        touched.setdefault(path, []).append((entry.seq, place))
                else:
                    del tree[effect.path]
    state = cold(disk, store).branch().refresh()
    check_tree(state)
    check_refs(store, disk, state)
    assert plain(state.scan()) == plain(tree.items())

    good = [each for each in said if each["status"] == "ok"]
    assert not {each["status"] for each in said} - {"ok", "conflict", "nothing"}
    for each in good:
        if each["op"] in ("put", "put_hot", "shared", "conditional"):
            key = each["path"], each["hash"]
            assert puts[key] == 1, (each, puts[key])
            seq, place, base = landed[key]
            assert each.get("seq", seq) == seq
            if each["op"] == "shared":
                assert base == each["base"]
                since = [t for t in touched[each["path"]] if (base, 1 << 30) < t < (seq, place)]
                assert since == [], f"{each} landed although {since} came first"
        elif each["op"] == "append":
            assert execs[each["exec"]] == 1
    for each in said:
        if each["status"] == "conflict" and each["op"] == "shared":
            assert not any(digest_ == each["hash"] for _, digest_ in puts), f"{each} was refused, and is there"
    # What a deletion finds may have come or gone since its writer looked: it is a commit or nothing.
    assert deletes <= Counter(each["path"] for each in said if each["op"] == "delete")
    assert commits == START + sum(each["op"] != "delete" for each in good) + deletes.total(), "each once"
    files = contents(disk, state)
    appended = Counter(files[b"appended"].decode().splitlines(keepends=True))
    assert appended == Counter(each["line"] for each in good if each["op"] == "append")
    assert sum(each["op"] == "append" for each in good) > 0


def plain(nodes: Iterable[tuple[bytes, Any]]) -> dict[bytes, Any]:
    """What a tree holds, wherever a fold has moved the bytes."""
    return {
        path: (node.kind, node.mode, [(ref.hash, ref.skip, ref.length) for ref in node.data])
        for path, node in nodes
        if path
    }


async def _hot_reads(store: Store, disk: Disk, cache: Path) -> None:
    """A connection that comes later reads what the model holds, by objects and by a command."""
    async with connected(store, cache) as fo:
        found = await fo.disks.get("ws")
        files = {os.fsdecode(p): d for p, d in contents(disk, cold(disk, store).branch().refresh()).items()}
        assert [o.key async for o in found.list_objects()] == sorted(files)
        for n in range(HOT):
            assert await found.get_object(f"hot/{n}") == files[f"hot/{n}"]
        run = await fo.exec("cat hot/* appended | sha256sum", disks={"w": found.mount(read_only=True)})
        wanted = b"".join(files[f"hot/{n}"] for n in range(HOT)) + files["appended"]
        assert run.stdout.split()[0] == digest(wanted)


def soak(store: Store, where: str, tmp_path: Path, counts: list[int]) -> None:
    seed = int.from_bytes(os.urandom(4), "big")
    print("seed", seed)
    disk = new_disk(store, name="ws")
    put(disk, "appended", b"")
    for n in range(HOT):
        put(disk, f"hot/{n}", b"%d" % n)
    said = race(where, tmp_path, counts, seed)
    assert [len(each) for each in said] == counts
    print(Counter((each["op"], each["status"]) for one in said for each in one))
    check(disk, store, [each for one in said for each in one])
    anyio.run(_hot_reads, store, disk, tmp_path / "later")


def test_two_processes_race(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store", fsync=False)
    soak(store, store.root, tmp_path, [150, 150])


@pytest.mark.s3
def test_two_processes_race_on_s3(s3_store: Store, tmp_path: Path) -> None:
    soak(s3_store, s3_store.url, tmp_path, [60, 60])


@pytest.mark.soak
def test_two_processes_race_for_10_000_commits(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store", fsync=False)
    soak(store, store.root, tmp_path, [5000, 5000])


@pytest.mark.soak
@pytest.mark.s3
def test_two_processes_race_for_10_000_commits_on_s3(s3_store: Store, tmp_path: Path) -> None:
    soak(s3_store, s3_store.url, tmp_path, [5000, 5000])
