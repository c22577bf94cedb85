"""A way out for one sandbox: slirp4netns, between its network namespace and this host's sockets.

Owns what is reached and what is not, how slirp4netns is started, and what a sandbox resolves names with. Part of the
spawner process, so it imports the standard library only. Any engine uses it by giving `Child.network` (spawning.py)
what `find` returned, and showing its program `RESOLV_CONF` as /etc/resolv.conf: the spawner starts slirp4netns before
the sandbox is released, and ends it with the sandbox. For a VM, QEMU is that program, its `-netdev user` opens the
sockets, and what the guest sends to 10.0.2.2 stays in QEMU's namespace, where nobody listens.

What is denied is denied twice. An `unreachable` route in the sandbox's namespace, which nobody in it has the right to
change, holds whatever address a name resolved to, also one written as IPv6 (`::ffff:169.254.169.254`). A program that
binds its socket to the interface gets past a route, as if every address were a neighbour; then nobody answers for the
address, for slirp4netns answers only for those of its own network. IPv6 does not leave the sandbox.

slirp4netns runs as the sandbox's user, in its user namespace, so that what breaks it has no rights on the host; it
gives up its capabilities there, sees /etc and /run only, and is under a seccomp filter of its own.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["DENIED", "MISSING", "RESOLV_CONF", "Network", "find", "start"]

#: Never reached: this host itself, its neighbours on a link (cloud metadata among them), and what is no host at all.
DENIED = ("0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "240.0.0.0/4")

#: slirp4netns' own resolver, which asks this host's.
RESOLV_CONF = "nameserver 10.0.2.3\n"

#: What is said where there is no slirp4netns.
MISSING = "network=True needs slirp4netns: install the package slirp4netns"

#: How long the sandbox's users may take to be mapped. It is a matter of its first instructions.
MAPPED_S = 10.0

MTU = 65520

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
NS_GET_USERNS = 0xB701

# rtnetlink(7): add a route of a kind to a destination.
RTM_NEWROUTE, NLM_F_REQUEST, NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, NLMSG_ERROR = 24, 0x1, 0x4, 0x400, 0x200, 2
RTA_DST, RT_TABLE_MAIN, RTPROT_STATIC, RT_SCOPE_UNIVERSE, RTN_UNREACHABLE = 1, 254, 4, 0, 7

_libc = ctypes.CDLL(None, use_errno=True)


class Network(NamedTuple):
    """The program that makes a way out, and the networks (CIDR) it does not lead to."""

    program: str
    denied: tuple[str, ...] = DENIED


def find(denied: Sequence[str] = ()) -> Network | None:
    """Return what leads out, but to `DENIED` and these; None where slirp4netns is not installed (see `MISSING`).

    ValueError for what is no IPv4 network.
    """
    import ipaddress  # not for the spawner process, which never comes here
    import shutil

    program = shutil.which("slirp4netns", path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/usr/bin")
    networks = [str(ipaddress.IPv4Network(text)) for text in denied]
    return None if program is None else Network(program, (*DENIED, *networks))


class Connection(NamedTuple):
    """A slirp4netns that is being started: its process, and descriptors that are the receiver's to close.

    `ready` yields b"1" when all is done, or an end of file: then `said` tells why. Closing `end` ends it.
    """

    pid: int
    ready: int
    said: int
    end: int


def start(network: Network, init: int, number: int | None) -> Connection:
    """Connect the network namespace of a sandbox that is being made; OSError where there is no process to be had.

    `number` is the user to do it as, None for this process's own. The caller collects the process.
    """
    opened: list[int] = []
    try:
        opened.append(os.open(f"/proc/{init}/ns/net", os.O_RDONLY | os.O_CLOEXEC))
        for flags in (os.O_NONBLOCK, os.O_NONBLOCK, 0):
            opened += os.pipe2(os.O_CLOEXEC | flags)
        pid = os.fork()
    except OSError:
        for fd in opened:
            os.close(fd)
        raise
    namespace, ready_r, ready_w, said_r, said_w, end_r, end_w = opened
    if pid == 0:
        try:
            _become_slirp(network, init, number, namespace, ready_w, said_w, end_r)
        except BaseException as error:
            os.write(said_w, str(error).encode()[:1000])
        finally:
            os._exit(1)
    for fd in (namespace, ready_w, said_w, end_r):
        os.close(fd)
    return Connection(pid, ready_r, said_r, end_w)


def _become_slirp(
    network: Network, init: int, number: int | None, namespace: int, ready: int, said: int, end: int
) -> None:
    """In a child: be the sandbox's root, prepare its namespace, then be slirp4netns."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # what it says later has no reader
    if number is not None:
        os.setresgid(number, number, number)
        os.setresuid(number, number, number)
    owner = fcntl.ioctl(namespace, NS_GET_USERNS)
    _wait_for_users(init)
    _enter(owner, CLONE_NEWUSER)
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    child = os.fork()
    if child == 0:
        try:
            _enter(namespace, CLONE_NEWNET)
            _deny(network.denied)
            os._exit(0)
        except BaseException as error:
            os.write(said, f"cannot add routes: {error}".encode()[:1000])
        finally:
            os._exit(1)
    if os.waitpid(child, 0)[1] != 0:
        os._exit(1)
    for fd, place in ((0, 1), (said, 2), (namespace, 3), (end, 4), (ready, 5)):
        os.dup2(fd, place)
    os.execve(
        network.program,
        [
            *("slirp4netns", "--configure", f"--mtu={MTU}", "--disable-host-loopback", "--enable-sandbox"),
            *("--enable-seccomp", "--exit-fd=4", "--ready-fd=5", "--netns-type=path", "/proc/self/fd/3", "tap0"),
        ],
        {},
    )


def _wait_for_users(init: int) -> None:
    """Wait until the sandbox's user namespace has its users, as whom slirp4netns enters it."""
    until_s = time.monotonic() + MAPPED_S
    while True:
        with open(f"/proc/{init}/gid_map", "rb") as file:
            if file.read():
                return
        if time.monotonic() > until_s:
            raise OSError("its users were not mapped")
        time.sleep(0.0005)


def _enter(namespace: int, kind: int) -> None:
    if _libc.setns(namespace, kind) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot enter a namespace: {os.strerror(number)}")


def _deny(networks: Sequence[str]) -> None:
    """Make networks unreachable in this network namespace."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as link:
        for text in networks:
            address, _, length = text.partition("/")
            head = struct.pack(
                "=BBBBBBBBI",
                *(socket.AF_INET, int(length), 0, 0, RT_TABLE_MAIN, RTPROT_STATIC),
                *(RT_SCOPE_UNIVERSE, RTN_UNREACHABLE, 0),
            )
            body = head + struct.pack("=HH", 8, RTA_DST) + socket.inet_aton(address)
            flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL
            link.send(struct.pack("=IHHII", 16 + len(body), RTM_NEWROUTE, flags, 1, 0) + body)
            _, kind, _, _, _, failed = struct.unpack_from("=IHHIIi", link.recv(4096))
            if kind != NLMSG_ERROR or failed not in (0, -17):  # there already: given twice
                raise OSError(-failed, f"{text}: {os.strerror(-failed)}")
