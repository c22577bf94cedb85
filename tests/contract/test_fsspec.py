"""fsspec's own test suite on `fanout://`: open, pipe, put, get and copy, with every edge of its globs.

Each test runs in a directory of its own on one disk.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.tests import abstract

from fanout.fs import FanoutFileSystem


@pytest.fixture(scope="module")
def disk_fs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FanoutFileSystem]:
    place: Path = tmp_path_factory.mktemp("fsspec")
    fs = FanoutFileSystem(store=f"memory://{uuid.uuid4().hex}", cache_dir=place / "cache", skip_instance_cache=True)
    fs.mkdir("ws")
    yield fs
    fs.close()


class Fixtures(abstract.AbstractFixtures):
    @pytest.fixture
    def fs(self, disk_fs: FanoutFileSystem) -> FanoutFileSystem:
        return disk_fs

    @pytest.fixture
    def fs_path(self, fs: FanoutFileSystem) -> str:
        path = f"ws/{uuid.uuid4().hex}"
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
