"""Files from packages of this host's distribution, without installing them and without being root.

Owns the use of apt and dpkg, and as root the installing of programs. Where the package lists are missing or old, fresh
ones are fetched into a directory of our own; signatures are apt's to check. Blocking.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from fanout.errors import EngineUnavailable

__all__ = ["Packages", "install"]

#: How long one call of apt or dpkg may take, downloads included.
PATIENCE_S = 600.0

NAME = re.compile(r"[a-z0-9][a-z0-9+.~-]*")


class Packages:
    """Downloads and unpacks packages below `directory`, which is private and thrown away by the caller."""

    def __init__(self, directory: Path, say: Callable[[str], None]) -> None:
        self._directory = directory
        self._say = say
        self._options: list[str] = []
        for tool in ("apt-get", "apt-cache", "dpkg-deb"):
            if shutil.which(tool) is None:
                raise EngineUnavailable(f"there is no {tool} on this host to fetch packages with")

    def unpack(self, name: str, into: Path, also: re.Pattern[str] = re.compile("$^")) -> list[str]:
        """Unpack a package, and those it depends on whose names match `also`; return `name version` of each.

        `EngineUnavailable` where there is none or it cannot be fetched.
        """
        done: dict[str, str] = {}
        waiting = [name]
        while waiting:
            current = waiting.pop()
            if current in done:
                continue
            fields = self._show(current)
            waiting += [word for word in NAME.findall(fields.get("Depends", "")) if also.fullmatch(word)]
            self._say(f"fetching {current} {fields['Version']}")
            for file in self._fetch(current):
                _run(["dpkg-deb", "-x", str(file), str(into)])
                file.unlink()
            done[current] = f"{current} {fields['Version']}"
        return sorted(done.values())

    def _show(self, name: str) -> dict[str, str]:
        command = ["show", "--no-all-versions", name]
        try:
            text = _run(["apt-cache", *self._options, *command])
        except EngineUnavailable:
            if self._options:
                raise
            self._update()
            text = _run(["apt-cache", *self._options, *command])
        lines = (line.partition(": ") for line in text.splitlines() if not line.startswith(" "))
        return {key: value for key, _, value in lines}

    def _fetch(self, name: str) -> list[Path]:
        place = self._directory / f"fetched-{name}"
        place.mkdir()
        try:
            _run(["apt-get", *self._options, "download", name], cwd=place)
        except EngineUnavailable:
            if self._options:
                raise
            self._update()  # lists of yesterday name files that are gone
            _run(["apt-get", *self._options, "download", name], cwd=place)
        return list(place.glob("*.deb"))

    def _update(self) -> None:
        self._say("fetching package lists")
        lists, cache = self._directory / "lists", self._directory / "cache"
        for path in (lists / "partial", cache / "archives" / "partial"):
            path.mkdir(parents=True, exist_ok=True)
        self._options = ["-o", f"Dir::State::Lists={lists}", "-o", f"Dir::Cache={cache}"]
        _run(["apt-get", *self._options, "update"])


def install(names: Sequence[str], say: Callable[[str], None]) -> None:
    """Install packages, as root. `EngineUnavailable` says what to install by hand where that cannot be done."""
    words = " ".join(names)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise EngineUnavailable(f"as root: apt-get install --no-install-recommends {words} (or what has them here)")
    say(f"installing {words}")
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *names]
    try:
        _run(command)
    except EngineUnavailable:
        say("fetching package lists")
        _run(["apt-get", "update", "-qq"])
        _run(command)


def _run(argv: Sequence[str], cwd: Path | None = None) -> str:
    env = {**os.environ, "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            argv, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineUnavailable(f"{argv[0]} failed: {error}") from error
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise EngineUnavailable(f"{' '.join((argv[0], *argv[-2:]))} failed: {said[-1] if said else 'no reason'}")
    return done.stdout.decode(errors="replace")
