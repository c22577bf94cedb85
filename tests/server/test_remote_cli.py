"""The command line against a server: each command once, and what is told where the server is not there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from fanout.cli.root import cli
from tests.support.serving import Running

Cli = Callable[..., str]


@pytest.fixture
def far(server: Running, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run a command against the server and return its output; `code` is the exit code it must have."""
    monkeypatch.setenv("FANOUT_API_KEY", server.token)
    runner = CliRunner()

    def run(*words: str, code: int = 0, stdin: bytes = b"") -> str:
        result = runner.invoke(cli, ["--url", server.url, *words], input=stdin)
        assert result.exit_code == code, f"{words}: {result.exit_code}\n{result.output}\n{result.exception!r}"
        assert server.token not in result.output
        return result.output

    return run


def test_every_command(far: Cli, server: Running, disk_name: str, tmp_path: Path) -> None:
    ws = disk_name
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "a.txt").write_text("alpha\nbeta\n")
    (tree / "sub" / "b").write_bytes(b"\0\xff")
    assert ws in far("disk", "create", ws)
    assert ws in far("disk", "ls")
    far("put", ws, str(tree), "/t")
    far("put", ws, "-", "/in", stdin=b"from\0stdin")
    assert far("cat", ws, "in") == "from\0stdin"
    assert far("ls", ws, "-R").split() == ["in", "t/", "t/a.txt", "t/sub/", "t/sub/b"]
    far("get", ws, "/t", str(tmp_path / "back"))
    assert (tmp_path / "back" / "sub" / "b").read_bytes() == b"\0\xff"
    far("mv", ws, "/in", "/moved")
    assert "base" in far("checkpoint", ws, "base")
    assert far("exec", "-d", ws, "--", "cat t/a.txt; echo 1 > n; exit 3", code=3) == "alpha\nbeta\n"
    assert json.loads(far("exec", "-d", ws, "--json", "--", "echo hi"))["stdout"] == "hi\n"
    assert "3 execs" in far("map", "-n", "2", "-d", f"{ws}:conditional", "echo {} > {}.o", "a", "b", "c")
    far("branch", ws, "side", "--checkpoint", "base")
    far("exec", "-d", f"{ws}@side", "--", "echo 2 > m")
    far("merge", ws, "side")
    log = json.loads(far("log", ws, "--json"))
    assert [commit["message"] for commit in log[:1]] == ["merge side"]
    assert {line[0] for line in far("diff", ws, "base", "main").splitlines()} == {"A"}
    assert far("locks", ws) == ""
    assert "kept" in far("gc", ws, "-n")
    assert "no damage" in far("fsck", ws)
    assert far("grep", ws, "alph") == "t/a.txt:1:alpha\n"
    assert far("grep", ws, "-o", "l.h|ta", "t/a.txt", "t") == "t/a.txt:1:lph\nt/a.txt:2:ta\n" * 2
    assert far("grep", ws, "alph", "t/a.txt") == "1:alpha\n"
    assert json.loads(far("disk", "info", ws, "--json"))["branches"] == ["main", "side"]
    far("rm", ws, "-r", "t")
    assert "t" not in far("ls", ws).split()
    doctor = json.loads(far("doctor", "--json"))
    assert doctor["ok"]
    assert [check["check"] for check in doctor["checks"]] == ["host", "server"]
    far("disk", "rm", "-y", ws)
    far("ls", ws, code=66)


def test_no_server(far: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = CliRunner()
    result = runner.invoke(cli, ["--url", "http://127.0.0.1:1", "disk", "ls"])
    assert result.exit_code == 69
    assert "http://127.0.0.1:1" in result.output
    assert runner.invoke(cli, ["--url", "http://127.0.0.1:1", "doctor"]).exit_code == 69
    monkeypatch.setenv("FANOUT_API_KEY", "key-wrong")
    far("disk", "ls", code=77)
    assert runner.invoke(cli, ["--url", "ftp://x", "disk", "ls"]).exit_code == 64


def test_a_store_that_is_asked_for_goes_before_the_environment(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FANOUT_URL", server.url)
    monkeypatch.setenv("FANOUT_API_KEY", server.token)
    runner = CliRunner()
    here = ["--store", f"file://{tmp_path}/store", "--cache-dir", str(tmp_path / "cache")]
    assert json.loads(runner.invoke(cli, [*here, "disk", "ls", "--json"]).output) == []
    both = runner.invoke(cli, ["--url", server.url, *here, "disk", "ls"])
    assert both.exit_code == 64
    assert "store" in both.output
