"""Escapes that a hostile command tries, the same on every engine: none may get anywhere.

Each test is a program in a sandbox that prints what it got at. What it may print is stated; an engine may refuse
earlier, or for another reason.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from fanout.engine import seccomp
from fanout.engine.base import Spec
from fanout.errors import EngineUnavailable
from tests.support.box import BOXES, PRELUDE, Box, open_box
from tests.support.engines import ENGINES


@pytest.fixture(scope="module", params=BOXES)
def box(request: pytest.FixtureRequest) -> Iterator[Box]:
    with open_box(request.param) as opened:
        yield opened


@pytest.fixture(scope="module", params=[name for name in BOXES if not name.startswith("qemu")])
def our_kernel(request: pytest.FixtureRequest) -> Iterator[Box]:
    """A box whose commands share the host's kernel: what a VM's command may tell its own is its business."""
    with open_box(request.param) as opened:
        yield opened


@pytest.fixture(scope="module", params=ENGINES)
def ours(request: pytest.FixtureRequest) -> Iterator[Box]:
    """A box whose engine runs in this process."""
    with open_box(request.param) as opened:
        yield opened


@pytest.fixture
def secret(tmp_path: Path) -> Iterator[Path]:
    """A file of the host that everybody on it may read."""
    path = Path("/tmp", f"fanout-secret-{uuid.uuid4().hex}")
    path.write_text("the host's own")
    path.chmod(0o644)
    yield path
    path.unlink()


# --- files of the host --------------------------------------------------------------------------------------------


def test_no_way_leads_to_a_file_of_the_host(box: Box, secret: Path) -> None:
    doors = ["", "/proc/1/root", "/proc/self/root", "/proc/1/cwd", "/proc/self/cwd/../../../../..", "/oldroot", "/.."]
    doors += ["/proc/thread-self/root", "/dev/fd/../../..", "/usr/../..", "/mnt/work/../..", "/mnt/work/up"]
    mount = box.mount()
    Path(mount.lowers[0], "up").symlink_to("../../../../../../../..")
    Path(mount.lowers[0], "straight").symlink_to(secret)
    script = f'for door in "$@"; do cat "$door{secret}" 2>&-; done; cat /mnt/work/straight 2>&-; true'
    said = box.run(["/bin/sh", "-c", script, "sh", *doors], mount)
    assert said.lines() == []


def test_private_places_of_the_host_are_not_there(box: Box) -> None:
    places = ["/etc/shadow", "/etc/gshadow", "/etc/sudoers", "/etc/ssh", "/etc/ssl/private", "/etc/machine-id", "/home"]
    places += ["/root/.ssh", "/root/.aws", "/root/.bash_history", "/var/lib", "/var/log", "/var/spool", "/boot"]
    places += ["/run/docker.sock", "/var/run/docker.sock", "/run/containerd", "/run/systemd", "/run/dbus"]
    places += ["/sys/firmware", "/sys/kernel", "/sys/fs/cgroup", "/dev/mem", "/dev/kmsg", "/dev/kvm", "/dev/fuse"]
    places += ["/dev/vda", "/dev/sda", "/dev/net/tun", "/dev/vsock", "/dev/loop-control", "/proc/kcore"]
    if box.is_vm:  # what a kernel of its own has may be there
        places = [place for place in places if not place.startswith(("/sys/", "/dev/", "/proc/"))]
    script = 'for place; do head -c 1 "$place" >/dev/null 2>&1 && echo "$place"; ls "$place" 2>&-; done; true'
    assert box.run(["/bin/sh", "-c", script, "sh", *places]).lines() == []


def test_what_is_shown_read_only_cannot_be_written(box: Box) -> None:
    code = """
