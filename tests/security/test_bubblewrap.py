"""A hostile command in a bubblewrap sandbox: what it must not see, reach, change, forge or outlive."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fanout.engine.base import Limits, Mount, Spec
from fanout.engine.bubblewrap import CAPABILITIES, BubblewrapEngine
from fanout.engine.check import Bench, completed
from fanout.engine.process import SandboxProcess
from fanout.errors import EngineUnavailable


@pytest.fixture(scope="module", params=["kernel", "bwrap"])
def engine(request: pytest.FixtureRequest) -> Iterator[BubblewrapEngine]:
    made = BubblewrapEngine(overlay=request.param)
    try:
        made.probe()
    except EngineUnavailable as error:
        made.close()
        pytest.skip(str(error))
    yield made
    made.close()


@pytest.fixture
def bench(engine: BubblewrapEngine, tmp_path: Path) -> Bench:
    return Bench(engine, tmp_path)


def out(bench: Bench, script: str, *mounts: Mount, **settings: object) -> str:
    return completed(bench.run(script, *mounts, **settings)).stdout.decode()


# --- sight --------------------------------------------------------------------------------------------------------


def test_of_the_host_only_programs_are_visible(bench: Bench) -> None:
    wanted = {"bin", "dev", "etc", "lib", "lib32", "lib64", "libx32", "mnt", "proc", "root", "run", "sbin", "tmp"}
    assert set(out(bench, "ls -A /").split()) <= wanted | {"usr", "var"}
    assert out(bench, "ls -A /root /tmp /dev/shm /run /mnt").split() == [
        *("/dev/shm:", "/mnt:", "/root:", "/run:", "/tmp:")
    ]
    assert out(bench, "ls -A /var").split() == ["run", "tmp"]
    completed(bench.run("cat /etc/shadow || cat /sys/kernel/vmcoreinfo || ls /home"), 2)


def test_devices_are_the_harmless_ones(bench: Bench) -> None:
    wanted = {"core", "fd", "full", "null", "ptmx", "pts", "random", "shm", "tty", "urandom", "zero"}
    assert set(out(bench, "ls -A /dev").split()) == wanted | {"stdin", "stdout", "stderr"}
    completed(bench.run("mknod /tmp/disk b 254 0"), 1)
    completed(bench.run("touch /dev/made"), 1)


def test_private_keys_are_not_copied_into_etc(bench: Bench) -> None:
    found = out(bench, "find /etc -name private -o -name '*shadow*' -o -name ssh -o -name sudoers -o -name pip.conf")
    assert found == ""
    assert out(bench, "id -un; getent passwd 65534 | cut -d: -f1; hostname") == "root\nnobody\nfanout\n"


def test_the_host_s_environment_is_not_inherited(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FANOUT_TEST_SECRET", "hunter2")
    assert "hunter2" not in out(bench, "cat /proc/*/environ; env")


def test_values_of_the_environment_are_not_on_any_command_line(engine: BubblewrapEngine) -> None:
    process = engine.start(Spec(["/bin/sh", "-c", "echo up; sleep 30"], env={"TOKEN": "hunter3-secret"}))
    seen: list[bytes] = []

    def sink(stream: str, chunk: bytes) -> None:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                seen.append(path.read_bytes())
            except OSError:
                continue
        process.kill()

    process.wait(sink)
    assert any(b"bwrap" in line for line in seen)
    assert not any(b"hunter3-secret" in line for line in seen)


def test_open_files_of_the_host_do_not_leak(bench: Bench, tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(fd, True)
    try:
        assert out(bench, "ls /proc/$$/fd; true").split() == ["0", "1", "2"]
        assert out(bench, "ls /proc/1/fd; true").split()[:3] == ["0", "1", "2"]
        assert str(tmp_path) not in out(bench, "ls -l /proc/*/fd")
    finally:
        os.close(fd)


def test_a_link_on_a_disk_leads_into_the_sandbox_not_to_the_host(bench: Bench) -> None:
    lower = bench.directory()
    (lower / "passwd").symlink_to("/etc/passwd")
    (lower / "up").symlink_to("../../../../../../..")
    (lower / "loop").symlink_to("loop")
    mount = bench.writable(lower)
    assert (
        out(bench, "wc -l < passwd; ls up/root; cat loop 2>&- || echo looped", mount, cwd="/mnt/work") == "2\nlooped\n"
    )


# --- reach --------------------------------------------------------------------------------------------------------


def test_the_host_s_loopback_is_out_of_reach(bench: Bench) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        name = f"fanout-test-{os.getpid()}"
        abstract.bind("\0" + name)
        abstract.listen()
        port = server.getsockname()[1]
        completed(bench.run(["/bin/bash", "-c", f"echo hi > /dev/tcp/127.0.0.1/{port}"]), 1)
        assert f"@{name}" not in out(bench, "cat /proc/net/unix")
    assert out(bench, "tail -n +3 /proc/net/dev | cut -d: -f1").split() == ["lo"]


def test_there_is_no_terminal(bench: Bench) -> None:
    completed(bench.run("exec 3<>/dev/tty"), 2)
    assert out(bench, "cut -d' ' -f6 /proc/$$/stat").strip() != "0"  # a session of its own, not the starter's


def test_layers_are_out_of_reach(bench: Bench) -> None:
    lower = bench.directory({"f": "1"})
    mount = bench.writable(lower)
    paths = [str(lower), str(mount.upper), str(mount.work), "/sys/fs", "/oldroot", "/newroot"]
    tried = [prefix + path for path in paths for prefix in ("", "/proc/1/root", "/proc/self/root")]
    script = 'test -e /mnt/work/f || exit 5; for p; do test ! -e "$p" || echo "$p"; done'
    assert completed(bench.run(["/bin/sh", "-c", script, "sh", *tried], mount)).stdout == b""


def test_attributes_of_overlayfs_cannot_be_forged(bench: Bench) -> None:
    """A forged opaque mark would make a diff delete what the command could not see."""
    lower = bench.directory({"d/f": "1"})
    mount = bench.writable(lower)
    name = f"{bench.engine.xattr_prefix}opaque"
    code = f"import os; os.setxattr('/mnt/work/d', {name!r}, b'y')"
    bench.run(["/usr/bin/python3", "-c", code], mount)
    upper = Path(str(mount.upper), "d")
    assert not upper.exists() or name not in os.listxattr(upper)
    completed(bench.run("mknod /mnt/work/fake c 0 0", bench.writable(lower)), 1)


# --- power --------------------------------------------------------------------------------------------------------


def test_system_directories_cannot_be_made_writable(bench: Bench) -> None:
    for path in ("/", "/usr", "/etc", "/proc/sys"):
        shown = shlex.quote(path)
        completed(bench.run(f"mount -o remount,rw,bind {shown}; umount -l {shown}; touch {shown}/fanout-made"), 1)
    assert not Path("/usr/fanout-made").exists()
    assert not Path("/etc/fanout-made").exists()


def test_a_read_only_mount_stays_so(bench: Bench) -> None:
    lower = bench.directory({"f": "1"})
    mount = Mount("/mnt/ro", (str(lower),))
    completed(bench.run("mount -o remount,rw,bind /mnt/ro; umount -l /mnt/ro; echo 2 > /mnt/ro/f", mount), 2)
    assert (lower / "f").read_text() == "1"


@pytest.mark.parametrize("name", ["kernel/hostname", "kernel/core_pattern", "net/ipv4/ip_forward", "vm/drop_caches"])
def test_kernel_settings_cannot_be_written(bench: Bench, name: str) -> None:
    completed(bench.run(f"echo 1 > /proc/sys/{name}"), 2)
    completed(bench.run("echo h > /proc/sysrq-trigger"), 2)


def test_capabilities_are_few_and_cannot_grow(bench: Bench) -> None:
    status = dict(line.split(":\t") for line in out(bench, "cat /proc/self/status").splitlines() if ":\t" in line)
    assert status["NoNewPrivs"] == "1"
    for kind in ("CapPrm", "CapEff", "CapBnd"):
        assert bin(int(status[kind], 16)).count("1") == len(CAPABILITIES)
    completed(bench.run("unshare -U true"), 1)
    completed(bench.run("unshare -m true"), 1)


def test_nested_user_namespaces_are_a_setting(tmp_path: Path) -> None:
    engine = BubblewrapEngine(nested=True)
    try:
        completed(Bench(engine, tmp_path).run("unshare -Ur true"))
        completed(Bench(engine, tmp_path).run("unshare -Urm sh -c 'mount -o remount,rw,bind /usr && touch /usr/x'"), 32)
    finally:
        engine.close()


def test_the_init_cannot_be_killed_from_inside(bench: Bench) -> None:
    assert out(bench, "kill -9 1; kill -STOP 1; echo alive") == "alive\n"


# --- forgery ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        "bwrap: Can't chdir to /: No such file or directory\n",
        "bwrap: execvp /bin/sh: No such file or directory\n",
        "bwrap: Can't mount proc on /newroot/proc: Operation not permitted\n",
        "bwrap: ",
        "bw",
        "bwrap: x\n" * 3000,
    ],
)
def test_a_command_cannot_pass_for_a_failed_sandbox(bench: Bench, said: str, tmp_path: Path) -> None:
    outcome = completed(bench.run("cat >&2; exit 1", stdin=said.encode()), 1)
    assert outcome.stderr == said.encode()
    timed_out = bench.run("cat >&2; sleep 60", stdin=said.encode(), limits=Limits(timeout_s=0.3))
    assert (timed_out.exit.status, timed_out.stderr) == ("timed_out", said.encode())


def test_a_command_cannot_write_its_own_status(bench: Bench) -> None:
    forged = '{ "exit-code": 0 }'
    fds = " ".join(f"echo '{forged}' >&{fd};" for fd in range(3, 10))
    completed(bench.run(["/bin/bash", "-c", f"exec 2>/dev/null; {fds} exit 7"]), 7)


# --- life and death -----------------------------------------------------------------------------------------------


def test_a_killed_monitor_is_the_end_of_everything(engine: BubblewrapEngine, bench: Bench) -> None:
    word = bench.sleep_word()
    process = engine.start(Spec(["/bin/sh", "-c", f"echo up; setsid sleep {word} & sleep {word}"]))
    assert isinstance(process, SandboxProcess)
    ended = process.wait(lambda *_: os.kill(process._monitor, signal.SIGKILL))
    assert (ended.status, ended.exit_code) == ("killed", None)
    bench.gone(word)


def test_the_end_does_not_depend_on_the_init_s_death_signal(tmp_path: Path) -> None:
    """A command may trace the sandbox's init and make it forget its parent-death signal."""
    engine = BubblewrapEngine()
    engine._ready().options.remove("--die-with-parent")
    bench = Bench(engine, tmp_path)
    word = bench.sleep_word()
    began = time.monotonic()
    assert out(bench, f"(setsid sleep {word} &); echo hi") == "hi\n"
    assert time.monotonic() - began < 30  # not killed by the timeout
    bench.gone(word)
    engine.close()


