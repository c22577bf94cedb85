"""`python -m benchmarks NAME... [--quick] [--json FILE]`: run workloads and print what they found.

Owns the command line. Exit code 0: all targets met or skipped; 1: one was missed; 2: bad arguments.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import anyio

from benchmarks.harness import Report, Size, Skip, Workload, complain, machine, write_json
from benchmarks.trees import remove

#: Every workload is a module of this package with an `ABOUT` and a `run`.
WORKLOADS = (
    "exec_start", "fanout", "commit", "branch", "memory", "cold_start", "scale", "commit_storm", "remote_exec", "s3",
    "grep", "microvm",
)  # fmt: skip


def load(name: str) -> Workload:
    """Import one workload."""
    return cast(Workload, importlib.import_module(f"benchmarks.{name}"))


async def run_one(name: str, size: Size, directory: Path | None) -> Report:
    """Run one workload in a fresh directory, removed afterwards."""
    report = Report(name)
    place = Path(tempfile.mkdtemp(prefix="fanout-bench-", dir=directory))
    try:
        await load(name).run(report, size, place)
    except Skip as reason:
        report.skip(name, reason)
    finally:
        remove(place)
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*WORKLOADS, "all", []], metavar="NAME", help="a workload, or all")
    parser.add_argument("--quick", action="store_true", help="a small form of each, under 20 s")
    parser.add_argument("--smallest", action="store_true", help="just enough to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers, samples included")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where to work (default: the system's temporary)")
    options = parser.parse_args(arguments)
    names = list(WORKLOADS) if "all" in options.names else options.names
    if not names:
        for name in WORKLOADS:
            print(f"{name:<12} {load(name).ABOUT}")
        return 0
    size: Size = "smallest" if options.smallest else "quick" if options.quick else "full"
    facts = machine()
    print(
        f"{facts['cores']} cores ({facts['cpu']}), {facts['memory_bytes'] >> 30} GiB, Linux {facts['kernel']}, "
        f"Python {facts['python']}, {'root' if facts['root'] else 'not root'}, load {facts['load']:.1f}",
        flush=True,
    )
    if facts["load"] > facts["cores"] / 2:
        complain("the machine is busy: believe the ratios, not the times")
    reports = []
    for name in names:
        reports.append(anyio.run(run_one, name, size, options.dir))
        print(reports[-1].text(), flush=True)
    if options.json:
        write_json(options.json, size, reports)
    return 0 if all(report.met for report in reports) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # servers that were started end with it, too
    raise SystemExit(main())
