"""Every key of the bucket, and the rules for names that become part of one.

Owns where each object lives. Knows nothing of what is inside.
"""

from __future__ import annotations

import re

from fanout.errors import Invalid

__all__ = [
    "CALLS",
    "CATALOGUE",
    "KEYS",
    "MAIN",
    "MASTER_KEY",
    "SEQ_MAX",
    "access_key",
    "branch_key",
    "branch_prefix",
    "call_key",
    "call_number",
    "call_prefix",
    "check_branch_name",
    "check_name",
    "checkpoint_key",
    "checkpoint_prefix",
    "disk_key",
    "disk_prefix",
    "index_key",
    "index_prefix",
    "is_disk_id",
    "is_index_key",
    "is_log_key",
    "is_seq_key",
    "kept_key",
    "kept_prefix",
    "log_key",
    "log_prefix",
    "name_key",
    "name_of_key",
    "pack_key",
    "page_key",
    "part_key",
    "part_number",
    "seq_of_key",
    "snap_key",
    "snap_prefix",
    "trim_key",
    "trim_prefix",
    "upload_begin_key",
    "upload_end_key",
    "upload_prefix",
    "uploads_prefix",
]

#: The branch every disk is created with.
MAIN = "main"
#: Prefix of the create-only objects that make disk names unique.
CATALOGUE = "names/"
#: Prefix of the calls that had an idempotency key.
CALLS = "calls/"
#: Prefix of the create-only records of API keys.
KEYS = "keys/"
#: The secret that S3 secrets and share links are derived from; create-only.
MASTER_KEY = "master"
#: Largest sequence number a 20-digit key can hold in a signed 64-bit integer.
SEQ_MAX = 2**63 - 1

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_SEQ_KEY = re.compile(r".*/[0-9]{20}")
_PART_KEY = re.compile(r".*/part/([0-9]{5})-[0-9]{20}-[0-9a-f]+")
_RESCUE = re.compile(r"rescue/[a-z0-9][a-z0-9._-]{0,62}")
_INDEX_KEY = re.compile(r".*/index/[0-9a-f]{32}")
_DISK_ID = re.compile(r"dsk-[0-9a-f]{16}")


def check_name(argument: str, value: object) -> str:
    """Return `value` if it is a name for a disk or checkpoint; else `Invalid`, naming the argument."""
    if isinstance(value, str) and _NAME.fullmatch(value):
        return value
    raise Invalid.argument(argument, value, "a name is [a-z0-9][a-z0-9._-]{0,62}")


def check_branch_name(argument: str, value: object) -> str:
    """Like `check_name`, also allowing the `rescue/<name>` branches that conflicts leave behind."""
    if isinstance(value, str) and _RESCUE.fullmatch(value):
        return value
    if value == "rescue":
        raise Invalid.argument(argument, value, "kept for the branches rescue/<name>")
    return check_name(argument, value)


def is_disk_id(value: str) -> bool:
    """Whether `value` has the form of a disk id, `dsk-` and 16 hex digits."""
    return _DISK_ID.fullmatch(value) is not None


def call_prefix(digest: str) -> str:
    return f"{CALLS}{digest}/"


def call_key(digest: str, number: int, kind: str) -> str:
    """Return the key of claim `number` of a call: `claim` and `end` are create-only, `beat` is its sign of life."""
    return f"{CALLS}{digest}/{number:06d}-{kind}"


def call_number(key: str) -> int:
    """Return the number of the claim that a key of a call belongs to."""
    return int(key.rpartition("/")[2][:6])


def access_key(key_id: str) -> str:
    return f"{KEYS}{key_id}"


def name_key(name: str) -> str:
    return f"{CATALOGUE}{name}"


def disk_prefix(disk_id: str) -> str:
    return f"disks/{disk_id}/"


def disk_key(disk_id: str) -> str:
    return f"disks/{disk_id}/disk"


def branch_prefix(disk_id: str) -> str:
    return f"disks/{disk_id}/branch/"


def branch_key(disk_id: str, name: str) -> str:
    return f"disks/{disk_id}/branch/{name}"


def checkpoint_prefix(disk_id: str) -> str:
    return f"disks/{disk_id}/checkpoint/"


