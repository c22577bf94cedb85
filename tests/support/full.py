"""File systems that are full: small ones made for a test, and a write that fails where no mount is allowed."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


class Small:
    """A tmpfs of few bytes or names."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self) -> None:
        """Take all space that is left."""
        with open(self.path / "+ballast", "wb", buffering=0) as ballast, suppress(OSError):
            while ballast.write(bytes(4096)):
                pass

    def fill_names(self) -> None:
        """Take all names that are left."""
        (self.path / "+names").mkdir()
        with suppress(OSError):
            for number in range(1_000_000):
                (self.path / "+names" / str(number)).touch()

    def free(self) -> None:
        """Give back what was taken."""
        (self.path / "+ballast").unlink(missing_ok=True)
        if (self.path / "+names").exists():
            for name in (self.path / "+names").iterdir():
                name.unlink()
            (self.path / "+names").rmdir()

    def resize(self, size: str) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", str(self.path)], check=True)


@contextmanager
def small(path: Path, size: str, names: int = 10_000) -> Iterator[Small]:
    """Mount a tmpfs at `path`; skips the test where that is not allowed."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    path.mkdir()
    options = f"size={size},nr_inodes={names},mode=700"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "fanout-test", str(path)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    try:
        yield Small(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fail_writes_below(patch: pytest.MonkeyPatch, root: Path, error: int = errno.ENOSPC) -> list[str]:
    """From now on writing to a file below `root` fails; returns the files it failed for, as they come."""
    hit: list[str] = []
    write, pwrite = os.write, os.pwrite

    def check(fd: int) -> None:
        with suppress(FileNotFoundError):
            path = os.readlink(f"/proc/self/fd/{fd}")
            if path.startswith(f"{root}/"):
                hit.append(path)
                raise OSError(error, os.strerror(error))

    def failing_write(fd: int, data: bytes) -> int:
        check(fd)
        return write(fd, data)

    def failing_pwrite(fd: int, data: bytes, offset: int) -> int:
        check(fd)
        return pwrite(fd, data, offset)

    patch.setattr(os, "write", failing_write)
    patch.setattr(os, "pwrite", failing_pwrite)
    return hit
