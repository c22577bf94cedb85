"""The archil client's objects, workspaces and agent tools, called as its adapters call them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import anyio
import archil
import pytest
from archil import ArchilS3Error, ExecMountSpec

from tests.support.serving import Running


@pytest.fixture(scope="module", params=["own port", "one port"])
def client(request: pytest.FixtureRequest, server: Running) -> Iterator[archil.Archil]:
    s3 = server.s3_url if request.param == "own port" else None  # None: the client takes the host of the API
    made = archil.Archil(api_key=server.token, region="local", base_url=server.url, s3_base_url=s3, timeout=120)
    yield made
    made.close()


@pytest.fixture
def disk(client: archil.Archil, disk_name: str) -> Any:
    return client.disks.create(name=disk_name).disk


def tools_of(fs: Any) -> dict[str, Any]:
    return {tool.name: tool for tool in fs.agent_tools().tools}


def use(tools: dict[str, Any], name: str, **arguments: object) -> str:
    """Call a tool as the adapter of the OpenAI agents does: with JSON text that a model wrote."""
    parsed = json.loads(json.dumps(arguments))

    async def call() -> str:
        return str(await tools[name].invoke(parsed))

    return anyio.run(call)


def test_the_six_tools_on_one_disk(disk: Any) -> None:
    tools = tools_of(disk)
    assert use(tools, "write_file", path="/src/a.py", content="import os\nTODO = 1\n") == "Wrote 19 bytes to /src/a.py."
    assert use(tools, "write_file", path="/mnt/empty", content="") == "Wrote 0 bytes to /mnt/empty."
    assert use(tools, "read_file", path="src/a.py") == "import os\nTODO = 1\n"
    assert use(tools, "read_file", path="/empty") == "/empty is empty."
    assert use(tools, "read_file", path="/nope") == "Error: file not found: /nope"
    told = use(tools, "run_bash", command="cat src/a.py; echo 2 > made; touch empty; exit 4")
    assert told == "exit code: 4\nstdout:\nimport os\nTODO = 1\n"
    assert use(tools, "list_files") == "Contents of /:\ndir   /src/\nfile  /empty  (0 bytes)\nfile  /made  (2 bytes)"
    assert "file  /src/a.py  (19 bytes)" in use(tools, "list_files", path="/", recursive="true")
    assert use(tools, "list_files", path="/none") == "/none is empty or does not exist."
    assert use(tools, "grep", pattern="TO(DO|DAY)") == "/src/a.py:2: TODO = 1"
    assert use(tools, "grep", pattern="nothing", path="/src").startswith("No matches for /nothing/ under /src (1 files")
    assert use(tools, "grep", pattern="[oO]", max_results="1").endswith("… more matches exist; showing the first 1.")
    assert "Error" in use(tools, "grep", pattern="(")
    assert use(tools, "delete_file", path="/made") == "Deleted /made."
    assert use(tools, "delete_file", path="/made") == "Deleted /made."
    assert use(tools, "read_file", path="/made") == "Error: file not found: /made"


def test_grep(disk: Any) -> None:
    disk.exec("mkdir -p a/b; echo one > a/1; echo two > a/b/2; echo onetwo > top; printf 'b\\0one\\n' > a/binary")
    deep = disk.grep(directory="", pattern="one|two", recursive=True)
    assert [(match.file, match.line, match.text) for match in deep.matches] == [
        ("a/1", 1, "one"),
        ("a/b/2", 1, "two"),
        ("top", 1, "onetwo"),
    ]
    assert deep.stopped_reason == "completed"
    assert deep.files_scanned >= 3
    flat = disk.grep(directory="a", pattern="one|two")
    assert [match.file for match in flat.matches] == ["a/1"]
    few = disk.grep(directory="/", pattern="o", recursive=True, max_results=2)
    assert (len(few.matches), few.stopped_reason) == (2, "max_results")
    for bad in ({"pattern": "("}, {"directory": "none"}, {"max_results": 0}, {"concurrency": 101}):
        with pytest.raises(archil.ArchilApiError) as caught:
            disk.grep(**{"directory": "", "pattern": "x", **bad})
        assert caught.value.status in (400, 404)


def test_a_workspace_of_several_disks(client: archil.Archil) -> None:
    made = {name: client.disks.create(name=f"{name}-{uuid.uuid4().hex[:8]}").disk for name in ("data", "code")}
    made["code"].put_object("part/x.txt", "inside\n")
    workspace = client.workspace(
        {"data": made["data"], "code": ExecMountSpec(made["code"], subdirectory="part", conditional=True)}
    )
    tools = tools_of(workspace)
    use(tools, "write_file", path="/data/in.txt", content="hello inside\n")
    assert use(tools, "read_file", path="/mnt/archil/code/x.txt") == "inside\n"
    assert use(tools, "run_bash", command="cat data/in.txt code/x.txt > code/y.txt; pwd").endswith("/mnt/archil\n")
    assert use(tools, "grep", pattern="^hello") == "/data/in.txt:1: hello inside\n/code/y.txt:1: hello inside"
    assert use(tools, "list_files", path="/", recursive=True).count("file  ") == 3
    assert made["code"].get_object("part/y.txt") == b"hello inside\ninside\n"


def test_objects(disk: Any) -> None:
    disk.put_object("a/b.txt", b"123", mode=0o640)
    assert disk.get_object("a/b.txt") == b"123"
    head = disk.head_object("a/b.txt")
    assert head.size == 3
    assert disk.object_exists("a/b.txt")
    assert disk.head_object("a/none") is None
    with pytest.raises(ArchilS3Error) as caught:
        disk.get_object("a/none")
    assert (caught.value.status, caught.value.code) == (404, "NoSuchKey")
    assert disk.exec("stat -c %a a/b.txt; cat a/b.txt").stdout == "640\n123"
    disk.append_object("a/b.txt", b"456")
    disk.append_object("a/new", b"7")
    assert disk.exec("cat a/b.txt a/new").stdout == "1234567"
    assert disk.delete_objects(["a/b.txt", "a/none"]).errors == []
    assert not disk.object_exists("a/b.txt")
    disk.delete_object("a/new")
    disk.delete_object("a/new")


def test_listings_in_pages(disk: Any) -> None:
    disk.exec("mkdir -p l/sub; cd l; for n in $(seq 1 1203); do : > f$n; done; : > sub/x; : > 'ü &<>'")
    flat = [item.key for page in disk.list_objects_pages(prefix="l/") for item in page.objects]
    assert len(flat) == 1204
    assert flat == sorted(flat, key=str.encode)
    first = disk.list_objects("l/")
    assert first.common_prefixes == ["l/sub/"] or first.is_truncated
    deep = [item.key for page in disk.list_objects_pages(prefix="l/", recursive=True) for item in page.objects]
    assert len(deep) == 1205


def test_large_objects_in_parts(disk: Any) -> None:
    data = bytes(range(256)) * 4096 * 12  # 12 MiB
    disk.put_object("big", data, multipart_threshold=6 << 20, part_size=5 << 20)
    assert disk.get_object("big") == data
    upload = disk.multipart.create("by hand", mode=0o600)
    assert [each.key for each in disk.multipart.list_uploads().uploads] == ["by hand"]
    parts = [disk.multipart.upload_part("by hand", upload.upload_id, n, data[: 5 << 20]) for n in (1, 2)]
    assert [part.part_number for part in disk.multipart.list_parts("by hand", upload.upload_id).parts] == [1, 2]
    disk.multipart.complete("by hand", upload.upload_id, parts)
    assert disk.exec("stat -c '%a %s' 'by hand'").stdout == f"600 {10 << 20}\n"
    other = disk.multipart.create("gone")
    disk.multipart.abort("gone", other.upload_id)
    disk.multipart.abort("gone", other.upload_id)
    assert disk.multipart.list_uploads().uploads == []
    assert not disk.object_exists("gone")
