"""Comparisons of trees are made once per pair, and a fold makes no difference."""

from __future__ import annotations

import pytest

from fanout.disk.state import State
from fanout.view import compare
from fanout.view.compare import Differences
from tests.support.views import Workspace


def test_a_pair_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = Workspace()
    base = workspace.write({b"a": b"1", b"b": b"2"})
    state = workspace.write({b"b": b"3"})
    asked: list[tuple[State, State]] = []
    plain = compare._small_difference

    def counted(base: State, state: State, scope: bytes) -> object:
        asked.append((base, state))
        return plain(base, state, scope)

    monkeypatch.setattr(compare, "_small_difference", counted)
    differences = Differences()
    for _ in range(3):
        found = differences.small(base, state, b"")
        assert found is not None
        assert [each.path for each in found] == [b"b"]
    assert len(asked) == 1
    assert differences.small(state, base, b"") is not None
    assert len(asked) == 2


def test_a_folded_tree_differs_in_nothing() -> None:
    workspace = Workspace()
    before = workspace.write({b"a": b"1", b"d/b": b"2"})
    after = workspace.branch.fold()
    assert before.identity != after.identity
    assert Differences().small(before, after, b"") == []


def test_too_much_for_a_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "_DELTA_PATHS", 3)
    workspace = Workspace()
    base = workspace.write({b"a": b"1"})
    state = workspace.write({b"f%d" % number: b"x" for number in range(4)})
    assert Differences().small(base, state, b"") is None
    assert Differences().small(base, state, b"f1") is not None
