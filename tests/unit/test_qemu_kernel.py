"""Kernel images in every packing, modules in an order that loads, and the initramfs."""

from __future__ import annotations

import bz2
import gzip
import lzma
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from fanout.engine.qemu import kernel
from fanout.errors import EngineUnavailable

PROGRAM = struct.Struct("<IIQQQQQQ")


def elf(*, note: int = 18, zeros: int = 5000) -> bytes:
    """Make a kernel of two segments, the second with zeros at its end, and a note in the first."""
    notes = struct.pack("<III", 4, 8, note) + b"Xen\0" + bytes(8)
    first, second = notes + b"code" * 500, b"data" * 300 + bytes(zeros)
    at = 4096
    head = bytearray(64)
    head[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", head, 32, 64)
    struct.pack_into("<Q", head, 40, 99_999)
    struct.pack_into("<HHHH", head, 54, 56, 3, 64, 7)
    programs = [
        PROGRAM.pack(1, 5, at, 0x1000000, 0x1000000, len(first), len(first), 4096),
        PROGRAM.pack(1, 6, at + len(first), 0x2000000, 0x2000000, len(second), len(second) + 100, 4096),
        PROGRAM.pack(4, 4, at, 0x1000000, 0x1000000, len(notes), len(notes), 4),
    ]
    body = bytes(head) + b"".join(programs)
    return body + bytes(at - len(body)) + first + second + b"sections that nobody loads"


def bzimage(payload: bytes) -> bytes:
    setup = bytearray(2 * 512)
    setup[0x1F1] = 1
    setup[0x202:0x206] = b"HdrS"
    struct.pack_into("<II", setup, 0x248, 16, len(payload))
    return bytes(setup) + bytes(16) + payload + b"the rest of the image"


def lz4_legacy(data: bytes) -> bytes:
    """Pack into one block: what was there shortly before is referred to, also where it overlaps itself."""
    out, literal, at = bytearray(), bytearray(), 0
    while at < len(data):
        before = data.rfind(data[at : at + 4], max(0, at - 300), at + 3)
        count = 0
        while before >= 0 and at + count < len(data) and data[before + count] == data[at + count]:
            count += 1
        if count < 4:
            literal.append(data[at])
            at += 1
            continue
        out += _sequence(literal, count - 4) + struct.pack("<H", at - before)
        out += _longer(count - 4)
        literal.clear()
        at += count
    out += _sequence(literal, 0)
    return struct.pack("<II", 0x184C2102, len(out)) + bytes(out) + struct.pack("<I", len(data))


def _sequence(literal: bytearray, match: int) -> bytes:
    return bytes([min(15, len(literal)) << 4 | min(15, match)]) + _longer(len(literal)) + literal


def _longer(count: int) -> bytes:
    return b"" if count < 15 else b"\xff" * ((count - 15) // 255) + bytes([(count - 15) % 255])


PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "zstd": lambda data: zstandard.ZstdCompressor().compress(data) + struct.pack("<I", len(data)),
    "gzip": lambda data: gzip.compress(data) + struct.pack("<I", len(data)),
    "xz": lambda data: lzma.compress(data) + struct.pack("<I", len(data)),
    "bzip2": lambda data: bz2.compress(data) + struct.pack("<I", len(data)),
    "lz4": lz4_legacy,
}


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_kernel_is_unpacked_and_trimmed(packing: str) -> None:
    whole = elf()
    made = kernel.bootable(bzimage(PACKINGS[packing](whole)))
    assert made[:5] == b"\x7fELF\x02"
    assert len(made) < len(whole)
    found = [PROGRAM.unpack_from(made, 64 + i * PROGRAM.size) for i in range(3)]
    original = [PROGRAM.unpack_from(whole, 64 + i * PROGRAM.size) for i in range(3)]
    for new, old in zip(found, original, strict=True):
        assert (new[0], new[3], new[4], new[6]) == (old[0], old[3], old[4], old[6])  # type, addresses, size in memory
        content = made[new[2] : new[2] + new[5]]
        assert content == whole[old[2] : old[2] + old[5]][: len(content)]
        assert not whole[old[2] + new[5] : old[2] + old[5]].strip(b"\0")
    assert found[1][5] == 1200


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=40), st.builds(lambda b, n: bytes([b]) * n, st.integers(0, 255), st.integers(1, 900))
        )
    )
)
def test_lz4_is_unpacked(pieces: list[bytes]) -> None:
    data = b"".join(pieces)
    assert kernel._unlz4(lz4_legacy(data)) == data


