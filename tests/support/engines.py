"""The engines of a test run, by name: each way of isolating a command that this version has.

`bubblewrap-kernel` is the one for root, `bubblewrap-bwrap` mounts as an unprivileged user's does, `qemu` runs without
hardware acceleration, which is there on every host.
"""

from __future__ import annotations

from typing import Any

from fanout.engine.base import Engine

__all__ = ["ENGINES", "make_engine"]

ENGINES = ("bubblewrap-kernel", "bubblewrap-bwrap", "qemu")


def make_engine(name: str, **settings: Any) -> Engine:
    """Make one; whether it works here its `probe` tells."""
    if name == "qemu":
        from fanout.engine.qemu.engine import QemuEngine
        from tests.support.guests import qemu_cache

        return QemuEngine(cache_dir=qemu_cache(), memory_bytes=256 << 20, acceleration="tcg", pool=1, **settings)
    from fanout.engine.bubblewrap import BubblewrapEngine

    return BubblewrapEngine(overlay="kernel" if name == "bubblewrap-kernel" else "bwrap", **settings)
