"""Objects through boto3: what is put is what is got, under every condition a client can set."""

from __future__ import annotations

import base64
import hashlib
import re
import socket
import zlib
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from botocore.exceptions import ClientError

from tests.support.s3 import code_of, exec_on, new_bucket, signed
from tests.support.serving import Running


@pytest.fixture
def s3(server: Running, disk_name: str) -> Any:
    return new_bucket(server, disk_name)


def refused(call: Any, **arguments: Any) -> tuple[int, str]:
    with pytest.raises(ClientError) as caught:
        call(**arguments)
    return code_of(caught.value)


def test_buckets(server: Running, s3: Any, disk_name: str) -> None:
    assert disk_name in [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]]
    s3.head_bucket(Bucket=disk_name)
    assert s3.get_bucket_location(Bucket=disk_name)["LocationConstraint"] is None
    s3.create_bucket(Bucket=disk_name)
    assert refused(s3.create_bucket, Bucket="Not-A-Name") == (400, "InvalidBucketName")
    assert refused(s3.head_bucket, Bucket=disk_name + "-not") == (404, "404")
    s3.put_object(Bucket=disk_name, Key="d/x", Body=b"1")
    assert refused(s3.delete_bucket, Bucket=disk_name) == (409, "BucketNotEmpty")
    s3.delete_object(Bucket=disk_name, Key="d/x")
    s3.delete_bucket(Bucket=disk_name)
    assert refused(s3.list_objects_v2, Bucket=disk_name) == (404, "NoSuchBucket")
    assert refused(s3.put_object, Bucket=disk_name, Key="a", Body=b"") == (404, "NoSuchBucket")
    s3.create_bucket(Bucket=disk_name)
    assert s3.list_objects_v2(Bucket=disk_name)["KeyCount"] == 0


def test_put_get_head(s3: Any, disk_name: str) -> None:
    put = s3.put_object(
        Bucket=disk_name, Key="a/b.txt", Body=b"hello", ContentType="text/plain", CacheControl="no-store",
        ContentDisposition="attachment", ContentEncoding="x-y", ContentLanguage="de",
        Metadata={"One": "1", "two": "2 "}, Expires=datetime(2030, 1, 1, tzinfo=UTC),
    )  # fmt: skip
    assert put["ETag"] == f'"{hashlib.md5(b"hello").hexdigest()}"'
    got = s3.get_object(Bucket=disk_name, Key="a/b.txt")
    assert got["Body"].read() == b"hello"
    head = s3.head_object(Bucket=disk_name, Key="a/b.txt")
    for answer in (got, head):
        assert answer["ETag"] == put["ETag"]
        assert answer["ContentLength"] == 5
        assert (answer["ContentType"], answer["CacheControl"]) == ("text/plain", "no-store")
        assert (answer["ContentDisposition"], answer["ContentEncoding"]) == ("attachment", "x-y")
        assert answer["ContentLanguage"] == "de"
        assert answer["Metadata"] == {"one": "1", "two": "2"}
        assert answer["AcceptRanges"] == "bytes"
        assert abs(answer["LastModified"] - datetime.now(UTC)) < timedelta(minutes=5)
        assert len(answer["ResponseMetadata"]["RequestId"]) == 16
        assert "date" in answer["ResponseMetadata"]["HTTPHeaders"]
    assert refused(s3.get_object, Bucket=disk_name, Key="a/c") == (404, "NoSuchKey")
    assert refused(s3.get_object, Bucket=disk_name, Key="a") == (404, "NoSuchKey")
    assert refused(s3.head_object, Bucket=disk_name, Key="a/") == (404, "404")