def through(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.write(os.open(f"/proc/self/fd/{fd}", os.O_WRONLY), b"#")
    finally:
        os.close(fd)
for path in ("/usr/bin/env", "/etc/passwd", "/mnt/ro/f"):
    tried((path, lambda: open(path, "ab").write(b"#")), (f"{path} by fd", lambda: through(path)),
          (f"{path} mode", lambda: os.chmod(path, 0o777)), (f"{path} gone", lambda: os.unlink(path)),
          (f"{path} times", lambda: os.utime(path)), (f"{path} linked", lambda: os.link(path, path + "2")))
    tried((f"{path} xattr", lambda: os.setxattr(path, "user.a", b"1")), (f"{path} size", lambda: os.truncate(path, 0)))
for path in ("/", "/usr/bin", "/etc", "/mnt/ro", "/dev", "/proc/sys"):
    tried((path, lambda: open(f"{path}/fanout-made", "w")))
"""
    mount = box.mount({"f": "1"})
    read_only = type(mount)("/mnt/ro", mount.lowers)
    assert box.python(code, read_only).lines() == []
    assert Path(mount.lowers[0], "f").read_text() == "1"


def test_credentials_of_the_host_are_in_no_environment(ours: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "FANOUT_API_KEY", "FANOUT_STORE", "GITHUB_TOKEN"):
        monkeypatch.setenv(name, "hunter2")
    said = ours.sh("cat /proc/*/environ /proc/*/cmdline 2>&- | tr '\\0' '\\n'; env; set")
    assert "hunter2" not in said.stdout
    words = {line.partition("=")[0] for line in ours.sh("cat /proc/*/environ | tr '\\0' '\\n'").stdout.splitlines()}
    assert not any(word.startswith(("AWS_", "FANOUT_")) for word in words - {"FANOUT_SPAWNER"})  # a pid


def test_only_the_three_streams_are_open_in_any_process(our_kernel: Box) -> None:
    code = """
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        continue
    for name in names:
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
        if target.startswith("/") and not target.startswith(("/dev/null", "/proc")):
            print(pid, name, target)
"""
    assert our_kernel.python(code).lines() == []
    assert our_kernel.sh("ls /proc/self/fd").lines() == ["0", "1", "2", "3"]  # the last is ls' own


# --- other commands, other disks ----------------------------------------------------------------------------------


def test_two_commands_know_nothing_of_each_other(ours: Box) -> None:
    assert ours.bench is not None
    word = f"sibling-{uuid.uuid4().hex}"
    mount = ours.mount({"secret": word})
    make = (
        "import time\n"
        "shm = libc.shmget(0x5eed, 4096, 0o1666)\n"
        "open('/dev/shm/mark', 'w').close(); open('/tmp/mark', 'w').close()\n"
        f"s = socket.socket(socket.AF_UNIX); s.bind('\\0{word}'); s.listen()\n"
        "print('up', flush=True)\n"
        "time.sleep(60)\n"
    )
    up, done = threading.Event(), []
    process = ours.bench.engine.start(Spec(["/usr/bin/python3", "-c", PRELUDE + make, word], [mount]))
    thread = threading.Thread(target=lambda: done.append(process.wait(lambda *_: up.set())))
    thread.start()
    try:
        assert up.wait(60)
        look = f"""
tried(("shm", lambda: [][0] if libc.shmget(0x5eed, 4096, 0) >= 0 else os.stat("/nowhere")),
      ("tmp", lambda: os.stat("/tmp/mark")), ("dev", lambda: os.stat("/dev/shm/mark")),
      ("mount", lambda: os.stat("/mnt/work")),
      ("socket", lambda: socket.socket(socket.AF_UNIX).connect("\\0{word}")))
for pid in filter(str.isdigit, os.listdir("/proc")):
    if "time.sleep" in open(f"/proc/{{pid}}/cmdline").read() and pid != str(os.getpid()):
        print("seen", pid)
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.kill(-1, signal.SIGTERM)
"""
        assert ours.python(look.replace("time.sleep", "time." + "sleep(60)\\n")).stdout == ""
        upper, lower = str(mount.upper), mount.lowers[0]
        assert ours.sh(f"ls {shlex.quote(upper)} {shlex.quote(lower)} {shlex.quote(str(ours.scratch))}").stdout == ""
        assert not done
    finally:
        process.kill()
        thread.join()


# --- processes and sockets of the host ----------------------------------------------------------------------------


def test_no_signal_reaches_the_host(box: Box) -> None:
    with subprocess.Popen(["/bin/sleep", "60"]) as victim:
        box.python(
            f"import signal\nfor pid in ({victim.pid}, {os.getpid()}, -1):\n  tried((pid, lambda: os.kill(pid, 9)))"
        )
        box.sh(f"kill -9 {victim.pid}; kill -9 -1")
        assert victim.poll() is None
        victim.kill()


def test_tracing_the_sandbox_s_init_gains_nothing(box: Box, secret: Path) -> None:
    """A command that held its init would not end; and what it could open through it is what it can open itself."""
    code = f"""
PTRACE_ATTACH, PTRACE_SEIZE = 16, 0x4206
for request in (PTRACE_ATTACH, PTRACE_SEIZE):
    if libc.ptrace(request, 1, 0, 0) == 0:
        print("traced")
for door in ("/proc/1/root", "/proc/1/cwd", "/proc/1/task/1/root"):
    tried((door, lambda: open(door + "{secret}").read()))
"""
    if not box.is_vm:
        assert box.python(code).lines() == []


def test_sockets_of_the_host_cannot_be_reached(box: Box) -> None:
    name = f"fanout-test-{uuid.uuid4().hex}"
    path = Path("/tmp", name)
    with socket.socket(socket.AF_UNIX) as abstract, socket.socket(socket.AF_UNIX) as named:
        abstract.bind("\0" + name)
        named.bind(str(path))
        path.chmod(0o777)
        for server in (abstract, named):
            server.listen()
        with socket.create_server(("127.0.0.1", 0)) as server:
            code = f"""
tried(("abstract", lambda: socket.socket(socket.AF_UNIX).connect("\\0{name}")),
      ("named", lambda: socket.socket(socket.AF_UNIX).connect("{path}")),
      ("loopback", lambda: socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), 2)))
