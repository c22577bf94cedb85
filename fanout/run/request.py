"""Checking what a caller asks for, before anything starts.

Owns every rule about the arguments of an exec. Opens nothing.
"""

from __future__ import annotations

import io
import math
import re
import shlex
from collections.abc import AsyncIterable, Iterable, Mapping
from typing import Any, BinaryIO, cast, get_args

from fanout.config import MAX_TIMEOUT_S
from fanout.disk.paths import MAX_PATH_BYTES, absolute, tree_path
from fanout.engine.base import Limits
from fanout.errors import Invalid
from fanout.model import CommitPolicy

__all__ = [
    "EXEC_OPTIONS",
    "MAX_ARGUMENT_BYTES",
    "check_bytes",
    "check_checkout",
    "check_command",
    "check_commit",
    "check_content",
    "check_cwd",
    "check_disks",
    "check_env",
    "check_key",
    "check_limits",
    "check_mount_name",
    "check_move",
    "check_network",
    "check_no_content",
    "check_object",
    "check_options",
    "check_range",
    "check_stdin",
    "expand",
]

#: The options of an exec and their defaults.
EXEC_OPTIONS: Mapping[str, Any] = {
    "disks": None,
    "cwd": None,
    "env": None,
    "stdin": b"",
    "timeout_s": 300.0,
    "network": False,
    "commit": "always",
    "cpus": None,
    "memory_mib": None,
}
#: The kernel's bound on one argument or variable (MAX_ARG_STRLEN, 32 pages), less its NUL.
MAX_ARGUMENT_BYTES = (128 << 10) - 1
_MOUNT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,62}")
#: More memory than any host has, so that a number of bytes given by mistake is noticed (1 PiB).
MAX_MEMORY_MIB = 1 << 30


def check_command(command: object) -> str:
    """A command is non-blank text of at most 128 KiB, without NUL."""
    if not isinstance(command, str) or not command.strip():
        raise Invalid.argument("command", command, "a non-empty shell command")
    _check_text("command", command)
    return command


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an exec with the defaults of those that were not given; there are no others."""
    unknown = options.keys() - EXEC_OPTIONS.keys()
    if unknown:
        first = min(unknown)
        raise Invalid.argument(first, options[first], f"no such option; there are {', '.join(EXEC_OPTIONS)}")
    return {**EXEC_OPTIONS, **options}


def check_disks(disks: object) -> Mapping[str, object]:
    """Disks come as a mapping from the names they are mounted under; what is mounted is looked at elsewhere."""
    if disks is None:
        return {}
    if not isinstance(disks, Mapping):
        raise Invalid.argument("disks", disks, 'a mapping such as {"work": disk}')
    for name in disks:
        check_mount_name(name)
    return disks


def check_mount_name(name: object) -> str:
    """A mount's name is one part of a path: `[A-Za-z0-9_][A-Za-z0-9._-]{0,62}`."""
    if not isinstance(name, str) or not _MOUNT_NAME.fullmatch(name):
        raise Invalid.argument("disks", name, "a mount's name is [A-Za-z0-9_][A-Za-z0-9._-]{0,62}")
    return name


def check_cwd(cwd: object) -> str:
    """A working directory is an absolute path; whether it exists is seen in the sandbox."""
    if not isinstance(cwd, str) or not cwd.startswith("/") or "\0" in cwd:
        raise Invalid.argument("cwd", cwd, "an absolute path in the sandbox, such as '/mnt/work', without NUL")
    if len(_encoded("cwd", cwd)) > MAX_PATH_BYTES:
        raise Invalid.argument("cwd", cwd, f"at most {MAX_PATH_BYTES} bytes")
    return cwd


def check_env(env: object) -> dict[str, str]:
    """Variables have names without NUL, `;` and `=`, and values of at most 128 KiB (with the name) without NUL."""
    if env is None:
        return {}
    if not isinstance(env, Mapping):
        raise Invalid.argument("env", env, "a mapping from names to values")
    checked: dict[str, str] = {}
    for key, value in env.items():
        if not isinstance(key, str) or not key or any(c in key for c in "\0;="):
            raise Invalid.argument("env", key, "a variable's name is not empty and holds no NUL, ';' or '='")
        if not isinstance(value, str):
            raise Invalid.argument(f"env[{key!r}]", value, "a variable's value is str")
        _check_text(f"env[{key!r}]", value, len(_encoded("env", key)) + 1)
        checked[key] = value
    return checked


def check_stdin(stdin: object) -> bytes:
    """Standard input is bytes, or text that is sent as UTF-8; None is empty."""
    return b"" if stdin is None else check_bytes("stdin", stdin)


