"""The scan files of a host: opened, held while they are in use, and what this process knows of each disk's.

Owns opening and holding. What one tree needs is arranged in parts.py. Knows nothing of patterns.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from fanout.view.bases import Bases, Rested
from fanout.view.cache import HostCache, Lease
from fanout.view.scan import Scan, open_scan

__all__ = ["Facts", "Held", "Known", "Scans"]

#: How many files' paths and places this process keeps of scan files it has opened: about 100 bytes each.
_OPEN_FILES = 1 << 18
_FACTS = 1 << 16
_KNOWN_DISKS = 64


@dataclass(slots=True)
class Held:
    """An opened scan file that cannot go away before `release`. `warm`: it did not have to be built."""

    scan: Scan
    lease: Lease

    @property
    def warm(self) -> bool:
        return self.lease.warm

    def release(self) -> None:
        self.lease.release()


class Facts(NamedTuple):
    """How many files a scan file has, how many of its page it leaves to another, and its bytes."""

    files: int
    left_out: int
    size: int


@dataclass(slots=True)
class Known:
    """What this process knows of one disk: the bases of its pages, what pages without one rest on, and its patches.

    `patched` says of a path and its content's hash which file of which patch it is. Only under `lock`.
    """

    bases: Bases
    rested: OrderedDict[str, Rested] = field(default_factory=OrderedDict)
    patched: dict[tuple[bytes, bytes], tuple[str, int]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class _Gone(Exception):
    """A scan file was evicted."""


class Scans:
    """The scan files of a host cache, as one process sees them. Thread safe, blocking."""

    def __init__(self, cache: HostCache) -> None:
        self._cache = cache
        self._lock = threading.Lock()
        self._opened: OrderedDict[str, Scan] = OrderedDict()
        self._opened_files = 0
        self._facts: dict[str, Facts] = {}
        self._known: OrderedDict[str, Known] = OrderedDict()

    def has(self, identity: str) -> bool:
        """Whether a scan file is there (it may be evicted before it is held)."""
        return self._cache.has("scan", identity)

    def hold(self, identity: str, build: Callable[[int], int]) -> Held:
        """Return a scan file, having `build` write it below an open directory if it is not there."""
        lease = self._cache.lease("scan", identity, build)
        try:
            return Held(self._open(identity, lease), lease)
        except BaseException:
            lease.release()
            raise

    def hold_if_there(self, identity: str) -> Held | None:
        """Return a scan file if it is there."""
        if not self.has(identity):
            return None
        try:
            return self.hold(identity, _refuse)
        except _Gone:
            return None

    def directory(self, identity: str) -> str:
        """Return where a scan file is, or would be."""
        return self._cache.tree_path("scan", identity)

    def facts(self, identity: str) -> Facts | None:
        """Return what there is to know of a scan file without its table; None if it never was there."""
        found = self._facts.get(identity)
        if found is None:
            held = self.hold_if_there(identity)
            if held is None:
                return None
            held.release()
            found = self._facts.get(identity)
        return found

    def known(self, disk_id: str) -> Known:
        """Return what is known of a disk."""
        with self._lock:
            found = self._known.get(disk_id)
            if found is None:
                found = self._known[disk_id] = Known(Bases(*self._cache.note(disk_id)))
            self._known.move_to_end(disk_id)
            while len(self._known) > _KNOWN_DISKS:
                self._known.popitem(last=False)
            return found

    def _open(self, identity: str, lease: Lease) -> Scan:
        with self._lock:
            scan = self._opened.get(identity) if lease.warm else None
            if scan is not None:
                self._opened.move_to_end(identity)
                return scan
        scan = open_scan(lease.path)
        with self._lock:
            while len(self._facts) >= _FACTS:
                self._facts.pop(next(iter(self._facts)))
            self._facts[identity] = Facts(scan.files, scan.left_out, scan.size)
            old = self._opened.pop(identity, None)
            self._opened_files += scan.files - (old.files if old else 0)
            self._opened[identity] = scan
            while self._opened_files > _OPEN_FILES and len(self._opened) > 1:
                self._opened_files -= self._opened.popitem(last=False)[1].files
        return scan


def _refuse(_: int) -> int:
    raise _Gone
