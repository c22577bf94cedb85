"""The guest's kernel and initramfs: found or assembled from distribution packages, cached, checked.

Owns the cache directory of images. Knows nothing of VMs that boot them. Blocking.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fanout.engine.qemu import kernel
from fanout.engine.qemu.agent import compile_agent, source_hash
from fanout.engine.qemu.packages import Packages
from fanout.errors import EngineUnavailable

__all__ = ["Image", "assemble", "find"]

#: Raised when an image is put together in another way.
FORMAT = 2

#: Kernels made for virtual machines first: they are small and have what a guest needs. Debian's names and Ubuntu's.
PACKAGES = ("linux-image-cloud-amd64", "linux-image-virtual", "linux-image-amd64", "linux-image-generic")

#: What a metapackage stands for, and what holds the modules where they are apart.
REAL_PACKAGES = re.compile(r"linux-(image|binary|modules)-(unsigned-)?[0-9].*")

PREFIX, MAKING = "image-", "making-"

#: How many are kept, of other versions of fanout on this host: each is some 35 MB.
KEPT = 3


@dataclass(frozen=True, slots=True)
class Image:
    """Two files that boot, immutable and readable for everybody. `version` says what they were made of."""

    kernel: Path
    initramfs: Path
    version: str


@dataclass(frozen=True, slots=True)
class _Found:
    """A kernel before it is made an image."""

    image: bytes
    modules: Path
    version: str


def find(cache_dir: Path) -> Image | None:
    """Return the image in the cache if it is there, undamaged and of this agent; else None."""
    place = _place(cache_dir)
    try:
        manifest = json.loads((place / "manifest.json").read_text())
        for name, digest in manifest["sha256"].items():
            with open(place / name, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    return None
        return Image(place / "kernel", place / "initramfs", str(manifest["version"]))
    except (OSError, ValueError, KeyError, AttributeError):
        return None


def assemble(cache_dir: Path, say: Callable[[str], None] = lambda line: None) -> Image:
    """Return the cached image, or make one; several processes may, at once. `say` is told each step.

    Needs no root. `EngineUnavailable` says what is missing and what to install.
    """
    if platform.machine() != "x86_64":
        raise EngineUnavailable(f"the qemu engine runs on x86-64 only, this is {platform.machine()}")
    found = find(cache_dir)
    if found is not None:
        return found
    place = _place(cache_dir)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _alone(place.parent):
            found = find(cache_dir)
            if found is None:
                _make(place, say)
                found = find(cache_dir)
    except OSError as error:
        raise EngineUnavailable(f"cannot make the guest's image in {place.parent}: {error}") from error
    if found is None:
        raise EngineUnavailable(f"the guest's image in {place} is damaged right after it was made")
    return found


def _place(cache_dir: Path) -> Path:
    return cache_dir / "qemu" / f"{PREFIX}{FORMAT}-{source_hash()[:16]}"


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Hold the directory's lock, and remove what a killed holder left."""
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in directory.glob(f"{MAKING}*"):
            shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(lock)


def _make(place: Path, say: Callable[[str], None]) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=MAKING, dir=place.parent))
    try:
        agent, compiler = compile_agent(say, scratch)
        say(f"compiled the guest agent with {compiler}")
        version, bootable, modules = _kernel(scratch, say)
        made = scratch / "made"
        made.mkdir(mode=0o755)
        files = {"kernel": bootable, "initramfs": kernel.initramfs(agent, *modules)}
        for name, content in files.items():
            _write(made / name, content)
        manifest: dict[str, Any] = {
            "version": version,
            "compiler": compiler,
            "modules": [*modules[0], *modules[1]],
            "sha256": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
        }
        _write(made / "manifest.json", json.dumps(manifest, indent=2).encode())
        shutil.rmtree(place, ignore_errors=True)
        os.rename(made, place)
        _remove_old(place.parent)
        say(f"the guest's image is {version}, in {place}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _remove_old(directory: Path) -> None:
    by_age = sorted(directory.glob(f"{PREFIX}*"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in by_age[KEPT:]:
        shutil.rmtree(path, ignore_errors=True)


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    path.chmod(0o644)


def _kernel(scratch: Path, say: Callable[[str], None]) -> tuple[str, bytes, tuple[dict[str, bytes], dict[str, bytes]]]:
    """Return the first kernel that will do: its version, what QEMU boots, and the modules for boot and for network."""
    refused: list[str] = []
    for look in (_installed, _packaged):
        for found in look(scratch, say, refused):
            try:
                modules = kernel.Modules(found.modules)
                boot = modules.load_order(kernel.BOOT_MODULES)
                network = modules.load_order(kernel.NETWORK_MODULES, boot)
                return found.version, kernel.bootable(found.image), (boot, network)
            except EngineUnavailable as error:
                refused.append(f"{found.version}: {error}")
                say(f"{found.version} will not do: {error}")
    reasons = "; ".join(refused) or "none is installed"
    help = f"install {PACKAGES[0]} (Debian) or {PACKAGES[1]} (Ubuntu), or let apt fetch it"
    raise EngineUnavailable(f"no kernel for the guest: {help} ({reasons})")


def _installed(scratch: Path, say: Callable[[str], None], refused: list[str]) -> Iterator[_Found]:
    """Give the host's own kernels, newest first."""
    for path in sorted(Path("/boot").glob("vmlinuz-*"), key=_version_key, reverse=True):
        version = path.name.removeprefix("vmlinuz-")
        modules = Path("/lib/modules") / version
        if not modules.is_dir():
            continue
        try:
            yield _Found(path.read_bytes(), modules, f"linux {version} (installed)")
        except OSError as error:  # Ubuntu lets only root read it
            refused.append(f"{path}: {error.strerror}")


def _packaged(scratch: Path, say: Callable[[str], None], refused: list[str]) -> Iterator[_Found]:
    """Give kernels from packages, unpacked and not installed."""
    packages = None
    for name in PACKAGES:
        top = scratch / name
        try:
            top.mkdir()
            packages = packages or Packages(scratch, say)
            unpacked = packages.unpack(name, top, REAL_PACKAGES)
        except EngineUnavailable as error:
            refused.append(f"{name}: {error}")
            if packages is None:
                return
            continue
        for path in sorted((top / "boot").glob("vmlinuz-*"), key=_version_key, reverse=True):
            version = path.name.removeprefix("vmlinuz-")
            modules = next(
                (d for d in (top / "lib/modules" / version, top / "usr/lib/modules" / version) if d.is_dir()), top
            )
            yield _Found(path.read_bytes(), modules, f"linux {version} ({', '.join(unpacked)})")
        shutil.rmtree(top)


def _version_key(path: Path) -> list[tuple[int, str]]:
    return [(int(word), "") if word.isdigit() else (-1, word) for word in re.split(r"(\d+)", path.name)]
