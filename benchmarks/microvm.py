"""microvm: what a VM for each command costs, beside namespaces in the same run."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import anyio.to_thread

from benchmarks.harness import Report, Side, Size, Skip, interleave
from fanout.config import Settings
from fanout.engine.base import Engine, Limits, Mount, Spec
from fanout.engine.bubblewrap import BubblewrapEngine
from fanout.engine.qemu.engine import QemuEngine
from fanout.engine.qemu.machine import Guest
from fanout.engine.qemu.vm import VM
from fanout.errors import EngineUnavailable

__all__ = ["ABOUT", "run"]

ABOUT = "a VM for each command (cold, copied, warm, 1 to 50 at once, memory), beside bubblewrap"

MIB = 1 << 20

#: What must be reached without KVM: start of a warm VM (p50), boot until the agent answers, memory of a VM.
WARM_MS, COLD_MS, MEMORY_MB = 150.0, 2500.0, 160.0

GUEST_BYTES = 256 * MIB

_BOOTS = {"full": 5, "quick": 2, "smallest": 1}
_STARTS = {"full": 30, "quick": 6, "smallest": 2}
_WIDTHS = {"full": (1, 10, 50), "quick": (1, 10), "smallest": (2,)}
_ROUNDS = {"full": 3, "quick": 1, "smallest": 1}


async def run(report: Report, size: Size, place: Path) -> None:
    with _engines() as (qemu, bubblewrap):
        acceleration = qemu.acceleration
        report.notes.append(f"guests of {GUEST_BYTES // MIB} MiB, run with {acceleration}, a pool of 4")
        host = dataclasses.replace(qemu.vm_host(), copied=None)
        guest = Guest(GUEST_BYTES, acceleration=acceleration)
        ready = report.add("boot until the agent answers", [_boot(VM(host, guest)) for _ in range(_BOOTS[size])])
        if acceleration == "tcg":
            copies = [_boot(VM(qemu.vm_host(), guest)) for _ in range(_BOOTS[size])]
            report.add("a copy of a booted VM until its agent answers", copies)
        started = await _compare(report, "start, warm", _STARTS[size], qemu, bubblewrap, place)
        for width in _WIDTHS[size]:
            await _compare_wide(report, width, _ROUNDS[size], qemu, bubblewrap, place)
        memory = _memory_mb(qemu, place)
        report.add("memory of a VM that has run `true` (PSS)", [memory], "MB")
        if acceleration == "tcg":
            report.bound("start of a warm VM, p50", started, WARM_MS)
            report.bound("boot until the agent answers, p50", ready.p50, COLD_MS)
        report.bound("memory of a VM", memory, MEMORY_MB, unit="MB")


@contextmanager
def _engines() -> Iterator[tuple[QemuEngine, BubblewrapEngine]]:
    qemu = QemuEngine(cache_dir=Settings.load().cache_dir, memory_bytes=GUEST_BYTES, pool=4)
    bubblewrap = BubblewrapEngine()
    try:
        qemu.probe()
        bubblewrap.probe()
        yield qemu, bubblewrap
    except EngineUnavailable as error:
        raise Skip(str(error)) from error
    finally:
        qemu.close()
        bubblewrap.close()


def _boot(vm: VM) -> float:
    began = time.perf_counter()
    try:
        vm.boot()
        return (time.perf_counter() - began) * 1e3
    finally:
        vm.end()


_numbers = itertools.count()


def _fresh_mount(place: Path) -> Mount:
    """Return a writable mount over an empty directory."""
    top = place / str(next(_numbers))
    lower, upper, work = top / "lower", top / "upper", top / "work"
    for path in (top, lower, upper, work):
        path.mkdir()
    return Mount("/mnt/work", (str(lower),), str(upper), str(work))


def _start_ms(engine: Engine, place: Path) -> float:
    """Run `true`; return how long it took from the call until the command began."""
    spec = Spec(["/bin/true"], [_fresh_mount(place)], cwd="/mnt/work", limits=Limits(timeout_s=300))
    called = time.monotonic()
    ended = engine.start(spec).wait(lambda *_: None)
    assert ended.exit_code == 0, ended
    return (ended.started_s - called) * 1e3


def _fill(engine: Engine) -> None:
    while isinstance(engine, QemuEngine) and engine.counts()["ready"] < 4:
        time.sleep(0.02)


async def _compare(
    report: Report, label: str, rounds: int, qemu: QemuEngine, bubblewrap: BubblewrapEngine, place: Path
) -> float:
    """Start commands one at a time, the pool full each time; return the median start of a VM's."""

    def side(engine: Engine) -> Side:
        async def one() -> float:
            await anyio.to_thread.run_sync(_fill, engine)
            return await anyio.to_thread.run_sync(_start_ms, engine, place)

        return one

    found = await interleave({"qemu": side(qemu), "bubblewrap": side(bubblewrap)}, rounds)
    mine = report.add(f"{label}: qemu", found["qemu"])
    report.add(f"{label}: bubblewrap", found["bubblewrap"])
    return mine.p50


async def _compare_wide(
    report: Report, width: int, rounds: int, qemu: QemuEngine, bubblewrap: BubblewrapEngine, place: Path
) -> None:
    """Run as many commands at once, from a full pool; what is measured is until the last has ended."""

    def side(engine: Engine) -> Side:
        async def all_of_them() -> float:
            await anyio.to_thread.run_sync(_fill, engine)
            return await anyio.to_thread.run_sync(_together, [lambda: _start_ms(engine, place)] * width)

        return all_of_them

    found = await interleave({"qemu": side(qemu), "bubblewrap": side(bubblewrap)}, rounds, warm_up=0)
    mine = report.add(f"{width} at once, until the last has ended: qemu", found["qemu"])
    theirs = report.add(f"{width} at once, until the last has ended: bubblewrap", found["bubblewrap"])
    report.ratio(f"{width} at once: qemu / bubblewrap", mine, theirs)


def _together(calls: Sequence[Callable[[], object]]) -> float:
    with ThreadPoolExecutor(len(calls)) as threads:
        began = time.perf_counter()
        for done in [threads.submit(call) for call in calls]:
            done.result()
        return (time.perf_counter() - began) * 1e3


def _memory_mb(qemu: QemuEngine, place: Path) -> float:
    """Return what QEMU and virtiofsd take of memory, shared pages by their share, after a command has run in the VM."""
    _fill(qemu)
    idle = set(qemu.vms())
    process = qemu.start(Spec(["/bin/sh", "-c", "/bin/true; echo ran; sleep 600"], [_fresh_mount(place)]))
    found: list[float] = []

    def look(stream: str, data: bytes) -> None:
        taken = next(vm for vm in idle if vm.is_taken)
        found.append(sum(map(_pss_bytes, taken.pids())) / 1e6)
        process.kill()

    process.wait(look)
    return found[0]


def _pss_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
