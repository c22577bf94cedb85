"""The benchmarks of the server: the load generator of `s3`, and that the smallest forms run."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import anyio
import boto3
import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from benchmarks.__main__ import run_one
from benchmarks.s3 import loaded
from benchmarks.s3_load import Load, Signer, run


@pytest.fixture
def load(moto_endpoint: str, moto_bucket: str) -> Load:
    return Load(moto_endpoint, moto_bucket, "testing", "testing")


@pytest.mark.parametrize("query", [{}, {"list-type": "2", "prefix": "a b/", "continuation-token": "x+/="}])
def test_a_signature_is_what_botocore_makes_of_the_request(query: dict[str, str]) -> None:
    load = Load("http://127.0.0.1:9000", "bucket", "AKIA", "secret")
    body = b"data" if not query else b""
    method, key = ("GET", "") if query else ("PUT", "a b/ü")
    lines = Signer(load).head(method, key, query, body).decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines[1:] if line)
    target = lines[0].split()[1]
    request = AWSRequest(method, f"{load.endpoint}{target}", data=body)
    request.headers["x-amz-content-sha256"] = headers["x-amz-content-sha256"]
    request.headers["host"] = headers["host"]
    request.context["timestamp"] = headers["x-amz-date"]
    request.headers["x-amz-date"] = headers["x-amz-date"]
    auth = SigV4Auth(Credentials("AKIA", "secret"), "s3", "us-east-1")
    text = auth.string_to_sign(request, _canonical(method, target, headers))
    assert headers["authorization"].endswith(f"Signature={auth.signature(text, request)}")


def _canonical(method: str, target: str, headers: dict[str, str]) -> str:
    path, _, query = target.partition("?")
    names = ["host", "x-amz-content-sha256", "x-amz-date"]
    lines = "".join(f"{name}:{headers[name]}\n" for name in names)
    return "\n".join([method, path, query, lines, ";".join(names), headers["x-amz-content-sha256"]])


def test_clients_put_get_and_list(load: Load, moto_endpoint: str) -> None:
    put = run(replace(load, what="put", prefix="p/", size=3000, keys=6, clients=2, calls=3))
    assert len(put.calls_ms) == 6
    assert put.refused == []
    client = boto3.client("s3", endpoint_url=moto_endpoint, region_name="us-east-1")
    stored = client.list_objects_v2(Bucket=load.bucket, Prefix="p/")["Contents"]
    assert [(item["Key"], item["Size"]) for item in stored] == [(f"p/{n:06d}", 3000) for n in range(6)]
    got = loaded(replace(load, what="get", prefix="p/", size=3000, keys=6, clients=2, calls=5))
    assert len(got.calls_ms) == 10
    assert got.wall_ms >= max(got.calls_ms)
    assert run(replace(load, prefix="p/", clients=2, calls=2)).listed == 6


def test_a_listing_goes_on_to_its_last_page(load: Load) -> None:
    run(replace(load, what="put", prefix="many/", keys=1003, clients=17, calls=59))
    assert run(replace(load, prefix="many/")).listed == 1003


def test_refused_calls_are_counted_and_wrong_answers_are_errors(load: Load) -> None:
    found = run(replace(load, what="get", prefix="gone/", size=1, clients=2, calls=2))
    assert found.calls_ms == []
    assert len(found.refused) == 4
    assert "404" in found.refused[0]
    run(replace(load, what="put", prefix="short/", size=5))
    with pytest.raises(RuntimeError, match="5 bytes came instead of 6"):
        run(replace(load, what="get", prefix="short/", size=6))
    with pytest.raises(OSError, match="refused"):
        run(replace(load, endpoint="http://127.0.0.1:9"))
    with pytest.raises(RuntimeError, match="refused"):
        loaded(replace(load, endpoint="http://127.0.0.1:9"))


def test_chunked_answers_and_connections_that_are_closed(load: Load) -> None:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_response(200)
            if self.path.endswith("0"):
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for part in (b"ab", b"c" * 70_000, b""):
                    self.wfile.write(b"%x;extension=1\r\n%s\r\n" % (len(part), part))
            else:
                self.send_header("Content-Length", "70002")
                self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.write(b"d" * 70_002)
                self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        endpoint = f"http://127.0.0.1:{server.server_port}"
        found = run(replace(load, endpoint=endpoint, what="get", prefix="k", size=70_002, keys=2, calls=4))
        assert (len(found.calls_ms), found.refused) == (4, [])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_the_smallest_form_of_remote_exec_runs(tmp_path: Path) -> None:
    report = anyio.run(run_one, "remote_exec", "smallest", tmp_path)
    assert {target.limit for target in report.targets} == {5.0, None}
    assert any(row.label.startswith("2 at once: remote") for row in report.rows)
    assert os.listdir(tmp_path) == []


@pytest.mark.soak
def test_the_smallest_form_of_s3_runs(tmp_path: Path) -> None:
    report = anyio.run(run_one, "s3", "smallest", tmp_path)
    assert any(target.label.endswith("fanout / moto") for target in report.targets)
    assert any(target.limit == 400.0 for target in report.targets)
    assert os.listdir(tmp_path) == []