"""
            assert box.python(code).lines() == []
        path.unlink()


# --- power --------------------------------------------------------------------------------------------------------


def test_the_host_s_kernel_cannot_be_told_anything(our_kernel: Box) -> None:
    before = Path("/proc/sys/kernel/core_pattern").read_text()
    code = """
def write(path):  # nothing: what no handler takes is refused, though it may be opened
    os.write(os.open(path, os.O_WRONLY), b"")
for top in ("/proc/sys", "/proc/fs", "/proc/bus", "/proc/irq", "/proc/driver", "/proc/acpi", "/proc/scsi", "/proc/tty"):
    for directory, _, names in os.walk(top):
        for name in names:
            tried((f"{directory}/{name}", lambda: write(f"{directory}/{name}")))
for name in os.listdir("/proc"):
    if not name.isdigit() and os.path.isfile(f"/proc/{name}") and not os.path.islink(f"/proc/{name}"):
        tried((name, lambda: write(f"/proc/{name}")))
tried(("oom", lambda: os.write(os.open("/proc/self/oom_score_adj", os.O_WRONLY), b"-1000")))
for name in ("kmsg", "kcore", "kpageflags", "vmallocinfo", "timer_list", "slabinfo"):
    tried((name, lambda: open(f"/proc/{name}", "rb").read(1)))
addresses = {line.split()[0] for line in open("/proc/kallsyms")} if os.path.exists("/proc/kallsyms") else {"0"}
tried(("kallsyms", lambda: [][0] if len(addresses) > 1 else os.stat("/nowhere")))
"""
    assert our_kernel.python(code).lines() == []
    assert Path("/proc/sys/kernel/core_pattern").read_text() == before


def test_nothing_can_be_gained_by_running_something(our_kernel: Box) -> None:
    """Set-user-id programs and file capabilities mean nothing; the bounding set and no_new_privs stay."""
    mount = our_kernel.mount()
    code = """