@pytest.mark.parametrize("size", [0, 1, 128 << 10, (1 << 20) + 1, (4 << 20) - 1, 4 << 20, (9 << 20) + 17])
def test_sizes(s3: Any, disk_name: str, size: int) -> None:
    body = hashlib.shake_256(b"%d" % size).digest(size)
    put = s3.put_object(Bucket=disk_name, Key="k", Body=body)
    assert put["ETag"] == f'"{hashlib.md5(body).hexdigest()}"'
    assert s3.get_object(Bucket=disk_name, Key="k")["Body"].read() == body
    if size > 100:
        low, high = size // 3, size - 7
        got = s3.get_object(Bucket=disk_name, Key="k", Range=f"bytes={low}-{high}")
        assert got["ResponseMetadata"]["HTTPStatusCode"] == 206
        assert got["ContentRange"] == f"bytes {low}-{high}/{size}"
        assert got["Body"].read() == body[low : high + 1]


def test_ranges(s3: Any, disk_name: str) -> None:
    s3.put_object(Bucket=disk_name, Key="k", Body=b"0123456789")
    for given, wanted in (
        ("bytes=0-0", b"0"), ("bytes=3-", b"3456789"), ("bytes=-4", b"6789"), ("bytes=-40", b"0123456789"),
        ("bytes=5-500", b"56789"),
    ):  # fmt: skip
        assert s3.get_object(Bucket=disk_name, Key="k", Range=given)["Body"].read() == wanted
    for ignored in ("bytes=5-2", "bytes=a-b", "lines=1-2", "bytes=0-1,3-4"):
        got = s3.get_object(Bucket=disk_name, Key="k", Range=ignored)
        assert (got["ResponseMetadata"]["HTTPStatusCode"], got["Body"].read()) == (200, b"0123456789")
    for beyond in ("bytes=10-", "bytes=99-100", "bytes=-0"):
        assert refused(s3.get_object, Bucket=disk_name, Key="k", Range=beyond) == (416, "InvalidRange")
    s3.put_object(Bucket=disk_name, Key="empty", Body=b"")
    assert refused(s3.get_object, Bucket=disk_name, Key="empty", Range="bytes=0-") == (416, "InvalidRange")


def test_read_conditions(s3: Any, disk_name: str) -> None:
    etag = s3.put_object(Bucket=disk_name, Key="k", Body=b"x")["ETag"]
    now = datetime.now(UTC)
    past, future = now - timedelta(days=1), now + timedelta(days=1)
    get: dict[str, Any] = {"Bucket": disk_name, "Key": "k"}
    for good in (
        {"IfMatch": etag}, {"IfMatch": "*"}, {"IfNoneMatch": '"other"'}, {"IfModifiedSince": past},
        {"IfUnmodifiedSince": future}, {"IfMatch": etag, "IfUnmodifiedSince": past},
    ):  # fmt: skip
        assert s3.get_object(**get, **good)["Body"].read() == b"x"
    for bad in ({"IfMatch": '"other"'}, {"IfUnmodifiedSince": past}):
        assert refused(s3.get_object, **get, **bad) == (412, "PreconditionFailed")
    for same in ({"IfNoneMatch": etag}, {"IfModifiedSince": future}):
        assert refused(s3.get_object, **get, **same) == (304, "304")
        assert refused(s3.head_object, **get, **same) == (304, "304")


def test_write_conditions(s3: Any, disk_name: str) -> None:
    put: dict[str, Any] = {"Bucket": disk_name, "Key": "d/k"}
    assert refused(s3.put_object, **put, Body=b"0", IfMatch='"x"') == (404, "NoSuchKey")
    first = s3.put_object(**put, Body=b"1", IfNoneMatch="*")["ETag"]
    assert refused(s3.put_object, **put, Body=b"2", IfNoneMatch="*") == (412, "PreconditionFailed")
    second = s3.put_object(**put, Body=b"3", IfMatch=first)["ETag"]
    assert refused(s3.put_object, **put, Body=b"4", IfMatch=first) == (412, "PreconditionFailed")
    assert refused(s3.delete_object, **put, IfMatch=first) == (412, "PreconditionFailed")
    assert s3.get_object(**put)["Body"].read() == b"3"
    s3.delete_object(**put, IfMatch=second)
    s3.put_object(**put, Body=b"5", IfNoneMatch="*")


