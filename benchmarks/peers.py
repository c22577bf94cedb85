"""What fanout is measured against: bare bubblewrap, containers, and the usual tools that copy trees.

Owns how each peer is found and called. A peer that cannot run here raises `Skip` with the reason.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from benchmarks.harness import Skip
from fanout.engine.bubblewrap import CAPABILITIES, find_bwrap
from fanout.view.scratch import spread

__all__ = ["Containers", "RawBwrap", "aws", "finish", "need", "rclone", "s3_environment", "tar_zstd"]

_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
_IMAGE = "localhost/fanout-bench:latest"
_HELD = ("/bin/bash", "/bin/true")


class RawBwrap:
    """bwrap by hand: what it takes to run a command over a private overlay of `lower`, isolated as fanout's execs are.

    The same namespaces and capabilities, the same system directories read-only, fresh /proc, /dev, /tmp and /root, a
    root that cannot be written. Each call makes its own upper and work directories below `place`, as any caller has
    to; nobody removes them or reads them.
    """

    def __init__(self, lower: Path, place: Path) -> None:
        self._lower = lower
        self._place = place
        self._numbers = itertools.count()
        place.mkdir(parents=True, exist_ok=True)
        spread(str(place))  # as fanout does for its own: see "ext4 remembers" in README.md
        words = [
            find_bwrap(),
            *("--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"),
            *("--unshare-cgroup-try", "--die-with-parent", "--new-session", "--hostname", "raw"),
            *("--uid", "0", "--gid", "0", "--cap-drop", "ALL"),
            *(word for name in CAPABILITIES for word in ("--cap-add", name)),
            *("--clearenv", "--setenv", "PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
        ]
        if os.access("/proc/sys/user/max_user_namespaces", os.W_OK):
            words.append("--disable-userns")
        for name in _SYSTEM:
            path = Path("/", name)
            if path.is_symlink():
                words += ["--symlink", os.readlink(path), f"/{name}"]
            elif path.is_dir():
                words += ["--ro-bind", f"/{name}", f"/{name}"]
        words += [
            "--ro-bind",
            "/etc",
            "/etc",
            "--proc",
            "/proc",
            "--ro-bind",
            "/proc/sys",
            "/proc/sys",
            "--dev",
            "/dev",
        ]
        for name in ("/dev/shm", "/tmp", "/root"):
            words += ["--size", str(4 << 30), "--tmpfs", name]
        self._words = [*words, "--remount-ro", "/dev"]

    def start(self, command: str) -> subprocess.Popen[bytes]:
        """Start one command at /mnt/work; both outputs are pipes."""
        own = self._place / str(next(self._numbers))
        upper, work = own / "upper", own / "work"
        for path in (own, upper, work):
            path.mkdir()
        return subprocess.Popen(
            [
                *self._words, "--overlay-src", str(self._lower), "--overlay", str(upper), str(work), "/mnt/work",
                "--remount-ro", "/", "--chdir", "/mnt/work", "--", "/bin/bash", "-c", command,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, command: str) -> None:
        """Run one command to its end; raises where it fails."""
        finish(self.start(command))


def finish(process: subprocess.Popen[bytes]) -> None:
    """Wait for a peer's process; raises where it failed."""
    _, err = process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"{process.args!r:.200} gave {process.returncode}: {err[-500:].decode(errors='replace')}")


class Containers:
    """podman or docker, whichever runs here, with an image made of the host's own bash and true.

    `name` says which. A directory is mounted with a private overlay where the program can (podman), else read-only.
    """

    def __init__(self) -> None:
        reasons = []
        for words in (["podman"], ["podman", "--runtime", "runc"], ["docker"]):
            if shutil.which(words[0]) is None:
                reasons.append(f"{words[0]} is not installed")
                continue
            self.name = " ".join(words)
            self._words = words
            # Limits that a process without CAP_SYS_RESOURCE may set: the defaults of these programs are higher.
            self._limits = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1000:1000"] if "podman" in words else []
            self._flag = ":O" if words[0] == "podman" else ":ro"
            try:
                self._import()
                self.run(Path("/tmp"), "true")
                return
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                reasons.append(f"{self.name}: {str(error).splitlines()[-1]}")
        raise Skip("; ".join(reasons))

    def run(self, lower: Path, command: str) -> None:
        """Run one command in a fresh container that sees `lower` at /mnt/work."""
        mount = ["-v", f"{lower}:/mnt/work{self._flag}", "-w", "/mnt/work"]
        words = [*self._words, "run", "--rm", "--network", "none", *self._limits, *mount, _IMAGE]
        _check([*words, "/bin/bash", "-c", command], timeout=60)

    def _import(self) -> None:
        _check([*self._words, "import", "-", _IMAGE], stdin=_tiny_system(), timeout=60)


