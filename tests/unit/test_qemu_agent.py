"""The guest agent as a process of this host: its protocol, its streams, and bytes that no host sends."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fanout.engine.qemu import protocol
from fanout.engine.qemu.agent import compile_agent
from fanout.engine.qemu.protocol import MAX_PAYLOAD, STDIN_CLOSED, STDIN_WINDOW, Frame, Frames, Kind, Report, Request
from tests.support.guests import agent_program

MIB = 1024 * 1024

ENV = [b"PATH=/usr/bin:/bin"]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = agent_program()
    if isinstance(made, str):
        pytest.skip(made)
    path = tmp_path_factory.mktemp("agent") / "agent"
    path.write_bytes(made)
    path.chmod(0o755)
    return path


class Peer:
    """The host's side of one agent."""

    def __init__(self, program: Path) -> None:
        self.socket, there = socket.socketpair()
        self.process = subprocess.Popen([program], stdin=there, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        there.close()
        self.socket.settimeout(30)
        self.frames = Frames()
        self.waiting: list[Frame] = []

    def close(self) -> None:
        self.socket.close()
        self.process.kill()
        self.process.wait()

    def next(self) -> Frame:
        while not self.waiting:
            data = self.socket.recv(1 << 16)
            if not data:
                raise EOFError
            self.waiting += self.frames.feed(data)
        return self.waiting.pop(0)

    def ask(self, request: Request) -> None:
        first = self.next()
        assert first.kind is Kind.READY
        protocol.check_ready(first.payload)
        self.socket.sendall(protocol.encode_request(request))

    def rest(self) -> tuple[bytes, bytes, Report]:
        """Read to the end: stdout, stderr, the end."""
        out, err = bytearray(), bytearray()
        while True:
            frame = self.next()
            if frame.kind is Kind.STDOUT:
                out += frame.payload
            elif frame.kind is Kind.STDERR:
                err += frame.payload
            elif frame.kind is Kind.EXIT:
                return bytes(out), bytes(err), protocol.decode_exit(frame.payload)
            else:
                assert frame.kind in (Kind.STARTED, Kind.CREDIT)


@pytest.fixture
def peer(program: Path) -> Iterator[Peer]:
    made = Peer(program)
    yield made
    made.close()


def shell(script: str, *env: bytes) -> Request:
    return Request([b"/bin/sh", b"-c", script.encode()], [*ENV, *env], root=None, open_files=0)


def ended(peer: Peer, request: Request) -> tuple[bytes, bytes, Report]:
    peer.ask(request)
    peer.socket.sendall(protocol.encode(Kind.STDIN_END))
    return peer.rest()


@pytest.mark.parametrize(
    ("script", "how", "value"),
    [
        ("exit 0", "exited", 0),
        ("exit 255", "exited", 255),
        ("kill -9 $$", "signaled", 9),
        ("kill -6 $$", "signaled", 6),
    ],
)
def test_how_a_command_ends(peer: Peer, script: str, how: str, value: int) -> None:
    out, err, report = ended(peer, shell(script))
    assert (out, err, report.how, report.value, report.killed) == (b"", b"", how, value, False)


@pytest.mark.parametrize(
    ("argv", "errno"), [(b"/no/such", 2), (b"no-such-program", 2), (b"/dev/null", 13), (b"/tmp", 13)]
)
def test_what_cannot_be_executed(peer: Peer, argv: bytes, errno: int) -> None:
    report = ended(peer, Request([argv], ENV, root=None, open_files=0))[2]
    assert (report.how, report.value) == ("not executed", errno)


def test_a_program_is_looked_up_in_the_path_of_its_environment(peer: Peer, tmp_path: Path) -> None:
    script = tmp_path / "greet"
    script.write_text("echo hello $1")  # without an interpreter line, as execvp takes it
    script.chmod(0o755)
    path = b"PATH=/nowhere::" + os.fsencode(tmp_path)
    assert ended(peer, Request([b"greet", b"you"], [path, b"A=b"], root=None, open_files=0))[0] == b"hello you\n"


def test_words_variables_and_directory_are_exact(peer: Peer, tmp_path: Path) -> None:
    place = tmp_path / "a dir\nx"
    place.mkdir()
    words = [b"", b" ", b"-x", b"\xff\xfe", "☕".encode(), b"a\nb"]
    request = Request(
        [b"sh", b"-c", b'pwd; env; printf "%s|" "$@"', b"sh", *words], [*ENV, b"E=", b"X=\xff\n="], root=None
    )
    request = Request(request.argv, request.env, os.fsencode(place), root=None, open_files=0)
    out = ended(peer, request)[0]
    assert out.startswith(os.fsencode(place) + b"\n")
    assert b"\nX=\xff\n=\n" in out
    assert out.endswith(b"|".join(words) + b"|")


def test_a_directory_that_is_not_there_is_refused(peer: Peer) -> None:
    peer.ask(Request([b"true"], ENV, b"/no/such/place", root=None, open_files=0))
    frame = peer.next()
    assert frame.kind is Kind.REFUSED
    refusal = protocol.decode_refusal(frame.payload)
    assert (refusal.stage, refusal.errno, refusal.text) == (protocol.Stage.CWD, 2, "/no/such/place")


@pytest.mark.parametrize(
    "fields",
    [b"", b"\1", b"\1\xff\xff\xff\xffshort", b"\x63\0\0\0\0", b"\1\1\0\0\0x", b"\x05\1\0\0\0x"],
    ids=["nothing", "no length", "too long", "unknown", "no directory", "limits of one byte"],
)
def test_a_malformed_request_is_refused(peer: Peer, fields: bytes) -> None:
    assert peer.next().kind is Kind.READY
    peer.socket.sendall(protocol.encode(Kind.REQUEST, fields) + protocol.encode(Kind.RUN))
    frame = peer.next()
    assert frame.kind is Kind.REFUSED
    assert protocol.decode_refusal(frame.payload).stage == protocol.Stage.REQUEST
    peer.socket.shutdown(socket.SHUT_WR)
    assert peer.process.wait(30) == 0


def test_both_streams_are_whole_and_apart(peer: Peer) -> None:
    script = "head -c 3000000 /dev/zero | tr '\\0' o & head -c 3000000 /dev/zero | tr '\\0' e >&2 & wait"
    out, err, report = ended(peer, shell(script))
    assert out == b"o" * 3_000_000
    assert err == b"e" * 3_000_000
    assert report.value == 0


def test_stdin_is_sent_within_its_window(peer: Peer) -> None:
    data = random.Random(7).randbytes(3 * MIB)
    peer.ask(shell("cat"))
    back = bytearray()
    sent = credited = 0
    while len(back) < len(data):
        while sent < len(data) and sent - credited + MAX_PAYLOAD <= STDIN_WINDOW:
            piece = data[sent : sent + MAX_PAYLOAD]
            peer.socket.sendall(protocol.encode(Kind.STDIN, piece))
            sent += len(piece)
        frame = peer.next()
        if frame.kind is Kind.STDOUT:
            back += frame.payload
        elif frame.kind is Kind.CREDIT:
            credited += protocol.decode_credit(frame.payload)
    peer.socket.sendall(protocol.encode(Kind.STDIN_END))
    assert bytes(back) == data
    assert peer.rest()[2].value == 0


def test_stdin_that_nobody_reads_any_more(peer: Peer) -> None:
    peer.ask(shell("exec 0<&-; echo closed; sleep 0.3; exit 4"))
    while peer.next().kind is not Kind.STDOUT:
        pass
    peer.socket.sendall(protocol.encode(Kind.STDIN, bytes(MAX_PAYLOAD)))
    closed = False
    while True:
        frame = peer.next()
        closed = closed or (frame.kind is Kind.CREDIT and protocol.decode_credit(frame.payload) == STDIN_CLOSED)
        if frame.kind is Kind.EXIT:
            break
    assert closed
    assert protocol.decode_exit(frame.payload).value == 4


def test_a_slow_reader_holds_the_command_back(peer: Peer) -> None:
    """What is written and not read is bounded by the port and two pipes, not kept by the agent."""
    peer.ask(shell("head -c 30000000 /dev/zero; echo done >&2"))
    frame = peer.next()
    while frame.kind is not Kind.STDOUT:
        frame = peer.next()
    peak = Path(f"/proc/{peer.process.pid}/status").read_text().split("VmHWM:")[1].split()[0]
    assert int(peak) < 8 * 1024
    assert peer.process.poll() is None
    out, err, _ = peer.rest()
    assert len(out) + len(frame.payload) == 30_000_000
    assert err == b"done\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to look into the command's pid namespace")
