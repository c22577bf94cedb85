"""What the README says of a server, as it says it: its Python and its AWS CLI command, against a server that runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.serving import Running

README = Path(__file__).parents[2] / "README.md"


def blocks(heading: str, language: str) -> list[str]:
    """Return the code blocks of one section."""
    section = README.read_text().split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", section, re.M | re.S)


def environment(server: Running) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "FANOUT_"))}
    return {
        **kept,
        "FANOUT_URL": server.url,
        "FANOUT_API_KEY": server.token,
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": server.access_key,
        "AWS_SECRET_ACCESS_KEY": server.secret_key,
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def test_a_fan_out_over_http_read_by_every_client(server: Running, tmp_path: Path) -> None:
    (script,) = blocks("Serve it", "python")
    (tmp_path / "served.py").write_text(script)
    ran = subprocess.run(
        [sys.executable, "served.py"],
        cwd=tmp_path,
        env=environment(server),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    timings, told, by_boto3, by_s3fs = ran.stdout.splitlines()
    assert timings.count("True") == 3
    assert told == "['a', 'b', 'c']"
    assert by_boto3 == r"b'a\nb\nc\n'"
    assert by_s3fs == str([f"served/results/{n}.txt" for n in (1, 2, 3)])

    aws = next(line.split("#")[0] for line in blocks("Serve it", "sh")[1].splitlines() if line.startswith("aws "))
    if shutil.which("aws") is None:
        pytest.skip("the AWS CLI is not here (package awscli); the rest of this test has passed")
    synced = subprocess.run(
        aws, shell=True, cwd=tmp_path, env=environment(server), capture_output=True, text=True, timeout=120
    )
    assert synced.returncode == 0, synced.stderr
    assert [(tmp_path / "results" / f"{n}.txt").read_text() for n in (1, 2, 3)] == ["a\n", "b\n", "c\n"]
