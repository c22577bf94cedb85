"""What a bubblewrap sandbox sees beside its mounts: the system read-only, and the little of /etc programs need.

Owns the list of what is visible and the small /etc built from the host's. Knows nothing of processes or overlays.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fanout.engine.network import RESOLV_CONF
from fanout.engine.owned import OwnedDirectory
from fanout.errors import EngineUnavailable, Invalid

__all__ = [
    *("HOME", "Etc", "check_host_paths", "check_targets", "host_path_arguments", "private_paths", "program_arguments"),
    *("system_arguments", "tree_arguments"),
]

#: The home directory of the sandbox's user (uid 0): an empty, writable tmpfs.
HOME = "/root"

#: Directories of the host's root (or of another root) that are never shown: the engine provides its own.
OWN = frozenset({"dev", "proc", "sys", "tmp", "run", "mnt", "root", "lost+found"})

#: What is shown of the host's root: programs and libraries, whether or not /usr is merged.
SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")

#: What is copied of the host's /etc, where everybody may read it. No credentials, no host's identity: pip.conf,
#: npmrc, gitconfig, profile.d and the like are left out on purpose.
ETC = (
    *("alternatives", "ssl", "pki", "ca-certificates", "ca-certificates.conf", "crypto-policies"),
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "timezone", "locale.alias", "locale.conf"),
    *("mime.types", "magic", "magic.mime", "protocols", "services", "networks", "rpc", "ethertypes", "gai.conf"),
    *("host.conf", "os-release", "debian_version", "lsb-release", "redhat-release", "alpine-release"),
    *("shells", "profile", "bash.bashrc", "bashrc", "inputrc", "terminfo", "login.defs", "manpath.config"),
    *("fonts", "perl", "python3", "java", "maven", "xml", "sgml", "R", "texmf"),
)

#: As ETC, by beginning of the name (java-17-openjdk, python3.11, ImageMagick-6).
ETC_PREFIXES = ("java-", "python3.", "ImageMagick-")

PREFIX = "fanout-etc-"

#: What is written rather than copied.
WRITTEN = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1\tlocalhost fanout\n::1\tlocalhost\n",
    "hostname": "fanout\n",
    "resolv.conf": RESOLV_CONF,
    "nsswitch.conf": "".join(f"{kind}: files\n" for kind in ("passwd", "group", "networks", "protocols", "services"))
    + "hosts: files dns\n",
}


class Etc:
    """A small /etc made once per engine, so that a sandbox needs one bind mount for it and not thirty.

    `close`, or the end of the interpreter, removes it; where the process was killed, the next one does.
    """

    def __init__(self, source: Path = Path("/etc")) -> None:
        self._directory = OwnedDirectory(PREFIX)
        self.path, self.close = self._directory.path, self._directory.close
        try:
            self._fill(source)
        except OSError as error:
            self.close()
            raise EngineUnavailable(f"cannot prepare the sandboxes' /etc: {error}") from error

    def _fill(self, source: Path) -> None:
        top = Path(self.path)
        for entry in _wanted(source):
            _copy_public(str(entry), f"{self.path}/{entry.name}")
        for name, text in WRITTEN.items():
            (top / name).write_text(text)
        (top / "mtab").symlink_to("../proc/self/mounts")
        top.chmod(0o755)


def private_paths(root: Path | None, etc: str | None, host_paths: Sequence[tuple[str, str]]) -> list[str]:
    """Return the host's paths to be shown that may lie where not everybody can go."""
    return [*([str(root)] if root else []), *([etc] if etc else []), *dict.fromkeys(source for source, _ in host_paths)]


def system_arguments(
    root: Path | None,
    etc: str | None,
    host_paths: Sequence[tuple[str, str]],
    seen_at: Callable[[str], str] = lambda path: path,
) -> list[str]:
    """Return bwrap's options for everything but the mounts of a command and the final --remount-ro of /.

    `root` replaces the host's system by another root directory, whose own /etc is shown if `etc` is None. `seen_at`
    tells where bwrap finds one of the `private_paths`.
    """
    arguments = tree_arguments(root, etc, seen_at)
    arguments += ["--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys", "--dev", "/dev"]
    return arguments + host_path_arguments(host_paths, seen_at)


