"""A process that is killed at one of its requests, or one of many that race on a branch.

    killed.py ROOT DISK_ID kill K WHEN      put files and fold; SIGKILL itself `before` or `after` request K
    killed.py URL DISK_ID race WHO COUNT    wait for a line, then commit COUNT files, one after the other

Prints each path that was acknowledged, and `end` when nothing stopped it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

from fanout.config import Tuning
from fanout.disk.catalogue import Catalogue
from fanout.runtime import system
from fanout.store.base import Store
from fanout.store.local import LocalStore
from fanout.store.open import open_store
from tests.support.disks import TINY, put, put_many
from tests.support.every_request import EveryRequest

T = TypeVar("T")


class Killing(EveryRequest):
    """Kills this process before or after the k-th request."""

    def __init__(self, inner: Store, k: int, when: str) -> None:
        super().__init__(inner)
        self._k = k
        self._when = when
        self._count = 0
        self._lock = threading.Lock()

    def at(self, request: Callable[[], T]) -> T:
        with self._lock:
            self._count += 1
            mine = self._count == self._k
        if mine and self._when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = request()
        if mine:
            os.kill(os.getpid(), signal.SIGKILL)
        return result


def kill(root: str, disk_id: str, k: int, when: str) -> None:
    disk = Catalogue(Killing(LocalStore(root, fsync=False), k, when), system, TINY).get(disk_id)
    put(disk, "small", b"1")
    print("small", flush=True)
    put_many(disk, [(f"many/{n}", b"%d" % n * 50) for n in range(6)])
    print("many", flush=True)
    put(disk, "last", b"2" * 100)
    print("last", flush=True)
    disk.branch().fold()
    disk.close()
    print("end", flush=True)


def race(url: str, disk_id: str, who: str, count: int) -> None:
    store = open_store(url, s3_endpoint=os.environ.get("FANOUT_TEST_S3_ENDPOINT"))
    disk = Catalogue(store, system, Tuning(fold_entries=8)).get(disk_id)
    disk.branch().refresh()
    print("ready", flush=True)
    sys.stdin.readline()
    for n in range(count):
        put(disk, f"{who}/{n}", f"{who} {n}".encode())
        print(f"{who}/{n}", flush=True)
    disk.close()
    print("end", flush=True)


if __name__ == "__main__":
    where, disk_id, what, first, second = sys.argv[1:]
    if what == "kill":
        kill(where, disk_id, int(first), second)
    else:
        race(where, disk_id, first, int(second))
