"""The qemu engine: every command in a virtual machine of its own, with its own kernel.

Owns what a VM is made with on this host, and how a command's spec becomes a request to a guest. VMs and who gets which
are `pool.py`'s, one VM `vm.py`'s. The file system a guest sees is the host's overlay, served by virtiofsd; so layers
are the same as the bubblewrap engine's, in both its tiers (root, or not).
"""

from __future__ import annotations

import dataclasses
import math
import os
import select
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from fanout.engine import hints, limits, network, rootfs, seccomp
from fanout.engine.base import Engine, Process, Spec, check_spec
from fanout.engine.bubblewrap import (
    CAPABILITIES,
    Overlay,
    check_directories,
    check_network,
    find_bwrap,
    home_of,
    open_spawner,
    raise_open_files,
)
from fanout.engine.owned import OwnedDirectory
from fanout.engine.qemu import accel, image
from fanout.engine.qemu.machine import Acceleration, Guest
from fanout.engine.qemu.plan import Plan
from fanout.engine.qemu.pool import Pool
from fanout.engine.qemu.process import VMProcess
from fanout.engine.qemu.protocol import Address, Request, Tmpfs
from fanout.engine.qemu.reaper import Reaper
from fanout.engine.qemu.share import GUEST_DIRECTORIES, find_virtiofsd, open_files, tree_options
from fanout.engine.qemu.template import Templates
from fanout.engine.qemu.vm import VM, Host
from fanout.engine.spawning import Spawner
from fanout.errors import EngineUnavailable, Invalid
from fanout.runtime import Runtime, system

__all__ = ["QemuEngine"]

MIB = 1024 * 1024

#: The beginning of the names of directories for sockets.
DIRECTORY = "fanout-qemu-"

#: QEMU's own network: its DNS and its way out ask the namespace that QEMU is in, and so slirp4netns (`network.py`).
NETDEV = "user,ipv6=off"
ADDRESS = Address("10.0.2.15", 24, "10.0.2.2")

#: What a guest's kernel and agent take of its memory: what a command may have is so much less.
KERNEL_BYTES = 64 * MIB

#: The least memory a guest boots with.
LEAST_BYTES = 128 * MIB

#: How much of the host's free memory VMs may take together, in percent.
MEMORY_PERCENT = 85

#: Numbers of capabilities (linux/capability.h): a command gets the same here as from the bubblewrap engine.
NUMBERS = {
    **{"CAP_CHOWN": 0, "CAP_DAC_OVERRIDE": 1, "CAP_FOWNER": 3, "CAP_FSETID": 4, "CAP_KILL": 5, "CAP_SETGID": 6},
    **{"CAP_SETUID": 7, "CAP_NET_BIND_SERVICE": 10, "CAP_SYS_CHROOT": 18},
}

CAPABILITY_MASK = sum(1 << NUMBERS[name] for name in CAPABILITIES)

#: What VMs try before they are needed, unless commands are run by another shell.
SHELL = b"/bin/sh"


