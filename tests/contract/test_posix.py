"""What a file system must keep, on a disk: written by a command, committed, and seen from another host.

Each test runs on both tiers of views: the overlay that root mounts (`kernel`) and the one that bubblewrap mounts in its
user namespace (`bwrap`). Where they differ docs/LIMITS.md says so, and the test holds it. The public suite pjdfstest
is in tests/posix/.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest

from fanout.api import Disk, Fanout
from fanout.config import Settings
from fanout.disk.merge import Intent, Policy
from fanout.engine.bubblewrap import BubblewrapEngine
from fanout.errors import Conflict
from fanout.format.tree import FILE, Node
from fanout.local import LocalFanout
from fanout.local_disk import LocalDisk
from fanout.model import Run
from fanout.runtime import system
from fanout.store.base import Store
from fanout.store.memory import MemoryStore

pytestmark = pytest.mark.anyio

Tier = Literal["kernel", "bwrap"]


class Host:
    """Two hosts on one store: `here`, where commands write, and `there`, with a cache of its own."""

    def __init__(self, tier: Tier, store: Store, here: Fanout, there: Fanout) -> None:
        self.tier, self.store, self.here, self.there = tier, store, here, there
        self.name = f"ws-{uuid.uuid4().hex[:12]}"

    async def run(self, command: str, **options: str) -> Run:
        """Run a command that must succeed, in a sandbox on the disk."""
        run = await self.here.exec(f"set -e\n{command}", disks={"w": await self.disk()}, timeout_s=120, env=options)
        assert run.ok, run.stderr
        assert run.conflict is None
        return run

    async def python(self, script: str) -> Run:
        return await self.run(f"/usr/bin/python3 - <<'END'\nimport os, sys\n{script}\nEND")

    async def see(self, command: str) -> str:
        """Run a command elsewhere, read-only; returns what it printed."""
        disk = await self.there.disks.get(self.name)
        run = await self.there.exec(f"set -e\n{command}", disks={"w": disk.mount(read_only=True)}, timeout_s=120)
        assert run.ok, run.stderr
        return run.stdout

    async def see_python(self, script: str) -> str:
        return await self.see(f"/usr/bin/python3 - <<'END'\nimport os, sys\n{script}\nEND")

    async def disk(self) -> LocalDisk:
        disk = await self.here.disks.get(self.name)
        assert isinstance(disk, LocalDisk)
        return disk

    def stored_bytes(self) -> int:
        return sum(meta.size for meta in self.store.list())


@asynccontextmanager
async def connection(tier: Tier, store: Store, cache: Path) -> AsyncIterator[Fanout]:
    engine = BubblewrapEngine(overlay=tier)
    settings = Settings.load({}, store="memory://", cache_dir=cache, author="tester")
    try:
        async with LocalFanout(settings, store=store, engine=engine) as fo:
            yield fo
    finally:
        engine.close()


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=["kernel", "bwrap"])
async def hosts(
    request: pytest.FixtureRequest, anyio_backend: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Host]:
    if request.param == "kernel" and os.geteuid() != 0:
        pytest.skip("the root tier needs root")
    if not os.path.exists("/usr/bin/python3"):
        pytest.skip("needs /usr/bin/python3, which the sandbox sees")
    top, store = tmp_path_factory.mktemp("posix"), MemoryStore()
    async with (
        connection(request.param, store, top / "here") as here,
        connection(request.param, store, top / "there") as there,
    ):
        yield Host(request.param, store, here, there)


@pytest.fixture
async def host(hosts: Host) -> Host:
    fresh = Host(hosts.tier, hosts.store, hosts.here, hosts.there)
    await fresh.here.disks.create(fresh.name)
    return fresh


# -- links -------------------------------------------------------------------------------------------------------------


async def test_hard_links(host: Host) -> None:
    await host.run("echo one > a; ln a b; mkdir d; ln a d/c; echo alone > x; ln x y; rm y")
    seen = await host.see("stat -c %h a b d/c x; [ a -ef b ] && [ b -ef d/c ] && cat a b d/c")
    assert seen.split() == ["3", "3", "3", "1", "one", "one", "one"]


async def test_a_linked_file_of_the_base_changes_under_all_its_names(host: Host) -> None:
    """As root, overlayfs keeps lower links whole; in a user namespace the changed name becomes a file of its own."""
    await host.run("echo one > a; ln a b; mkdir d; ln a d/c")
    await host.run("echo two >> b")
    seen = await host.see("stat -c %h a b d/c; cat a d/c b")
    if host.tier == "kernel":
        assert seen.split() == ["3", "3", "3", *["one", "two"] * 3]
        await host.run("rm a; mv d/c e; chmod 600 b")
        assert (await host.see("stat -c '%h %a' b e; [ b -ef e ] && cat e")).split() == [
            "2",
            "600",
            "2",
            "600",
            "one",
            "two",
        ]
    else:
        assert seen.split() == ["2", "1", "2", "one", "one", "one", "two"]


async def test_a_link_added_to_a_file_of_the_base(host: Host) -> None:
    await host.run("echo one > a; echo x > other")
    await host.run("ln a b")
    assert (await host.see("stat -c %h a b; [ a -ef b ] && cat b")).split() == ["2", "2", "one"]
    await host.run("rm a")
    assert (await host.see("stat -c %h b; cat b")).split() == ["1", "one"]


async def test_symlinks(host: Host) -> None:
    await host.run(
        "ln -s target rel; ln -s /nowhere dangling; ln -s \"$(printf 'a\\nb')\" odd; ln -s $(printf %04000d 0) long"
    )
    await host.run("touch -hd '2001-02-03 04:05:06.123456789' rel")
    out = await host.see("readlink rel dangling odd; readlink long | wc -c; TZ=UTC stat -c %y rel")
    assert out == "target\n/nowhere\na\nb\n4001\n2001-02-03 04:05:06.123456789 +0000\n"


# -- content -----------------------------------------------------------------------------------------------------------


async def test_a_sparse_file_is_quick_and_small(host: Host) -> None:
    before, began = host.stored_bytes(), system.monotonic()
    await host.run("printf head > f; truncate -s 6G f; printf tail >> f; truncate -s 6G all-hole")
    await host.run("printf middle | dd of=f bs=1 seek=$((3 << 30)) conv=notrunc status=none")
    seen = await host.see(
        "stat -c '%s %b' f all-hole; head -c 4 f; dd if=f bs=2 skip=$((3 << 29)) count=3 status=none; tail -c 4 f"
    )
    first, second, text = seen.splitlines()
    assert text == "headmiddletail"
    assert (first.split()[0], second) == (str((6 << 30) + 4), f"{6 << 30} 0")
    assert int(first.split()[1]) * 512 <= 4 << 20, "overlayfs copies up a MiB at a time, holes and all"
    assert host.stored_bytes() - before < 64 << 10
    assert system.monotonic() - began < 30, "nobody reads 6 GiB of zeros"


async def test_open_files_that_are_gone_and_mmap(host: Host) -> None:
    await host.run("head -c 100000 /dev/zero | tr '\\0' a > mapped; echo old > gone; echo old > over")
    run = await host.python(
        "import mmap\n"
        "fd = os.open('mapped', os.O_RDWR); view = mmap.mmap(fd, 0); view[50000:50005] = b'write'; del view\n"
        "gone = open('gone', 'r+'); os.unlink('gone'); gone.write('new!')\n"
        "gone.flush(); gone.seek(0); print(gone.read())\n"
        "never = open('never', 'w+'); os.unlink('never'); never.write('x')\n"
        "open('fresh', 'w').write('new'); os.rename('fresh', 'over')\n"
        "os.mkdir('d'); os.mkdir('e'); open('d/f', 'w').close(); os.rename('d', 'e')"
    )
    assert run.stdout == "new!\n"
    assert {c.path: c.kind for c in run.commits["w"].changes or ()} == {
        "e": "added", "e/f": "added", "gone": "deleted", "mapped": "modified", "over": "modified"
    }  # fmt: skip
    assert await host.see("find . | sort | tr '\\n' ' '; cat over; head -c 50007 mapped | tail -c 9") == (
        ". ./e ./e/f ./mapped ./over newaawriteaa"
    )


async def test_nameless_files(host: Host) -> None:
    run = await host.python(
        "fd = os.open('.', os.O_TMPFILE | os.O_RDWR); os.write(fd, b'named later')\n"
        "os.link(f'/proc/self/fd/{fd}', 'linked', src_dir_fd=os.open('.', os.O_RDONLY), follow_symlinks=True)\n"
        "other = os.open('.', os.O_TMPFILE | os.O_RDWR); os.write(other, b'never')"
    )
    assert [c.path for c in run.commits["w"].changes or ()] == ["linked"]
    assert await host.see("ls -A; cat linked") == "linked\nnamed later"


async def test_what_no_disk_can_hold_is_left_out_and_said(host: Host) -> None:
    await host.run("echo x > replaced; mkdir d")
    run = await host.python(
        "import socket\n"
        "os.mkfifo('pipe'); os.mkfifo('d/p'); socket.socket(socket.AF_UNIX).bind('sock')\n"
        "os.unlink('replaced'); os.mkfifo('replaced'); open('kept', 'w').close()\n"
        "try: os.mknod('dev', 0o20600, os.makedev(1, 3))\n"
        "except PermissionError: print('EPERM')"
    )
    assert run.stdout.endswith("EPERM\n")
    assert run.commits["w"].skipped == ("d/p", "pipe", "replaced", "sock")
    assert await host.see("find . -mindepth 1 | sort | tr '\\n' ' '") == "./d ./kept "
    only = await host.run("mkfifo again; touch kept2")
    assert only.commits["w"].skipped == ("again",)
    nothing = await host.run("mkfifo again")
    assert nothing.commits["w"].skipped == ("again",)
    assert not nothing.commits["w"].changes


# -- attributes --------------------------------------------------------------------------------------------------------


async def test_modes_are_kept_whole(host: Host) -> None:
    modes = ["0", "1", "400", "644", "755", "777", "1644", "2755", "4755", "6755", "7777"]
    await host.run("".join(f"echo x > f{m}; mkdir d{m}; chmod {m} f{m} d{m};" for m in modes))
    seen = "stat -c '%n %a' * | sort"
    expected = "".join(sorted(f"{kind}{m} {m}\n" for kind in "df" for m in modes))
    assert await host.see(seen) == expected
    await host.run("for f in f*; do cat $f >/dev/null; done; chmod 755 f4755; chmod u+s f644; echo more >> f6755")
    changed = dict(line.split() for line in (await host.see(seen)).splitlines())
    assert (changed["f4755"], changed["f644"]) == ("755", "4644")
    assert changed["f6755"] == "755", "writing to it clears both bits"
    assert await host.see("grep NoNewPrivs /proc/self/status") == "NoNewPrivs:\t1\n", "the bits are kept, never obeyed"


async def test_extended_attributes(host: Host) -> None:
    await host.run("echo x > f; mkdir d; echo y > other")
    await host.python(
        "os.setxattr('f', 'user.text', 'ü'.encode()); os.setxattr('f', 'user.binary', bytes(range(256)))\n"
        "os.setxattr('d', 'user.on.dir', b'')\n"
        "os.setxattr('other', 'user.a', b'1'); os.setxattr('other', 'user.b', b'2')"
    )
    await host.python("os.removexattr('other', 'user.a'); open('f', 'a').write('more')")
    show = (
        "for p in ('f', 'd', 'other'):\n"
        "  print([(n, os.getxattr(p, n)) for n in sorted(os.listxattr(p)) if n.startswith('user.')])"
    )
    assert (await host.see_python(show)).splitlines() == [
        str([("user.binary", bytes(range(256))), ("user.text", "ü".encode())]),
        str([("user.on.dir", b"")]),
        str([("user.b", b"2")]),
    ]
    run = await host.python(
        "for name in ('trusted.x', 'security.x', 'user.overlay.x', 'system.x'):\n"
        "  try: os.setxattr('f', name, b'v'); print('set')\n"
        "  except OSError: pass"
    )
    changes = {c.path for c in run.commits["w"].changes or ()}
    assert changes <= {"f"}
    assert "user.text" in await host.see_python(show)


async def test_times_to_the_nanosecond(host: Host) -> None:
    times = [0, 1, 999_999_999, 1_234_567_890_123_456_789, 2**31 * 10**9 + 7, -1_500_000_000]
    await host.python(
        f"for i, t in enumerate({times}):\n"
        "  open(f'f{i}', 'w').close(); os.mkdir(f'd{i}'); os.symlink('x', f'l{i}')\n"
        "  for kind in 'fdl': os.utime(f'{kind}{i}', ns=(t, t), follow_symlinks=False)"
    )
    show = "for kind in 'fdl': print([os.lstat(f'{kind}{i}').st_mtime_ns for i in range(6)])"
    assert await host.see_python(show) == f"{times}\n" * 3
    await host.run("touch -d @5.000000009 f0 d0; echo > d1/new")
    assert (await host.see("stat -c %.9Y f0 d0")).split() == ["5.000000009"] * 2


async def test_owners(host: Host) -> None:
    """Inside there is one user; what the disk says of owners survives a command that changes the file."""
    disk = await host.disk()
    nodes = {b"f": Node(FILE, 0o640, 1, uid=1000, gid=2000), b"g": Node(FILE, 0o640, 1, uid=1000, gid=2000)}
    disk.core.apply(disk.point, [Intent(p, None, n) for p, n in nodes.items()], policy=Policy.LAST_WINS)
    run = await host.run(
        "stat -c '%u %g' f; echo x > f; chmod 600 f; echo > mine; chown 0:0 mine; chown 1000 mine 2>&1 || true"
    )
    assert run.stdout.startswith("0 0\n")
    assert "Invalid argument" in run.stdout
    state = disk.point.state()
    assert [(n.uid, n.gid) for p in (b"f", b"g", b"mine") if (n := state.get(p))] == [(1000, 2000)] * 2 + [(0, 0)]


# -- names -------------------------------------------------------------------------------------------------------------

NAMES = [
    b"\xc3\xa9", b"e\xcc\x81", b"new\nline", b"tab\t", b"\xff\xfe", b"n" * 255, b"-leading", b"\xe2\x98\x95",
    b" ", b"...", b"\\", b"'\"$(id)`", b"\x01\x7f", b"*", b"CON", b"a\xc3", b".wh.x", b"#hash%20",
]  # fmt: skip


async def test_case_23_names(host: Host) -> None:
    await host.python(
        f"for n in {NAMES}:\n"
        "  os.makedirs(b'd/' + n); open(b'd/' + n + b'/' + n, 'wb').write(n); os.symlink(n, b'l' + n[:200])"
    )
    await host.python(
        f"import shutil\nfor n in {NAMES}:\n"
        "  open(b'd/' + n + b'/' + n, 'ab').write(b'!')\n"
        "  shutil.move(os.fsdecode(b'd/' + n), os.fsdecode(b'r' + n[:254]))"
    )
    show = (
        f"for n in {NAMES}:\n"
        "  assert open(b'r' + n[:254] + b'/' + n, 'rb').read() == n + b'!'; assert os.readlink(b'l' + n[:200]) == n\n"
        "print(len(os.listdir('.')), os.listdir('d'))"
    )
    assert await host.see_python(show) == f"{2 * len(NAMES) + 1} []\n"


@pytest.mark.parametrize("count", [20_000, pytest.param(200_000, marks=pytest.mark.soak)])
async def test_case_23_many_names_in_one_directory(host: Host, count: int) -> None:
    if host.tier == "bwrap":
        count //= 20  # the tree is the same
    await host.python(f"os.mkdir('d')\nfor i in range({count}): open(f'd/{{i:06d}}', 'w').close()")
    run = await host.run("rm d/000777; echo x > d/000778; ls -f d | wc -l")
    assert run.stdout == f"{count - 1 + 2}\n"
    assert {c.path: c.kind for c in run.commits["w"].changes or ()} == {"d/000777": "deleted", "d/000778": "modified"}
    disk = await host.disk()
    seen: list[str] = []
    while True:
        page: list[str] = []
        async for item in disk.list_objects("d/", start_after=seen[-1] if seen else ""):
            page.append(item.key)
            if len(page) == 7_000:
                break
        if not page:
            break
        seen += page
    assert seen == [f"d/{i:06d}" for i in range(count) if i != 777]
    assert await host.see("ls d | wc -l; cat d/000778") == f"{count - 1}\nx\n"


async def test_case_18_a_renamed_directory_moves_no_data(host: Host) -> None:
    """5,000 entries are in tests/faults/test_races.py; here is what a command's rename becomes."""
    count = 1_000 if host.tier == "kernel" else 200
    await host.python(
        f"os.mkdir('d')\nfor i in range({count}): open(f'd/{{i}}', 'w').write(str(i) * 50)\n"
        "os.mkdir('d/sub'); open('d/sub/f', 'w').write('f'); os.mkdir('keep')"
    )
    before, packs = len([c async for c in (await host.disk()).log()]), host.stored_bytes()
    run = await host.python(
        "try: os.rename('d', 'keep/e'); print('renamed')\n"
        "except OSError as error: print(error.errno); os.system('mv d keep/e')\n"
    )
    assert run.stdout == ("renamed\n" if host.tier == "kernel" else "18\n"), "EXDEV where bubblewrap mounts"
    log = [c async for c in (await host.disk()).log()]
    assert len(log) == before + 1
    assert len(log[0].changes) == 2 * (count + 3)
    if host.tier == "kernel":
        assert host.stored_bytes() - packs < count * 250, "references, no contents"
    assert await host.see("ls; ls keep/e | wc -l; cat keep/e/7 keep/e/sub/f") == f"keep\n{count + 1}\n{'7' * 50}f"
    await host.run("mv keep/e/sub d; echo new > d/f; rm keep/e/7")
    assert await host.see("ls; cat d/f; ls keep/e | wc -l") == f"d\nkeep\nnew\n{count - 1}\n"


