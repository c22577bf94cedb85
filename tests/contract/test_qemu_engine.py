"""The qemu engine beyond what every engine does: its pool, templates, limits; what is said where there is no VM."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from fanout.engine.base import Limits, Mount, Spec
from fanout.engine.check import Bench, completed
from fanout.engine.qemu import command, share
from fanout.engine.qemu.engine import QemuEngine
from fanout.engine.qemu.turns import TURN_MS
from fanout.errors import EngineUnavailable, Invalid
from tests.support.guests import MIB, image_or_skip, qemu_cache

ENV = {"PATH": "/usr/bin:/bin"}


def made(**settings: object) -> QemuEngine:
    image_or_skip()
    values: dict[str, object] = {"memory_bytes": 256 * MIB, "acceleration": "tcg", "pool": 1, **settings}
    return QemuEngine(cache_dir=qemu_cache(), **values)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def engine() -> Iterator[QemuEngine]:
    engine = made()
    yield engine
    engine.close()


@pytest.fixture
def bench(engine: QemuEngine, tmp_path: Path) -> Bench:
    return Bench(engine, tmp_path)


def until(holds: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)


def is_filled(engine: QemuEngine) -> bool:
    return engine.counts() == {"waiting": 0, "booting": 0, "ready": 1, "given": 0}


def processes(engine: QemuEngine) -> list[int]:
    return [pid for vm in engine.vms() for pid in vm.pids()]


# --- the pool -----------------------------------------------------------------------------------------------------


def test_a_vm_is_kept_ready_used_once_and_replaced_when_it_dies(bench: Bench, engine: QemuEngine) -> None:
    completed(bench.run("true", env=ENV))
    until(lambda: is_filled(engine))
    (first,) = engine.vms()
    outcome = completed(bench.run("echo mark > /tmp/mark; cat /proc/sys/kernel/random/boot_id", env=ENV))
    assert outcome.exit.warm
    until(lambda: is_filled(engine))
    (second,) = engine.vms()
    assert second is not first
    assert not first.alive()
    for part in range(2):
        (dies,) = engine.vms()
        os.kill(dies.pids()[part], signal.SIGKILL)
        until(lambda dies=dies: is_filled(engine) and dies not in engine.vms())  # type: ignore[misc]
    again = completed(bench.run("ls /tmp; cat /proc/sys/kernel/random/boot_id", env=ENV))
    assert again.exit.warm, "those that died in the pool were replaced"
    assert again.stdout not in (b"", outcome.stdout), "copies of one VM draw numbers of their own"
    assert b"mark" not in again.stdout


def test_emulated_processors_compute_in_long_turns_and_their_files_are_served_at_once(engine: QemuEngine) -> None:
    process = engine.start(Spec(["/bin/sleep", "600"], env=ENV))
    try:
        until(lambda: any(vm.is_taken for vm in engine.vms()))
        (qemu, virtiofsd) = next(vm.pids() for vm in engine.vms() if vm.is_taken)
        policies = [os.sched_getscheduler(int(thread)) for thread in os.listdir(f"/proc/{qemu}/task")]
        assert len(policies) > 1
        assert set(policies) == {os.SCHED_BATCH}
        assert os.sched_getscheduler(virtiofsd) == os.SCHED_OTHER
        release = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])
        told = Path(f"/proc/{qemu}/sched")
        if release >= (6, 12) and told.exists():
            assert int(re.findall(r"se.slice *: *(\d+)", told.read_text())[0]) == TURN_MS * 1_000_000
    finally:
        process.kill()
        process.wait(lambda *_: None)


def test_many_wait_their_turn_and_the_cancelled_ones_leave_no_vm_behind(bench: Bench, engine: QemuEngine) -> None:
    specs = [Spec(["/bin/sh", "-c", f"exit {i}"], env=ENV) for i in range(8)]
    started = [engine.start(spec) for spec in specs]
    for process in started[::2]:
        process.kill()
    codes: list[int | None] = [None] * len(started)

    def wait(i: int) -> None:
        codes[i] = started[i].wait(lambda *_: None).exit_code

    threads = [threading.Thread(target=wait, args=(i,)) for i in range(len(started))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes[1::2] == [1, 3, 5, 7]
    assert set(codes[::2]) <= {None, 0, 2, 4, 6}, "killed, or it had ended by itself"
    until(lambda: is_filled(engine))


def test_closing_ends_what_runs_and_leaves_nothing(tmp_path: Path) -> None:
    engine = made()
    bench = Bench(engine, tmp_path)
    mount = bench.writable(bench.directory({"f": "1"}))
    completed(bench.run("cat f", mount, cwd="/mnt/work", env=ENV))
    until(lambda: is_filled(engine))
    running = engine.start(Spec(["/bin/sleep", "600"], env=ENV))
    queued = engine.start(Spec(["/bin/true"], env=ENV))
    pids = processes(engine)
    assert pids
    threads = [threading.Thread(target=engine.close)]
    threads[0].start()
    assert running.wait(lambda *_: None).status == "killed"
    with suppress(EngineUnavailable):  # it was not given a VM any more
        assert queued.wait(lambda *_: None).status in ("killed", "completed")
    threads[0].join()
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()
    with pytest.raises(EngineUnavailable, match="closed"):
        engine.start(Spec(["/bin/true"]))


def test_a_template_that_is_damaged_is_made_anew(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(qemu_cache() / "qemu", cache / "qemu", ignore=shutil.ignore_patterns("template*", "making*"))
    for _ in range(2):
        engine = QemuEngine(cache_dir=cache, memory_bytes=128 * MIB, acceleration="tcg", pool=0)
        completed(Bench(engine, tmp_path).run("true", env=ENV))
        engine.close()
        (template,) = (cache / "qemu").glob("template-*")
        (template / "state").write_bytes(b"not a machine's state")
    assert (template / "memory").stat().st_blocks * 512 < 100 * MIB


# --- limits -------------------------------------------------------------------------------------------------------


def test_memory_is_limited_for_all_processes_together_and_its_end_is_told(bench: Bench) -> None:
    limits = Limits(timeout_s=90, memory_bytes=48 * MIB)
    outcome = bench.run("head -c 100000000 /dev/zero | tail | wc -c", env=ENV, limits=limits)
    assert (outcome.exit.status, outcome.exit.exit_code, outcome.exit.limit) == ("oom", None, "memory")


def test_what_is_written_is_limited(bench: Bench) -> None:
    mount = bench.writable(bench.directory())
    limits = Limits(timeout_s=90, disk_bytes=8 * MIB)
    outcome = bench.run(
        "dd if=/dev/zero of=big bs=1M count=4000; sleep 60", mount, cwd="/mnt/work", env=ENV, limits=limits
    )
    assert (outcome.exit.status, outcome.exit.limit) == ("killed", "disk")


def test_cpus_and_memory_are_those_of_the_machine(bench: Bench) -> None:
    cores = min(2, len(os.sched_getaffinity(0)))
    limits = Limits(timeout_s=90, cpus=2, memory_bytes=400 * MIB)
    outcome = completed(bench.run("nproc; grep MemTotal /proc/meminfo", env=ENV, limits=limits))
    count, total = outcome.stdout.split()[0], outcome.stdout.split()[2]
    assert int(count) == cores
    assert 400 * 1024 < int(total) < 512 * 1024
    assert not outcome.exit.warm


def test_more_memory_than_there_is_is_refused(bench: Bench) -> None:
    with pytest.raises(EngineUnavailable, match="does not fit into this host's memory"):
        bench.run("true", limits=Limits(memory_bytes=1 << 50))


# --- what a guest sees --------------------------------------------------------------------------------------------


def test_the_kernel_is_its_own_and_the_clock_is_right(bench: Bench) -> None:
    before = time.time()
    outcome = completed(bench.run("uname -r; date +%s.%N", env=ENV))
    release, now = outcome.stdout.split()
    assert release.decode() != os.uname().release
    assert before - 1 < float(now) < time.time() + 1


def test_files_are_the_host_s_in_all_that_matters(bench: Bench) -> None:
    """What a layer must hold when a command ends: mappings, holes, links, times, attributes, deletions."""
    mount = bench.writable(bench.directory({"old": "x" * 10, "gone": "1", "d/e": "1"}))
    script = """
