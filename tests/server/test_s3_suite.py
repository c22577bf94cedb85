"""The public ceph/s3-tests suite on the gateway, where FANOUT_S3_TESTS names a checkout of it (see s3_tests.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.s3_tests import all_names, applying, exclusions, folder, outcomes, reason_of, why_not

#: Every so many of the list: enough to see that nothing is broken at large.
_STEP = 15


def suite() -> Path:
    found = folder()
    reason = why_not(found)
    if found is None or reason:
        pytest.skip(str(reason))
    return found


def check(names: list[str]) -> None:
    found = outcomes(suite(), names)
    assert {name: outcome for name, outcome in found.items() if outcome.kind != "passed"} == {}
    assert found.keys() == set(names)


def test_some() -> None:
    check(applying()[::_STEP])


@pytest.mark.soak
def test_all_that_apply() -> None:
    check(applying())


def test_every_test_applies_or_has_a_reason() -> None:
    must, rules = set(applying()), exclusions()
    names = all_names(suite())
    assert [name for name in names if name not in must and reason_of(name, rules) is None] == []
    assert must <= set(names)


def test_the_lists_are_in_order() -> None:
    assert len(set(applying())) == len(applying())
    assert all(rule.reason for rule in exclusions())