def test_the_thread_that_started_a_command_may_end(engine: BubblewrapEngine) -> None:
    """bwrap's parent-death signal is a matter of the thread that started it."""
    started = []
    starter = threading.Thread(
        target=lambda: started.append(engine.start(Spec(["/bin/sh", "-c", "sleep 0.3; exit 3"])))
    )
    starter.start()
    starter.join()
    assert started[0].wait(lambda *_: None).exit_code == 3


def test_closing_the_engine_kills_what_runs(bench: Bench) -> None:
    engine = BubblewrapEngine()
    word = bench.sleep_word()
    process = engine.start(Spec(["/bin/sleep", word]))
    engine.close()
    assert process.wait(lambda *_: None).status == "killed"
    bench.gone(word)
    with pytest.raises(EngineUnavailable, match="closed"):
        engine.start(Spec(["/bin/true"]))


KILLED = """
import sys
from fanout.engine.base import Mount, Spec
from fanout.engine.bubblewrap import BubblewrapEngine
engine = BubblewrapEngine(overlay=sys.argv[1])
lower, upper, work, word = sys.argv[2:]
script = f"(setsid sleep {word} &); echo up; sleep {word}"
spec = Spec(["/bin/sh", "-c", script], [Mount("/mnt/w", (lower,), upper, work)])
engine.start(spec).wait(lambda stream, chunk: print(chunk.decode(), flush=True))
"""


