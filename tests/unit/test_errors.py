"""The error tree: one table, total; errors survive pickling; messages are bounded."""

from __future__ import annotations

import copy
import pickle

import pytest

import fanout
from fanout import errors
from fanout.errors import TABLE, Conflict, FanoutError, Invalid, meaning


def test_the_table_is_total_and_apart_from_commands_own_codes() -> None:
    for code, row in TABLE.items():
        assert 400 <= row.http <= 599, code
        assert row.exit >= 64 or code == "command_failed"
    retried = {code for code, row in TABLE.items() if row.retry}
    assert retried == {"busy", "unavailable"}, "everything else would fail again, or may have happened"


def test_meaning_of_anything() -> None:
    assert meaning(fanout.NotFound("x")).http == 404
    assert meaning(ValueError("x")) == TABLE["internal"]


def test_conflict_is_a_value() -> None:
    conflict = Conflict(["a", "b"], "rescue/ex-1", "ws")
    assert conflict == Conflict(("a", "b"), "rescue/ex-1", "ws")
    assert conflict != Conflict(["a"], "rescue/ex-1", "ws")
    assert len({conflict, Conflict(["a", "b"], "rescue/ex-1", "ws")}) == 1
    for again in (pickle.loads(pickle.dumps(conflict)), copy.deepcopy(conflict)):
        assert again == conflict
        assert (again.paths, again.rescue_branch, again.disk) == (("a", "b"), "rescue/ex-1", "ws")
    assert "2 conflicting path(s) on disk 'ws'" in str(conflict)
    assert "rescue/ex-1" in str(conflict)


def test_a_conflict_of_many_paths_has_a_short_message() -> None:
    conflict = Conflict([f"p{i}" for i in range(10_000)])
    assert len(conflict.paths) == 10_000
    assert len(str(conflict)) < 200


@pytest.mark.parametrize("value", ["x" * 10_000, b"\xff" * 10_000, ["a"] * 10_000])
def test_invalid_shows_a_bounded_value(value: object) -> None:
    assert len(str(Invalid.argument("name", value, "allowed"))) < 250


def test_every_error_is_exported_and_pickles() -> None:
    for name in errors.__all__:
        thing = getattr(errors, name)
        if isinstance(thing, type) and issubclass(thing, FanoutError) and thing not in (FanoutError, Conflict):
            assert getattr(fanout, name) is thing
            assert str(pickle.loads(pickle.dumps(thing("message")))) == "message"
