"""A distribution's kernel as a guest needs it: the file QEMU starts quickest, and its modules in an order that loads.

Owns the formats of kernel images and modules, and the initramfs. Knows nothing of where kernels come from. Blocking.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import zstandard

from fanout.errors import EngineUnavailable

__all__ = ["BOOT_MODULES", "NETWORK_MODULES", "Modules", "bootable", "initramfs"]

#: What the guest needs, as names of modules; what is built into the kernel is left out, what these depend on added.
BOOT_MODULES = ("virtio_mmio", "virtio_pci", "virtio_console", "virtiofs")
NETWORK_MODULES = ("virtio_net",)

SIGNATURE = b"~Module signature appended~\n"

#: The note by which QEMU starts an uncompressed kernel (XEN_ELFNOTE_PHYS32_ENTRY).
PVH_NOTE = 18

PT_LOAD, PT_NOTE = 1, 4


class Modules:
    """The modules of one kernel: a directory like /lib/modules/VERSION. `EngineUnavailable` for what is missing."""

    def __init__(self, directory: Path) -> None:
        self._paths = {_name(path.name): path for path in (directory / "kernel").rglob("*.ko*")}
        try:
            lines = (directory / "modules.builtin").read_text().splitlines()
        except OSError as error:
            raise EngineUnavailable(f"{directory} is no directory of kernel modules: {error}") from error
        self._builtin = {_name(line.rpartition("/")[2]) for line in lines}

    def load_order(self, names: Iterable[str], loaded: Iterable[str] = ()) -> dict[str, bytes]:
        """Return the modules to load for these, each after what it depends on, without those that are loaded."""
        found: dict[str, bytes] = {}
        done = set(loaded)

        def visit(name: str) -> None:
            if name in done or name in self._builtin:
                return
            done.add(name)
            if name not in self._paths:
                raise EngineUnavailable(f"this kernel has no module {name}")
            content = _read_module(self._paths[name])
            for other in _depends(content):
                visit(other)
            found[name] = content

        for name in names:
            visit(name)
        return found


def _name(file: str) -> str:
    return file.partition(".ko")[0].replace("-", "_")


def _depends(module: bytes) -> list[str]:
    said = re.search(rb"\0depends=([^\0]*)\0", module)
    return [word.replace("-", "_") for word in said[1].decode().split(",") if word] if said else []


def _read_module(path: Path) -> bytes:
    """Read a module, decompressed and without its signature: checking it takes a guest without KVM a while."""
    data = path.read_bytes()
    if path.suffix == ".zst":
        data = zstandard.ZstdDecompressor().decompressobj().decompress(data)
    elif path.suffix == ".xz":
        data = lzma.decompress(data)
    elif path.suffix == ".gz":
        data = gzip.decompress(data)
    if data.endswith(SIGNATURE):
        at = len(data) - len(SIGNATURE)
        (size,) = struct.unpack_from(">I", data, at - 4)
        data = data[: at - 12 - size]
    return data


def bootable(image: bytes) -> bytes:
    """Return what QEMU is to start for a bzImage: the kernel in it, uncompressed, where it says how to be started.

    A guest without KVM would take longer to uncompress it, at every boot; and what is mapped is shared by all VMs.
    """
    if image[0x202:0x206] != b"HdrS":
        raise EngineUnavailable("it is no x86 kernel image")
    setup = image[0x1F1] or 4
    offset, size = struct.unpack_from("<II", image, 0x248)
    start = (setup + 1) * 512 + offset
    try:
        elf = _uncompress(image[start : start + size])
        return (elf and _loadable(elf)) or image
    except (struct.error, IndexError, ValueError, zlib.error, lzma.LZMAError, zstandard.ZstdError, OSError, EOFError):
        return image


def _uncompress(payload: bytes) -> bytes | None:
    if payload[:4] == b"\x02\x21\x4c\x18":
        return _unlz4(payload)
    if payload[:4] == b"\x28\xb5\x2f\xfd":
        return zstandard.ZstdDecompressor().decompressobj().decompress(payload)
    if payload[:2] == b"\x1f\x8b":
        return zlib.decompressobj(31).decompress(payload)
    if payload[:6] == b"\xfd7zXZ\0":
        return lzma.LZMADecompressor(lzma.FORMAT_XZ).decompress(payload)
    if payload[:3] == b"BZh":
        return bz2.BZ2Decompressor().decompress(payload)
    return None


def _unlz4(payload: bytes) -> bytes:
    """Uncompress LZ4's legacy frame format: blocks of 8 MiB, each after its size."""
    out = bytearray()
    at = 4
    while at + 8 <= len(payload):  # the last four bytes are the kernel's own: its size
        (size,) = struct.unpack_from("<I", payload, at)
        _unlz4_block(payload, at + 4, at + 4 + size, out)
        at += 4 + size
    return bytes(out)


