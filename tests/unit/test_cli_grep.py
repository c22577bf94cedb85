"""`fanout grep`: what it prints in a pipe and on a terminal, and its exit codes."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fanout.cli.root import cli
from fanout.run.ripgrep import program

Grep = Callable[..., subprocess.CompletedProcess[bytes]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("grep")


@pytest.fixture(scope="module")
def environ(place: Path) -> dict[str, str]:
    own = {key: value for key, value in os.environ.items() if not key.startswith("FANOUT_")}
    return own | {"FANOUT_STORE": f"file://{place}/store", "FANOUT_CACHE_DIR": f"{place}/cache", "TERM": "xterm"}


@pytest.fixture(scope="module")
def ws(environ: dict[str, str], place: Path) -> str:
    """A disk that no test changes; `place / "tree"` holds the same."""
    tree = place / "tree"
    (tree / "d").mkdir(parents=True)
    (tree / "a.txt").write_bytes(b"one\ntwo \tTODO x TODO\nthree\nfour\nfive\nTODO six\n")
    (tree / "d" / "b.py").write_bytes(b"\xff TODO\r\n")
    (tree / "d" / "bad\x1b[31m").write_bytes(b"TODO \x1b[2J\n")
    (tree / "d" / "{a,*}").write_bytes(b"TODO\n")
    (tree / "slow").write_bytes(b"b" * 40 + b"!\n")
    (tree / "bin").write_bytes(b"\0TODO")
    for words in (("disk", "create", "ws"), ("put", "ws", str(tree), "/")):
        assert run(environ, *words).returncode == 0
    return "ws"


def run(environ: dict[str, str], *words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", "fanout", *words], env=environ, capture_output=True, timeout=120)


@pytest.fixture
def inside(
    environ: dict[str, str], ws: str, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> Grep:
    """Run `fanout grep` on the disk in this process."""
    for name in ("FANOUT_STORE", "FANOUT_CACHE_DIR"):
        monkeypatch.setenv(name, environ[name])

    def grep(*words: str) -> subprocess.CompletedProcess[bytes]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["grep", ws, *words])
        said = capfdbinary.readouterr()
        assert isinstance(ended.value.code, int)
        return subprocess.CompletedProcess(words, ended.value.code, said.out, said.err)

    return grep


def on_terminal(environ: dict[str, str], *words: str) -> str:
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "fanout", *words], env=environ, stdin=slave, stdout=slave, stderr=subprocess.DEVNULL
    )
    os.close(slave)
    said = b""
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:
            break
        if not chunk:
            break
        said += chunk
    os.close(master)
    process.wait()
    return said.decode().replace("\r\n", "\n")


def test_in_a_pipe(environ: dict[str, str], ws: str) -> None:
    found = run(environ, "grep", ws, "TODO")
    assert found.returncode == 0
    assert found.stdout == (
        b"a.txt:2:two \tTODO x TODO\na.txt:6:TODO six\nd/b.py:1:\xff TODO\r\nd/bad\x1b[31m:1:TODO \x1b[2J\n"
        b"d/{a,*}:1:TODO\n"
    )
    assert found.stderr == b"fanout: bin: binary file matches\n"


def test_context_counts_names_and_bounds(inside: Grep) -> None:
    found = inside("TODO", "-C", "1", "-g", "*.txt")
    assert found.stdout == (
        b"a.txt-1-one\na.txt:2:two \tTODO x TODO\na.txt-3-three\n--\na.txt-5-five\na.txt:6:TODO six\n"
    )
    assert inside("-c", "TODO", "-g", "!d").stdout == b"a.txt:2\n"
    assert inside("-l", "todo", "/d", "-i", "-g", "*.py").stdout == b"d/b.py\n"
    assert inside("-q", "TODO").stdout == b""
    bounded = inside("TODO", "-n", "1")
    assert bounded.stdout == b"a.txt:2:two \tTODO x TODO\n"
    assert b"stopped after 1 results" in bounded.stderr
    document = json.loads(inside("six", "--json").stdout)
    assert [(m["file"], m["line"], m["text"]) for m in document["matches"]] == [("a.txt", 6, "TODO six")]


def said_by_ripgrep(top: Path, *words: str) -> bytes:
    options = ["--no-config", "-uu", "--sort=path", "--no-heading", "--color=never"]
    return subprocess.run([program().path, *options, *words], cwd=top, capture_output=True, timeout=60).stdout


@pytest.mark.parametrize(
    "words",
    [
        ["-S", "todo"], ["-S", "Todo"], ["-is", "todo"], ["-e", "six", "-e", "three"], ["-x", "three|fiv"],
        ["-xF", "TODO six"], ["-F", "-e", "O s", "-e", "O x"], ["-e", "-x"], ["-o", "TO."], ["-o", r"\w*"],
        ["-N", "six"], ["-I", "TODO"], ["-I", "-c", "TODO"], ["-0", "TODO"], ["-0l", "TODO"], ["-0c", "TODO"],
        ["--hidden", "six"],
        ["-A1", "TODO"], ["--before-context", "1", "TODO"], ["-C1", "TODO", "-A0"], ["TODO", "a.txt"],
        ["TODO", "./d/b.py"], ["-c", "TODO", "a.txt"], ["-H", "TODO", "a.txt"], ["TODO", "d", "a.txt"],
        ["-C1", "TODO", "a.txt"], ["TODO", "d/{a,*}"], ["zzz", "a.txt"], ["-g", "!a.txt", "TODO", "d"],
    ],
)  # fmt: skip
def test_as_ripgrep_prints_it(inside: Grep, place: Path, words: list[str]) -> None:
    numbers = [] if "-N" in words else ["-n"]
    wanted = [
        line
        for line in said_by_ripgrep(place / "tree", *numbers, *words).splitlines(keepends=True)
        if b"binary file matches" not in line
    ]
    found = inside(*words)
    assert found.stdout == b"".join(wanted).replace(b"./", b"")
    assert found.returncode == (0 if wanted else 1)


def test_several_paths_share_the_bounds(inside: Grep) -> None:
    found = inside("TODO", "-n", "2", "a.txt", "d")
    assert found.stdout.count(b"\n") == 2
    assert b"stopped after 2 results" in found.stderr
    assert inside("three|six", "-n", "2", "a.txt", "d").stderr == b""
    assert inside("TODO", "a.txt", "nope").returncode == 66
    document = json.loads(inside("TODO", "d", "a.txt", "--json").stdout)
    assert [m["file"] for m in document["matches"]][-2:] == ["a.txt", "a.txt"]


def test_long_lines_say_that_they_were_cut(inside: Grep) -> None:
    found = inside("TODO", "a.txt", "-M", "5")
    assert found.stdout == b"2:two \t\n6:TODO \n"
    assert b"2 of the lines were cut to 5 bytes" in found.stderr


def test_exit_codes(inside: Grep) -> None:
    for code, words in (
        (1, ["absent"]),
        (0, ["-F", "--", "TODO s"]),
        (64, ["(a"]),
        (64, ["-F", "-P", "a"]),
        (64, ["a", "-n", "0"]),
        (64, ["-n", "TODO"]),
        (64, ["-i"]),
        (64, ["a", "../a"]),
        (0, ["-q", "TODO"]),
        (1, ["-q", "absent"]),
        (65, ["-P", "^(b+)+$"]),
        (0, ["-P", "^(b+)+$|six"]),
        (66, ["a", "/nope"]),
        (0, ["-E", r"\<six\>"]),
    ):
        found = inside(*words)
        assert found.returncode == code, (words, found)
        if code >= 64:
            assert found.stderr.count(b"\n") == 1


def test_on_a_terminal(environ: dict[str, str], ws: str) -> None:
    said = on_terminal(environ, "grep", ws, "TODO", "-B1")
    match = "\x1b[1m\x1b[31mTODO\x1b[0m"
    assert said.startswith(
        f"\x1b[35ma.txt\x1b[0m\n\x1b[32m1\x1b[0m-one\n\x1b[32m2\x1b[0m:two \t{match} x {match}\n--\n"
    )
    assert f"\n\n\x1b[35md/b.py\x1b[0m\n\x1b[32m1\x1b[0m:\\xff {match}\n" in said
    assert "\x1b[2J" not in said  # what files hold is never acted upon
    assert "bad\\x1b[31m" in said
    assert "\x1b" not in on_terminal(environ, "grep", ws, "six", "--color", "never")
    assert "\x1b" not in on_terminal({**environ, "NO_COLOR": "1"}, "grep", ws, "six")
    assert on_terminal(environ, "grep", ws, "six", "--no-heading", "--color=never") == "a.txt:6:TODO six\n"
    assert on_terminal(environ, "grep", ws, "TODO s", "a.txt") == "\x1b[32m6\x1b[0m:\x1b[1m\x1b[31mTODO s\x1b[0mix\n"
    pretty = run(environ, "grep", ws, "-p", "-o", "T.D", "a.txt", "d/b.py").stdout
    assert pretty.startswith(b"\x1b[35ma.txt\x1b[0m\n\x1b[32m2\x1b[0m:\x1b[1m\x1b[31mTOD\x1b[0m\n\x1b[32m2\x1b[0m:")
