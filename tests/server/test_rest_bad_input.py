"""What the REST dialect answers to bad input: the status and code that say why, nothing changed, never a 500."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.serving import Running

DISK = "bad-input"
JSON = "application/json"


@pytest.fixture(scope="module")
def disk(server: Running) -> Iterator[str]:
    made = server.call("POST", "/disks", {"name": DISK})
    yield made.json()["data"]["diskId"]
    server.call("DELETE", f"/disks/{DISK}")


def ask(server: Running, method: str, path: str, content: bytes, kind: str | None = JSON, **headers: str) -> Any:
    given = {"Authorization": server.token, **headers}
    if kind is not None:
        given["Content-Type"] = kind
    return server.client.request(method, f"{server.url}/api{path}", content=content, headers=given, timeout=60)


def check(answer: httpx.Response, status: int, code: str) -> str:
    assert answer.status_code == status, answer.text
    told = answer.json()
    assert (told["success"], told["code"]) == (False, code)
    assert "data" not in told
    return str(told["error"])


@pytest.mark.parametrize(
    "token",
    [
        "",
        "key-",
        "Bearer",
        "Basic a2V5OmtleQ==",
        "key-0000000000000000-" + "0" * 48,
        "AWS4-HMAC-SHA256 Credential=x",
        "key-" + "a" * 5000,
        "caf\u00e9",
    ],
)
def test_wrong_keys(server: Running, token: str) -> None:
    answer = server.client.get(f"{server.url}/api/disks", headers={"Authorization": token.encode("latin-1")})
    assert "www-authenticate" in answer.headers
    told = check(answer, 401, "unauthorized")
    assert not token or token not in told


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", JSON),
        (b"{", JSON),
        (b"null", JSON),
        (b"[]", JSON),
        (b'"text"', JSON),
        (b"\xff\xfe", JSON),
        (b'{"command": "true"', JSON),
        (b'{"command": "true"}', "text/plain"),
        (b'{"command": "true"}', None),
        (b"command=true", "application/x-www-form-urlencoded"),
        (b"[" * 100_000, JSON),
        (b'{"command": ' + b"1" * 10_000 + b"}", JSON),
        (b'{"command": NaN}', JSON),
        (b'{"command": "\\ud800"}', JSON),
        (b'{"command": null}', JSON),
        (b'{"command": 1}', JSON),
        (b'{"command": ["a"]}', JSON),
        (b'{"command": ""}', JSON),
        (b'{"command": "  "}', JSON),
        (b'{"command": "a\\u0000b"}', JSON),
        (b'{"command": "true", "commandd": 1}', JSON),
        (b'{"command": "' + b"a" * 131_072 + b'"}', JSON),
    ],
)
def test_bodies_that_are_no_command(server: Running, disk: str, content: bytes, kind: str | None) -> None:
    check(ask(server, "POST", f"/disks/{disk}/exec", content, kind), 400, "invalid")


def test_what_is_wrong_is_named(server: Running, disk: str) -> None:
    unknown = server.call("POST", f"/disks/{disk}/exec", {"command": "true", "timeout": 5})
    assert check(unknown, 400, "invalid") == "timeout: there is no such field"
    nested = server.call("POST", "/exec", {"command": "true", "disks": {"w": {"disk": disk, "readonly": True}}})
    assert "readonly" in check(nested, 400, "invalid")


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/disks?limit=0", None),
        ("GET", "/disks?limit=x", None),
        ("GET", "/disks?cursor=%00", None),
        ("GET", "/disks?cursor=%C3%A9", None),
        ("GET", "/disks?name=UPPER", None),
        ("GET", "/tokens?cursor=nope", None),
        ("POST", "/disks", {}),
        ("POST", "/disks", {"name": "a\nb"}),
        ("POST", "/disks", {"name": "x", "rootAttrs": {"mode": 0o10000}}),
        ("POST", "/disks", {"name": "x", "rootAttrs": {"uid": -1}}),
        ("POST", "/disks", {"name": "x", "rootAttrs": {"mode": "755"}}),
        ("POST", "/exec", {"command": "true", "disks": []}),
        ("POST", "/exec", {"command": "true", "disks": {"w": 1}}),
        ("POST", "/exec", {"command": "true", "disks": {"w": {"disk": DISK, "subdirectory": "../x"}}}),
        ("POST", "/exec", {"command": "true", "disks": {"w": {"disk": DISK, "readOnly": True, "conditional": True}}}),
        ("POST", "/exec", {"command": "true", "disks": {"w": {"disk": DISK, "queueMs": 5}}}),
        ("POST", "/exec", {"command": "true", "disks": {"w": {"disk": DISK, "queueMs": -5, "checkoutPaths": ["a"]}}}),
        ("POST", "/exec", {"command": "true", "disks": {"w": {"disk": DISK, "checkoutPaths": ["../a"]}}}),
        ("POST", "/exec", {"command": "true", "disks": {"a\0b": DISK}}),
        ("POST", "/exec", {"command": "true", "disks": {str(n): DISK for n in range(65)}}),
        ("POST", f"/disks/{DISK}/grep", {"pattern": "", "directory": ""}),
        ("POST", f"/disks/{DISK}/grep", {"pattern": "(", "directory": ""}),
        ("POST", f"/disks/{DISK}/grep", {"pattern": "x", "maxDurationSeconds": 31}),
        ("POST", f"/disks/{DISK}/grep", {"pattern": "x", "directory": "../.."}),
        ("POST", f"/disks/{DISK}/share", {"key": ""}),
        ("POST", f"/disks/{DISK}/share", {"key": "a/../b"}),
        ("POST", f"/disks/{DISK}/share", {"key": "a", "expiresIn": 0}),
        ("POST", f"/disks/{DISK}/share", {"key": "a", "expiresIn": 604_801}),
        ("POST", f"/disks/{DISK}/branches", {"branch_name": "a/b", "from_checkpoint_name": "x"}),
        ("POST", f"/disks/{DISK}/branches", {"branch_name": "b", "from_checkpoint_name": "../x"}),
        ("POST", f"/disks/{DISK}/users", {"type": "token", "nickname": "x" * 300}),
        ("DELETE", f"/disks/{DISK}/users/token", None),
        ("GET", "/disks/%00", None),
        ("GET", "/disks/UPPER", None),
        ("GET", f"/disks/{DISK}@", None),
        ("GET", f"/disks/{DISK}@a@b", None),
        ("GET", f"/disks/{'a' * 2000}", None),
        ("GET", "/disks/%C3%A9", None),
        ("GET", "/disks/%FF", None),
    ],
)
def test_arguments_out_of_range(server: Running, disk: str, method: str, path: str, body: object) -> None:
    check(server.call(method, path, body), 400, "invalid")


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/disks/missing", None),
        ("GET", "/disks/dsk-0000000000000000", None),
        ("GET", f"/disks/{DISK}@missing", None),
        ("GET", f"/disks/{DISK}@rescue:missing", None),
        ("DELETE", "/disks/missing", None),
        ("POST", "/disks/missing/exec", {"command": "true"}),
        ("POST", "/exec", {"command": "true", "disks": {"w": "missing"}}),
        ("POST", "/exec", {"command": "true", "disks": {"w": {"disk": DISK, "subdirectory": "missing"}}}),
        ("POST", f"/disks/{DISK}/grep", {"pattern": "x", "directory": "missing"}),
        ("GET", f"/disks/{DISK}/branches/missing", None),
        ("POST", f"/disks/{DISK}/revoke-delegation", {"clientId": "x", "inodeId": 1}),
        ("DELETE", f"/disks/{DISK}/users/token?identifier=0000000000000000", None),
        ("DELETE", f"/disks/{DISK}/users/token?identifier=../../master", None),
        ("DELETE", "/tokens/missing", None),
        ("GET", "/nothing/here", None),
        ("GET", "/disks/a/b/c", None),
    ],
)
def test_what_is_not_there(server: Running, disk: str, method: str, path: str, body: object) -> None:
    check(server.call(method, path, body), 404, "not_found")


def test_methods_that_a_path_does_not_have(server: Running, disk: str) -> None:
    check(server.call("PATCH", f"/disks/{DISK}"), 405, "method_not_allowed")
    check(server.call("GET", f"/disks/{DISK}/exec"), 405, "method_not_allowed")


def test_rights(server: Running, disk: str) -> None:
    user = server.call("POST", f"/disks/{DISK}/users", {"type": "token", "nickname": "x"}).json()["data"]
    token = user["token"]
    other = server.call("POST", "/disks", {"name": f"{DISK}-other"}).json()["data"]["diskId"]
    try:
        for method, path, body in [
            ("GET", f"/disks/{other}", None),
            ("GET", f"/disks/{DISK}-other", None),
            ("GET", f"/disks/{DISK}-other@main", None),
            ("GET", "/disks/not-there-at-all", None),
            ("POST", f"/disks/{other}/exec", {"command": "true"}),
            ("POST", "/exec", {"command": "true", "disks": {"a": disk, "b": {"disk": other, "readOnly": True}}}),
            ("POST", f"/disks/{other}/grep", {"pattern": "x"}),
            ("POST", f"/disks/{other}/share", {"key": "x"}),
            ("GET", f"/disks/{other}/delegations", None),
            ("GET", f"/disks/{other}/branches", None),
            ("POST", "/disks", {"name": f"{DISK}-more"}),
            ("DELETE", f"/disks/{DISK}", None),
            ("POST", f"/disks/{DISK}/users", {"type": "token"}),
            ("GET", "/tokens", None),
            ("POST", "/tokens", {"name": "x"}),
            ("DELETE", f"/tokens/{user['identifier']}", None),
        ]:
            answer = server.call(method, path, body, token)
            assert answer.status_code == 403, (method, path, answer.text)
            assert answer.json()["code"] == "denied"
        assert server.call("GET", "/disks?name=not-there-at-all", token=token).status_code in (200, 403)
        assert server.call("GET", f"/disks/{DISK}", token=token).status_code == 200
        assert server.call("POST", f"/disks/{DISK}/exec", {"command": "true"}, token).status_code == 200
    finally:
        server.call("DELETE", f"/disks/{other}")
