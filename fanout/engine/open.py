"""Choosing an engine from settings. Owns the names of engines; each is made in its own module."""

from __future__ import annotations

from fanout.config import Settings
from fanout.engine.base import Engine
from fanout.errors import EngineUnavailable

__all__ = ["open_engine"]


def open_engine(settings: Settings) -> Engine:
    """Return the engine the settings name; `auto` takes the strongest that this version has."""
    if settings.engine == "qemu":
        raise EngineUnavailable("engine is 'qemu': it is not part of this version; use 'bubblewrap' or 'auto'")
    from fanout.engine.bubblewrap import BubblewrapEngine

    return BubblewrapEngine(root=settings.root_dir, host_paths=[_host_path(text) for text in settings.host_paths])


def _host_path(text: str) -> tuple[str, str]:
    source, _, target = text.partition(":")
    return source, target or source
