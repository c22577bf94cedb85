"""The server as a process: it starts in one line, says where it is, and stops when told."""

from __future__ import annotations

import httpx

from tests.support.serving import Running


def test_it_is_alive(server: Running) -> None:
    assert httpx.get(f"{server.url}/healthz").json() == {"status": "alive"}


def test_no_api_without_a_key(server: Running) -> None:
    answer = httpx.get(f"{server.url}/api/disks")
    assert answer.status_code == 401
    assert answer.json()["success"] is False
