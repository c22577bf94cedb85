"""The host's side of a VM against peers that are no agent: silent, dying, lying, flooding."""

from __future__ import annotations

import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fanout.engine.base import Exit
from fanout.engine.qemu import command
from fanout.engine.qemu.image import Image
from fanout.engine.qemu.machine import Guest, Machine
from fanout.engine.qemu.protocol import VERSION, Request
from fanout.errors import EngineUnavailable, Invalid
from fanout.runtime import system

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="guests are x86-64 machines")

#: What every peer begins with: sending a frame, saying READY, waiting for the request's end.
PRELUDE = """
import os, socket, struct, sys, time
port = socket.socket(fileno=int(sys.argv[1]))
READY, STARTED, STDOUT, STDERR, CREDIT, EXIT, REFUSED = range(64, 71)
def send(kind, payload=b""):
    port.sendall(struct.pack("<B3xI", kind, len(payload)) + payload)
def ready(version=int(sys.argv[2])):
    send(READY, b"fanout-agent" + struct.pack("<I", version))
def asked():
    data = b""
    while not data.endswith(bytes([4]) + bytes(7)):  # STDIN_END
        data += port.recv(1 << 16)
def ended(how=0, value=0, oom=0, killed=0, elapsed_s=0.5):
    send(EXIT, struct.pack("<BBBBiQQQ", how, oom, killed, 0, value, 10, 20, int(elapsed_s * 1e9)))
"""


@pytest.fixture
def machine_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Machine]:
    monkeypatch.setattr(command, "find_qemu", lambda: "qemu")

    def make(script: str) -> Machine:
        def launch(argv: Sequence[str], inherited: Sequence[int], output: int) -> subprocess.Popen[bytes]:
            words = [sys.executable, "-c", PRELUDE + script, str(inherited[0]), str(VERSION)]
            return subprocess.Popen(words, pass_fds=inherited, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

        image = Image(tmp_path / "kernel", tmp_path / "initramfs", "none")
        return Machine(image, Guest(), filesystem=None, launch=launch)

    return make


def run(machine: Machine, **settings: float) -> tuple[Exit, list[tuple[str, bytes]]]:
    said: list[tuple[str, bytes]] = []
    machine.start()
    machine.wait_ready(30)
    machine.send(Request([b"name"], cwd=b"/place"))
    return machine.wait(lambda stream, chunk: said.append((stream, chunk)), **settings), said


@pytest.mark.parametrize(
    ("end", "status", "code"),
    [
        ("ended(0, 3)", "completed", 3),
        ("ended(1, 9)", "completed", 137),
        ("ended(0, 0, oom=1)", "oom", None),
        ("ended(1, 9, killed=1)", "killed", None),
        ("ended(2, 2)", "completed", 127),
        ("ended(2, 13)", "completed", 126),
    ],
)
def test_ends(machine_of: Callable[[str], Machine], end: str, status: str, code: int | None) -> None:
    machine = machine_of(f"ready(); asked(); send(STARTED); send(STDERR, b'x'); {end}; time.sleep(60)")
    before = system.monotonic()
    exit, said = run(machine)
    assert (exit.status, exit.exit_code) == (status, code)
    assert before <= exit.started_s <= exit.ended_s <= system.monotonic()
    assert said[0] == ("stderr", b"x")
    if "ended(2, 2)" in end:
        assert said[1:] == [("stderr", b"name: No such file or directory\n")]
    assert not machine.alive()


def test_a_directory_that_is_none_is_invalid(machine_of: Callable[[str], Machine]) -> None:
    with pytest.raises(Invalid, match="cwd is '/place': Not a directory"):
        run(machine_of("ready(); asked(); send(REFUSED, struct.pack('<Bxxxi', 4, 20)); time.sleep(60)"))


def test_another_refusal_says_why(machine_of: Callable[[str], Machine]) -> None:
    refusal = "send(REFUSED, struct.pack('<Bxxxi', 2, 5) + b'mount the root'); time.sleep(60)"
    with pytest.raises(EngineUnavailable, match="mount the root: Input/output error"):
        run(machine_of(f"ready(); asked(); {refusal}"))


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("ready(999); time.sleep(60)", "does not speak our protocol"),
        ("port.sendall(b'HTTP/1.1 400 Bad Request'); time.sleep(60)", "does not speak our protocol"),
        ("send(STARTED); time.sleep(60)", "STARTED"),
        ("print('boom', flush=True); sys.exit(1)", "ended with code 1; its console: boom"),
        ("sys.exit(0)", "its kernel stopped or QEMU gave up"),
        ("os.kill(os.getpid(), 6)", "ended by signal 6"),
        ("time.sleep(60)", "did not answer within 1 s"),
    ],
)
def test_a_boot_that_fails_says_how(machine_of: Callable[[str], Machine], script: str, says: str) -> None:
    machine = machine_of(script)
    machine.start()
    with pytest.raises(EngineUnavailable, match=says):
        machine.wait_ready(1 if "within" in says else 30)
    assert not machine.alive()
    machine.close()


