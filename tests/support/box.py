"""A hostile command's view of an engine, for each engine and each kind of user: run something, see what came of it.

Run as `python -m tests.support.box` it serves one command of another process, as a user without rights: a JSON line
with the arguments of `Box.run` in, one with the outcome out.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

import fanout
from fanout.engine.base import Limits, Mount, Spec
from fanout.engine.bench import Bench
from fanout.errors import EngineUnavailable
from tests.support.engines import ENGINES, make_engine

__all__ = ["BOXES", "Box", "Said", "open_box"]

NOBODY = 65534

#: Every engine as this user, and bubblewrap as a user without rights.
BOXES = (*ENGINES, "bubblewrap-nobody")


@dataclass(frozen=True, slots=True)
class Said:
    """What a command said and how it ended."""

    status: str
    exit_code: int | None
    limit: str | None
    stdout: str
    stderr: str

    def lines(self) -> list[str]:
        """Return its output, which must have come to a good end."""
        assert (self.status, self.exit_code) == ("completed", 0), self
        return self.stdout.splitlines()


class Box:
    """Runs commands on one engine. `scratch` is a directory of the host that the engine's user may write."""

    def __init__(self, name: str, scratch: Path) -> None:
        self.name = name
        self.scratch = scratch
        self.is_vm = name.startswith("qemu")
        self.bench = None if name.endswith("-nobody") else Bench(make_engine(name), scratch)
        self._places = 0
        if self.bench is not None:
            self.bench.engine.probe()
        else:
            self.run(["/bin/true"])

    def close(self) -> None:
        if self.bench is not None:
            self.bench.engine.close()

    def sh(self, script: str, *mounts: Mount, **settings: Any) -> Said:
        """Run a shell script."""
        return self.run(["/bin/bash", "-c", script], *mounts, **settings)

    def python(self, code: str, *mounts: Mount, **settings: Any) -> Said:
        """Run a Python program, with `libc` and `say` at hand."""
        return self.run(["/usr/bin/python3", "-c", PRELUDE + code], *mounts, **settings)

    def run(
        self, argv: list[str], *mounts: Mount, network: bool = False, cwd: str = "/", **limits: float | None
    ) -> Said:
        """Run a program to its end. `limits` are those of `Limits`."""
        asked = {"argv": argv, "mounts": [asdict(mount) for mount in mounts], "network": network, "cwd": cwd}
        asked["limits"] = {"timeout_s": 60, **limits}
        if self.bench is not None:
            return _serve(self.bench, asked)
        return self._as_nobody(asked)

    def mount(self, files: dict[str, str] | None = None, target: str = "/mnt/work") -> Mount:
        """Return a writable mount with these files below."""
        top = self._directory()
        for name in ("lower", "upper", "work"):
            (top / name).mkdir()
        for name, text in (files or {}).items():
            (top / "lower" / name).parent.mkdir(parents=True, exist_ok=True)
            (top / "lower" / name).write_text(text)
        if self.bench is None:
            for path in (top, *top.rglob("*")):
                os.chown(path, NOBODY, NOBODY)
        lower, upper, work = (str(top / name) for name in ("lower", "upper", "work"))
        return Mount(target, (lower,), upper, work)

    def _directory(self) -> Path:
        self._places += 1
        top = self.scratch / f"m{self._places}"
        top.mkdir(mode=0o700)
        return top

    def _as_nobody(self, asked: dict[str, Any]) -> Said:
        path = [str(Path(__file__).parents[2]), *(entry for entry in sys.path if "site-packages" in entry)]
        environment = {"PYTHONPATH": os.pathsep.join(path), "PATH": os.defpath}
        python = _interpreter(environment)
        done = subprocess.run(
            [python, "-m", "tests.support.box"],
            input=json.dumps(asked) + "\n",
            env=environment,
            cwd="/",
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 3:
            raise EngineUnavailable(done.stdout)
        assert done.returncode == 0, done.stderr
        return Said(**json.loads(done.stdout))


#: What a hostile program begins with.
PRELUDE = """
import ctypes, errno, json, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)

def call(number, *arguments):
    "Make a system call; return 0 and more, or the error's number below 0."
    result = libc.syscall(number, *arguments)
    return result if result >= 0 else -ctypes.get_errno()

def tried(*steps):
    "Take each step; print those that worked."
    for step in steps:
        name, how = step
        try:
            found = how()
        except (OSError, ValueError) as error:
            continue
        print(name, found)

"""


def _interpreter(environment: dict[str, str]) -> str:
    """Return a Python that a user without rights can run the package with."""
    here = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for candidate in (sys.executable, f"/usr/bin/{here}", f"/usr/local/bin/{here}"):
        try:
            tried = subprocess.run(
                [candidate, "-c", "import fanout.engine.bubblewrap"],
                **{"env": environment, "cwd": "/", "user": NOBODY, "group": NOBODY, "capture_output": True},
            )
        except OSError:
            continue
        if tried.returncode == 0:
            return candidate
    pytest.skip(f"no interpreter of this version is readable for a user without rights, nor is {fanout.__file__}")


def _serve(bench: Bench, asked: dict[str, Any]) -> Said:
    mounts = [Mount(**{**mount, "lowers": tuple(mount["lowers"])}) for mount in asked["mounts"]]
    streams: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
    limits = Limits(**asked["limits"])
    environment = {"PATH": os.defpath}
    spec = Spec(asked["argv"], mounts, environment, asked["cwd"], network=asked["network"], limits=limits)
    ended = bench.engine.start(spec).wait(lambda stream, chunk: streams[stream].append(chunk))
    text = [b"".join(streams[name]).decode(errors="surrogateescape") for name in ("stdout", "stderr")]
    return Said(ended.status, ended.exit_code, ended.limit, *text)


@contextmanager
def open_box(name: str) -> Iterator[Box]:
    """Open one, or skip where it does not work here."""
    if name.endswith("-nobody") and os.geteuid() != 0:
        pytest.skip("this is another user already")
    scratch = Path(tempfile.mkdtemp(prefix="fanout-box-", dir="/tmp"))
    try:
        if name.endswith("-nobody"):
            os.chown(scratch, NOBODY, NOBODY)
        try:
            box = Box(name, scratch)
        except EngineUnavailable as error:
            pytest.skip(f"{name} does not run here: {error}")
        try:
            yield box
        finally:
            box.close()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as top:
        served = Bench(make_engine("bubblewrap-bwrap"), Path(top))
        try:
            print(json.dumps(asdict(_serve(served, json.loads(sys.stdin.readline())))))
        except EngineUnavailable as why:
            print(why)
            raise SystemExit(3) from why
        finally:
            served.engine.close()
