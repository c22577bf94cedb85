"""What a first search costs a host that has nothing, and what it does with what is damaged."""

from __future__ import annotations

import os
import threading
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from fanout.config import Tuning
from fanout.disk.disk import Disk
from fanout.disk.merge import Intent, Policy
from fanout.disk.sharing import Shared, Turns
from fanout.errors import Corrupt
from fanout.format.tree import FILE, Node, Ref
from fanout.local_disk import LocalDisk
from fanout.run import grep_plan
from fanout.store.memory import MemoryStore
from fanout.view.bases import rest
from fanout.view.scan import Scan, open_scan
from fanout.view.scan_write import Layout, write_scan
from tests.support.connections import connected
from tests.support.disks import new_disk

TUNING = Tuning(page_entries=8, inline_bytes=0, fold_entries=1 << 20)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Packs(MemoryStore):
    """Counts requests for packs, and gives damaged ones if told to."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.damaged = False
        self._counting = threading.Lock()

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        data = super().get(key, start, length)
        if "/pack/" not in key:
            return data
        with self._counting:
            self.reads += 1
        return bytes(len(data)) if self.damaged else data


async def filled(store: Packs, cache: Path, files: int) -> None:
    """A folded disk `ws` of pages of 8 files, 5 of which share a frame with their neighbours."""
    async with connected(store, cache, tuning=TUNING) as fo:
        disk = await fo.disks.create("ws")
        assert isinstance(disk, LocalDisk)
        put_in_frames(disk.core, {b"f%04d" % n: b"needle %d\n" % n for n in range(files)}, 5)
        disk.core.branch().fold()


def put_in_frames(disk: Disk, files: dict[bytes, bytes], together: int) -> None:
    """Commit files, so many of them in one frame."""
    packer = disk.packer()
    intents = []
    todo = list(files.items())
    for start in range(0, len(todo), together):
        some = todo[start : start + together]
        ref = packer.add(b"".join(data for _, data in some), True)
        skip = 0
        for path, data in some:
            mine = Ref(ref.pack, ref.offset, ref.stored, ref.raw, ref.hash, skip, len(data))
            intents.append(Intent(path, None, Node(FILE, 0o644, 1, len(data), (mine,))))
            skip += len(data)
    blobs = dict(packer.finish().blobs)
    disk.apply(disk.point(), intents, policy=Policy.LAST_WINS, blobs=blobs)


@pytest.mark.anyio
async def test_pages_that_share_packs_share_requests(tmp_path: Path) -> None:
    store = Packs()
    await filled(store, tmp_path / "filling", 400)
    async with connected(store, tmp_path / "cold", tuning=TUNING) as fo:
        store.reads = 0
        found = await fo.grep("ws", "needle 3", output="files")
        assert [match.file for match in found.matches] == [f"f{n:04}" for n in range(400) if str(n).startswith("3")]
        assert found.files_scanned == 400
        pages = sum(shard.fetched for shard in found.shards)
        assert pages >= 50
        assert store.reads == 1


@pytest.mark.anyio
@pytest.mark.parametrize("group", [1, 100, 1 << 20])
async def test_damage_ends_a_cold_search_and_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    monkeypatch.setattr(grep_plan, "_GROUP_BYTES", group)
    monkeypatch.setattr(grep_plan, "_HELD", 2)
    monkeypatch.setattr(grep_plan, "_FETCHING", 1)
    store = Packs()
    await filled(store, tmp_path / "filling", 400)
    async with connected(store, tmp_path / "cold", tuning=TUNING) as fo:
        store.damaged = True
        for _ in range(2):
            with pytest.raises(Corrupt, match="pack"):
                await fo.grep("ws", "needle")
        store.damaged = False
        assert len((await fo.grep("ws", "needle")).matches) == 400


def frames_of(texts: list[bytes]) -> tuple[Packs, list[Ref], Disk]:
    """A pack of these frames."""
    store = Packs()
    disk = new_disk(store, tuning=Tuning(inline_bytes=0))
    packer = disk.packer()
    refs = [packer.add(text, True) for text in texts]
    packer.finish()
    return store, refs, disk


def test_a_slice_is_fetched_once_and_forgotten_after_its_last_reading() -> None:
    texts = [b"frame %d " % n * 50 for n in range(6)]
    store, refs, disk = frames_of(texts)
    wants = [refs[:3], refs[2:5], refs[5:]]
    shared = Shared(disk.reader, wants, {}, Turns(1, 1, 1))
    got: Counter[bytes] = Counter()
    for want in wants:
        for piece in shared.plan(iter(reversed(want))):
            got.update(raw for _, raw in shared.fetch(piece, {}))
    assert got == Counter([*texts, texts[2]])
    assert store.reads == 1
    assert not shared._kept


def test_a_reading_given_up_lets_others_go_on() -> None:
    store, refs, disk = frames_of([b"frame %d " % n * 50 for n in range(4)])
    turns = Turns(1, 1, 1)
    for _ in range(3):
        shared = Shared(disk.reader, [refs], {}, turns)
        with closing(shared.fetch(shared.plan(refs)[0], {})) as decoded:
            next(decoded)
    store.damaged = True
    for _ in range(3):
        shared = Shared(disk.reader, [refs], {}, turns)
        with pytest.raises(Corrupt), closing(shared.fetch(shared.plan(refs)[0], {})) as decoded:
            list(decoded)
    assert all(turn.acquire(blocking=False) for turn in (turns.held, turns.fetching, turns.unpacking))


def test_a_run_outside_of_its_frame_is_no_scan_file(tmp_path: Path) -> None:
    _, (ref,), disk = frames_of([b"one two three"])
    fd = os.open(tmp_path, os.O_RDONLY)
    good = Ref(ref.pack, ref.offset, ref.stored, ref.raw, ref.hash, 4, 3)
    for wrong in (
        (Ref(ref.pack, ref.offset, ref.stored, ref.raw, ref.hash, 10, 9),),
        (good, Ref(ref.pack, ref.offset, ref.stored, ref.raw, ref.hash, 13, 6)),
    ):
        size = sum(each.size for each in wrong)
        files = [(b"a", Node(FILE, 0o644, 1, 3, (good,))), (b"b", Node(FILE, 0o644, 1, size, wrong))]
        with pytest.raises(Corrupt, match="outside of its frame"):
            write_scan(fd, Layout(files), disk.reader, {})
        (tmp_path / "data").unlink()
    with pytest.raises(Corrupt, match="do not add up"):
        Layout([(b"a", Node(FILE, 0o644, 1, 4, (good,)))])
    other = Ref(ref.pack, ref.offset, ref.stored, ref.raw, bytes(32), 0, 3)
    with pytest.raises(Corrupt, match="other bytes"):
        Layout([(b"a", Node(FILE, 0o644, 1, 3, (good,))), (b"b", Node(FILE, 0o644, 1, 3, (other,)))])
    write_scan(fd, Layout([(b"a", Node(FILE, 0o644, 1, 3, (good,)))]), disk.reader, {})
    os.close(fd)
    assert (tmp_path / "data").read_bytes() == b"two\n"
    assert open_scan(str(tmp_path)).hash_of(0)


def test_a_page_is_compared_with_an_earlier_one_without_searching_for_each_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, refs, disk = frames_of([b"%d " % n * 9 for n in range(60)])
    nodes = [(b"f%02d" % n, Node(FILE, 0o644, 1, ref.raw, (ref,))) for n, ref in enumerate(refs)]
    fd = os.open(tmp_path, os.O_RDONLY)
    write_scan(fd, Layout(nodes[:50]), disk.reader, {})
    os.close(fd)
    scan = open_scan(str(tmp_path))
    looked: list[bytes] = []
    find = Scan.find
    monkeypatch.setattr(Scan, "find", lambda self, path: looked.append(path) or find(self, path))  # type: ignore[func-returns-value]
    changed = (b"f10", Node(FILE, 0o644, 1, refs[55].raw, (refs[55],)))
    now = [*nodes[:10], changed, *nodes[11:30], *nodes[31:50], nodes[50]]
    rested = rest(now, {"a": scan})
    assert rested is not None
    assert rested.live == {"a": frozenset(range(50)) - {10, 30}}
    assert rested.missing == [changed, nodes[50]]
    assert looked == [b"f31", b"f50"]