def test_what_a_command_leaves_behind_dies_and_holds_nothing_up(peer: Peer) -> None:
    out, _, report = ended(peer, shell("(sleep 98765 &); (setsid sleep 98765 &); echo hi"))
    assert (out, report.value) == (b"hi\n", 0)
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert b"98765" not in entry.read_bytes().split(b"\0")
        except OSError:
            continue


def test_a_kill_ends_all_and_what_was_written_arrives(peer: Peer) -> None:
    peer.ask(shell("echo partial; trap '' TERM; while :; do sleep 1000; done"))
    while peer.next().kind is not Kind.STDOUT:
        pass
    peer.socket.sendall(protocol.encode(Kind.KILL))
    assert peer.rest()[2].killed


def test_a_kill_after_the_end_changes_nothing(peer: Peer) -> None:
    peer.ask(shell("exit 3"))
    report = peer.rest()[2]
    peer.socket.sendall(protocol.encode(Kind.KILL))
    assert (report.value, report.killed) == (3, False)


def test_no_descriptor_of_the_agent_reaches_the_command(peer: Peer) -> None:
    assert ended(peer, Request([b"/bin/ls", b"/proc/self/fd"], ENV, root=None, open_files=0))[0].split() == [
        b"0",
        b"1",
        b"2",
        b"3",
    ]


