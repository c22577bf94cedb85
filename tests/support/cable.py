"""A cable between a client and a server that can be cut: bytes pass, are counted, and stop when told to."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

__all__ = ["Cable", "cable_to"]


class Cable:
    """Passes TCP connections on to `inner`, a URL that may be changed; safe for threads.

    `up` and `down` count bytes to and from the server. `cuts_up` and `cuts_down` are counts at which the connection
    that reaches them is cut. `lose`: how many answers are thrown away, the connection cut instead; `lost` says how many
    were, and `then` is called before each cut. `idle_s`: after that long without a byte from the server a connection is
    cut, as proxies do.
    """

    def __init__(self, inner: str) -> None:
        self.inner = inner
        self.up = self.down = 0
        self.cuts_up: list[int] = []
        self.cuts_down: list[int] = []
        self.lose = self.lost = 0
        self.then: Callable[[], object] = lambda: None
        self.connections = 0
        self.idle_s: float | None = None
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()

    def cut(self) -> None:
        """Cut all connections there are."""
        with self._lock:
            ends = list(self._open)
        for end in ends:
            _hang_up(end)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        at = urlsplit(self.inner)
        assert at.hostname is not None
        try:
            far = socket.create_connection((at.hostname, at.port or 80))
        except OSError:
            near.close()
            return
        with self._lock:
            self.connections += 1
            self._open |= {near, far}
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(target=self._pump, args=(far, near, False), daemon=True)
        back.start()
        self._pump(near, far, True)
        back.join()
        with self._lock:
            self._open -= {near, far}
        near.close()
        far.close()

    def _pump(self, source: socket.socket, target: socket.socket, up: bool) -> None:
        if not up:
            source.settimeout(self.idle_s)
        try:
            while data := source.recv(65536):
                if not self._allowed(len(data), up):
                    break
                target.sendall(data)
        except OSError:  # TimeoutError is one
            pass
        _hang_up(source)
        _hang_up(target)

    def _allowed(self, size: int, up: bool) -> bool:
        """Count some bytes; returns whether they go on."""
        with self._lock:
            if not up and self.lose:
                self.lose -= 1
                self.lost += 1
                self.then()
                return False
            before = self.up if up else self.down
            if up:
                self.up += size
            else:
                self.down += size
            cuts = self.cuts_up if up else self.cuts_down
            if cuts and before + size > cuts[0]:
                cuts.pop(0)
                return False
            return True


def _hang_up(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


@contextmanager
def cable_to(url: str) -> Iterator[Cable]:
    cable = Cable(url)
    try:
        yield cable
    finally:
        cable.close()
