"""Views without any rights: modes that shut their own owner out are stored, shown, read back and removed."""

from __future__ import annotations

import encodings.ascii  # what is imported later is out of the child's reach
import os
import shutil
import stat
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from fanout.format.tree import FILE, Node
from fanout.view.cache import HostCache
from fanout.view.view import open_view
from tests.support.views import Workspace, folder

NOBODY = 65534
assert encodings.ascii


def as_nobody(work: Callable[[Path], None]) -> None:
    """Run `work` in a child process without rights, in a directory of its own."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody without any rights")
    top = tempfile.mkdtemp(prefix="fanout-nobody-")
    os.chown(top, NOBODY, NOBODY)
    try:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.umask(0o022)
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
                work(Path(top))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        _, ended = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(ended) == 0
    finally:
        shutil.rmtree(top, ignore_errors=True)


def shut(top: Path) -> None:
    space = Workspace()
    space.write({b"d": folder(0o000), b"d/f": b"x", b"d/e": folder(0o300), b"d/e/g": b"y", b"r": Node(FILE, 0o000, 5)})
    cache = HostCache(top / "cache", 1 << 20)
    view = open_view(cache, space.reader, space.state, disk_id="d", writable=True)
    mount = view.mount("/x")
    assert mount.upper is not None
    lower, upper = Path(mount.lowers[0]), Path(mount.upper)
    assert stat.S_IMODE(os.lstat(lower / "d").st_mode) == 0
    assert stat.S_IMODE(os.lstat(lower / "r").st_mode) == 0

    os.mknod(upper / "r", stat.S_IFCHR, 0)
    for number in range(3):
        here = upper / f"new{number}"
        (here / "in" / "deep").mkdir(parents=True)
        (here / "in" / "f").write_bytes(b"secret")
        (here / "in" / "f").chmod(0o000)
        (here / "in").chmod(0o000)
        here.chmod(0o000)
    packer = space.packer()
    intents = view.intents(packer)
    space.commit(intents, packer)
    assert space.read(b"new2/in/f") == b"secret"
    modes = {path: node.mode for path, node in space.state.below(b"") if path.startswith(b"new0")}
    assert modes == {b"new0": 0, b"new0/in": 0, b"new0/in/f": 0, b"new0/in/deep": 0o755}
    owners = {(node.uid, node.gid) for _, node in space.state.below(b"")}
    assert owners == {(0, 0)}
    assert space.state.get(b"r") is None

    view.close()
    with open_view(cache, space.reader, space.state, disk_id="d", writable=False) as again:
        assert len(again.mount("/x").lowers) == 2
    cache.evict(0)
    cache.close()
    for kind in ("base", "delta", "trash", "tmp", "upper"):
        assert os.listdir(top / "cache" / kind) == []
    space.close()


def test_what_its_owner_cannot_read() -> None:
    as_nobody(shut)
