"""The guest's image: kept, checked, made by one of many, and what is missing is said. No package is fetched here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fanout.engine.qemu import accel, agent, image, packages
from fanout.engine.qemu.image import Image
from fanout.errors import EngineUnavailable


@pytest.fixture
def makes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the two slow steps; the list tells how often they were taken."""
    taken: list[str] = []

    def kernel(
        scratch: Path, say: Callable[[str], None]
    ) -> tuple[str, bytes, tuple[dict[str, bytes], dict[str, bytes]]]:
        taken.append("kernel")
        return "linux 1", b"the kernel", ({"a": b"module"}, {})

    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(image, "_kernel", kernel)
    monkeypatch.setattr(image, "compile_agent", lambda say, scratch: (b"agent", "cc"))
    return taken


def test_an_image_is_made_once_and_found_again(tmp_path: Path, makes: list[str]) -> None:
    assert image.find(tmp_path) is None
    said: list[str] = []
    made = image.assemble(tmp_path, said.append)
    assert image.find(tmp_path) == made == image.assemble(tmp_path)
    assert makes == ["kernel"]
    assert made.version == "linux 1"
    assert made.kernel.read_bytes() == b"the kernel"
    assert b"module" in made.initramfs.read_bytes()
    assert "the guest's image is linux 1" in said[-1]
    assert {made.kernel.stat().st_mode & 0o777, made.initramfs.stat().st_mode & 0o777} == {0o644}
    manifest = json.loads((made.kernel.parent / "manifest.json").read_text())
    assert manifest["modules"] == ["a"]


@pytest.mark.parametrize("damage", ["kernel", "initramfs", "manifest.json"])
@pytest.mark.parametrize("how", ["changed", "gone", "empty"])
def test_a_damaged_image_is_made_anew(tmp_path: Path, makes: list[str], damage: str, how: str) -> None:
    path = image.assemble(tmp_path).kernel.parent / damage
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] + b"x" if how == "changed" else b"")
    assert image.find(tmp_path) is None
    image.assemble(tmp_path)
    assert image.find(tmp_path) is not None
    assert makes == ["kernel", "kernel"]


def test_many_at_once_make_one(tmp_path: Path, makes: list[str]) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: image.assemble(tmp_path), range(16)))
    assert len(found) == 1
    assert makes == ["kernel"]


def test_what_a_killed_maker_left_is_removed(tmp_path: Path, makes: list[str]) -> None:
    left = tmp_path / "qemu" / f"{image.MAKING}x"
    left.mkdir(parents=True)
    (left / "big").write_bytes(b"x")
    image.assemble(tmp_path)
    assert not left.exists()
    assert sorted(path.name.split("-")[0] for path in (tmp_path / "qemu").iterdir()) == ["image", "lock"]


def test_another_agent_is_another_image(tmp_path: Path, makes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    first = image.assemble(tmp_path)
    monkeypatch.setattr(image, "source_hash", lambda: "f" * 64)
    assert image.find(tmp_path) is None
    assert image.assemble(tmp_path).kernel != first.kernel
    assert first.kernel.exists()


def test_images_of_old_versions_do_not_pile_up(
    tmp_path: Path, makes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(image.KEPT + 2):
        monkeypatch.setattr(image, "source_hash", lambda i=i: f"{i:064x}"[::-1])
        made = image.assemble(tmp_path)
        os.utime(made.kernel.parent, (i, i))
    kept = {path.name[-16] for path in (tmp_path / "qemu").glob(f"{image.PREFIX}*")}
    assert kept == {"2", "3", "4"}
    assert image.find(tmp_path) == made


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, makes: list[str]) -> None:
    (tmp_path / "qemu").write_text("in the way")
    with pytest.raises(EngineUnavailable, match="cannot make the guest's image in"):
        image.assemble(tmp_path)


def test_other_machines_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(EngineUnavailable, match="x86-64 only, this is aarch64"):
        image.assemble(tmp_path)


def test_without_a_package_manager_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "_installed", lambda *arguments: iter(()))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(image, "compile_agent", lambda say, scratch: (b"agent", "cc"))
    with pytest.raises(EngineUnavailable, match=r"install linux-image-cloud-amd64 \(Debian\).*there is no apt-get"):
        image.assemble(tmp_path)
    assert [path.name for path in (tmp_path / "qemu").iterdir()] == ["lock"]


