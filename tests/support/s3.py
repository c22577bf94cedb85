"""boto3 clients of a server under test, and requests that boto3 would not send."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import boto3
import httpx
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import ClientError

from fanout.runtime import system
from fanout.server.keys import Keys, Right
from fanout.store.open import open_store
from tests.support.serving import Running

__all__ = ["code_of", "disk_id", "exec_on", "make_key", "new_bucket", "s3_client", "signed"]


def s3_client(server: Running, *, access_key: str = "", secret_key: str = "", **options: Any) -> Any:
    """Return a boto3 client; `options` go to botocore's Config."""
    return boto3.client(
        "s3",
        endpoint_url=server.s3_url,
        aws_access_key_id=access_key or server.access_key,
        aws_secret_access_key=secret_key or server.secret_key,
        region_name="us-east-1",
        config=Config(retries={"max_attempts": 1}, **options),
    )


def new_bucket(server: Running, name: str) -> Any:
    """Make a bucket and return boto3's handle of it."""
    client = s3_client(server)
    client.create_bucket(Bucket=name)
    return client


def code_of(error: ClientError) -> tuple[int, str]:
    """Return the status and code of an error."""
    return error.response["ResponseMetadata"]["HTTPStatusCode"], error.response["Error"]["Code"]


def signed(
    server: Running,
    method: str,
    path: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    *,
    payload: str | None = None,
    timestamp: str | None = None,
) -> httpx.Response:
    """Send one request signed by botocore's own signer, whatever its path, headers and payload hash."""
    url = server.s3_url + path
    request = AWSRequest(method=method, url=url, data=body, headers=dict(headers or {}))
    digest = payload or hashlib.sha256(body).hexdigest()
    signer = _Signer(Credentials(server.access_key, server.secret_key), "s3", "us-east-1")
    signer.digest, signer.at = digest, timestamp
    signer.add_auth(request)
    return httpx.request(method, url, content=body, headers=dict(request.headers.items()), timeout=60)


class _Signer(S3SigV4Auth):
    """botocore's signer, saying of the body and the time what it is told."""

    digest: str
    at: str | None

    def payload(self, request: AWSRequest) -> str:
        return self.digest

    def _modify_request_before_signing(self, request: AWSRequest) -> None:
        if self.at is not None:
            request.context["timestamp"] = self.at
        super()._modify_request_before_signing(request)


def make_key(server: Running, right: Right, disks: Sequence[str] | None = None) -> tuple[str, str, str]:
    """Make a key for some disks; returns its access key, its secret key and its token."""
    store = open_store(server.store)
    try:
        keys = Keys(store, system)
        made = keys.create(right=right, disks=disks)
        return made.record.id, keys.s3_secret(made.record.id), made.token
    finally:
        store.close()


def disk_id(server: Running, name: str) -> str:
    """Return a disk's id by its name."""
    found = httpx.get(f"{server.url}/api/disks?name={name}", headers={"Authorization": server.token}, timeout=60)
    return str(found.json()["data"][0]["id"])


def exec_on(server: Running, disk: str, command: str) -> dict[str, Any]:
    """Run a command on a disk through the REST API, which has to succeed."""
    answer = httpx.post(
        f"{server.url}/api/exec",
        headers={"Authorization": server.token},
        json={"disks": {"w": disk_id(server, disk)}, "command": f"cd /mnt/archil/w 2>/dev/null || cd /mnt; {command}"},
        timeout=120,
    )
    assert answer.status_code == 200, answer.text
    done: dict[str, Any] = answer.json()["data"]
    assert done["exitCode"] == 0, done
    return done
