"""The only home of the clock, randomness and ids.

Everything else receives a `Runtime`, so that a failure replays from a printed seed. Lint bans the originals
(`time.time`, `random`, `uuid`, `os.urandom`) everywhere else.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable

__all__ = ["Runtime", "seeded", "system"]


def _uptime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Runtime:
    """A clock, a source of randomness and an id factory, injected together.

    `now_ns` is wall-clock nanoseconds since the epoch, `monotonic` seconds on a steady clock, `uptime` seconds on one
    that also goes on while the machine sleeps. `salt` gives random bytes that decide no more than an object's name.
    """

    def __init__(
        self,
        *,
        now_ns: Callable[[], int] = time.time_ns,
        monotonic: Callable[[], float] = time.monotonic,
        uptime: Callable[[], float] = _uptime,
        sleep: Callable[[float], None] = time.sleep,
        token_bytes: Callable[[int], bytes] = os.urandom,
        salt: Callable[[], bytes] = lambda: os.urandom(8),
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self.now_ns = now_ns
        self.monotonic = monotonic
        self.uptime = uptime
        self.sleep = sleep
        self.token_bytes = token_bytes
        self.salt = salt
        self.uniform = uniform

    def hex_id(self, digits: int = 32) -> str:
        """Return a fresh random id of `digits` lowercase hex digits."""
        return self.token_bytes((digits + 1) // 2).hex()[:digits]


system = Runtime()


def seeded(seed: int) -> Runtime:
    """Return a runtime whose ids and jitter depend on `seed` alone (the clock stays real)."""
    source, salts = random.Random(seed), random.Random(seed)
    return Runtime(token_bytes=source.randbytes, salt=lambda: salts.randbytes(8), uniform=source.uniform)