def test_a_request_of_2_mib_is_taken(peer: Peer) -> None:
    env = [b"V%05d=" % i + b"x" * 90 for i in range(18_000)]
    out = ended(peer, shell("env | wc -l", *env))[0]
    assert int(out) >= 18_000


@pytest.mark.parametrize("seed", range(20))
def test_bytes_that_no_host_sends_end_the_agent_and_nothing_else(program: Path, seed: int) -> None:
    """Whatever comes, it ends in order (code 1) or goes on waiting; it never crashes."""
    rng = random.Random(seed)
    made = Peer(program)
    try:
        drain = threading.Thread(target=_discard, args=(made.socket,))
        drain.start()
        try:
            for _ in range(40):
                made.socket.sendall(_nonsense(rng))
        except OSError:
            pass  # it ended, as it should
        made.socket.shutdown(socket.SHUT_WR)
        assert made.process.wait(30) in (0, 1), f"seed {seed}"
        drain.join()
    finally:
        made.close()


def _nonsense(rng: random.Random) -> bytes:
    kind = rng.choice([1, 1, 1, 3, 4, 5, 9, 64, 255])
    body = rng.randbytes(rng.choice([0, 1, 4, 5, 30, 3000]))
    if rng.random() < 0.6:  # a well-formed frame of a malformed request
        field = bytes([rng.randrange(14)]) + rng.choice([len(body), rng.randrange(1 << 32)]).to_bytes(4, "little")
        body = (field + body)[:MAX_PAYLOAD]
        return bytes([kind, 0, 0, 0]) + len(body).to_bytes(4, "little") + body + rng.choice([b"", b"\2" + bytes(7)])
    return bytes([kind, 0, 0, rng.choice([0, 0, 1])]) + rng.randrange(1 << 32).to_bytes(4, "little") + body


def _discard(end: socket.socket) -> None:
    try:
        while end.recv(1 << 16):
            pass
    except OSError:
        pass


def test_the_agent_is_the_same_whenever_it_is_compiled(tmp_path: Path, program: Path) -> None:
    assert compile_agent(lambda line: None, tmp_path)[0] == program.read_bytes()
