"""What QEMU is asked to be: its command line and the kernel's.

Owns the machine's shape, chosen for few devices, a quick boot without KVM and little memory. Knows no processes.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import Literal

from fanout.engine.qemu.clock import tsc_khz
from fanout.engine.qemu.image import Image
from fanout.errors import EngineUnavailable

__all__ = ["PORT", "ROOT_TAG", "Acceleration", "Guest", "Inherited", "command_line", "find_qemu"]

Acceleration = Literal["kvm", "tcg"]

MIB = 1024 * 1024

#: What QEMU may keep of translated code: as much as an interpreter of some size takes. A copy of a template that runs
#: little takes little of it.
TRANSLATED_MIB = 64

#: No PCI, no USB, no graphics: virtio over memory-mapped registers, one serial port. The kernel waits seconds for a
#: clock (rtc) that is not there.
MACHINE = "microvm,x-option-roms=off,isa-serial=on,rtc=on,memory-backend=memory"

#: Where a device is plugged in later: the one port of a PCI Express bus, which is there for that only.
PORT = "plug"

#: The tag under which virtiofsd's tree is known in the guest.
ROOT_TAG = "root"

#: QEMU may not call what it has no need for.
SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"

#: `panic=-1` with -no-reboot ends QEMU when the kernel panics. `mitigations=off`: one tenant, nobody to spy on; for the
#: same reason memory need not be cleared before the kernel itself fills it (`init_on_alloc`).
KERNEL = (
    *("console=ttyS0", "quiet", "loglevel=3", "panic=-1", "oops=panic", "reboot=t", "rdinit=/init"),
    *("random.trust_cpu=on", "mitigations=off", "init_on_alloc=0", "cryptomgr.notests"),
)

#: TCG copies byte by byte where a program asks for `rep movsb`, which programs do where the processor says it is fast.
EMULATED_CPU = "max,-erms"


@dataclass(frozen=True, slots=True)
class Guest:
    """What a VM is made of. Two equal ones are interchangeable: the key of a pool.

    `memory_bytes` is all the guest's memory: kernel, page cache and the command's. `netdev` is the value of QEMU's
    `-netdev` without its id (like "user,restrict=off"), None for no network device at all.
    """

    memory_bytes: int = 256 * MIB
    cpus: int = 1
    acceleration: Acceleration = "tcg"
    netdev: str | None = None


@dataclass(frozen=True, slots=True)
class Inherited:
    """Descriptors of QEMU's: sockets to the agent, the console and virtiofsd.

    With a `monitor` the file system is not there at the start but plugged in later, into memory that is the file
    `memory`. One that `resumes` does not boot, but is told by its monitor from where to go on.
    """

    agent: int
    console: int
    filesystem: int | None = None
    monitor: int | None = None
    memory: int | None = None
    resumes: bool = False


def find_qemu() -> str:
    """Return the path of QEMU for this machine, or say what to install."""
    found = shutil.which("qemu-system-x86_64")
    if found is None:
        raise EngineUnavailable("there is no qemu-system-x86_64: install qemu-system-x86 (Debian, Ubuntu)")
    return found


def command_line(image: Image, guest: Guest, inherited: Inherited) -> list[str]:
    """Return QEMU's argv."""
    size_mib = -(-guest.memory_bytes // MIB)
    memory = f"memory-backend-memfd,id=memory,size={size_mib}M,share=on"
    kernel, machine = [*KERNEL], MACHINE
    if inherited.memory is not None:
        memory = f"memory-backend-file,id=memory,size={size_mib}M,share=on,mem-path=/proc/self/fd/{inherited.memory}"
    if inherited.monitor is not None:
        kernel, machine = [*kernel, "pcie_ports=native"], f"{machine},pcie=on"
    if guest.acceleration == "kvm":
        accelerator, cpu = "kvm", "host"
    else:
        threads = "single" if guest.cpus == 1 else "multi"
        accelerator, cpu = f"tcg,thread={threads},tb-size={TRANSLATED_MIB}", EMULATED_CPU
        # QEMU gives its own counter to the guest, and no device there to measure it against in time.
        kernel += [f"tsc_early_khz={tsc_khz()}", "no_timer_check"]
    argv = [
        *(find_qemu(), "-M", machine, "-accel", accelerator, "-cpu", cpu, "-smp", str(guest.cpus)),
        *("-m", f"{size_mib}M", "-object", memory),
        *("-nodefaults", "-no-user-config", "-display", "none", "-monitor", "none", "-no-reboot"),
        *("-sandbox", SANDBOX, "-global", "virtio-mmio.force-legacy=false"),
        *("-kernel", str(image.kernel), "-initrd", str(image.initramfs), "-append", " ".join(kernel)),
        *("-chardev", f"socket,id=console,fd={inherited.console}", "-serial", "chardev:console"),
        *("-chardev", f"socket,id=agent,fd={inherited.agent}", "-device", "virtio-serial-device,max_ports=2"),
        *("-device", "virtserialport,chardev=agent,nr=1"),
    ]
    if inherited.filesystem is not None:
        argv += ["-chardev", f"socket,id=files,fd={inherited.filesystem}"]
        if inherited.monitor is None:
            argv += ["-device", f"vhost-user-fs-device,chardev=files,tag={ROOT_TAG},queue-size=256"]
    if inherited.monitor is not None:
        argv += ["-device", f"pcie-root-port,id={PORT},chassis=1,slot=1"]
        argv += ["-chardev", f"socket,id=monitor,fd={inherited.monitor}", "-mon", "chardev=monitor,mode=control"]
    if inherited.resumes:
        argv += ["-incoming", "defer"]
    if guest.netdev is not None:
        argv += ["-netdev", f"{guest.netdev},id=net", "-device", "virtio-net-device,netdev=net"]
    return argv
