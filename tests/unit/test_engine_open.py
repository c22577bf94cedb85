"""Which engine the settings mean, and that choosing one builds nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fanout.config import Settings
from fanout.engine import open as opening
from fanout.engine.qemu import accel, image, share
from fanout.errors import EngineUnavailable


@pytest.mark.parametrize(
    ("device", "guest", "virtiofsd", "kvm", "engine"),
    [
        (True, True, True, "kvm", "qemu"),
        (True, True, True, "tcg", "bubblewrap"),
        (True, True, False, "kvm", "bubblewrap"),
        (True, False, True, "kvm", "bubblewrap"),
        (False, True, True, "kvm", "bubblewrap"),
    ],
)
def test_auto_takes_vms_where_all_is_ready(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: bool, guest: bool, virtiofsd: bool, kvm: str, engine: str
) -> None:
    real: Callable[..., bool] = os.access

    def access(path: str, mode: int, **more: bool) -> bool:
        return device if path == "/dev/kvm" else real(path, mode, **more)

    def find_virtiofsd() -> str:
        if not virtiofsd:
            raise EngineUnavailable("no virtiofsd")
        return "/usr/lib/qemu/virtiofsd"

    def assemble(*args: object) -> None:
        raise AssertionError("choosing an engine must not build anything")

    monkeypatch.setattr(os, "access", access)
    monkeypatch.setattr(image, "find", lambda cache_dir: object() if guest else None)
    monkeypatch.setattr(image, "assemble", assemble)
    monkeypatch.setattr(share, "find_virtiofsd", find_virtiofsd)
    monkeypatch.setattr(accel, "choose", lambda cache_dir, found: kvm)
    chosen = opening.open_engine(Settings(cache_dir=tmp_path))
    try:
        assert chosen.name == engine
    finally:
        chosen.close()


@pytest.mark.parametrize("name", ["bubblewrap", "qemu"])
def test_a_named_engine_is_taken_whatever_works(tmp_path: Path, name: str) -> None:
    chosen = opening.open_engine(Settings(engine=name, cache_dir=tmp_path))
    try:
        assert chosen.name == name
    finally:
        chosen.close()
