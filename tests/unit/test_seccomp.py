"""The filter of system calls: its program, run by a small interpreter, for machines that are not here too."""

from __future__ import annotations

import errno
import re
import struct
from pathlib import Path

import pytest

from fanout.engine import seccomp
from fanout.errors import EngineUnavailable

ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL = 0x7FFF0000, 0x80000000
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
machines = pytest.mark.parametrize("machine", list(ARCH))


def run(program: bytes, number: int, *arguments: int, arch: int) -> int:
    """Return what the kernel would for this call: classic BPF over struct seccomp_data."""
    data = struct.pack("<IIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    code = list(struct.iter_unpack("<HBBI", program))
    accumulator = place = 0
    while True:
        kind, yes, no, value = code[place]
        place += 1
        if kind == 0x06:
            return value
        if kind == 0x20:
            accumulator = struct.unpack_from("<I", data, value)[0]
        elif kind == 0x05:
            place += value
        else:
            held = {0x15: accumulator == value, 0x25: accumulator > value, 0x45: bool(accumulator & value)}[kind]
            place += yes if held else no


def verdict(machine: str, name: str, *arguments: int, nested: bool = False) -> int:
    """Return the error a call ends with, 0 if it is allowed."""
    number = seccomp.NUMBERS[name][list(ARCH).index(machine)]
    assert number is not None
    said = run(seccomp.program(machine, nested=nested), number, *arguments, arch=ARCH[machine])
    return 0 if said == ALLOW else said & 0xFFFF


@machines
def test_each_call_is_named_by_its_own_number(machine: str) -> None:
    header = HEADERS[machine]
    if not header.exists():
        pytest.skip(f"{header} is not here (linux-libc-dev)")
    found = {
        name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())
    }
    newer = {"open_tree_attr"}
    for name, numbers in seccomp.NUMBERS.items():
        if name not in newer:
            assert numbers[list(ARCH).index(machine)] == found.get(name), name


@machines
def test_what_is_denied_always(machine: str) -> None:
    for name in seccomp.DENIED:
        if seccomp.NUMBERS[name][list(ARCH).index(machine)] is not None:
            assert verdict(machine, name) == errno.EPERM, name
            assert verdict(machine, name, nested=True) == errno.EPERM, name
    for name in seccomp.MISSING:
        assert verdict(machine, name) == errno.ENOSYS


@machines
def test_every_other_known_call_is_allowed(machine: str) -> None:
    """What a program makes all the time, and all of the rest: a denied call is one of the lists."""
    index = list(ARCH).index(machine)
    listed = {numbers[index] for numbers in seccomp.NUMBERS.values()}
    program = seccomp.program(machine)
    for number in range(seccomp.NEWEST + 1):
        if number not in listed:
            assert run(program, number, arch=ARCH[machine]) == ALLOW, number


@machines
def test_calls_that_came_later_and_other_abis_do_not_exist(machine: str) -> None:
    program = seccomp.program(machine)
    for number in (seccomp.NEWEST + 1, 1000, 0x40000000, 0x40000000 + 165, 0xFFFFFFFF):
        assert run(program, number, arch=ARCH[machine]) & 0xFFFF == errno.ENOSYS
    for arch in {*ARCH.values(), 0x40000003, 0x40000028} - {ARCH[machine]}:
        assert run(program, 1, arch=arch) == KILL


@machines
def test_namespaces_are_told_from_threads_by_their_flags(machine: str) -> None:
    thread = 0x100 | 0x200 | 0x400 | 0x800 | 0x10000 | 0x40000 | 0x80000 | 0x200000 | 0x1000000
    assert verdict(machine, "clone", thread) == 0
    assert verdict(machine, "clone", 17) == 0
    assert verdict(machine, "clone", 0x80 | 17) == 0  # a part of the signal's number there
    for bit in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert verdict(machine, "clone", bit | 17) == errno.EPERM
        assert verdict(machine, "unshare", bit) == errno.EPERM
        assert verdict(machine, "clone", bit | 17, nested=True) == verdict(machine, "unshare", bit, nested=True) == 0
    assert verdict(machine, "unshare", 0x80) == errno.EPERM
    assert verdict(machine, "unshare", 0x200 | 0x400) == 0
    assert verdict(machine, "clone3") == errno.ENOSYS
    assert verdict(machine, "setns") == errno.EPERM
    for name in seccomp.MOUNTS:
        assert verdict(machine, name) == errno.EPERM
        assert verdict(machine, name, nested=True) == 0


@machines
def test_arguments_decide_for_sockets_ioctls_and_personalities(machine: str) -> None:
    for family in (1, 2, 10):
        assert verdict(machine, "socket", family, 1, 0) == 0
    assert verdict(machine, "socket", 16, 3, 0) == 0
    assert verdict(machine, "socket", 16, 3, 12) == errno.EAFNOSUPPORT  # netfilter
    for family in (0, 3, 9, 15, 17, 21, 29, 30, 38, 40, 44, 45):
        assert verdict(machine, "socket", family, 1, 0) == errno.EAFNOSUPPORT
        assert verdict(machine, "socketpair", family, 1, 0) == errno.EAFNOSUPPORT
    assert verdict(machine, "socketpair", 1, 1, 0) == 0
    for request in (0x5412, 0x541C, 0x1_0000_5412):  # the kernel looks at the lower half only
        assert verdict(machine, "ioctl", 0, request) == errno.EPERM
    assert verdict(machine, "ioctl", 0x5412, 0x5413) == 0
    assert verdict(machine, "ptrace", 16, 2) == 0
    assert verdict(machine, "ptrace", 16, 1) == errno.EPERM
    assert verdict(machine, "personality", 0) == verdict(machine, "personality", 0xFFFFFFFF) == 0
    assert verdict(machine, "personality", 0x0400000) == errno.EPERM  # READ_IMPLIES_EXEC


def test_an_unknown_machine_is_refused() -> None:
    with pytest.raises(EngineUnavailable, match="riscv64"):
        seccomp.program("riscv64")
