"""The network of a command: none, or a way out that leads neither to the host itself nor to what is beside it.

All servers are this test's own (tests/support/outside.py), in a network namespace with a resolver, an address in the
wide world, one in a private network, one where clouds keep credentials, and the loopback.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from fanout.engine import network
from fanout.engine.base import Spec
from fanout.engine.bubblewrap import BubblewrapEngine
from fanout.errors import EngineUnavailable, Invalid
from tests.support.engines import ENGINES
from tests.support.outside import METADATA, OUTSIDE, PRIVATE

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="making a network of one's own needs root"),
    pytest.mark.skipif(network.find() is None, reason=network.MISSING),
]

TOOLS = """
import json, socket, struct, sys
from concurrent.futures import ThreadPoolExecutor

def attempt(address, *options, kind=socket.SOCK_STREAM, port=8080, ancillary=(), flags=0, patience_s=10):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, kind) as link:
        link.settimeout(patience_s)
        try:
            for option in options:
                link.setsockopt(*option)
            if kind == socket.SOCK_STREAM:
                link.connect((address, port))
            else:
                link.sendmsg([b"x"], list(ancillary), flags, (address, port))
            return link.recv(100).decode()
        except OSError as error:
            return ""
"""

WAYS_OUT = f"""{TOOLS}
print(json.dumps([
    attempt("{OUTSIDE}"), attempt("{OUTSIDE}", kind=socket.SOCK_DGRAM), attempt("{PRIVATE}"),
    attempt(socket.gethostbyname("outside.test")), attempt("::ffff:{OUTSIDE}"),
]))
"""

#: Every way a program has to say which way its packets shall go, to every address that none may go to.
WAYS_IN = f"""{TOOLS}
index, name = next((index, name) for index, name in socket.if_nameindex() if name != "lo")
bound = (socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name.encode())
straight = (socket.SOL_SOCKET, socket.SO_DONTROUTE, 1)
choices = [(), (bound,), (straight,), (bound, straight)]
choices += [((socket.IPPROTO_IP, 50, struct.pack("!I", index)),), ((socket.SOL_SOCKET, 62, index),)]
interface = [(socket.IPPROTO_IP, 8, struct.pack("@I4s4s", index, bytes(4), bytes(4)))]
calls = []
for address in ("{METADATA}", "127.0.0.1", "0.0.0.0", "10.0.2.2", "10.0.2.3"):
    for options in choices:
        calls += [(address, options, {{}}), ("::ffff:" + address, options, {{}})]
        calls.append((address, options, {{"kind": socket.SOCK_DGRAM}}))
    for flags in (0, socket.MSG_DONTROUTE):
        calls.append((address, (), {{"kind": socket.SOCK_DGRAM, "ancillary": interface, "flags": flags}}))
    source_route = (socket.IPPROTO_IP, 4, bytes([131, 7, 4]) + socket.inet_aton(address) + bytes(1))
    calls += [("{OUTSIDE}", (source_route,), {{}}), ("10.0.2.2", (source_route,), {{}})]
calls.append(("10.0.2.3", (), {{"port": 53}}))
calls += [(address, (), {{}}) for address in (f"fe80::7%{{name}}", f"fe80::2%{{name}}", "::1")]
for name in ("metadata.test", "loopback.test"):
    calls.append((socket.gethostbyname(name), (), {{}}))
with ThreadPoolExecutor(40) as pool:
    said = list(pool.map(lambda call: attempt(call[0], *call[1], patience_s=1, **call[2]), calls))
with socket.socket(socket.AF_UNIX) as abstract:
    try:
        abstract.connect("\\0fanout-test-outside")
        said.append("abstract")
    except OSError:
        pass
print(json.dumps([text for text in said if text]))
"""

NO_WAY = f"""{TOOLS}
said = [attempt(address, patience_s=1) for address in ("{OUTSIDE}", "{METADATA}", "127.0.0.1", "::1", "fe80::7%lo")]
print(json.dumps([said, open("/proc/net/route").read().count("\\n"), [name for _, name in socket.if_nameindex()]]))
"""


def in_a_world_of_its_own(
    engine: str, code: str, *, times: int = 1, network: bool = True, deny: Sequence[str] = ()
) -> tuple[list[str], list[list[str]]]:
    """Run Python in a sandbox of this engine, so many times at once; return what each said, and who reached what."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.outside", engine],
        input=json.dumps({"code": code, "times": times, "network": network, "deny": list(deny)}) + "\n",
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    return answer["said"], answer["reached"]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_without_asking_there_is_no_way_out(engine: str) -> None:
    said, reached = in_a_world_of_its_own(engine, NO_WAY, network=False)
    assert json.loads(said[0]) == [[""] * 5, 1, ["lo"]]
    assert reached == []


def test_the_way_out_leads_to_hosts_and_names_are_known(engine: str) -> None:
    said, _ = in_a_world_of_its_own(engine, WAYS_OUT)
    world = f"hello from {OUTSIDE}"
    assert json.loads(said[0]) == [world, world, f"hello from {PRIVATE}", world, world]


def test_neither_the_host_nor_its_neighbours_are_reached(engine: str) -> None:
    said, reached = in_a_world_of_its_own(engine, WAYS_IN)
    assert json.loads(said[0]) == []
    assert reached == []


