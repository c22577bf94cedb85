"""The public pjdfstest suite on a disk, where FANOUT_PJDFSTEST names a built checkout of it (see pjdfstest.py)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.posix.pjdfstest import PLACES, Result, folder, groups, run, summarise, why_not

#: Fails in an exec and not on its tmpfs: where no device can be made, overlayfs makes a plain file of that name.
ONLY_IN_EXECS = {"mknod/08.t: not ok 19", "mknod/08.t: not ok 24"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def short(result: Result) -> set[str]:
    """Names of failed tests, without what was tried: that holds random names."""
    return {line.partition(" - ")[0] for line in result.failures}


async def check(wanted: Sequence[str]) -> None:
    suite = folder()
    reason = why_not(suite)
    if suite is None or reason:
        pytest.skip(str(reason))
    found = {(place, group): result async for place, group, result in run(suite, wanted or groups(suite), list(PLACES))}
    for place, group in found:
        assert found[place, group].passed, f"{group} did not run"
        assert not found[place, group].missing
    for group in wanted or groups(suite):
        assert found["view", group].failures == [], "the disk itself fails nothing"
        assert short(found["exec", group]) - short(found["tmpfs", group]) <= ONLY_IN_EXECS


@pytest.mark.anyio
async def test_two_groups() -> None:
    await check(["symlink", "mkdir"])


@pytest.mark.anyio
@pytest.mark.soak
async def test_all_groups() -> None:
    await check([])


def test_counting() -> None:
    output = (
        "FILE a/1.t\n1..4\nok 1\nnot ok 2 - tried 'x', expected 0, got EPERM\nnot ok 3 # TODO known\n"
        "FILE a/3.t\n1..1\nok 1\nnoise\n"
    )
    result = summarise(output)
    assert (result.passed, result.failed, result.missing, result.todo) == (2, 1, 1, 1)
    assert result.failures == [
        "a/1.t: not ok 2 - tried 'x', expected 0, got EPERM",
        "a/1.t: 1 of 4 never said anything",
    ]
