"""The smallest forms of the benchmarks of scale, cold starts and storms, and that they notice what is not there."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from benchmarks import cold_start, commit_storm, scale
from benchmarks.__main__ import run_one
from benchmarks.harness import Report, Skip


@pytest.fixture(autouse=True)
def without_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FANOUT_TEST_S3_ENDPOINT", raising=False)


def smallest(name: str, place: Path) -> Report:
    report = anyio.run(run_one, name, "smallest", place)
    assert os.listdir(place) == []
    return report


def labels(report: Report) -> Iterator[str]:
    yield from (target.label for target in report.targets)


def test_cold_start_runs_on_a_local_store_and_says_so(tmp_path: Path) -> None:
    report = smallest("cold_start", tmp_path)
    assert {"cat: fanout / tar", "grep: fanout / tar", "cat: CPU time of fanout / tar"} == set(labels(report))
    assert report.met, "without a server there is no target"
    assert any("local store instead" in line for line in report.skipped)


def test_scale_measures_every_operation_of_every_size(tmp_path: Path) -> None:
    report = smallest("scale", tmp_path)
    wanted = {f"{name}: 150 / 50 files" for name in ("open", "stat", "list", "commit", "branch")}
    assert wanted <= set(labels(report))
    memory = [target for target in report.targets if "peak memory" in target.label]
    assert len(memory) == 4
    assert all(10 < target.value < scale.MEMORY_LIMIT_MB for target in memory)


def test_a_storm_finds_every_file_and_counts_its_entries(tmp_path: Path) -> None:
    report = smallest("commit_storm", tmp_path)
    per_entry = {target.label: target.value for target in report.targets if "commits an entry" in target.label}
    assert set(per_entry) == {
        "1 process, local store: commits an entry",
        "4 processes, local store: commits an entry",
        "3 execs, local store: commits an entry",
    }
    assert all(value >= 1 for value in per_entry.values())


def test_a_storm_that_lost_a_file_is_an_error(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    took, entries = commit_storm._processes(store, "", tmp_path, "few", 3, 1)
    assert took > 0
    assert 1 <= entries <= 3
    with pytest.raises(RuntimeError, match="3 of 4 files"):
        anyio.run(commit_storm._entries, store, "", tmp_path, "few", 4)


def test_the_tree_of_a_size_has_its_parents_first_and_its_names_are_found() -> None:
    paths = list(scale._paths(120))
    files = [path.decode() for path, is_file in paths if is_file]
    assert len(files) == 120
    seen = {b""}
    for path, is_file in paths:
        assert path.rpartition(b"/")[0] in seen
        if not is_file:
            seen.add(path)
    source = random.Random(1)
    assert {scale._some_file(source, 120) for _ in range(50)} <= set(files)
    assert {scale._some_directory(source, 120).encode() for _ in range(50)} <= seen


def test_a_peer_that_hangs_is_killed_with_all_it_started_and_left_out(tmp_path: Path) -> None:
    with pytest.raises(Skip, match=r"did not end within 0\.2 s"):
        cold_start._call(["/bin/bash", "-c", "sleep 100 | sleep 100"], cwd=tmp_path, timeout_s=0.2)
    assert cold_start._call(["/bin/bash", "-c", "echo said"]) == "said\n"
    with pytest.raises(RuntimeError, match="gave 3: why"):
        cold_start._call(["/bin/bash", "-c", "echo why >&2; exit 3"])


def test_a_peer_that_found_nothing_is_an_error(tmp_path: Path) -> None:
    sides = cold_start._fetched(
        "peer", lambda target: None, {"cat": "echo 0", "grep": "echo 1"}, lambda what: tmp_path / what
    )
    with pytest.raises(RuntimeError, match="found nothing"):
        anyio.run(sides["peer: cat"])
    assert anyio.run(sides["peer: grep"]) > 0