def test_several_at_once_each_have_their_own(engine: str) -> None:
    code = f"{TOOLS}\nheld = socket.create_server(('0.0.0.0', 9000))\nprint(attempt('{OUTSIDE}'))"
    said, reached = in_a_world_of_its_own(engine, code, times=8)
    assert said == [f"hello from {OUTSIDE}\n"] * 8
    assert reached == [["tcp", OUTSIDE]] * 8


def test_more_networks_can_be_denied_and_bad_ones_are_refused() -> None:
    found = network.find(["10.0.0.0/8", "192.0.2.1"])
    assert found is not None
    assert found.denied == (*network.DENIED, "10.0.0.0/8", "192.0.2.1/32")
    for bad in ("10.0.0.1/8", "fe80::/10", "example.com", ""):
        with pytest.raises(Invalid, match="network_deny"):
            BubblewrapEngine(network_deny=[bad])
    said, reached = in_a_world_of_its_own("bubblewrap-bwrap", WAYS_OUT, deny=[PRIVATE])
    assert json.loads(said[0])[2] == ""
    assert ["tcp", PRIVATE] not in reached


def test_a_host_without_slirp4netns_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "find", lambda denied: None)
    engine = BubblewrapEngine()
    try:
        with pytest.raises(EngineUnavailable, match="install the package slirp4netns"):
            engine.start(Spec(["/bin/true"], network=True))
    finally:
        engine.close()


def slirps_of(engine: BubblewrapEngine) -> list[int]:
    """Return the processes that lead out of this engine's sandboxes."""
    return [pid for pid in children(engine._ready().spawner.pid) if comm(pid) == "slirp4netns"]


def test_the_way_out_ends_with_the_command_and_has_no_rights() -> None:
    engine = BubblewrapEngine()
    status: list[dict[str, str]] = []

    def look(*_: object) -> None:
        (pid,) = slirps_of(engine)
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        status.append(dict(line.split(":\t", 1) for line in lines if ":\t" in line))

    try:
        assert engine.start(Spec(["/bin/echo", "up"], network=True)).wait(look).exit_code == 0
        assert status[0]["Seccomp"] == "2"
        bind_service = 1 << 10  # in the sandbox's user namespace
        assert int(status[0]["CapEff"], 16) & ~bind_service == 0
        if engine._ready().spawner.mapped:
            assert "0" not in status[0]["Uid"].split()
        process = engine.start(Spec(["/bin/sleep", "60"], network=True))
        process.kill()
        assert process.wait(lambda *_: None).status == "killed"
        until_s = time.monotonic() + 10
        while slirps_of(engine):
            assert time.monotonic() < until_s
            time.sleep(0.01)
    finally:
        engine.close()


def test_a_way_out_that_cannot_be_made_is_said_and_nothing_runs(tmp_path: Path) -> None:
    broken = tmp_path / "slirp4netns"
    broken.write_text("#!/bin/sh\necho no tunnel today >&2\nexit 1\n")
    broken.chmod(0o755)
    for directory in tmp_path.parents:
        if directory.is_relative_to("/tmp") and directory != Path("/tmp"):
            directory.chmod(0o755)
    tmp_path.chmod(0o755)
    engine = BubblewrapEngine()
    try:
        engine._network = network.Network(str(broken))
        with pytest.raises(EngineUnavailable, match="network: no tunnel today"):
            engine.start(Spec(["/bin/true"], network=True)).wait(lambda *_: None)
        assert engine.start(Spec(["/bin/true"])).wait(lambda *_: None).exit_code == 0
    finally:
        engine.close()


KILLED = """
from fanout.engine.base import Spec
from fanout.engine.bubblewrap import BubblewrapEngine
engine = BubblewrapEngine()
spawner = engine._ready().spawner.pid
spec = Spec(["/bin/sh", "-c", "echo up; sleep 60"], network=True)
engine.start(spec).wait(lambda *_: print(spawner, flush=True))
"""


@pytest.mark.parametrize("victim", ["fanout", "spawner"])
def test_no_way_out_is_left_by_a_killed_process(victim: str) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        spawner = int(program.stdout.readline())
        (slirp,) = [pid for pid in children(spawner) if comm(pid) == "slirp4netns"]
        os.kill(program.pid if victim == "fanout" else spawner, signal.SIGKILL)
        until_s = time.monotonic() + 20
        while comm(slirp) == "slirp4netns":
            assert time.monotonic() < until_s
            time.sleep(0.02)


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def comm(pid: int) -> str:
    """Return a process's name, "" where it is dead."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return "" if state == "Z" else Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


NOBODY_S = """
import os, subprocess, sys
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run(["mount", "-t", "tmpfs", "none", "/mnt"], check=True)
os.mknod("/mnt/tun", 0o020666, os.stat("/dev/net/tun").st_rdev)
os.chmod("/mnt/tun", 0o666)
subprocess.run(["mount", "--bind", "/mnt/tun", "/dev/net/tun"], check=True)
from tests.support.box import open_box
with open_box("bubblewrap-nobody") as box:
    print(box.sh("cat /sys/class/net/tap0/mtu || cut -d: -f1 /proc/net/dev | tail -n +3; cat /etc/resolv.conf",
                 network=True).stdout)
"""


def test_a_user_without_rights_has_a_way_out_too() -> None:
    """Where everybody may open /dev/net/tun, as udev has it."""
    done = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", NOBODY_S],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert sorted(done.stdout.split()) == ["10.0.2.3", "lo", "nameserver", "tap0"], done.stderr
