"""Templates: a machine that has booted, as files, from which others go on instead of booting.

Owns these files in the cache directory, and what one is good for: this image, QEMU, kind of guest and boot of the host.
Knows nothing of how a machine is saved. Blocking.

A copy takes a fraction of a boot's computing, without KVM. What copies share they had before any command: the guest
kernel's layout and secrets of its boot. Each gets random numbers and the time of its own with its command.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fanout.engine.qemu.command import Guest, Inherited, command_line
from fanout.engine.qemu.image import Image
from fanout.engine.qemu.machine import Files

__all__ = ["Templates"]

PAGE_BYTES = 4096
CHUNK_BYTES = 2 * 1024 * 1024

#: How many are kept: each is some 50 MB.
KEPT = 3

PREFIX, MAKING = "template-", "making-template-"


class Templates:
    """Those of one image, below `directory`."""

    def __init__(self, directory: Path, image: Image) -> None:
        self._directory = directory
        self._image = image

    def resume(self, guest: Guest) -> Files | None:
        """Return files of a fresh copy, for a machine to go on from; None if there is no template. See `close`."""
        place = self._place(guest)
        try:
            state = os.open(place / "state", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            with open(place / "memory", "rb", buffering=0) as file:
                memory = _memory_file(guest.memory_bytes)
                try:
                    _copy(file.fileno(), memory)
                except BaseException:
                    os.close(memory)
                    raise
        except FileNotFoundError:  # it was removed meanwhile
            os.close(state)
            return None
        except BaseException:
            os.close(state)
            raise
        return Files(memory, state, resumes=True)

    @contextmanager
    def making(self, guest: Guest) -> Iterator[Files | None]:
        """Give files for a machine to be saved to, for `keep`; None where another made a template meanwhile.

        There is one maker at a time, whatever the process.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(self._directory / "template.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        opened = [lock]
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self._place(guest).exists():
                yield None
                return
            memory, state = _memory_file(guest.memory_bytes), _memory_file(0)
            opened += [memory, state]
            yield Files(memory, state, resumes=False)
        finally:
            for fd in opened:
                os.close(fd)

    def keep(self, guest: Guest, files: Files) -> None:
        """Make these, to which a machine was saved, the template. OSError where they cannot be written."""
        for left in self._directory.glob(f"{MAKING}*"):
            shutil.rmtree(left, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=MAKING, dir=self._directory))
        try:
            _copy_used(files.memory, scratch / "memory")
            with open(scratch / "state", "wb") as file:
                os.lseek(files.state, 0, os.SEEK_SET)
                while data := os.read(files.state, CHUNK_BYTES):
                    file.write(data)
            os.rename(scratch, self._place(guest))
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        self._remove_old()

    def drop(self, guest: Guest) -> None:
        """Remove a template that is no good."""
        shutil.rmtree(self._place(guest), ignore_errors=True)

    def _place(self, guest: Guest) -> Path:
        argv = command_line(self._image, guest, Inherited(0, 0, 0, 0, 0))
        program = os.stat(argv[0])
        known = [*argv, str(self._image.version), str(program.st_mtime_ns), str(program.st_size)]
        text = re.sub(r"tsc_early_khz=\d+", "", "\0".join(known))  # measured anew by each process
        return self._directory / f"{PREFIX}{_boot()}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def _remove_old(self) -> None:
        """Remove those of earlier boots of the host, and all but some of the newest."""
        found = sorted(self._directory.glob(f"{PREFIX}*"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for number, path in enumerate(found):
            if number >= KEPT or not path.name.startswith(f"{PREFIX}{_boot()}-"):
                shutil.rmtree(path, ignore_errors=True)


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]


def _memory_file(size_bytes: int) -> int:
    fd = os.memfd_create("fanout-guest", os.MFD_CLOEXEC)
    os.ftruncate(fd, -(-size_bytes // (1024 * 1024)) * 1024 * 1024)
    return fd


def _ranges(fd: int) -> Iterator[tuple[int, int]]:
    """Yield where a sparse file holds data: begin and end."""
    at = 0
    while True:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # no more
            return
        end = os.lseek(fd, at, os.SEEK_HOLE)
        yield at, end
        at = end


def _copy(source: int, target: int) -> None:
    for begin, end in _ranges(source):
        os.lseek(target, begin, os.SEEK_SET)
        while begin < end:
            begin += os.sendfile(target, source, begin, end - begin)


def _copy_used(source: int, path: Path) -> None:
    """Copy memory to a file, without the pages of it that are all zeros."""
    zeros = bytes(PAGE_BYTES)
    with open(path, "xb", buffering=0) as file:
        file.truncate(os.fstat(source).st_size)
        for begin, end in _ranges(source):
            for at in range(begin, end, CHUNK_BYTES):
                data = os.pread(source, min(CHUNK_BYTES, end - at), at)
                used = [data[i : i + PAGE_BYTES] != zeros for i in range(0, len(data), PAGE_BYTES)]
                for first, last in _runs(used):
                    os.pwrite(file.fileno(), data[first * PAGE_BYTES : last * PAGE_BYTES], at + first * PAGE_BYTES)


def _runs(flags: list[bool]) -> Iterator[tuple[int, int]]:
    """Yield the runs of true flags: begin and end."""
    begin: int | None = None
    for i, flag in enumerate([*flags, False]):
        if flag and begin is None:
            begin = i
        elif not flag and begin is not None:
            yield begin, i
            begin = None
