"""s3: GET and PUT of small and large objects and a long listing, through the S3 gateway, beside other S3 servers.

All servers run on this machine and get the same load from the same generator (s3_load.py), in turn, a burst each. moto
keeps everything in its memory, and so does the OSD behind Ceph's gateway; so the gateway's store is on a memory file
system, too, if there is one. "fanout on disk" is the same on a disk, where a PUT waits until it is durable. All verify
signatures but moto.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal, NamedTuple

import anyio
import anyio.to_thread

import fanout
from benchmarks import s3_load, s3_server, servers
from benchmarks.harness import Report, Side, Size, Skip, Stats, interleave
from benchmarks.s3_load import Found, Load

__all__ = ["ABOUT", "LARGE_MB_S", "SMALL_TIMES", "run"]

ABOUT = "GET, PUT and LIST through the S3 gateway, beside the moto server and Ceph RGW"

#: At least this many times as many calls a second as moto, for objects of 1 KiB.
SMALL_TIMES = 4.0
#: At least this many MB a second when objects of 8 MiB are read.
LARGE_MB_S = 400.0

_SMALL, _LARGE = 1 << 10, 8 << 20
_LISTED = {"full": 10_000, "quick": 2_000, "smallest": 1_100}
_WIDTHS = {"full": (1, 32), "quick": (1, 32), "smallest": (2,)}
_ROUNDS = {"full": 7, "quick": 3, "smallest": 1}
#: Calls of a burst, all clients together.
_CALLS = {"full": {_SMALL: 640, _LARGE: 64}, "quick": {_SMALL: 128, _LARGE: 32}, "smallest": {_SMALL: 4, _LARGE: 2}}
_WHATS: tuple[Literal["get", "put"], ...] = ("get", "put")
_START_S = 30.0
_MEMORY = "/dev/shm"


class Server(NamedTuple):
    """One S3 server; `at` has its endpoint, a bucket and the keys."""

    name: str
    at: Load


async def run(report: Report, size: Size, place: Path) -> None:
    with ExitStack() as stack:
        found: list[Server] = []
        for name, start in (("fanout", _gateway), ("fanout on disk", _on_disk), ("moto", _moto), ("rgw", _rgw)):
            try:
                found.append(await anyio.to_thread.run_sync(lambda s=start: stack.enter_context(s(place))))  # type: ignore[misc]
            except Skip as reason:
                report.skip(name, reason)
        for server in found:
            await anyio.to_thread.run_sync(_fill, server, _LISTED[size])
        for bytes_, what, width in itertools.product((_SMALL, _LARGE), _WHATS, _WIDTHS[size]):
            await _objects(report, found, size, bytes_, what, width)
        await _listing(report, found, size)


async def _objects(
    report: Report, found: list[Server], size: Size, bytes_: int, what: Literal["get", "put"], width: int
) -> None:
    calls = max(_CALLS[size][bytes_] // width, 1)
    prefix = f"{'read' if what == 'get' else 'written'}/{bytes_}/"
    keys = _keys(bytes_) if what == "get" else width * calls
    bursts: dict[str, list[Found]] = {server.name: [] for server in found}

    def side(server: Server) -> Side:
        load = replace(server.at, what=what, prefix=prefix, size=bytes_, keys=keys, clients=width, calls=calls)

        async def burst() -> float:
            done = await anyio.to_thread.run_sync(loaded, load)
            if done.refused and server.name != "moto":
                raise RuntimeError(done.refused[0])
            bursts[server.name].append(done)
            return len(done.calls_ms) / done.wall_ms * 1e3

        return burst

    rates = await interleave({server.name: side(server) for server in found}, _ROUNDS[size])
    label = f"{what.upper()} {_size(bytes_)}, {width} client{'s' if width > 1 else ''}"
    for server in found:
        done = bursts[server.name][1:]
        report.add(f"{label}: {server.name}, a call", [ms for burst in done for ms in burst.calls_ms])
        report.add(f"{label}: {server.name}", rates[server.name], "calls/s")
        refused = [text for burst in done for text in burst.refused]
        if refused:
            report.notes.append(f"{label}: {server.name} refused {len(refused)} calls: {refused[0][:60]!r}")
    ours = found[0]
    rate = Stats.of(rates[ours.name]).p50
    for server in found[1:]:
        limit = SMALL_TIMES if server.name == "moto" and bytes_ == _SMALL else None
        ratio = rate / Stats.of(rates[server.name]).p50
        report.bound(f"{label}: calls/s of {ours.name} / {server.name}", ratio, limit, unit="x", at_least=True)
    if bytes_ == _LARGE:
        limit = LARGE_MB_S if what == "get" else None
        report.bound(f"{label}: {ours.name}", rate * bytes_ / 1e6, limit, unit="MB/s", at_least=True)


async def _listing(report: Report, found: list[Server], size: Size) -> None:
    def side(server: Server, width: int) -> Side:
        load = replace(server.at, prefix="many/", clients=width)

        async def burst() -> float:
            done = await anyio.to_thread.run_sync(loaded, load)
            if done.listed != _LISTED[size]:
                raise RuntimeError(f"{server.name} lists {done.listed} of {_LISTED[size]} keys")
            return done.wall_ms

        return burst

    for width in _WIDTHS[size]:
        # The peers take minutes for 32 listings at once: these are made once.
        rounds, warm_up = (max(_ROUNDS[size] // 2, 1), 1) if width == 1 else (1, 0)
        walls = await interleave({server.name: side(server, width) for server in found}, rounds, warm_up=warm_up)
        label = f"LIST {_LISTED[size]} keys, {width} client{'s' if width > 1 else ''}"
        stats = {server.name: report.add(f"{label}: {server.name}", walls[server.name]) for server in found}
        for server in found[1:]:
            report.ratio(f"{label}: {found[0].name} / {server.name}", stats[found[0].name], stats[server.name])


def loaded(load: Load) -> Found:
    """Run the load generator in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.s3_load"], input=json.dumps(asdict(load)), capture_output=True,
        text=True, check=False, timeout=600, cwd=Path(__file__).resolve().parent.parent,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip()[-500:])
    return Found(**json.loads(done.stdout))


