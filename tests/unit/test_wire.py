"""The native API's language: what is said is what is understood, errors included, and damage is noticed."""

from __future__ import annotations

import inspect
import os
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fanout import errors, wire
from fanout.errors import (
    Busy,
    CommandFailed,
    Conflict,
    Corrupt,
    Denied,
    FanoutError,
    Invalid,
    NotFound,
    Unavailable,
)
from fanout.format.tree import DIR, FILE, Node, Ref
from fanout.model import Change, Commit, Finished, Mount, Output, Run, RunCommit, Started, Timing, Usage

TIMING = Timing(
    queue_ms=1.5, wait_ms=0.1, lock_ms=0.0, mount_ms=1.0, start_ms=0.4, execute_ms=3.25, commit_ms=2.0, total_ms=7.0
)
CONFLICT = Conflict(["a/b", "\udcff"], "rescue/ex-1", "ws")
NAMES = st.binary(max_size=20).map(os.fsdecode)


def run_of(stdout: bytes = b"out", stderr: bytes = b"\xff", **fields: Any) -> Run:
    return Run(
        id="ex-1",
        command="echo \udcff",
        status="completed",
        exit_code=3,
        stdout_bytes=stdout,
        stderr_bytes=stderr,
        stdout_truncated=False,
        stderr_truncated=True,
        stdout_total=len(stdout),
        stderr_total=5 << 30,
        timing=TIMING,
        usage=Usage(cpu_s=0.25, max_rss_bytes=1 << 40),
        engine="bubblewrap",
        host="h",
        warm=True,
        commits={
            "w": RunCommit(base_seq=3, seq=4, changes=(Change(path="\udcfe", kind="added"),), skipped=("s",)),
            "v": RunCommit(base_seq=1, conflict=CONFLICT),
        },
        conflict=CONFLICT,
        **fields,
    )


def over(value: object) -> Any:
    """Send something over the wire."""
    return wire.json_of(wire.json_bytes(value))


# -- errors ----------------------------------------------------------------------------------------------------------

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, FanoutError)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.code)
def test_errors_come_back_as_they_were(kind: type[FanoutError]) -> None:
    if kind is Conflict:
        error: FanoutError = CONFLICT
    elif kind is CommandFailed:
        error = CommandFailed("it failed", run_of())
    else:
        error = kind("what happened to 'ä\udcff'")
    error.add_note("and a note")
    status = errors.meaning(error).http
    back = wire.error_of(over(wire.error_fields(error)), status)
    assert type(back) is kind
    assert (str(back), back.code, back.__notes__) == (str(error), error.code, ["and a note"])
    if isinstance(back, Conflict):
        assert (back.paths, back.rescue_branch, back.disk) == (("a/b", "\udcff"), "rescue/ex-1", "ws")
    if isinstance(back, CommandFailed):
        assert back.run == run_of()


def test_an_error_brings_its_run() -> None:
    error = Unavailable("the store is away")
    error.run = run_of()  # type: ignore[attr-defined]
    assert wire.error_of(over(wire.error_fields(error)), 503).run == run_of()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, Invalid), (401, Denied), (403, Denied), (404, NotFound), (429, Busy), (502, Unavailable), (503, Unavailable),
     (599, Unavailable), (418, Invalid), (500, FanoutError)],
)  # fmt: skip
def test_codes_nobody_knows_are_what_their_status_says(status: int, kind: type[FanoutError]) -> None:
    back = wire.error_of({"success": False, "error": "new", "code": "of_the_future"}, status)
    assert type(back) is kind
    assert str(back) == "new"
    assert str(status) in str(wire.error_of({}, status))


# -- execs -----------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=50), st.binary(max_size=50))
def test_runs(stdout: bytes, stderr: bytes) -> None:
    run = run_of(stdout, stderr)
    assert wire.run_of(over(wire.run_fields(run))) == run


@given(st.sampled_from(["stdout", "stderr"]), st.binary(max_size=50), st.text(max_size=50))
def test_outputs(stream: Any, data: bytes, text: str) -> None:
    """The text is not the chunk's: it holds what was left of the one before, and not what is not whole yet."""
    output = Output(stream=stream, data=data, text=text)
    assert wire.event_of(over(wire.event_fields(output))) == output


def test_other_events() -> None:
    for event in (Started(id="ex-1", queue_ms=1.25), Finished(run=run_of())):
        assert wire.event_of(over(wire.event_fields(event))) == event
    with pytest.raises(Conflict):
        wire.event_of(over(wire.error_fields(CONFLICT)))


@given(st.binary(max_size=100), NAMES.filter(lambda name: "\0" not in name))
def test_exec_calls(stdin: bytes, path: str) -> None:
    mounts = {"w": Mount(disk="dsk-1", branch="main", mode="shared", checkout=(path,), queue_ms=2.5, at=7)}
    options = {"cwd": f"/mnt/{path}", "env": {"K": path}, "stdin": stdin, "timeout_s": 2.5, "network": True,
               "commit": "never", "cpus": 0.5, "memory_mib": 100}  # fmt: skip
    command, back, given_options = wire.exec_call(over(wire.exec_fields("true", mounts, options)))
    assert (command, back, given_options) == ("true", mounts, options)