class QemuEngine(Engine):
    """Runs each command in a fresh VM, from a pool of booted ones where one fits.

    `root` and `host_paths` are as for `BubblewrapEngine`. `cache_dir` is where the guest's kernel and initramfs are
    kept, made at first use. `memory_bytes` is the memory of a guest for a command without a limit of its own; one with
    a limit gets that and what its kernel takes. `pool` is how many VMs are kept booted once the first was asked for.
    `acceleration` None takes KVM where a VM boots with it, else TCG. `overlay` picks the tier of mounts, and
    `network_deny` what is not reached, see there.

    Raises `Invalid` for values out of range. What this host lacks shows in `probe` or the first `start`.
    """

    name = "qemu"

    def __init__(
        self,
        *,
        cache_dir: Path,
        root: Path | None = None,
        host_paths: Sequence[tuple[str, str]] = (),
        memory_bytes: int = 512 * MIB,
        pool: int = 2,
        acceleration: Acceleration | None = None,
        overlay: Overlay = "auto",
        network_deny: Sequence[str] = (),
        runtime: Runtime = system,
    ) -> None:
        if root is not None and not root.is_dir():
            raise Invalid.argument("root", str(root), "must be a directory that holds a system")
        if memory_bytes < LEAST_BYTES:
            raise Invalid.argument("memory_bytes", memory_bytes, f"must be {LEAST_BYTES} (128 MiB) or more")
        rootfs.check_host_paths(host_paths)
        try:
            self._network = network.find(network_deny)
        except ValueError as error:
            raise Invalid.argument("network_deny", network_deny, f"must be IPv4 networks: {error}") from error
        self._cache_dir = cache_dir
        self._root = root
        self._host_paths = tuple(host_paths)
        self._memory_bytes = memory_bytes
        self._pool_size = pool
        self._acceleration = acceleration
        self._overlay = overlay
        self._runtime = runtime
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._closed = False
        self._probed = False
        self._host: _Host | None = None

    @property
    def xattr_prefix(self) -> str:
        """See `Engine.xattr_prefix`."""
        return "trusted.overlay." if self._ready().private_mounts else "user.overlay."

    @property
    def acceleration(self) -> Acceleration:
        """How guests are run here: "kvm" or "tcg"."""
        return self._ready().acceleration

    def counts(self) -> dict[str, int]:
        """Return how many wait for a VM, how many boot, are ready, and run a command."""
        return self._ready().pool.counts()

    def vm_host(self) -> Host:
        """Return what VMs are made with here, to boot some apart from the pool."""
        return self._ready().vms

    def vms(self) -> Sequence[VM]:
        """Return the VMs there are now, whatever they do; none is booted for this."""
        return self._host.pool.vms() if self._host is not None else ()

    def probe(self) -> None:
        """See `Engine.probe`. Runs a command over an overlay in a VM."""
        if self._probed:
            return
        hints.run_probe(self)
        self._probed = True

    def start(self, spec: Spec) -> Process:
        """See `Engine.start`. Where no VM is free, the command starts when its turn comes."""
        check_spec(spec)
        if spec.network:
            check_network(self._network, self._root)
        rootfs.check_targets(self._root, [mount.target for mount in spec.mounts])
        for mount in spec.mounts:
            _check_target(mount.target)
            check_directories(mount)
        host = self._ready()
        host.rehearses = _rehearsal(spec)
        guest = host.guest(spec, self._memory_bytes)
        process = VMProcess(spec, host.pool, self._request(spec), guest, self._runtime)
        process.launch()
        return process

    def close(self) -> None:
        """See `Engine.close`."""
        self._leave_parent()
        with self._lock:
            self._closed = True
            host, self._host = self._host, None
        if host is not None:
            host.close()

    def _request(self, spec: Spec) -> Request:
        memory_bytes = spec.limits.memory_bytes or self._memory_bytes - KERNEL_BYTES
        return Request(
            argv=[os.fsencode(word) for word in spec.argv],
            env=[os.fsencode(f"{name}={value}") for name, value in spec.env.items()],
            cwd=os.fsencode(spec.cwd),
            tmpfs=[
                Tmpfs("/tmp", 0o1777, memory_bytes),
                Tmpfs("/dev/shm", 0o1777, memory_bytes),
                Tmpfs(rootfs.HOME, 0o700, memory_bytes),
            ],
            memory_bytes=memory_bytes,
            pids=limits.PIDS_MAX,
            cpus=spec.limits.cpus,
            open_files=limits.OPEN_FILES,
            capabilities=CAPABILITY_MASK,
            now_ns=self._runtime.now_ns(),
            entropy=self._runtime.token_bytes(64),
            inodes=open_files() // 2,
            network=ADDRESS if spec.network else None,
        )

    def _ready(self) -> _Host:
        self._leave_parent()
        with self._lock:
            if self._closed:
                raise EngineUnavailable("the engine is closed")
            if self._host is None:
                self._host = _Host(self)
            return self._host

    def _leave_parent(self) -> None:
        """In a forked child: VMs, their threads and their spawner are the parent's."""
        if self._owner == os.getpid():
            return
        self._owner, self._lock = os.getpid(), threading.Lock()
        if self._host is not None:
            self._host.forget()
            self._host = None


