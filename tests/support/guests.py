"""What tests of VMs share: one image for all of them, the agent as a program of this host, and VMs without a sandbox.

The image is kept between runs in the user's cache, or below FANOUT_TEST_QEMU_CACHE: making one fetches a kernel.
"""

from __future__ import annotations

import functools
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from fanout.config import Settings
from fanout.engine.qemu import image
from fanout.engine.qemu.agent import compile_agent
from fanout.engine.qemu.command import find_qemu
from fanout.engine.qemu.image import Image
from fanout.engine.qemu.machine import Guest, Machine
from fanout.engine.qemu.protocol import Request, Tmpfs
from fanout.engine.qemu.share import find_virtiofsd
from fanout.errors import EngineUnavailable
from fanout.runtime import system

#: Those of the engines: chown, dac_override, fowner, fsetid, kill, setgid, setuid, net_bind_service, sys_chroot.
FEW_CAPABILITIES = sum(1 << number for number in (0, 1, 3, 4, 5, 6, 7, 10, 18))
ALL_CAPABILITIES = (1 << 40) - 1

MIB = 1024 * 1024


def qemu_cache() -> Path:
    """Return the cache directory whose image all tests share."""
    given = os.environ.get("FANOUT_TEST_QEMU_CACHE")
    return Path(given) if given else Settings().cache_dir


@functools.cache
def shared_image() -> Image | str:
    """Return the image, made if need be, or why there is none here."""
    try:
        find_qemu()
        find_virtiofsd()
        return image.assemble(qemu_cache())
    except EngineUnavailable as error:
        return str(error)


def image_or_skip() -> Image:
    """Return the image; skips the test where VMs cannot be run."""
    made = shared_image()
    if isinstance(made, str):
        pytest.skip(f"no VM runs here: {made}")
    return made


def with_image(cache: Path) -> Path:
    """Let a cache directory have the image that all tests share."""
    image_or_skip()
    cache.mkdir(exist_ok=True)
    if not (cache / "qemu").exists():
        (cache / "qemu").symlink_to(qemu_cache() / "qemu")
    return cache


@functools.cache
def agent_program() -> bytes | str:
    """Return the agent compiled for this host, or why it cannot be."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            return compile_agent(lambda line: None, Path(scratch))[0]
        except EngineUnavailable as error:
            return str(error)


def launch(argv: Sequence[str], inherited: Sequence[int], output: int) -> subprocess.Popen[bytes]:
    """Start QEMU as it is. It dies with its agent's connection, should this process die."""
    return subprocess.Popen(argv, pass_fds=inherited, stdin=subprocess.DEVNULL, stdout=output, stderr=output)


@contextmanager
def served(top: Path) -> Iterator[socket.socket]:
    """Serve a directory by virtiofsd; give the connection for a machine."""
    place = tempfile.mkdtemp(prefix="fanout-vfs-")
    virtiofsd = find_virtiofsd()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{place}/socket")
        listening.listen()
        if virtiofsd.is_rust:
            words = [f"--shared-dir={top}", "--sandbox=chroot", "--cache=always", "--log-level=error"]
        else:
            words = ["-f", "-o", f"source={top},cache=always,sandbox=chroot,log_level=err"]
        server = subprocess.Popen(
            [virtiofsd.path, f"--fd={listening.fileno()}", *words],
            pass_fds=[listening.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(f"{place}/socket")
    try:
        yield connection
    finally:
        connection.close()
        server.kill()
        server.wait()
        shutil.rmtree(place)


def small_root(top: Path) -> Path:
    """Make a root directory of busybox alone, and a directory /work."""
    for name in ("bin", "dev", "proc", "tmp", "work"):
        (top / name).mkdir(parents=True)
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("there is no busybox: install busybox-static")
    shutil.copy(busybox, top / "bin/busybox")
    for name in (
        "sh",
        "true",
        "cat",
        "head",
        "sleep",
        "echo",
        "dd",
        "mount",
        "id",
        "ls",
        "date",
        "wc",
        "md5sum",
        "kill",
    ):
        (top / "bin" / name).symlink_to("busybox")
    return top


def request_for(script: str | Sequence[bytes], **settings: object) -> Request:
    """Return a request for a shell script or an argv in a small root."""
    argv = [b"/bin/sh", b"-c", script.encode()] if isinstance(script, str) else script
    values: dict[str, object] = {
        "env": [b"PATH=/bin"],
        "tmpfs": [Tmpfs("/tmp", 0o1777, 512 * MIB), Tmpfs("/dev/shm", 0o1777, 64 * MIB)],
        "capabilities": FEW_CAPABILITIES,
        "now_ns": system.now_ns(),
        "entropy": system.token_bytes(64),
        **settings,
    }
    return Request(argv, **values)  # type: ignore[arg-type]


@contextmanager
def booted(top: Path, guest: Guest | None = None) -> Iterator[Machine]:
    """Give a VM that waits for its command, over a directory that is served."""
    made = image_or_skip()
    with served(top) as connection:
        machine = Machine(made, guest or Guest(), filesystem=connection, launch=launch)
        try:
            machine.start()
            machine.wait_ready(120)
            yield machine
        finally:
            machine.close()
