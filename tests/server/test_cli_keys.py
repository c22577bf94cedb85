"""`fanout keys`, and the options of `fanout serve`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.serving import Running, running_server


def fanout(store: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fanout", "--store", store, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def status(server: Running, token: str, path: str = "/api/disks") -> int:
    return httpx.get(f"{server.url}{path}", headers={"Authorization": token}).status_code


def test_a_key_from_making_to_removal(server: Running, disk_name: str) -> None:
    assert fanout(server.store, "disk", "create", disk_name).returncode == 0
    made = fanout(server.store, "keys", "create", "--disk", disk_name, "--read-only", "--nickname", "a b", "--json")
    told = json.loads(made.stdout)
    assert told["s3_access_key"] == told["id"]
    assert told["token"].startswith(f"key-{told['id']}-")
    assert status(server, told["token"], f"/api/disks/{disk_name}") == 200
    headers = {"Authorization": told["token"]}
    body = {"command": "touch x || echo no"}
    answer = httpx.post(f"{server.url}/api/disks/{disk_name}/exec", json=body, headers=headers).json()
    assert answer["data"]["stdout"] == "no\n"
    listed = {row["id"]: row for row in json.loads(fanout(server.store, "keys", "ls", "--json").stdout)}
    row = listed[told["id"]]
    assert (row["right"], row["disks"], row["nickname"], row["expired"]) == ("read", [disk_name], "a b", False)
    assert told["id"] in fanout(server.store, "keys", "ls").stdout
    assert fanout(server.store, "keys", "rm", told["id"]).returncode == 0
    again = fanout(server.store, "keys", "rm", told["id"])
    assert (again.returncode, again.stderr) == (66, f"fanout: there is no key '{told['id']}'\n")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--disk", "missing"], 66, "missing"),
        (["--admin", "--read-only"], 64, "--admin"),
        (["--admin", "--disk", "x"], 64, "--admin"),
        (["--expires", "tomorrow"], 64, "30d"),
        (["--expires", "0s"], 64, "30d"),
        (["--nickname", "a\nb"], 64, "nickname"),
    ],
)
def test_bad_input(tmp_path: Path, arguments: list[str], code: int, says: str) -> None:
    failed = fanout(f"file://{tmp_path}", "keys", "create", *arguments)
    assert failed.returncode == code
    assert says in failed.stderr
    assert failed.stderr.count("\n") == 1
    assert not failed.stdout


def test_without_keys_only_where_nobody_else_can_come(tmp_path: Path) -> None:
    refused = fanout(f"file://{tmp_path}", "serve", "--no-auth", "--host", "0.0.0.0", "--port", "0")
    assert refused.returncode == 64
    assert "loopback" in refused.stderr
    with running_server(tmp_path / "open", "--no-auth") as server:
        assert httpx.get(f"{server.url}/api/disks").json()["data"] == []


def test_a_port_that_is_taken_is_said(server: Running, tmp_path: Path) -> None:
    port = server.url.rpartition(":")[2]
    failed = fanout(f"file://{tmp_path}", "serve", "--port", port)
    assert failed.returncode == 64
    assert f"127.0.0.1:{port}" in failed.stderr
    assert failed.stderr.count("\n") == 1
