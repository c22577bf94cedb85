"""Multipart uploads: S3's rules, two servers on one upload, and what a collection leaves alone."""

from __future__ import annotations

import base64
import hashlib
import io
import zlib
from pathlib import Path
from typing import Any

import pytest
from boto3.s3.transfer import TransferConfig
from botocore.exceptions import ClientError

from tests.support.s3 import code_of, disk_id, exec_on, new_bucket, s3_client, signed
from tests.support.serving import Running, running_server

MIB = 1 << 20


def bytes_of(seed: str, size: int) -> bytes:
    return hashlib.shake_256(seed.encode()).digest(size)


FIRST, SECOND, LAST = bytes_of("1", 5 * MIB), bytes_of("2", 5 * MIB + 3), bytes_of("3", 1000)


@pytest.fixture
def s3(server: Running, disk_name: str) -> Any:
    return new_bucket(server, disk_name)


def refused(call: Any, **arguments: Any) -> tuple[int, str]:
    with pytest.raises(ClientError) as caught:
        call(**arguments)
    return code_of(caught.value)


def upload(s3: Any, upload: dict[str, Any], number: int, body: bytes) -> dict[str, Any]:
    part = s3.upload_part(**upload, PartNumber=number, Body=body)
    assert part["ETag"] == f'"{hashlib.md5(body).hexdigest()}"'
    return {"PartNumber": number, "ETag": part["ETag"]}


def begin(s3: Any, bucket: str, key: str, **options: Any) -> dict[str, Any]:
    made = s3.create_multipart_upload(Bucket=bucket, Key=key, **options)
    return {"Bucket": bucket, "Key": key, "UploadId": made["UploadId"]}


def etag_of(*parts: bytes) -> str:
    together = hashlib.md5(b"".join(hashlib.md5(part).digest() for part in parts)).hexdigest()
    return f'"{together}-{len(parts)}"'


def test_an_upload(server: Running, s3: Any, disk_name: str) -> None:
    up = begin(s3, disk_name, "d/big", ContentType="a/b", Metadata={"k": "v"})
    assert s3.list_objects_v2(Bucket=disk_name)["KeyCount"] == 0
    parts = [
        upload(s3, up, 7, LAST),
        upload(s3, up, 1, b"replaced"),
        upload(s3, up, 1, FIRST),
        upload(s3, up, 3, SECOND),
    ]
    listed = s3.list_parts(**up)
    assert [(part["PartNumber"], part["Size"]) for part in listed["Parts"]] == [
        (1, len(FIRST)), (3, len(SECOND)), (7, len(LAST)),
    ]  # fmt: skip
    one = s3.list_parts(**up, MaxParts=1, PartNumberMarker=1)
    assert ([part["PartNumber"] for part in one["Parts"]], one["IsTruncated"]) == ([3], True)
    uploads = s3.list_multipart_uploads(Bucket=disk_name)["Uploads"]
    assert [(each["Key"], each["UploadId"]) for each in uploads] == [("d/big", up["UploadId"])]
    wanted = {"Parts": [parts[2], parts[3], parts[0]]}
    done = s3.complete_multipart_upload(**up, MultipartUpload=wanted)
    assert done["ETag"] == etag_of(FIRST, SECOND, LAST)
    body = FIRST + SECOND + LAST
    got = s3.get_object(Bucket=disk_name, Key="d/big")
    assert (got["Body"].read() == body, got["ETag"], got["ContentType"]) == (True, done["ETag"], "a/b")
    assert got["Metadata"] == {"k": "v"}
    part = s3.get_object(Bucket=disk_name, Key="d/big", PartNumber=2)
    assert (part["Body"].read() == SECOND, part["PartsCount"]) == (True, 3)
    assert refused(s3.get_object, Bucket=disk_name, Key="d/big", PartNumber=4) == (416, "InvalidPartNumber")
    assert "Uploads" not in s3.list_multipart_uploads(Bucket=disk_name)
    again = s3.complete_multipart_upload(**up, MultipartUpload=wanted)
    assert again["ETag"] == done["ETag"], "the first answer may have been lost"
    assert refused(s3.upload_part, **up, PartNumber=1, Body=b"") == (404, "NoSuchUpload")
    told = exec_on(server, disk_name, "md5sum < d/big; chmod 700 d/big")["stdout"]
    assert told.split()[0] == hashlib.md5(body).hexdigest()
    head = s3.head_object(Bucket=disk_name, Key="d/big")
    assert head["ETag"] == done["ETag"], "its bytes are the same, however they are cut into runs"
    assert head["ResponseMetadata"]["HTTPHeaders"]["x-archil-mode"] == "0700"