def _tiny_system() -> bytes:
    """Return a tar of bash, true and the libraries they need."""
    wanted = set(_HELD)
    for program in _HELD:
        said = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        wanted.update(re.findall(r"/\S+", said))
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", dereference=True) as tar:
        for path in sorted(wanted):
            tar.add(os.path.realpath(path), path.lstrip("/"))
        for name in ("mnt/work", "tmp", "proc", "dev", "sys"):
            info = tarfile.TarInfo(name)
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(info)
    return file.getvalue()


def tar_zstd(tree: Path, target: Path, *options: str) -> None:
    """Pack a tree into one file with `tar | zstd`. Nothing is synced to the disk, as it is for a commit."""
    need("tar")
    need("zstd")
    target.unlink(missing_ok=True)
    tar = subprocess.Popen(["tar", "-C", str(tree), "-cf", "-", "."], stdout=subprocess.PIPE)
    _check(["zstd", *options, "-q", "-o", str(target)], stdin=tar.stdout, timeout=600)
    if tar.wait() != 0:
        raise RuntimeError("tar failed")


def s3_environment(endpoint: str) -> dict[str, str]:
    """Return the environment in which copying tools talk to `endpoint` and to nothing else."""
    own = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "RCLONE_"))}
    return own | {
        "AWS_ACCESS_KEY_ID": os.environ.get("AWS_ACCESS_KEY_ID", "testkey"),
        "AWS_SECRET_ACCESS_KEY": os.environ.get("AWS_SECRET_ACCESS_KEY", "testsecret"),
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "RCLONE_CONFIG": os.devnull,
        "RCLONE_S3_PROVIDER": "Ceph",
        "RCLONE_S3_ENV_AUTH": "true",
        "RCLONE_S3_ENDPOINT": endpoint,
        "RCLONE_S3_REGION": "us-east-1",
    }


def rclone(tree: Path, target: str, environment: Mapping[str, str]) -> None:
    """Copy a tree to `bucket/prefix` with rclone, sixteen files at a time and without looking for what is there."""
    need("rclone")
    words = ["rclone", "copy", "--transfers", "16", "--checkers", "16", "--no-traverse", "--s3-no-check-bucket"]
    _check([*words, str(tree), f":s3:{target}"], environment, timeout=600)


def aws(tree: Path, target: str, environment: Mapping[str, str]) -> None:
    """Copy a tree to `bucket/prefix` with the AWS CLI."""
    need("aws")
    words = ["aws", "s3", "cp", "--recursive", "--only-show-errors"]
    _check([*words, str(tree), f"s3://{target}"], environment, timeout=600)


def need(program: str) -> None:
    """Raise `Skip` where a program is not installed."""
    if shutil.which(program) is None:
        raise Skip(f"{program} is not installed")


def _check(
    words: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    stdin: bytes | IO[bytes] | None = None,
    timeout: float,
) -> None:
    """Run a program; RuntimeError says what it said last where it fails."""
    given: Any = {"input": stdin} if isinstance(stdin, bytes) else {"stdin": stdin or subprocess.DEVNULL}
    done: subprocess.CompletedProcess[bytes] = subprocess.run(
        words, env=environment, capture_output=True, timeout=timeout, check=False, **given
    )
    if done.returncode != 0:
        said = (done.stderr or done.stdout).decode(errors="replace").strip() or f"exit code {done.returncode}"
        raise RuntimeError(said)
