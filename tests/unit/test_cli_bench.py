"""`fanout bench`: its table, its files, its refusals, and that it leaves no disk behind."""

from __future__ import annotations

import json
import xml.etree.ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fanout.cli.bench import Level, percentile
from fanout.cli.chart import Bar, svg
from fanout.cli.root import cli

Cli = Callable[..., Result]


@pytest.fixture
def fanout(tmp_path: Path) -> Cli:
    environ = {
        "FANOUT_STORE": f"file://{tmp_path}/store",
        "FANOUT_CACHE_DIR": f"{tmp_path}/cache",
        "FANOUT_ENGINE": "bubblewrap",
        "FANOUT_URL": None,
    }

    def run(*words: str, code: int = 0) -> Result:
        result = CliRunner(env=environ).invoke(cli, list(words), prog_name="fanout")
        assert result.exit_code == code, (words, result.exit_code, result.output)
        return result

    return run


def test_a_table_samples_and_a_chart_and_no_disk_is_left(fanout: Cli, tmp_path: Path) -> None:
    samples, chart = tmp_path / "out.json", tmp_path / "out.svg"
    shown = fanout(
        *("bench", "--in-flight", "1,3", "--calls", "4", "--region", "eu <&> us", "--json", str(samples)),
        *("--chart", str(chart), "--command", "echo x > $RANDOM"),
    ).stdout
    assert shown.startswith("this host, embedded from eu <&> us: `echo x > $RANDOM`, engine bubblewrap")
    assert shown.count("round trip") == shown.count("execute") == 2
    document = json.loads(samples.read_text())
    assert {"fanout", "python", "client", "hosts", "engines", "date", "url"} <= document.keys()
    assert (document["region"], document["url"]) == ("eu <&> us", None)
    one, three = document["levels"]
    assert (one["in_flight"], one["calls"], one["errors"]) == (1, 4, {})
    assert three["in_flight"] == 3
    for part in ("round_trip", "outside", "queue", "start", "execute", "commit"):
        values = three["ms"][part]["values"]
        assert len(values) == 4
        assert min(values) <= three["ms"][part]["p50"] <= three["ms"][part]["p95"] <= max(values)
    assert min(one["ms"]["commit"]["values"]) > 0
    top = xml.etree.ElementTree.parse(chart).getroot()
    assert top.tag == "{http://www.w3.org/2000/svg}svg"
    assert any("eu <&> us" in (each.text or "") for each in top.iter())
    assert json.loads(fanout("disk", "ls", "--json").stdout) == []


def test_commands_that_fail_are_counted_and_a_first_one_that_does_is_the_end(fanout: Cli) -> None:
    told = fanout(
        *("bench", "--in-flight", "2", "--calls", "3", "--command", "test ! -e seen || exit 7; touch seen"), code=1
    )
    assert "exit code 7" in told.stderr
    assert "3 calls of 2 in flight failed" in told.stderr
    fanout("bench", "--command", "exit 9", code=1)
    assert json.loads(fanout("disk", "ls", "--json").stdout) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--in-flight", "0"), "--in-flight is '0'"),
        (("--in-flight", "1,1"), "different numbers"),
        (("--in-flight", "1;2"), "numbers with commas"),
        (("--in-flight", ""), "numbers with commas"),
        (("--in-flight", "1001"), "from 1 to 1000"),
        (("--calls", "0"), "--calls"),
        (("--json", "/nowhere/at/all.json"), "a file that can be written"),
        (("--chart", "/"), "a file that can be written"),
        (("--region", "a\nb"), "printable"),
        (("--region", ""), "printable"),
        (("ftp://host",), "url"),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(
    fanout: Cli, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    result = fanout("bench", *words, code=64)
    assert said in result.stderr
    assert result.stdout == ""
    assert not (tmp_path / "store").exists()


def test_percentiles_are_of_what_was_seen() -> None:
    assert [percentile(range(1, 101), p) for p in (50, 95, 99, 100)] == [50, 95, 99, 100]
    assert percentile([7.0], 50) == percentile([7.0], 99) == 7.0
    assert percentile([], 50) is None
    assert Level(1).fields()["calls_per_s"] == 0


@pytest.mark.parametrize("most", [0.0, 0.04, 3.0, 99.0, 123456.0])
def test_bars_and_whiskers_stay_within_the_chart(most: float) -> None:
    bars = [Bar("1", [most / 2, most / 4], most, most), Bar("50", [0.0, 0.0], 0.0, 0.0)]
    top = xml.etree.ElementTree.fromstring(svg("t", "s", ("a", "b"), bars))
    height = float(top.attrib["viewBox"].split()[3])
    for each in top.iter():
        for name in ("y", "y1", "y2"):
            assert 0 <= float(each.attrib.get(name, 0)) <= height
        assert float(each.attrib.get("height", 1)) >= 0
