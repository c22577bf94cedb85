"""How a command line names disks, mounts and environment variables.

Owns the parsing of `DISK`, `MOUNT` and `K=V`. Opens nothing: whether what they name exists is found out later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fanout.errors import Invalid

__all__ = [
    "MODES",
    "DiskSpec",
    "MountSpec",
    "command_line",
    "environment",
    "parse_disk",
    "parse_mount",
    "split_checkouts",
]

#: What MODE may be.
MODES = ("ro", "conditional", "shared")


@dataclass(frozen=True, slots=True)
class DiskSpec:
    """A disk by name or id, and the branch or checkpoint meant (None: its main branch)."""

    disk: str
    at: str | None = None

    def __str__(self) -> str:
        return self.disk if self.at is None else f"{self.disk}@{self.at}"


@dataclass(frozen=True, slots=True)
class MountSpec:
    """A disk, the name it is mounted under (None: the disk's own) and the mode (None: the default)."""

    name: str | None
    disk: DiskSpec
    mode: str | None


def parse_disk(text: str) -> DiskSpec:
    """Parse `name`, `name@branch` or `name@checkpoint`."""
    disk, separator, at = text.partition("@")
    if not disk or (separator and not at):
        raise Invalid.argument("DISK", text, "name, name@branch or name@checkpoint")
    return DiskSpec(disk, at or None)


def parse_mount(text: str) -> MountSpec:
    """Parse `[NAME=]DISK[:MODE]`."""
    name, separator, rest = text.partition("=")
    if not separator:
        name, rest = "", text
    elif not name:
        raise Invalid.argument("--disk", text, "NAME=DISK[:MODE], or DISK alone to use the disk's own name")
    disk, separator, mode = rest.partition(":")
    if separator and mode not in MODES:
        raise Invalid.argument("MODE", mode, f"one of {', '.join(MODES)}, as in -d {disk or 'DISK'}:conditional")
    return MountSpec(name or None, parse_disk(disk), mode or None)


def environment(pairs: Iterable[str]) -> dict[str, str]:
    """Parse `K=V` pairs; the value may hold anything, `=` included."""
    parsed: dict[str, str] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise Invalid.argument("--env", pair, "NAME=VALUE")
        parsed[key] = value
    return parsed


def split_checkouts(checkouts: Iterable[str], names: Sequence[str]) -> dict[str, list[str]]:
    """Give each `[NAME:]PATH` to the mount it names; without NAME there must be just one."""
    given: dict[str, list[str]] = {}
    for text in checkouts:
        name, separator, path = text.partition(":")
        if not separator or name not in names:
            if len(names) != 1:
                raise Invalid.argument("--checkout", text, "NAME:PATH, with the NAME of one of the mounts (-d)")
            name, path = names[0], text
        given.setdefault(name, []).append(path)
    return given


def command_line(words: tuple[str, ...]) -> str:
    """Return the shell command that words stand for: one word is a script, several are quoted and joined."""
    import shlex

    command = words[0] if len(words) == 1 else shlex.join(words)
    if not command.strip():
        raise Invalid.argument("COMMAND", command, "something to run, as in: fanout exec -d ws -- ls -l")
    return command
