"""Fixtures of the contract suite: `remote_server`, one real server process a session, with a store of its own.

Its token is an administrator's called "tester", as embedded connections of the suite are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from fanout.runtime import system
from fanout.server.keys import Keys
from fanout.store.open import open_store
from tests.support.serving import Running, running_server


@pytest.fixture(scope="session")
def remote_server(tmp_path_factory: pytest.TempPathFactory, aws_environment: None) -> Iterator[Running]:
    with running_server(tmp_path_factory.mktemp("remote"), "--max-in-flight", "16") as running:
        store = open_store(running.store)
        tester = Keys(store, system).create(nickname="tester", right="admin")
        store.close()
        yield dataclasses.replace(running, token=tester.token)
