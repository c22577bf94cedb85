"""Clients that nobody here wrote, unchanged: s3fs, the AWS CLI, rclone and s3cmd, and what they do all day."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.s3 import exec_on, new_bucket
from tests.support.serving import Running

Tool = Callable[..., str]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small tree with what trips clients up: odd names, an empty file, one larger than a part."""
    root = tmp_path / "tree"
    for name, body in {
        "a.txt": b"one\n", "a/b.txt": b"two\n", "a-b.txt": b"three\n", "sub dir/ü+&%.bin": bytes(range(256)),
        "deep/er/and/deeper": b"4", "empty": b"", "big.bin": hashlib.shake_256(b"big").digest(17 << 20),
    }.items():  # fmt: skip
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    return root


def contents(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*")
        if path.is_file()
    }


def tool(name: str, *first: str, home: Path, **environ: str) -> Tool:
    """Return a function that runs a program, which must succeed unless told otherwise; skips where it is not there."""
    found = _newest(name)
    if found is None:
        pytest.skip(f"{name} is not on PATH")

    def run(*arguments: str | Path, check: bool = True) -> str:
        done = subprocess.run(
            [found, *first, *map(str, arguments)],
            capture_output=True, text=True, timeout=300,
            env={"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", **environ},
        )  # fmt: skip
        assert (done.returncode == 0) == check, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


def _newest(name: str) -> str | None:
    """Return the program, of several on PATH the one of the highest version: an old AWS CLI may be in front."""
    found = {shutil.which(name, path=directory) for directory in os.environ["PATH"].split(os.pathsep)} - {None}
    return max((str(each) for each in found), key=_version, default=None) if len(found) > 1 else shutil.which(name)


def _version(program: str) -> str:
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout


@pytest.fixture
def aws(server: Running, tmp_path: Path) -> Tool:
    return tool(
        "aws", "--endpoint-url", server.s3_url, home=tmp_path, AWS_PAGER="", AWS_ACCESS_KEY_ID=server.access_key,
        AWS_SECRET_ACCESS_KEY=server.secret_key, AWS_DEFAULT_REGION="us-east-1", AWS_EC2_METADATA_DISABLED="true",
    )  # fmt: skip


@pytest.fixture
def rclone(server: Running, tmp_path: Path) -> Tool:
    prefix = "RCLONE_CONFIG_DISK_"
    return tool(
        "rclone", "--config", "/dev/null", "-q", home=tmp_path,
        **{
            f"{prefix}TYPE": "s3", f"{prefix}PROVIDER": "Other", f"{prefix}ENDPOINT": server.s3_url,
            f"{prefix}ACCESS_KEY_ID": server.access_key, f"{prefix}SECRET_ACCESS_KEY": server.secret_key,
            f"{prefix}REGION": "us-east-1", f"{prefix}FORCE_PATH_STYLE": "true",
        },
    )  # fmt: skip


@pytest.fixture
def s3cmd(server: Running, tmp_path: Path) -> Tool:
    host = server.s3_url.removeprefix("http://")
    config = tmp_path / "s3cfg"
    config.write_text(
        f"[default]\naccess_key = {server.access_key}\nsecret_key = {server.secret_key}\nhost_base = {host}\n"
        f"host_bucket = {host}\nuse_https = False\nmultipart_chunk_size_mb = 5\n"
    )
    return tool("s3cmd", "-c", str(config), "--no-progress", home=tmp_path)


@pytest.fixture
def bucket(server: Running, disk_name: str) -> str:
    new_bucket(server, disk_name)
    return disk_name


