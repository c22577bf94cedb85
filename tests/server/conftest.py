"""Fixtures of the server's tests: `server`, one real server process a session; tests use disks of their own names."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.support.serving import Running, running_server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, aws_environment: None) -> Iterator[Running]:
    with running_server(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def disk_name() -> str:
    """A name that no other test uses."""
    return f"t-{uuid.uuid4().hex[:12]}"