def test_one_of_many_creates_wins(server: Running, s3: Any, disk_name: str) -> None:
    def create(number: int) -> int:
        answer = signed(server, "PUT", f"/{disk_name}/k", b"%d" % number, {"if-none-match": "*"})
        return answer.status_code

    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(create, range(8)))
    assert sorted(statuses) == [200] + 7 * [412]
    assert s3.get_object(Bucket=disk_name, Key="k")["Body"].read() == b"%d" % statuses.index(200)


def test_overrides(s3: Any, disk_name: str) -> None:
    s3.put_object(Bucket=disk_name, Key="k", Body=b"x", ContentType="a/b")
    got = s3.get_object(
        Bucket=disk_name, Key="k", ResponseContentType="c/d", ResponseContentDisposition='attachment; filename="ü"',
        ResponseCacheControl="no-cache",
    )  # fmt: skip
    assert got["ContentType"] == "c/d"
    assert got["CacheControl"] == "no-cache"
    assert got["ContentDisposition"].startswith("attachment")


def test_delete(s3: Any, disk_name: str) -> None:
    for key in ("a", "d/e/f", "d/g"):
        s3.put_object(Bucket=disk_name, Key=key, Body=b"")
    s3.delete_object(Bucket=disk_name, Key="not there")
    s3.delete_object(Bucket=disk_name, Key="d")
    s3.delete_object(Bucket=disk_name, Key="d/e/")
    assert keys_of(s3, disk_name) == ["a", "d/e/f", "d/g"]
    s3.delete_object(Bucket=disk_name, Key="d/e/f")
    assert keys_of(s3, disk_name) == ["a", "d/g"]
    answer = s3.delete_objects(
        Bucket=disk_name, Delete={"Objects": [{"Key": "a"}, {"Key": "d/g"}, {"Key": "no"}, {"Key": "x//y"}]}
    )
    assert sorted(each["Key"] for each in answer["Deleted"]) == ["a", "d/g", "no", "x//y"]
    assert "Errors" not in answer
    assert keys_of(s3, disk_name) == []
    s3.put_object(Bucket=disk_name, Key="q", Body=b"")
    assert "Deleted" not in s3.delete_objects(Bucket=disk_name, Delete={"Objects": [{"Key": "q"}], "Quiet": True})


def keys_of(s3: Any, bucket: str) -> list[str]:
    return [item["Key"] for item in s3.list_objects_v2(Bucket=bucket).get("Contents", [])]


def test_directories(server: Running, s3: Any, disk_name: str) -> None:
    s3.put_object(Bucket=disk_name, Key="made/", Metadata={"a": "b"})
    assert s3.head_object(Bucket=disk_name, Key="made/")["Metadata"] == {"a": "b"}
    assert s3.get_object(Bucket=disk_name, Key="made/")["Body"].read() == b""
    s3.put_object(Bucket=disk_name, Key="made/x", Body=b"1")
    exec_on(server, disk_name, "mkdir -p empty/inner full && touch full/f && test -d made")
    assert keys_of(s3, disk_name) == ["empty/inner/", "full/f", "made/", "made/x"]
    assert refused(s3.put_object, Bucket=disk_name, Key="made", Body=b"") == (409, "KeyIsDirectory")
    assert refused(s3.put_object, Bucket=disk_name, Key="made/x/y", Body=b"") == (409, "ParentIsObject")
    assert refused(s3.put_object, Bucket=disk_name, Key="made/x/", Body=b"") == (409, "ParentIsObject")
    assert refused(s3.put_object, Bucket=disk_name, Key="made/", Body=b"no") == (400, "InvalidArgument")
    s3.delete_object(Bucket=disk_name, Key="made/x")
    assert "made/" in keys_of(s3, disk_name), "it is an object itself"
    s3.put_object(Bucket=disk_name, Key="made/x", Body=b"1")
    s3.delete_object(Bucket=disk_name, Key="made/")
    assert keys_of(s3, disk_name) == ["empty/inner/", "full/f", "made/x"]
    s3.delete_object(Bucket=disk_name, Key="full/f")
    s3.delete_object(Bucket=disk_name, Key="empty/inner/")
    assert keys_of(s3, disk_name) == ["made/x"], "a prefix without keys is nothing"
    exec_on(server, disk_name, "test ! -e full && test ! -e empty && test -f made/x")


