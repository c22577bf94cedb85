"""Safe handling of local trees that may hold anything: descriptors relative to a root, and removal.

Owns the rule that no symlink is ever followed and no recursion is bounded by Python's stack. Knows nothing of
disks.
"""

from __future__ import annotations

import os
import stat
from collections import OrderedDict
from collections.abc import Callable
from itertools import count

__all__ = ["Directories", "is_whiteout", "join", "remove_tree", "shown", "user_xattrs"]

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: Names the overlay file system keeps its own notes under; never part of a disk.
_OVERLAY = "user.overlay."


class Directories:
    """Descriptors of the directories below one root, opened name by name and never through a symlink.

    Keeps the `keep` most recently used ones open. `unlock` gives an owner who shut himself out (mode 0000) access
    to his directory. Use from one thread; closes what it opened, not the root.
    """

    def __init__(self, root_fd: int, *, keep: int = 64, unlock: bool = False) -> None:
        self._root_fd = root_fd
        self._keep = keep
        self._unlock = unlock
        self._open: OrderedDict[bytes, int] = OrderedDict()

    def open(self, path: bytes) -> int:
        """Return a descriptor of the directory `path`, valid until `keep` others were asked for."""
        held = self._open.get(path)
        if held is not None:
            self._open.move_to_end(path)
            return held
        missing: list[bytes] = []
        at = path
        while at and at not in self._open:
            missing.append(at)
            at = at.rpartition(b"/")[0]
        fd = self._open[at] if at else self._root_fd
        for step in reversed(missing):
            fd = self._enter(step.rpartition(b"/")[2], fd)
            self._open[step] = fd
            if len(self._open) > self._keep:
                os.close(self._open.popitem(last=False)[1])
        return fd

    def forget(self, path: bytes) -> None:
        """Close `path` if it is held: it is about to be replaced."""
        fd = self._open.pop(path, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def __enter__(self) -> Directories:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _enter(self, name: bytes, parent_fd: int) -> int:
        try:
            return os.open(name, _DIRECTORY, dir_fd=parent_fd)
        except PermissionError:
            if not self._unlock:
                raise
            unlock(name, parent_fd)
            return os.open(name, _DIRECTORY, dir_fd=parent_fd)


def unlock(name: bytes | str, parent_fd: int) -> None:
    """Give the owner of a file or directory all rights on it."""
    found = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
    if not stat.S_ISLNK(found.st_mode):
        os.chmod(name, stat.S_IMODE(found.st_mode) | 0o700, dir_fd=parent_fd)


def join(parent: bytes, name: bytes) -> bytes:
    """Return the path of `name` in `parent`; b"" is the root."""
    return parent + b"/" + name if parent else name


def shown(path: bytes) -> str:
    """Return a path as text for messages."""
    return repr(path.decode("utf-8", "backslashreplace"))


def is_whiteout(found: os.stat_result) -> bool:
    """Whether this is overlayfs' mark for a name that is gone: a character device 0/0."""
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == 0


def user_xattrs(fd: int) -> tuple[tuple[bytes, bytes], ...]:
    """Return the `user.*` attributes of an open file or directory, sorted, without the overlay's own."""
    try:
        names = os.listxattr(fd)
    except OSError:
        return ()  # the file system has none
    if not names:
        return ()
    wanted = sorted(name for name in names if name.startswith("user.") and not name.startswith(_OVERLAY))
    return tuple((os.fsencode(name), os.getxattr(fd, name)) for name in wanted)


def remove_tree(parent_fd: int, name: bytes | str) -> None:
    """Remove `name` in `parent_fd`, whatever it is and whatever it holds; not being there is fine.

    Any depth, any mode, any kind of file. What lies deeper is first moved up, so no path ever gets long.
    """
    if not _remove_simple(parent_fd, name):
        return
    top = _open_for_removal(parent_fd, name)
    if top is None:
        return
    try:
        numbers = count()
        pending = _empty(top, top, numbers)
        while pending:
            child = pending.pop()
            fd = _open_for_removal(top, child)
            if fd is None:
                continue
            try:
                pending.extend(_empty(fd, top, numbers))
            finally:
                os.close(fd)
            os.rmdir(child, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(name, dir_fd=parent_fd)


def _remove_simple(parent_fd: int, name: bytes | str) -> bool:
    """Remove what is not a directory, or is an empty one; returns whether a filled directory is left."""
    try:
        if not stat.S_ISDIR(os.stat(name, dir_fd=parent_fd, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=parent_fd)
            return False
        os.rmdir(name, dir_fd=parent_fd)
        return False
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _open_for_removal(parent_fd: int, name: bytes | str) -> int | None:
    try:
        if os.geteuid() != 0:
            unlock(name, parent_fd)
        return os.open(name, _DIRECTORY, dir_fd=parent_fd)
    except FileNotFoundError:
        return None


def _empty(fd: int, top: int, numbers: count[int]) -> list[str]:
    """Unlink the files of a directory and move its filled directories up to `top`; returns their new names."""
    moved: list[str] = []
    with os.scandir(fd) as found:
        entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
    for name, is_directory in entries:
        if not is_directory:
            os.unlink(name, dir_fd=fd)
        elif not _try(os.rmdir, name, fd):
            if os.geteuid() != 0:
                unlock(name, fd)
            moved.append(_move_up(name, fd, top, numbers))
    return moved


def _move_up(name: str, fd: int, top: int, numbers: count[int]) -> str:
    if fd == top:
        return name
    while True:
        # A long prefix and a number: whatever else is in `top`, some number is free (renaming onto a filled
        # directory fails, onto an empty one is harmless).
        fresh = f".fanout-removing-{next(numbers)}"
        try:
            os.rename(name, fresh, src_dir_fd=fd, dst_dir_fd=top)
            return fresh
        except OSError as error:
            if not isinstance(error, FileExistsError) and error.errno not in (39, 20):
                raise


def _try(remove: Callable[..., None], name: str, fd: int) -> bool:
    try:
        remove(name, dir_fd=fd)
        return True
    except FileNotFoundError:
        return True
    except OSError:
        return False
