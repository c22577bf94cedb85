"""The gateway's pure parts: chunks, signatures, dates, ranges, XML, and what is kept beside a file."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from itertools import pairwise

import pytest
from botocore.auth import S3SigV4Auth, S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given
from hypothesis import strategies as st

from fanout.format.facts import Facts, facts_of, reserved, with_facts
from fanout.format.tree import FILE, Node, Ref, directory
from fanout.server.s3 import sigv4
from fanout.server.s3.chunked import ChunkedDecoder
from fanout.server.s3.conditions import byte_range, check_read, check_write
from fanout.server.s3.documents import http_date, iso_date, parse_xml, xml_safe
from fanout.server.s3.errors import S3Error
from fanout.server.s3.request import check_key, parse

ENCODED = (
    b"5;x\r\nhello\r\n".replace(b";x", b"") + b"1\r\n \r\n5\r\nworld\r\n0\r\nx-amz-checksum-crc32:DUoRhQ==\r\n\r\n"
)


@given(st.lists(st.integers(1, len(ENCODED)), max_size=8))
def test_chunks_come_in_any_pieces(cuts: list[int]) -> None:
    decoder = ChunkedDecoder(None, True, 11)
    edges = [0, *sorted(cuts), len(ENCODED)]
    found = b"".join(piece for low, high in pairwise(edges) for piece in decoder.feed(ENCODED[low:high]))
    decoder.finish()
    assert found == b"hello world"
    assert decoder.trailers == {"x-amz-checksum-crc32": "DUoRhQ=="}


@given(st.binary(max_size=200))
def test_chunks_of_noise_are_refused(data: bytes) -> None:
    decoder = ChunkedDecoder(None, True, 11)

    def decode() -> None:
        decoder.feed(data)
        decoder.finish()

    with pytest.raises(S3Error):
        decode()


@pytest.mark.parametrize("path", ["/b/k", "/b/a%20b%C3%BC", "/b/~x!'()*", "/b//c/../d", "/"])
@pytest.mark.parametrize("query", ["", "list-type=2&prefix=a%2Fb&delimiter=%2F", "uploads=", "b=2&a=1&a=0"])
def test_signatures_are_botocores(path: str, query: str) -> None:
    url = f"http://localhost:1234{path}" + (f"?{query}" if query else "")
    request = AWSRequest("PUT", url, headers={"x-amz-meta-a": "  a   b ", "Content-Type": "x/y"}, data=b"body")
    request.context["payload_signing_enabled"] = True
    S3SigV4Auth(Credentials("AKID", "secret"), "s3", "eu-west-1").add_auth(request)
    headers = {name.lower(): value for name, value in request.headers.items()}
    headers["host"] = "localhost:1234"
    claim = sigv4.claim_of_header(headers["authorization"], headers)
    assert (claim.access_key, claim.region) == ("AKID", "eu-west-1")
    pairs = [tuple((pair + "=").split("=")[:2]) for pair in query.split("&") if pair]
    key = sigv4.signing_key("secret", claim.day, claim.region)
    texts = [
        sigv4.canonical_request("PUT", each, pairs, headers, claim.signed_headers, hashlib.sha256(b"body").hexdigest())  # type: ignore[arg-type]
        for each in sigv4.canonical_paths(path.encode())
    ]
    assert any(sigv4.is_right(claim, key, text.encode()) for text in texts)
    assert not any(sigv4.is_right(claim, key, text.replace("a b", "a c").encode()) for text in texts)


def test_our_links_are_botocores() -> None:
    now = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
    ours = sigv4.presigned_query("GET", "h:1", "/b/a%20b", "AKID", "secret", now, 60)
    request = AWSRequest("GET", "http://h:1/b/a%20b")
    signer = S3SigV4QueryAuth(Credentials("AKID", "secret"), "s3", "us-east-1", expires=60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("botocore.auth.get_current_datetime", lambda: now.replace(tzinfo=None), raising=True)
        signer.add_auth(request)
    assert sorted(request.url.partition("?")[2].split("&")) == sorted(ours.split("&"))


def test_dates_of_any_time() -> None:
    for ns in (-(2**63), -1, 0, 10**18, 253_402_300_799 * 10**9, 2**63 - 1):
        assert iso_date(ns).endswith("Z")
        assert http_date(ns).endswith("GMT")
    assert iso_date(1_700_000_000_123_456_789) == "2023-11-14T22:13:20.123Z"


@given(st.text())
def test_text_is_xml(text: str) -> None:
    found = parse_xml(f"<a>{xml_safe(text)}</a>".encode("utf-8", "replace"), "a").text or ""
    assert len(found) == len(text)


def test_what_is_no_xml() -> None:
    bombs = [b"<!DOCTYPE a><a/>", b'<!DOCTYPE a [<!ENTITY x "y">]><a>&x;</a>', b"<a>" * 1000 + b"</a>" * 1000]
    for data in (
        b"", b"<a>", b"<b/>", b"\xff", b"<a>&undefined;</a>", b"<?xml version='1.0' encoding='nope'?><a/>", *bombs,
    ):  # fmt: skip
        with pytest.raises(S3Error, match="MalformedXML"):
            parse_xml(data, "a")
    assert parse_xml(b'<a xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><b>1</b></a>', "a").find("b") is not None


def test_ranges() -> None:
    assert byte_range("bytes=0-", 5) == (0, 5)
    assert byte_range("bytes=4-9", 5) == (4, 5)
    assert byte_range("bytes=-2", 5) == (3, 5)
    for none in (None, "bytes=", "bytes=-", "bytes=3-2", "bytes=0-1,2-3", "x", "bytes=" + "9" * 30 + "-"):
        assert byte_range(none, 5) is None
    for empty in ("bytes=5-", "bytes=-0", "bytes=9-10"):
        with pytest.raises(S3Error, match="InvalidRange"):
            byte_range(empty, 5)


def test_conditions_that_make_no_sense_are_ignored() -> None:
    check_read({"if-modified-since": "yesterday", "if-unmodified-since": ""}, "e", 0)
    check_write({}, None)
    with pytest.raises(S3Error, match="PreconditionFailed"):
        check_write({"if-none-match": '"e"'}, "e")


@given(st.binary(max_size=1100))
def test_keys_are_paths_or_refused(key: bytes) -> None:
    try:
        check_key(key, write=True)
    except S3Error:
        return
    path = key.removesuffix(b"/")
    assert path
    assert all(part not in (b"", b".", b"..") and len(part) <= 255 and b"\0" not in part for part in path.split(b"/"))


def test_requests_taken_apart() -> None:
    scope = {
        "method": "GET", "raw_path": b"/b%40x/a%2Fb+c%FF", "path": "/", "query_string": b"prefix=a+b%20c&x&y=%C3%BC",
        "headers": [(b"Host", b"h"), (b"x-amz-meta-a", b"1"), (b"X-Amz-Meta-A", b"2")],
    }  # fmt: skip
    request = parse(scope)
    assert (request.bucket, request.key) == ("b@x", b"a/b+c\xff")
    assert request.query == {"prefix": "a b c", "x": "", "y": "ü"}
    assert request.headers["x-amz-meta-a"] == "1,2"


def test_facts_hold_for_their_content_only() -> None:
    node = Node(
        FILE, 0o644, 1, 3, (Ref(b"p" * 16, 0, 3, 3, hashlib.sha256(b"abc").digest()),), xattrs=((b"user.a", b"1"),)
    )
    facts = Facts(md5=b"m" * 16, headers=(("content-type", "a/b"),))
    kept = with_facts(node, facts)
    assert facts_of(kept) is not None
    assert facts_of(kept).md5 == b"m" * 16  # type: ignore[union-attr]
    assert (b"user.a", b"1") in kept.xattrs
    assert [name for name, _ in reserved(kept)] == [b"fanout.s3"]
    other = Node(FILE, 0o644, 1, 3, (Ref(b"p" * 16, 0, 3, 3, hashlib.sha256(b"abd").digest()),), xattrs=kept.xattrs)
    assert facts_of(other) is None
    assert with_facts(kept, None) == node
    assert facts_of(Node(FILE, 0o644, 1, xattrs=((b"fanout.s3", b"damaged"),))) is None
    assert facts_of(with_facts(directory(), Facts())) is not None
    assert facts_of(directory()) is None
