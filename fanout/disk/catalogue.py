"""Which disks there are: creating, finding, listing and deleting them.

Owns names and their uniqueness. A disk exists from the moment its name object does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from fanout.config import Tuning
from fanout.disk.disk import Disk
from fanout.disk.record import create_record
from fanout.disk.removal import remove_disk
from fanout.errors import Corrupt, Exists, NotFound
from fanout.format import layout
from fanout.format.entry import BranchRecord, DiskRecord, decode_disk, encode_branch, encode_disk
from fanout.runtime import Runtime
from fanout.store.base import Store
from fanout.store.probe import probe

__all__ = ["Catalogue"]


class Catalogue:
    """The disks of one store. Thread safe; hands out one `Disk` instance per disk."""

    def __init__(self, store: Store, runtime: Runtime, tuning: Tuning) -> None:
        self._store = store
        self._runtime = runtime
        self._tuning = tuning
        self._open: dict[str, Disk] = {}
        self._lock = threading.Lock()
        self._probed = False

    def create(self, name: str) -> Disk:
        """Create a disk; `Exists` if the name is taken. The store is probed first: see `store.probe`."""
        layout.check_name("name", name)
        if self._store.head(layout.name_key(name)) is not None:
            raise Exists(f"there is a disk called {name!r} already")
        self._probe()
        main = BranchRecord(self._runtime.hex_id(32), (), self._runtime.now_ns())
        record = DiskRecord(f"dsk-{self._runtime.hex_id(16)}", name, main.created_ns, ("create_only",), main.uuid)
        data = encode_disk(record)
        self._create(layout.branch_key(record.id, layout.MAIN), encode_branch(main), "the id is taken")
        self._create(layout.disk_key(record.id), data, "the id is taken")
        try:
            # Last: whoever finds the name finds a whole disk.
            self._create(layout.name_key(name), data, f"there is a disk called {name!r} already")
        except Exists:
            self._store.delete([layout.disk_key(record.id), layout.branch_key(record.id, layout.MAIN)])
            raise
        return self._opened(record)

    def get(self, name_or_id: str) -> Disk:
        """Open a disk by name or id; `NotFound` names what was asked for."""
        if layout.is_disk_id(name_or_id):
            with self._lock:
                known = self._open.get(name_or_id)
            key = layout.disk_key(name_or_id) if known is None else layout.name_key(known.name)
        else:
            layout.check_name("disk", name_or_id)
            key = layout.name_key(name_or_id)
        try:
            record = decode_disk(self._store.get(key), key)
        except NotFound:
            record = None
        if record is None or name_or_id not in (record.id, record.name):
            raise NotFound(f"there is no disk {name_or_id!r} in {self._store.url}")
        return self._opened(record)

    def names(self, start_after: str = "") -> Iterator[str]:
        """Yield the names of all disks after `start_after`, in byte order."""
        after = layout.CATALOGUE + start_after if start_after else ""
        listed = self._store.list(layout.CATALOGUE, start_after=after)
        return (layout.name_of_key(meta.key, layout.CATALOGUE) for meta in listed)

    def delete(self, name_or_id: str) -> None:
        """Delete a disk with all its history; `NotFound` if it is not there. Interrupted, it can be called again.

        Whoever has it open gets `NotFound` for what he commits afterwards. What stays for good is a seal of 50 bytes
        for each branch and each entry of its last quarter of an hour: removal.py says why.
        """
        record = self.get(name_or_id).record
        with self._lock:
            self._open.pop(record.id, None)
        remove_disk(self._store, record, self._runtime, self._tuning.stale_s)

    def close(self) -> None:
        """Wait for the background work of all opened disks."""
        for disk in list(self._open.values()):
            disk.close()

    def _create(self, key: str, data: bytes, taken: str) -> None:
        create_record(self._store, key, data, taken, self._runtime)

    def _probe(self) -> None:
        if not self._probed:
            probe(self._store, self._runtime)
            self._probed = True

    def _opened(self, record: DiskRecord) -> Disk:
        with self._lock:
            disk = self._open.get(record.id)
            if disk is None:
                disk = self._open[record.id] = Disk(self._store, record, self._runtime, self._tuning)
            if disk.record != record:
                raise Corrupt(f"{layout.disk_key(record.id)} and {layout.name_key(record.name)} disagree")
            return disk
