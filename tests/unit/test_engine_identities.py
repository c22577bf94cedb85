"""Users of their own for sandboxes, and layers as theirs; and what is done where a host has none to give."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from fanout.engine import identities, spawning
from fanout.engine.base import Mount, Spec
from fanout.engine.bench import Bench, completed
from fanout.engine.bubblewrap import BubblewrapEngine

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becoming somebody else needs root")


def users_of(bench: Bench, *mounts: Mount) -> tuple[int, int]:
    """Return whom a command runs as: on the host, and in its own eyes."""
    seen: list[int] = []
    spawner = bench.engine._ready().spawner.pid  # type: ignore[attr-defined]

    def look(*_: object) -> None:
        for pid in Path(f"/proc/{spawner}/task/{spawner}/children").read_text().split():
            text = Path(f"/proc/{pid}/status").read_text()
            seen.extend(map(int, re.findall(r"^Uid:\t(\d+)", text, re.MULTILINE)))
        process.kill()

    process = bench.engine.start(Spec(["/bin/sh", "-c", "id -u; exec sleep 60"], mounts))
    assert process.wait(look).status == "killed"
    return max(seen), min(seen)


def is_whiteout(path: Path) -> bool:
    return path.is_char_device() and path.lstat().st_rdev == 0


def test_no_process_of_a_sandbox_is_the_host_s_root(tmp_path: Path) -> None:
    engine = BubblewrapEngine(overlay="kernel")
    bench = Bench(engine, tmp_path)
    try:
        assert engine.runs_as_root == ""
        most, least = users_of(bench)
        assert least >= identities.FIRST
        assert most < 2**31
        assert completed(bench.run("id -u")).stdout == b"0\n"
    finally:
        engine.close()


def test_files_of_root_s_are_the_sandbox_s_and_stay_root_s(tmp_path: Path) -> None:
    """In every kind of mount: a single layer, several, and one that is written to."""
    engine = BubblewrapEngine(overlay="kernel")
    bench = Bench(engine, tmp_path)
    base, delta = bench.directory({"private": "1", "other": "2", "d/x": "3"}), bench.directory({"new": "4"})
    (base / "private").chmod(0o600)
    os.chown(base / "other", 1234, 1234)
    mounts = [Mount("/mnt/one", (str(base),)), Mount("/mnt/two", (str(base), str(delta))), bench.writable(base, delta)]
    try:
        script = "stat -c '%n %u' private other d/x && cat private"
        for mount in (*mounts[:2], bench.writable(base, delta)):
            shown = completed(bench.run(script, mount, cwd=mount.target)).stdout
            assert shown == b"private 0\nother 65534\nd/x 0\n1"
        script = "echo 5 > private; touch made; mv d e; rm new; chmod u+s made; chown 0:0 made; echo 6 > other"
        assert b"other: Permission denied" in completed(bench.run(script, mounts[2], cwd="/mnt/work"), 2).stderr
    finally:
        engine.close()
    owners = {path.name: path.lstat().st_uid for path in Path(str(mounts[2].upper)).rglob("*") if not is_whiteout(path)}
    assert owners == {"private": 0, "made": 0, "e": 0}
    assert (base / "other").stat().st_uid == 1234


def test_each_sandbox_of_a_moment_is_another_user(tmp_path: Path) -> None:
    users = identities.Identities()
    assert users.why == ""
    first, second = users.take(), users.take()
    assert first is not None
    assert second is not None
    assert first.number != second.number
    users.give_back(first)
    assert users.take() == first
    users.refuse("for a test")
    assert users.take() is None
    for each in (first, second):
        os.close(each.mapping)


@pytest.mark.parametrize(
    ("module", "found", "instead", "why"),
    [
        # Unprivileged users may make no user namespaces (a sysctl, a security module).
        ("identities.py", "made = _libc.unshare", "made = False and _libc.unshare", "user namespaces"),
        # The layers' file system maps no owners: a flag that no kernel knows is refused as such a one refuses it.
        (
            "mapped.py",
            "MOUNT_ATTR_IDMAP = 0x1, 0x2, 0x4, 0x100000",
            "MOUNT_ATTR_IDMAP = 0x1, 0x2, 0x4, 0x8000",
            "mapped",
        ),
    ],
)
def test_without_users_of_its_own_it_is_root_in_a_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, found: str, instead: str, why: str
) -> None:
    """Everything works then, with a weaker wall."""
    copied = tmp_path / "engine"
    copied.mkdir()
    for path in Path(identities.__file__).parent.glob("*.py"):
        text = path.read_text()
        if path.name == module:
            assert text.count(found) == 1
            text = text.replace(found, instead)
        (copied / path.name).write_text(text)
    monkeypatch.setattr(spawning.spawner, "__file__", str(copied / "spawner.py"))
    engine = BubblewrapEngine(overlay="kernel")
    bench = Bench(engine, tmp_path)
    try:
        mount = bench.writable(bench.directory({"f": "1"}))
        assert completed(bench.run("id -u; cat f; echo 2 > f", mount, cwd="/mnt/work")).stdout == b"0\n1"
        assert completed(bench.run("cat f", Mount("/mnt/one", mount.lowers), cwd="/mnt/one")).stdout == b"1"
        assert users_of(bench)[1] == 0
        assert why in engine.runs_as_root
    finally:
        engine.close()
