"""A real VM and the agent in it: what a command gets, what it may use, and how VMs end that should not.

Booting takes seconds of computing without KVM, so each test here asks one VM for as much as it can.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import signal
import threading
from pathlib import Path

import pytest

from fanout.engine.base import Exit
from fanout.engine.qemu.machine import Guest, Machine
from fanout.engine.qemu.protocol import Request
from fanout.errors import EngineUnavailable
from fanout.runtime import system
from tests.support.guests import ALL_CAPABILITIES, MIB, booted, image_or_skip, launch, request_for, small_root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return small_root(tmp_path / "root")


def run(
    root: Path, request: Request, stdin: bytes | None = None, guest: Guest | None = None, **settings: float
) -> tuple[Exit, bytes, bytes]:
    """Run one command in one VM; return its end, stdout and stderr."""
    said = {"stdout": bytearray(), "stderr": bytearray()}
    with booted(root, guest) as machine:
        machine.send(request, stdin)
        ended = machine.wait(lambda stream, chunk: said[stream].extend(chunk), **settings)
        assert not machine.alive()
    return ended, bytes(said["stdout"]), bytes(said["stderr"])


INSPECT = r"""
cat > /work/in; wc -c < /work/in; md5sum < /work/in
echo "$WORD|$0|$(pwd)|$(id -u)|$$"
echo == fds; ls /proc/self/fd
echo == dev; ls /dev
echo == mounts; cat /proc/mounts
echo == status; cat /proc/self/status
echo == net; cat /proc/net/dev
echo == now; date -u +%s
echo == writes
for f in /dev/x /proc/sys/kernel/hostname /proc/sysrq-trigger; do echo c > $f && echo wrote $f; done
head -c 2000000 /dev/zero > /tmp/x && head -c 1000 /dev/urandom > /dev/shm/y && echo kept > /work/out
kill -9 1; kill -STOP 1; echo alive
(sleep 1000 &); head -c 16777216 /dev/zero >&2
exit 9
"""


def test_what_a_command_gets(root: Path) -> None:
    data = system.token_bytes(5 * MIB)
    env = [b"PATH=/bin", b"WORD=\xfe\n'"]
    request = request_for([b"/bin/sh", b"-c", INSPECT.encode(), b"\xff x"], cwd=b"/work", env=env)
    ended, out, err = run(root, request, data)
    assert (ended.status, ended.exit_code) == ("completed", 9)
    head, *parts = out.decode(errors="surrogateescape").split("== ")
    assert head == f"{len(data)}\n{hashlib.md5(data).hexdigest()}  -\n\udcfe\n'|\udcff x|/work|0|2\n"
    found = {name: text for name, _, text in (part.partition("\n") for part in parts)}
    assert b"\0" * (16 * MIB) in err  # beside what the refused writes said
    assert len(err) < 16 * MIB + 1000
    assert (root / "work/in").read_bytes() == data
    assert (root / "work/out").read_text() == "kept\n"
    assert found["writes"] == "alive\n"
    assert found["fds"].split() == ["0", "1", "2", "3"]
    nodes = "core fd full null ptmx pts random shm stderr stdin stdout tty urandom zero"
    assert found["dev"].split() == nodes.split()
    status = dict(line.split(":\t") for line in found["status"].splitlines() if ":\t" in line)
    assert {status[name] for name in ("CapPrm", "CapEff", "CapBnd")} == {f"{request.capabilities:016x}"}
    assert status["NoNewPrivs"] == "1"
    assert [line.split(":")[0].strip() for line in found["net"].splitlines()[2:]] == ["lo"]
    assert abs(int(found["now"]) - system.now_ns() / 1e9) < 60
    mounts = {line.split()[1]: line.split()[3] for line in found["mounts"].splitlines()}
    assert {"/", "/proc", "/dev", "/dev/pts", "/dev/shm", "/tmp"} <= set(mounts)
    assert all(mounts[path].startswith("ro") for path in ("/dev", "/proc/sys", "/proc/sysrq-trigger"))
    assert all("nosuid" in options for options in mounts.values())
    assert ended.cpu_s > 0
    assert 4 * MIB < ended.max_rss_bytes < 256 * MIB


def test_memory_that_runs_out_is_told(root: Path) -> None:
    request = request_for("echo before; dd if=/dev/zero of=/tmp/x bs=1M count=60; echo after", memory_bytes=32 * MIB)
    ended, out, _ = run(root, request)
    assert (ended.status, ended.exit_code, out) == ("oom", None, b"before\n")
    assert 0 < ended.max_rss_bytes <= 32 * MIB


def test_a_fork_bomb_is_bounded_and_ends_in_time_with_its_output(root: Path) -> None:
    count = "set -- /proc/[0-9]*; [ $# -le $most ] || most=$#"
    bomb = (
        f"echo first; most=0; bomb() {{ bomb | bomb & }}; bomb; i=0; while [ $i -lt 300 ]; do {count}; i=$((i+1)); done"
    )
    ended, out, _ = run(root, request_for(f"{bomb}; echo $most; while :; do :; done", pids=40), timeout_s=8, grace_s=60)
    assert (ended.status, ended.exit_code) == ("timed_out", None)
    first, *most = out.split()
    assert first == b"first"
    # Listing /proc takes a while, in which some go and others come: more names than there ever are processes.
    assert all(1 < int(number) < 100 for number in most), most


def test_a_guest_that_panics_is_told(root: Path) -> None:
    panic = "mount -o remount,rw,bind /proc/sysrq-trigger; echo c > /proc/sysrq-trigger; sleep 60"
    with pytest.raises(EngineUnavailable, match=r"(?s)its kernel stopped.*its console: .*"):
        run(root, request_for(panic, capabilities=ALL_CAPABILITIES))


@pytest.mark.parametrize("how", ["kill", "signal"])
def test_a_machine_that_is_killed_under_its_command(root: Path, how: str) -> None:
    with booted(root) as machine:
        assert 20 * MIB < machine.memory_bytes() < 600 * MIB
        machine.send(request_for("echo up; sleep 1000"))

        def sink(stream: str, chunk: bytes) -> None:
            assert machine._hypervisor is not None
            kill = machine.kill if how == "kill" else lambda: signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            pidfd = os.pidfd_open(machine._hypervisor.pid)
            threading.Thread(target=kill).start()

        ended = machine.wait(sink)
        assert (ended.status, ended.exit_code) == ("killed", None)
        assert machine.memory_bytes() == 0


def test_an_image_that_does_not_boot_is_told(tmp_path: Path) -> None:
    image = image_or_skip()
    broken = tmp_path / "initramfs"
    broken.write_bytes(b"not an archive")
    machine = Machine(dataclasses.replace(image, initramfs=broken), Guest(), filesystem=None, launch=launch)
    machine.start()
    with pytest.raises(EngineUnavailable, match=r"(?s)its kernel stopped.*console"):
        machine.wait_ready(120)
    machine.close()


def test_a_kernel_that_is_none_is_told(tmp_path: Path) -> None:
    image = image_or_skip()
    (tmp_path / "kernel").write_bytes(b"nothing")
    machine = Machine(dataclasses.replace(image, kernel=tmp_path / "kernel"), Guest(), filesystem=None, launch=launch)
    machine.start()
    with pytest.raises(EngineUnavailable, match=r"QEMU ended with code 1; its console: .*kernel"):
        machine.wait_ready(120)
    machine.close()


def test_a_guest_that_does_not_answer_in_time_is_told() -> None:
    machine = Machine(image_or_skip(), Guest(), filesystem=None, launch=launch)
    machine.start()
    with pytest.raises(EngineUnavailable, match="did not answer within 0 s"):
        machine.wait_ready(0.2)
    assert not machine.alive()