def test_the_rules(s3: Any, disk_name: str) -> None:
    up = begin(s3, disk_name, "k")
    parts = [upload(s3, up, 1, b"small"), upload(s3, up, 2, b"last")]
    complete: dict[str, Any] = {**up}
    for wanted, error in (
        ([], "MalformedXML"),
        ([parts[1], parts[0]], "InvalidPartOrder"),
        ([parts[0], parts[0]], "InvalidPartOrder"),
        ([parts[0], {"PartNumber": 3, "ETag": '"x"'}], "InvalidPart"),
        ([{**parts[0], "ETag": parts[1]["ETag"]}], "InvalidPart"),
        (parts, "EntityTooSmall"),
    ):
        assert refused(s3.complete_multipart_upload, **complete, MultipartUpload={"Parts": wanted}) == (400, error)
    for number in (0, 10_001):
        assert refused(s3.upload_part, **up, PartNumber=number, Body=b"") == (400, "InvalidArgument")
    for unknown in ("x", "0" * 32, "../../disk"):
        asked = {**up, "UploadId": unknown}
        assert refused(s3.upload_part, **asked, PartNumber=1, Body=b"") == (404, "NoSuchUpload")
        assert refused(s3.abort_multipart_upload, **asked) == (404, "NoSuchUpload")
        assert refused(s3.list_parts, **asked) == (404, "NoSuchUpload")
    assert refused(s3.list_parts, **{**up, "Key": "other"}) == (404, "NoSuchUpload")
    s3.abort_multipart_upload(**up)
    assert refused(s3.abort_multipart_upload, **up) == (404, "NoSuchUpload")
    assert refused(s3.complete_multipart_upload, **up, MultipartUpload={"Parts": parts[:1]}) == (404, "NoSuchUpload")
    assert s3.list_objects_v2(Bucket=disk_name)["KeyCount"] == 0


def test_conditions_hold_when_it_is_completed(s3: Any, disk_name: str) -> None:
    up = begin(s3, disk_name, "k")
    parts = {"Parts": [upload(s3, up, 1, b"mine")]}
    etag = s3.put_object(Bucket=disk_name, Key="k", Body=b"theirs")["ETag"]
    complete: dict[str, Any] = {**up, "MultipartUpload": parts}
    assert refused(s3.complete_multipart_upload, **complete, IfNoneMatch="*") == (412, "PreconditionFailed")
    assert refused(s3.complete_multipart_upload, **complete, IfMatch='"no"') == (412, "PreconditionFailed")
    assert s3.get_object(Bucket=disk_name, Key="k")["Body"].read() == b"theirs"
    s3.complete_multipart_upload(**complete, IfMatch=etag)
    assert s3.get_object(Bucket=disk_name, Key="k")["Body"].read() == b"mine"