@pytest.mark.parametrize(
    "frames",
    [
        "send(STDOUT, b'early')",
        "send(STARTED); send(STARTED)",
        "send(STARTED); ready()",
        "send(STARTED); send(CREDIT, struct.pack('<I', 1))",
        "send(STARTED); send(EXIT, b'short')",
        "send(STARTED); ended(0, 100000)",
        "port.sendall(struct.pack('<B3xI', STDOUT, 1 << 30))",
        "port.sendall(os.urandom(1000).replace(b'B', b'b'))",
    ],
)
def test_a_guest_that_breaks_the_protocol_is_killed(machine_of: Callable[[str], Machine], frames: str) -> None:
    machine = machine_of(f"ready(); asked(); {frames}; time.sleep(60)")
    with pytest.raises(EngineUnavailable, match="broke the protocol"):
        run(machine)
    assert not machine.alive()


def test_a_guest_that_dies_under_the_command(machine_of: Callable[[str], Machine]) -> None:
    dying = "print('Kernel panic', flush=True); sys.exit(0)"
    with pytest.raises(EngineUnavailable, match=r"(?s)its kernel stopped.*Kernel panic"):
        run(machine_of(f"ready(); asked(); send(STARTED); {dying}"))


def test_qemu_killed_from_outside(machine_of: Callable[[str], Machine]) -> None:
    exit, said = run(machine_of("ready(); asked(); send(STARTED); send(STDOUT, b'x'); os.kill(os.getpid(), 9)"))
    assert (exit.status, exit.exit_code, said) == ("killed", None, [("stdout", b"x")])


def test_kill_from_another_thread(machine_of: Callable[[str], Machine]) -> None:
    machine = machine_of("ready(); asked(); send(STARTED); send(STDOUT, b'x'); time.sleep(60)")
    machine.start()
    machine.wait_ready(30)
    machine.send(Request([b"name"]))
    exit = machine.wait(lambda *_: threading.Thread(target=machine.kill).start())
    assert exit.status == "killed"
    machine.kill()


def test_an_end_that_was_told_stays_when_it_is_killed_later(machine_of: Callable[[str], Machine]) -> None:
    machine = machine_of("ready(); asked(); send(STARTED); ended(0, 3); print('told', flush=True); time.sleep(60)")
    machine.start()
    machine.wait_ready(30)
    machine.send(Request([b"name"]))
    while machine.alive() and b"told" not in machine._console_tail:
        machine._read_console()
    machine.kill()
    exit = machine.wait(lambda *_: None)
    assert (exit.status, exit.exit_code) == ("completed", 3)


def test_a_guest_that_ignores_the_end_of_its_time_is_killed(machine_of: Callable[[str], Machine]) -> None:
    machine = machine_of("ready(); asked(); send(STARTED); send(STDOUT, b'x'); time.sleep(60)")
    before = system.monotonic()
    exit, said = run(machine, timeout_s=0.2, grace_s=0.2)
    assert (exit.status, exit.exit_code, said) == ("timed_out", None, [("stdout", b"x")])
    assert system.monotonic() - before < 20


def test_a_guest_that_hands_over_what_it_has_when_its_time_is_up(machine_of: Callable[[str], Machine]) -> None:
    kill = "port.recv(8); send(STDOUT, b'last'); ended(0, 0, killed=1); time.sleep(60)"
    exit, said = run(machine_of(f"ready(); asked(); send(STARTED); {kill}"), timeout_s=0.2, grace_s=30)
    assert (exit.status, exit.exit_code, said) == ("timed_out", None, [("stdout", b"last")])


def test_without_kvm_a_guest_has_longer_to_hand_it_over(machine_of: Callable[[str], Machine]) -> None:
    kill = "port.recv(8); time.sleep(1.2); send(STDOUT, b'last'); ended(0, 0, killed=1); time.sleep(60)"
    _, said = run(machine_of(f"ready(); asked(); send(STARTED); {kill}"), timeout_s=0.2, grace_s=1)
    assert said == [("stdout", b"last")]


def test_a_sink_that_raises_kills_the_guest(machine_of: Callable[[str], Machine]) -> None:
    machine = machine_of("ready(); asked(); send(STARTED); send(STDOUT, b'x'); time.sleep(60)")
    machine.start()
    machine.wait_ready(30)
    machine.send(Request([b"name"]))

    def sink(stream: str, chunk: bytes) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        machine.wait(sink)
    assert not machine.alive()


def test_a_console_that_floods_is_kept_in_bounds(machine_of: Callable[[str], Machine]) -> None:
    flood = "[print('y' * 1000, flush=True) for _ in range(5000)]"
    with pytest.raises(EngineUnavailable, match=r"yyy$") as caught:
        run(machine_of(f"ready(); asked(); {flood}; sys.exit(0)"))
    assert len(str(caught.value)) < 2000


def test_no_qemu_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    machine = Machine(Image(tmp_path, tmp_path, ""), Guest(), filesystem=None, launch=subprocess.Popen)  # type: ignore[arg-type]
    with pytest.raises(EngineUnavailable, match="install qemu-system-x86"):
        machine.start()
    machine.close()


def test_killed_before_it_was_started(machine_of: Callable[[str], Machine]) -> None:
    machine = machine_of("ready()")
    machine.kill()
    with pytest.raises(EngineUnavailable, match="killed before"):
        machine.start()