def test_much_input_is_sent_as_bytes() -> None:
    fields = wire.exec_fields("cat", {}, {"stdin": b"\1" * 100_000})
    assert len(wire.json_bytes(fields)) < 140_000
    assert wire.exec_call(over(fields))[2]["stdin"] == b"\1" * 100_000


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "command"),
        ({"command": "x", "colour": 1}, "colour: there is no such field"),
        ({"command": "x", "disks": {"w": {"disk": "d"}}}, "disks.w"),
        ({"command": "x", "disks": 5}, "disks"),
        ({"command": "x", "stdin": "a", "stdinBase64": "YQ=="}, "one of them"),
        ({"command": "x", "stdinBase64": "!"}, "no base64"),
        ({"command": "x", "commit": "perhaps"}, "commit"),
        ([], "body"),
        (None, "body"),
    ],
)
def test_bodies_that_are_no_exec(body: object, says: str) -> None:
    with pytest.raises(Invalid, match=says):
        wire.exec_call(body)


def test_values() -> None:
    commit = Commit(
        seq=3, time=datetime(2026, 1, 2, 3, 4, 5, 6, UTC), author="ä", message="\udcff", exec_id=None, base_seq=2,
        changes=(Change(path="\udcff\n", kind="modified"),),
    )  # fmt: skip
    assert wire.value_of(Commit, over(wire.plain(commit))) == commit


def test_what_only_a_newer_server_says_is_passed_over() -> None:
    fields = over(wire.run_fields(run_of()))
    fields |= {"colour": "red"}
    fields["timing"]["newMs"] = 5
    fields["commits"]["w"]["changes"][0]["size"] = 1
    fields["commits"]["w"]["more"] = [1]
    assert wire.run_of(fields) == run_of()
    with pytest.raises(Corrupt, match="no Handle"):
        wire.heard(wire.Handle, {"id": 5, "colour": "red"})


# -- queries ---------------------------------------------------------------------------------------------------------


@given(st.dictionaries(st.sampled_from(["key", "line", "prefix"]), NAMES))
def test_queries(values: dict[str, str]) -> None:
    text = wire.query(values)
    assert text.isascii()
    assert wire.parse_query(text.removeprefix("?").encode(), ["key", "line", "prefix"]) == values


def test_queries_that_are_none() -> None:
    assert wire.query({"a": None}) == ""
    assert wire.query({"a": True, "b": 5}) == "?a=true&b=5"
    with pytest.raises(Invalid, match="colour"):
        wire.parse_query(b"colour=red", ["key"])
    with pytest.raises(Invalid, match="twice"):
        wire.parse_query(b"key=a&key=b", ["key"])


# -- trees -----------------------------------------------------------------------------------------------------------

NODES = (
    (b"d\xff", Node(DIR, 0o755, -5)),
    (b"d\xff/f", Node(FILE, 0o644, 1, 3, (Ref(b"p" * 16, 4, 3, 3, b"h" * 32, 1, 2),), xattrs=((b"user.a", b"\0"),))),
)


@given(st.integers(1, 40), st.booleans())
def test_frames_in_pieces(size: int, beats: bool) -> None:
    said: list[tuple[Any, bytes]] = [(b"H", wire.encode_header(wire.Header(7, b"d", NODES[0][1])))]
    said += [(b"B", b"p" * 16 + b"data"), (b"N", wire.encode_nodes(NODES)), (b"N", b""), (b"E", b"")]
    stream = (wire.BEAT if beats else b"").join(wire.frame(kind, payload) for kind, payload in said) + wire.BEAT * 3
    frames = wire.Frames("here")
    heard = [f for at in range(0, len(stream), size) for f in frames.feed(stream[at : at + size])]
    assert heard == said
    assert wire.decode_nodes(heard[2][1], "here") == NODES
    assert wire.decode_header(heard[0][1], "here") == wire.Header(7, b"d", NODES[0][1])


def test_batches_fit_into_frames() -> None:
    ref = Ref(b"p" * 16, 1 << 40, 1 << 22, 1 << 22, b"h" * 32)
    small = [(b"%06d" % i, Node(FILE, 0o644, 1)) for i in range(3000)]
    large = [(b"x%06d" % i, Node(FILE, 0o644, 1, 700 << 22, (ref,) * 700)) for i in range(20)]
    found = list(wire.batches(small + large))
    assert [item for batch in found for item in batch] == small + large
    assert max(len(wire.encode_nodes(batch)) for batch in found) < 1 << 20
    assert len(found) < 20
    huge = Node(FILE, 0o644, 1, 1 << 42, (ref,) * (1 << 20))
    assert len(wire.encode_nodes([(b"f", huge)])) < 1.2 * wire.MAX_FRAME_BYTES
    assert list(wire.batches([])) == []


def test_what_is_no_frame() -> None:
    for data in (b"Z\0\0\0\0", b"N\xff\xff\xff\xff", b"<html>"):
        with pytest.raises(Corrupt, match="here"):
            list(wire.Frames("here").feed(data))
    with pytest.raises(Corrupt, match="here"):
        wire.decode_nodes(b"\xc1", "here")
    with pytest.raises(Corrupt, match="here"):
        wire.decode_nodes(wire.encode_paths([b"a"]), "here")
    assert wire.decode_paths(wire.encode_paths([b"a", b"\xff"]), "here") == (b"a", b"\xff")


@given(st.binary(max_size=60))
def test_noise(data: bytes) -> None:
    """Whatever arrives, the only errors are ours."""
    for hear in (
        lambda: list(wire.Frames("x").feed(data)),
        lambda: wire.decode_nodes(data, "x"),
        lambda: wire.decode_header(data, "x"),
        lambda: wire.decode_looking(data, "x"),
        lambda: wire.exec_call(wire.json_of(data)),
        lambda: wire.parse_query(data, ["a"]),
    ):
        try:
            hear()
        except (Corrupt, Invalid):
            pass
