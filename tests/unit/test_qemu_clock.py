"""The rate of the time stamp counter, which a guest is told."""

from __future__ import annotations

import platform

import pytest

from fanout.engine.qemu import clock
from fanout.errors import EngineUnavailable


@pytest.mark.skipif(platform.machine() != "x86_64", reason="there is no such counter here")
def test_two_measurements_agree() -> None:
    first, second = clock.tsc_khz.__wrapped__(), clock.tsc_khz.__wrapped__()
    assert 100_000 < first < 20_000_000
    assert abs(first - second) < first / 1000


def test_other_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(EngineUnavailable, match="this is aarch64"):
        clock.tsc_khz.__wrapped__()
