"""What the demo runs: a pinned project from the package index, or a directory of the user's.

Owns the pins, fetching them through the running interpreter's pip, and which files are tests. Knows nothing of disks.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fanout.errors import Corrupt, Invalid, NotFound, Unavailable

__all__ = ["PROJECT", "TEST_GLOBS", "Pin", "fetch_dependencies", "fetch_project", "find_files"]

TEST_GLOBS = ("test_*.py", "*_test.py")
#: Directories whose files are nobody's own tests.
_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages", "venv", "build", "dist"})
#: Longest wait for the package index, in seconds.
_FETCH_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Pin:
    """One version of a package, and the SHA-256 of the one archive of it that is taken."""

    package: str
    version: str
    sha256: str

    def requirement(self) -> str:
        """Return the line of a requirements file that takes nothing else."""
        return f"{self.package}=={self.version} --hash=sha256:{self.sha256}"


#: The source distribution of a real project that ships its tests, which need nothing but pytest.
PROJECT = Pin("click", "8.1.8", "ed53c9d8990d83c2a27deae68e4ee337473f6330c040a31d4225c9574d16096a")

#: What reads the source distribution's metadata on this host, where pip insists on it.
_BACKEND = Pin("flit_core", "3.12.0", "e7a0304069ea895172e3c7bb703292e992c5d1555dd1233ab7b5621b5b69e62c")

#: pytest and what it needs from Python 3.8 on; wheels of pure Python, so they run on any interpreter.
_DEPENDENCIES = (
    Pin("pytest", "8.3.5", "c69214aa47deac29fad6c2a4f590b9c4a9fdb16a403176fe154b79c0b4d4d820"),
    Pin("pluggy", "1.6.0", "e920276dd6813095e9377c0bc5566d94c932c33b27a3e3945d8389c374dd4746"),
    Pin("iniconfig", "2.1.0", "9deba5723312380e77435581c6bf4935c94cbfab9b1ed33ef8d238ea168eb760"),
    Pin("packaging", "24.2", "09abb1bccd265c01f4a3aa3f7a7db064b36514d2cba19a2f694fe6150451a759"),
    Pin("exceptiongroup", "1.3.0", "4d111e6e0c13d0644cad6ddaa7ed0261a0b36971f6d23e7ec9b4b9097da78a10"),
    Pin("tomli", "2.2.1", "cb55c73c5f4408779d0cf3eef9f762b9c9f147a77de7b258bef0a5628adc85cc"),
    Pin("typing_extensions", "4.14.1", "d1e1e3b58374dc93031d6eda2420a48ea44a36c2b4766a4fdeb3710755731d76"),
)


async def fetch_dependencies(cache_dir: Path, say: Callable[[str], None]) -> Path:
    """Return a directory to put on PYTHONPATH for pytest; fetched once (`say` is told), then kept below `cache_dir`."""
    return await _fetch_wheels(cache_dir, _DEPENDENCIES, say)


async def fetch_project(cache_dir: Path, say: Callable[[str], None]) -> Path:
    """Return the unpacked source distribution of `PROJECT`; fetched once (`say` is told), then kept below `cache_dir`.

    `Unavailable` if it cannot be fetched, `Corrupt` if the archive is not the pinned one.
    """
    kept = _kept(cache_dir, (PROJECT,))
    name = f"{PROJECT.package}-{PROJECT.version}"
    if not kept.is_dir():
        backend = await _fetch_wheels(cache_dir, (_BACKEND,), say)
        _tell(say, PROJECT)
        with _beside(kept) as scratch:
            options = ("--no-binary", PROJECT.package, "--no-build-isolation", "--dest", str(scratch / "sdist"))
            await _pip("download", (PROJECT,), scratch, options, python_path=str(backend))
            (archive,) = (scratch / "sdist").iterdir()
            if hashlib.sha256(archive.read_bytes()).hexdigest() != PROJECT.sha256:
                raise Corrupt(f"{archive.name} is not the archive that the demo pins")
            with tarfile.open(archive) as tar:
                if hasattr(tarfile, "data_filter"):  # absent before 3.11.4; the archive is the pinned one anyway
                    tar.extraction_filter = tarfile.data_filter
                tar.extractall(scratch / "tree")
            _keep(scratch / "tree", kept)
    return kept / name


def find_files(directory: Path, globs: Sequence[str]) -> list[str]:
    """Return the files below a directory whose name matches a glob, as sorted relative paths.

    Hidden directories, virtual environments and build products are left out.
    """
    if not directory.is_dir():
        raise NotFound(f"there is no directory {str(directory)!r} on this host")
    found: set[str] = set()
    for parent, directories, files in os.walk(directory):
        directories[:] = [
            each
            for each in directories
            if each not in _SKIPPED
            and not each.startswith(".")
            and not os.path.exists(os.path.join(parent, each, "pyvenv.cfg"))
        ]
        for file in files:
            path = Path(parent, file)
            if any(path.match(glob) for glob in globs):
                found.add(path.relative_to(directory).as_posix())
    if not found:
        raise Invalid.argument(
            "DIR", str(directory), f"a directory with files like {' or '.join(globs)}; see --glob and --command"
        )
    return sorted(found)


async def _fetch_wheels(cache_dir: Path, pins: Sequence[Pin], say: Callable[[str], None]) -> Path:
    kept = _kept(cache_dir, pins)
    if not kept.is_dir():
        _tell(say, pins[0])
        with _beside(kept) as scratch:
            pure = ("--only-binary=:all:", "--implementation=py", "--abi=none", "--platform=any")
            await _pip("install", pins, scratch, (*pure, "--no-compile", "--target", str(scratch / "lib")))
            _keep(scratch / "lib", kept)
    return kept


def _tell(say: Callable[[str], None], pin: Pin) -> None:
    say(f"fetching {pin.package} {pin.version} from the package index, once")


async def _pip(
    verb: str, pins: Sequence[Pin], scratch: Path, options: Sequence[str], python_path: str | None = None
) -> None:
    """Run pip of this interpreter on exactly these pins; `Unavailable` says what it said."""
    import anyio

    requirements = scratch / "requirements.txt"
    requirements.write_text("".join(pin.requirement() + "\n" for pin in pins))
    command = [sys.executable, "-m", "pip", verb, "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--require-hashes", *options, "-r", str(requirements)]
    environ = {**os.environ, "PYTHONPATH": python_path} if python_path else dict(os.environ)
    what = f"{pins[0].package} {pins[0].version}"
    try:
        with anyio.fail_after(_FETCH_TIMEOUT_S):
            done = await anyio.run_process(command, check=False, env=environ, cwd=scratch)
    except TimeoutError:
        raise _unavailable(what, f"no answer within {_FETCH_TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
        said = [line for line in lines if line.startswith("ERROR:")] or lines
        raise _unavailable(what, re.sub(r"^ERROR:\s*", "", said[-1]) if said else f"pip exit {done.returncode}")


def _unavailable(what: str, why: str) -> Unavailable:
    help_ = "give a directory of your own instead: fanout demo DIR"
    if "No module named pip" in why:
        help_ = f"install it (python -m ensurepip), or {help_}"
    return Unavailable(f"cannot fetch {what}: {why}; {help_}")


def _kept(cache_dir: Path, pins: Sequence[Pin]) -> Path:
    digest = hashlib.sha256("".join(pin.requirement() for pin in pins).encode()).hexdigest()[:12]
    return cache_dir / "demo" / f"{pins[0].package}-{pins[0].version}-{digest}"


@contextmanager
def _beside(kept: Path) -> Iterator[Path]:
    """Yield a scratch directory on the file system of `kept`, gone at the end."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".fetch-", dir=kept.parent))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _keep(made: Path, kept: Path) -> None:
    try:
        made.rename(kept)
    except OSError:
        if not kept.is_dir():  # else somebody else was first
            raise
