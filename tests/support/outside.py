"""A small world for tests of the network: hosts, addresses and servers of their own, in a network namespace.

Run as `python -m tests.support.outside ENGINE`: reads one JSON line, {"code": Python for a sandbox, "times": n,
"network": bool, "deny": [networks]}, runs it so many times at once on that engine inside of that world, and prints a
JSON line with what each said, and what reached the servers. The world is gone with the process, and needs root to be
made.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fanout.engine.base import Limits
from fanout.engine.bench import Bench
from tests.support.engines import make_engine

OUTSIDE, PRIVATE, METADATA, RESOLVER = "198.51.100.7", "10.77.0.7", "169.254.169.254", "198.51.100.53"
NAMES = {"outside.test": OUTSIDE, "metadata.test": METADATA, "loopback.test": "127.0.0.1"}
PORT = 8080

CLONE_NEWNS, CLONE_NEWNET = 0x20000, 0x40000000


class World:
    """This process's own network, once `enter` was called, and what reached its servers."""

    def __init__(self) -> None:
        self.reached: list[tuple[str, str]] = []

    def enter(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNET | CLONE_NEWNS) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        commands = ["link set lo up", "link add out0 type veth peer name out1", "link set out0 up", "link set out1 up"]
        for address in (OUTSIDE, RESOLVER, PRIVATE, METADATA):
            commands.append(f"addr add {address}/32 dev out0")
        commands += ["addr add fe80::7/64 dev out0 nodad", "route add default dev out0"]
        subprocess.run(["ip", "-batch", "-"], input="\n".join(commands), text=True, check=True)
        resolv = Path(tempfile.mkdtemp(), "resolv.conf")
        resolv.write_text(f"nameserver {RESOLVER}\n")
        subprocess.run(["mount", "--bind", str(resolv), os.path.realpath("/etc/resolv.conf")], check=True)

    def serve(self) -> None:
        for address in (OUTSIDE, PRIVATE, METADATA, "127.0.0.1"):
            tcp = socket.create_server((address, PORT), backlog=100)
            udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            udp.bind((address, PORT))
            threading.Thread(target=self._accept, args=(tcp, address), daemon=True).start()
            threading.Thread(target=self._receive, args=(udp, address), daemon=True).start()
        names = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        names.bind((RESOLVER, 53))
        threading.Thread(target=_resolve, args=(names,), daemon=True).start()
        abstract = socket.socket(socket.AF_UNIX)
        abstract.bind("\0fanout-test-outside")
        abstract.listen()

    def _accept(self, server: socket.socket, address: str) -> None:
        while True:
            connection, _ = server.accept()
            self.reached.append(("tcp", address))
            with connection:
                connection.sendall(f"hello from {address}".encode())

    def _receive(self, server: socket.socket, address: str) -> None:
        while True:
            _, who = server.recvfrom(4096)
            self.reached.append(("udp", address))
            server.sendto(f"hello from {address}".encode(), who)


def _resolve(server: socket.socket) -> None:
    """Answer questions for addresses of `NAMES`, and say of others that there are none."""
    while True:
        query, who = server.recvfrom(4096)
        labels, place = [], 12
        while query[place]:
            labels.append(query[place + 1 : place + 1 + query[place]].decode())
            place += 1 + query[place]
        kind = struct.unpack_from(">H", query, place + 1)[0]
        address = NAMES.get(".".join(labels))
        found = address is not None and kind == 1
        head = query[:2] + struct.pack(">HHHHH", 0x8180 if address else 0x8183, 1, int(found), 0, 0)
        answer = b""
        if found and address is not None:
            answer = struct.pack(">HHHIH", 0xC00C, 1, 1, 1, 4) + socket.inet_aton(address)
        server.sendto(head + query[12 : place + 5] + answer, who)


def main(name: str) -> None:
    asked = json.loads(sys.stdin.readline())
    world = World()
    world.enter()
    world.serve()
    engine = make_engine(name, network_deny=asked["deny"])
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(engine, Path(scratch))

        def one(_: int) -> str:
            argv = ["/usr/bin/python3", "-c", asked["code"]]
            outcome = bench.run(argv, network=asked["network"], limits=Limits(timeout_s=60))
            return (outcome.stdout + outcome.stderr).decode()

        with ThreadPoolExecutor(asked["times"]) as pool:
            said = list(pool.map(one, range(asked["times"])))
    engine.close()

    print(json.dumps({"said": said, "reached": world.reached}))


if __name__ == "__main__":
    main(sys.argv[1])
