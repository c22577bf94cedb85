"""The host's cache of materialised trees: built once, shared by all processes, bounded.

Owns the cache directory: what is in it, who uses it, what is removed when. Knows nothing of what a tree holds.

    base/<id>/tree, delta/<id>/tree   immutable once there; built in tmp/ and renamed into place
    scan/<id>/tree, words/<id>/tree   the same, for searches (scan.py, published.py)
    base/<id>/entry                   size in bytes and the boot it was built in
    note/<name>                       what a process wants others to know, replaced as a whole; may go at any time
    lease/<kind>-<id>                 flock: shared in use, exclusive to build or evict; its mtime is the last use
    tmp/<owner>-*, upper/<owner>-*, trash/<owner>-*    scratch of one process (scratch.py)
    owner/<owner>                     flock: held as long as that process lives

Trees are not synced to disk one by one, so those of an earlier boot (a power cut may have emptied their files)
are not believed. The directory is 0700: commands reach a tree only through a mount.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple

from fanout.disk.state import State
from fanout.errors import Invalid, Unavailable
from fanout.runtime import Runtime, system
from fanout.view.compare import Differences
from fanout.view.local import remove_tree
from fanout.view.scratch import Scratch, ScratchPool, spread

__all__ = ["HostCache", "Known", "Lease"]

Kind = Literal["base", "delta", "scan", "words"]
#: Builds a tree below an open directory; returns its size on disk in bytes.
Builder = Callable[[int], int]

_KINDS: tuple[Kind, ...] = ("delta", "base", "scan", "words")
_SCRATCH = ("tmp", "upper", "trash")
#: More unused deltas than this are removed even where there is room: an old delta is of little use.
_MAX_IDLE_DELTAS = 64
#: How many builds of ours may pass before the sizes of others' are looked at again.
_RESCAN_BUILDS = 16
#: How many bases of one disk and subdirectory are remembered with their trees.
_KNOWN_BASES = 4
_KNOWN_DISKS = 64


class Known(NamedTuple):
    """A base this process has used, and the tree it holds."""

    identity: str
    state: State


class Lease:
    """The right to use one tree, until `release`. `warm` says whether it was there already."""

    def __init__(self, cache: HostCache, kind: Kind, identity: str, warm: bool) -> None:
        self._cache: HostCache | None = cache
        self._key = (kind, identity)
        self.warm = warm
        self.path = cache.tree_path(kind, identity)

    def release(self) -> None:
        """Give the tree back; repeating it is harmless."""
        cache, self._cache = self._cache, None
        if cache is not None:
            cache._release(self._key)


class _Slot:
    """What this process knows of one tree: how often it is used here, and the flock that says so to others."""

    __slots__ = ("fd", "held", "lock", "users")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
        self.held = 0
        self.fd = -1


class HostCache:
    """The cache in one directory. Thread safe; several processes may share the directory. Blocking.

    `max_bytes` bounds what is kept of trees nobody uses; what is in use is never removed.
    """

    def __init__(self, cache_dir: str | Path, max_bytes: int, runtime: Runtime = system) -> None:
        self.dir = os.path.abspath(cache_dir)
        self.max_bytes = max_bytes
        self.runtime = runtime
        self.differences = Differences()
        self._owner = runtime.hex_id(16)
        self._lock = threading.Lock()
        self._slots: dict[tuple[Kind, str], _Slot] = {}
        self._known: OrderedDict[tuple[str, bytes], OrderedDict[str, State]] = OrderedDict()
        self._numbers = 0
        self._builds = 0
        self._used = 0
        self._boot = _boot_id()
        try:
            os.makedirs(self.dir, mode=0o700, exist_ok=True)
            os.chmod(self.dir, 0o700)
            for name in (*_KINDS, *_SCRATCH, "lease", "note", "owner"):
                os.makedirs(self._path(name), mode=0o700, exist_ok=True)
            for name in ("tmp", "upper"):
                spread(self._path(name))
            self._owner_fd = self._own()
            self._check_whiteouts()
        except OSError as error:
            if _is_full(error):
                raise Unavailable(f"the file system of the cache directory {self.dir} is full") from error
            allowed = f"a directory this user can write ({error.strerror})"
            raise Invalid.argument("cache_dir", self.dir, allowed) from error
        self._remover = ThreadPoolExecutor(1, "fanout-remove")
        self._scratch = ScratchPool(lambda: self._scratch_path("upper"), runtime)
        self._clean()

    # -- trees -----------------------------------------------------------------------------------------------

    def lease(self, kind: Kind, identity: str, build: Builder) -> Lease:
        """Return a lease on a tree, building it first if it is not there.

        Of all threads and processes that ask at once one builds, the others wait for it. `Unavailable` names the
        cache directory if it is full; what the builder raises passes on, and leaves nothing behind.
        """
        key = (kind, identity)
        with self._lock:
            slot = self._slots.setdefault(key, _Slot())
            slot.users += 1
        warm = True
        try:
            with slot.lock:
                if slot.fd < 0:
                    slot.fd, warm = self._make_room_and_acquire(kind, identity, build)
                slot.held += 1
        except BaseException:
            self._forget(key, slot)
            raise
        if not warm:
            self._after_build()
        return Lease(self, kind, identity, warm)

    def has(self, kind: Kind, identity: str) -> bool:
        """Whether a tree is there (it may be evicted before a lease is taken)."""
        return os.path.exists(self._path(kind, identity, "entry"))

    def those_there(self, kind: Kind, prefix: str) -> list[str]:
        """Return the ids of a kind that begin with `prefix` and are there (each may be evicted before it is leased)."""
        return sorted(identity for identity in os.listdir(self._path(kind)) if identity.startswith(prefix))

    def tree_path(self, kind: Kind, identity: str) -> str:
        return self._path(kind, identity, "tree")

    def note(self, name: str) -> tuple[str, str]:
        """Return the path of a small file to keep notes in, and an ending that no other process uses beside it."""
        return self._path("note", name), self._owner

    def known(self, disk_id: str, subdirectory: bytes) -> list[Known]:
        """Return the bases of a disk that this process knows the trees of, the latest used first."""
        with self._lock:
            found = self._known.get((disk_id, subdirectory))
            return [Known(identity, state) for identity, state in reversed(found.items())] if found else []

    def remember(self, disk_id: str, subdirectory: bytes, base: Known) -> None:
        """Keep in mind which tree a base holds."""
        with self._lock:
            bases = self._known.setdefault((disk_id, subdirectory), OrderedDict())
            self._known.move_to_end((disk_id, subdirectory))
            bases.setdefault(base.identity, base.state)
            bases.move_to_end(base.identity)
            while len(bases) > _KNOWN_BASES:
                bases.popitem(last=False)
            while len(self._known) > _KNOWN_DISKS:
                self._known.popitem(last=False)

    def _make_room_and_acquire(self, kind: Kind, identity: str, build: Builder) -> tuple[int, bool]:
        try:
            return self._acquire(kind, identity, build)
        except (OSError, Unavailable) as error:
            if not _is_full(error):
                raise self._typed(error) from error
        # The file system is shared with others: what we do not need goes, then once more.
        self.evict(0)
        self._remover.submit(lambda: None).result()
        try:
            return self._acquire(kind, identity, build)
        except (OSError, Unavailable) as error:
            if not _is_full(error):
                raise self._typed(error) from error
            raise Unavailable(f"the cache directory {self.dir} has no room for a view: {error}") from error

    def _typed(self, error: OSError | Unavailable) -> Unavailable:
        if isinstance(error, Unavailable):
            return error
        return Unavailable(f"the cache directory {self.dir} cannot hold a view: {error}")

    def _acquire(self, kind: Kind, identity: str, build: Builder) -> tuple[int, bool]:
        warm = True
        while True:
            fd = self._flock(kind, identity, fcntl.LOCK_SH)
            if self.has(kind, identity):
                os.utime(fd)
                return fd, warm
            os.close(fd)
            fd = self._flock(kind, identity, fcntl.LOCK_EX)
            try:
                if not self.has(kind, identity):
                    self._build(kind, identity, build)
                    warm = False
                # Another process may come between the exclusive and the shared lock: hence the loop.
            finally:
                os.close(fd)

    def _build(self, kind: Kind, identity: str, build: Builder) -> None:
        place = self._scratch_path("tmp")
        os.mkdir(place, 0o700)
        try:
            os.mkdir(f"{place}/tree", 0o700)
            fd = os.open(f"{place}/tree", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                size = build(fd)
            finally:
                os.close(fd)
            with open(f"{place}/entry", "w", encoding="ascii") as entry:
                entry.write(f"{size} {self._boot}")
            os.rename(place, self._path(kind, identity))
            self._used += size
        except BaseException:
            self.discard(place)
            raise

    def _release(self, key: tuple[Kind, str]) -> None:
        slot = self._slots[key]
        with slot.lock:
            slot.held -= 1
            if not slot.held:
                fd, slot.fd = slot.fd, -1
                try:
                    os.utime(fd)
                finally:
                    os.close(fd)
        self._forget(key, slot)

    def _forget(self, key: tuple[Kind, str], slot: _Slot) -> None:
        with self._lock:
            slot.users -= 1
            if not slot.users:
                del self._slots[key]

    # -- scratch ---------------------------------------------------------------------------------------------

    def scratch(self) -> Scratch:
        """Return empty directories for one view; they go to `give_back`."""
        try:
            return self._scratch.take()
        except OSError as error:
            raise Unavailable(f"the cache directory {self.dir} cannot hold a view: {error.strerror}") from error

    def give_back(self, scratch: Scratch) -> None:
        """Take a scratch back and empty it in the background. Nothing may be mounted on it any more."""
        self._remover.submit(self._keep_or_remove, scratch)

    def _keep_or_remove(self, scratch: Scratch) -> None:
        if not self._scratch.keep(scratch):
            self.discard(scratch.path)

    def discard(self, path: str) -> None:
        """Remove a scratch directory of the cache in the background."""
        try:
            self._put_away(path)
        except OSError:  # full: it has to go where it is
            self._remover.submit(self._remove, path)

    def _put_away(self, path: str) -> None:
        doomed = self._scratch_path("trash")
        try:
            os.rename(path, doomed)
        except FileNotFoundError:
            return
        self._remover.submit(self._remove, doomed)

    def _remove(self, path: str) -> None:
        parent, _, name = path.rpartition("/")
        fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            remove_tree(fd, name)
        except OSError:
            pass  # the next start tries again
        finally:
            os.close(fd)

    def _scratch_path(self, kind: str) -> str:
        with self._lock:
            self._numbers += 1
            return self._path(kind, f"{self._owner}-{self._numbers}")

    # -- eviction --------------------------------------------------------------------------------------------

    def evict(self, max_bytes: int | None = None) -> int:
        """Remove unused trees, deltas first, then the least recently used, until `max_bytes` are left.

        Returns how many bytes the cache holds afterwards.
        """
        limit = self.max_bytes if max_bytes is None else max_bytes
        entries = self._entries()
        used = sum(size for _, _, size, _ in entries)
        deltas = sum(kind == "delta" for kind, _, _, _ in entries)
        for kind, identity, size, _ in sorted(entries, key=lambda e: (e[0] != "delta", e[3])):
            if used <= limit and (kind != "delta" or deltas <= _MAX_IDLE_DELTAS):
                continue
            if self._evict_one(kind, identity):
                used -= size
                deltas -= kind == "delta"
        self._used, self._builds = used, 0
        return used

    def _after_build(self) -> None:
        self._builds += 1
        if self._used > self.max_bytes or self._builds >= _RESCAN_BUILDS:
            self.evict()

    def _evict_one(self, kind: Kind, identity: str) -> bool:
        try:
            fd = self._flock(kind, identity, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # no room even for its lock
            return False
        if fd < 0:
            return False
        try:
            self._put_away(self._path(kind, identity))
            os.unlink(self._lease_path(kind, identity))
        except OSError:
            return False
        finally:
            os.close(fd)
        return True

    def _entries(self) -> list[tuple[Kind, str, int, float]]:
        """Return (kind, id, bytes, last use) of every tree; one of another boot counts as never used."""
        found: list[tuple[Kind, str, int, float]] = []
        for kind in _KINDS:
            for identity in os.listdir(self._path(kind)):
                size, boot = _read_entry(self._path(kind, identity, "entry"))
                try:
                    used = os.stat(self._lease_path(kind, identity)).st_mtime
                except FileNotFoundError:
                    used = 0.0
                found.append((kind, identity, size, used if boot == self._boot else -1.0))
        return found

    # -- start and end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish removing what was discarded. Leases and scratch still out are left to the next start."""
        if self._owner_fd < 0:
            return
        self._remover.submit(lambda: None).result()
        for scratch in self._scratch.drain():
            self.discard(scratch.path)
        self._remover.shutdown(wait=True)
        os.close(self._owner_fd)
        self._owner_fd = -1

    def _own(self) -> int:
        """Take the lock that tells other processes that our scratch is alive."""
        while True:
            fd = os.open(self._path("owner", self._owner), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)
            if _same_file(fd, self._path("owner", self._owner)):
                return fd
            os.close(fd)  # somebody's cleaning took it for a leftover

    def _clean(self) -> None:
        """Remove what dead processes and earlier boots left behind."""
        for kind in _SCRATCH:
            for name in os.listdir(self._path(kind)):
                if self._is_dead(name.partition("-")[0]):
                    self.discard(self._path(kind, name))
        for owner in os.listdir(self._path("owner")):
            if self._is_dead(owner):
                _unlink(self._path("owner", owner))
        there = set()
        for kind, identity, _, used in self._entries():
            there.add(f"{kind}-{identity}")
            if used < 0:
                self._evict_one(kind, identity)
        for name in set(os.listdir(self._path("lease"))) - there:  # of a build that failed or died
            found, _, identity = name.partition("-")
            for kind in _KINDS:
                if kind == found:
                    self._evict_one(kind, identity)
        self.evict()

    def _is_dead(self, owner: str) -> bool:
        if owner == self._owner:
            return False
        try:
            fd = os.open(self._path("owner", owner), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
        finally:
            os.close(fd)

    def _check_whiteouts(self) -> None:
        """Find out now rather than in the middle of a build whether whiteouts can be made here."""
        path = self._scratch_path("tmp")
        try:
            os.mknod(path, 0o020000, 0)
        except OSError as error:
            if _is_full(error):
                raise
            raise Invalid.argument(
                "cache_dir", self.dir, f"its file system must take whiteouts, Linux 5.8 or later ({error.strerror})"
            ) from error
        os.unlink(path)

    # -- names and locks -------------------------------------------------------------------------------------

    def _path(self, *parts: str) -> str:
        return "/".join((self.dir, *parts))

    def _lease_path(self, kind: Kind, identity: str) -> str:
        return self._path("lease", f"{kind}-{identity}")

    def _flock(self, kind: Kind, identity: str, how: int) -> int:
        """Return a descriptor that holds the lock of one tree; -1 if it is taken and `how` says not to wait."""
        path = self._lease_path(kind, identity)
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, how)
            except BlockingIOError:
                os.close(fd)
                return -1
            except BaseException:
                os.close(fd)
                raise
            if _same_file(fd, path):
                return fd
            os.close(fd)  # it was evicted between the open and the lock


def _same_file(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _read_entry(path: str) -> tuple[int, str]:
    try:
        with open(path, encoding="ascii") as entry:
            size, _, boot = entry.read().partition(" ")
            return int(size), boot
    except (OSError, ValueError):
        return 0, ""


def _is_full(error: BaseException) -> bool:
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
            return boot.read().strip()
    except OSError:
        return "unknown"
