"""The protocol between host and guest agent, as values and bytes; the other side is `guest/wire.h`.

Owns frames, the coding of a request, and the checks of what a guest sends, which is hostile. Does no I/O.

One byte stream in each direction (a virtio-serial port). A frame is a type (u8), three zero bytes, the length of its
payload (u32, little endian, at most `MAX_PAYLOAD`), the payload. The guest says READY once and is then asked once:
REQUEST frames whose payloads together are a list of fields (tag u8, length u32, value), RUN, and meanwhile STDIN and
STDIN_END. It answers STARTED, STDOUT and STDERR, and last EXIT, or REFUSED where nothing was run. Before it is asked,
it can be told to PREPARE (mount the root, whose tag is the payload), to SETTLE (leave zeros in unused memory), and
after REQUEST frames to REHEARSE (run that as a trial, without limits, its output unread); it says when that is done.

Flow control: the host sends at most `STDIN_WINDOW` bytes of stdin more than CREDIT frames have acknowledged, so
that the guest needs no more memory than that and always reads the frame KILL. Output is held back by the port itself:
a guest that cannot write does not read its pipes.
"""

from __future__ import annotations

import ipaddress
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

__all__ = [
    "Address",
    "BadFrame",
    "Frame",
    "Frames",
    "Kind",
    "Refusal",
    "Report",
    "Request",
    "Stage",
    "Tmpfs",
    "check_ready",
    "decode_credit",
    "decode_exit",
    "decode_refusal",
    "encode",
    "encode_request",
]

VERSION = 4
MAGIC = b"fanout-agent"

HEADER = struct.Struct("<B3xI")

#: The largest payload of one frame.
MAX_PAYLOAD = 64 * 1024

#: The most bytes of stdin on their way to the command.
STDIN_WINDOW = 256 * 1024

#: A credit that means: nobody reads stdin any more, send nothing.
STDIN_CLOSED = 0xFFFFFFFF


class Kind(IntEnum):
    """The types of frames: below 64 to the guest, from 64 on to the host."""

    REQUEST = 1
    RUN = 2
    STDIN = 3
    STDIN_END = 4
    KILL = 5
    PREPARE = 6
    SETTLE = 7
    REHEARSE = 8
    READY = 64
    STARTED = 65
    STDOUT = 66
    STDERR = 67
    CREDIT = 68
    EXIT = 69
    REFUSED = 70
    PREPARED = 71
    SETTLED = 72
    REHEARSED = 73


class Stage(IntEnum):
    """What the guest was doing when it refused a request."""

    REQUEST = 1
    ROOT = 2
    DEVICES = 3
    CWD = 4
    LIMITS = 5
    NETWORK = 6
    PROCESS = 7


class _Field(IntEnum):
    ARG = 1
    ENV = 2
    CWD = 3
    IDS = 4
    LIMITS = 5
    CLOCK = 6
    ENTROPY = 7
    CAPABILITIES = 8
    NETWORK = 9
    ROOT = 10
    TMPFS = 11
    INODES = 12


class BadFrame(ValueError):
    """Bytes that no agent of this version sends."""


class Frame(NamedTuple):
    """One frame as it arrived."""

    kind: Kind
    payload: bytes


class Report(NamedTuple):
    """How the command ended, as the guest tells: hostile numbers within the bounds of their types.

    `how` is "exited" (value: the exit code), "signaled" (value: the signal) or "not executed" (value: the errno);
    `killed` that nothing told how: all was killed. `pids`: it met the limit of processes.
    """

    how: str
    value: int
    oom: bool
    killed: bool
    pids: bool
    cpu_s: float
    max_rss_bytes: int
    elapsed_s: float


class Refusal(NamedTuple):
    """Why nothing was run."""

    stage: int
    errno: int
    text: str


@dataclass(frozen=True, slots=True)
class Tmpfs:
    """An empty directory in memory, at an absolute path that is there in the root."""

    path: str
    mode: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Address:
    """The guest's network: IPv4 addresses in dotted form, `prefix` bits of network. DNS is in the root's /etc."""

    address: str
    prefix: int
    gateway: str


@dataclass(frozen=True, slots=True)
class Request:
    """One command for one guest.

    `argv[0]` is looked up in the PATH of `env` (words `NAME=value`). `root` is the virtiofs tag that holds the
    command's root directory, which has directories `proc`, `dev` and those of `tmpfs`; None runs it in the agent's
    own, for tests without a VM. `memory_bytes`, `pids` and `cpus` limit all its processes together (None: no limit).
    `capabilities` is a mask of capability numbers; `user_namespaces` how many it may make. `now_ns` sets the guest's
    clock (None: leave it), `entropy` (at most 512 bytes) its random numbers. Of more files than
    `inodes` the guest forgets those that nobody uses.
    """

    argv: Sequence[bytes]
    env: Sequence[bytes] = ()
    cwd: bytes = b"/"
    root: str | None = "root"
    tmpfs: Sequence[Tmpfs] = ()
    uid: int = 0
    gid: int = 0
    memory_bytes: int | None = None
    pids: int | None = None
    cpus: float | None = None
    open_files: int = 65536
    capabilities: int = 0
    user_namespaces: int = 0
    now_ns: int | None = None
    entropy: bytes = b""
    inodes: int | None = None
    network: Address | None = None


