"""Listings against a model: every key once, in byte order, from any place on."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fanout.disk.state import State
from fanout.format.tree import FILE
from fanout.run.describe import list_tree
from fanout.store.memory import MemoryStore
from tests.support.disks import new_disk, put_many

NAMES = st.text(st.sampled_from("a-./0"), min_size=1, max_size=7).filter(
    lambda path: all(part not in ("", ".", "..") for part in path.split("/"))
)


def tree(paths: set[str]) -> State:
    """A tree of files; a path that another one continues becomes a directory."""
    disk = new_disk(MemoryStore())
    put_many(disk, [(path, b"") for path in sorted(paths) if not any(o.startswith(path + "/") for o in paths)])
    return disk.point().state()


def expected(state: State, prefix: str, after: str, recursive: bool) -> list[str]:
    files = [path.decode() for path, node in state.scan(b"\x01") if node.kind == FILE]
    keys = {f for f in files if f.startswith(prefix)}
    if not recursive:
        keys = {prefix + key[len(prefix) :].partition("/")[0] + "/" * ("/" in key[len(prefix) :]) for key in keys}
    return sorted(key for key in keys if key > after)


@settings(max_examples=300, deadline=None)
@given(paths=st.sets(NAMES, max_size=12), prefix=st.one_of(st.just(""), NAMES), after=NAMES, recursive=st.booleans())
def test_listing(paths: set[str], prefix: str, after: str, recursive: bool) -> None:
    state = tree(paths)
    for slash in ("", "/"):
        for start in ("", after, after + "/"):
            found = [o.key for o in list_tree(state, (prefix + slash).encode(), start.encode(), recursive)]
            if prefix + slash != "/":
                assert found == expected(state, prefix + slash, start, recursive), (prefix + slash, start)
