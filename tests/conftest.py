"""Fixtures of all tests: stores and the servers behind them.

- `memory_store`, `local_store` (without fsync), `moto_store`, `s3_store`: one fresh store a test.
- `any_store`: the test runs once on each of them.
- `moto_endpoint`: a moto server, one a session. `s3_endpoint`: the real server of FANOUT_TEST_S3_ENDPOINT
  (credentials from the AWS variables; `tests/s3server up DIR PORT` starts one), else the test is skipped.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from fanout.store.base import Store
from fanout.store.local import LocalStore
from fanout.store.memory import MemoryStore
from tests.support.servers import moto_server

# A busy machine is not a failure; what failed can be run again from the printed blob.
settings.register_profile("fanout", deadline=None, print_blob=True)
settings.load_profile("fanout")

STORES = ("memory", "local", "moto", pytest.param("s3", marks=pytest.mark.s3))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the long tests too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--soak"):
        return
    for item in items:
        if item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.skip(reason="only with --soak"))


@pytest.fixture(scope="session", autouse=True)
def aws_environment() -> Iterator[None]:
    """Keep this machine's AWS settings out of the tests, unless a real server was asked for."""
    real = bool(os.environ.get("FANOUT_TEST_S3_ENDPOINT"))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("FANOUT_S3_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
            patch.delenv(name, raising=False)
        if not real:
            patch.delenv("AWS_PROFILE", raising=False)
            patch.delenv("AWS_SESSION_TOKEN", raising=False)
            patch.setenv("AWS_CONFIG_FILE", os.devnull)
            patch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
            patch.setenv("AWS_ACCESS_KEY_ID", "testing")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield


@pytest.fixture
def memory_store() -> Store:
    return MemoryStore()


@pytest.fixture
def local_store(tmp_path: Path) -> Iterator[Store]:
    store = LocalStore(tmp_path / "store", fsync=False)
    yield store
    store.close()


@pytest.fixture(scope="session")
def moto_endpoint(aws_environment: None) -> Iterator[str]:
    with moto_server() as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def s3_endpoint(aws_environment: None) -> str:
    endpoint = os.environ.get("FANOUT_TEST_S3_ENDPOINT")
    if not endpoint:
        pytest.skip("FANOUT_TEST_S3_ENDPOINT is not set; tests/s3server starts a real server")
    return endpoint


@pytest.fixture(scope="session")
def moto_bucket(moto_endpoint: str) -> str:
    return _make_bucket(moto_endpoint)


@pytest.fixture(scope="session")
def s3_bucket(s3_endpoint: str) -> Iterator[str]:
    bucket = _make_bucket(s3_endpoint)
    yield bucket
    client = _client(s3_endpoint)
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket):
        for item in page.get("Contents", []):
            client.delete_object(Bucket=bucket, Key=item["Key"])
    client.delete_bucket(Bucket=bucket)


@pytest.fixture
def moto_store(moto_endpoint: str, moto_bucket: str) -> Iterator[Store]:
    yield from _s3_store(moto_endpoint, moto_bucket)


@pytest.fixture
def s3_store(s3_endpoint: str, s3_bucket: str) -> Iterator[Store]:
    yield from _s3_store(s3_endpoint, s3_bucket)


@pytest.fixture(params=STORES)
def any_store(request: pytest.FixtureRequest) -> Store:
    store: Store = request.getfixturevalue(f"{request.param}_store")
    return store


def _s3_store(endpoint: str, bucket: str) -> Iterator[Store]:
    from fanout.store.s3 import S3Store

    store = S3Store(bucket, f"t/{uuid.uuid4().hex}", endpoint=endpoint)
    yield store
    store.close()


def _make_bucket(endpoint: str) -> str:
    bucket = f"fanout-test-{uuid.uuid4().hex[:16]}"
    _client(endpoint).create_bucket(Bucket=bucket)
    return bucket


def _client(endpoint: str) -> Any:
    import boto3

    return boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
