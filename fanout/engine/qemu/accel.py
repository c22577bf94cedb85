"""Whether VMs run with KVM on this host: only booting one tells.

Owns that probe and its result, kept for this boot of the host. /dev/kvm can be there, and open, on a host whose guests
then hang. Blocking.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fanout.engine.qemu.command import Acceleration, Guest, find_qemu
from fanout.engine.qemu.image import Image
from fanout.engine.qemu.machine import Machine
from fanout.errors import EngineUnavailable

__all__ = ["Finding", "choose", "known", "probe"]

#: How long a guest may take to boot with KVM: ten times what it takes.
BOOT_S = 10.0

DEVICE = "/dev/kvm"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a probe found: whether a guest boots with KVM, and in words how it went."""

    kvm: bool
    reason: str


def choose(cache_dir: Path, image: Image) -> Acceleration:
    """Return "kvm" where a guest boots with it, else "tcg"; probes once for each boot of the host."""
    return "kvm" if probe(cache_dir, image).kvm else "tcg"


def probe(cache_dir: Path, image: Image, device: str = DEVICE) -> Finding:
    """Return what is known, or boot a guest with KVM to find out, within `BOOT_S` seconds."""
    if not os.path.exists(device):
        return Finding(False, f"there is no {device}")
    if not os.access(device, os.R_OK | os.W_OK):
        return Finding(False, f"{device} is closed to this user: join the group kvm")
    found = known(cache_dir, image)
    if found is None:
        found = _boot(image)
        _keep(cache_dir, image, found)
    return found


def known(cache_dir: Path, image: Image) -> Finding | None:
    """Return what a probe since the host's last boot found, with this image, QEMU and user; None if there was none."""
    try:
        kept = json.loads(_file(cache_dir).read_text())
        return Finding(bool(kept["kvm"]), str(kept["reason"])) if kept["of"] == _circumstances(image) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _boot(image: Image) -> Finding:
    machine = Machine(image, Guest(acceleration="kvm"), filesystem=None, launch=_launch)
    try:
        machine.start()
        return Finding(True, f"a guest boots with KVM in {machine.wait_ready(BOOT_S):.2f} s")
    except EngineUnavailable as error:
        return Finding(False, f"{DEVICE} opens, but no guest boots with it: {error}")
    finally:
        machine.close()


def _launch(argv: Sequence[str], inherited: Sequence[int], output: int) -> subprocess.Popen[bytes]:
    """Start QEMU as it is, for nothing hostile runs in this guest; it must not outlive us, hanging."""
    bound = ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
    return subprocess.Popen([*bound, *argv], pass_fds=inherited, stdin=subprocess.DEVNULL, stdout=output, stderr=output)


def _keep(cache_dir: Path, image: Image, found: Finding) -> None:
    path = _file(cache_dir)
    fresh = path.with_suffix(f".{os.getpid()}")
    try:
        fresh.write_text(json.dumps({"of": _circumstances(image), **asdict(found)}))
        fresh.replace(path)
    except OSError:
        pass  # the next process probes again


def _circumstances(image: Image) -> list[str | int]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return [boot, os.geteuid(), image.version, os.stat(find_qemu()).st_mtime_ns]


def _file(cache_dir: Path) -> Path:
    return cache_dir / "qemu" / "kvm.json"