def test_keys_that_no_file_can_have(s3: Any, disk_name: str, server: Running) -> None:
    for key in ("a//b", "/a", "a/../b", "..", ".", "a/.", "a//", "x" * 256, "d/" + "x" * 256):
        assert refused(s3.put_object, Bucket=disk_name, Key=key, Body=b"") == (400, "InvalidArgument"), key
        assert refused(s3.get_object, Bucket=disk_name, Key=key) == (404, "NoSuchKey"), key
        s3.delete_object(Bucket=disk_name, Key=key)
    assert refused(s3.put_object, Bucket=disk_name, Key="k/" * 512 + "k", Body=b"") == (400, "KeyTooLongError")
    assert signed(server, "PUT", f"/{disk_name}/a%00b").status_code == 400
    assert signed(server, "PUT", f"/{disk_name}/a%FFb").status_code == 400
    assert keys_of(s3, disk_name) == []
    good = [
        "x" * 255,
        "k/" * 511 + "kk",
        "tab\tnew\nline",
        "\x01\x7f",
        "ü€😀",
        "e\u0301",
        "-",
        "a b+c%d&e=f?g#h",
        "~'()*!$@:;,",
    ]
    for key in good:
        s3.put_object(Bucket=disk_name, Key=key, Body=key.encode())
    for key in good:
        assert s3.get_object(Bucket=disk_name, Key=key)["Body"].read() == key.encode()
    assert keys_of(s3, disk_name) == sorted(good, key=str.encode)


def test_posix_attributes(server: Running, s3: Any, disk_name: str) -> None:
    headers = {"x-archil-mode": "0750", "x-archil-uid": "7", "x-archil-gid": "8"}
    assert signed(server, "PUT", f"/{disk_name}/p/q/run.sh", b"#!/bin/sh\necho ok\n", headers).status_code == 200
    assert signed(server, "PUT", f"/{disk_name}/dir/", b"", {"x-archil-mode": "700"}).status_code == 200
    done = exec_on(server, disk_name, "stat -c %a p/q/run.sh p/q p dir; p/q/run.sh")
    assert done["stdout"].split() == ["750", "755", "755", "700", "ok"]
    told = s3.head_object(Bucket=disk_name, Key="p/q/run.sh")["ResponseMetadata"]["HTTPHeaders"]
    assert [told[f"x-archil-{name}"] for name in ("mode", "uid", "gid")] == ["0750", "7", "8"]
    for bad in ({"x-archil-mode": "999"}, {"x-archil-mode": "10000"}, {"x-archil-uid": "-1"}, {"x-archil-gid": "a"}):
        assert signed(server, "PUT", f"/{disk_name}/bad", b"", bad).status_code == 400


def test_append(server: Running, s3: Any, disk_name: str) -> None:
    for number in range(3):
        answer = signed(server, "PUT", f"/{disk_name}/log?append=true", b"%d\n" % number, {"x-amz-meta-a": "b"})
        assert answer.status_code == 200
        head = s3.head_object(Bucket=disk_name, Key="log")
        assert head["ETag"] == answer.headers["etag"]
        assert head["Metadata"] == {"a": "b"}
    assert s3.get_object(Bucket=disk_name, Key="log")["Body"].read() == b"0\n1\n2\n"
    assert signed(server, "PUT", f"/{disk_name}/log?append=true", bytes((1 << 20) + 1)).status_code == 400
    assert signed(server, "PUT", f"/{disk_name}/log?append=true", bytes(1 << 20)).status_code == 200
    assert s3.head_object(Bucket=disk_name, Key="log")["ContentLength"] == 6 + (1 << 20)


