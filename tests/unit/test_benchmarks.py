"""The benchmarks' harness, and that the smallest form of each workload runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import anyio
import pytest

from benchmarks import peers, trees
from benchmarks.__main__ import WORKLOADS, load, main, run_one
from benchmarks.harness import Report, Skip, Stats, Target, interleave, machine, timed, write_json


def test_median_and_percentile() -> None:
    stats = Stats.of([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (stats.p50, stats.p99, stats.best) == (3.0, 5.0, 1.0)
    hundred = Stats.of(range(1, 101))
    assert (hundred.p50, hundred.p99) == (50.5, 99)
    assert hundred.percentile(0) == 1
    assert hundred.percentile(100) == 100
    assert Stats.of([7.0]).p99 == 7.0
    with pytest.raises(ValueError, match="nothing"):
        Stats.of([])


def test_targets() -> None:
    assert Target("a", 1.4, 1.4).met
    assert Target("a", 1.41, 1.4).met is False
    assert Target("a", 12.0, 10.0, at_least=True).met
    assert Target("a", 9.9, 10.0, at_least=True).met is False
    assert Target("a", 9.9).met is None


def test_sides_run_in_turn_and_the_warm_up_is_left_out() -> None:
    order: list[str] = []

    def side(name: str) -> object:
        async def run() -> float:
            order.append(name)
            return float(len(order))

        return run

    found = anyio.run(lambda: interleave({"a": side("a"), "b": side("b")}, 2))  # type: ignore[dict-item]
    assert order == ["a", "b"] * 3
    assert found == {"a": [3.0, 5.0], "b": [4.0, 6.0]}


def test_timed_gives_milliseconds() -> None:
    assert 0 <= anyio.run(timed(lambda: None)) < 1000


def test_a_report_says_what_was_missed_and_what_was_left_out(tmp_path: Path) -> None:
    report = Report("demo")
    mine, theirs = report.add("fanout", [3.0, 3.0]), report.add("peer", [2.0])
    report.ratio("fanout / peer", mine, theirs, 1.4)
    report.bound("requests", 1, 1, unit="requests")
    report.skip("docker", "docker is not installed")
    assert not report.met
    text = report.text()
    assert "1.50 x  target <= 1.4: MISSED" in text
    assert "target <= 1: met" in text
    assert "docker: skipped, docker is not installed" in text
    write_json(tmp_path / "out.json", "quick", [report])
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["machine"]["cores"] == machine()["cores"]
    (workload,) = document["workloads"]
    assert workload["met"] is False
    assert workload["rows"][0]["values"] == [3.0, 3.0]
    assert workload["targets"][0]["value"] == 1.5


def test_without_a_name_the_workloads_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in WORKLOADS)
    with pytest.raises(SystemExit):
        main(["nonsense"])


def test_a_workload_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def run(report: Report, size: object, place: Path) -> None:
        raise Skip("nothing is installed")

    monkeypatch.setattr(load("branch"), "run", run)
    report = anyio.run(run_one, "branch", "smallest", tmp_path)
    assert report.met
    assert report.skipped == ["branch: skipped, nothing is installed"]
    assert os.listdir(tmp_path) == []


def test_trees_look_like_text_and_do_not_change(tmp_path: Path) -> None:
    assert trees.words(8192, 1) == trees.words(8192, 1) != trees.words(8192, 2)
    top = trees.make_tree(tmp_path / "tree", 250, 500)
    files = sorted(path for path in top.rglob("*.txt"))
    assert len(files) == 250
    assert {path.stat().st_size for path in files} == {500}
    assert len({path.read_bytes() for path in files}) == 250


def test_a_missing_program_is_a_reason_to_skip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Skip, match=r"zstd is not installed|tar is not installed"):
        peers.tar_zstd(tmp_path, tmp_path / "out")
    with pytest.raises(Skip, match=r"podman is not installed; .*docker is not installed"):
        peers.Containers()


@pytest.mark.parametrize("name", ["branch", pytest.param("commit", marks=pytest.mark.soak), "memory"])
def test_the_smallest_form_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FANOUT_TEST_S3_ENDPOINT", raising=False)
    report = anyio.run(run_one, name, "smallest", tmp_path)
    assert report.rows
    assert report.targets
    assert os.listdir(tmp_path) == []


@pytest.mark.soak
@pytest.mark.parametrize("name", ["exec_start", "fanout"])
def test_the_smallest_form_of_what_starts_peers_runs(name: str, tmp_path: Path) -> None:
    report = anyio.run(run_one, name, "smallest", tmp_path)
    assert any("raw bwrap" in row.label for row in report.rows)