def tree_arguments(root: Path | None, etc: str | None, seen_at: Callable[[str], str], below: str = "") -> list[str]:
    """Return bwrap's options for the directories of a system, seen below `below`: no /proc, /dev or host paths."""
    top, names = (Path("/"), SYSTEM) if root is None else (root, tuple(sorted(os.listdir(root))))
    above = "" if root is None else seen_at(str(root))
    arguments: list[str] = []
    for name in names:
        if name not in OWN and not (name == "etc" and etc is not None):
            arguments += _shown(top / name, f"{above}/{name}", f"{below}/{name}")
    if etc is not None:
        arguments += ["--ro-bind", seen_at(etc), f"{below}/etc"]
    for name in ("run", "mnt"):
        arguments += ["--perms", "0755", "--dir", f"{below}/{name}"]
    if root is None:
        arguments += ["--symlink", "../tmp", f"{below}/var/tmp", "--symlink", "../run", f"{below}/var/run"]
    return arguments


def host_path_arguments(
    host_paths: Sequence[tuple[str, str]], seen_at: Callable[[str], str], below: str = ""
) -> list[str]:
    """Return bwrap's options for the extra host paths, seen below `below`."""
    return [word for source, target in host_paths for word in ("--ro-bind", seen_at(source), below + target)]


def program_arguments(programs: Sequence[str]) -> list[str]:
    """Return bwrap's options for what programs of the host's need to run: the host's system, read-only."""
    arguments = [word for name in SYSTEM for word in _shown(Path("/", name), f"/{name}", f"/{name}")]
    for program in programs:
        if not program.startswith(tuple(f"/{name}/" for name in SYSTEM)):
            arguments += ["--ro-bind", program, program]
    return arguments


def check_targets(root: Path | None, targets: Sequence[str]) -> None:
    """Refuse mount targets that would hide the system: `Invalid`."""
    taken = {*SYSTEM, "etc", "proc", "dev", "sys", "var"} if root is None else {*os.listdir(root), "proc", "dev"}
    taken -= {"tmp", "mnt", "root", "run", "home", "srv", "opt", "media"}
    for target in targets:
        if target.split("/")[1] in taken or target in ("/tmp", HOME, "/run"):
            raise Invalid.argument("mount target", target, "belongs to the system (use a directory like /mnt/name)")


def check_host_paths(host_paths: Sequence[tuple[str, str]]) -> None:
    """Refuse extra host paths that are relative or missing: `Invalid`, naming the path."""
    for source, target in host_paths:
        if not source.startswith("/") or not os.path.exists(source):
            raise Invalid.argument("host_paths", source, "must be an absolute host path that exists")
        if not target.startswith("/") or os.path.normpath(target) != target or target == "/":
            raise Invalid.argument("host_paths", target, "must be shown at an absolute, normal path other than /")


def _shown(path: Path, source: str, target: str) -> list[str]:
    if path.is_symlink():
        return ["--symlink", os.readlink(path), target]
    if path.is_dir() or path.is_file():
        return ["--ro-bind", source, target]
    return []


def _wanted(source: Path) -> Iterator[Path]:
    try:
        names = sorted(os.listdir(source))
    except OSError:
        return
    for name in names:
        if name in ETC or name.startswith(ETC_PREFIXES):
            yield source / name


def _copy_public(source: str, target: str) -> None:
    """Copy what everybody may read: files, symlinks as they are, directories. The rest is left out."""
    try:
        mode = os.lstat(source).st_mode
        if stat.S_ISLNK(mode):
            os.symlink(os.readlink(source), target)
        elif stat.S_ISREG(mode) and mode & stat.S_IROTH:
            with open(source, "rb", buffering=0) as read, open(target, "xb", buffering=0) as write:
                shutil.copyfileobj(read, write)
        elif stat.S_ISDIR(mode) and mode & stat.S_IROTH and mode & stat.S_IXOTH:
            os.mkdir(target)
            for name in os.listdir(source):
                _copy_public(f"{source}/{name}", f"{target}/{name}")
    except PermissionError:
        pass  # a private part of /etc (a security module may hide what its mode shows)