def test_many_appends_at_once_all_survive(server: Running, s3: Any, disk_name: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(lambda n: signed(server, "PUT", f"/{disk_name}/log?append=true", b"%d\n" % n), range(40))
        )
    assert {answer.status_code for answer in answers} == {200}
    lines = s3.get_object(Bucket=disk_name, Key="log")["Body"].read().split()
    assert sorted(map(int, lines)) == list(range(40))


def test_what_an_exec_wrote(server: Running, s3: Any, disk_name: str) -> None:
    s3.put_object(Bucket=disk_name, Key="in.txt", Body=b"words\n", ContentType="text/plain", Metadata={"k": "v"})
    exec_on(
        server, disk_name,
        "tr a-z A-Z < in.txt > out.txt; ln -s out.txt link; ln -s /etc/passwd evil; chmod 600 in.txt; mkdir e",
    )  # fmt: skip
    out = s3.get_object(Bucket=disk_name, Key="out.txt")
    assert out["Body"].read() == b"WORDS\n"
    assert out["ETag"].endswith('-f"'), "no client may take it for an MD5"
    assert out["ETag"] == s3.head_object(Bucket=disk_name, Key="out.txt")["ETag"]
    kept = s3.head_object(Bucket=disk_name, Key="in.txt")
    assert kept["ETag"] == f'"{hashlib.md5(b"words" + bytes([10])).hexdigest()}"', "only its mode was changed"
    assert (kept["Metadata"], kept["ContentType"]) == ({"k": "v"}, "text/plain")
    evil = s3.get_object(Bucket=disk_name, Key="evil")
    assert (evil["Body"].read(), evil["ContentType"]) == (b"/etc/passwd", "inode/symlink")
    exec_on(server, disk_name, "mv in.txt moved.txt; echo more >> moved.txt; cp moved.txt in.txt; rm link")
    for key in ("moved.txt", "in.txt"):
        head = s3.head_object(Bucket=disk_name, Key=key)
        assert head["ETag"].endswith('-f"')
        assert head["Metadata"] == {}
    assert keys_of(s3, disk_name) == ["e/", "evil", "in.txt", "moved.txt", "out.txt"]
    s3.put_object(Bucket=disk_name, Key="evil", Body=b"a file now")
    exec_on(server, disk_name, "test -f evil && ! test -L evil")


