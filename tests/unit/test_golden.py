"""Format v1 for ever: the golden disk under tests/data reads as on the day it was written."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fanout.config import Tuning
from fanout.disk.catalogue import Catalogue
from fanout.disk.disk import Disk, Point
from fanout.format import layout
from fanout.format.entry import decode_branch, decode_checkpoint, decode_disk, decode_entry
from fanout.format.pack import decode_footer, is_text_pack
from fanout.format.tree import decode_page, decode_snap
from fanout.runtime import system
from fanout.store.local import LocalStore
from fanout.store.memory import MemoryStore
from tests.support.disks import check_refs, check_tree, get, put

DATA = Path(__file__).parents[1] / "data"
GOLDEN = DATA / "format-v1"


def load_maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_golden", DATA / "make_golden.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAKER = load_maker()


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    shutil.copytree(GOLDEN / "store", tmp_path / "store", dirs_exist_ok=True)
    return LocalStore(tmp_path / "store", fsync=False)


@pytest.fixture
def disk(store: LocalStore) -> Disk:
    return Catalogue(store, system, Tuning()).get("golden")


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GOLDEN / "expected.json").read_text())
    return found


def test_everything_reads_as_it_was(disk: Disk, expected: dict[str, Any]) -> None:
    assert json.loads(json.dumps(MAKER.expectations(disk))) == expected


def test_it_holds_what_it_should(disk: Disk, store: LocalStore, expected: dict[str, Any]) -> None:
    main, side = disk.branch().refresh(), disk.branch("side").refresh()
    assert main.folded_seq < main.seq
    assert side.folded_seq < side.seq
    assert main.merges
    assert main.locks
    assert main.blobs
    assert get(disk, "small.txt") == b"side's version\n"
    assert get(disk, "tail") == b"unfolded tail\n"
    for state in (main, side):
        check_tree(state)
        check_refs(store, disk, state)
    size = sum(file.stat().st_size for file in GOLDEN.rglob("*") if file.is_file())
    assert size < 200_000


def test_every_object_decodes(store: LocalStore, disk: Disk) -> None:
    kinds: dict[str, int] = {}
    decoders = {
        "disk": decode_disk, "branch": decode_branch, "checkpoint": decode_checkpoint, "log": decode_entry,
        "snap": decode_snap, "page": decode_page, "pack": decode_footer,
    }  # fmt: skip
    text = set()
    for meta in store.list():
        kind = "disk" if meta.key.startswith(layout.CATALOGUE) else meta.key.split("/")[2]
        kinds[kind] = kinds.get(kind, 0) + 1
        decoders[kind](store.get(meta.key), meta.key)
        if kind == "pack":
            text.add(is_text_pack(bytes.fromhex(meta.key.rpartition("/")[2])))
    assert kinds.keys() == decoders.keys()
    assert text == {True, False}


def test_it_can_be_written_on(disk: Disk, store: LocalStore, expected: dict[str, Any]) -> None:
    put(disk, "new", b"1")
    disk.branch().fold()
    fresh = Catalogue(store, system, Tuning()).get("golden")
    state = fresh.branch().refresh()
    assert state.folded_seq == state.seq
    check_refs(store, fresh, state)
    nodes = MAKER.describe(fresh, state)["nodes"]
    assert (
        json.loads(json.dumps({p: n for p, n in nodes.items() if p != b"new".hex()}))
        == (expected["points"]["main"]["nodes"])
    )
    fresh.create_branch("again", Point(fresh.branch(), 3))
    assert get(fresh, "small.txt", "again") == b"inline, second version\n"


def test_todays_writer_writes_the_same_disk(expected: dict[str, Any], store: LocalStore) -> None:
    """Equal bytes too, as long as zstd compresses the same way; if only that changes, this may say so."""
    anew = MemoryStore()
    made = MAKER.build(anew)
    fresh = Disk(anew, made.record, made.runtime, made.tuning)
    assert json.loads(json.dumps(MAKER.expectations(fresh))) == expected
    ours = {meta.key: anew.get(meta.key) for meta in anew.list()}
    theirs = {meta.key: store.get(meta.key) for meta in store.list()}
    if ours != theirs:
        kinds = [sorted(key.split("/")[2] for key in objects if key.count("/") > 1) for objects in (ours, theirs)]
        assert kinds[0] == kinds[1]
