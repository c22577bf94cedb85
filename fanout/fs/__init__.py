"""The fsspec file system `fanout://`: disks for pandas, pyarrow, dask and whatever else speaks fsspec.

Owns the name that fsspec finds it by. docs/FSSPEC.md is for users.
"""

from fanout.fs.system import FanoutFileSystem

__all__ = ["FanoutFileSystem"]
