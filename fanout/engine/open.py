"""Choosing an engine from settings. Owns the names of engines; each is made in its own module."""

from __future__ import annotations

import os

from fanout.config import Settings
from fanout.engine.base import Engine
from fanout.errors import EngineUnavailable

__all__ = ["open_engine"]


def open_engine(settings: Settings) -> Engine:
    """Return the engine the settings name; `auto` takes qemu where VMs run with KVM, else bubblewrap.

    Its `name` says which. Whether it works shows in `Engine.probe`. `auto` fetches and builds nothing: where no guest
    was made ready (by `fanout doctor --fix`, or by an exec of engine `qemu`) it is bubblewrap.
    """
    if settings.engine == "bubblewrap":
        return _bubblewrap(settings)
    if settings.engine == "qemu":
        return _qemu(settings)
    return _qemu(settings) if _has_kvm(settings) else _bubblewrap(settings)


def _bubblewrap(settings: Settings) -> Engine:
    from fanout.engine.bubblewrap import BubblewrapEngine

    return BubblewrapEngine(
        root=settings.root_dir, host_paths=_host_paths(settings), network_deny=settings.network_deny
    )


def _qemu(settings: Settings) -> Engine:
    from fanout.engine.qemu.engine import QemuEngine

    return QemuEngine(
        cache_dir=settings.cache_dir,
        root=settings.root_dir,
        host_paths=_host_paths(settings),
        network_deny=settings.network_deny,
        memory_bytes=settings.qemu_memory_mib << 20,
        pool=settings.qemu_pool,
    )


def _has_kvm(settings: Settings) -> bool:
    """Say whether VMs run with KVM here, and all that the qemu engine needs is there already."""
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return False
    from fanout.engine.qemu import accel, image
    from fanout.engine.qemu.share import find_virtiofsd

    found = image.find(settings.cache_dir)
    if found is None:
        return False
    try:
        find_virtiofsd()
        return accel.choose(settings.cache_dir, found) == "kvm"
    except EngineUnavailable:
        return False


def _host_paths(settings: Settings) -> list[tuple[str, str]]:
    return [_host_path(text) for text in settings.host_paths]


def _host_path(text: str) -> tuple[str, str]:
    source, _, target = text.partition(":")
    return source, target or source
