"""Open files of the file system: reading with fsspec's caches, writing in blocks, appearing in one commit.

Owns what a written file's bytes wait in until it is closed, and transactions. Knows no disks: the file system stores.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from typing import TYPE_CHECKING, Any, BinaryIO

from fsspec.asyn import sync
from fsspec.spec import AbstractBufferedFile
from fsspec.transaction import Transaction

if TYPE_CHECKING:
    from fanout.fs import FanoutFileSystem

__all__ = ["FanoutFile", "FanoutTransaction", "Staged"]


class FanoutFile(AbstractBufferedFile):  # type: ignore[misc]
    """One open file. What is written is seen by nobody until the file is closed, and then appears in one commit.

    A `with` block that is left by an exception stores nothing. A file that changes while it is read in pieces is an
    OSError (ESTALE), never a mixture.
    """

    fs: FanoutFileSystem

    def __init__(self, fs: FanoutFileSystem, path: str, mode: str = "rb", **options: Any) -> None:
        self.staged: Staged | None = None
        before = None if mode == "rb" else sync(fs.loop, fs._to_write, path, mode)
        self._appended_to = before is not None
        super().__init__(fs, path, mode, **options)
        if before is not None:
            self.loc = before["size"]

    def _fetch_range(self, start: int, end: int) -> bytes:
        whole = start == 0 and end >= self.size
        data: bytes = self.fs.cat_file(self.path, start=start, end=None if whole else end)
        if not whole or len(data) != self.size:
            self.fs.check_unchanged(self.path, self.details)
        return data

    def _upload_chunk(self, final: bool = False) -> None:
        block = self.buffer.getvalue()
        if final and self.autocommit and self.staged is None and not self._appended_to:
            self._store(block)
            return
        if self.staged is None:
            self.staged = Staged(self.fs, self.path)
            if self._appended_to:
                self.fs.get_file(self.path, self.staged.file)
        self.staged.file.write(block)
        if final and self.autocommit:
            try:
                self._store(self.staged.rewound())
            finally:
                self.staged.discard()

    def _store(self, content: bytes | BinaryIO) -> None:
        sync(self.fs.loop, self.fs._store, self.path, content, exclusive=self.mode == "xb")

    def commit(self) -> None:
        """Store a file that was opened with `autocommit=False`."""
        self.close()
        if self.staged is not None:
            self.staged.commit()

    def discard(self) -> None:
        """Forget what was written."""
        self.closed = True
        if self.staged is not None:
            self.staged.discard()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None and self.mode != "rb" and not self.closed:
            self.discard()
        else:
            self.close()


class Staged:
    """What one path is to hold when its file is closed, or its transaction ends: a temporary file of this host.

    Nothing is sent before, so that a file may stay open for hours, and hundreds of files at once.
    """

    def __init__(self, fs: FanoutFileSystem, path: str) -> None:
        self.fs = fs
        self.path = path
        fd, self.name = tempfile.mkstemp(prefix="fanout-")
        self.file: BinaryIO = os.fdopen(fd, "w+b")

    def rewound(self) -> BinaryIO:
        """Return the file, to be read from its start."""
        self.file.seek(0)
        return self.file

    def commit(self) -> None:
        """Store this one by itself."""
        try:
            sync(self.fs.loop, self.fs._store, self.path, self.rewound())
        finally:
            self.discard()

    def discard(self) -> None:
        """Forget it."""
        self.file.close()
        with suppress(FileNotFoundError):
            os.unlink(self.name)


class FanoutTransaction(Transaction):  # type: ignore[misc]
    """A context whose written files appear on each line of a disk in one commit, or not at all."""

    def complete(self, commit: bool = True) -> None:
        """Commit all files or forget them. Where several lines are written, each has a commit of its own."""
        fs = self.fs
        try:
            if commit:
                for file in self.files:
                    if isinstance(file, FanoutFile):
                        file.close()
                staged = [file.staged if isinstance(file, FanoutFile) else file for file in self.files]
                sync(fs.loop, fs._store_together, staged)
        finally:
            super().complete(commit=False)
