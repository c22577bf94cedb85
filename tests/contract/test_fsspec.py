"""fsspec's own test suite on `fanout://`, embedded and remote: open, pipe, put, get, copy, every edge of its globs.

Each test runs in a directory of its own on one disk. Over HTTP the edges of globs, a hundred tests of many calls each,
are for --soak.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from fsspec.tests import abstract

from fanout.fs import FanoutFileSystem


@pytest.fixture(scope="module", params=["embedded", "remote"])
def disk_fs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FanoutFileSystem]:
    if request.param == "remote":
        server = request.getfixturevalue("remote_server")
        options = {"url": server.url, "api_key": server.token}
    else:
        options = {"store": f"memory://{uuid.uuid4().hex}", "cache_dir": tmp_path_factory.mktemp("fsspec") / "cache"}
    fs = FanoutFileSystem(**options, skip_instance_cache=True)
    yield fs
    fs.close()


@pytest.fixture(scope="module")
def disk(disk_fs: FanoutFileSystem) -> str:
    name = f"fs-{uuid.uuid4().hex[:12]}"
    disk_fs.mkdir(name)
    return name


class Fixtures(abstract.AbstractFixtures):
    @pytest.fixture
    def fs(self, request: pytest.FixtureRequest, disk_fs: FanoutFileSystem) -> FanoutFileSystem:
        remote = "remote" in request.node.callspec.id
        if remote and "edge_cases" in request.node.name and not request.config.getoption("--soak"):
            pytest.skip("only with --soak")
        return disk_fs

    @pytest.fixture
    def fs_path(self, fs: FanoutFileSystem, disk: str) -> str:
        path = f"{disk}/{uuid.uuid4().hex}"
        fs.mkdir(path)
        return path

    @pytest.fixture
    def fs_join(self) -> Any:
        return lambda *parts: "/".join(parts)


class TestOpen(abstract.AbstractOpenTests, Fixtures):
    pass


class TestPipe(abstract.AbstractPipeTests, Fixtures):
    pass


class TestCopy(abstract.AbstractCopyTests, Fixtures):
    pass


class TestGet(abstract.AbstractGetTests, Fixtures):
    pass


class TestPut(abstract.AbstractPutTests, Fixtures):
    pass
