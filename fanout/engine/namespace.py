"""The thread that starts sandboxes, and the private mount namespace it lives in as root.

Owns overlayfs mounts and the choice of their options. Knows nothing of bwrap's arguments.

Why one thread: (1) bwrap's --die-with-parent is bound to the *thread* that started it, so that thread must live as
long as the engine; (2) as root the thread unshares its mount namespace, which is a matter of one thread too, so
that what it mounts is seen by the sandboxes it starts and by nobody else, and is gone with the process even after
kill -9.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from fanout.engine.base import Mount
from fanout.errors import EngineUnavailable

__all__ = ["Child", "Spawner", "end_monitor", "overlay_options"]

CLONE_FS, CLONE_NEWNS = 0x200, 0x20000
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x4000, 0x40000
MNT_DETACH = 0x2

#: Options of a writable overlay, each dropped alone where the kernel refuses it. redirect_dir makes renaming a
#: lower directory one entry, index keeps hard links whole, volatile spares a sync of the whole file system at the
#: end of each exec. metacopy must be off: a diff needs the data of every changed file in the upper layer.
WANTED_OPTIONS = ("metacopy=off", "redirect_dir=on", "index=on", "xino=auto", "volatile")

#: Where the private namespace keeps its mount points. It exists wherever sysfs is, and no layer can lie in it.
MOUNT_ROOT = "/sys/fs"

#: How often, and after how long each, a mount is tried again whose layers are still those of another.
BUSY_TRIES, BUSY_S = 100, 0.01

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Child:
    """What to start: a program with its three streams (host fds), other fds it keeps, and overlays to mount before."""

    argv: Sequence[str | bytes]
    stdin: int
    stdout: int
    stderr: int
    keep: Sequence[int] = ()
    overlays: Sequence[tuple[str, Mount]] = field(default=())


class Spawner:
    """Starts children from one thread that lives until `close`; then whatever it started dies with it.

    With `private_mounts` (needs CAP_SYS_ADMIN) the thread has its own mount namespace and mounts overlays in it.
    """

    def __init__(self, *, private_mounts: bool) -> None:
        self.private_mounts = private_mounts
        self.options: tuple[str, ...] = ()
        self._numbers = itertools.count()
        self._free: deque[str] = deque()
        self._used: deque[str] = deque()
        self._closing = False
        self._putting = threading.Lock()  # so that no job comes after the last one
        self._jobs: queue.SimpleQueue[tuple[Child, Future[int]] | None] = queue.SimpleQueue()
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="fanout-spawner", daemon=True)
        self._thread.start()
        ready.result()

    def mount_point(self) -> str:
        """Return the path, in the private namespace, of a mount point to be; nobody else has it until `detach`."""
        try:
            return self._free.pop()
        except IndexError:
            return f"{MOUNT_ROOT}/{next(self._numbers)}"

    def spawn(self, child: Child) -> int:
        """Mount the child's overlays, start it, return its pid. The caller reaps it.

        Raises `EngineUnavailable` where a mount or the start fails; then nothing stays mounted.
        """
        started: Future[int] = Future()
        with self._putting:
            if self._closing:
                raise EngineUnavailable("the engine is closed")
            self._jobs.put((child, started))
        try:
            return started.result()
        except BaseException:  # interrupted, perhaps: nobody else would ever know of the child
            if not started.cancel() and started.exception() is None:
                end_monitor(started.result())
            raise

    def detach(self, points: Sequence[str]) -> None:
        """Drop these mount points from the private namespace, without waiting.

        Called once the child has copied the namespace: from then on the mount lives and dies with the sandbox. The
        directories stay, for the next ones: removing one would unmount it in the sandbox too.
        """
        if points:
            self._used.extend(points)
            self._jobs.put(None)

    def close(self) -> None:
        """End the thread; the kernel kills what it started and drops what it mounted."""
        with self._putting:
            self._closing = True
            self._jobs.put(None)
        self._thread.join()

    def _run(self, ready: Future[None]) -> None:
        try:
            if self.private_mounts:
                _enter_private_namespace()
                self.options = overlay_options(_try_overlay)
            ready.set_result(None)
        except BaseException as error:
            ready.set_exception(error)
            return
        while True:
            item = self._jobs.get()
            self._detach_used()  # before all else: every mount here is copied, and listed, for every child to come
            if item is None:
                if self._closing:
                    return
                continue
            child, started = item
            if not started.set_running_or_notify_cancel():
                continue
            try:
                started.set_result(self._spawn(child))
            except BaseException as error:
                started.set_exception(error)
            del item, child, started

    def _spawn(self, child: Child) -> int:
        try:
            for point, mount in child.overlays:
                os.makedirs(point, exist_ok=True)
                _mount_when_free(point, mount, self.options)
            popen = subprocess.Popen(
                child.argv,
                stdin=child.stdin,
                stdout=child.stdout,
                stderr=child.stderr,
                pass_fds=child.keep,
                env={},
                cwd="/",
                umask=0o022,
                start_new_session=True,
            )
        except OSError as error:
            self._used.extend(point for point, _ in child.overlays)
            self._detach_used()
            raise EngineUnavailable(f"cannot start a sandbox: {error}") from error
        popen.returncode = 0  # the caller reaps the pid: keep Popen's finalizer from doing so
        return popen.pid

    def _detach_used(self) -> None:
        while self._used:
            point = self._used.popleft()
            try:
                _umount(point)
            except OSError:
                pass  # never mounted: the mount is what failed
            self._free.append(point)


def overlay_options(works: Callable[[tuple[str, ...]], bool]) -> tuple[str, ...]:
    """Return the wanted options that this kernel takes, judged by `works`; those it refuses are dropped one by one.

    Raises `EngineUnavailable` where not even a plain overlay can be mounted.
    """
    if works(WANTED_OPTIONS):
        return WANTED_OPTIONS
    kept: tuple[str, ...] = ()
    if not works(kept):
        raise EngineUnavailable("the kernel mounts no overlayfs here (is the overlay module loaded?)")
    for option in WANTED_OPTIONS:
        if works((*kept, option)):
            kept = (*kept, option)
    return kept


def end_monitor(monitor: int) -> None:
    """Kill and collect a bwrap that is of no use; with it dies the sandbox it made."""
    try:
        os.kill(monitor, signal.SIGKILL)
        os.waitpid(monitor, 0)
    except (ProcessLookupError, ChildProcessError):
        pass  # collected by somebody who collects every child


def _enter_private_namespace() -> None:
    """Give the calling thread its own mount namespace, from which no mount reaches the rest of the host."""
    if _libc.unshare(CLONE_NEWNS | CLONE_FS) != 0:
        raise EngineUnavailable(f"cannot make a mount namespace: {os.strerror(ctypes.get_errno())}")
    try:
        _mount("none", "/", None, MS_REC | MS_PRIVATE, None)
        _umount_below(MOUNT_ROOT)
        _mount("fanout", MOUNT_ROOT, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0700")
    except OSError as error:
        raise EngineUnavailable(f"cannot prepare the mount namespace: {error}") from error


def _try_overlay(options: tuple[str, ...]) -> bool:
    """Say whether an overlay with these options mounts, on a scratch directory of the private tmpfs."""
    top = tempfile.mkdtemp(dir=MOUNT_ROOT, prefix="try-")
    lower, upper, work, point = (os.path.join(top, name) for name in ("lower", "upper", "work", "merged"))
    for path in (lower, upper, work, point):
        os.mkdir(path)
    try:
        _mount_overlay(point, Mount("/", (lower,), upper, work), options)
    except OSError:
        return False
    _umount(point)
    return True


def _mount_when_free(point: str, mount: Mount, options: Sequence[str]) -> None:
    """Mount an overlay. Its layers may be held a moment more: a sandbox copies what is mounted while it is built."""
    for _ in range(BUSY_TRIES):
        try:
            return _mount_overlay(point, mount, options)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
        time.sleep(BUSY_S)
    _mount_overlay(point, mount, options)


def _mount_overlay(point: str, mount: Mount, options: Sequence[str]) -> None:
    layers = ["lowerdir=" + ":".join(_escaped(path) for path in reversed(mount.lowers))]
    if mount.upper is not None and mount.work is not None:
        layers += [f"upperdir={_escaped(mount.upper)}", f"workdir={_escaped(mount.work)}", *options]
    _mount("overlay", point, "overlay", MS_NOSUID | MS_NODEV, ",".join(layers))


def _escaped(path: str) -> str:
    """Escape what separates options and layers, as overlayfs reads them."""
    return path.replace("\\", "\\\\").replace(",", "\\,").replace(":", "\\:")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    if _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {kind or 'flags'}: {os.strerror(number)}", target)


def _umount_below(top: str) -> None:
    """Drop the mounts below a directory (cgroups, bpf): each costs every sandbox a copy, and none can see them."""
    with open("/proc/thread-self/mounts", encoding="utf-8", errors="surrogateescape") as file:
        points = [line.split(" ")[1] for line in file]
    for point in reversed(points):
        if point.startswith(top + "/"):
            _umount(point)


def _umount(target: str) -> None:
    if _libc.umount2(os.fsencode(target), MNT_DETACH) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)
