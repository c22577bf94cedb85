"""Who may ask, in all the ways a client can say who it is; and bodies that are signed piece by piece."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from botocore.exceptions import ClientError

from fanout.server.s3 import sigv4
from tests.support.s3 import code_of, disk_id, make_key, new_bucket, s3_client, signed
from tests.support.serving import Running

EMPTY = hashlib.sha256(b"").hexdigest()


@pytest.fixture
def s3(server: Running, disk_name: str) -> Any:
    return new_bucket(server, disk_name)


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.text.partition("<Code>")[2].partition("</Code>")[0]


def test_nobody_and_strangers(server: Running, s3: Any, disk_name: str) -> None:
    url = f"{server.s3_url}/{disk_name}/k"
    assert code(httpx.get(url)) == (403, "AccessDenied")
    assert code(httpx.put(url, content=b"x")) == (403, "AccessDenied")
    assert code(httpx.get(url, headers={"Authorization": "key-0000"})) == (403, "AccessDenied")
    assert code(httpx.get(url, headers={"Authorization": "Basic eDp5"})) == (400, "InvalidArgument")
    assert code(httpx.get(url, headers={"Authorization": "AWS a:b"}))[0] == 400
    for value in ("AWS4-HMAC-SHA256", "AWS4-HMAC-SHA256 Credential=a/b,SignedHeaders=host,Signature=0", "AWS4-X a=b"):
        assert code(httpx.get(url, headers={"Authorization": value})) == (400, "AuthorizationHeaderMalformed")
    for access_key, secret_key, wanted in (
        ("nobody", "x", "InvalidAccessKeyId"),
        ("0" * 16, "x", "InvalidAccessKeyId"),
        (server.access_key, "wrong", "SignatureDoesNotMatch"),
    ):
        with pytest.raises(ClientError) as caught:
            s3_client(server, access_key=access_key, secret_key=secret_key).list_buckets()
        assert code_of(caught.value) == (403, wanted)
    assert s3.list_objects_v2(Bucket=disk_name)["KeyCount"] == 0


def test_a_plain_token(server: Running, s3: Any, disk_name: str) -> None:
    url = f"{server.s3_url}/{disk_name}/k"
    for value in (server.token, f"Bearer {server.token}"):
        assert httpx.put(url, content=value.encode(), headers={"Authorization": value}).status_code == 200
        assert httpx.get(url, headers={"Authorization": value}).content == value.encode()
    headers = {"Authorization": server.token, "x-amz-content-sha256": EMPTY}
    assert code(httpx.put(url, content=b"x", headers=headers)) == (400, "XAmzContentSHA256Mismatch")
    _, _, reader = make_key(server, "read", [disk_id(server, disk_name)])
    assert httpx.get(url, headers={"Authorization": reader}).status_code == 200
    assert code(httpx.put(url, content=b"x", headers={"Authorization": reader})) == (403, "AccessDenied")


def test_clocks(server: Running, s3: Any, disk_name: str) -> None:
    def at(offset: timedelta) -> str:
        return (datetime.now(UTC) + offset).strftime("%Y%m%dT%H%M%SZ")

    path = f"/{disk_name}?list-type=2"
    for good in (timedelta(0), timedelta(minutes=14), timedelta(minutes=-14)):
        assert signed(server, "GET", path, timestamp=at(good)).status_code == 200
    for skewed in (timedelta(minutes=16), timedelta(minutes=-16), timedelta(days=400)):
        assert code(signed(server, "GET", path, timestamp=at(skewed))) == (403, "RequestTimeTooSkewed")


def test_what_is_signed_cannot_be_changed(server: Running, s3: Any, disk_name: str) -> None:
    """Everything of a request but unsigned headers that mean nothing to S3."""
    s3.put_object(Bucket=disk_name, Key="a", Body=b"a")
    request = _signed_request(server, "PUT", f"/{disk_name}/k", b"body", {"x-amz-meta-a": "1"})
    headers = dict(request)

    def send(method: str = "PUT", path: str = f"/{disk_name}/k", body: bytes = b"body", **changed: str) -> Any:
        renamed = {name.replace("_", "-"): value for name, value in changed.items()}
        return code(httpx.request(method, server.s3_url + path, content=body, headers={**headers, **renamed}))

    assert send(path=f"/{disk_name}/other") == (403, "SignatureDoesNotMatch")
    assert send(method="POST") == (403, "SignatureDoesNotMatch")
    assert send(path=f"/{disk_name}/k?append=true") == (403, "SignatureDoesNotMatch")
    assert send(x_amz_meta_a="2") == (403, "SignatureDoesNotMatch")
    assert send(x_amz_meta_b="2") == (403, "AccessDenied"), "a header that was not signed"
    assert send(body=b"BODY") == (400, "XAmzContentSHA256Mismatch")
    assert send(x_amz_content_sha256="UNSIGNED-PAYLOAD") == (403, "SignatureDoesNotMatch")
    assert send(host="elsewhere") == (403, "SignatureDoesNotMatch")
    assert send() == (200, "")
    assert s3.get_object(Bucket=disk_name, Key="k")["Body"].read() == b"body"


def _signed_request(
    server: Running, method: str, path: str, body: bytes, headers: Mapping[str, str], payload: str | None = None
) -> dict[str, str]:
    """Sign by hand, with the gateway's own functions: others' signers are what the other tests use."""
    now = datetime.now(UTC)
    amz_date, day = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d")
    told = {
        **headers,
        "host": server.s3_url.removeprefix("http://"),
        "x-amz-date": amz_date,
        "x-amz-content-sha256": payload or hashlib.sha256(body).hexdigest(),
    }
    names = tuple(sorted(told))
    escaped, _, query = path.partition("?")
    pairs = [(pair.partition("=")[0], pair.partition("=")[2]) for pair in query.split("&") if pair]
    canonical = sigv4.canonical_request(method, escaped, pairs, told, names, told["x-amz-content-sha256"])
    claim = sigv4.Claim(server.access_key, day, "eu-north-1", names, "", now, amz_date)
    key = sigv4.signing_key(server.secret_key, day, claim.region)
    signature = sigv4.signature_of(claim, key, canonical.encode())
    told["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={server.access_key}/{claim.scope}, SignedHeaders={';'.join(names)}, "
        f"Signature={signature}"
    )
    return told


def test_presigned(server: Running, s3: Any, disk_name: str) -> None:
    old = s3.generate_presigned_url("get_object", {"Bucket": disk_name, "Key": "k"})
    assert "version 2" in httpx.get(old).text, "what boto3 makes unless it is told s3v4"
    s3 = s3_client(server, signature_version="s3v4")
    s3.put_object(Bucket=disk_name, Key="ü 1", Body=b"data")
    get = s3.generate_presigned_url("get_object", {"Bucket": disk_name, "Key": "ü 1"}, ExpiresIn=60)
    assert httpx.get(get).content == b"data"
    assert code(httpx.delete(get)) == (403, "SignatureDoesNotMatch")
    assert code(httpx.get(get.replace("X-Amz-Expires=60", "X-Amz-Expires=600"))) == (403, "SignatureDoesNotMatch")
    assert code(httpx.get(get.replace("%201", "%202"))) == (403, "SignatureDoesNotMatch")
    put = s3.generate_presigned_url("put_object", {"Bucket": disk_name, "Key": "new"}, ExpiresIn=60)
    assert httpx.put(put, content=b"by link").status_code == 200
    assert s3.get_object(Bucket=disk_name, Key="new")["Body"].read() == b"by link"
    for wrong in ("0", "604801", "x", ""):
        answer = httpx.get(get.replace("X-Amz-Expires=60", f"X-Amz-Expires={wrong}"))
        assert answer.status_code in (400, 403), wrong
    assert code(httpx.get(get.replace("X-Amz-Signature=", "X-Amz-Sig="))) == (400, "AuthorizationQueryParametersError")


@pytest.mark.parametrize(
    ("age_s", "expires_s", "status"), [(0, 60, 200), (61, 60, 403), (600, 3600, 200), (-1200, 60, 403)]
)
def test_links_expire(server: Running, s3: Any, disk_name: str, age_s: int, expires_s: int, status: int) -> None:
    s3.put_object(Bucket=disk_name, Key="k", Body=b"data")
    host = server.s3_url.removeprefix("http://")
    path = f"/{disk_name}/k"
    signed_at = datetime.now(UTC) - timedelta(seconds=age_s)
    query = sigv4.presigned_query("GET", host, path, server.access_key, server.secret_key, signed_at, expires_s)
    answer = httpx.get(f"{server.s3_url}{path}?{query}")
    assert code(answer) == ((200, "") if status == 200 else (403, "AccessDenied"))


# -- bodies in chunks ----------------------------------------------------------------------------------------------

Change = Callable[[bytes], bytes]
PIECES = (b"a" * 70_000, b"b" * 64_000, b"c")
WHOLE = b"".join(PIECES)
CRC32 = base64.b64encode(zlib.crc32(WHOLE).to_bytes(4, "big")).decode()


def put_chunked(
    server: Running,
    path: str,
    *,
    sign: bool,
    trailer: str | None = None,
    change: Change = bytes,
    length: int = len(WHOLE),
) -> tuple[int, str]:
    """Put WHOLE as aws-chunked, its checksum following; `change` spoils the encoded body."""
    payload = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD" if sign else "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
    headers = {
        "content-encoding": "aws-chunked",
        "x-amz-decoded-content-length": str(length),
    }
    if trailer is not None:
        headers["x-amz-trailer"] = "x-amz-checksum-crc32"
        payload = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER" if sign else payload
    told = _signed_request(server, "PUT", path, b"", headers, payload)
    claim = sigv4.claim_of_header(told["authorization"], told)
    key = sigv4.signing_key(server.secret_key, claim.day, claim.region)
    previous, body = claim.signature, b""
    for piece in (*PIECES, b""):
        extension = b""
        if sign:
            previous = sigv4.chunk_signature(claim, key, previous, hashlib.sha256(piece).hexdigest())
            extension = b";chunk-signature=" + previous.encode()
        body += b"%x%s\r\n" % (len(piece), extension) + piece + (b"\r\n" if piece else b"")
    if trailer is not None:
        line = f"x-amz-checksum-crc32:{trailer}"
        body += line.encode() + b"\r\n"
        if sign:
            signature = sigv4.trailer_signature(claim, key, previous, line.encode() + b"\n")
            body += b"x-amz-trailer-signature:" + signature.encode() + b"\r\n"
    body += b"\r\n"
    told.pop("host")
    return code(httpx.put(server.s3_url + path, content=change(body), headers=told))


@pytest.mark.parametrize("sign", [True, False])
@pytest.mark.parametrize("trailer", [None, CRC32])
def test_chunked(server: Running, s3: Any, disk_name: str, sign: bool, trailer: str | None) -> None:
    assert put_chunked(server, f"/{disk_name}/k", sign=sign, trailer=trailer) == (200, "")
    head = s3.get_object(Bucket=disk_name, Key="k")
    assert head["Body"].read() == WHOLE
    assert head["ETag"] == f'"{hashlib.md5(WHOLE).hexdigest()}"'
    assert "ContentEncoding" not in head
    assert s3.head_object(Bucket=disk_name, Key="k", ChecksumMode="ENABLED").get("ChecksumCRC32") == trailer


def test_chunks_that_are_wrong(server: Running, s3: Any, disk_name: str) -> None:
    path = f"/{disk_name}/k"
    changes: list[tuple[Change, str]] = [
        (lambda body: body.replace(b"b" * 10, b"B" * 10, 1), "SignatureDoesNotMatch"),
        (lambda body: body.replace(b"chunk-signature=", b"chunk-signature=0", 1)[:-1], "InvalidRequest"),
        (lambda body: body[:100_000], "IncompleteBody"),
        (lambda body: body[:-100], "IncompleteBody"),
        (lambda body: body + b"more", "InvalidRequest"),
        (lambda body: b"zz\r\n" + body, "InvalidRequest"),
        (lambda body: b"", "IncompleteBody"),
    ]
    for change, wanted in changes:
        assert put_chunked(server, path, sign=True, change=change) == (400 if wanted[0] == "I" else 403, wanted)
    assert put_chunked(server, path, sign=True, trailer="AAAAAA==") == (400, "BadDigest")
    assert put_chunked(server, path, sign=False, trailer="AAAAAA==") == (400, "BadDigest")
    tampered: Change = lambda body: body.replace(CRC32.encode(), b"AAAAAA==")  # noqa: E731
    assert put_chunked(server, path, sign=True, trailer=CRC32, change=tampered) == (403, "SignatureDoesNotMatch")
    assert put_chunked(server, path, sign=True, length=len(WHOLE) - 1) == (400, "IncompleteBody")
    assert put_chunked(server, path, sign=True, length=len(WHOLE) + 1) == (400, "IncompleteBody")
    assert put_chunked(server, path, sign=True, length=1 << 50) == (400, "EntityTooLarge")
    assert s3.list_objects_v2(Bucket=disk_name)["KeyCount"] == 0, "nothing was changed"
