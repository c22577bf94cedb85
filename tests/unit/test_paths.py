"""Paths as users write them: what is allowed, what is refused, and that text and bytes agree."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fanout.disk.paths import MAX_NAME_BYTES, MAX_PATH_BYTES, absolute, shown, tree_path
from fanout.errors import Invalid

REFUSED = ["a//b", "a/", "./a", "a/.", "..", "../a", "a/../b", "//a", "a\0b", "x" * 256, "a/" * 2048 + "a", "\ud800"]


@pytest.mark.parametrize("path", REFUSED)
def test_what_no_file_system_can_hold_is_refused(path: str) -> None:
    with pytest.raises(Invalid, match=r"^key is "):
        tree_path("key", path)


@pytest.mark.parametrize("path", [None, 3, ["a"]])
def test_what_is_no_path_is_refused(path: object) -> None:
    with pytest.raises(Invalid, match=r"^key is "):
        tree_path("key", path)  # type: ignore[arg-type]


def test_the_limits_hold_to_the_byte() -> None:
    assert tree_path("key", "x" * MAX_NAME_BYTES) == b"x" * 255
    part = "x" * 255
    longest = "/".join([part] * 16)
    assert len(longest) == MAX_PATH_BYTES
    assert tree_path("key", longest) == longest.encode()
    assert tree_path("key", "/" + longest) == longest.encode()
    with pytest.raises(Invalid):
        tree_path("key", longest[:-1] + "/xx")
    with pytest.raises(Invalid):
        tree_path("key", "☕" * 86)  # 258 bytes


def test_a_leading_slash_and_the_root() -> None:
    assert tree_path("key", "/a/b") == tree_path("key", "a/b") == tree_path("key", b"/a/b") == b"a/b"
    for root in ("", "/", b"/"):
        assert tree_path("key", root, allow_root=True) == b""
        with pytest.raises(Invalid):
            tree_path("key", root)


def test_absolute_paths() -> None:
    assert absolute("directory", "/") == absolute("directory", "///") == b""
    assert absolute("directory", "/a/b/") == absolute("directory", b"/a/b") == b"a/b"
    for bad in ("a", "", "./a", b"a", None):
        with pytest.raises(Invalid, match=r"^directory is "):
            absolute("directory", bad)  # type: ignore[arg-type]
    with pytest.raises(Invalid):
        absolute("directory", "/a/../b")


@given(st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=4))
def test_any_names_survive_being_shown(parts: list[bytes]) -> None:
    clean = [part for part in parts if b"/" not in part and b"\0" not in part and part not in (b".", b"..")]
    path = b"/".join(clean)
    if path:
        assert tree_path("key", path) == path
        assert tree_path("key", shown(path)) == path
        assert os.fsencode(shown(path)) == path


def test_normal_forms_stay_apart() -> None:
    assert tree_path("key", "\u00e9") != tree_path("key", "e\u0301")
