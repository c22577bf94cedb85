"""A real S3 server for benchmarks: the one that FANOUT_TEST_S3_ENDPOINT names, or a throwaway one on loopback.

Owns its life and its buckets. Raises `Skip` where there is none and none can be started.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import Skip

__all__ = ["bucket", "server"]

_SCRIPT = Path(__file__).resolve().parent.parent / "tests" / "s3server"
_START_S = 180


@contextmanager
def server(place: Path) -> Iterator[str]:
    """Yield an endpoint; credentials are in the environment meanwhile."""
    given = os.environ.get("FANOUT_TEST_S3_ENDPOINT")
    if given:
        yield given
        return
    directory = place / "s3server"
    keys = {"AWS_ACCESS_KEY_ID": "testkey", "AWS_SECRET_ACCESS_KEY": "testsecret", "AWS_DEFAULT_REGION": "us-east-1"}
    before = {key: os.environ.get(key) for key in keys}
    port = _free_port()
    done = subprocess.run(
        ["bash", str(_SCRIPT), "up", str(directory), str(port)],
        capture_output=True, text=True, timeout=_START_S, check=False,
    )  # fmt: skip
    try:
        if done.returncode != 0:
            last = (done.stderr.strip() or "no reason given").splitlines()[-1]
            raise Skip(f"no S3 server: tests/s3server says {last!r}; FANOUT_TEST_S3_ENDPOINT may name one")
        os.environ.update(keys)
        yield f"http://127.0.0.1:{port}"
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
        subprocess.run(["bash", str(_SCRIPT), "down", str(directory)], capture_output=True, check=False)


@contextmanager
def bucket(endpoint: str, name: str) -> Iterator[str]:
    """Make a bucket, yield its name, and remove it with all it holds."""
    try:
        import boto3
    except ImportError as error:
        raise Skip("boto3 is not installed (pip install 'fanout[s3]')") from error
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    client.create_bucket(Bucket=name)
    try:
        yield name
    finally:
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=name):
            keys: Any = [{"Key": item["Key"]} for item in page.get("Contents", [])]
            if keys:
                client.delete_objects(Bucket=name, Delete={"Objects": keys})
        client.delete_bucket(Bucket=name)


def _free_port() -> int:
    """Find a port whose two successors are free too: the server needs three."""
    for base in range(17480, 19000, 10):
        try:
            for port in range(base, base + 3):
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return base
    raise Skip("no free ports for an S3 server")
