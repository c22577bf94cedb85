"""The pure parts of the command line: what is parsed, what is shown, what the demo picks."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from fanout.cli import demo_source, render, spec
from fanout.errors import Invalid, NotFound


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ws", spec.MountSpec(None, spec.DiskSpec("ws"), None)),
        ("ws:ro", spec.MountSpec(None, spec.DiskSpec("ws"), "ro")),
        ("w=ws@side:conditional", spec.MountSpec("w", spec.DiskSpec("ws", "side"), "conditional")),
        ("w=ws@rescue/ex-1:shared", spec.MountSpec("w", spec.DiskSpec("ws", "rescue/ex-1"), "shared")),
    ],
)
def test_mounts(text: str, expected: spec.MountSpec) -> None:
    assert spec.parse_mount(text) == expected


@pytest.mark.parametrize("text", ["", "=ws", "w=", "ws:", "ws:rw", "ws@", "@x", ":ro", "w=ws:RO"])
def test_bad_mounts(text: str) -> None:
    with pytest.raises(Invalid):
        spec.parse_mount(text)


def test_environment() -> None:
    assert spec.environment(["A=1", "B=x=y", "C=", "A=2"]) == {"A": "2", "B": "x=y", "C": ""}
    for bad in ("A", "=1", ""):
        with pytest.raises(Invalid, match="NAME=VALUE"):
            spec.environment([bad])


def test_checkouts() -> None:
    assert spec.split_checkouts(["a", "w:b", "x:c"], ["w"]) == {"w": ["a", "b", "x:c"]}
    assert spec.split_checkouts(["w:b", "v:c"], ["w", "v"]) == {"w": ["b"], "v": ["c"]}
    assert spec.split_checkouts([], []) == {}


def test_command_line() -> None:
    assert spec.command_line(("cd a && b",)) == "cd a && b"
    assert spec.command_line(("echo", "a b", "$x")) == "echo 'a b' '$x'"
    with pytest.raises(Invalid):
        spec.command_line((" \n",))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ☕ name", "plain ☕ name"),
        ("a\nb\tc\rd", "a\\nb\\tc\\rd"),
        ("\x1b[2J\x00\x7f\x9b", "\\x1b[2J\\x00\\x7f\\x9b"),
        ("\udcff\udc80", "\\xff\\x80"),
        ("\ud800", "\\ud800"),
        ("\u202ecod.exe\u2069", "\\u202ecod.exe\\u2069"),
        ("\u2028", "\\u2028"),
    ],
)
def test_nothing_reaches_the_terminal_unescaped(text: str, shown: str) -> None:
    assert render.safe(text) == shown
    assert render.safe(shown) == shown


def test_two_names_are_never_shown_alike() -> None:
    assert render.name("a\\x1b") == "a\\\\x1b" != render.name("a\x1b")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (99 << 10, "99.0 KiB"),
        (1023 << 10, "1.0 MiB"),
        (20 << 30, "20.0 GiB"),
        (500 << 20, "500 MiB"),
        (5000 << 50, "5000 PiB"),
    ],
)
def test_sizes(value: int, shown: str) -> None:
    assert render.size(value) == shown


def test_times() -> None:
    assert [render.milliseconds(value) for value in (0.04, 9.94, 9.96, 12345.6)] == ["0.0", "9.9", "10", "12,346"]
    assert render.utc(datetime(2026, 1, 2, 3, 4, 5, 600000, UTC)) == "2026-01-02T03:04:05.600000Z"
    assert render.count(1, "entry", "entries") + render.count(2000, "entry", "entries") == "1 entry2,000 entries"


def test_tables_are_cut_where_it_hurts_least() -> None:
    rows = [("a" * 50, "1", "r" * 60), ("漢" * 25, "12,345", "short")]
    whole = render.table(("branch", "ms>", "result"), rows, flexible="result")
    assert whole[1] == f"{'a' * 50}       1  {'r' * 60}"
    cut = render.table(("branch", "ms>", "result"), rows, flexible="result", width=80)
    assert cut == [
        f"branch{' ' * 44}      ms  result",
        f"{'a' * 50}       1  {'r' * 19}…",
        f"{'漢' * 25}  12,345  short",
    ]
    narrow = render.table(("branch", "ms>", "result"), rows, flexible="result", width=50)
    assert narrow[1:] == [f"{'a' * 19}…       1  {'r' * 19}…", f"{'漢' * 9} …  12,345  short"]
    assert render.table(("a", "b"), []) == ["a  b"]


def test_json_of_many_values_is_one_array(capsys: pytest.CaptureFixture[str]) -> None:
    import json
    from collections.abc import AsyncIterator

    import anyio

    async def values(number: int) -> AsyncIterator[str]:
        for index in range(number):
            yield f"\udcff{index}"

    for number in range(3):
        anyio.run(render.json_stream, values(number))
        assert json.loads(capsys.readouterr().out) == [f"\udcff{index}" for index in range(number)]


def test_demo_finds_test_files(tmp_path: Path) -> None:
    for name in ("test_a.py", "sub/b_test.py", ".git/test_c.py", "env/pyvenv.cfg", "env/test_d.py", "build/test_e.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert demo_source.find_files(tmp_path, demo_source.TEST_GLOBS) == ["sub/b_test.py", "test_a.py"]
    with pytest.raises(Invalid, match="--command"):
        demo_source.find_files(tmp_path, ["*.rb"])
    with pytest.raises(NotFound):
        demo_source.find_files(tmp_path / "nope", ["*"])


def test_every_pin_is_whole() -> None:
    for pin in (demo_source.PROJECT, *demo_source._DEPENDENCIES, demo_source._BACKEND):
        assert len(bytes.fromhex(pin.sha256)) == 32
        assert pin.requirement() == f"{pin.package}=={pin.version} --hash=sha256:{pin.sha256}"