def test_begun_here_completed_there(server: Running, s3: Any, disk_name: str, tmp_path: Path) -> None:
    with running_server(tmp_path, store=server.store, token=server.token) as second:
        there = s3_client(second)
        up = begin(s3, disk_name, "k")
        parts = [upload(there, up, 1, FIRST), upload(s3, up, 2, SECOND)]
        assert [part["PartNumber"] for part in s3.list_parts(**up)["Parts"]] == [1, 2]
        done = there.complete_multipart_upload(**up, MultipartUpload={"Parts": parts})
        assert s3.get_object(Bucket=disk_name, Key="k")["Body"].read() == FIRST + SECOND
        assert s3.complete_multipart_upload(**up, MultipartUpload={"Parts": parts})["ETag"] == done["ETag"]
        there.put_object(Bucket=disk_name, Key="k", Body=b"from there")
        assert s3.get_object(Bucket=disk_name, Key="k")["Body"].read() == b"from there"
        there.delete_object(Bucket=disk_name, Key="k")
        there.delete_bucket(Bucket=disk_name)
        assert refused(s3.put_object, Bucket=disk_name, Key="k", Body=b"") == (404, "NoSuchBucket")
        there.create_bucket(Bucket=disk_name)
        assert s3.list_objects_v2(Bucket=disk_name)["KeyCount"] == 0
        there.delete_bucket(Bucket=disk_name)
        there.create_bucket(Bucket=disk_name)
        s3.put_object(Bucket=disk_name, Key="k", Body=b"anew")  # told 503 at first, boto3 sends it again
        assert there.get_object(Bucket=disk_name, Key="k")["Body"].read() == b"anew"


def test_parts_that_are_copied(s3: Any, disk_name: str) -> None:
    s3.put_object(Bucket=disk_name, Key="source", Body=FIRST + SECOND)
    s3.put_object(Bucket=disk_name, Key="little", Body=b"inline")
    up = begin(s3, disk_name, "copy")
    source = {"Bucket": disk_name, "Key": "source"}
    first = s3.upload_part_copy(**up, PartNumber=1, CopySource=source, CopySourceRange=f"bytes=3-{5 * MIB + 9}")
    second = s3.upload_part_copy(**up, PartNumber=2, CopySource={"Bucket": disk_name, "Key": "little"})
    bad: dict[str, Any] = {**up, "PartNumber": 3, "CopySource": source}
    assert refused(s3.upload_part_copy, **bad, CopySourceRange="bytes=0-99999999") == (416, "InvalidRange")
    assert refused(s3.upload_part_copy, **bad, CopySourceRange="bytes=-5") == (400, "InvalidArgument")
    assert refused(s3.upload_part_copy, **bad, CopySourceIfMatch='"no"') == (412, "PreconditionFailed")
    s3.delete_object(Bucket=disk_name, Key="source")
    s3.delete_object(Bucket=disk_name, Key="little")
    parts = [{"PartNumber": n, "ETag": part["CopyPartResult"]["ETag"]} for n, part in enumerate((first, second), 1)]
    s3.complete_multipart_upload(**up, MultipartUpload={"Parts": parts})
    wanted = (FIRST + SECOND)[3 : 5 * MIB + 10] + b"inline"
    assert s3.get_object(Bucket=disk_name, Key="copy")["Body"].read() == wanted


@pytest.mark.parametrize(
    ("algorithm", "kind"), [("CRC32", "COMPOSITE"), ("CRC32", "FULL_OBJECT"), ("CRC64NVME", "FULL_OBJECT"),
                            ("CRC32C", "FULL_OBJECT"), ("SHA256", "COMPOSITE")]
)  # fmt: skip
def test_checksums(s3: Any, disk_name: str, algorithm: str, kind: str) -> None:
    field = f"Checksum{algorithm}"
    up = begin(s3, disk_name, "k", ChecksumAlgorithm=algorithm, ChecksumType=kind)
    parts = []
    for number, body in ((1, FIRST), (2, LAST)):
        part = s3.upload_part(**up, PartNumber=number, Body=body, ChecksumAlgorithm=algorithm)
        parts.append({"PartNumber": number, "ETag": part["ETag"], field: part[field]})
    bad = [{**parts[0], field: parts[1][field]}, parts[1]]
    assert refused(s3.complete_multipart_upload, **up, MultipartUpload={"Parts": bad}) == (400, "InvalidPart")
    done = s3.complete_multipart_upload(**up, MultipartUpload={"Parts": parts}, ChecksumType=kind)
    assert done["ChecksumType"] == kind
    assert done[field].endswith("-2") == (kind == "COMPOSITE")
    again = s3.complete_multipart_upload(**up, MultipartUpload={"Parts": parts}, ChecksumType=kind)
    assert (again[field], again["ETag"]) == (done[field], done["ETag"])
    if algorithm == "CRC32" and kind == "FULL_OBJECT":
        assert done[field] == base64.b64encode(zlib.crc32(FIRST + LAST).to_bytes(4, "big")).decode()
    head = s3.head_object(Bucket=disk_name, Key="k", ChecksumMode="ENABLED")
    assert (head[field], head["ChecksumType"]) == (done[field], kind)
    got = s3.get_object(Bucket=disk_name, Key="k")
    assert got["Body"].read() == FIRST + LAST  # botocore verifies what it can


