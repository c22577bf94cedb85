"""Every command of the command line, in this process, on a store of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fanout.cli.root import cli

Cli = Callable[..., Result]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str | None]:
    return {
        "FANOUT_STORE": f"file://{tmp_path}/store",
        "FANOUT_CACHE_DIR": f"{tmp_path}/cache",
        "FANOUT_ENGINE": None,
        "FANOUT_URL": None,
        "USER": "tester",
    }


@pytest.fixture
def fanout(environ: dict[str, str | None]) -> Cli:
    """Runs a command line; fails the test unless it exits with `code`. Errors are one line, always."""
    runner = CliRunner(env=environ)

    def run(*words: str, code: int = 0, stdin: bytes | str | None = None) -> Result:
        result = runner.invoke(cli, list(words), input=stdin, prog_name="fanout")
        assert result.exit_code == code, (words, result.exit_code, result.output)
        if code >= 64 and not {"exec", "map", "doctor"} & set(words):
            lines = result.stderr.splitlines()
            assert len(lines) == 1, result.stderr
            assert lines[0].startswith("fanout: ")
            assert result.stdout == ""
        return result

    return run


@pytest.fixture
def ws(fanout: Cli) -> str:
    fanout("disk", "create", "ws")
    return "ws"


def parsed(result: Result) -> Any:
    return json.loads(result.stdout)


def listed(fanout: Cli, *words: str) -> list[str]:
    return str(fanout("ls", *words).stdout).splitlines()


def test_version_and_help(fanout: Cli) -> None:
    assert fanout("--version").stdout.startswith("fanout 0.")
    shown = fanout("--help").stdout
    for name, command in cli.commands.items():
        assert f"\n  {name} " in shown
        assert command.get_short_help_str()
        assert "Usage: fanout" in fanout(name, "--help").stdout


# -- disks ------------------------------------------------------------------------------------------------------


def test_disk_life(fanout: Cli) -> None:
    made = parsed(fanout("disk", "create", "one", "--json"))
    assert made["name"] == "one"
    assert made["id"].startswith("dsk-")
    assert "created disk two" in fanout("disk", "create", "two").stdout
    assert [each["name"] for each in parsed(fanout("disk", "ls", "--json"))] == ["one", "two"]
    assert fanout("disk", "ls").stdout.splitlines()[0] == f"one  {made['id']}"
    assert "already" in fanout("disk", "create", "one", code=73).stderr
    fanout("disk", "rm", "one", "two", "--yes")
    assert fanout("disk", "ls").stdout == ""
    assert "no disk 'one'" in fanout("disk", "rm", "one", code=66).stderr


def test_disk_info(fanout: Cli, ws: str) -> None:
    fanout("put", ws, "-", "a/b.txt", stdin=b"x" * 2048)
    fanout("checkpoint", ws, "base")
    fanout("branch", ws, "side")
    info = parsed(fanout("disk", "info", ws, "--json"))
    assert (info["files"], info["size_bytes"], info["branches"]) == (1, 2048, ["main", "side"])
    assert [each["name"] for each in info["checkpoints"]] == ["base"]
    assert info["newest"]["author"] == "tester"
    text = fanout("disk", "info", "ws@base").stdout
    assert "1 file, 2.0 KiB" in text
    assert "base (commit 1 of main" in text


def test_a_line_of_a_disk_is_not_deleted_as_a_disk(fanout: Cli, ws: str) -> None:
    fanout("branch", ws, "side")
    assert "whole disk" in fanout("disk", "rm", "ws@side", code=64).stderr
    assert fanout("disk", "ls").stdout.startswith("ws ")


# -- files ------------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "sub").mkdir(parents=True)
    (root / "a.txt").write_text("alpha\n")
    (root / "sub" / "b.bin").write_bytes(bytes(range(256)))
    (root / "sub" / "run.sh").write_text("#!/bin/sh\n")
    (root / "sub" / "run.sh").chmod(0o755)
    (root / "link").symlink_to("sub/b.bin")
    return root


def test_put_ls_cat_get(fanout: Cli, ws: str, tree: Path, tmp_path: Path) -> None:
    assert parsed(fanout("put", ws, str(tree), "/t", "--json"))["seq"] == 1
    assert listed(fanout, ws, "/t") == ["a.txt", "link", "sub/"]
    assert listed(fanout, ws, "t/", "-R") == ["a.txt", "link", "sub/", "sub/b.bin", "sub/run.sh"]
    assert listed(fanout, ws, "t/a.txt") == ["a.txt"]
    long = listed(fanout, ws, "-l", "/t") + listed(fanout, ws, "-l", "/t/sub")
    assert any(line.startswith("lrwxrwxrwx") and line.endswith("link -> sub/b.bin") for line in long)
    assert any(line.startswith("-rwxr-xr-x") and line.endswith("run.sh") for line in long)
    entries = {entry["path"]: entry for entry in parsed(fanout("ls", ws, "-R", "--json"))}
    assert entries["/t/sub/b.bin"]["size"] == 256
    assert entries["/t/link"]["target"] == "sub/b.bin"
    assert fanout("cat", ws, "t/sub/b.bin", "/t/a.txt").stdout_bytes == bytes(range(256)) + b"alpha\n"
    assert fanout("get", ws, "/t/sub/b.bin", "-").stdout_bytes == bytes(range(256))
    fanout("get", ws, "/t", str(tmp_path / "copy"))
    assert (tmp_path / "copy/sub/b.bin").read_bytes() == bytes(range(256))
    assert os.readlink(tmp_path / "copy/link") == "sub/b.bin"
    fanout("get", ws, "/t/a.txt", str(tmp_path / "copy/sub"))
    assert (tmp_path / "copy/sub/a.txt").read_text() == "alpha\n"


def test_get_takes_the_name_it_has(fanout: Cli, ws: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fanout("put", ws, "-", "deep/name.txt", stdin="here")
    fanout("get", ws, "deep/name.txt")
    assert (tmp_path / "name.txt").read_text() == "here"


def test_put_into_a_directory(fanout: Cli, ws: str, tree: Path) -> None:
    fanout("put", ws, str(tree / "a.txt"), "/in/")
    fanout("put", ws, str(tree / "a.txt"), "/")
    fanout("put", ws, str(tree / "a.txt"), "other.txt")
    assert listed(fanout, ws, "-R") == ["a.txt", "in/", "other.txt", "in/a.txt"]
    assert "name of a file" in fanout("put", ws, "-", "in/", stdin="x", code=64).stderr


def test_rm_and_mv(fanout: Cli, ws: str, tree: Path) -> None:
    fanout("put", ws, str(tree), "/t")
    fanout("mv", ws, "/t/sub", "/moved")
    fanout("mv", ws, "t/a.txt", "moved/")
    assert listed(fanout, ws, "-R") == ["moved/", "t/", "moved/a.txt", "moved/b.bin", "moved/run.sh", "t/link"]
    assert "already" in fanout("mv", ws, "/t/link", "/moved/a.txt", code=73).stderr
    assert "no 'nope'" in fanout("mv", ws, "/nope", "/x", code=66).stderr
    assert "recursively" in fanout("rm", ws, "moved", code=64).stderr
    fanout("rm", ws, "moved/a.txt", "t/link")
    fanout("rm", "-r", ws, "moved/")
    assert listed(fanout, ws) == ["t/"]
    assert "-f ignores" in fanout("rm", ws, "nope", code=66).stderr
    fanout("rm", "-f", ws, "nope")


def test_a_checkpoint_is_read_and_never_written(fanout: Cli, ws: str) -> None:
    fanout("put", ws, "-", "f", stdin="old")
    fanout("checkpoint", ws, "base")
    fanout("put", ws, "-", "f", stdin="new")
    assert fanout("cat", "ws@base", "f").stdout == "old"
    assert fanout("cat", "ws@main", "f").stdout == "new"
    assert "start a branch" in fanout("put", "ws@base", "-", "f", stdin="x", code=77).stderr


def test_names_cannot_command_the_terminal(fanout: Cli, ws: str, tmp_path: Path) -> None:
    evil = os.fsdecode(b"\xffbad\x1b[31m\n\xe2\x80\xae\\txt")
    root = tmp_path / "evil"
    root.mkdir()
    (root / evil).write_bytes(b"safe")
    fanout("put", ws, str(root), "/")
    fanout("checkpoint", ws, "base")
    shown = "\\xffbad\\x1b[31m\\n\\u202e\\\\txt"
    assert fanout("ls", ws).stdout == shown + "\n"
    assert shown in fanout("log", "-c", ws).stdout
    (entry,) = parsed(fanout("ls", ws, "--json"))
    assert os.fsencode(entry["name"]) == os.fsencode(evil)
    assert fanout("cat", ws, evil).stdout == "safe"
    fanout("rm", ws, evil)
    assert fanout("diff", ws, "base").stdout == f"D {shown}\n"
    assert "\x1b" not in fanout("cat", ws, evil, code=66).stderr


# -- history ----------------------------------------------------------------------------------------------------


def test_checkpoints_and_branches(fanout: Cli, ws: str) -> None:
    fanout("put", ws, "-", "f", stdin="1")
    assert parsed(fanout("checkpoint", ws, "base", "--json"))["seq"] == 1
    assert "already" in fanout("checkpoint", ws, "base", code=73).stderr
    assert fanout("checkpoint", ws).stdout.startswith("checkpoint cp-")
    assert len(parsed(fanout("checkpoint", ws, "--list", "--json"))) == 2
    assert "base  commit 1 of main" in fanout("checkpoint", ws, "--list").stdout
    fanout("put", ws, "-", "f", stdin="2")
    assert "use it as ws@old" in fanout("branch", ws, "old", "--checkpoint", "base").stdout
    assert parsed(fanout("branch", ws, "new", "--json"))["branch"] == "new"
    assert fanout("branch", ws).stdout.split() == ["main", "new", "old"]
    assert parsed(fanout("branch", ws, "--json")) == ["main", "new", "old"]
    assert fanout("cat", "ws@old", "f").stdout + fanout("cat", "ws@new", "f").stdout == "12"
    assert "no checkpoint 'nope'" in fanout("branch", ws, "x", "--checkpoint", "nope", code=66).stderr


def test_merge_diff_log(fanout: Cli, ws: str) -> None:
    fanout("put", ws, "-", "f", stdin="base")
    fanout("branch", ws, "side")
    fanout("put", "ws@side", "-", "g", stdin="new")
    assert fanout("diff", ws, "main", "side").stdout == "A g\n"
    assert parsed(fanout("diff", ws, "side", "--json")) == [{"path": "g", "kind": "deleted"}]
    assert fanout("diff", ws, "0", "1").stdout == "A f\n"
    assert "merged side into ws@main: commit 2, 1 path changed" in fanout("merge", ws, "side").stdout
    fanout("put", ws, "-", "f", stdin="ours")
    fanout("put", "ws@side", "-", "f", stdin="theirs")
    refused = fanout("merge", ws, "side", code=75).stderr
    assert "'f'" in refused
    assert "--on-conflict ours" in refused
    fanout("merge", ws, "side", "--on-conflict", "theirs")
    assert fanout("cat", ws, "f").stdout == "theirs"
    lines = fanout("log", ws, "-n", "2").stdout.splitlines()
    assert lines[0].split() == ["commit", "time", "author", "paths", "message"]
    assert [line.split()[0] for line in lines[1:]] == ["4", "3"]
    assert lines[1].endswith("merge side")
    newest = parsed(fanout("log", ws, "-n", "1", "--json"))
    assert [change["path"] for change in newest[0]["changes"]] == ["f"]
    assert "  M f" in fanout("log", ws, "-c").stdout.splitlines()


def test_locks(fanout: Cli, ws: str) -> None:
    assert parsed(fanout("locks", ws, "--json")) == []
    fanout("locks", "nope", code=66)


# -- bad input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["ls", "nope"], 66, "there is no disk 'nope'"),
        (["ls", "ws@nope"], 66, "no branch or checkpoint 'nope'"),
        (["ls", "ws@"], 64, "name@branch or name@checkpoint"),
        (["ls", "@x"], 64, "name@branch or name@checkpoint"),
        (["ls", "ws", "/nope"], 66, "'/nope'"),
        (["ls", "ws", "../x"], 64, "stay inside the disk"),
        (["cat", "ws", "nope"], 66, "no 'nope'"),
        (["cat", "ws", ""], 64, "below the root"),
        (["cat", "Not A Name", "x"], 64, "[a-z0-9]"),
        (["put", "ws", "/nope/nothing", "x"], 66, "on this host"),
        (["put", "ws", os.path.dirname(__file__), "a/../b"], 64, "stay inside the disk"),
        (["disk", "create", "Bad"], 64, "[a-z0-9]"),
        (["disk", "rm", "nope"], 66, "no disk 'nope'"),
        (["merge", "ws", "nope"], 66, "no branch 'nope'"),
        (["merge", "ws", "main", "--on-conflict", "both"], 64, "--on-conflict"),
        (["log", "ws", "-n", "0"], 64, "-n"),
        (["diff", "ws", "nope"], 66, "'nope'"),
        (["checkpoint", "ws", "x", "--list"], 64, "--list"),
        (["branch", "ws", "--checkpoint", "x"], 64, "NAME of the branch"),
        (["exec", "--", ""], 64, "COMMAND is ''"),
        (["exec"], 64, "COMMAND"),
        (["exec", "-d", "nope", "true"], 66, "no disk 'nope'"),
        (["exec", "-d", "ws:rw", "true"], 64, "one of ro, conditional, shared"),
        (["exec", "-d", "=ws", "true"], 64, "NAME=DISK"),
        (["exec", "-d", "a/b=ws", "true"], 64, "a mount's name"),
        (["exec", "-d", "ws", "-d", "ws@main", "true"], 64, "each name once"),
        (["exec", "--cwd", "rel", "true"], 64, "cwd is 'rel'"),
        (["exec", "--timeout", "0", "true"], 64, "timeout_s is 0.0"),
        (["exec", "--timeout", "-1", "true"], 64, "timeout_s is -1.0"),
        (["exec", "--timeout", "86401", "true"], 64, "at most 86400"),
        (["exec", "--timeout", "nan", "true"], 64, "timeout_s"),
        (["exec", "--timeout", "soon", "true"], 64, "--timeout"),
        (["exec", "--env", "NOVALUE", "true"], 64, "NAME=VALUE"),
        (["exec", "--env", "a;b=1", "true"], 64, "'a;b'"),
        (["exec", "--cpus", "0", "true"], 64, "cpus"),
        (["exec", "--stdin", "/nope/file", "true"], 66, "/nope/file"),
        (["exec", "--checkout", "src", "true"], 64, "NAME:PATH"),
        (["exec", "-d", "ws", "-d", "b=ws", "--checkout", "c:src", "true"], 64, "NAME:PATH"),
        (["exec", "-d", "ws:ro", "--checkout", "src", "true"], 64, "checkout"),
        (["exec", "-d", "ws", "--queue-ms", "5", "true"], 64, "--checkout"),
        (["locks", "ws", "--break", "nope"], 66, "nope"),
        (["map", "echo", "a"], 64, "it must say {}"),
        (["map", "echo {}"], 64, "ITEM"),
        (["map", "echo {}", "a", "-n", "0"], 64, "-n"),
        (["demo", "/nope"], 66, "no directory '/nope'"),
        (["demo", "--glob", "x"], 64, "together with DIR"),
        (["demo", "/", "--command", "true"], 64, "{}"),
        (["--store", "ftp://x", "ls", "ws"], 64, "ftp://x"),
        (["--engine", "magic", "exec", "true"], 64, "magic"),
        (["nonsense"], 64, "nonsense"),
        (["ls", "ws", "--nonsense"], 64, "--nonsense"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_one_line_that_helps(fanout: Cli, ws: str, words: list[str], code: int, says: str) -> None:
    result = fanout(*words, code=code)
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("fanout: ")
    assert result.stdout == ""


def test_doctor_reports_a_bad_store_and_goes_on(fanout: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    checks = fanout("--store", f"file://{tmp_path}/file", "doctor", "--json", code=69).stdout
    by_name = {each["check"]: each for each in json.loads(checks)["checks"]}
    assert by_name["store"]["state"] == "bad"
    assert by_name["cache"]["state"] == "ok"