class _Host:
    """What the engine found out about this host, once, and holds for all its VMs."""

    def __init__(self, engine: QemuEngine) -> None:
        self.runtime = engine._runtime
        self._virtiofsd = find_virtiofsd()
        made = image.assemble(engine._cache_dir)
        self.acceleration: Acceleration = engine._acceleration or accel.choose(engine._cache_dir, made)
        root, host_paths = engine._root, engine._host_paths
        bwrap = find_bwrap()
        self._directory = OwnedDirectory(DIRECTORY)
        self._etc = None if root is not None and (root / "etc").is_dir() else rootfs.Etc()
        etc = self._etc.path if self._etc else None
        resolver = Path(self._directory.path, "resolv.conf")
        resolver.write_text(network.RESOLV_CONF)
        files = [str(made.kernel), str(made.initramfs), str(resolver)]
        if self.acceleration == "kvm":
            if not os.path.exists(accel.DEVICE):
                raise EngineUnavailable(f"there is no {accel.DEVICE}")
            files.append(accel.DEVICE)
        self._shown = [home_of(bwrap), *files, *rootfs.private_paths(root, etc, host_paths)]
        self._overlay = engine._overlay
        self._lock = threading.Lock()
        self._closed = False
        spawner = self._new_spawner()
        self.private_mounts = spawner.private_mounts
        seen_at = spawner.seen_at
        pooled = Guest(memory_bytes=engine._memory_bytes, acceleration=self.acceleration)
        self.vms = Host(
            spawner=spawner,
            bwrap=bwrap.replace(home_of(bwrap), seen_at(home_of(bwrap)), 1),
            virtiofsd=self._virtiofsd,
            image=made,
            files={path: seen_at(path) for path in files[:2]},
            kvm=seen_at(accel.DEVICE) if self.acceleration == "kvm" else "",
            tree=tree_options(root, etc, host_paths, seen_at),
            network=engine._network,
            resolver=seen_at(str(resolver)),
            own_resolver=etc is None,
            directory=self._directory.path,
            templates=Templates(engine._cache_dir / "qemu", made),
            copied=pooled if self.acceleration == "tcg" else None,
            reaper=Reaper(),
            runtime=self.runtime,
        )
        plan = Plan(pooled, size=engine._pool_size, boots=_boots(), memory_bytes=_memory_for_vms())
        self.rehearses = SHELL
        self.pool = Pool(plan, self._make, lambda: Request([self.rehearses, b"-c", b":"], capabilities=CAPABILITY_MASK))
        raise_open_files()

    def guest(self, spec: Spec, memory_bytes: int) -> Guest:
        """Return what a command needs."""
        if spec.limits.memory_bytes is not None:
            memory_bytes = max(memory_bytes, _rounded(spec.limits.memory_bytes + KERNEL_BYTES))
        cpus = min(len(os.sched_getaffinity(0)), math.ceil(spec.limits.cpus or 1))
        return Guest(memory_bytes, cpus, self.acceleration, NETDEV if spec.network else None)

    def forget(self) -> None:
        """In a forked child: all of it is the parent's."""
        self.vms.spawner.forget()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self.pool.close()
        self.vms.reaper.close()
        self.vms.spawner.close()
        self._directory.close()
        if self._etc is not None:
            self._etc.close()

    def _new_spawner(self) -> Spawner:
        return open_spawner(self._overlay, seccomp.program(), self._shown)

    def _make(self, guest: Guest, died: Callable[[VM], None]) -> VM:
        """Return a VM to be; where the spawner died, and all VMs with it, there is another one."""
        with self._lock:
            if _is_dead(self.vms.spawner) and not self._closed:
                self.vms.spawner.close()
                self.vms = dataclasses.replace(self.vms, spawner=self._new_spawner())
            return VM(self.vms, guest, died)


def _rehearsal(spec: Spec) -> bytes:
    """Return the shell that runs a command, where one does."""
    program = os.fsencode(spec.argv[0])
    return program if program.endswith(b"sh") and len(spec.argv) > 1 and spec.argv[1] in ("-c", b"-c") else SHELL


def _is_dead(spawner: Spawner) -> bool:
    poll = select.poll()
    poll.register(spawner.pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _check_target(target: str) -> None:
    """Refuse mount targets where a guest mounts something of its own."""
    for taken in GUEST_DIRECTORIES:
        if target == taken or target.startswith(f"{taken}/"):
            raise Invalid.argument("mount target", target, f"lies in {taken}, which a VM has for itself")


def _rounded(size_bytes: int) -> int:
    """Round memory up to what QEMU takes, and so that VMs of nearly the same size are the same."""
    return -(-size_bytes // (32 * MIB)) * 32 * MIB


def _boots() -> int:
    """How many VMs boot at once: one a core, for booting is computing."""
    return max(1, len(os.sched_getaffinity(0)))


def _memory_for_vms() -> int:
    """How much memory all VMs may take together: most of what is free now, on this host and in our cgroup."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min([free, *limits.memory_left(Path("/proc/self/cgroup").read_text())]) * MEMORY_PERCENT // 100
