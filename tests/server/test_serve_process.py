"""The server as a process: what it says of itself, its limits, how it stops, and two of them on one bucket."""

from __future__ import annotations

import concurrent.futures
import json
import re
import signal
import socket
import time
import uuid
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.connections import alive
from tests.support.serving import Running, running_server


def raw(server: Running, data: bytes) -> bytes:
    """Send bytes as they are and return all that comes back until the server hangs up or is quiet."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        try:
            connection.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass
        answer = b""
        try:
            while part := connection.recv(65536):
                answer += part
        except (ConnectionResetError, TimeoutError):
            pass
        return answer


# -- what it says of itself ----------------------------------------------------------------------------------------


def test_alive_and_ready(server: Running) -> None:
    assert httpx.get(f"{server.url}/healthz").json() == {"status": "alive"}
    assert httpx.get(f"{server.url}/readyz").json() == {"status": "ready"}


def test_the_api_describes_itself(server: Running) -> None:
    described = httpx.get(f"{server.url}/openapi.json").json()
    assert "/api/disks/{disk}/exec" in described["paths"]
    page = httpx.get(f"{server.url}/docs")
    assert page.status_code == 200
    assert "/openapi.json" in page.text
    for path in re.findall(r'(?:src|href)="([^"]+)"', page.text):  # nothing of it is fetched from elsewhere
        assert path.startswith("/")
        assert httpx.get(f"{server.url}{path}").status_code == 200
    assert described["components"]["securitySchemes"]["APIKeyHeader"]["name"] == "Authorization"


def test_metrics_count_requests_execs_and_the_store(tmp_path: Path, disk_name: str) -> None:
    """On a server of its own: another test's exec may end, and be counted, late."""
    with running_server(tmp_path) as server:
        check_metrics(server, disk_name)


def check_metrics(server: Running, disk_name: str) -> None:
    def count(line: str) -> float:
        text = httpx.get(f"{server.url}/metrics").text
        return sum(float(each.rpartition(" ")[2]) for each in text.splitlines() if each.startswith(line))

    exec_line = 'fanout_http_requests_total{method="POST",route="/api/disks/{disk}/exec",status="200"}'
    names = (exec_line, 'fanout_execs_finished_total{status="completed"}', "fanout_exec_commit_seconds_count")
    before = [count(name) for name in names]
    store = count('fanout_store_requests_total{verb="create"}')
    server.call("POST", "/disks", {"name": disk_name})
    assert server.call("POST", f"/disks/{disk_name}/exec", {"command": "echo 1 > f"}).json()["data"]["exitCode"] == 0
    assert [count(name) - old for name, old in zip(names, before, strict=True)] == [1, 1, 1]
    assert count('fanout_store_requests_total{verb="create"}') > store
    text = httpx.get(f"{server.url}/metrics").text
    assert disk_name not in text
    assert server.token not in text


def test_logs_tell_requests_and_no_secrets(server: Running, disk_name: str) -> None:
    mine = f"test-{uuid.uuid4().hex}"
    headers = {"Authorization": server.token, "X-Request-Id": mine}
    httpx.post(f"{server.url}/api/disks", json={"name": disk_name}, headers=headers)
    command = {"command": "echo body-of-the-command"}
    url = f"{server.url}/api/disks/{disk_name}/exec?signature=hush"
    answer = httpx.post(url, json=command, headers=headers)
    assert answer.headers["x-request-id"] == mine
    other = httpx.get(f"{server.url}/healthz", headers={"X-Request-Id": "not sane"})
    assert other.headers["x-request-id"].startswith("rq-")
    (created, ran) = (line for line in server.lines() if line["request"] == mine)
    assert (created["method"], created["path"], created["status"]) == ("POST", "/api/disks", 201)
    assert ran["exec"] == answer.json()["data"]["execId"]
    assert ran["key"] == server.access_key
    assert ran["exit_code"] == 0
    text = server.log.read_text()
    for secret in (server.token, server.secret_key, server.token.rpartition("-")[2], "body-of-the-command", "hush"):
        assert secret not in text


# -- limits --------------------------------------------------------------------------------------------------------


