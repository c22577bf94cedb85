"""What each answer of an S3 server, or the lack of one, becomes; against a scripted server."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler

import pytest

from fanout.errors import Denied, Exists, FanoutError, Invalid, NotFound, Unavailable, Unknown
from fanout.store.base import Store
from fanout.store.s3 import S3Store
from tests.support.servers import ScriptedServer, cut, reply

Answer = Callable[[BaseHTTPRequestHandler], None]
DATE = {"Last-Modified": "Sun, 29 Nov 2026 10:00:00 GMT"}


@pytest.fixture(scope="module")
def running() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def clients(running: ScriptedServer, aws_environment: None) -> Iterator[S3Store]:
    store = S3Store("bucket", "p", endpoint=running.endpoint, read_timeout_s=0.3)
    yield store
    store.close()


@pytest.fixture
def server(running: ScriptedServer) -> ScriptedServer:
    running.script.clear()
    running.requests.clear()
    return running


@pytest.fixture
def store(server: ScriptedServer, clients: S3Store) -> S3Store:
    return clients


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK's own pauses between its three tries."""
    from botocore.retries.standard import ExponentialBackoff

    monkeypatch.setattr(ExponentialBackoff, "delay_amount", lambda self, context: 0.0)


def silent(handler: BaseHTTPRequestHandler) -> None:
    time.sleep(0.6)
    cut(handler)


def garbage(handler: BaseHTTPRequestHandler) -> None:
    reply(500, body=b"<html>proxy", headers={})(handler)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (reply(412, "PreconditionFailed"), Exists),
        (reply(409, "ConditionalRequestConflict"), Unknown),
        (reply(429, "TooManyRequests"), Unknown),
        (reply(500, "InternalError"), Unknown),
        (reply(502), Unknown),
        (reply(503, "SlowDown"), Unknown),
        (reply(504), Unknown),
        (reply(400, "RequestTimeout"), Unknown),
        (reply(404), Unknown),
        (garbage, Unknown),
        (cut, Unknown),
        (silent, Unknown),
        (reply(403, "AccessDenied"), Denied),
        (reply(403, "SignatureDoesNotMatch"), Denied),
        (reply(400, "ExpiredToken"), Denied),
        (reply(404, "NoSuchBucket"), Invalid),
        (reply(400, "InvalidArgument"), Invalid),
        (reply(501, "NotImplemented"), Invalid),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_a_create_is_sent_once_whatever_comes_back(
    server: ScriptedServer, store: S3Store, answer: Answer, error: type[FanoutError]
) -> None:
    server.script = [answer]
    with pytest.raises(error) as caught:
        store.create("k/1", b"data")
    assert len(server.requests) == 1
    method, path, headers, body = server.requests[0]
    assert (method, path, headers["If-None-Match"], body) == ("PUT", "/bucket/p/k/1", "*", b"data")
    assert not {"x-amz-checksum-crc32", "expect"} & {name.lower() for name in headers}
    assert "s3://bucket/p" in str(caught.value)
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in str(caught.value) + repr(store)


def test_no_connection_is_unavailable_for_a_create(aws_environment: None) -> None:
    with pytest.raises(Unavailable, match="cannot connect"):
        S3Store("bucket", endpoint="http://127.0.0.1:9").create("k", b"")


def test_a_put_is_sent_again_and_is_unknown_in_the_end(server: ScriptedServer, store: S3Store) -> None:
    server.script = [reply(503, "SlowDown"), cut, reply(200)]
    store.put("k", b"data")
    assert [(method, body) for method, _, _, body in server.requests] == [("PUT", b"data")] * 3
    server.script = [reply(500, "InternalError")] * 3
    with pytest.raises(Unknown):
        store.put("k", b"data")


def test_a_get_is_sent_again_and_is_unavailable_in_the_end(server: ScriptedServer, store: S3Store) -> None:
    server.script = [reply(500, "InternalError"), cut, reply(200, body=b"hello", headers=DATE)]
    assert store.get("k") == b"hello"
    server.script = [reply(500, "InternalError")] * 3
    with pytest.raises(Unavailable):
        store.get("k")


def test_a_body_cut_short_is_unavailable(server: ScriptedServer, store: S3Store) -> None:
    def short(handler: BaseHTTPRequestHandler) -> None:
        reply(200, body=b"hel", headers={"Content-Length": "5"})(handler)
        handler.close_connection = True

    server.script = [short]
    with pytest.raises(Unavailable):
        store.get("k")


def test_a_server_that_ignores_ranges_is_cut_to_size(server: ScriptedServer, store: S3Store) -> None:
    server.script = [reply(200, body=b"0123456789", headers=DATE)]
    assert store.get("k", 3, 4) == b"3456"
    assert server.requests[0][2]["Range"] == "bytes=3-6"


def test_a_range_past_the_end_is_empty(server: ScriptedServer, store: S3Store) -> None:
    server.script = [reply(416, "InvalidRange")]
    assert store.get("k", 100) == b""


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (reply(404, "NoSuchKey"), NotFound),
        (reply(404, "NoSuchBucket"), Invalid),
        (reply(404, body=b"<html>a proxy's page</html>"), Unavailable),
        (reply(403, "AccessDenied"), Denied),
    ],
)
def test_only_no_such_key_means_that_nothing_is_there(
    server: ScriptedServer, store: S3Store, answer: Answer, error: type[FanoutError]
) -> None:
    server.script = [answer] * 3
    with pytest.raises(error):
        store.get("k")


def test_delete_carries_a_digest_and_reports_what_failed(server: ScriptedServer, store: S3Store) -> None:
    result = b"<DeleteResult><Error><Key>p/b</Key><Code>%s</Code></Error></DeleteResult>"
    server.script = [reply(200, body=result % b"AccessDenied")]
    with pytest.raises(Denied, match="1 of 2"):
        store.delete(["a", "b"])
    assert "Content-MD5" in server.requests[0][2]
    server.script = [reply(200, body=result % b"InternalError")]
    with pytest.raises(Unavailable, match="1 of 2"):
        store.delete(["a", "b"])
    server.script = [reply(200, body=result % b"NoSuchKey")]
    store.delete(["a", "b"])


def test_listing_pages(moto_store: Store) -> None:
    names = [f"d/{n:04d}" for n in range(23)]
    for name in names:
        moto_store.create(name, b"")
    from fanout.store import s3

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(s3, "_PAGE", 5)
        assert [meta.key for meta in moto_store.list("d/")] == names
        assert [meta.key for meta in moto_store.list("d/", "d/0003", 11)] == names[4:15]
        moto_store.delete(names)
        assert list(moto_store.list()) == []


def test_a_fork_gets_connections_of_its_own(moto_store: Store) -> None:
    moto_store.create("k", b"x")
    pid = os.fork()
    if pid == 0:
        os._exit(0 if moto_store.get("k") == b"x" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert moto_store.get("k") == b"x"


def test_strangers_objects_below_the_prefix_are_left_out(moto_store: S3Store) -> None:
    moto_store.create("ours", b"")
    for key in ("folder/", "with space", "ours+"):
        moto_store._client().put_object(Bucket=moto_store.bucket, Key=moto_store.prefix + key, Body=b"")
    assert [meta.key for meta in moto_store.list()] == ["ours"]