def checkpoint_key(disk_id: str, name: str) -> str:
    return f"disks/{disk_id}/checkpoint/{name}"


def log_prefix(disk_id: str, branch_uuid: str) -> str:
    return f"disks/{disk_id}/log/{branch_uuid}/"


def log_key(disk_id: str, branch_uuid: str, seq: int) -> str:
    return f"disks/{disk_id}/log/{branch_uuid}/{seq:020d}"


def snap_prefix(disk_id: str, branch_uuid: str) -> str:
    return f"disks/{disk_id}/snap/{branch_uuid}/"


def snap_key(disk_id: str, branch_uuid: str, seq: int) -> str:
    return f"disks/{disk_id}/snap/{branch_uuid}/{seq:020d}"


def trim_prefix(disk_id: str, branch_uuid: str) -> str:
    return f"disks/{disk_id}/trim/{branch_uuid}/"


def trim_key(disk_id: str, branch_uuid: str, seq: int) -> str:
    return f"disks/{disk_id}/trim/{branch_uuid}/{seq:020d}"


def kept_prefix(disk_id: str, branch_uuid: str) -> str:
    return f"disks/{disk_id}/kept/{branch_uuid}/"


def kept_key(disk_id: str, branch_uuid: str, seq: int) -> str:
    return f"disks/{disk_id}/kept/{branch_uuid}/{seq:020d}"


def page_key(disk_id: str, page_hash: bytes) -> str:
    digits = page_hash.hex()
    return f"disks/{disk_id}/page/{digits[:2]}/{digits}"


def pack_key(disk_id: str, pack_id: bytes) -> str:
    digits = pack_id.hex()
    return f"disks/{disk_id}/pack/{digits[-2:]}/{digits}"


def index_prefix(disk_id: str) -> str:
    return f"disks/{disk_id}/index/"


def index_key(disk_id: str, identity: str) -> str:
    """Return the key of an index object; `identity` is 32 random hex digits."""
    return f"disks/{disk_id}/index/{identity}"


def is_index_key(key: str) -> bool:
    """Whether `key` is that of an index object."""
    return _INDEX_KEY.fullmatch(key) is not None


def uploads_prefix(disk_id: str, branch_uuid: str = "") -> str:
    """Where the multipart uploads of one branch are, or of all."""
    return f"disks/{disk_id}/upload/{branch_uuid}/" if branch_uuid else f"disks/{disk_id}/upload/"


def upload_prefix(disk_id: str, branch_uuid: str, upload_id: str) -> str:
    return f"disks/{disk_id}/upload/{branch_uuid}/{upload_id}/"


def upload_begin_key(disk_id: str, branch_uuid: str, upload_id: str) -> str:
    return f"disks/{disk_id}/upload/{branch_uuid}/{upload_id}/begin"


def upload_end_key(disk_id: str, branch_uuid: str, upload_id: str) -> str:
    return f"disks/{disk_id}/upload/{branch_uuid}/{upload_id}/end"


def part_key(disk_id: str, branch_uuid: str, upload_id: str, number: int, time_ns: int, nonce: str) -> str:
    """Where one part is recorded; a part that is sent again gets another key, and by byte order a later one."""
    return f"disks/{disk_id}/upload/{branch_uuid}/{upload_id}/part/{number:05d}-{time_ns:020d}-{nonce}"


def part_number(key: str) -> int | None:
    """Return the number of the part that `key` records; None for another object of an upload."""
    found = _PART_KEY.fullmatch(key)
    return int(found[1]) if found else None


def is_log_key(key: str) -> bool:
    """Whether `key` is that of a log entry."""
    return is_seq_key(key) and "/log/" in key


def is_seq_key(key: str) -> bool:
    """Whether `key` can be one of the log or of a snap: strays that tools leave in a bucket are no reason to fail."""
    return _SEQ_KEY.fullmatch(key) is not None


def seq_of_key(key: str) -> int:
    """Return the sequence number a log or snap key ends with."""
    return int(key.rpartition("/")[2])


def name_of_key(key: str, prefix: str) -> str:
    """Return what follows `prefix` in `key`: a branch, checkpoint or disk name."""
    return key[len(prefix) :]