# -- programs ----------------------------------------------------------------------------------------------------------


async def test_case_19_rsync_has_nothing_to_do_the_second_time(host: Host) -> None:
    if not shutil.which("rsync", path="/usr/bin:/bin"):
        pytest.skip("rsync is not installed")
    await host.python(
        "import subprocess\nos.makedirs('a/empty/deep'); os.makedirs('a/d'); open('a/d/f', 'w').write('x')\n"
        "os.link('a/d/f', 'a/hard'); os.symlink('d/f', 'a/link'); os.symlink('/no/where', 'a/dangling')\n"
        "open('a/x', 'w').write('#!/bin/sh'); os.chmod('a/x', 0o755); os.setxattr('a/x', 'user.k', b'v')\n"
        "f = open('a/sparse', 'w'); f.write('head'); f.truncate(6 << 30)\n"
        "os.utime('a/x', ns=(1_234_567_890_123_456_789,) * 2); os.utime('a/d', ns=(987_654_321,) * 2)"
    )
    await host.run(
        "/usr/bin/rsync -aHX --inplace --exclude sparse a/ b/; cp -a --sparse=always a/sparse b/; touch -r a b"
    )
    again = "rsync -aHX --dry-run --itemize-changes --delete a/ b/; [ b/d/f -ef b/hard ]"
    again += " && stat -c '%a %.9Y %b' b/x b/sparse"
    out = await host.see(again)
    assert out.splitlines()[0] == "755 1234567890.123456789 8", out
    assert int(out.split()[-1]) <= 128
    run = await host.run("rsync -aHX a/ b/")
    assert run.commits["w"].changes is None, "nor does it write anything here"