def test_aws_cli(server: Running, aws: Tool, bucket: str, tree: Path, tmp_path: Path) -> None:
    aws("s3", "sync", tree, f"s3://{bucket}/up")
    assert "Upload" not in aws("s3", "sync", tree, f"s3://{bucket}/up"), "a second sync has nothing to do"
    aws("s3", "sync", f"s3://{bucket}/up", tmp_path / "down")
    assert contents(tmp_path / "down") == contents(tree)
    exec_on(server, bucket, "cd up && sha256sum big.bin | cut -c1-64 > sum && mkdir -p new/empty && ln -s sum link")
    assert aws("s3", "cp", f"s3://{bucket}/up/sum", "-").strip() == contents(tree)["big.bin"]
    aws("s3", "sync", "--delete", f"s3://{bucket}/up", tmp_path / "down")
    assert (tmp_path / "down/link").read_text() == "sum"
    listed = aws("s3", "ls", f"s3://{bucket}/up/")
    assert "PRE a/" in listed
    assert "a-b.txt" in listed
    aws("s3", "mv", f"s3://{bucket}/up/big.bin", f"s3://{bucket}/moved.bin")
    aws("s3", "cp", f"s3://{bucket}/moved.bin", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tree / "big.bin").read_bytes()
    aws("s3", "rm", "--recursive", f"s3://{bucket}/up")
    assert "up/" not in aws("s3", "ls", "--recursive", f"s3://{bucket}")


