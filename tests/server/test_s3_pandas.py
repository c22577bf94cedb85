"""pandas and pyarrow on the S3 endpoint by way of s3fs, and what they wrote seen by `fanout://` and an exec."""

from __future__ import annotations

import pandas
import pyarrow
import pytest
import s3fs
from pyarrow import dataset

import fanout.sync
from fanout.fs import FanoutFileSystem
from tests.support.serving import Running


@pytest.fixture
def s3(server: Running) -> s3fs.S3FileSystem:
    return s3fs.S3FileSystem(
        key=server.access_key, secret=server.secret_key, endpoint_url=server.s3_url, skip_instance_cache=True
    )


def test_pandas_over_s3fs_and_over_fanout_see_the_same(server: Running, s3: s3fs.S3FileSystem, disk_name: str) -> None:
    options = {"key": server.access_key, "secret": server.secret_key, "endpoint_url": server.s3_url}
    ours = {"server": server.url, "api_key": server.token}
    frame = pandas.DataFrame({"n": range(2000), "s": [f"s{n}" for n in range(2000)]})
    with fanout.sync.connect(server.url, api_key=server.token) as fo:
        disk = fo.disks.create(disk_name)
        frame.to_parquet(f"s3://{disk_name}/a/frame.parquet", storage_options=options)
        assert pandas.read_parquet(f"fanout://{disk_name}/a/frame.parquet", storage_options=ours).equals(frame)
        frame.to_csv(f"fanout://{disk_name}/b.csv", index=False, storage_options=ours)
        assert pandas.read_csv(f"s3://{disk_name}/b.csv", storage_options=options).equals(frame)
        counted = fo.exec("wc -l < b.csv; ls a", disks={"work": disk}).raise_for_status()
    assert counted.stdout == "2001\nframe.parquet\n"


def test_a_partitioned_set_over_s3fs(server: Running, s3: s3fs.S3FileSystem, disk_name: str) -> None:
    fs = FanoutFileSystem(server.url, api_key=server.token)
    fs.mkdir(disk_name)
    table = pyarrow.table({"k": [n % 4 for n in range(400)], "v": range(400)})
    dataset.write_dataset(table, f"{disk_name}/set", filesystem=s3, format="parquet", partitioning=["k"])
    assert len(s3.glob(f"{disk_name}/set/*/*.parquet")) == len(fs.glob(f"{disk_name}/set/*/*.parquet")) == 4
    for each in (s3, fs):
        read = dataset.dataset(f"{disk_name}/set", filesystem=each, partitioning=["k"]).to_table()
        assert sorted(read["v"].to_pylist()) == list(range(400))
