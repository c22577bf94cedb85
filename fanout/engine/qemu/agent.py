"""The guest agent as a program: its source, compiled by what is there. Owns compilers and their flags. Blocking."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from fanout.engine.qemu.packages import Packages
from fanout.errors import EngineUnavailable

__all__ = ["SOURCE", "compile_agent", "source_hash"]

SOURCE = Path(__file__).parent / "guest"

#: For compilers like gcc. The source has no library to call, so nothing of the host's gets into the guest.
FLAGS = (
    *("-Os", "-s", "-static", "-nostdlib", "-ffreestanding", "-fno-builtin", "-fno-stack-protector", "-fno-pie"),
    *("-no-pie", "-fno-asynchronous-unwind-tables", "-Wl,--build-id=none", "-Wl,-z,noseparate-code"),
)
#: For tcc, which knows little and optimises nothing.
PLAIN_FLAGS = ("-static", "-nostdlib")

COMPILERS = ("cc", "gcc", "clang", "tcc")

#: A compiler of 300 kB that needs nothing but libc: for hosts without any.
TCC = "tcc"


def source_hash() -> str:
    """Return what tells one agent from another."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sorted(SOURCE.glob("*.[ch]")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def compile_agent(say: Callable[[str], None], scratch: Path) -> tuple[bytes, str]:
    """Return the agent as an ELF file, and by what it was compiled; `EngineUnavailable` without a compiler."""
    tried: list[str] = []
    for name in COMPILERS:
        path = shutil.which(name)
        if path is None:
            continue
        for flags in (FLAGS, PLAIN_FLAGS):
            program = _compiled([path, *flags], scratch, tried)
            if program is not None:
                return program, path
    say("there is no C compiler here; using tcc from the distribution's package, without installing it")
    try:
        with tempfile.TemporaryDirectory(dir=scratch) as top:
            place = Path(top)
            version = Packages(place, say).unpack(TCC, place)[0]
            program = _compiled([*_unpacked_tcc(place), *PLAIN_FLAGS], scratch, tried)
    except EngineUnavailable as error:
        raise EngineUnavailable(f"no C compiler for the guest agent: install gcc or tcc ({error})") from error
    if program is None:
        raise EngineUnavailable(f"the guest agent does not compile: {'; '.join(tried)[-500:]}")
    return program, version


def _unpacked_tcc(place: Path) -> list[str]:
    library = next((path.parent for path in place.rglob("libtcc1.a")), None)
    compiler = place / "usr/bin/tcc"
    if library is None or not compiler.exists():
        raise EngineUnavailable("the package tcc is not laid out as expected")
    return [str(compiler), f"-B{library}"]


def _compiled(command: Sequence[str], scratch: Path, tried: list[str]) -> bytes | None:
    output = scratch / "agent"
    try:
        done = subprocess.run(
            [*command, "-o", str(output), "agent.c"], cwd=SOURCE, capture_output=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        tried.append(f"{command[0]}: {error}")
        return None
    said = done.stderr.decode(errors="replace").strip()
    if done.returncode != 0:
        tried.append(f"{command[0]}: {re.sub(chr(10), ' ', said)[:200]}")
        return None
    program = output.read_bytes()
    output.unlink()
    return program if program[:4] == b"\x7fELF" else None
