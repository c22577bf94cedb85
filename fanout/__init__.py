"""fanout: run many commands at once on one shared, versioned, S3-backed disk.

The public names and nothing else; docs/ARCHITECTURE.md says what is behind them.
"""

from fanout.api import Disk, Disks, Fanout
from fanout.config import Settings
from fanout.default import connect, exec, map, stream
from fanout.errors import (
    Busy,
    CommandFailed,
    Conflict,
    Corrupt,
    Denied,
    EngineUnavailable,
    Exists,
    FanoutError,
    Invalid,
    LeaseLost,
    Limit,
    NotFound,
    Unavailable,
    Unknown,
)
from fanout.model import (
    Change,
    Checkpoint,
    Commit,
    DirEntry,
    Event,
    Finished,
    Lock,
    Mount,
    ObjectInfo,
    Output,
    Run,
    RunCommit,
    Started,
    Timing,
    Usage,
)

__version__ = "0.1.0"

__all__ = [
    "Busy",
    "Change",
    "Checkpoint",
    "CommandFailed",
    "Commit",
    "Conflict",
    "Corrupt",
    "Denied",
    "DirEntry",
    "Disk",
    "Disks",
    "EngineUnavailable",
    "Event",
    "Exists",
    "Fanout",
    "FanoutError",
    "Finished",
    "Invalid",
    "LeaseLost",
    "Limit",
    "Lock",
    "Mount",
    "NotFound",
    "ObjectInfo",
    "Output",
    "Run",
    "RunCommit",
    "Settings",
    "Started",
    "Timing",
    "Unavailable",
    "Unknown",
    "Usage",
    "connect",
    "exec",
    "map",
    "stream",
]
