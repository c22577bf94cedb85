"""The system calls a command may not make: a seccomp filter, as the kernel takes it.

Owns the lists and their translation into classic BPF, for x86_64 and aarch64. Knows nothing of bwrap or of sandboxes.
Why a list of what is denied, and not libseccomp: docs/decisions/0009-seccomp.md.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

from fanout.errors import EngineUnavailable

__all__ = ["DENIED", "NAMESPACES", "NEWEST", "NUMBERS", "program"]

#: Names -> numbers by machine (x86_64, aarch64); None where the machine has no such call.
NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "_sysctl": (156, None),
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "clock_settime": (227, 112),
    "clone": (56, 220),
    "clone3": (435, 435),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "get_mempolicy": (239, 236),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioctl": (16, 29),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "mbind": (237, 235),
    "migrate_pages": (256, 238),
    "modify_ldt": (154, None),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "name_to_handle_at": (303, 264),
    "nfsservctl": (180, 42),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pivot_root": (155, 41),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "sysfs": (139, None),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "uselib": (134, None),
    "userfaultfd": (323, 282),
    "ustat": (136, None),
    "vhangup": (153, 58),
}

#: The newest call these lists were made with (file_setattr, Linux 6.17): later ones do not exist for a command.
NEWEST = 469

#: Calls that change what is mounted where. A sandbox within the sandbox needs them, in a namespace of its own.
MOUNTS = (
    *("mount", "umount2", "pivot_root", "open_tree", "open_tree_attr", "move_mount", "mount_setattr"),
    *("fsopen", "fsconfig", "fsmount", "fspick"),
)

#: Calls that are denied whatever their arguments.
DENIED = (
    *("add_key", "request_key", "keyctl"),  # keyrings are not part of any namespace
    *("bpf", "perf_event_open", "userfaultfd", "fanotify_init", "lookup_dcookie"),
    *("kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module", "reboot"),
    *("swapon", "swapoff", "acct", "quotactl", "quotactl_fd", "nfsservctl", "syslog", "vhangup"),
    *("open_by_handle_at", "name_to_handle_at"),  # reach files by their inode, past every mount
    *("settimeofday", "clock_settime", "sethostname", "setdomainname"),
    *("iopl", "ioperm", "modify_ldt", "uselib", "ustat", "sysfs", "_sysctl"),
    *("mbind", "set_mempolicy", "set_mempolicy_home_node", "get_mempolicy", "migrate_pages", "move_pages"),
)

#: Calls that programs take for missing, and do without: a new kernel interface with a history, an unreadable argument.
MISSING = ("io_uring_setup", "io_uring_enter", "io_uring_register")

#: CLONE_NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET. In clone the first is a part of a signal.
NAMESPACES = 0x80 | 0x20000 | 0x2000000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000
CLONE_NAMESPACES = NAMESPACES & ~0x80

#: AF_UNIX, AF_INET, AF_INET6, and AF_NETLINK for routes only (what `getaddrinfo` and `ip addr` ask).
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK, NETLINK_ROUTE = 1, 2, 10, 16, 0

#: Put characters into a terminal's input, as if somebody had typed them.
TIOCSTI, TIOCLINUX = 0x5412, 0x541C

#: Those that do not weaken a program: Linux, UNAME26 with or without, a short address space, and "tell me".
PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)

# Classic BPF: load a word, jump, compare, return (linux/bpf_common.h).
_LOAD, _JUMP, _IF_EQUAL, _IF_ABOVE, _IF_ANY, _RETURN = 0x20, 0x05, 0x15, 0x25, 0x45, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

#: What becomes of a call, in the order these stand at a program's end.
_ENDS = {
    "allow": 0x7FFF0000,
    "denied": 0x00050000 | errno.EPERM,
    "missing": 0x00050000 | errno.ENOSYS,
    "family": 0x00050000 | errno.EAFNOSUPPORT,
    "kill": 0x80000000,
}

#: An instruction: its code, where it goes if yes and if no (how many further on, or an end's name), and its value.
_Instruction = tuple[int, str | int, str | int, int]


def program(machine: str | None = None, *, nested: bool = False) -> bytes:
    """Return the filter for a machine (this one by default), as an array of struct sock_filter.

    `nested` leaves out what a sandbox within the sandbox needs: namespaces and mounts. `EngineUnavailable` for a
    machine there are no numbers for.
    """
    machine = machine or platform.machine()
    if machine not in _MACHINES:
        known = " and ".join(_MACHINES)
        raise EngineUnavailable(f"there is no list of system calls for {machine}, only for {known}")
    column, arch = _MACHINES[machine]
    filter = _Filter(column)
    filter.load(_ARCH)
    filter.unless_equal(arch, "kill")  # a 32-bit program's numbers mean other calls
    filter.load(_NUMBER)
    filter.if_above(NEWEST, "missing")  # those of the x32 ABI too, from 2**30 up
    filter.deny(DENIED, "denied")
    filter.deny(MISSING, "missing")
    if not nested:
        filter.deny(MOUNTS, "denied")
        filter.deny(("setns",), "denied")
        filter.deny(("clone3",), "missing")  # its flags are in memory, where no filter can look; glibc then uses clone
        filter.call("unshare", [(_IF_ANY, 0, NAMESPACES)], "denied")
        filter.call("clone", [(_IF_ANY, 0, CLONE_NAMESPACES)], "denied")
    filter.call("ioctl", [(_IF_EQUAL, 1, TIOCSTI), (_IF_EQUAL, 1, TIOCLINUX)], "denied")
    filter.call("ptrace", [(_IF_EQUAL, 1, 1)], "denied")  # who holds the init holds up the end
    filter.only("personality", 0, PERSONALITIES, "denied")
    filter.only("socketpair", 0, (AF_UNIX,), "family")
    filter.sockets()
    return filter.encoded()


@dataclass(slots=True)
class _Filter:
    """A program being written."""

    column: int
    code: list[_Instruction] = field(default_factory=list)

    def load(self, offset: int) -> None:
        self.code.append((_LOAD, 0, 0, offset))

    def unless_equal(self, value: int, label: str) -> None:
        self.code.append((_IF_EQUAL, 0, label, value))

    def if_above(self, value: int, label: str) -> None:
        self.code.append((_IF_ABOVE, label, 0, value))

    def deny(self, names: Iterable[str], label: str) -> None:
        """End at `label` for these calls."""
        for name in names:
            if (number := NUMBERS[name][self.column]) is not None:
                self.code.append((_IF_EQUAL, label, 0, number))

    def call(self, name: str, tests: list[tuple[int, int, int]], label: str) -> None:
        """End at `label` if a test (how, which argument, value) of this call holds, else allow it."""
        body: list[_Instruction] = []
        for how, argument, value in tests:
            body += [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument), (how, label, 0, value)]
        self._for(name, body, "allow")

    def only(self, name: str, argument: int, values: Iterable[int], label: str) -> None:
        """Allow this call with these values of an argument only."""
        body: list[_Instruction] = [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument)]
        body += [(_IF_EQUAL, "allow", 0, value) for value in values]
        self._for(name, body, label)

    def sockets(self) -> None:
        """Allow sockets of the families a program needs."""
        body: list[_Instruction] = [(_LOAD, 0, 0, _ARGUMENTS)]
        body += [(_IF_EQUAL, "allow", 0, family) for family in (AF_UNIX, AF_INET, AF_INET6)]
        body += [(_IF_EQUAL, 0, "family", AF_NETLINK), (_LOAD, 0, 0, _ARGUMENTS + 16)]
        self._for("socket", [*body, (_IF_EQUAL, "allow", 0, NETLINK_ROUTE)], "family")

    def _for(self, name: str, body: list[_Instruction], otherwise: str) -> None:
        """Run `body` for this call, which then ends at `otherwise`; other calls pass it by."""
        number = NUMBERS[name][self.column]
        assert number is not None
        self.code += [(_IF_EQUAL, 0, len(body) + 1, number), *body, (_JUMP, otherwise, 0, 0)]

    def encoded(self) -> bytes:
        """Return the program, with the ends that jumps go to after its last instruction."""
        self.code.append((_JUMP, "allow", 0, 0))
        places = {label: len(self.code) + i for i, label in enumerate(_ENDS)}
        lines = []
        for i, (code, yes, no, value) in enumerate(self.code):
            yes, no = (to if isinstance(to, int) else places[to] - i - 1 for to in (yes, no))
            if code == _JUMP:
                yes, value = 0, yes
            lines.append(struct.pack("=HBBI", code, yes, no, value))
        return b"".join([*lines, *(struct.pack("=HBBI", _RETURN, 0, 0, action) for action in _ENDS.values())])