def test_aws_cli_api(aws: Tool, bucket: str, tmp_path: Path) -> None:
    import json

    file = tmp_path / "f"
    file.write_bytes(b"body")
    put = json.loads(aws("s3api", "put-object", "--bucket", bucket, "--key", "k", "--body", file, "--metadata", "a=b"))
    head = json.loads(aws("s3api", "head-object", "--bucket", bucket, "--key", "k"))
    assert (head["ETag"], head["Metadata"]) == (put["ETag"], {"a": "b"})
    aws("s3api", "put-object", "--bucket", bucket, "--key", "k", "--body", file, "--if-none-match", "*", check=False)
    aws("s3api", "get-object", "--bucket", bucket, "--key", "k", "--range", "bytes=1-2", tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == b"od"
    assert json.loads(aws("s3api", "get-bucket-acl", "--bucket", bucket))["Grants"]
    aws("s3", "mb", f"s3://{bucket}-2")
    aws("s3", "cp", f"s3://{bucket}/k", f"s3://{bucket}-2/k")
    aws("s3", "rb", f"s3://{bucket}-2", check=False)
    aws("s3", "rb", "--force", f"s3://{bucket}-2")
    assert f"{bucket}-2" not in aws("s3", "ls")
    aws("s3api", "delete-object", "--bucket", bucket, "--key", "k")
    aws("s3api", "head-object", "--bucket", bucket, "--key", "k", check=False)


def test_rclone(server: Running, rclone: Tool, bucket: str, tree: Path, tmp_path: Path) -> None:
    rclone("copy", tree, f"disk:{bucket}/t", "--s3-upload-cutoff", "6M", "--s3-chunk-size", "5M")
    rclone("check", tree, f"disk:{bucket}/t")
    rclone("check", f"disk:{bucket}/t", tree, "--download")
    exec_on(server, bucket, "cd t && echo more >> a.txt && rm empty && mkdir made && touch made/file")
    rclone("check", tree, f"disk:{bucket}/t", check=False)
    rclone("sync", f"disk:{bucket}/t", tmp_path / "down")
    rclone("check", tmp_path / "down", f"disk:{bucket}/t")
    assert (tmp_path / "down/a.txt").read_bytes() == b"one\nmore\n"
    rclone("sync", tree, f"disk:{bucket}/t")
    rclone("check", f"disk:{bucket}/t", tree)
    rclone("copy", f"disk:{bucket}/t/a", f"disk:{bucket}/server-side")
    assert rclone("cat", f"disk:{bucket}/server-side/b.txt") == "two\n"
    assert set(rclone("lsf", f"disk:{bucket}/t").split("\n")) >= {"a/", "a.txt", "sub dir/"}
    rclone("purge", f"disk:{bucket}/t")
    assert rclone("lsf", f"disk:{bucket}").split() == ["server-side/"]


def test_s3cmd(server: Running, s3cmd: Tool, bucket: str, tree: Path, tmp_path: Path) -> None:
    s3cmd("put", tree / "a.txt", f"s3://{bucket}/one.txt")
    s3cmd("put", tree / "big.bin", f"s3://{bucket}/big.bin")
    s3cmd("get", f"s3://{bucket}/big.bin", tmp_path / "big")
    assert (tmp_path / "big").read_bytes() == (tree / "big.bin").read_bytes()
    s3cmd("sync", f"{tree}/", f"s3://{bucket}/t/")
    (tmp_path / "down").mkdir()
    s3cmd("sync", f"s3://{bucket}/t/", f"{tmp_path}/down/")
    assert contents(tmp_path / "down") == contents(tree)
    assert s3cmd("sync", f"{tree}/", f"s3://{bucket}/t/").count("upload:") == 0
    listed = s3cmd("ls", f"s3://{bucket}/t/")
    assert "DIR" in listed
    assert "a-b.txt" in listed
    assert "one.txt" in s3cmd("ls", f"s3://{bucket}")
    s3cmd("info", f"s3://{bucket}/one.txt")
    s3cmd("cp", f"s3://{bucket}/one.txt", f"s3://{bucket}/two.txt")
    s3cmd("mv", f"s3://{bucket}/two.txt", f"s3://{bucket}/three.txt")
    assert exec_on(server, bucket, "cat three.txt; ls two.txt 2>&1 || true")["stdout"].startswith("one\n")
    s3cmd("del", "--recursive", "--force", f"s3://{bucket}/t/")
    assert s3cmd("ls", f"s3://{bucket}/t/") == ""


@pytest.fixture
def fs(server: Running) -> Iterator[Any]:
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    yield s3fs.S3FileSystem(
        key=server.access_key, secret=server.secret_key, endpoint_url=server.s3_url, use_listings_cache=False
    )
    s3fs.S3FileSystem.clear_instance_cache()


def test_s3fs(server: Running, fs: Any, bucket: str, tree: Path, tmp_path: Path) -> None:
    fs.put(f"{tree}/", f"{bucket}/t", recursive=True)
    fs.get(f"{bucket}/t", str(tmp_path / "down"), recursive=True)
    assert contents(tmp_path / "down") == contents(tree)
    with fs.open(f"{bucket}/big", "wb", block_size=5 << 20) as file:
        for _ in range(12):
            file.write(b"x" * (1 << 20))
    with fs.open(f"{bucket}/big", "rb") as file:
        file.seek(11 << 20)
        assert file.read(5) == b"xxxxx"
    assert fs.info(f"{bucket}/big")["size"] == 12 << 20
    assert sorted(fs.ls(f"{bucket}/t", detail=False))[:2] == [f"{bucket}/t/a", f"{bucket}/t/a-b.txt"]
    assert fs.isdir(f"{bucket}/t/a")
    assert fs.isfile(f"{bucket}/t/a.txt")
    assert len(fs.find(f"{bucket}/t")) == 7
    assert fs.glob(f"{bucket}/t/*.txt") == [f"{bucket}/t/a-b.txt", f"{bucket}/t/a.txt"]
    assert fs.cat(f"{bucket}/t/a.txt") == b"one\n"
    fs.copy(f"{bucket}/t/a.txt", f"{bucket}/c.txt")
    fs.mv(f"{bucket}/c.txt", f"{bucket}/d.txt")
    assert not fs.exists(f"{bucket}/c.txt")
    exec_on(server, bucket, "echo written > by-exec; mkdir void")
    assert fs.cat(f"{bucket}/by-exec") == b"written\n"
    assert fs.isdir(f"{bucket}/void")
    with fs.open(f"{bucket}/log", "ab") as file:
        file.write(b"1\n")
    with fs.open(f"{bucket}/log", "ab") as file:
        file.write(b"2\n")
    assert fs.cat(f"{bucket}/log") == b"1\n2\n"
    fs.rm(f"{bucket}/t", recursive=True)
    assert not fs.exists(f"{bucket}/t")
    exec_on(server, bucket, "test ! -e t")


def test_pandas_and_pyarrow(server: Running, fs: Any, bucket: str) -> None:
    pandas = pytest.importorskip("pandas")
    options = {"key": server.access_key, "secret": server.secret_key, "endpoint_url": server.s3_url}
    frame = pandas.DataFrame({"a": range(1000), "b": [str(n) for n in range(1000)]})
    frame.to_parquet(f"s3://{bucket}/f.parquet", storage_options=options)
    assert pandas.read_parquet(f"s3://{bucket}/f.parquet", storage_options=options).equals(frame)
    exec_on(server, bucket, "printf 'x,y\\n1,2\\n' > out.csv")
    assert pandas.read_csv(f"s3://{bucket}/out.csv", storage_options=options)["y"].tolist() == [2]