def test_copy(server: Running, s3: Any, disk_name: str) -> None:
    s3.put_object(Bucket=disk_name, Key="a", Body=b"data", ContentType="t/p", Metadata={"m": "1"})
    etag = s3.copy_object(Bucket=disk_name, Key="d/b", CopySource=f"{disk_name}/a")["CopyObjectResult"]["ETag"]
    head = s3.head_object(Bucket=disk_name, Key="d/b")
    assert (head["ETag"], head["ContentType"], head["Metadata"]) == (etag, "t/p", {"m": "1"})
    s3.copy_object(
        Bucket=disk_name, Key="c", CopySource={"Bucket": disk_name, "Key": "a"}, MetadataDirective="REPLACE",
        Metadata={"n": "2"}, ContentType="x/y",
    )  # fmt: skip
    head = s3.head_object(Bucket=disk_name, Key="c")
    assert (head["ETag"], head["ContentType"], head["Metadata"]) == (etag, "x/y", {"n": "2"})
    assert refused(s3.copy_object, Bucket=disk_name, Key="a", CopySource=f"{disk_name}/a") == (400, "InvalidRequest")
    s3.copy_object(Bucket=disk_name, Key="a", CopySource=f"{disk_name}/a", MetadataDirective="REPLACE")
    assert s3.head_object(Bucket=disk_name, Key="a")["Metadata"] == {}
    assert refused(s3.copy_object, Bucket=disk_name, Key="x", CopySource=f"{disk_name}/none") == (404, "NoSuchKey")
    copy: dict[str, Any] = {"Bucket": disk_name, "Key": "x", "CopySource": f"{disk_name}/a"}
    assert refused(s3.copy_object, **copy, CopySourceIfMatch='"no"') == (412, "PreconditionFailed")
    assert refused(s3.copy_object, **copy, CopySourceIfNoneMatch=etag) == (412, "PreconditionFailed")
    s3.copy_object(**copy, CopySourceIfMatch=etag)
    other = disk_name + "-2"
    s3.create_bucket(Bucket=other)
    big = hashlib.shake_256(b"big").digest(5 << 20)
    s3.put_object(Bucket=disk_name, Key="ü big", Body=big)
    s3.copy_object(Bucket=other, Key="big", CopySource={"Bucket": disk_name, "Key": "ü big"})
    s3.delete_object(Bucket=disk_name, Key="ü big")
    assert s3.get_object(Bucket=other, Key="big")["Body"].read() == big
    assert s3.head_object(Bucket=other, Key="big")["ETag"] == f'"{hashlib.md5(big).hexdigest()}"'


def test_branches_and_checkpoints_are_buckets(server: Running, s3: Any, disk_name: str) -> None:
    s3.put_object(Bucket=disk_name, Key="a", Body=b"main")
    rest = httpx.Client(base_url=server.url, headers={"Authorization": server.token}, timeout=60)
    disk_id = rest.get("/api/disks", params={"name": disk_name}).json()["data"][0]["id"]
    taken = rest.post(f"/api/v1/disks/{disk_id}/checkpoints", json={"name": "before"})
    assert taken.status_code < 300, taken.text
    made = rest.post(f"/api/disks/{disk_id}/branches", json={"branch_name": "fix", "from_checkpoint_name": "before"})
    assert made.status_code < 300, made.text
    s3.put_object(Bucket=f"{disk_name}--fix", Key="a", Body=b"fixed")
    assert s3.get_object(Bucket=disk_name, Key="a")["Body"].read() == b"main"
    assert s3.get_object(Bucket=f"{disk_name}--fix", Key="a")["Body"].read() == b"fixed"
    assert signed(server, "GET", f"/{disk_name}%40fix/a").content == b"fixed"
    assert signed(server, "GET", f"/{disk_name}@main/a").content == b"main"
    assert signed(server, "GET", f"/{disk_name}@none/a").status_code == 404
    s3.put_object(Bucket=disk_name, Key="a", Body=b"newer")
    assert s3.get_object(Bucket=f"{disk_name}--before", Key="a")["Body"].read() == b"main"
    assert refused(s3.put_object, Bucket=f"{disk_name}--before", Key="a", Body=b"") == (403, "AccessDenied")
    assert refused(s3.delete_bucket, Bucket=f"{disk_name}--fix") == (405, "MethodNotAllowed")


@pytest.mark.parametrize("algorithm", ["CRC32", "CRC32C", "CRC64NVME", "SHA1", "SHA256"])
def test_checksums(s3: Any, disk_name: str, algorithm: str) -> None:
    field = f"Checksum{algorithm}"
    body = b"abc" * 1000
    value = s3.put_object(Bucket=disk_name, Key="k", Body=body, ChecksumAlgorithm=algorithm)[field]
    head = s3.head_object(Bucket=disk_name, Key="k", ChecksumMode="ENABLED")
    assert (head[field], head["ChecksumType"]) == (value, "FULL_OBJECT")
    assert field not in s3.head_object(Bucket=disk_name, Key="k")
    s3.put_object(Bucket=disk_name, Key="k", Body=body, **{field: value})
    wrong = base64.b64encode(bytes(len(base64.b64decode(value)))).decode()
    assert refused(s3.put_object, Bucket=disk_name, Key="k", Body=body, **{field: wrong}) == (400, "BadDigest")
    assert refused(s3.put_object, Bucket=disk_name, Key="k", Body=body, **{field: "?"}) == (400, "BadDigest")
    listed = s3.list_objects_v2(Bucket=disk_name)["Contents"][0]
    assert listed["ChecksumAlgorithm"] == [algorithm]


