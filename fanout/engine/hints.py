"""Proving that an engine works here, and what would help where it does not.

Owns the trial run and the advice that goes with its failures. Changes nothing on the host.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from fanout.engine.base import Engine, Limits, Mount, Spec
from fanout.errors import EngineUnavailable

__all__ = ["advice", "run_probe"]

#: What was said (a part of it) -> what helps.
SAID = (
    ("user namespaces", "allow unprivileged user namespaces"),
    ("uid map", "allow unprivileged user namespaces"),
    ("No permissions to create", "allow unprivileged user namespaces"),
    (
        "Can't mount proc",
        "/proc is partly hidden here (a container?): start it with --security-opt systempaths=unconfined",
    ),
    ("loopback", "the network namespace is restricted here: allow unprivileged user namespaces"),
    ("overlay", "load the overlay module (modprobe overlay); unprivileged mounts of it need Linux 5.11 or later"),
    ("pivot_root", "the root file system is a ramdisk, or a security module forbids pivot_root"),
)

#: sysctl -> (the value that forbids, what to do).
SYSCTLS = {
    "kernel/unprivileged_userns_clone": ("0", "sysctl kernel.unprivileged_userns_clone=1"),
    "user/max_user_namespaces": ("0", "sysctl user.max_user_namespaces=15000"),
    "kernel/apparmor_restrict_unprivileged_userns": (
        "1",
        "sysctl kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile that grants bwrap userns",
    ),
}


def run_probe(engine: Engine) -> None:
    """Run `true` over a small overlay; `EngineUnavailable` with advice where that fails."""
    with tempfile.TemporaryDirectory(prefix="fanout-probe-", ignore_cleanup_errors=True) as top:
        layers = [Path(top, name) for name in ("lower", "upper", "work")]
        for layer in layers:
            layer.mkdir()
        lower, upper, work = map(str, layers)
        said = bytearray()
        spec = Spec(
            ["/bin/sh", "-c", "echo ok > /mnt/probe/written"],
            [Mount("/mnt/probe", (lower,), upper, work)],
            cwd="/mnt/probe",
            limits=Limits(timeout_s=30),
        )
        try:
            exit = engine.start(spec).wait(lambda _, chunk: said.extend(chunk))
        except EngineUnavailable as error:
            raise EngineUnavailable(f"{error}{advice(str(error))}") from error
        if exit.exit_code != 0 or not Path(upper, "written").exists():
            shown = said.decode(errors="replace").strip()
            raise EngineUnavailable(f"a trial command ended {exit.status} with {exit.exit_code}: {shown}")


def advice(message: str, proc_sys: Path = Path("/proc/sys")) -> str:
    """Return what would help for this failure, from the message and from what this host's settings say; may be ""."""
    found: list[str] = []
    for name, (forbidding, remedy) in SYSCTLS.items():
        try:
            if (proc_sys / name).read_text().strip() == forbidding:
                found.append(remedy)
        except OSError:
            continue
    found += [remedy for part, remedy in SAID if part.lower() in message.lower()]
    if "not permitted" in message and _in_container():
        found.append("this is a container: its seccomp profile or missing CAP_SYS_ADMIN forbids namespaces")
    unique = list(dict.fromkeys(found))
    return f" (what may help: {'; '.join(unique)})" if unique else ""


def _in_container() -> bool:
    return Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()
