"""A committer that freezes just before it creates its log entry, until somebody lets it go on.

    late.py ROOT DISK_ID PATH SIZE

Opens the disk, stores SIZE bytes for PATH, stops itself (SIGSTOP) at the create, and prints what came of it.
"""

from __future__ import annotations

import os
import signal
import sys

from fanout.config import Tuning
from fanout.disk.catalogue import Catalogue
from fanout.errors import FanoutError
from fanout.runtime import system
from fanout.store.local import LocalStore
from fanout.store.wrap import Wrapper
from tests.support.disks import TINY, put

#: So impatient that a second of sleep is a month.
HASTY = TINY.model_copy(update={"stale_s": 0.2, "unreferenced_s": 0.2})


class Freezing(Wrapper):
    """Stops the process before its first create of a log entry, after everything was checked."""

    frozen = False

    def create(self, key: str, data: bytes) -> None:
        if "/log/" in key and not self.frozen:
            self.frozen = True
            os.kill(os.getpid(), signal.SIGSTOP)
        self.inner.create(key, data)


def main(root: str, disk_id: str, path: str, size: int, tuning: Tuning = HASTY) -> None:
    disk = Catalogue(Freezing(LocalStore(root, fsync=False)), system, tuning).get(disk_id)
    disk.branch().refresh()
    try:
        put(disk, path, b"f" * size)
        print("committed")
    except FanoutError as error:
        print(error.code, error)
    disk.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