def test_digests_of_the_body(server: Running, s3: Any, disk_name: str) -> None:
    put: dict[str, Any] = {"Bucket": disk_name, "Key": "k", "Body": b"body"}
    md5 = base64.b64encode(hashlib.md5(b"body").digest()).decode()
    s3.put_object(**put, ContentMD5=md5)
    wrong = base64.b64encode(bytes(16)).decode()
    assert refused(s3.put_object, **{**put, "Body": b"else"}, ContentMD5=wrong) == (400, "BadDigest")
    assert refused(s3.put_object, **put, ContentMD5="x") == (400, "InvalidDigest")
    answer = signed(server, "PUT", f"/{disk_name}/k", b"other", payload=hashlib.sha256(b"body").hexdigest())
    assert (answer.status_code, "XAmzContentSHA256Mismatch" in answer.text) == (400, True)
    assert s3.get_object(Bucket=disk_name, Key="k")["Body"].read() == b"body", "nothing was changed"


def test_attributes(s3: Any, disk_name: str) -> None:
    s3.put_object(Bucket=disk_name, Key="k", Body=b"abc", ChecksumAlgorithm="CRC32")
    found = s3.get_object_attributes(
        Bucket=disk_name, Key="k", ObjectAttributes=["ETag", "Checksum", "ObjectSize", "StorageClass"]
    )
    assert found["ETag"] == hashlib.md5(b"abc").hexdigest()
    assert found["Checksum"]["ChecksumCRC32"] == base64.b64encode(zlib.crc32(b"abc").to_bytes(4, "big")).decode()
    assert (found["ObjectSize"], found["StorageClass"]) == (3, "STANDARD")


def test_tags(server: Running, s3: Any, disk_name: str) -> None:
    def tags(key: str) -> dict[str, str]:
        return {tag["Key"]: tag["Value"] for tag in s3.get_object_tagging(Bucket=disk_name, Key=key)["TagSet"]}

    s3.put_object(Bucket=disk_name, Key="k", Body=b"x", Tagging="a=1&b=%C3%BC+", Metadata={"m": "1"})
    assert tags("k") == {"a": "1", "b": "ü "}
    head = s3.head_object(Bucket=disk_name, Key="k")
    assert (head["TagCount"], head["Metadata"]) == (2, {"m": "1"})
    s3.copy_object(Bucket=disk_name, Key="copy", CopySource=f"{disk_name}/k", MetadataDirective="REPLACE")
    assert (tags("copy"), s3.head_object(Bucket=disk_name, Key="copy")["Metadata"]) == ({"a": "1", "b": "ü "}, {})
    s3.put_object_tagging(Bucket=disk_name, Key="k", Tagging={"TagSet": [{"Key": "c", "Value": ""}]})
    assert tags("k") == {"c": ""}
    after = s3.head_object(Bucket=disk_name, Key="k")
    assert (after["LastModified"], after["ETag"], after["Metadata"]) == (head["LastModified"], head["ETag"], {"m": "1"})
    exec_on(server, disk_name, "echo > by-exec")
    s3.put_object_tagging(Bucket=disk_name, Key="by-exec", Tagging={"TagSet": [{"Key": "c", "Value": "d"}]})
    assert tags("by-exec") == {"c": "d"}
    s3.delete_object_tagging(Bucket=disk_name, Key="k")
    assert tags("k") == {}
    for bad in ([{"Key": "k" * 129, "Value": ""}], [{"Key": "a", "Value": "v" * 257}], [{"Key": "a", "Value": ""}] * 2):
        assert refused(s3.put_object_tagging, Bucket=disk_name, Key="k", Tagging={"TagSet": bad}) == (400, "InvalidTag")
    assert refused(s3.get_object_tagging, Bucket=disk_name, Key="no") == (404, "NoSuchKey")


