"""Runs the public ceph/s3-tests suite against the S3 gateway and summarises it.

    FANOUT_S3_TESTS=FOLDER python -m tests.server.s3_tests [--all] [NAME...]     prints a table, then each failure

FOLDER is a checkout of the suite, with what its requirements.txt names installed; it is not part of this repository.
s3_tests.txt lists the tests that apply, all of which must pass. s3_tests_not.txt has, for those that do not, patterns
and reasons. `--all` runs those too, to see whether some have come to pass.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit
from xml.etree import ElementTree

from tests.support.s3 import make_key
from tests.support.serving import Running, running_server

__all__ = ["Exclusion", "Outcome", "all_names", "applying", "exclusions", "folder", "outcomes", "reason_of", "why_not"]

HERE = Path(__file__).parent
FILES = (
    "test_s3.py",
    "test_headers.py",
    "test_s3select.py",
    "test_iam.py",
    "test_sns.py",
    "test_sts.py",
    "test_utils.py",
)
NEEDS = ("boto3", "httplib2", "isodate", "lxml", "munch", "pytz", "requests", "yaml")


class Exclusion(NamedTuple):
    """Tests that do not apply: those whose `file::name` the pattern finds."""

    pattern: re.Pattern[str]
    reason: str


class Outcome(NamedTuple):
    """What became of one test: "passed", "failed" or "skipped", and what it said."""

    kind: str
    message: str


def folder() -> Path | None:
    """Return the suite's folder, or None where it was not given."""
    given = os.environ.get("FANOUT_S3_TESTS")
    return Path(given).resolve() if given else None


def why_not(suite: Path | None) -> str | None:
    """Say why the suite cannot run here."""
    if suite is None:
        return "FANOUT_S3_TESTS is not set: it names a checkout of ceph/s3-tests"
    if not (suite / "s3tests/functional/test_s3.py").is_file():
        return f"{suite} holds no s3tests/functional/test_s3.py"
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    return f"the suite needs {', '.join(missing)}" if missing else None


def applying() -> list[str]:
    """Return the tests that must pass, as `file::name`."""
    return [line for line in (HERE / "s3_tests.txt").read_text().splitlines() if line]


def exclusions() -> list[Exclusion]:
    """Return why the others do not apply. The first that fits a name is meant."""
    found: list[Exclusion] = []
    reason = ""
    for line in (HERE / "s3_tests_not.txt").read_text().splitlines():
        if line.startswith("# "):
            reason = line[2:]
        elif line:
            found.append(Exclusion(re.compile(line), reason))
    return found


def reason_of(name: str, rules: Sequence[Exclusion]) -> str | None:
    return next((rule.reason for rule in rules if rule.pattern.search(name)), None)


def all_names(suite: Path) -> list[str]:
    """Return all tests of the suite, in order."""
    names: list[str] = []
    for file in FILES:
        tree = ast.parse((suite / "s3tests/functional" / file).read_text())
        functions = [each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]
        names += [f"{file}::{name}" for name in functions if name.startswith("test_")]
    return list(dict.fromkeys(names))


@contextmanager
def configured(directory: Path) -> Iterator[tuple[Running, Path]]:
    """Run a server and write the suite's configuration for it. "alt" is a key that may not do what "main" does."""
    with running_server(directory) as server:
        access_key, secret_key, _ = make_key(server, "write", ["dsk-0000000000000000"])
        at = urlsplit(server.s3_url)
        lines = [
            "[DEFAULT]", f"host = {at.hostname}", f"port = {at.port}", "is_secure = False", "ssl_verify = False",
            "[fixtures]", "bucket prefix = st-{random}-", "iam name prefix = st-", "iam path prefix = /st/",
        ]  # fmt: skip
        lines += _user("s3 main", "fanout", server.access_key, server.secret_key)
        for name in ("s3 alt", "s3 tenant", "iam", "iam root", "iam alt root"):
            lines += [*_user(name, "alt", access_key, secret_key), "tenant = none"]
        config = directory / "s3tests.conf"
        config.write_text("\n".join(lines) + "\n")
        yield server, config


def _user(section: str, user: str, access_key: str, secret_key: str) -> list[str]:
    return [
        f"[{section}]", f"display_name = {user}", f"user_id = {user}", f"email = {user}@example.org", "api_name =",
        f"access_key = {access_key}", f"secret_key = {secret_key}",
    ]  # fmt: skip


def outcomes(suite: Path, names: Sequence[str]) -> dict[str, Outcome]:
    """Run tests of the suite against a server of their own; returns what became of each."""
    with tempfile.TemporaryDirectory() as top, configured(Path(top)) as (_, config):
        report = Path(top) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        done = subprocess.run(
            [*command, *(f"s3tests/functional/{name}" for name in names)],
            cwd=suite, env={**os.environ, "S3TEST_CONF": str(config)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if not report.is_file():
            raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
        return _read(report)


def _read(report: Path) -> dict[str, Outcome]:
    found: dict[str, Outcome] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}.py::{case.get('name', '').partition('[')[0]}"
        bad = next((case.find(tag) for tag in ("failure", "error", "skipped") if case.find(tag) is not None), None)
        if bad is None:
            found.setdefault(name, Outcome("passed", ""))
        else:
            kind = "skipped" if bad.tag == "skipped" else "failed"
            found[name] = Outcome(kind, (bad.get("message") or "").partition("\n")[0][:200])
    return found


def main(arguments: Sequence[str]) -> int:
    suite = folder()
    reason = why_not(suite)
    if suite is None or reason:
        print(reason, file=sys.stderr)
        return 2
    rules = exclusions()
    names = [name for name in arguments if not name.startswith("-")]
    wanted = names or (all_names(suite) if "--all" in arguments else applying())
    found = outcomes(suite, wanted)
    must = set(applying())
    counts = Counter(
        ("applies" if name in must else reason_of(name, rules) or "not listed", outcome.kind)
        for name, outcome in found.items()
    )
    print("| group | outcome | tests |\n|---|---|---|")
    for (group, kind), count in sorted(counts.items()):
        print(f"| {group} | {kind} | {count} |")
    failed = [(name, outcome) for name, outcome in found.items() if name in must and outcome.kind != "passed"]
    for name, outcome in failed:
        print(f"{name}: {outcome.kind}: {outcome.message}")
    for name, outcome in found.items():
        if name not in must and outcome.kind == "passed":
            print(f"{name} passes, but is not listed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
