"""Settings: values only, from arguments, then FANOUT_* variables, then defaults.

Owns names, defaults, bounds and parsing. Builds nothing: components are made from these values elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fanout.errors import Invalid

__all__ = ["MAX_IN_FLIGHT_PER_CORE", "MAX_TIMEOUT_S", "Settings", "Tuning"]

#: The longest a command may run, in seconds (24 h). Held by tests/unit/test_config.py.
MAX_TIMEOUT_S = 86_400.0
#: Default admission cap: execs at once per core. A command often waits for I/O, so more than one; see LIMITS.md.
MAX_IN_FLIGHT_PER_CORE = 8


class Tuning(BaseModel):
    """Sizes of the format's moving parts. Readers accept any; tests make them tiny to force the rare paths."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    page_entries: int = Field(1024, ge=2)
    inline_bytes: int = Field(256 << 10, ge=0)
    small_file_bytes: int = Field(128 << 10, ge=1)
    shared_file_bytes: int = Field(32 << 10, ge=0)
    shared_frame_bytes: int = Field(256 << 10, ge=1)
    extent_bytes: int = Field(4 << 20, ge=1)
    pack_bytes: int = Field(16 << 20, ge=1)
    fold_entries: int = Field(64, ge=1)
    fold_bytes: int = Field(1 << 20, ge=1)
    fold_paths: int = Field(8192, ge=1)
    group_commits: int = Field(1024, ge=1)
    group_bytes: int = Field(1 << 20, ge=1)
    group_gap_s: float = Field(0.025, ge=0)
    group_wait_s: float = Field(0.5, ge=0)
    page_cache_entries: int = Field(64 << 10, ge=1)
    #: What garbage collection counts on (docs/GC.md): a handle looks anew after `stale_s`, and what is stored and not
    #: referred to within `unreferenced_s` never will be.
    stale_s: float = Field(900.0, gt=0)
    unreferenced_s: float = Field(12 * 3600.0, gt=0)


def _default_store() -> str:
    home = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return "file://" + os.path.join(home, "fanout")


def _default_cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "fanout"


def _cores() -> int:
    return len(os.sched_getaffinity(0))


class Settings(BaseModel):
    """Everything a connection can be told. See `load` for where the values come from.

    `store`: file://, s3:// or memory:// URL. `url`, `api_key`, `http2`: of a remote connection, which of all others
    takes only `max_in_flight`. `cache_bytes`: bound of the host cache. `max_in_flight`: execs at once (default 8 per
    core). `root_dir`: a directory that commands see as / instead of the host's system directories. `host_paths`: host
    paths (or `source:target`) that commands see read-only. `network_deny`: IPv4 networks (`10.0.0.0/8`) that commands
    with a network do not reach; this host's loopback and link-local ones never. `qemu_pool`: VMs that the qemu engine
    keeps booted once it is used. `qemu_memory_mib`: memory of a VM whose command has no limit of its own. `grep_index`:
    searches publish the words of what they searched, and ask those that others published (docs/GREP.md).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    store: str = Field(default_factory=_default_store, min_length=1)
    url: str | None = None
    api_key: str | None = Field(None, repr=False)
    http2: bool = False
    engine: Literal["auto", "bubblewrap", "qemu"] = "auto"
    cache_dir: Path = Field(default_factory=_default_cache)
    cache_bytes: int = Field(20 << 30, ge=1 << 20)
    max_in_flight: int = Field(default_factory=lambda: MAX_IN_FLIGHT_PER_CORE * _cores(), ge=1, le=100_000)
    s3_endpoint: str | None = None
    root_dir: Path | None = None
    host_paths: tuple[str, ...] = ()
    network_deny: tuple[str, ...] = ()
    qemu_pool: int = Field(2, ge=0, le=64)
    qemu_memory_mib: int = Field(512, ge=128, le=1 << 20)
    grep_index: bool = True
    output_bytes: int = Field(1 << 20, ge=1 << 10, le=1 << 30)
    author: str = ""
    tuning: Tuning = Tuning()

    @classmethod
    def load(cls, environ: Mapping[str, str] = os.environ, **arguments: Any) -> Settings:
        """Merge `arguments` (None means not given) over FANOUT_* variables over defaults.

        `Invalid` names the argument or variable, the value and what is allowed; unknown arguments are refused.
        """
        values: dict[str, Any] = {}
        origin: dict[str, str] = {}
        for field in cls.model_fields:
            variable = f"FANOUT_{field.upper()}"
            if field != "tuning" and environ.get(variable):
                text = environ[variable]
                values[field] = text.split(os.pathsep) if field in ("host_paths", "network_deny") else text
                origin[field] = variable
        for name, value in arguments.items():
            if name not in cls.model_fields:
                # Without the value: a misspelt `api_key` holds a secret, too.
                raise Invalid(f"there is no setting {name!r}; there are {', '.join(cls.model_fields)}")
            if value is not None:
                values[name] = value
                origin[name] = name
        try:
            return cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
            field = str(first["loc"][0]) if first["loc"] else "settings"
            secret = field == "api_key"
            refused = Invalid.argument(
                origin.get(field, field), "(secret)" if secret else first.get("input"), first["msg"]
            )
            raise refused from (None if secret else error)