set -e
ln old link; ln -s nowhere dangling; mkdir -p a/b; chmod 750 a; touch -d @1000000000.123456789 a/b
rm gone; mv d moved || { cp -r d moved; rm -r d; }
truncate -s 5G sparse; printf end >> sparse
python3 - <<'P'
import mmap, os
with open("mapped", "w+b") as f:
    f.truncate(8192)
    m = mmap.mmap(f.fileno(), 8192)
    m[4096:4102] = b"mapped"
os.setxattr("old", "user.kept", b"value")
for name in ("trusted.overlay.opaque", "trusted.x"):
    try: os.setxattr("a", name, b"y"); print("set", name)
    except OSError: pass
P
"""
    completed(bench.run(script, mount, cwd="/mnt/work", env=ENV))
    upper = Path(str(mount.upper))
    assert (upper / "old").stat().st_ino == (upper / "link").stat().st_ino
    assert os.readlink(upper / "dangling") == "nowhere"
    assert (upper / "a").stat().st_mode & 0o777 == 0o750
    assert (upper / "a/b").stat().st_mtime_ns == 1_000_000_000_123_456_789
    assert (upper / "sparse").stat().st_size == 5 * 1024**3 + 3
    assert (upper / "sparse").stat().st_blocks * 512 < MIB
    assert (upper / "mapped").read_bytes() == bytes(4096) + b"mapped" + bytes(4090)
    assert os.getxattr(upper / "old", "user.kept") == b"value"
    assert "trusted.x" not in os.listxattr(upper / "a")
    assert (upper / "gone").lstat().st_rdev == 0
    assert (upper / "moved/e").exists() or (upper / "moved").is_dir()


def test_devices_setuid_and_strange_owners_do_not_reach_the_layer(bench: Bench) -> None:
    mount = bench.writable(bench.directory())
    script = "mknod null c 1 3; mknod white c 0 0; mkfifo pipe; : > s; chown 1000 s; chmod 4755 s; ls"
    outcome = completed(bench.run(script, mount, cwd="/mnt/work", env=ENV))
    assert outcome.stdout.split() == [b"pipe", b"s"]
    found = (Path(str(mount.upper)) / "s").stat()
    assert found.st_uid == os.geteuid()


def test_layers_whose_owners_cannot_be_mapped_are_mounted_as_they_are(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root's sandboxes have users of their own")
    for name in ("low", "point"):
        (tmp_path / name).mkdir()
    (tmp_path / "low/f").write_text("seen")
    subprocess.run(
        ["mount", "-t", "overlay", "o", "-o", f"lowerdir={tmp_path}/low:/etc/ssl", tmp_path / "point"], check=True
    )
    engine = made()
    try:
        bench = Bench(engine, tmp_path)
        completed(bench.run("true", env=ENV))
        until(lambda: is_filled(engine))
        mount = Mount("/mnt/o", (str(tmp_path / "point"),))
        assert completed(bench.run("cat f", mount, cwd="/mnt/o", env=ENV)).stdout == b"seen"
        until(lambda: is_filled(engine))
        assert completed(bench.run("cat f", mount, cwd="/mnt/o", env=ENV)).exit.warm
    finally:
        engine.close()
        subprocess.run(["umount", tmp_path / "point"], check=True)


def test_a_guest_forgets_files_before_virtiofsd_has_too_many_open(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fanout.engine.qemu.engine.open_files", lambda: 3000)
    lower = bench.directory({f"f{i}": "" for i in range(4000)})
    known = "cut -f 1 /proc/sys/fs/inode-nr"
    script = f"{known}; sleep 0.2; ls -l | wc -l; sleep 0.5; {known}"
    outcome = completed(bench.run(script, bench.writable(lower), cwd="/mnt/work", env=ENV))
    before, listed, after = map(int, outcome.stdout.split())
    assert listed == 4001
    assert after - before < 3000


def test_targets_that_a_vm_has_for_itself_are_refused(engine: QemuEngine, tmp_path: Path) -> None:
    for target in ("/tmp/x", "/root/x", "/sys/x"):
        with pytest.raises(Invalid, match=r"which a VM has for itself|belongs to the system"):
            engine.start(Spec(["/bin/true"], [Mount(target, (str(tmp_path),))]))


# --- where there is no VM to be had -------------------------------------------------------------------------------


def refusal(engine: QemuEngine) -> str:
    """Return what the engine says of a command that it cannot run, and see to it that nothing is left."""
    began = time.monotonic()
    try:
        with pytest.raises(EngineUnavailable) as caught:
            engine.start(Spec(["/bin/true"])).wait(lambda *_: None)
        return str(caught.value)
    finally:
        pids = processes(engine)
        engine.close()
        assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
        assert time.monotonic() - began < 60


def test_without_qemu_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = made()
    monkeypatch.setattr(command.shutil, "which", lambda name, **_: None)
    assert "install qemu-system-x86" in refusal(engine)


def test_without_virtiofsd_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = made()
    monkeypatch.setattr(share, "PLACES", ())
    monkeypatch.setattr(share.shutil, "which", lambda name: None)
    assert "install the package virtiofsd" in refusal(engine)


def test_kvm_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fanout.engine.qemu.accel.DEVICE", "/nowhere/kvm")
    assert "there is no /nowhere/kvm" in refusal(made(acceleration="kvm"))


@pytest.mark.skipif(not os.access("/dev/kvm", os.R_OK | os.W_OK), reason="there is no /dev/kvm, or it is closed to us")
def test_kvm_can_be_opened_by_qemu_whoever_it_runs_as(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whether a guest then runs is this host's matter: on some it hangs."""
    monkeypatch.setattr("fanout.engine.qemu.vm.BOOT_S", 5.0)
    engine = made(acceleration="kvm", pool=0)
    said = ""
    try:
        completed(Bench(engine, tmp_path).run("true", env=ENV))
    except EngineUnavailable as error:
        said = str(error)
    finally:
        engine.close()
    assert "Could not access KVM" not in said
    assert "Permission denied" not in said


def test_a_virtiofsd_that_fails_at_once_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Path("/usr/bin/false")
    monkeypatch.setattr("fanout.engine.qemu.engine.find_virtiofsd", lambda: share.Virtiofsd(str(broken), is_rust=False))
    assert refusal(made()).startswith("the virtual machine failed")


def test_a_guest_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fanout.engine.qemu.vm.BOOT_S", 0.05)
    assert "did not answer within" in refusal(made(memory_bytes=192 * MIB))


@pytest.mark.parametrize("part", [0, 1], ids=["qemu", "virtiofsd"])
def test_a_vm_of_which_something_dies_ends_its_command_as_killed(engine: QemuEngine, part: int) -> None:
    process = engine.start(Spec(["/bin/sleep", "600"], env=ENV))

    def kill() -> None:
        until(lambda: any(vm.is_taken for vm in engine.vms()))
        for vm in engine.vms():
            if vm.is_taken:
                os.kill(vm.pids()[part], signal.SIGKILL)

    threading.Timer(0.5, kill).start()
    assert process.wait(lambda *_: None).status == "killed"
