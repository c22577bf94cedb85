"""The engine contract: the conformance suite of fanout.engine.check on every engine this machine can run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import fanout
from fanout.engine.base import Engine
from fanout.engine.bubblewrap import BubblewrapEngine
from fanout.engine.check import CHECKS, Bench, Check
from fanout.engine.qemu.engine import QemuEngine
from fanout.errors import EngineUnavailable
from tests.support.guests import MIB, image_or_skip, qemu_cache

NOBODY = 65534


@pytest.fixture(scope="module", params=["bubblewrap-kernel", "bubblewrap-bwrap", "qemu"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made: Engine
    if request.param == "qemu":
        image_or_skip()
        made = QemuEngine(cache_dir=qemu_cache(), memory_bytes=256 * MIB)
    else:
        made = BubblewrapEngine(overlay=request.param.removeprefix("bubblewrap-"))
    try:
        made.probe()
    except EngineUnavailable as error:
        made.close()
        pytest.skip(f"{request.param} does not run here: {error}")
    yield made
    made.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Check, engine: Engine, tmp_path: Path) -> None:
    check(Bench(engine, tmp_path))


def test_there_is_an_engine_to_check() -> None:
    """Without this, a machine on which every engine is skipped would pass."""
    engine = BubblewrapEngine()
    engine.probe()
    engine.close()


SCRIPT = """
import json, sys
from pathlib import Path
from fanout.engine.bubblewrap import BubblewrapEngine
from fanout.engine.check import CHECKS, failures
engine = BubblewrapEngine()
engine.probe()
found = failures(engine, Path(sys.argv[1]))
print(json.dumps({"prefix": engine.xattr_prefix, "checks": len(CHECKS), "failures": found}))
engine.close()
"""


def _interpreter_for_nobody(path: list[str]) -> str | None:
    """Return an interpreter that an unprivileged user can run with the package on its path."""
    here = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for candidate in (sys.executable, f"/usr/bin/{here}", f"/usr/local/bin/{here}"):
        try:
            tried = subprocess.run(
                [candidate, "-c", "import fanout.engine.bubblewrap"],
                env={"PYTHONPATH": os.pathsep.join(path)},
                cwd="/",
                user=NOBODY,
                group=NOBODY,
                extra_groups=[],
                capture_output=True,
            )
        except OSError:
            continue
        if tried.returncode == 0:
            return candidate
    return None


#: On VMs, which take a while to be computed: the checks that a host's user has most to do with.
VM_SCRIPT = """
import json, sys
from pathlib import Path
from fanout.engine.check import CHECKS, failures
from fanout.engine.qemu.engine import QemuEngine
some = ("writes_go", "whiteouts", "several_mounts", "kill_ends", "the_host_s")
CHECKS[:] = [check for check in CHECKS if check.__name__.startswith(some)]
scratch = Path(sys.argv[1])
engine = QemuEngine(cache_dir=scratch, memory_bytes=256 << 20, acceleration="tcg")
engine.probe()
found = failures(engine, scratch)
print(json.dumps({"prefix": engine.xattr_prefix, "checks": len(CHECKS), "failures": found}))
engine.close()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody without any rights")
def test_conformance_as_a_user_without_any_rights() -> None:
    assert _as_nobody(SCRIPT) == {"prefix": "user.overlay.", "checks": len(CHECKS), "failures": {}}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody without any rights")
def test_conformance_on_vms_as_a_user_without_any_rights() -> None:
    made = image_or_skip()
    assert _as_nobody(VM_SCRIPT, made.kernel.parent) == {"prefix": "user.overlay.", "checks": 5, "failures": {}}


def _as_nobody(script: str, image: Path | None = None) -> object:
    """Run a script as a user without any rights, in a directory of his, maybe with an image; return what it said."""
    package = str(Path(fanout.__file__).parent.parent)
    path = [package, *(entry for entry in sys.path if "site-packages" in entry)]
    python = _interpreter_for_nobody(path)
    if python is None:
        pytest.skip("no interpreter of this version is readable for an unprivileged user")
    scratch = tempfile.mkdtemp(dir="/tmp", prefix="fanout-nobody-")
    try:
        os.chown(scratch, NOBODY, NOBODY)
        if image is not None:
            os.mkdir(f"{scratch}/qemu")
            os.chown(f"{scratch}/qemu", NOBODY, NOBODY)
            shutil.copytree(image, f"{scratch}/qemu/{image.name}")
        done = subprocess.run(
            [python, "-c", script, scratch],
            env={"PYTHONPATH": os.pathsep.join(path)},
            cwd="/",
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            capture_output=True,
            text=True,
            timeout=240,
        )
    finally:
        shutil.rmtree(scratch)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
