"""The file system of one VM: virtiofsd, alone in a sandbox with the tree that its guest is to see.

Owns virtiofsd's options and the tree: the system read-only, empty places for what the guest mounts itself, and a
command's own mounts, which come when a command does. Knows nothing of QEMU.

Writes of a guest go through an overlay on the host, so that a layer afterwards is as the bubblewrap engine leaves it.
Whatever the guest does, virtiofsd can do no more than a command in a bubblewrap sandbox: it has the same user namespace
with one user, sees the same files, and has its own filter of system calls on top.
"""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import socket
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from fanout.engine import rootfs
from fanout.engine.base import Mount
from fanout.engine.qemu.jail import Jail
from fanout.engine.spawning import Spawner
from fanout.errors import EngineUnavailable

__all__ = ["GUEST_DIRECTORIES", "Share", "Virtiofsd", "find_virtiofsd", "open_files", "tree_options"]

#: Where the tree is in virtiofsd's sandbox. It shares this directory and has chroot'ed to it.
TOP = "/share"

#: What the guest mounts something of its own on.
GUEST_DIRECTORIES = ("/proc", "/dev", "/sys", "/tmp", rootfs.HOME)

#: What serving files as their owner takes, in a user namespace; then what it takes to enter the tree and to give up
#: the rest.
CAPABILITIES = (
    *("CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_SETUID", "CAP_SETGID"),
    *("CAP_SYS_CHROOT", "CAP_SETPCAP"),
)

#: Each file the guest knows of is an open one here.
OPEN_FILES = 1 << 20

#: QEMU's own (up to 7.x), then those of the virtiofsd package.
PLACES = ("/usr/lib/qemu/virtiofsd", "/usr/libexec/virtiofsd", "/usr/lib/virtiofsd", "/usr/local/libexec/virtiofsd")


_numbers = itertools.count()


class Virtiofsd:
    """An installed virtiofsd: its path, and which of the two programs of this name it is."""

    def __init__(self, path: str, *, is_rust: bool) -> None:
        self.path = path
        self.is_rust = is_rust

    def argv(self, listening: int) -> list[str]:
        """Return how it is called, with the descriptor of a listening socket.

        Nobody else writes while a guest runs, so that it may cache for ever. Locks are the guest's own matter. Devices
        and capabilities of files are not for guests to make.
        """
        if self.is_rust:
            words = [f"--fd={listening}", f"--shared-dir={TOP}", "--sandbox=chroot", "--cache=always", "--xattr"]
            words += ["--announce-submounts", "--modcaps=-mknod:-setfcap:-dac_read_search", "--rlimit-nofile=0"]
            return [self.path, *words, "--inode-file-handles=never", "--log-level=error", "--seccomp=kill"]
        options = f"source={TOP},cache=always,sandbox=chroot,xattr,announce_submounts,no_posix_lock,no_flock"
        words = [f"--fd={listening}", "--rlimit-nofile=0", "-o", f"{options},modcaps=-mknod:-setfcap,log_level=err"]
        return [self.path, "-f", *words]


class Share:
    """A virtiofsd that waits for, or serves, one guest. `connection` is for QEMU: whoever takes it closes it."""

    def __init__(self, virtiofsd: Virtiofsd, spawner: Spawner, bwrap: str, tree: Sequence[str], directory: str) -> None:
        """Start it. `tree` are bwrap's options for the system below `TOP` (see `tree_options`).

        `directory` is private to this process: there a socket has a name for a moment.
        """
        with ExitStack() as opened:
            try:
                listening, self.connection = _connected(f"{directory}/{next(_numbers)}", opened)
                self.output, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
                opened.callback(os.close, self.output)
                try:
                    argv, options = virtiofsd.argv(listening.fileno()), [*tree, *_own_options(virtiofsd.path)]
                    files = open_files()
                    self._jail = Jail(
                        spawner, bwrap, options, argv, output=theirs, others=[listening.fileno()], open_files=files
                    )
                finally:
                    os.close(theirs)
                    listening.close()
            except OSError as error:
                raise EngineUnavailable(f"cannot start virtiofsd: {error}") from error
            opened.pop_all()

    @property
    def pid(self) -> int:
        """The process that serves the guest."""
        return self._jail.pid

    def attach(self, mounts: Sequence[Mount]) -> None:
        """Make a command's mounts visible, before the guest has looked; `EngineUnavailable` where that fails."""
        if mounts:
            self._jail.attach(TOP, mounts)

    def alive(self) -> bool:
        """Say whether it still runs."""
        return self._jail.poll() is None

    def said(self) -> str:
        """Return what it wrote of its troubles, the end of it."""
        try:
            return os.read(self.output, 1 << 16)[-500:].decode(errors="replace").strip()
        except BlockingIOError:
            return ""

    def death(self) -> int | None:
        """See `Jail.death`."""
        return self._jail.death()

    def kill(self) -> None:
        """Kill it; see `end`."""
        self._jail.kill()

    def end(self) -> None:
        """Kill it and wait until it is dead, and with it the mounts; repeating it is harmless."""
        self._jail.end()
        output, self.output = self.output, -1
        if output >= 0:
            os.close(output)


def find_virtiofsd() -> Virtiofsd:
    """Return the installed virtiofsd; `EngineUnavailable` names the packages that have one."""
    for path in (*PLACES, shutil.which("virtiofsd")):
        if path is not None and os.access(path, os.X_OK):
            said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
            is_rust = "virtiofsd backend" in said.stdout or "virtiofsd 1." in said.stdout
            return Virtiofsd(path, is_rust=is_rust)
    raise EngineUnavailable(
        "there is no virtiofsd: install the package virtiofsd (Debian 12: it comes with qemu-system-common)"
    )


def tree_options(
    root: Path | None, etc: str | None, host_paths: Sequence[tuple[str, str]], seen_at: Callable[[str], str]
) -> list[str]:
    """Return bwrap's options for the tree that a guest sees, but for a command's mounts. See `rootfs`."""
    made = ["", "/var"] if root is None else [""]
    options = [word for path in made for word in ("--perms", "0755", "--dir", TOP + path)]
    options += rootfs.tree_arguments(root, etc, seen_at, TOP)
    for path in GUEST_DIRECTORIES:
        options += ["--perms", "0755", "--dir", TOP + path]
    return options + rootfs.host_path_arguments(host_paths, seen_at, TOP)


def _connected(name: str, opened: ExitStack) -> tuple[socket.socket, socket.socket]:
    """Return a listening socket and one that is connected to it, without a name left."""
    listening, connection = (opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) for _ in "ab")
    listening.bind(name)
    try:
        listening.listen(1)
        connection.connect(name)
    finally:
        os.unlink(name)
    return listening, connection


def _own_options(program: str) -> list[str]:
    """Return what virtiofsd itself needs, outside of the tree."""
    options = [word for capability in CAPABILITIES for word in ("--cap-add", capability)]
    options += rootfs.program_arguments([program])
    return [*options, "--proc", "/proc", "--remount-ro", "/"]


def open_files() -> int:
    """Return how many files a virtiofsd may have open here."""
    most = min(OPEN_FILES, int(Path("/proc/sys/fs/nr_open").read_text()))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return most if hard == resource.RLIM_INFINITY else min(most, hard)