def test_without_a_compiler_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(EngineUnavailable, match="install gcc or tcc"):
        image.assemble(tmp_path)


def test_a_compiler_that_fails_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "cc").write_text("#!/bin/sh\necho it broke >&2\nexit 1\n")
    (tools / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/nowhere")
    with pytest.raises(EngineUnavailable, match="no C compiler for the guest agent"):
        agent.compile_agent(lambda line: None, tmp_path)


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put an apt and a dpkg of our own first on PATH. Files in the directory it gives steer them."""
    tools, state = tmp_path / "tools", tmp_path / "state"
    tools.mkdir()
    state.mkdir()
    script = f"""#!{sys.executable}
import json, os, pathlib, sys
state = pathlib.Path({str(state)!r})
words = [word for word in sys.argv[1:] if word not in ("-o", "--no-all-versions") and not word.startswith("Dir::")]
fresh = any(word.startswith("Dir::State::Lists=") for word in sys.argv)
known = json.loads((state / "known.json").read_text())
with open(state / "calls", "a") as calls:
    calls.write(" ".join([pathlib.Path(sys.argv[0]).name, *words]) + "\\n")
if words[0] == "update":
    sys.exit(0)
if words[0] == "-x":
    top = pathlib.Path(words[2])
    for path, text in json.loads(pathlib.Path(words[1]).read_text()).items():
        (top / path).parent.mkdir(parents=True, exist_ok=True)
        (top / path).write_text(text)
    sys.exit(0)
package = known.get(words[1])
if package is None or (package.get("stale") and not fresh):
    sys.exit("E: No packages found")
if words[0] == "show":
    print(f"Version: {{package['version']}}\\nDepends: {{package['depends']}}\\nDescription: x\\n Depends: no")
else:
    pathlib.Path(words[1] + "_1.deb").write_text(json.dumps(package["files"]))
"""
    for name in ("apt-get", "apt-cache", "dpkg-deb"):
        (tools / name).write_text(script)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    return state


def package(version: str, depends: str = "", stale: bool = False, **files: str) -> dict[str, object]:
    return {
        "version": version,
        "depends": depends,
        "stale": stale,
        "files": {k.replace("__", "/"): v for k, v in files.items()},
    }


def test_a_package_is_unpacked_with_those_that_hold_the_rest(apt: Path, tmp_path: Path) -> None:
    known = {
        "linux-image-virtual": package("6.8.7", "linux-image-6.8.0-7-generic"),
        "linux-image-6.8.0-7-generic": package(
            "6.8.0-7.7", "kmod, linux-modules-6.8.0-7-generic | other (= 1)", boot__vmlinuz="k"
        ),
        "linux-modules-6.8.0-7-generic": package("6.8.0-7.7", "", lib__modules__x="m"),
        "kmod": package("1", "", usr__bin__kmod="no"),
    }
    (apt / "known.json").write_text(json.dumps(known))
    said: list[str] = []
    into = tmp_path / "into"
    into.mkdir()
    found = packages.Packages(tmp_path, said.append).unpack("linux-image-virtual", into, image.REAL_PACKAGES)
    assert found == [
        "linux-image-6.8.0-7-generic 6.8.0-7.7",
        "linux-image-virtual 6.8.7",
        "linux-modules-6.8.0-7-generic 6.8.0-7.7",
    ]
    assert (into / "boot/vmlinuz").read_text() == "k"
    assert (into / "lib/modules/x").read_text() == "m"
    assert not (into / "usr").exists()
    assert "update" not in (apt / "calls").read_text()


def test_lists_that_are_missing_are_fetched_for_ourselves(apt: Path, tmp_path: Path) -> None:
    (apt / "known.json").write_text(json.dumps({"tcc": package("1", "", stale=True, usr__bin__tcc="t")}))
    into = tmp_path / "into"
    into.mkdir()
    assert packages.Packages(tmp_path, lambda line: None).unpack("tcc", into) == ["tcc 1"]
    assert "apt-get update" in (apt / "calls").read_text()


def test_a_package_that_is_not_there_is_named(apt: Path, tmp_path: Path) -> None:
    (apt / "known.json").write_text("{}")
    with pytest.raises(EngineUnavailable, match=r"apt-cache.*nothing-such failed: E: No packages found"):
        packages.Packages(tmp_path, lambda line: None).unpack("nothing-such", tmp_path)


def test_kernels_that_will_not_do_are_passed_over(apt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first package has no kernel with what a guest needs; all reasons are in the message."""
    known = {
        "linux-image-cloud-amd64": package("1", "", **{"boot__vmlinuz-1": "k", "lib__modules__1__modules.builtin": ""})
    }
    (apt / "known.json").write_text(json.dumps(known))
    monkeypatch.setattr(image, "_installed", lambda *arguments: iter(()))
    monkeypatch.setattr(image, "compile_agent", lambda say, scratch: (b"agent", "cc"))
    with pytest.raises(
        EngineUnavailable, match=re.escape("linux 1 (linux-image-cloud-amd64 1): this kernel has no module")
    ):
        image.assemble(tmp_path / "cache")


def test_the_newest_kernel_comes_first() -> None:
    names = ["vmlinuz-6.1.0-9-amd64", "vmlinuz-6.1.0-57-cloud-amd64", "vmlinuz-5.10.0-30-amd64", "vmlinuz-6.12.1"]
    found = sorted((Path(name) for name in names), key=image._version_key, reverse=True)
    assert [path.name for path in found] == [names[3], names[1], names[0], names[2]]


# --- acceleration -------------------------------------------------------------------------------------------------


@pytest.fixture
def some_image(tmp_path: Path, makes: list[str], monkeypatch: pytest.MonkeyPatch) -> Image:
    monkeypatch.setattr(accel, "find_qemu", lambda: sys.executable)
    return image.assemble(tmp_path)


def test_without_the_device_there_is_no_kvm(tmp_path: Path, some_image: Image) -> None:
    found = accel.probe(tmp_path, some_image, device=str(tmp_path / "kvm"))
    assert not found.kvm
    assert found.reason == f"there is no {tmp_path}/kvm"


def test_a_probe_is_kept_for_this_boot_image_and_user(
    tmp_path: Path, some_image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    boots: list[Image] = []

    def boot(image: Image) -> accel.Finding:
        boots.append(image)
        return accel.Finding(True, "it boots")

    monkeypatch.setattr(accel, "_boot", boot)
    device = tmp_path / "kvm"
    device.touch()
    assert accel.known(tmp_path, some_image) is None
    for _ in range(3):
        assert accel.probe(tmp_path, some_image, device=str(device)).kvm
    assert len(boots) == 1
    other = Image(some_image.kernel, some_image.initramfs, "linux 2")
    assert accel.probe(tmp_path, other, device=str(device)).kvm
    assert len(boots) == 2
    (tmp_path / "qemu/kvm.json").write_text('{"kvm": true}')
    assert accel.known(tmp_path, other) is None


def test_a_device_that_is_closed_says_what_would_help(
    tmp_path: Path, some_image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path / "kvm"
    device.touch()
    monkeypatch.setattr(os, "access", lambda *arguments: False)  # root may open everything
    assert "join the group kvm" in accel.probe(tmp_path, some_image, device=str(device)).reason


def test_a_probe_that_hangs_is_ended(tmp_path: Path, some_image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a host does whose guests hang with KVM: the device opens, QEMU runs, nothing comes."""
    started: list[subprocess.Popen[bytes]] = []

    def launch(argv: object, inherited: list[int], output: int) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "1000"], pass_fds=inherited))
        return started[-1]

    monkeypatch.setattr(accel, "_launch", launch)
    monkeypatch.setattr(accel, "BOOT_S", 0.3)
    monkeypatch.setattr("fanout.engine.qemu.command.find_qemu", lambda: "qemu")
    device = tmp_path / "kvm"
    device.touch()
    found = accel.probe(tmp_path, some_image, device=str(device))
    assert not found.kvm
    assert "no guest boots with it" in found.reason
    assert started[0].poll() is not None
    assert threading.active_count() < 50