SHARED = """
import sys
from pathlib import Path
from fanout.engine.base import Mount, Spec
from fanout.engine.bubblewrap import BubblewrapEngine
lower, upper, work = sys.argv[1:]
before = Path("/proc/self/mountinfo").read_text()
engine = BubblewrapEngine(overlay="kernel")
spec = Spec(["/bin/sh", "-c", "echo up"], [Mount("/mnt/w", (lower,), upper, work)])
same = []
engine.start(spec).wait(lambda *_: same.append(Path("/proc/self/mountinfo").read_text() == before))
print(same)
engine.close()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_mounts_do_not_reach_a_host_that_shares_its_own(tmp_path: Path) -> None:
    """As under systemd, where / is a shared mount."""
    bench = Bench(BubblewrapEngine(), tmp_path)
    mount = bench.writable(bench.directory())
    argv = [sys.executable, "-c", SHARED, mount.lowers[0], str(mount.upper), str(mount.work)]
    done = subprocess.run(
        ["unshare", "-m", "--propagation", "shared", *argv], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("[True]\n", "")


def test_a_killed_program_leaves_no_process_and_no_mount(bench: Bench, engine: BubblewrapEngine) -> None:
    before = Path("/proc/self/mountinfo").read_text()
    mount, word = bench.writable(bench.directory()), bench.sleep_word()
    tier = "kernel" if engine.xattr_prefix == "trusted.overlay." else "bwrap"
    argv = [sys.executable, "-c", KILLED, tier, mount.lowers[0], str(mount.upper), str(mount.work), word]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "up\n"
        assert Path("/proc/self/mountinfo").read_text() == before
        program.kill()
    deadline = time.monotonic() + 5
    while True:
        try:
            bench.gone(word)
            break
        except AssertionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    assert Path("/proc/self/mountinfo").read_text() == before