def test_the_transfer_manager(s3: Any, disk_name: str) -> None:
    body = bytes_of("transfer", 23 * MIB)
    config = TransferConfig(multipart_threshold=5 * MIB, multipart_chunksize=5 * MIB, max_concurrency=4)
    s3.upload_fileobj(io.BytesIO(body), disk_name, "k", Config=config)
    s3.copy({"Bucket": disk_name, "Key": "k"}, disk_name, "copy", Config=config)
    for key in ("k", "copy"):
        target = io.BytesIO()
        s3.download_fileobj(disk_name, key, target, Config=config)
        assert target.getvalue() == body


def test_listing_uploads(s3: Any, disk_name: str) -> None:
    ups = [begin(s3, disk_name, key) for key in ("b", "a/x", "a/y", "a/x", "c")]
    found = s3.list_multipart_uploads(Bucket=disk_name)["Uploads"]
    assert [each["Key"] for each in found] == ["a/x", "a/x", "a/y", "b", "c"]
    one = s3.list_multipart_uploads(Bucket=disk_name, Delimiter="/")
    assert [each["Key"] for each in one["Uploads"]] == ["b", "c"]
    assert [each["Prefix"] for each in one["CommonPrefixes"]] == ["a/"]
    got: list[tuple[str, str]] = []
    markers: dict[str, str] = {}
    while True:
        page = s3.list_multipart_uploads(Bucket=disk_name, MaxUploads=2, **markers)
        got += [(each["Key"], each["UploadId"]) for each in page["Uploads"]]
        if not page["IsTruncated"]:
            break
        markers = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}
    assert sorted(got) == sorted((up["Key"], up["UploadId"]) for up in ups)


def test_a_collection_keeps_what_is_open(server: Running, s3: Any, disk_name: str) -> None:
    up = begin(s3, disk_name, "k")
    parts = [upload(s3, up, 1, FIRST)]
    url = f"{server.url}/api/v1/disks/{disk_id(server, disk_name)}/gc"
    body = {"graceS": 0, "keepHistoryS": 0}
    rest = server.client.post(url, headers={"Authorization": server.token}, json=body)
    assert rest.status_code == 200, rest.text
    s3.complete_multipart_upload(**up, MultipartUpload={"Parts": parts})
    assert s3.get_object(Bucket=disk_name, Key="k")["Body"].read() == FIRST


def test_malformed_completions(server: Running, s3: Any, disk_name: str) -> None:
    up = begin(s3, disk_name, "k")
    upload(s3, up, 1, b"x")
    bomb = b'<!DOCTYPE a [<!ENTITY b "bbbbbbbb">]><CompleteMultipartUpload>&b;</CompleteMultipartUpload>'
    for body in (b"", b"<", b"<a/>", bomb, b"<CompleteMultipartUpload>" * 100, b"\xff\xfe"):
        answer = signed(server, "POST", f"/{disk_name}/k?uploadId={up['UploadId']}", body)
        assert (answer.status_code, "<Code>MalformedXML</Code>" in answer.text) == (400, True), body
