"""Listings through boto3: every key once, in byte order, whatever the page size and delimiter."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.support.s3 import code_of, disk_id, exec_on, make_key, new_bucket, s3_client, signed
from tests.support.serving import Running


@pytest.fixture(scope="module")
def many(server: Running) -> tuple[Any, str]:
    """A bucket of 2,500 keys, and a few that sort around a slash."""
    name = "t-listing-many"
    s3 = new_bucket(server, name)
    command = "mkdir d e; seq -f 'd/%04.0f' 1 1250 | xargs touch; seq -f 'e/%04.0f' 1 1244 | xargs touch"
    exec_on(server, name, f"{command}; mkdir a; touch a/b a-b a.b 'a b' b0 b; touch z")
    return s3, name


KEYS = sorted(
    [
        *(f"d/{number:04}" for number in range(1, 1251)),
        *(f"e/{number:04}" for number in range(1, 1245)),
        "a/b", "a-b", "a.b", "a b", "b0", "b", "z",
    ],
    key=str.encode,
)  # fmt: skip


def pages(s3: Any, operation: str, **arguments: Any) -> list[dict[str, Any]]:
    return list(s3.get_paginator(operation).paginate(**arguments))


@pytest.mark.parametrize("size", [1, 7, 999, 1000, 1001])
@pytest.mark.parametrize("operation", ["list_objects", "list_objects_v2"])
def test_every_key_once(many: tuple[Any, str], operation: str, size: int) -> None:
    s3, name = many
    if size == 1:
        found = pages(s3, operation, Bucket=name, MaxKeys=1, Prefix="a")
        wanted = [key for key in KEYS if key.startswith("a")]
    elif size == 7:
        found = pages(s3, operation, Bucket=name, MaxKeys=7, Prefix="d/00")
        wanted = [key for key in KEYS if key.startswith("d/00")]
    else:
        found, wanted = pages(s3, operation, Bucket=name, MaxKeys=size), KEYS
    assert [item["Key"] for page in found for item in page.get("Contents", [])] == wanted
    assert all(len(page.get("Contents", [])) == min(size, 1000) for page in found[:-1])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 999, 1000, 1001])
@pytest.mark.parametrize("operation", ["list_objects", "list_objects_v2"])
def test_with_a_delimiter(many: tuple[Any, str], operation: str, size: int) -> None:
    s3, name = many
    found = pages(s3, operation, Bucket=name, MaxKeys=size, Delimiter="/")
    assert [item["Key"] for page in found for item in page.get("Contents", [])] == ["a b", "a-b", "a.b", "b", "b0", "z"]
    assert [item["Prefix"] for page in found for item in page.get("CommonPrefixes", [])] == ["a/", "d/", "e/"]
    for page in found:
        shown = [item["Key"] for item in page.get("Contents", [])]
        shown += [item["Prefix"] for item in page.get("CommonPrefixes", [])]
        assert len(shown) <= size
    inside = pages(s3, operation, Bucket=name, MaxKeys=size if size > 5 else 500, Delimiter="/", Prefix="d/")
    assert sum(len(page["Contents"]) for page in inside) == 1250
    odd = pages(s3, operation, Bucket=name, MaxKeys=size, Delimiter="b", Prefix="a")
    assert [item["Prefix"] for page in odd for item in page.get("CommonPrefixes", [])] == ["a b", "a-b", "a.b", "a/b"]


def test_starting_somewhere(many: tuple[Any, str]) -> None:
    s3, name = many
    found = s3.list_objects_v2(Bucket=name, StartAfter="d/1249", MaxKeys=3)
    assert [item["Key"] for item in found["Contents"]] == ["d/1250", "e/0001", "e/0002"]
    assert found["StartAfter"] == "d/1249"
    found = s3.list_objects_v2(Bucket=name, StartAfter="a-", MaxKeys=3)
    assert [item["Key"] for item in found["Contents"]] == ["a-b", "a.b", "a/b"]
    found = s3.list_objects_v2(Bucket=name, StartAfter="a/b", Delimiter="/", MaxKeys=2)
    assert [item["Key"] for item in found["Contents"]] == ["b", "b0"], "what is in a/ is not after a/b"
    assert s3.list_objects_v2(Bucket=name, StartAfter="zz")["KeyCount"] == 0
    assert s3.list_objects_v2(Bucket=name, Prefix="none/")["KeyCount"] == 0
    assert s3.list_objects_v2(Bucket=name, MaxKeys=0)["IsTruncated"] is False
    owner = s3.list_objects_v2(Bucket=name, FetchOwner=True, MaxKeys=1)["Contents"][0]["Owner"]
    assert owner == {"ID": "fanout", "DisplayName": "fanout"}


def test_versions_are_all_null(many: tuple[Any, str]) -> None:
    s3, name = many
    found = pages(s3, "list_object_versions", Bucket=name)
    assert [item["Key"] for page in found for item in page["Versions"]] == KEYS
    assert {item["VersionId"] for page in found for item in page["Versions"]} == {"null"}


@pytest.mark.parametrize(
    "query", ["max-keys=-1", "max-keys=x", "encoding-type=xml", "list-type=2&continuation-token=%3F"]
)
def test_bad_arguments(server: Running, many: tuple[Any, str], query: str) -> None:
    answer = signed(server, "GET", f"/{many[1]}?{query}")
    assert (answer.status_code, "<Code>InvalidArgument</Code>" in answer.text) == (400, True)


def test_names_that_xml_cannot_hold(server: Running, disk_name: str) -> None:
    s3 = new_bucket(server, disk_name)
    exec_on(server, disk_name, r"touch $'bad\xff' $'bell\a' 'a<b>&c'")
    assert [item["Key"] for item in s3.list_objects_v2(Bucket=disk_name)["Contents"]] == ["a<b>&c", "bad�", "bell\a"]
    encoded = signed(server, "GET", f"/{disk_name}?list-type=2&encoding-type=url").text
    assert "<Key>bad%FF</Key>" in encoded
    plain = signed(server, "GET", f"/{disk_name}?list-type=2")
    assert plain.text.count("�") == 2
    assert signed(server, "GET", f"/{disk_name}/bad%FF").status_code == 200
    assert signed(server, "DELETE", f"/{disk_name}/bad%FF").status_code == 204
    assert s3.list_objects_v2(Bucket=disk_name)["KeyCount"] == 2


def test_keys_see_what_they_may(server: Running, disk_name: str) -> None:
    s3 = new_bucket(server, disk_name)
    s3.put_object(Bucket=disk_name, Key="k", Body=b"")
    access_key, secret_key, _ = make_key(server, "read", [disk_id(server, disk_name)])
    reader = s3_client(server, access_key=access_key, secret_key=secret_key)
    assert [bucket["Name"] for bucket in reader.list_buckets()["Buckets"]] == [disk_name]
    assert reader.list_objects_v2(Bucket=disk_name)["KeyCount"] == 1
    for call in (
        lambda: reader.put_object(Bucket=disk_name, Key="k", Body=b"1"),
        lambda: reader.delete_object(Bucket=disk_name, Key="k"),
        lambda: reader.create_bucket(Bucket=disk_name + "-2"),
        lambda: reader.delete_bucket(Bucket=disk_name),
        lambda: reader.list_objects_v2(Bucket="t-listing-many"),
        lambda: reader.list_objects_v2(Bucket="there-is-no-such"),
        lambda: reader.copy_object(Bucket=disk_name, Key="x", CopySource="t-listing-many/z"),
    ):
        with pytest.raises(ClientError) as caught:
            call()
        assert code_of(caught.value) == (403, "AccessDenied")