status = dict(line.split(":\\t") for line in open("/proc/self/status") if ":\\t" in line)
if status["NoNewPrivs"].strip() != "1": print("may gain", status["NoNewPrivs"])
held = {kind: int(status[kind], 16) for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")}
wanted = {0, 1, 3, 4, 5, 6, 7, 10, 18}
for kind, bits in held.items():
    extra = [bit for bit in range(64) if bits >> bit & 1 and bit not in wanted]
    if extra: print(kind, extra)
import shutil
for top in ("/mnt/work", "/tmp"):
    shutil.copy("/bin/cat", f"{top}/mine")
    os.chmod(f"{top}/mine", 0o6755)
    tried((f"{top} capability", lambda: os.setxattr(f"{top}/mine", "security.capability", bytes(20))))
    for kind, device in ((0o060000, os.makedev(254, 0)), (0o020000, os.makedev(1, 1)), (0o020000, os.makedev(10, 200))):
        tried((f"{top} device", lambda: os.mknod(f"{top}/device", kind | 0o666, device)))
"""
    assert our_kernel.python(code, mount).lines() == []


def test_no_namespace_and_no_mount_can_be_made(our_kernel: Box) -> None:
    code = """
for flag in (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
    if libc.unshare(flag) == 0: print("unshare", hex(flag))
for name in os.listdir("/proc/1/ns"):
    tried((name, lambda: [][0] if libc.setns(os.open(f"/proc/1/ns/{name}", os.O_RDONLY), 0) == 0 else os.stat("/no")))
mounts = [(b"none", b"/", None, 0x44000), (b"t", b"/tmp", b"tmpfs", 0), (b"p", b"/tmp", b"proc", 0)]
mounts += [(b"/", b"/tmp", None, 0x1000), (None, b"/usr", None, 0x1020), (b"c", b"/tmp", b"cgroup2", 0)]
for source, target, kind, flags in mounts:
    if libc.mount(source, target, kind, ctypes.c_ulong(flags), None) == 0: print("mount", target, kind, flags)
if libc.umount2(b"/proc/sys", 2) == 0: print("umount")
"""
    assert our_kernel.python(code).lines() == []
    assert our_kernel.sh("unshare -Ur true || unshare -m true || nsenter -t 1 -m true").exit_code != 0


def test_denied_system_calls_are_denied(our_kernel: Box) -> None:
    column = 0 if os.uname().machine == "x86_64" else 1
    numbers = {name: seccomp.NUMBERS[name][column] for name in (*seccomp.DENIED, *seccomp.MOUNTS, *seccomp.MISSING)}
    code = f"""
for name, number in {numbers!r}.items():
    if number is not None and call(number, 0, 0, 0, 0, 0, 0) not in (-errno.EPERM, -errno.ENOSYS):
        print(name)
if call({numbers["keyctl"]}, 0, -3, 1) != -errno.EPERM: print("session keyring")
import fcntl, pty
master, slave = pty.openpty()
for request in (0x5412, 0x541C):
    tried(("typed", lambda: fcntl.ioctl(slave, request, b"x")))
for family in (3, 15, 17, 21, 29, 31, 38, 40, 44):
    for kind in (1, 2, 3):
        tried((f"family {{family}}", lambda: socket.socket(family, kind, 0)))
for protocol in (2, 6, 9, 12, 15, 16, 21):
    tried((f"netlink {{protocol}}", lambda: socket.socket(16, 3, protocol)))
tried(("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)))
"""
    assert our_kernel.python(code).lines() == []


def test_no_capability_over_its_own_network(our_kernel: Box) -> None:
    code = """
import fcntl, struct
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
tried(("down", lambda: fcntl.ioctl(link, 0x8914, struct.pack("16sh14x", b"lo", 0))),
      ("address", lambda: fcntl.ioctl(link, 0x8916, struct.pack("16sHH4s8x", b"lo", 2, 0, bytes([10, 9, 9, 9])))))
"""
    try:
        assert our_kernel.python(code, network=True).lines() == []
    except EngineUnavailable as error:
        if "/dev/net/tun" not in str(error):
            raise
        assert our_kernel.python(code).lines() == []


def test_the_classical_way_out_of_a_chroot_leads_back_in(box: Box, secret: Path) -> None:
    code = f"""
os.mkdir("/tmp/jail")
here = os.open("/", os.O_RDONLY)
os.chroot("/tmp/jail")
os.fchdir(here)
for _ in range(100):
    os.chdir("..")
os.chroot(".")
tried(("secret", lambda: open("{secret}").read()))
print(sorted(os.listdir("/"))[:2])
"""
    assert box.python(code).stdout == "['bin', 'dev']\n"


def test_a_crash_feeds_no_program_of_the_host(box: Box) -> None:
    code = "import resource; print(resource.getrlimit(resource.RLIMIT_CORE)); os.kill(os.getpid(), 11)"
    said = box.python(code)
    assert said.exit_code == 128 + signal.SIGSEGV
    if not box.is_vm:
        assert said.stdout in ("(1, 1)\n", "")


# --- wearing the host out -----------------------------------------------------------------------------------------


def test_scratch_space_is_bounded(box: Box) -> None:
    script = (
        "for d in /tmp /dev/shm /root; do head -c 80000000 /dev/zero > $d/f 2>/dev/null || echo $d; rm -f $d/f; done"
    )
    said = box.sh(script, memory_bytes=64 << 20)
    assert said.stdout.split() == ["/tmp", "/dev/shm", "/root"] or (box.is_vm and said.status == "oom"), said


def test_a_command_that_writes_without_end_is_stopped(box: Box) -> None:
    mount = box.mount()
    began = time.monotonic()
    script = "i=0; while :; do head -c 4000000 /dev/urandom > f$i; i=$((i+1)); done"
    said = box.sh(script, mount, cwd="/mnt/work", disk_bytes=16 << 20)
    assert (said.status, said.limit) == ("killed", "disk")
    assert time.monotonic() - began < 50
