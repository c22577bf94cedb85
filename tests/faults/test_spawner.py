"""The spawner process of the bubblewrap engine: its death, its program's death, its end, and what is short or busy."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fanout.engine import orphans
from fanout.engine.base import Limits, Mount, Spec
from fanout.engine.bubblewrap import BubblewrapEngine
from fanout.engine.check import Bench, completed
from fanout.errors import EngineUnavailable
from tests.support.connections import alive


@pytest.fixture
def engine() -> Iterator[BubblewrapEngine]:
    made = BubblewrapEngine()
    made.probe()
    yield made
    made.close()


def spawner_of(engine: BubblewrapEngine) -> int:
    return engine._ready().spawner.pid


def stat_of(pid: int) -> list[str]:
    """The fields of a process after its name, state and parent first; none if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def children(parent: int) -> list[int]:
    found = (int(pid) for pid in os.listdir("/proc") if pid.isdigit())
    return [pid for pid in found if stat_of(pid)[1:2] == [str(parent)]]


def wait_until(true: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def sleeper(word: str) -> Spec:
    return Spec(["/bin/sh", "-c", f": {word}; echo up; sleep 300"], env={word: "1"})


def test_the_program_s_own_orphans_are_not_touched(engine: BubblewrapEngine) -> None:
    told = subprocess.run(["sh", "-c", "sleep 300 >&- 2>&- & echo $!"], stdout=subprocess.PIPE, check=True).stdout
    orphan = int(told)
    try:
        completed(Bench(engine, Path("/nowhere")).run("true"))
        assert stat_of(orphan)[1] not in (str(os.getpid()), str(spawner_of(engine)))
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_the_spawner_hears_no_terminal_and_holds_no_files(engine: BubblewrapEngine, tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(fd, True)
    other = BubblewrapEngine()
    other.probe()
    pid = spawner_of(other)
    assert os.getsid(pid) == pid
    os.kill(pid, signal.SIGINT)
    os.kill(pid, signal.SIGTERM)
    held = [os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd")]
    kinds = {text if text.startswith("/") else text.split(":")[0] for text in held}
    own = {f"/proc/{pid}/task/{pid}/children", "/memfd:fanout-bwrap (deleted)", "user"}  # its filter; a sandbox's user
    assert kinds <= {"/dev/null", "socket", "anon_inode", "pipe"} | own
    assert sum(text.startswith("socket:") for text in held) == 1
    completed(Bench(other, tmp_path).run("true"))
    other.close()
    assert not stat_of(pid)
    os.close(fd)


#: Kills a program in the middle of a stream of execs, again and again; every third leaves a fork of itself behind.
STREAM = """
import os, random, signal, sys, threading, time
from fanout.engine.base import Spec
from fanout.engine.bubblewrap import BubblewrapEngine
from tests.support.connections import alive

seed, rounds, word = sys.stdin.read().split()
seed, rounds = int(seed), int(rounds)
moments = random.Random(seed)

def program(ready, forks):
    engine = BubblewrapEngine()
    spec = Spec(["/bin/sh", "-c", f": {word}; (setsid sleep 0.3 &) ; sleep 0.01"], env={word: "1"})
    def stream():
        while True:
            engine.start(spec).wait(lambda *_: None)
    engine.start(spec).wait(lambda *_: None)
    fork = os.fork() if forks else 0
    if forks and not fork:
        time.sleep(600)
    for _ in range(6):
        threading.Thread(target=stream, daemon=True).start()
    os.write(ready, f"{engine._host.spawner.pid} {fork}".encode())
    time.sleep(600)

for number in range(rounds):
    heard, ready = os.pipe()
    pid = os.fork()
    if pid == 0:
        program(ready, number % 3 == 0)
    spawner, fork = map(int, os.read(heard, 100).split())
    time.sleep(moments.uniform(0, 0.25))
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    os.waitpid(pid, 0)
    while left := alive(word) + [spawner] * os.path.exists(f"/proc/{spawner}/exe"):
        if time.monotonic() > killed + 2:
            for each in left:
                try:
                    print("left", each, open(f"/proc/{each}/cmdline").read(), flush=True)
                    os.kill(each, signal.SIGKILL)
                except OSError:
                    pass
            sys.exit(f"round {number}: {left} live on")
        time.sleep(0.005)
    if fork:
        os.kill(fork, signal.SIGKILL)
    os.close(heard)
    os.close(ready)
"""


def test_a_program_killed_at_thirty_moments_leaves_nobody() -> None:
    seed = int.from_bytes(os.urandom(4), "big")
    print("seed", seed)
    word = f"STREAM_{uuid.uuid4().hex}"
    with subprocess.Popen(
        [sys.executable, "-c", STREAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    ) as program:
        try:
            said, _ = program.communicate(f"{seed} 30 {word}", timeout=200)
        finally:
            try:
                os.killpg(program.pid, signal.SIGKILL)  # with its forks
            except ProcessLookupError:
                pass
    assert (program.returncode, said) == (0, "")


def test_a_killed_spawner_ends_what_runs_and_the_next_exec_has_another(engine: BubblewrapEngine) -> None:
    word = f"SPAWNER_{uuid.uuid4().hex}"
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        first = spawner_of(engine)
        ends: list[str] = []

        up = threading.Semaphore(0)

        def run(ends: list[str] = ends, up: threading.Semaphore = up) -> None:
            ends.append(engine.start(sleeper(word)).wait(lambda *_: up.release()).status)

        threads = [threading.Thread(target=run) for _ in range(5)]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert up.acquire(timeout=30)
        os.kill(first, signal.SIGKILL)
        for thread in threads:
            thread.join(30)
        assert ends == ["killed"] * 5
        assert wait_until(lambda: not alive(word))
        assert not stat_of(first)  # collected
        assert engine.start(Spec(["/bin/sh", "-c", "exit 4"])).wait(lambda *_: None).exit_code == 4
        assert spawner_of(engine) != first
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_spawner_killed_in_a_stream_of_starts_is_replaced(engine: BubblewrapEngine, tmp_path: Path) -> None:
    """What was being started may fail, typed; nothing hangs, and what says it completed did."""
    bench = Bench(engine, tmp_path)
    lower = bench.directory({"f": "1"})
    stop = threading.Event()
    wrong: list[object] = []
    done = [0]

    def stream(number: int) -> None:
        while not stop.is_set():
            try:
                outcome = bench.run("cat f; exit 7", bench.writable(lower), cwd="/mnt/work")
            except EngineUnavailable:
                continue
            if outcome.exit.status == "completed":
                done[0] += 1
                if outcome.exit.exit_code != 7 or outcome.stdout != b"1":
                    wrong.append(outcome)
            elif outcome.exit.status != "killed":
                wrong.append(outcome)

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(8):
        time.sleep(random.uniform(0.02, 0.2))
        try:
            signal.pidfd_send_signal(engine._ready().spawner.pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass  # the last one was not missed yet
    stop.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert wrong == []
    completed(bench.run("true"))
    engine.close()
    assert orphans.sweep() == 0, "a sandbox that was being built outlived its spawner"


def test_two_hundred_execs_leave_no_files_and_no_zombies(engine: BubblewrapEngine, tmp_path: Path) -> None:
    bench = Bench(engine, tmp_path)
    mine, spawner = len(os.listdir("/proc/self/fd")), spawner_of(engine)
    its = len(os.listdir(f"/proc/{spawner}/fd"))

    def some() -> None:
        for number in range(25):
            completed(bench.run(f"exit {number}"), number)

    threads = [threading.Thread(target=some) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(os.listdir("/proc/self/fd")) == mine
    users = 8 - 1  # so many more sandboxes at once than before, each as a user whose mapping is kept
    assert wait_until(lambda: len(os.listdir(f"/proc/{spawner}/fd")) <= its + users)
    assert children(spawner) == []
    assert [pid for pid in children(os.getpid()) if stat_of(pid)[0] == "Z"] == []


@pytest.mark.parametrize("round_number", range(5))
def test_closing_while_starts_are_under_way(round_number: int) -> None:
    word = f"CLOSE_{uuid.uuid4().hex}"
    before = len(os.listdir("/proc/self/fd"))
    engine = BubblewrapEngine()
    engine.probe()
    spawner = spawner_of(engine)
    said: list[str] = []

    def stream(engine: BubblewrapEngine) -> None:
        try:
            while True:
                said.append(engine.start(sleeper(word)).wait(lambda *_: None).status)
        except EngineUnavailable as error:
            said.append(str(error))

    threads = [threading.Thread(target=stream, args=(engine,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(random.uniform(0, 0.15))
    engine.close()
    for thread in threads:
        thread.join(30)
    assert sorted(said) == ["killed"] * (len(said) - 8) + ["the engine is closed"] * 8
    assert alive(word) == []
    assert not stat_of(spawner)
    del engine, threads
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_host_short_of_files_gives_typed_errors(engine: BubblewrapEngine) -> None:
    """Whatever step finds no descriptor left: an error, nothing left behind, and all is well when there are some."""
    spec = Spec(["/bin/sh", "-c", "exit 6"], limits=Limits(timeout_s=60))
    before = len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    failed, said = 0, set[bool | str]()
    for spare in range(18):
        taken = [os.open("/dev/null", os.O_RDONLY)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 60, hard))
        try:
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            for _ in range(spare):
                os.close(taken.pop())
        try:
            assert engine.start(spec).wait(lambda *_: None).exit_code == 6
        except EngineUnavailable as error:
            said.add("too many open files" in str(error).lower() or str(error))
            failed += 1
        finally:
            for fd in taken:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert said == {True}
    assert 5 < failed < 18
    assert engine.start(spec).wait(lambda *_: None).exit_code == 6
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_spawner_short_of_files_gives_typed_errors(engine: BubblewrapEngine) -> None:
    spec = Spec(["/bin/sh", "-c", "exit 6"])
    assert engine.start(spec).wait(lambda *_: None).exit_code == 6  # one that just began may hold more for a moment
    spawner = spawner_of(engine)
    assert wait_until(lambda: children(spawner) == [])
    its = len(os.listdir(f"/proc/{spawner}/fd"))
    _, hard = resource.prlimit(spawner, resource.RLIMIT_NOFILE)
    failed = 0
    for spare in range(12):
        resource.prlimit(spawner, resource.RLIMIT_NOFILE, (its + spare, hard))
        try:
            assert engine.start(spec).wait(lambda *_: None).exit_code == 6
        except EngineUnavailable:
            failed += 1
    assert 3 < failed < 12
    resource.prlimit(spawner, resource.RLIMIT_NOFILE, (hard, hard))
    assert engine.start(spec).wait(lambda *_: None).exit_code == 6
    assert spawner_of(engine) == spawner
    assert wait_until(lambda: len(os.listdir(f"/proc/{spawner}/fd")) == its)
    assert children(spawner) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_busy_layer_holds_up_nobody_else(tmp_path: Path) -> None:
    engine = BubblewrapEngine(overlay="kernel")
    bench = Bench(engine, tmp_path)
    held = bench.writable(bench.directory())
    up = threading.Event()
    process = engine.start(Spec(["/bin/sh", "-c", "echo up; sleep 300"], [held]))
    waiter = threading.Thread(target=lambda: process.wait(lambda *_: up.set()))
    waiter.start()
    assert up.wait(30)
    (tmp_path / "work").mkdir()
    again = Mount("/mnt/work", held.lowers, held.upper, str(tmp_path / "work"))
    said: list[str] = []

    def busy() -> None:
        try:
            bench.run("true", again)
        except EngineUnavailable as error:
            said.append(str(error))

    other = threading.Thread(target=busy)
    began = time.monotonic()
    other.start()
    time.sleep(0.1)
    completed(bench.run("true", bench.writable(bench.directory())))
    assert other.is_alive() or time.monotonic() - began > 1
    other.join()
    process.kill()
    waiter.join()
    assert len(said) == 1
    assert "busy" in said[0]
    engine.close()


UNCLOSED = """
import sys
from fanout.engine.base import Spec
from fanout.engine.bubblewrap import BubblewrapEngine
engine = BubblewrapEngine()
assert engine.start(Spec(["/bin/true"])).wait(lambda *_: None).exit_code == 0
running = engine.start(Spec(["/bin/sh", "-c", f": {sys.argv[1]}; sleep 300"]))
print(engine._host.spawner.pid)
if sys.argv[2] == "dropped":
    del engine, running
"""


@pytest.mark.parametrize("how", ["kept", "dropped"])
def test_a_program_that_ends_without_closing(how: str) -> None:
    word = f"UNCLOSED_{uuid.uuid4().hex}"
    argv = [sys.executable, "-X", "dev", "-W", "error", "-c", UNCLOSED, word, how]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stderr) == (0, "")
    assert wait_until(lambda: not alive(word) and not stat_of(int(done.stdout)), 2)