def check_bytes(argument: str, value: object) -> bytes:
    """Contents are bytes, or text that is taken as UTF-8 (surrogate escapes are the bytes they stand for)."""
    if isinstance(value, str):
        return _encoded(argument, value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise Invalid.argument(argument, value, "bytes or str")


def check_content(argument: str, value: object) -> bytes | AsyncIterable[bytes] | BinaryIO:
    """Contents come at once, as in `check_bytes`, or bit by bit: from an async iterable, or a file open for reading."""
    if isinstance(value, AsyncIterable):
        return value
    if hasattr(value, "read") and callable(value.read):
        if isinstance(value, io.TextIOBase):
            raise Invalid.argument(
                argument, value, "a file that is open for reading bytes, as open(path, 'rb') returns"
            )
        return cast(BinaryIO, value)
    if not isinstance(value, str | bytes | bytearray | memoryview):
        raise Invalid.argument(
            argument, value, "bytes, str, an async iterable of bytes or a file open for reading bytes"
        )
    return check_bytes(argument, value)


def check_no_content(argument: str, content: object) -> None:
    """A directory has no contents."""
    if content != b"":
        raise Invalid.argument(argument, content, "empty, for a key that ends in / and so makes a directory")


def check_object(key: object, mode: object) -> tuple[bytes, bool]:
    """Return the path a key names and whether it is to be a directory: a key that ends in `/`."""
    if type(mode) is not int or not 0 <= mode <= 0o7777:
        raise Invalid.argument("mode", mode, "permission bits, 0 to 0o7777")
    is_directory = isinstance(key, str) and key.endswith("/") and key.strip("/") != ""
    path = tree_path("key", key.rstrip("/") if is_directory and isinstance(key, str) else cast(str, key))
    return path, is_directory


def check_move(source: object, target: object, replace: object) -> tuple[bytes, bytes]:
    """Source and target of a move or copy are absolute paths below the root; returns the tree's keys of them."""
    if not isinstance(replace, bool):
        raise Invalid.argument("replace", replace, "True or False")
    old, new = absolute("source", cast(str, source)), absolute("target", cast(str, target))
    for argument, given, key in (("source", source, old), ("target", target, new)):
        if not key:
            raise Invalid.argument(argument, given, "not the root")
    return old, new


def check_range(start: object, end: object) -> None:
    """A byte range is 0 <= start <= end; an end of None is that of the file."""
    if type(start) is not int or start < 0:
        raise Invalid.argument("start", start, "bytes, 0 or more")
    if end is not None and (type(end) is not int or end < start):
        raise Invalid.argument("end", end, f"bytes, at least start ({start}), or None for the end of the file")


def check_limits(timeout_s: object, cpus: object, memory_mib: object) -> Limits:
    """Limits are positive numbers; a timeout is at most 24 h."""
    timeout = _positive("timeout_s", timeout_s, f"more than 0 and at most {MAX_TIMEOUT_S:g} seconds")
    if timeout > MAX_TIMEOUT_S:
        raise Invalid.argument("timeout_s", timeout_s, f"more than 0 and at most {MAX_TIMEOUT_S:g} seconds")
    memory = None
    if memory_mib is not None:
        allowed = f"1 to {MAX_MEMORY_MIB} MiB"
        memory = _positive("memory_mib", memory_mib, allowed)
        if not 1 <= memory <= MAX_MEMORY_MIB:
            raise Invalid.argument("memory_mib", memory_mib, allowed)
    return Limits(
        timeout_s=timeout,
        cpus=None if cpus is None else _positive("cpus", cpus, "a number of cores above 0"),
        memory_bytes=None if memory is None else int(memory * (1 << 20)),
    )


def check_network(network: object) -> bool:
    """The network is on or off."""
    if not isinstance(network, bool):
        raise Invalid.argument("network", network, "True or False")
    return network


def check_checkout(checkout: object, queue_ms: object, read_only: bool) -> tuple[str, ...]:
    """Paths to lock stay inside the disk; the wait for them is a number of milliseconds from 0 up."""
    if isinstance(checkout, str) or not isinstance(checkout, Iterable):
        raise Invalid.argument("checkout", checkout, "a list of paths of the disk, such as ['src/']")
    paths = tuple(checkout)
    for path in paths:
        tree_path("checkout", (path.rstrip("/") or "/") if isinstance(path, str) else path, allow_root=True)
    if paths and read_only:
        raise Invalid.argument("checkout", paths, "none: a read-only mount writes nothing and needs no locks")
    if queue_ms is not None:
        if isinstance(queue_ms, bool) or not isinstance(queue_ms, int | float) or not 0 <= queue_ms < math.inf:
            raise Invalid.argument("queue_ms", queue_ms, "milliseconds, at least 0")
        if not paths:
            raise Invalid.argument("queue_ms", queue_ms, "None: it bounds the wait for a checkout, and there is none")
    return paths


def check_commit(policy: object) -> CommitPolicy:
    """The commit policy is one of three words."""
    for known in get_args(CommitPolicy):
        if isinstance(policy, str) and policy == known:
            return known  # type: ignore[no-any-return]
    raise Invalid.argument("commit", policy, 'one of "always", "on_success", "never"')


def check_key(key: object) -> str | None:
    """An idempotency key is 1 to 255 characters."""
    if key is None:
        return None
    if not isinstance(key, str) or not 0 < len(key) <= 255:
        raise Invalid.argument("idempotency_key", key, "1 to 255 characters")
    return key


def expand(command: str, items: Iterable[object]) -> list[str]:
    """Put each item, quoted for the shell, where the command says `{}`; `{#}` is its number, from 1."""
    check_command(command)
    if "{}" not in command and "{#}" not in command:
        raise Invalid.argument("command", command, "it must say {} where the item goes (or {#} for its number)")
    parts = re.split(r"(\{\}|\{#\})", command)
    expanded: list[str] = []
    for number, item in enumerate(items, 1):
        fill = {"{}": shlex.quote(str(item)), "{#}": str(number)}
        expanded.append(check_command("".join(fill.get(part, part) for part in parts)))
    return expanded


def _positive(argument: str, value: object, allowed: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Invalid.argument(argument, value, allowed)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number <= 0:
        raise Invalid.argument(argument, value, allowed)
    return number


def _encoded(argument: str, value: str) -> bytes:
    try:
        return value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise Invalid.argument(argument, value, "encodable as UTF-8") from error


def _check_text(argument: str, value: str, extra: int = 0) -> None:
    if "\0" in value:
        raise Invalid.argument(argument, value, "no NUL bytes")
    if len(_encoded(argument, value)) + extra > MAX_ARGUMENT_BYTES:
        raise Invalid.argument(
            argument, value, f"at most {MAX_ARGUMENT_BYTES} bytes; pass more through stdin or a file"
        )