def encode(kind: Kind, payload: bytes | memoryview = b"") -> bytes:
    """Return one frame."""
    if len(payload) > MAX_PAYLOAD:
        raise ValueError(f"a frame of {len(payload)} bytes: at most {MAX_PAYLOAD}")
    return HEADER.pack(kind, len(payload)) + payload


CPU_PERIOD_US = 100_000


def encode_request(request: Request, last: Kind = Kind.RUN) -> bytes:
    """Return the frames that ask for a command, the last included: RUN, or REHEARSE for a trial."""
    fields = bytearray()

    def add(tag: _Field, value: bytes) -> None:
        fields.extend(struct.pack("<BI", tag, len(value)) + value)

    for word in request.argv:
        add(_Field.ARG, word)
    for word in request.env:
        add(_Field.ENV, word)
    add(_Field.CWD, request.cwd)
    add(_Field.IDS, struct.pack("<II", request.uid, request.gid))
    quota_us = 0 if request.cpus is None else max(1000, round(request.cpus * CPU_PERIOD_US))
    limits = (request.memory_bytes or 0, request.pids or 0, quota_us, request.open_files, request.user_namespaces)
    add(_Field.LIMITS, struct.pack("<5Q", *limits))
    add(_Field.CAPABILITIES, struct.pack("<Q", request.capabilities))
    if request.now_ns is not None:
        add(_Field.CLOCK, struct.pack("<Q", request.now_ns))
    if request.entropy:
        add(_Field.ENTROPY, request.entropy[:512])
    if request.inodes is not None:
        add(_Field.INODES, struct.pack("<Q", request.inodes))
    if request.network is not None:
        add(_Field.NETWORK, _network(request.network))
    if request.root is not None:
        add(_Field.ROOT, os.fsencode(request.root))
    for each in request.tmpfs:
        add(_Field.TMPFS, struct.pack("<IQ", each.mode, each.size_bytes) + os.fsencode(each.path))
    pieces = [encode(Kind.REQUEST, bytes(fields[at : at + MAX_PAYLOAD])) for at in range(0, len(fields), MAX_PAYLOAD)]
    return b"".join([*pieces, encode(last)])


def _network(network: Address) -> bytes:
    mask = ipaddress.IPv4Network((0, network.prefix)).netmask
    gateway = ipaddress.IPv4Address(network.gateway)
    return ipaddress.IPv4Address(network.address).packed + mask.packed + gateway.packed


class Frames:
    """Cuts what a guest sends into frames; holds at most one that is not whole. Raises `BadFrame`."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Take bytes, give the frames that are whole now."""
        self._buffer += data
        at = 0
        try:
            while len(self._buffer) - at >= HEADER.size:
                kind, length = _header(self._buffer, at)
                if len(self._buffer) - at < HEADER.size + length:
                    break
                at += HEADER.size + length
                yield Frame(kind, bytes(self._buffer[at - length : at]))
        finally:
            del self._buffer[:at]


def _header(buffer: bytearray, at: int) -> tuple[Kind, int]:
    number, length = HEADER.unpack_from(buffer, at)
    if number < Kind.READY or number > Kind.REHEARSED or any(buffer[at + 1 : at + 4]):
        raise BadFrame(f"a frame of type {number}")
    if length > MAX_PAYLOAD:
        raise BadFrame(f"a frame of {length} bytes")
    return Kind(number), length


def check_ready(payload: bytes) -> None:
    """Refuse an agent of another version: `BadFrame`."""
    if payload != MAGIC + struct.pack("<I", VERSION):
        raise BadFrame(f"an agent that says {payload[:40]!r}")


def decode_credit(payload: bytes) -> int:
    """Return how many bytes of stdin were taken, or STDIN_CLOSED."""
    (count,) = _unpacked("<I", payload, "CREDIT")
    return int(count)


def decode_exit(payload: bytes) -> Report:
    """Return what an EXIT frame says."""
    how, oom, killed, pids, value, cpu_us, peak, elapsed_ns = _unpacked("<BBBBiQQQ", payload, "EXIT")
    if how > 2 or not 0 <= value < 4096:
        raise BadFrame(f"an end of kind {how}, value {value}")
    name = ("exited", "signaled", "not executed")[how]
    return Report(name, value, bool(oom), bool(killed), bool(pids), cpu_us / 1e6, peak, elapsed_ns / 1e9)


def decode_refusal(payload: bytes) -> Refusal:
    """Return what a REFUSED frame says."""
    if len(payload) < 8:
        raise BadFrame(f"a REFUSED frame of {len(payload)} bytes")
    stage, errno = struct.unpack_from("<Bxxxi", payload)
    return Refusal(stage, errno, payload[8:208].decode(errors="replace"))


def _unpacked(form: str, payload: bytes, what: str) -> tuple[int, ...]:
    if len(payload) != struct.calcsize(form):
        raise BadFrame(f"{what} holds {len(payload)} bytes")
    return struct.unpack(form, payload)
