"""Store URLs, and what opening one needs installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fanout.errors import Denied, Invalid, Unavailable
from fanout.store.local import LocalStore
from fanout.store.memory import MemoryStore
from fanout.store.open import open_store


def test_local_urls(tmp_path: Path) -> None:
    for url in (f"file://{tmp_path}/a%20b", f"{tmp_path}/a b"):
        store = open_store(url)
        assert isinstance(store, LocalStore)
        assert store.root == f"{tmp_path}/a b"


def test_memory_urls() -> None:
    shared = open_store("memory://open-test")
    assert isinstance(shared, MemoryStore)
    assert open_store("memory://open-test") is shared
    assert open_store("memory://") is not open_store("memory://")
    assert shared.url == "memory://open-test"


@pytest.mark.parametrize(
    "url",
    ["", "relative/dir", "file://host/dir", "file://", "http://x", "gs://bucket", "memory://a/b", "file:///a%00b",
     "s3://", "s3:///x", "s3://b", "s3://UP/../x", "s3://bucket/a//b", "s3://bucket/ä"],
)  # fmt: skip
def test_bad_urls_are_refused(url: str) -> None:
    with pytest.raises(Invalid, match=r"(store|bucket|prefix) is .*: .+"):
        open_store(url)


@pytest.mark.parametrize("endpoint", ["localhost:9000", "ftp://h", "http://", "http://h/?x=1"])
def test_bad_endpoints_are_refused(endpoint: str) -> None:
    with pytest.raises(Invalid, match="s3_endpoint"):
        open_store("s3://bucket", s3_endpoint=endpoint)


def test_an_endpoint_from_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FANOUT_S3_ENDPOINT", "nonsense")
    with pytest.raises(Invalid, match="FANOUT_S3_ENDPOINT is 'nonsense'"):
        open_store("s3://bucket")


def test_secrets_in_a_url_are_not_repeated() -> None:
    for url, endpoint in (("s3://AKID:hunter2@bucket/p", None), ("s3://bucket", "http://AKID:hunter2@h")):
        with pytest.raises(Invalid) as caught:
            open_store(url, s3_endpoint=endpoint)
        assert "hunter2" not in str(caught.value)
        assert "AKID" not in str(caught.value)


def test_an_endpoint_that_cannot_be_reached_is_named() -> None:
    with pytest.raises(Unavailable, match=r"s3://bucket/p: .*http://127\.0\.0\.1:9$"):
        open_store("s3://bucket/p", s3_endpoint="http://127.0.0.1:9")


def test_a_bucket_that_is_not_there_is_named(moto_endpoint: str) -> None:
    with pytest.raises(Invalid, match="no bucket fanout-no-such at http"):
        open_store("s3://fanout-no-such/p", s3_endpoint=moto_endpoint)


def test_the_endpoint_comes_from_the_environment(
    moto_endpoint: str, moto_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FANOUT_S3_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        with monkeypatch.context() as patch:
            patch.setenv(name, moto_endpoint)
            store = open_store(f"s3://{moto_bucket}/env")
            store.put("k", name.encode())
            assert store.get("k") == name.encode()


def test_no_credentials_is_denied(moto_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    with pytest.raises(Denied, match="AWS_ACCESS_KEY_ID"):
        open_store("s3://bucket", s3_endpoint=moto_endpoint)


def test_boto3_is_imported_only_for_s3_and_its_absence_is_explained(tmp_path: Path) -> None:
    code = """
import sys
import fanout
from fanout.store.open import open_store
open_store(sys.argv[1]); open_store("memory://x")
assert not {"boto3", "botocore"} & set(sys.modules), "imported too early"
sys.modules["boto3"] = None
try:
    open_store("s3://bucket")
except fanout.errors.Invalid as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert "pip install 'fanout[s3]'" in done.stdout