@pytest.mark.parametrize("mode", ["delete", "wal"])
async def test_case_22_sqlite_killed_in_a_transaction(host: Host, mode: str) -> None:
    script = (
        "import signal, sqlite3\n"
        f"db = sqlite3.connect('db', isolation_level=None); db.execute('pragma journal_mode={mode}').fetchone()\n"
        "db.execute('pragma cache_size=5'); db.execute('create table t (n integer primary key, text)')\n"
        "db.execute('begin'); db.executemany('insert into t values (?, ?)', ((n, 'x' * 500) for n in range(1000)))\n"
        "db.execute('commit'); db.execute('begin immediate')\n"
        "db.execute('update t set text = hex(randomblob(250))'); db.execute('delete from t where n % 3 = 0')\n"
        "sys.stdout.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    run = await host.run('/usr/bin/python3 -c "$SCRIPT" || echo killed; ls', SCRIPT=f"import os, sys\n{script}")
    assert "killed" in run.stdout
    journal = "db-journal" if mode == "delete" else "db-wal"
    assert journal in run.stdout, "it was killed with something to undo"
    for where in (host.here, host.there):
        disk = await where.disks.get(host.name)
        look = (
            "import sqlite3; db = sqlite3.connect('db'); print(db.execute('pragma integrity_check').fetchone()[0],"
            " *db.execute(\"select count(*), min(text) = 'x' || max(substr(text, 2)) from t\").fetchone())"
        )
        seen = await where.exec('/usr/bin/python3 -c "$SCRIPT"', disks={"w": disk}, env={"SCRIPT": look})
        assert seen.stdout == "ok 1000 1\n", seen.stderr
    assert (
        await host.see_python(
            "import sqlite3; db = sqlite3.connect('file:db?immutable=1', uri=True)\n"
            "print(db.execute('pragma integrity_check').fetchone()[0])"
        )
        == "ok\n"
    )


async def test_case_24_a_and_a_slash_b(host: Host) -> None:
    """A file never becomes a directory by an object call, nor the other way round: `Conflict`, and nothing changes."""
    disk: Disk = await host.disk()
    await disk.put_object("a", b"file")
    with pytest.raises(Conflict, match="'a'"):
        await disk.put_object("a/b", b"below")
    await disk.put_object("c/d", b"below")
    with pytest.raises(Conflict, match="'c'"):
        await disk.put_object("c", b"file")
    assert await host.see("find . -type f | sort | xargs tail -n +1") == "==> ./a <==\nfile\n==> ./c/d <==\nbelow"
    await disk.delete_object("a")
    await disk.put_object("a/b", b"below")
    await disk.delete_object("c", recursive=True)
    await disk.put_object("c", b"file")
    assert await host.see("cat a/b c") == "belowfile"
