"""virtiofsd in its sandbox, without a VM: what it is to serve, what it has no right to, and that it goes."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fanout.engine import rootfs, seccomp
from fanout.engine.base import Mount
from fanout.engine.bubblewrap import find_bwrap, home_of
from fanout.engine.owned import OwnedDirectory
from fanout.engine.qemu.share import TOP, Share, find_virtiofsd, tree_options
from fanout.engine.spawning import Spawner
from fanout.errors import EngineUnavailable

Make = Callable[[], Share]


@pytest.fixture(scope="module", params=["ours", "its own"])
def spawner(request: pytest.FixtureRequest) -> Iterator[Spawner]:
    private = request.param == "ours"
    if private and os.geteuid() != 0:
        pytest.skip("mounting ourselves needs root")
    try:
        find_virtiofsd()
        made = Spawner(private_mounts=private, filter=seccomp.program(), shown=[home_of(find_bwrap())])
    except EngineUnavailable as error:
        pytest.skip(str(error))
    yield made
    made.close()


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Not below pytest's own directory, which only root may enter."""
    path = Path(tempfile.mkdtemp(prefix="fanout-share-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def make(spawner: Spawner, scratch: Path) -> Iterator[Make]:
    root = scratch / "system"
    (root / "etc").mkdir(parents=True)
    (root / "etc/name").write_text("shown")
    directory = OwnedDirectory("fanout-test-")
    bwrap = find_bwrap()
    seen = bwrap.replace(home_of(bwrap), spawner.seen_at(home_of(bwrap)), 1)
    shares: list[Share] = []

    def made() -> Share:
        tree = tree_options(root, None, [], lambda path: path)
        shares.append(Share(find_virtiofsd(), spawner, seen, tree, directory.path))
        return shares[-1]

    yield made
    for share in shares:
        share.connection.close()
        share.end()
    directory.close()


def seen(share: Share) -> Path:
    share._jail.attach(TOP, [])  # waits until it is built
    return Path(f"/proc/{share._jail.init}/root{TOP}")


def test_mounts_come_while_it_runs_and_go_with_it(make: Make, scratch: Path) -> None:
    names = ("lower", "delta", "upper", "work")
    lower, delta, upper, work = ((scratch / name) for name in names)
    for path in (lower, delta, upper, work):
        path.mkdir()
    (lower / "a").write_text("low")
    (delta / "b").write_text("high")
    share = make()
    layers = (str(lower), str(delta))
    share.attach([Mount("/mnt/work", layers, str(upper), str(work)), Mount("/data/deep/ro", (str(lower),))])
    assert share.alive(), share.said()
    assert sorted(os.listdir(seen(share) / "mnt/work")) == ["a", "b"]
    assert (seen(share) / "data/deep/ro/a").read_text() == "low"
    for name in ("data/deep/ro", "", "etc", "mnt"):
        assert os.statvfs(seen(share) / name).f_flag & os.ST_RDONLY, f"{name!r} can be written"
    assert not os.statvfs(seen(share) / "mnt/work").f_flag & os.ST_RDONLY
    share.attach([Mount("/mnt/more", (str(delta),))])
    assert os.listdir(seen(share) / "mnt/more") == ["b"]
    pids = (share.pid, share._jail.init)
    share.end()
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    with open("/proc/self/mounts") as mounts:
        assert str(scratch) not in mounts.read()
    share.end()


def test_it_sees_the_tree_and_programs_and_has_no_rights_over_them(make: Make) -> None:
    share = make()
    assert sorted(os.listdir(seen(share))) == ["dev", "etc", "mnt", "proc", "root", "run", "sys", "tmp"]
    assert (seen(share) / "etc/name").read_text() == "shown"
    assert set(os.listdir(f"/proc/{share._jail.init}/root")) <= {"proc", "share", *rootfs.SYSTEM}
    while "virtiofsd" not in Path(f"/proc/{share.pid}/comm").read_text():
        assert share.alive(), share.said()
    status = Path(f"/proc/{share.pid}/status").read_text()
    assert "NoNewPrivs:\t1" in status
    assert "Seccomp:\t2" in status
    namespaces = ("ipc", "mnt", "net", "pid", "user", "uts")
    ours = [os.readlink(f"/proc/self/ns/{name}") for name in namespaces]
    assert not set(ours) & {os.readlink(f"/proc/{share.pid}/ns/{name}") for name in namespaces}


def test_a_layer_that_is_not_there_is_said_and_it_lives_on(make: Make, scratch: Path) -> None:
    share = make()
    with pytest.raises(EngineUnavailable, match="missing"):
        share.attach([Mount("/mnt/a", (str(scratch / "missing"),))])
    (scratch / "there").mkdir()
    share.attach([Mount("/mnt/b", (str(scratch / "there"),))])
    assert share.alive()


def test_one_that_was_killed_says_so(make: Make, scratch: Path) -> None:
    share = make()
    os.kill(share._jail.init, 9)
    share._jail.wait(10)
    assert not share.alive()
    with pytest.raises(EngineUnavailable, match="dead"):
        share.attach([Mount("/mnt/a", (str(scratch),))])


def test_no_virtiofsd_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fanout.engine.qemu.share.PLACES", ("/nowhere/virtiofsd",))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(EngineUnavailable, match="install the package virtiofsd"):
        find_virtiofsd()