def _unlz4_block(source: bytes, at: int, end: int, out: bytearray) -> None:
    while at < end:
        token = source[at]
        at += 1
        count = token >> 4
        if count == 15:
            count, at = _longer(source, count, at)
        out += source[at : at + count]
        at += count
        if at >= end:
            return
        offset = source[at] | source[at + 1] << 8
        at += 2
        count = token & 15
        if count == 15:
            count, at = _longer(source, count, at)
        count += 4
        start = len(out) - offset
        if offset == 0 or start < 0:
            raise ValueError("a reference to what is not there")
        if offset >= count:
            out += out[start : start + count]
        else:
            out += (out[start:] * (count // offset + 1))[:count]


def _longer(source: bytes, count: int, at: int) -> tuple[int, int]:
    while source[at] == 255:
        count += 255
        at += 1
    return count + source[at], at + 1


PROGRAM = struct.Struct("<IIQQQQQQ")


def _loadable(elf: bytes) -> bytes | None:
    """Return an ELF file of nothing but what is loaded, without zeros at the end; None if QEMU cannot start it."""
    if elf[:5] != b"\x7fELF\x02":
        return None
    (table,) = struct.unpack_from("<Q", elf, 32)
    (count,) = struct.unpack_from("<H", elf, 56)
    out = bytearray(64 + count * PROGRAM.size)
    out[:64] = elf[:64]
    struct.pack_into("<QQ", out, 32, 64, 0)
    struct.pack_into("<HHH", out, 58, 0, 0, 0)
    moved: list[tuple[int, int, int]] = []
    pvh = False
    for i in range(count):
        kind, flags, offset, virtual, physical, size, memory, align = PROGRAM.unpack_from(elf, table + i * PROGRAM.size)
        if kind == PT_NOTE:
            pvh = pvh or PVH_NOTE in _notes(elf[offset : offset + size])
            at = next(to + offset - start for start, end, to in moved if start <= offset < end)
        else:
            data = elf[offset : offset + size].rstrip(b"\0") if kind == PT_LOAD else b""
            out += bytes(-len(out) % 4096)
            at, size, align = len(out), len(data), 4096
            moved.append((offset, offset + size, at))
            out += data
        PROGRAM.pack_into(out, 64 + i * PROGRAM.size, kind, flags, at, virtual, physical, size, memory, align)
    return bytes(out) if pvh else None


def _notes(data: bytes) -> list[int]:
    kinds, at = [], 0
    while at + 12 <= len(data):
        name, size, kind = struct.unpack_from("<III", data, at)
        if data[at + 12 : at + 12 + name] == b"Xen\0":
            kinds.append(kind)
        at += 12 + (name + 3 & ~3) + (size + 3 & ~3)
    return kinds


def initramfs(agent: bytes, boot: Mapping[str, bytes], network: Mapping[str, bytes]) -> bytes:
    """Return the guest's first file system: the agent as /init, and numbered modules in /m and /n. Not compressed."""
    files: list[tuple[str, int, bytes]] = [(name, 0o040755, b"") for name in ("dev", "m", "n", "t")]
    files.append(("init", 0o100755, agent))
    for directory, modules in (("m", boot), ("n", network)):
        files += [(f"{directory}/{i}", 0o100644, data) for i, data in enumerate(modules.values())]
    return _cpio(files)


def _cpio(files: Sequence[tuple[str, int, bytes]]) -> bytes:
    out = bytearray()
    for i, (name, mode, data) in enumerate([*files, ("TRAILER!!!", 0, b"")], start=1):
        path = name.encode() + b"\0"
        numbers = (i, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(path), 0)
        out += b"070701" + b"".join(b"%08X" % number for number in numbers) + path
        out += bytes(-len(out) % 4) + data
        out += bytes(-len(out) % 4)
    return bytes(out)
