"""Who is told when a process of a VM dies: a virtiofsd under a running guest, or a VM that waits in the pool.

Owns one thread that watches pidfds. Knows nothing of VMs.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

__all__ = ["Reaper"]


class Reaper:
    """Calls back, in its own thread, when a watched process is dead. `close` before the interpreter ends."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._lock = threading.Lock()
        self._calls: dict[int, Callable[[], None]] = {}
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._epoll.register(self._wake_r, select.EPOLLIN)
        self._thread = threading.Thread(target=self._serve, name="fanout-reaper", daemon=True)
        self._thread.start()

    def watch(self, pidfd: int, call: Callable[[], None]) -> None:
        """Call when the process of this descriptor, which is this object's from now on, is dead; once."""
        with self._lock:
            self._calls[pidfd] = call
            self._epoll.register(pidfd, select.EPOLLIN | select.EPOLLONESHOT)

    def unwatch(self, pidfd: int) -> None:
        """Call no more, and close the descriptor; a call may be on its way. Repeating it is harmless."""
        with self._lock:
            if self._calls.pop(pidfd, None) is not None:
                self._epoll.unregister(pidfd)
                os.close(pidfd)

    def close(self) -> None:
        """Watch nothing any more."""
        os.write(self._wake_w, b"1")
        self._thread.join()
        for pidfd in list(self._calls):
            self.unwatch(pidfd)
        self._epoll.close()
        os.close(self._wake_r)
        os.close(self._wake_w)

    def _serve(self) -> None:
        while True:
            for fd, _ in self._epoll.poll():
                if fd == self._wake_r:
                    return
                with self._lock:
                    call = self._calls.get(fd)
                if call is not None:
                    call()
