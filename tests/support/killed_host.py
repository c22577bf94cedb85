"""A process that is killed at the k-th system call that changes something, in the middle of work on this host.

    killed_host.py ROOT ACTION STRIDE OFFSET

For k = OFFSET, OFFSET + STRIDE, ... three forked processes: one prepares ROOT/<k>, one does ACTION and kills itself
right before its k-th change, one looks at what is left and goes on. Ends with the first k that the action outlives.
Prints how many were killed. No threads in the parent, so that forking is safe.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from fanout.config import Tuning
from fanout.disk.catalogue import Catalogue
from fanout.disk.disk import Disk
from fanout.disk.merge import Intent, Policy
from fanout.disk.state import State
from fanout.format.tree import DIR, FILE, SYMLINK, Node
from fanout.runtime import Runtime, system
from fanout.store.local import LocalStore
from fanout.view.cache import HostCache
from fanout.view.transfer import download, upload_intents
from fanout.view.view import open_view
from tests.support.disks import check_refs, check_tree, cold, contents, main, new_disk, put, put_many

CHANGES = (
    "open",
    "mkdir",
    "mknod",
    "symlink",
    "link",
    "write",
    "pwrite",
    "rename",
    "unlink",
    "rmdir",
    "utime",
    "fchmod",
)
TUNING = Tuning(
    page_entries=4, small_file_bytes=1000, extent_bytes=1000, pack_bytes=4000, inline_bytes=500,
    fold_entries=1 << 30, fold_bytes=1 << 40, fold_paths=1 << 30,
)  # fmt: skip
BYTES = random.Random(7).randbytes
FIRST = {f"d{n % 3}/f{n}": BYTES(300 + 400 * (n % 4)) for n in range(12)}
SECOND = {f"d{n % 3}/f{n}": BYTES(200 + 500 * (n % 3)) for n in range(0, 12, 2)}
LOCAL = {f"sub/f{n}": BYTES(700 * n) for n in range(6)}


def arm(k: int) -> None:
    """From now on: count, and die before the k-th change."""
    count, lock = [0], threading.Lock()

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            with lock:
                count[0] += 1
                if count[0] >= k:
                    os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **named)

        return counted

    for name in CHANGES:
        setattr(os, name, wrap(getattr(os, name)))


class Place:
    """One store, one cache, one local tree."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cache = root / "cache"
        self.store = LocalStore(root / "store", fsync=False)

    def disk(self) -> Disk:
        return Catalogue(self.store, system, TUNING).get("ws")

    def view(self, cache: HostCache, disk: Disk, state: State) -> dict[bytes, bytes]:
        """Open a view and read what its layers show, as overlayfs puts them together."""
        with open_view(cache, disk.reader, state, disk_id=disk.id, writable=True) as view:
            shown: dict[bytes, bytes] = {}
            for lower in view.mount("/mnt/w").lowers:  # lowest first
                top = os.fsencode(lower)
                for folder, folders, names in os.walk(top):
                    for name in (*folders, *names):
                        path = os.path.join(folder, name)
                        inside, found = os.path.relpath(path, top), os.lstat(path)
                        if stat.S_ISCHR(found.st_mode):
                            for gone in [p for p in shown if p == inside or p.startswith(inside + b"/")]:
                                del shown[gone]
                        elif stat.S_ISREG(found.st_mode):
                            shown[inside] = Path(os.fsdecode(path)).read_bytes()
            return shown


def prepare(place: Place, action: str) -> None:
    disk = new_disk(place.store, system, TUNING, "ws")
    put_many(disk, FIRST.items())
    if action != "fold":
        disk.branch().fold()
    link = disk.branch().refresh().get(b"d0/f0")
    assert link is not None
    names = [
        Intent(b"d0/link", None, Node(SYMLINK, 0o777, 1, 2, target=b"f0")),
        Intent(b"empty", None, Node(DIR, 0o755, 1)),
    ]
    disk.apply(main(disk), names, policy=Policy.LAST_WINS)
    cache = HostCache(place.cache, 1 << 30)
    if action in ("delta", "evict"):
        place.view(cache, disk, disk.branch().refresh())
    if action in ("delta", "evict", "fold"):
        put_many(disk, SECOND.items())
        disk.delete_object(main(disk), b"d1/f1")
    if action == "evict":
        place.view(cache, disk, disk.branch().refresh())
    cache.close()
    for name, data in LOCAL.items():
        (place.root / "local" / name).parent.mkdir(parents=True, exist_ok=True)
        (place.root / "local" / name).write_bytes(data)


