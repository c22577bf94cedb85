"""`fanout grep`: what it prints in a pipe and on a terminal, and its exit codes."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    own = {key: value for key, value in os.environ.items() if not key.startswith("FANOUT_")}
    return own | {"FANOUT_STORE": f"file://{tmp_path}/store", "FANOUT_CACHE_DIR": f"{tmp_path}/cache", "TERM": "xterm"}


@pytest.fixture
def ws(environ: dict[str, str], tmp_path: Path) -> str:
    tree = tmp_path / "tree"
    (tree / "d").mkdir(parents=True)
    (tree / "a.txt").write_bytes(b"one\ntwo \tTODO x TODO\nthree\nfour\nfive\nTODO six\n")
    (tree / "d" / "b.py").write_bytes(b"\xff TODO\r\n")
    (tree / "d" / "bad\x1b[31m").write_bytes(b"TODO \x1b[2J\n")
    (tree / "bin").write_bytes(b"\0TODO")
    for words in (("disk", "create", "ws"), ("put", "ws", str(tree), "/")):
        assert run(environ, *words).returncode == 0
    return "ws"


def run(environ: dict[str, str], *words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", "fanout", *words], env=environ, capture_output=True, timeout=120)


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
    )
    assert found.stderr == b"fanout: bin: binary file matches\n"


def test_context_counts_names_and_bounds(environ: dict[str, str], ws: str) -> None:
    found = run(environ, "grep", ws, "TODO", "-C", "1", "-g", "*.txt")
    assert found.stdout == (
        b"a.txt-1-one\na.txt:2:two \tTODO x TODO\na.txt-3-three\n--\na.txt-5-five\na.txt:6:TODO six\n"
    )
    assert run(environ, "grep", ws, "-c", "TODO", "-g", "!d").stdout == b"a.txt:2\n"
    assert run(environ, "grep", ws, "-l", "todo", "/d", "-i", "-g", "*.py").stdout == b"d/b.py\n"
    bounded = run(environ, "grep", ws, "TODO", "-n", "1")
    assert bounded.stdout == b"a.txt:2:two \tTODO x TODO\n"
    assert b"stopped after 1 results" in bounded.stderr
    document = json.loads(run(environ, "grep", ws, "six", "--json").stdout)
    assert [(m["file"], m["line"], m["text"]) for m in document["matches"]] == [("a.txt", 6, "TODO six")]


def test_exit_codes(environ: dict[str, str], ws: str) -> None:
    for code, words in (
        (1, ["absent"]),
        (0, ["-F", "--", "TODO s"]),
        (64, ["(a"]),
        (64, ["-F", "-P", "a"]),
        (64, ["a", "-n", "0"]),
        (66, ["a", "/nope"]),
        (0, ["-E", r"\<six\>"]),
    ):
        found = run(environ, "grep", ws, *words)
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
