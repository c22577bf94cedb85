"""QEMU's monitor: commands to a running QEMU, over a socket that only this process holds.

Owns the exchange of QMP messages. Knows nothing of what is asked for. Blocking.
"""

from __future__ import annotations

import json
import socket
from typing import Any

from fanout.errors import EngineUnavailable
from fanout.runtime import Runtime

__all__ = ["Monitor"]

#: How long QEMU may take to answer, and how often a state is looked at that it takes a moment to reach.
ANSWER_S = 30.0
AGAIN_S = 0.002


class Monitor:
    """One QEMU's monitor. `EngineUnavailable` where it refuses, says nothing, or is gone. Use from one thread."""

    def __init__(self, connection: socket.socket, runtime: Runtime) -> None:
        """Greet it; `connection` is this object's to close."""
        self._runtime = runtime
        self._connection = connection
        connection.settimeout(ANSWER_S)
        self._lines = connection.makefile("rb")
        self._read()
        self.ask("qmp_capabilities")

    def ask(self, command: str, *fds: int, **arguments: Any) -> Any:
        """Return what a command returns. Descriptors go with it, for `getfd`."""
        try:
            socket.send_fds(self._connection, [json.dumps({"execute": command, "arguments": arguments}).encode()], fds)
        except OSError as error:
            raise EngineUnavailable(f"QEMU's monitor: {error}") from error
        while True:
            answer = self._read()
            if "return" in answer:
                return answer["return"]
            if "error" in answer:
                raise EngineUnavailable(f"QEMU refused {command}: {answer['error'].get('desc')}")

    def await_status(self, command: str, wanted: str, passing: tuple[str, ...]) -> None:
        """Ask until the state is the one that is wanted; `passing` are those on the way to it."""
        until_s = self._runtime.monotonic() + ANSWER_S
        while (status := self.ask(command).get("status")) != wanted:
            if status not in passing and status is not None:
                raise EngineUnavailable(f"QEMU is {status!r}, not {wanted!r} ({command})")
            if self._runtime.monotonic() > until_s:
                raise EngineUnavailable(f"QEMU is not {wanted!r} after {ANSWER_S:.0f} s ({command})")
            self._runtime.sleep(AGAIN_S)

    def close(self) -> None:
        """Ask nothing more."""
        self._lines.close()
        self._connection.close()

    def _read(self) -> dict[str, Any]:
        try:
            line = self._lines.readline()
            answer = json.loads(line) if line else None
        except (OSError, ValueError) as error:
            raise EngineUnavailable(f"QEMU's monitor: {error}") from error
        if not isinstance(answer, dict):
            raise EngineUnavailable("QEMU closed its monitor")
        return answer