def act(place: Place, action: str, k: int) -> None:
    disk = place.disk()
    state = disk.branch().refresh()
    cache = HostCache(place.cache, 1 << 30)
    arm(k)
    if action in ("base", "delta"):
        place.view(cache, disk, state)
    elif action == "evict":
        cache.evict(0)
    elif action == "upload":
        upload(place, disk)
    elif action == "download":
        download(disk.reader, state, b"", place.root / "down")
    else:
        disk.branch().fold()
    cache.close()


def upload(place: Place, disk: Disk) -> None:
    packer = disk.packer()
    intents = upload_intents(packer, place.root / "local", b"up")
    disk.apply(main(disk), intents, policy=Policy.LAST_WINS, blobs=dict(packer.finish().blobs))


def look(place: Place, action: str) -> None:
    """Be the next process: whatever the killed one left, all of this works."""
    disk = place.disk()
    state = disk.branch().refresh()
    check_tree(state)
    check_refs(place.store, disk, state)
    found = contents(disk, state)
    wanted = {path.encode(): data for path, data in FIRST.items()}
    if action in ("delta", "evict", "fold"):
        wanted |= {path.encode(): data for path, data in SECOND.items()}
        del wanted[b"d1/f1"]
    uploaded = {**wanted, **{b"up/" + path.encode(): data for path, data in LOCAL.items()}}
    assert found == wanted or (action == "upload" and found == uploaded), "half a commit"

    cache = HostCache(place.cache, 1 << 30)
    for kind in ("base", "delta"):
        for tree in os.listdir(place.cache / kind):
            assert sorted(os.listdir(place.cache / kind / tree)) == ["entry", "tree"], "a half-built tree is in use"
    assert place.view(cache, disk, state) == found, "a half-built tree was used"
    cache.evict(0)
    assert place.view(cache, disk, state) == found
    cache.evict(0)
    cache.close()
    for kind in ("base", "delta", "tmp", "upper", "trash", "lease"):
        assert os.listdir(place.cache / kind) == [], f"left in {kind}"
    assert len(os.listdir(place.cache / "owner")) == 1

    if action == "upload":
        upload(place, disk)
        assert contents(disk, cold(disk, place.store).branch().refresh()) == uploaded
    if action == "download":
        download(disk.reader, state, b"", place.root / "down")
        there = {
            os.fsencode(path.relative_to(place.root / "down")): path.read_bytes()
            for path in (place.root / "down").rglob("*")
            if path.is_file() and not path.is_symlink()
        }
        assert there == wanted
        assert os.readlink(place.root / "down/d0/link") == "f0"
    put(disk, "after", b"1")
    disk.branch().fold()
    again = contents(disk, cold(disk, place.store).branch().refresh())
    assert again == {**(uploaded if action == "upload" else wanted), b"after": b"1"}
    two_days_on = Runtime(now_ns=lambda: time.time_ns() + 2 * 86_400 * 10**9)
    LocalStore(place.store.root, runtime=two_days_on)
    assert os.listdir(f"{place.store.root}/+tmp") == [], "temporary files are swept a day later"
    assert all(node.kind in (DIR, FILE, SYMLINK) for _, node in state.scan())


def forked(work: Callable[[], None]) -> int:
    """Run in a process of its own; returns 0, or the signal that killed it. A failure ends everything."""
    pid = os.fork()
    if pid == 0:
        _run(work)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status)
    if os.WEXITSTATUS(status):
        sys.exit(1)
    return 0


def _run(work: Callable[[], None]) -> NoReturn:
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def run(root: Path, action: str, stride: int, k: int) -> None:
    killed = 0
    while True:
        place = root / str(k)
        place.mkdir()
        forked(lambda place=place: prepare(Place(place), action))  # type: ignore[misc]
        died = forked(lambda place=place, k=k: act(Place(place), action, k))  # type: ignore[misc]
        assert died in (0, signal.SIGKILL)
        print(f"{action}: killed at {k}" if died else f"{action}: lived through {k}", file=sys.stderr, flush=True)
        forked(lambda place=place: look(Place(place), action))  # type: ignore[misc]
        shutil.rmtree(place)
        if not died:
            print(killed, flush=True)
            return
        killed += 1
        k += stride


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