def test_bodies_over_the_limit(server: Running) -> None:
    start = (
        f"POST /api/tokens HTTP/1.1\r\nHost: x\r\nAuthorization: {server.token}\r\nContent-Type: application/json\r\n"
    )
    announced = raw(server, start.encode() + b"Content-Length: 99999999\r\n\r\n")
    assert announced.startswith(b"HTTP/1.1 413 ")
    assert b'"code": "limit"' in announced
    chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    chunked = raw(server, start.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 18 + b"0\r\n\r\n")
    assert chunked.startswith(b"HTTP/1.1 413 ")


def test_nobody_has_a_body_read_without_a_key(server: Running) -> None:
    start = b"POST /api/tokens HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
    assert raw(server, start).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * 70_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * 500_000,
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X-A: b\r\n" * 10_000 + b"\r\n",
        b"GET /" + b"a" * 500_000,
    ],
    ids=["url", "header", "endless header", "many headers", "endless url"],
)
def test_heads_over_the_limit(server: Running, head: bytes) -> None:
    assert raw(server, head).startswith(b"HTTP/1.1 431 ")
    assert httpx.get(f"{server.url}/healthz").status_code == 200


def test_no_http_at_all(server: Running) -> None:
    assert raw(server, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03").startswith(b"HTTP/1.1 400 ")


def test_more_execs_than_it_takes(tmp_path: Path) -> None:
    with running_server(tmp_path, "--max-in-flight", "1", "--max-queued", "1") as server:
        server.call("POST", "/disks", {"name": "ws"})
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            calls = [
                pool.submit(server.call, "POST", "/disks/ws/exec", {"command": "sleep 1.5; echo ok"}) for _ in range(4)
            ]
            answers = [call.result() for call in calls]
        by_status: dict[int, list[httpx.Response]] = {}
        for answer in answers:
            by_status.setdefault(answer.status_code, []).append(answer)
        assert sorted(by_status) == [200, 429]
        assert len(by_status[200]) == 2
        for refused in by_status[429]:
            assert refused.json()["code"] == "no_capacity"
            assert int(refused.headers["retry-after"]) >= 1


# -- callers that leave --------------------------------------------------------------------------------------------


def test_a_caller_that_hangs_up_takes_its_exec_along(server: Running, disk_name: str) -> None:
    server.call("POST", "/disks", {"name": disk_name})
    body = json.dumps({"command": f"touch f; sleep 300; echo {disk_name}"})
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /api/disks/{disk_name}/exec HTTP/1.1\r\nHost: x\r\nAuthorization: {server.token}\r\n"
        connection.sendall(
            f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        wait_for(lambda: alive(disk_name))
    wait_for(lambda: not alive(disk_name))
    assert server.call("POST", f"/disks/{disk_name}/exec", {"command": "ls f"}).json()["data"]["exitCode"] == 2
    told = [line for line in server.lines() if line["path"] == f"/api/disks/{disk_name}/exec"]
    assert told[0]["status"] == 499


def wait_for(true: Any, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# -- the end -------------------------------------------------------------------------------------------------------


def test_execs_finish_before_a_shutdown(tmp_path: Path) -> None:
    answers: list[httpx.Response] = []
    with running_server(tmp_path) as server:
        server.call("POST", "/disks", {"name": "ws"})
        body = {"command": "echo 1 > f; sleep 2; echo done"}
        with server.meanwhile(lambda: answers.append(server.call("POST", "/disks/ws/exec", body))):
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: httpx.get(f"{server.url}/readyz").status_code == 503)
            assert httpx.get(f"{server.url}/readyz").json() == {"status": "draining"}
            assert httpx.get(f"{server.url}/healthz").status_code == 200
            refused = server.call("POST", "/disks/ws/exec", {"command": "true"})
            assert (refused.status_code, refused.json()["code"]) == (503, "runtime_retryable")
            assert "retry-after" in refused.headers
        assert answers[0].json()["data"]["stdout"] == "done\n"
        assert server.process.wait(30) == 0
    with running_server(tmp_path, store=server.store, token=server.token) as again:
        assert again.call("POST", "/disks/ws/exec", {"command": "cat f"}).json()["data"]["stdout"] == "1\n"


def test_an_upload_ends_before_a_shutdown(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        server.call("POST", "/disks", {"name": "ws"})
        host, port = server.s3_url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            head = f"PUT /ws/f HTTP/1.1\r\nHost: x\r\nAuthorization: {server.token}\r\nContent-Length: 10\r\n\r\n"
            connection.sendall(head.encode() + b"12345")
            time.sleep(0.2)
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: not listens(host, int(port)))
            connection.sendall(b"67890")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        assert server.process.wait(30) == 0
    with running_server(tmp_path, store=server.store, token=server.token) as again:
        assert again.call("POST", "/disks/ws/exec", {"command": "cat f"}).json()["data"]["stdout"] == "1234567890"


def listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


def test_execs_that_take_too_long_are_told(tmp_path: Path) -> None:
    answers: list[httpx.Response] = []
    marker = uuid.uuid4().hex
    with running_server(tmp_path, "--grace", "0.2") as server:
        server.call("POST", "/disks", {"name": "ws"})
        body = {"command": f"echo 1 > f; sleep 300; echo {marker}"}
        with server.meanwhile(lambda: answers.append(server.call("POST", "/disks/ws/exec", body))):
            assert server.stop() == 0
        assert (answers[0].status_code, answers[0].json()["code"]) == (503, "unavailable")
        assert "nothing of it committed" in answers[0].json()["error"]
        assert not alive(marker)
    with running_server(tmp_path, store=server.store, token=server.token) as again:
        assert again.call("POST", "/disks/ws/exec", {"command": "ls f"}).json()["data"]["exitCode"] == 2


def test_the_second_signal_stops_at_once(tmp_path: Path) -> None:
    marker = uuid.uuid4().hex
    failures: list[Exception] = []

    def call() -> None:
        try:
            server.call("POST", "/disks/ws/exec", {"command": f"touch f; sleep 300; echo {marker}"})
        except httpx.HTTPError as error:
            failures.append(error)

    with running_server(tmp_path, "--grace", "600") as server:
        server.call("POST", "/disks", {"name": "ws"})
        with server.meanwhile(call):
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: httpx.get(f"{server.url}/readyz").status_code == 503)
            server.stop(signal.SIGINT)
        assert not alive(marker)
    with running_server(tmp_path, store=server.store, token=server.token) as again:
        assert again.call("POST", "/disks/ws/exec", {"command": "ls f"}).json()["data"]["exitCode"] == 2


# -- two on one bucket ---------------------------------------------------------------------------------------------


def test_two_servers_on_one_bucket_are_both_right(server: Running, tmp_path: Path, disk_name: str) -> None:
    with running_server(tmp_path, store=server.store, token=server.token) as other:
        assert other.call("POST", "/disks", {"name": disk_name}).status_code == 201
        assert server.call("GET", f"/disks/{disk_name}").json()["data"]["name"] == disk_name
        both = (server, other)
        mount = {"disk": disk_name, "conditional": True}

        def run(number: int) -> httpx.Response:
            body = {"disks": {"w": mount}, "command": f"echo {number} > w/{number}"}
            return both[number % 2].call("POST", "/exec", body)

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert {answer.status_code for answer in pool.map(run, range(16))} == {200}
        for each in both:
            told = each.call("POST", f"/disks/{disk_name}/exec", {"command": "cat [0-9]* | sort -n | tr '\\n' ' '"})
            assert told.json()["data"]["stdout"] == "".join(f"{number} " for number in range(16))
        told = [
            each.client.post(
                f"{each.url}/api/disks/{disk_name}/exec",
                json={"command": "echo x >> once; cat once"},
                headers={"Authorization": server.token, "Idempotency-Key": disk_name},
            ).json()["data"]
            for each in (server, other, server)
        ]
        assert [each["stdout"] for each in told] == ["x\n"] * 3
        assert len({each["execId"] for each in told}) == 1
        made = server.call("POST", "/tokens", {"name": "both"}).json()["data"]
        assert other.call("GET", "/disks", token=made["token"]).status_code == 200
        assert other.call("DELETE", f"/tokens/{made['id']}").status_code == 200
        wait_for(lambda: server.call("GET", "/disks", token=made["token"]).status_code == 401, 10)
        assert other.call("DELETE", f"/disks/{disk_name}").status_code == 200
        assert server.call("GET", f"/disks/{disk_name}").status_code == 404
