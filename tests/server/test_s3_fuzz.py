"""Random requests at the gateway's ASGI application: never a 500, and what is refused changes nothing.

Hypothesis prints how to repeat what it finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fanout.config import Settings
from fanout.server.s3.gateway import S3Gateway
from fanout.server.state import State

Headers = Sequence[tuple[bytes, bytes]]


class Answer(NamedTuple):
    status: int
    headers: dict[bytes, bytes]
    body: bytes


class Gateway:
    """The gateway on a memory store, in an event loop of its own; everybody is let in."""

    def __init__(self, portal: BlockingPortal, directory: Path) -> None:
        self._portal = portal
        options = Settings(store="memory://", cache_dir=directory / "cache")
        self.state = State(options, authenticate=False)
        portal.call(self.state.open)
        self.app = S3Gateway(self.state)
        self.ask("PUT", b"/bucket")
        self.ask("PUT", b"/bucket/a/b", body=b"0123456789")
        self.ask("PUT", b"/bucket/dir/")

    def ask(self, method: str, path: bytes, query: bytes = b"", headers: Headers = (), body: bytes = b"") -> Answer:
        always = [(b"host", b"localhost"), (b"content-length", b"%d" % len(body))]
        scope = {
            "type": "http", "method": method, "path": path.decode("latin-1"), "raw_path": path, "query_string": query,
            "headers": [*always, *headers], "http_version": "1.1",
        }  # fmt: skip
        sent: list[Any] = []
        left = [body]

        async def receive() -> Any:
            if left:
                return {"type": "http.request", "body": left.pop(), "more_body": False}
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        self._portal.call(self.app, scope, receive, send)
        start = sent[0]
        return Answer(start["status"], dict(start["headers"]), b"".join(m.get("body", b"") for m in sent[1:]))

    def tree(self) -> tuple[int, str]:
        async def state() -> Any:
            disk = await self.state.fanout.disks.get("bucket")
            return disk.point.state()  # type: ignore[attr-defined]

        found = self._portal.call(state)
        return found.seq, found.identity


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with start_blocking_portal() as portal:
        made = Gateway(portal, tmp_path_factory.mktemp("fuzz"))
        yield made
        portal.call(made.state.close)


def check(gateway: Gateway, method: str, path: bytes, query: bytes, headers: Headers, body: bytes) -> None:
    before = gateway.tree()
    answer = gateway.ask(method, path, query, headers, body)
    assert answer.status != 500, answer.body
    assert b"x-amz-request-id" in answer.headers
    if answer.status >= 400:
        assert gateway.tree() == before, "what is refused changes nothing"
        if method != "HEAD":
            found = ElementTree.fromstring(answer.body)
            assert found.tag == "Error"
            assert found.findtext("Code")
    if method == "HEAD" or answer.status in (204, 304):
        assert answer.body == b""


METHODS = st.sampled_from(["GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS", "PATCH", "\u00e9", ""])
ESCAPES = st.sampled_from([b"%00", b"%FF", b"%2F", b"%", b"%zz", b"..", b".", b"//", b"@main", b"@", b"--", b"a" * 300])
PATHS = st.one_of(
    st.sampled_from(
        [b"/bucket", b"/bucket/", b"/bucket/a/b", b"/bucket/dir/", b"/bucket/a", b"/", b"/bucket@main/a/b"]
    ),
    st.binary(max_size=40).map(lambda tail: b"/bucket/" + tail.replace(b"?", b"")),
    st.lists(ESCAPES, max_size=4).map(lambda parts: b"/bucket/" + b"/".join(parts)),
    st.binary(max_size=20).map(lambda tail: b"/" + tail),
    st.binary(max_size=20),
)
NAMES = st.sampled_from(
    [b"list-type", b"prefix", b"delimiter", b"marker", b"max-keys", b"continuation-token", b"start-after", b"uploads",
     b"uploadId", b"partNumber", b"append", b"delete", b"versions", b"versionId", b"acl", b"tagging", b"attributes",
     b"encoding-type", b"fetch-owner", b"location", b"policy", b"response-content-type", b"X-Amz-Signature",
     b"X-Amz-Algorithm", b"X-Amz-Expires", b"X-Amz-Date", b"X-Amz-Credential", b"AWSAccessKeyId", b"max-uploads",
     b"key-marker", b"max-buckets", b"select", b"torrent", b"max-parts"]
)  # fmt: skip
VALUES = st.one_of(
    st.sampled_from(
        [b"", b"0", b"1", b"2", b"-1", b"x", b"/", b"url", b"%FF", b"%00", b"true", b"9" * 30, b"\xb2", b"a/b"]
    ),
    st.binary(max_size=12).map(lambda value: value.replace(b"&", b"")),
)
QUERIES = st.one_of(
    st.lists(st.tuples(NAMES, VALUES), max_size=4).map(lambda pairs: b"&".join(n + b"=" + v for n, v in pairs)),
    st.binary(max_size=30),
)
HEADER_NAMES = st.sampled_from(
    [b"range", b"if-match", b"if-none-match", b"if-modified-since", b"content-md5", b"x-amz-content-sha256",
     b"x-amz-copy-source", b"x-amz-copy-source-range", b"x-amz-metadata-directive", b"x-amz-checksum-crc32",
     b"x-amz-checksum-sha256", b"x-amz-checksum-bogus", b"x-amz-trailer", b"x-amz-sdk-checksum-algorithm",
     b"x-amz-checksum-algorithm", b"x-amz-checksum-type", b"x-amz-decoded-content-length", b"authorization",
     b"x-amz-date", b"content-length", b"content-type", b"content-encoding", b"x-amz-meta-a", b"x-archil-mode",
     b"x-archil-uid", b"x-amz-acl", b"x-amz-object-attributes", b"x-amz-max-parts", b"expect", b"transfer-encoding",
     b"x-amz-mp-object-size", b"x-amz-storage-class", b"x-amz-part-number-marker", b"x-amz-expected-bucket-owner"]
)  # fmt: skip
HEADER_VALUES = st.one_of(
    st.sampled_from(
        [b"", b"bytes=0-3", b"bytes=-", b"bytes=99-", b"*", b'"x"', b"CRC32", b"SHA256", b"FULL_OBJECT", b"COMPOSITE",
         b"/bucket/a/b", b"bucket/a/b?versionId=1", b"/bucket/", b"STREAMING-UNSIGNED-PAYLOAD-TRAILER",
         b"STREAMING-AWS4-HMAC-SHA256-PAYLOAD", b"UNSIGNED-PAYLOAD", b"aws-chunked", b"10", b"-1", b"\xb2", b"REPLACE",
         b"AWS4-HMAC-SHA256 Credential=a/20200101/r/s3/aws4_request,SignedHeaders=host,Signature=0", b"9" * 25,
         b"Wed, 21 Oct 2015 07:28:00 GMT", b"Wed, 99 Oct 2015 07:28:00 GMT", b"20200101T000000Z", b"20209901T000000Z"]
    ),
    st.binary(max_size=20),
)  # fmt: skip
BODIES = st.one_of(
    st.binary(max_size=60),
    st.sampled_from(
        [b"<Delete><Object><Key>a/b</Key></Object></Delete>", b"<Delete/>", b"<Delete><Object/></Delete>", b"<a",
         b"5\r\nhello\r\n0\r\n\r\n",
         b"<Delete><Object><Key>a//b</Key><Size>x</Size><ETag/></Object></Delete>",
         b"<CompleteMultipartUpload><Part><PartNumber>1</PartNumber><ETag>x</ETag></Part></CompleteMultipartUpload>",
         b'<!DOCTYPE a [<!ENTITY x "y">]><Delete>&x;</Delete>']
    ),
)  # fmt: skip


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(METHODS, PATHS, QUERIES, st.lists(st.tuples(HEADER_NAMES, HEADER_VALUES), max_size=4), BODIES)
def test_random_requests(
    gateway: Gateway, method: str, path: bytes, query: bytes, headers: Headers, body: bytes
) -> None:
    check(gateway, method, path, query, headers, body)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(NAMES, VALUES), max_size=5), st.lists(st.tuples(HEADER_NAMES, HEADER_VALUES), max_size=3), BODIES
)
def test_random_multipart(gateway: Gateway, pairs: list[tuple[bytes, bytes]], headers: Headers, body: bytes) -> None:
    made = gateway.ask("POST", b"/bucket/up", b"uploads", headers)
    assert made.status != 500, made.body
    if made.status != 200:
        return
    upload = (ElementTree.fromstring(made.body).findtext("{*}UploadId") or "").encode()
    rest = b"".join(b"&" + name + b"=" + value for name, value in pairs if name not in (b"uploadId", b"uploads"))
    for method in ("PUT", "GET", "POST", "DELETE"):
        query = b"uploadId=" + upload + (b"&partNumber=1" if method == "PUT" else b"") + rest
        answer = gateway.ask(method, b"/bucket/up", query, headers, body)
        assert answer.status != 500, answer.body
