"""Upload and download: exact both ways, links never followed, nothing outside of the directory is touched."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from fanout.disk.merge import Intent
from fanout.errors import Invalid, NotFound
from fanout.format.tree import DIR, FILE, HOLE, SYMLINK, Node
from fanout.view.transfer import download, upload_intents
from tests.support.views import TINY, Workspace, folder, of_directory, of_state

OLD = 1_500_000_000_000_000_007


def make(top: Path) -> Path:
    top.mkdir()
    (top / "d" / "empty").mkdir(parents=True)
    (top / "d" / "a").write_bytes(b"alpha")
    (top / "d" / "a").chmod(0o755)
    (top / "large").write_bytes(bytes(range(256)) * 40)
    (top / "none").touch()
    os.link(top / "large", top / "d" / "large too")
    os.symlink("nowhere", top / "dangling")
    os.symlink("/etc/passwd", top / "passwd")
    os.symlink(".", top / "loop")
    (top / os.fsdecode(b"odd \xff\n")).write_bytes(b"odd")
    os.utime(top / "d" / "a", ns=(OLD, OLD))
    os.utime(top / "d", ns=(OLD, OLD))
    (top / "d" / "empty").chmod(0o700)
    return top


def upload(space: Workspace, local: Path, prefix: bytes = b"") -> list[Intent]:
    packer = space.packer()
    intents = upload_intents(packer, local, prefix)
    space.commit(intents, packer)
    return intents


@pytest.mark.parametrize("prefix", [b"", b"some/where"])
def test_there_and_back(tmp_path: Path, prefix: bytes) -> None:
    local = make(tmp_path / "local")
    space = Workspace(TINY)
    upload(space, local, prefix)
    wanted = of_directory(local)
    assert of_state(space.state, space.reader, prefix) == wanted
    download(space.reader, space.state, prefix, tmp_path / "new" / "place")
    assert of_directory(tmp_path / "new" / "place") == wanted
    if prefix:
        assert os.stat(tmp_path / "new" / "place").st_mtime_ns == os.stat(local).st_mtime_ns
    assert os.stat(tmp_path / "new" / "place" / "d").st_mtime_ns == OLD


def test_the_owner_is_nobody_in_particular(tmp_path: Path) -> None:
    space = Workspace()
    local = make(tmp_path / "local")
    if os.geteuid() == 0:
        os.chown(local / "none", 1234, 99)
    upload(space, local)
    own = space.state.get(b"large")
    other = space.state.get(b"none")
    assert own is not None
    assert other is not None
    assert (own.uid, own.gid) == (0, 0)
    if os.geteuid() == 0:
        assert (other.uid, other.gid) == (1234, 99)


def test_ignored(tmp_path: Path) -> None:
    local = make(tmp_path / "local")
    (local / ".fanoutignore").write_text("# comment\n*.pyc\nnode_modules/\n!keep.pyc\n/top\n")
    for name in ("x.pyc", "keep.pyc", "top", "d/x.pyc", "d/top"):
        (local / name).touch()
    (local / "d" / "node_modules" / "deep").mkdir(parents=True)
    (local / "node_modules").touch()  # a file: the pattern means directories
    space = Workspace()
    upload(space, local)
    paths = {path for path, _ in space.state.below(b"")}
    assert {b"keep.pyc", b"d/top", b"node_modules", b".fanoutignore"} <= paths
    assert not paths & {b"x.pyc", b"d/x.pyc", b"top", b"d/node_modules", b"d/node_modules/deep"}


def test_one_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"data")
    space = Workspace()
    upload(space, tmp_path / "f", b"a/g")
    assert space.read(b"a/g") == b"data"
    download(space.reader, space.state, b"a/g", tmp_path)
    assert (tmp_path / "g").read_bytes() == b"data"
    download(space.reader, space.state, b"a/g", tmp_path / "x" / "h")
    assert (tmp_path / "x" / "h").read_bytes() == b"data"
    assert sorted(os.listdir(tmp_path / "x")) == ["h"]


def test_one_link(tmp_path: Path) -> None:
    os.symlink("/etc/passwd", tmp_path / "l")
    space = Workspace()
    upload(space, tmp_path / "l", b"l")
    node = space.state.get(b"l")
    assert node is not None
    assert (node.kind, node.target) == (SYMLINK, b"/etc/passwd")


def test_a_named_link_to_a_directory_means_the_directory(tmp_path: Path) -> None:
    make(tmp_path / "local")
    os.symlink("local", tmp_path / "link")
    space = Workspace()
    upload(space, tmp_path / "link", b"there")
    node = space.state.get(b"there")
    assert node is not None
    assert node.kind == DIR
    assert space.read(b"there/d/a") == b"alpha"


def test_pipes_are_left_out(tmp_path: Path) -> None:
    local = make(tmp_path / "local")
    os.mkfifo(local / "pipe")
    assert b"pipe" not in {intent.path for intent in upload(Workspace(), local)}
    with pytest.raises(Invalid, match="local"):
        upload(Workspace(), local / "pipe", b"p")


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="gone"):
        upload(Workspace(), tmp_path / "gone")
    space = Workspace()
    with pytest.raises(NotFound, match="gone"):
        download(space.reader, space.state, b"gone", tmp_path)


def test_sparse(tmp_path: Path) -> None:
    with open(tmp_path / "s", "wb") as file:
        file.truncate(6 << 30)
        file.seek(3 << 30)
        file.write(b"island")
    space = Workspace()
    upload(space, tmp_path / "s", b"s")
    node = space.state.get(b"s")
    assert node is not None
    assert node.size == 6 << 30
    assert sum(ref.size for ref in node.data if ref.pack != HOLE) < 1 << 20
    download(space.reader, space.state, b"s", tmp_path / "t")
    found = os.stat(tmp_path / "t")
    assert found.st_size == 6 << 30
    assert found.st_blocks * 512 < 1 << 20
    with open(tmp_path / "t", "rb") as file:
        file.seek(3 << 30)
        assert file.read(6) == b"island"


def test_progress(tmp_path: Path) -> None:
    local = make(tmp_path / "local")
    space = Workspace(TINY)
    packer = space.packer()
    seen: list[tuple[int, int, int | None]] = []
    intents = upload_intents(packer, local, b"", progress=lambda *now: seen.append(now))
    space.commit(intents, packer)
    total = 5 + 256 * 40 + 0 + 3
    assert seen[-1] == (4, total, 4)
    assert [files for files, _, _ in seen] == [1, 2, 3, 4]
    seen.clear()
    download(space.reader, space.state, b"", tmp_path / "back", progress=lambda *now: seen.append(now))
    assert seen[-1][0] == len(intents)


def test_existing_files_are_replaced_and_others_stay(tmp_path: Path) -> None:
    space = Workspace(TINY)
    upload(space, make(tmp_path / "local"))
    there = make(tmp_path / "there")
    (there / "d" / "a").write_bytes(b"older")
    (there / "mine").write_bytes(b"stays")
    (there / "none").unlink()
    (there / "none").mkdir()
    (there / "none" / "full").touch()
    (there / "large").unlink()
    (there / "dangling").unlink()
    (there / "dangling").mkdir()
    download(space.reader, space.state, b"", there)
    found = of_directory(there)
    assert found.pop(b"mine").kind == "f"
    assert found == of_directory(tmp_path / "local")


def test_links_in_the_way_are_replaced_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "victim").write_bytes(b"untouched")
    there = tmp_path / "there"
    there.mkdir()
    os.symlink(outside, there / "d")
    os.symlink(outside / "victim", there / "f")
    os.symlink(outside / "victim", there / "big")
    os.symlink(outside / "created", there / "g")
    space = Workspace(TINY)
    space.write({b"d/victim": b"bad", b"f": b"bad", b"big": b"bad" * 500, b"g": b"bad", b"d/sub": folder()})
    download(space.reader, space.state, b"", there)
    assert os.listdir(outside) == ["victim"]
    assert (outside / "victim").read_bytes() == b"untouched"
    assert not (there / "d").is_symlink()
    assert (there / "d" / "victim").read_bytes() == b"bad"
    assert (there / "big").read_bytes() == b"bad" * 500


def test_no_set_user_id_on_the_caller_s_disk(tmp_path: Path) -> None:
    space = Workspace()
    space.write({b"f": Node(FILE, 0o6755, OLD)})
    download(space.reader, space.state, b"", tmp_path / "t")
    assert stat.S_IMODE(os.stat(tmp_path / "t" / "f").st_mode) == 0o755


def test_uploading_again_changes_only_what_changed(tmp_path: Path) -> None:
    local = make(tmp_path / "local")
    space = Workspace(TINY)
    packer = space.packer()
    space.commit(upload_intents(packer, local, b""), packer)
    (local / "d" / "a").write_bytes(b"other")
    packer = space.packer()
    intents = upload_intents(packer, local, b"", bases=space.state.nodes)
    assert sorted(i.path for i in intents if not i.weak) == [b"d/a"]
    assert sum(map(len, packer.finish().blobs.values())) < 200
