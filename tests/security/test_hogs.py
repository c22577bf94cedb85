"""One command takes all it can get while 49 others do their work: they are not harmed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from fanout.engine import limits as engine_limits
from fanout.engine.base import Limits, Spec
from tests.support.box import Box, open_box
from tests.support.engines import ENGINES

#: bubblewrap that runs as the host's root cannot count processes without cgroups (docs/SECURITY.md).
COUNTING = [name for name in ENGINES if name != "bubblewrap-bwrap"]

OTHERS = 49

BOMB = """
import os, time
print("up", flush=True)
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0.05)
"""

FILL = """
import os, time
print("up", flush=True)
held = []
while True:
    try:
        held.append(bytearray(1 << 20))
    except MemoryError:
        time.sleep(0.05)
"""


#: A VM's memory is its own, all of it: fifty boots would show no more than one.
CASES = [
    pytest.param(name, hog, id=f"{name}-{what}")
    for name in COUNTING
    for what, hog in (("processes", BOMB), ("memory", FILL))
    if (name, what) != ("qemu", "memory")
]

#: Fewer than by default, so that the test does not wear this host out either.
PROCESSES = 600


def test_by_default_a_command_may_have_many_processes_but_not_all() -> None:
    assert 1024 <= engine_limits.PIDS_MAX <= 8192


@pytest.fixture(params=COUNTING)
def box(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Box]:
    monkeypatch.setattr(engine_limits, "PIDS_MAX", PROCESSES)
    with open_box(request.param) as opened:
        yield opened


@pytest.mark.parametrize(("box", "hog"), CASES, indirect=["box"])
def test_forty_nine_others_are_unharmed(box: Box, hog: str) -> None:
    assert box.bench is not None
    up = threading.Event()
    limits = Limits(timeout_s=600, memory_bytes=128 << 20)  # it outlasts them on a busy machine, too
    process = box.bench.engine.start(Spec(["/usr/bin/python3", "-c", hog], limits=limits))
    ends = []
    thread = threading.Thread(target=lambda: ends.append(process.wait(lambda *_: up.set())))
    thread.start()
    try:
        assert up.wait(60)

        def work(number: int) -> list[str]:
            mount = box.mount({"f": str(number)})
            script = "for i in 1 2 3; do (cat f; sleep 0.05) & done; wait; echo done > mine; cat mine"
            return box.sh(script, mount, cwd="/mnt/work").lines()

        with ThreadPoolExecutor(OTHERS) as pool:
            found = list(pool.map(work, range(OTHERS)))
        assert found == [[f"{number}" * 3 + "done"] for number in range(OTHERS)]
    finally:
        process.kill()
        thread.join(60)
    assert ends[0].status in ("killed", "oom")


def test_processes_of_a_command_are_bounded(box: Box) -> None:
    code = f"""
import time
made = 0
try:
    while made < {PROCESSES} * 2:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        made += 1
except OSError as error:
    print(error.errno == errno.EAGAIN, made, flush=True)
os._exit(0)
"""
    refused, made = box.python(code).lines()[0].split()
    assert refused == "True"
    if not box.is_vm:
        assert PROCESSES * 0.9 < int(made) < PROCESSES
    assert box.sh("echo alive").lines() == ["alive"]
