"""`fanout exec`, `map`, `demo` and `doctor` with real sandboxes, in this process."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fanout.cli import demo_source
from fanout.cli.root import cli
from fanout.errors import Corrupt, EngineUnavailable

Cli = Callable[..., Result]


@pytest.fixture
def fanout(tmp_path: Path) -> Cli:
    """Runs a command line on a store of this test; fails the test unless it exits with `code`."""
    environ = {"FANOUT_STORE": f"file://{tmp_path}/store", "FANOUT_CACHE_DIR": f"{tmp_path}/cache", "USER": "tester"}
    runner = CliRunner(env=environ)

    def run(*words: str, code: int = 0, stdin: bytes | str | None = None) -> Result:
        result = runner.invoke(cli, list(words), input=stdin, prog_name="fanout")
        assert result.exit_code == code, (words, result.exit_code, result.output)
        return result

    return run


@pytest.fixture
def ws(fanout: Cli) -> str:
    fanout("disk", "create", "ws")
    return "ws"


def parsed(result: Result) -> Any:
    return json.loads(result.stdout)


# -- exec -------------------------------------------------------------------------------------------------------


def test_exec_passes_bytes_and_the_exit_code(fanout: Cli, ws: str) -> None:
    result = fanout("exec", "-d", ws, r"printf 'a\377\000'; printf e >&2; exit 7", code=7)
    assert result.stdout_bytes == b"a\xff\0"
    assert result.stderr_bytes == b"e"


def test_exec_commits_and_the_next_one_sees_it(fanout: Cli, ws: str) -> None:
    fanout("exec", "-d", ws, "mkdir out && echo hello > out/f; exit 1", code=1)
    assert fanout("cat", ws, "out/f").stdout == "hello\n"
    assert fanout("exec", "-d", f"other={ws}", "pwd; cat /mnt/other/out/f").stdout == "/mnt/other\nhello\n"
    fanout("exec", "-d", ws, "--commit", "never", "echo x > never")
    fanout("exec", "-d", ws, "--commit", "on_success", "echo x > failed; exit 1", code=1)
    assert fanout("ls", ws).stdout == "out/\n"


def test_exec_words_are_a_program_and_one_word_a_script(fanout: Cli) -> None:
    assert fanout("exec", "--", "printf", "[%s]", "a b", "$HOME", "-d", "--json").stdout == "[a b][$HOME][-d][--json]"
    assert fanout("exec", 'echo $((1 + 2)); echo "it\'s"').stdout == "3\nit's\n"


def test_exec_env_cwd_stdin(fanout: Cli, tmp_path: Path) -> None:
    value = "a='b' $(x)\n=☕"
    assert fanout("exec", "-e", f"K={value}", "-e", "E=", 'printf %s "$K$E"').stdout == value
    assert fanout("exec", "--cwd", "/usr/bin", "pwd").stdout == "/usr/bin\n"
    assert fanout("exec", "cat", stdin="not passed on").stdout == ""
    assert fanout("exec", "--stdin", "-", "cat", stdin=b"\xff\0ours").stdout_bytes == b"\xff\0ours"
    (tmp_path / "in").write_bytes(b"of a file")
    assert fanout("exec", "--stdin", str(tmp_path / "in"), "cat").stdout == "of a file"
    assert "No such file" in fanout("exec", "--cwd", "/nope", "true", code=64).stderr


def test_exec_modes(fanout: Cli, ws: str) -> None:
    fanout("put", ws, "-", "f", stdin="1")
    assert "Read-only" in fanout("exec", "-d", f"{ws}:ro", "echo 2 > f", code=1).stderr
    fanout("checkpoint", ws, "base")
    assert "Read-only" in fanout("exec", "-d", "ws@base", "echo 2 > f", code=1).stderr
    assert "checkpoint" in fanout("exec", "-d", "ws@base:shared", "true", code=77).stderr
    fanout("branch", ws, "side")
    fanout("exec", "-d", "ws@side:conditional", "echo 2 > f")
    assert fanout("cat", ws, "f").stdout == "1"
    assert fanout("cat", "ws@side", "f").stdout == "2\n"


def test_exec_timeout_says_so(fanout: Cli, ws: str) -> None:
    result = fanout("exec", "-d", ws, "--timeout", "0.4", "echo kept > f; echo first; sleep 60", code=124)
    assert result.stdout == "first\n"
    assert result.stderr == "fanout: the command was stopped at its timeout (see --timeout)\n"
    assert fanout("cat", ws, "f").stdout == "kept\n"


def test_exec_json(fanout: Cli, ws: str) -> None:
    run = parsed(fanout("exec", "--json", "-d", ws, r"printf 'a\377'; echo é >&2; echo 1 > f; exit 3", code=3))
    assert (run["exit_code"], run["status"], run["ok"]) == (3, "completed", False)
    assert base64.b64decode(run["stdout_base64"]) == b"a\xff"
    assert run["stderr"] == "é\n"
    assert "stderr_base64" not in run
    assert run["commits"]["ws"]["seq"] == 1
    assert run["commits"]["ws"]["changes"] == [{"path": "f", "kind": "added"}]
    assert run["conflict"] is None
    parts = run["timing"]
    assert parts["wait_ms"] + parts["lock_ms"] + parts["mount_ms"] + parts["start_ms"] <= parts["queue_ms"] + 1
    assert 0 < parts["execute_ms"] < parts["total_ms"]


# -- map --------------------------------------------------------------------------------------------------------


def test_map_table_and_exit_code(fanout: Cli, ws: str) -> None:
    result = fanout(
        "map", "-d", f"{ws}:conditional", "echo {#}:{} | tee {#}.txt; test {#} != 2", "a b", "c'd", "e", code=1
    )
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["branch", "exit", "queue", "execute", "commit", "result"]
    assert [(line.split("  ")[0], line.rsplit("  ", 1)[1]) for line in lines[1:4]] == [
        ("a b", "1:a b"),
        ("c'd", "2:c'd"),
        ("e", "3:e"),
    ]
    assert [line.split()[-5] for line in lines[2:4]] == ["1", "0"]
    assert lines[4].startswith("3 execs in ")
    assert "1 failed" in lines[4]
    assert "[3/3] " in result.stderr
    assert fanout("cat", ws, "1.txt", "2.txt", "3.txt").stdout == "1:a b\n2:c'd\n3:e\n"


def test_map_items_from_standard_input(fanout: Cli) -> None:
    result = fanout("map", "--json", "-n", "1", "printf %s {}", "-", stdin=b"one\n\ntwo words\n\xff\n")
    runs = parsed(result)
    assert [run["stdout"] for run in runs] == ["one", "two words", "\ufffd"]
    assert runs[0]["item"] == "one"
    assert base64.b64decode(runs[2]["stdout_base64"]) == b"\xff"
    assert parsed(fanout("map", "--json", "echo {}", "-", stdin=b"")) == []


def test_map_conflict_says_where_the_changes_are(fanout: Cli, ws: str) -> None:
    # Both start within the second that each takes, so both have seen the same tree.
    result = fanout("map", "-d", ws, "echo {} > same; sleep 1", "x", "y", code=1)
    (rescued,) = [line for line in result.stdout.splitlines() if "rescue/ex-" in line]
    label, rescue = rescued.split()[0], rescued.split()[-1]
    assert rescued.split()[1] == "conflict"
    assert f"fanout merge ws {rescue} --on-conflict theirs" in result.stderr
    assert fanout("cat", f"ws@{rescue}", "same").stdout == f"{label}\n"
    assert fanout("diff", ws, "main", rescue).stdout == "M same\n"
    fanout("merge", ws, rescue, "--on-conflict", "theirs")
    assert fanout("cat", ws, "same").stdout == f"{label}\n"


# -- demo -------------------------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "my project"
    (root / "tests").mkdir(parents=True)
    (root / ".venv").mkdir()
    (root / ".venv" / "test_not_ours.py").write_text("")
    (root / "thing.py").write_text("answer = 42\n")
    for name in ("one", "two"):
        body = f"import thing\ndef test_{name}():\n    assert thing.answer == 42\n"
        (root / "tests" / f"test_{name}.py").write_text(body)
    return root


def test_demo_runs_anything_in_a_directory(fanout: Cli, project: Path) -> None:
    options = ("--command", "cat {}; echo seen {} # all of it", "--glob", "*.py")
    result = fanout("demo", str(project), *options, "--keep")
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["branch", "tests/test_one.py", "tests/test_two.py", "thing.py"]
    assert lines[1].endswith("seen tests/test_one.py")
    assert lines[5].startswith("my project")
    assert "3 execs in " in lines[5]
    assert "one after another they took" in lines[6]
    assert "3 commits landed in " in lines[7]
    assert "3 results read with get_object" in lines[7]
    disk = lines[8].split()[3]
    assert fanout("cat", disk, "results/2.txt").stdout == "answer = 42\nseen thing.py\n"
    assert fanout("cat", f"{disk}@one-by-one", "results/0.txt").stdout.endswith("seen tests/test_one.py\n")


def test_demo_leaves_nothing_and_fails_with_a_file(fanout: Cli, project: Path) -> None:
    options = ("--command", "echo ran {}; ! grep -q two {}", "--no-compare", "--json")
    result = parsed(fanout("demo", str(project), *options, code=1))
    assert [(run["branch"], run["exit_code"], run["result"]) for run in result["runs"]] == [
        ("tests/test_one.py", 0, "ran tests/test_one.py"),
        ("tests/test_two.py", 1, "ran tests/test_two.py"),
    ]
    assert result["one_after_another_s"] is None
    assert result["commits"] == 2
    assert fanout("disk", "ls").stdout == ""


def test_demo_runs_pytest_files(fanout: Cli, project: Path, tmp_path: Path) -> None:
    """With the pinned pytest's place in the cache taken by this interpreter's, so that nothing is fetched."""
    kept = demo_source._kept(tmp_path / "cache", demo_source._DEPENDENCIES)
    for name in ("pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        for file in distribution(name).files or ():
            if file.suffix == ".py" and ".." not in file.parts:
                (kept / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(file.locate()), kept / file)
    (project / "tests" / "test_bad.py").write_text("def test_bad():\n    assert 1 == 2\n")
    result = parsed(fanout("demo", str(project), "--no-compare", "--json", code=1))
    outcomes = {run["branch"]: (run["exit_code"], run["result"].split(" in ")[0]) for run in result["runs"]}
    assert outcomes == {
        "tests/test_bad.py": (1, "1 failed"),
        "tests/test_one.py": (0, "1 passed"),
        "tests/test_two.py": (0, "1 passed"),
    }


def test_demo_without_the_package_index(fanout: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    result = fanout("demo", code=69)
    error = result.stderr.splitlines()[-1]
    assert error.startswith("fanout: cannot fetch pytest 8.3.5: ")
    assert "fanout demo DIR" in error
    assert list((tmp_path / "cache/demo").iterdir()) == []


def test_demo_refuses_another_archive(tmp_path: Path) -> None:
    """A pin is what is unpacked, whatever pip was made to fetch."""
    import anyio

    wheel_only = demo_source.PROJECT
    (tmp_path / "demo").mkdir()
    backend = demo_source._kept(tmp_path, (demo_source._BACKEND,))
    backend.mkdir(parents=True)

    async def fake_pip(verb: str, pins: Any, scratch: Path, options: Any, python_path: str | None = None) -> None:
        (scratch / "sdist").mkdir()
        (scratch / "sdist" / "other.tar.gz").write_bytes(b"not it")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_source, "_pip", fake_pip)
        with pytest.raises(Corrupt, match="pins"):
            anyio.run(demo_source.fetch_project, tmp_path, lambda text: None)
    assert not demo_source._kept(tmp_path, (wheel_only,)).exists()


# -- doctor -----------------------------------------------------------------------------------------------------


def test_doctor(fanout: Cli) -> None:
    report = parsed(fanout("doctor", "--json"))
    checks = {each["check"]: each for each in report["checks"]}
    assert report["ok"]
    assert checks["bubblewrap"]["state"] == "ok"
    assert checks["bubblewrap"]["start_ms"] > 0
    assert checks["store"]["create_only"]
    text = fanout("doctor").stdout
    assert "ok  bubblewrap" in text
    assert "ok  store" in text


def test_doctor_says_whether_commands_can_be_let_out(fanout: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for program, state in (("/usr/bin/slirp4netns", "ok"), (None, "note")):
        monkeypatch.setattr(
            shutil, "which", lambda name, path=None, given=program: given if name == "slirp4netns" else None
        )
        checks = {each["check"]: each for each in parsed(fanout("doctor", "--json"))["checks"]}
        assert checks["network"]["state"] == state
        assert "slirp4netns" in checks["network"]["text"]


def test_doctor_says_what_vms_lack_and_fetches_nothing_unasked(fanout: Cli) -> None:
    checks = {each["check"]: each for each in parsed(fanout("doctor", "--json"))["checks"]}
    assert checks["image"]["state"] == checks["kvm"]["state"] == "note"
    assert "fanout doctor --fix" in checks["image"]["text"]
    assert checks["qemu"]["state"] in ("note", "bad")  # bad: no QEMU is installed


def test_doctor_fixes(fanout: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def missing() -> str:
        if done:
            return "found"
        raise EngineUnavailable("there is none")

    monkeypatch.setattr("fanout.engine.qemu.command.find_qemu", missing)
    monkeypatch.setattr("fanout.engine.qemu.share.find_virtiofsd", missing)
    monkeypatch.setattr("fanout.engine.qemu.packages.install", lambda names, say: done.extend(names))
    monkeypatch.setattr("fanout.engine.qemu.image.assemble", lambda cache, say: say("assembled"))
    assert "assembled" in fanout("doctor", "--fix").stderr
    assert done == ["qemu-system-x86"]


def test_doctor_says_what_to_install_where_it_may_not(fanout: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise EngineUnavailable("there is none")

    monkeypatch.setattr("fanout.engine.qemu.command.find_qemu", missing)
    monkeypatch.setenv("PATH", "/nowhere")
    assert (
        "as root: apt-get install --no-install-recommends qemu-system-x86" in fanout("doctor", "--fix", code=69).stderr
    )


@pytest.mark.soak
def test_demo_on_the_pinned_project(fanout: Cli) -> None:
    """Needs the package index, through pip."""
    result = parsed(fanout("demo", "--json"))
    assert result["project"] == "click 8.1.8"
    assert result["execs"] == result["commits"] == 20
    assert all(" passed" in run["result"] for run in result["runs"])
    assert 1 <= result["log_entries"] <= 20
    assert result["one_after_another_s"] > 0
