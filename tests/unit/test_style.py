"""Style as a test: layers import downward only, names are public on purpose, originals stay banned."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fanout
from fanout import errors

ROOT = Path(fanout.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))

#: Higher may import lower, never the other way; names of one level do not import each other.
LEVELS = [
    {"errors", "runtime"},
    {"model", "config"},
    {"store", "format"},
    {"disk", "engine"},
    {"view"},
    {"run"},
    {"api"},
    {"wire"},
    {"local_calls", "local_disk"},
    {"local", "client"},
    {"default"},
    {"sync", "server"},
    {"fs"},
    {"cli", "__init__"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
#: Imports that cross a level's own border on purpose.
ALLOWED = {("cli", "__init__")}


def part(module: str) -> str:
    """`fanout.store.local` -> `store`."""
    pieces = module.split(".")
    return pieces[1] if len(pieces) > 1 else "__init__"


def module_name(path: Path) -> str:
    pieces = ("fanout", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(pieces[:-1] if pieces[-1] == "__init__" and len(pieces) > 2 else pieces)


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            if node.module == "fanout":
                found |= {f"fanout.{alias.name}" for alias in node.names if (ROOT / alias.name).exists()}
    return found


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_go_down(path: Path) -> None:
    here = part(module_name(path))
    assert here in LEVEL, f"{here} has no place in the layers of docs/ARCHITECTURE.md"
    for name in imports(path):
        if name.split(".")[0] != "fanout":
            continue
        there = part(name)
        if there == "__init__" and here != "cli":
            continue  # `from fanout import api`: the module is judged by its own name
        allowed = there == here or LEVEL[there] < LEVEL[here] or (here, there) in ALLOWED
        assert allowed, f"{module_name(path)} must not import {name}"


@pytest.mark.parametrize(
    ("library", "homes"),
    [
        ("boto3", {"fanout.store.s3"}),
        ("botocore", {"fanout.store.s3"}),
        ("httpx", {"fanout.client"}),
        ("fastapi", {"fanout.server"}),
        ("uvicorn", {"fanout.server"}),
        ("fsspec", {"fanout.fs"}),
        ("ray", set()),
    ],
)
def test_heavy_libraries_live_in_one_place(library: str, homes: set[str]) -> None:
    users = {module_name(p) for p in MODULES if any(n.split(".")[0] == library for n in imports(p))}
    strangers = {user for user in users if not any(user == home or user.startswith(f"{home}.") for home in homes)}
    assert not strangers


def test_engines_know_no_disk() -> None:
    for path in (ROOT / "engine").glob("*.py"):
        assert not any(part(n) in {"disk", "format", "store", "view"} for n in imports(path) if n.startswith("fanout."))


def test_the_format_is_pure() -> None:
    impure = {"os", "time", "threading", "asyncio", "anyio", "socket", "random"}
    for path in (ROOT / "format").glob("*.py"):
        assert not {name.split(".")[0] for name in imports(path)} & impure, path


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_every_module_says_what_it_owns(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), path


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_files_stay_readable(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 600, f"{path} is too long: split it"
    assert path.stem not in {"utils", "util", "helpers", "common", "misc"}


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_time_and_randomness_come_from_runtime(path: Path) -> None:
    if module_name(path) == "fanout.runtime":
        return
    banned = {("time", "time"), ("time", "time_ns"), ("os", "urandom"), ("asyncio", "create_task")}
    tree = ast.parse(path.read_text())
    assert not {"random", "secrets", "uuid"} & {name.split(".")[0] for name in imports(path)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) not in banned, f"{path}:{node.lineno}"


def test_public_names() -> None:
    assert sorted(fanout.__all__) == fanout.__all__
    contract = {"connect", "exec", "Conflict", "NotFound", "Exists", "Invalid", "Denied", "Busy", "LeaseLost", "Limit"}
    contract |= {"Unavailable", "EngineUnavailable", "Unknown", "Corrupt", "CommandFailed", "FanoutError"}
    contract |= {"Started", "Output", "Finished", "Run", "Change", "Disk"}
    assert contract <= set(fanout.__all__)
    assert all(hasattr(fanout, name) for name in fanout.__all__)


def test_every_error_has_a_meaning() -> None:
    def all_subclasses(cls: type) -> set[type]:
        return {cls}.union(*(all_subclasses(sub) for sub in cls.__subclasses__()))

    codes = {cls.code for cls in all_subclasses(errors.FanoutError)}  # type: ignore[attr-defined]
    assert codes == set(errors.TABLE)
    assert all(errors.TABLE[code].exit != 0 for code in codes)