def _keys(bytes_: int) -> int:
    return 256 if bytes_ == _SMALL else 8


def _size(bytes_: int) -> str:
    return f"{bytes_ >> 20} MiB" if bytes_ >= 1 << 20 else f"{bytes_ >> 10} KiB"


def _fill(server: Server, listed: int) -> None:
    """Store what is read and listed."""

    def put(prefix: str, bytes_: int, keys: int) -> None:
        clients = 8
        calls = -(-keys // clients)
        loaded(replace(server.at, what="put", prefix=prefix, size=bytes_, keys=keys, clients=clients, calls=calls))

    for bytes_ in (_SMALL, _LARGE):
        put(f"read/{bytes_}/", bytes_, _keys(bytes_))
    put("many/", 0, listed)


# The servers --------------------------------------------------------------------------------------------------


@contextmanager
def _gateway(place: Path) -> Iterator[Server]:
    if not os.access(_MEMORY, os.W_OK):
        raise Skip(f"there is no memory file system at {_MEMORY}")
    with (
        tempfile.TemporaryDirectory(prefix="fanout-bench-", dir=_MEMORY) as memory,
        _fanout("fanout", place / "in-memory", memory) as made,
    ):
        yield made


@contextmanager
def _on_disk(place: Path) -> Iterator[Server]:
    with _fanout("fanout on disk", place / "on-disk", str(place / "store")) as made:
        yield made


@contextmanager
def _fanout(name: str, place: Path, store: str) -> Iterator[Server]:
    with servers.fanout_server(place, store=f"file://{store}") as running:
        made = Server(name, Load(running.s3_url, "bench", running.access_key, running.secret_key))

        async def create() -> None:
            async with fanout.connect(running.url, api_key=running.token) as fo:
                await fo.disks.create("bench")

        anyio.run(create)
        yield made


@contextmanager
def _moto(place: Path) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        endpoint = f"http://127.0.0.1:{port}"
        _wait_for(process, port)
        at = Load(endpoint, "bench", "testing", "testing")
        s3_load.Connection(endpoint).call(s3_load.Signer(at).head("PUT"))
        yield Server("moto", at)
    finally:
        process.kill()
        process.wait()


@contextmanager
def _rgw(place: Path) -> Iterator[Server]:
    with s3_server.server(place) as endpoint:
        keys = os.environ.get("AWS_ACCESS_KEY_ID", ""), os.environ.get("AWS_SECRET_ACCESS_KEY", "")
        with s3_server.bucket(endpoint, f"fanout-bench-s3-{os.getpid()}") as bucket:
            yield Server("rgw", Load(endpoint, bucket, *keys))


def _wait_for(process: subprocess.Popen[bytes], port: int) -> None:
    until = time.monotonic() + _START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise Skip("the moto server does not start here (pip install 'moto[server]')")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    raise Skip(f"the moto server did not listen within {_START_S:g} s")
