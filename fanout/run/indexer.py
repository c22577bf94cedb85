"""Writes the words of scan files in the background, so that later searches can skip what cannot match.

Owns the one process that does it. Nothing depends on its success.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Mapping

from fanout.view.words import PROGRAM

__all__ = ["Indexer"]

#: Less than this is searched faster than its words would be.
_MIN_BYTES = 16 << 20
#: How many scan files one process is told of: the arguments of a program are bounded.
_MAX_FILES = 500


class Indexer:
    """One process at a time, of the lowest priority."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def want(self, scans: Mapping[str, int]) -> None:
        """Have the words written of scan files ("text:DIRECTORY" or "binary:DIRECTORY" -> bytes), where it pays."""
        if sum(scans.values()) < _MIN_BYTES or not sys.executable:
            return
        words = [sys.executable, "-I", "-S", PROGRAM, *sorted(scans, reverse=True)[:_MAX_FILES]]
        with self._lock:
            if self._closed or (self._process is not None and self._process.poll() is None):
                return
            try:
                self._process = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/"
                )
            except OSError:
                self._process = None

    def settle(self) -> None:
        """Wait until what is under way is done."""
        process = self._process
        if process is not None:
            process.wait()

    def close(self) -> None:
        """End what is under way."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()
                self._process.wait()