def test_a_kernel_that_qemu_cannot_start_uncompressed_stays_packed() -> None:
    for payload in (
        gzip.compress(elf(note=7)),
        gzip.compress(b"no ELF"),
        b"an unknown packing",
        gzip.compress(elf())[:-900],
    ):
        image = bzimage(payload)
        assert kernel.bootable(image) == image


@pytest.mark.parametrize("cut", [0, 100, 0x206, 0x250])
def test_what_is_no_kernel_is_refused(cut: int) -> None:
    with pytest.raises(EngineUnavailable, match="no x86 kernel"):
        kernel.bootable(bytes(cut))


@pytest.fixture
def modules(tmp_path: Path) -> Callable[..., Path]:
    def make(builtin: str = "", **depends: str) -> Path:
        (tmp_path / "kernel/some/where").mkdir(parents=True)
        (tmp_path / "modules.builtin").write_text("".join(f"kernel/x/{name}.ko\n" for name in builtin.split()))
        for i, (name, others) in enumerate(depends.items()):
            content = b"\x7fELF\0license=GPL\0depends=" + others.encode() + b"\0name=" + name.encode() + b"\0"
            suffix, pack = [("", bytes), (".xz", lzma.compress), (".gz", gzip.compress), (".zst", zstandard.compress)][
                i % 4
            ]
            (tmp_path / f"kernel/some/where/{name}.ko{suffix}").write_bytes(pack(content))
        return tmp_path

    return make


def test_modules_come_after_what_they_need(modules: Callable[..., Path]) -> None:
    place = modules("core dash-ed", fs="fuse", fuse="core", mmio="ring,bus", ring="", bus="ring,dash_ed", other="")
    found = kernel.Modules(place).load_order(["mmio", "fs", "core"])
    assert list(found) == ["ring", "bus", "mmio", "fuse", "fs"]
    assert all(content.startswith(b"\x7fELF\0license") for content in found.values())
    assert list(kernel.Modules(place).load_order(["fs", "other"], found)) == ["other"]


def test_a_missing_module_is_named(modules: Callable[..., Path]) -> None:
    place = modules("", a="gone")
    with pytest.raises(EngineUnavailable, match="no module gone"):
        kernel.Modules(place).load_order(["a"])
    with pytest.raises(EngineUnavailable, match="no directory of kernel modules"):
        kernel.Modules(place / "kernel")


def test_signatures_are_cut_off(tmp_path: Path) -> None:
    signature = bytes(300)
    tail = bytes(8) + struct.pack(">I", len(signature)) + b"~Module signature appended~\n"
    (tmp_path / "x.ko").write_bytes(b"the module" + signature + tail)
    assert kernel._read_module(tmp_path / "x.ko") == b"the module"


def test_the_initramfs_is_an_archive_that_others_read(tmp_path: Path) -> None:
    made = kernel.initramfs(b"agent", {"a": b"first", "b": b"second"}, {"c": b"third"})
    names = [name for name, _, _ in _entries(made)]
    assert names == ["dev", "m", "n", "t", "init", "m/0", "m/1", "n/0", "TRAILER!!!"]
    by_name = {name: (mode, data) for name, mode, data in _entries(made)}
    assert by_name["init"] == (0o100755, b"agent")
    assert by_name["m/1"] == (0o100644, b"second")
    listed = subprocess.run(["busybox", "cpio", "-t"], input=made, capture_output=True, check=False)
    assert listed.stdout.split() == [name.encode() for name in names[:-1]] or b"not found" in listed.stderr


def _entries(archive: bytes) -> list[tuple[str, int, bytes]]:
    found, at = [], 0
    while at < len(archive):
        assert archive[at : at + 6] == b"070701"
        numbers = [int(archive[at + 6 + 8 * i : at + 14 + 8 * i], 16) for i in range(13)]
        name = archive[at + 110 : at + 110 + numbers[11] - 1].decode()
        start = -(-(at + 110 + numbers[11]) // 4) * 4
        found.append((name, numbers[1], archive[start : start + numbers[6]]))
        at = -(-(start + numbers[6]) // 4) * 4
    return found