def test_what_is_not_there_says_so(s3: Any, disk_name: str) -> None:
    s3.put_object(Bucket=disk_name, Key="k", Body=b"")
    assert "Status" not in s3.get_bucket_versioning(Bucket=disk_name)
    assert s3.get_bucket_acl(Bucket=disk_name)["Grants"][0]["Permission"] == "FULL_CONTROL"
    assert s3.get_object_acl(Bucket=disk_name, Key="k")["Owner"]["ID"] == "fanout"
    assert refused(s3.get_bucket_policy, Bucket=disk_name) == (404, "NoSuchBucketPolicy")
    assert refused(s3.get_bucket_lifecycle_configuration, Bucket=disk_name) == (404, "NoSuchLifecycleConfiguration")
    asked = {"Bucket": disk_name, "VersioningConfiguration": {"Status": "Enabled"}}
    assert refused(s3.put_bucket_versioning, **asked) == (501, "NotImplemented")
    assert refused(s3.put_object, Bucket=disk_name, Key="k", ServerSideEncryption="AES256") == (501, "NotImplemented")
    assert refused(s3.put_object, Bucket=disk_name, Key="k", ACL="public-read")[0] == 400
    assert refused(s3.get_object, Bucket=disk_name, Key="k", VersionId="abc") == (404, "NoSuchVersion")


def peak_bytes(server: Running) -> int:
    """Return the most memory the server's process ever had in use, since `reset_peak`."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]


def reset_peak(server: Running) -> None:
    Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")


def test_large_files_take_little_memory(server: Running, s3: Any, disk_name: str) -> None:
    exec_on(server, disk_name, "truncate -s 6G big; printf end >> big")
    size = (6 << 30) + 3
    tail = s3.get_object(Bucket=disk_name, Key="big", Range="bytes=-5")
    assert (tail["Body"].read(), tail["ContentRange"]) == (b"\0\0end", f"bytes {size - 5}-{size - 1}/{size}")
    reset_peak(server)
    before = peak_bytes(server)
    middle = s3.get_object(Bucket=disk_name, Key="big", Range=f"bytes=1000-{1000 + (512 << 20) - 1}")
    total = sum(len(chunk) for chunk in middle["Body"].iter_chunks(1 << 20))
    assert total == 512 << 20
    s3.put_object(Bucket=disk_name, Key="stored", Body=hashlib.shake_256(b"large").digest(96 << 20))
    got = s3.get_object(Bucket=disk_name, Key="stored")
    assert sum(len(chunk) for chunk in got["Body"].iter_chunks(1 << 20)) == 96 << 20
    assert peak_bytes(server) - before < 160 << 20


def test_a_client_that_goes_away(server: Running, s3: Any, disk_name: str) -> None:
    exec_on(server, disk_name, "truncate -s 6G big")
    url = f"{server.s3_url}/{disk_name}/big"
    with httpx.stream("GET", url, headers={"Authorization": server.token}) as answer:
        next(answer.iter_raw(1 << 20))
    with socket.create_connection(("127.0.0.1", int(server.s3_url.rpartition(":")[2]))) as plain:
        head = [f"PUT /{disk_name}/half HTTP/1.1", "Host: x", f"Authorization: {server.token}", "Content-Length: 1000"]
        plain.sendall("\r\n".join([*head, "", "x" * 500]).encode())
    assert keys_of(s3, disk_name) == ["big"]
