"""Keys of a tree against the plainest model: all of them in a sorted list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fanout.disk.disk import Disk
from fanout.disk.keys import list_keys
from fanout.disk.merge import Intent, Policy
from fanout.disk.state import State
from fanout.format.facts import Facts, facts_of, with_facts
from fanout.format.tree import DIR, Node, directory
from fanout.store.memory import MemoryStore
from tests.support.disks import TINY, file_node, new_disk

PART = st.sampled_from(["a", "b", "a-", "a.b", "a0", "-", " ", "ü", "\x01"])
PATHS = st.lists(st.lists(PART, min_size=1, max_size=4).map("/".join), max_size=25)
TEXT = st.sampled_from(["", "a", "a/", "a/b", "a-", "a.", "b/a", "/", "ü", "a0", "a/a/", "\x01", "zz", "b", "-/"])


def tree_of(files: list[str], directories: list[str], marked: list[str]) -> tuple[Disk, State]:
    """Make a tree as an exec and S3 would; of names that clash, the first stays."""
    disk = new_disk(MemoryStore(), tuning=TINY)
    node, blobs = file_node(disk, b"x")
    known: dict[str, Node] = {}
    for kind, paths in (("file", files), ("dir", directories), ("marked", marked)):
        for path in paths:
            parts = path.split("/")
            above = ["/".join(parts[:size]) for size in range(1, len(parts))]
            if path in known and not (kind == "marked" and known[path].kind == DIR):
                continue
            if any(known.get(each, directory()).kind != DIR for each in above):
                continue
            if kind == "file" and path in known:
                continue
            for each in above:
                known.setdefault(each, directory())
            made = node if kind == "file" else directory()
            known[path] = with_facts(made, Facts()) if kind == "marked" else made
    intents = [Intent(path.encode(), None, each) for path, each in known.items()]
    disk.apply(disk.point(), intents, policy=Policy.LAST_WINS, blobs=blobs)
    return disk, disk.point().state()


def keys_of(tree: State) -> list[bytes]:
    """All keys by the rules, without any cleverness."""
    paths = dict(tree.below(b""))
    keys = []
    for path, node in paths.items():
        if node.kind != DIR:
            keys.append(path)
        elif facts_of(node) is not None or not any(other.startswith(path + b"/") for other in paths):
            keys.append(path + b"/")
    return sorted(keys)


def expected(keys: list[bytes], prefix: bytes, delimiter: bytes, after: bytes) -> list[bytes]:
    """Keys and common prefixes after a marker, each once."""
    shown: list[bytes] = []
    for key in keys:
        if not key.startswith(prefix):
            continue
        at = key.find(delimiter, len(prefix)) if delimiter else -1
        entry = key[: at + len(delimiter)] if at >= 0 else key
        if entry > after and entry not in shown:
            shown.append(entry)
    return shown


@given(PATHS, PATHS, PATHS, TEXT, st.sampled_from(["", "/", "a", "-", "/a"]), TEXT, st.integers(1, 5))
def test_pages(
    files: list[str], directories: list[str], marked: list[str], prefix: str, delimiter: str, after: str, limit: int
) -> None:
    _, tree = tree_of(files, directories, marked)
    keys = keys_of(tree)
    start, by, marker = prefix.encode(), delimiter.encode(), after.encode()
    wanted = expected(keys, start, by, marker)
    found: list[bytes] = []
    while True:
        page = list_keys(tree, start, by, marker, limit)
        shown = sorted([key for key, _ in page.keys] + page.prefixes)
        assert len(shown) <= limit
        found += shown
        if page.last is None:
            break
        assert page.last == shown[-1]
        assert len(shown) == limit
        marker = page.last
    assert found == wanted


def test_no_more_is_read_than_shown() -> None:
    disk = new_disk(MemoryStore(), tuning=TINY)
    node, blobs = file_node(disk, b"x")
    intents = [Intent(b"d%02d/%03d" % (top, number), None, node) for top in range(20) for number in range(100)]
    disk.apply(disk.point(), intents, policy=Policy.LAST_WINS, blobs=blobs)
    disk.branch().fold()
    tree = disk.branch().refresh()
    loaded: list[bytes] = []
    load = tree.pages.load
    tree.pages.load = lambda ref, **options: loaded.append(ref.hash) or load(ref, **options)  # type: ignore[method-assign,func-returns-value]
    page = list_keys(tree, b"", b"/", b"", 1000)
    assert page.prefixes == [b"d%02d/" % top for top in range(20)]
    assert len(set(loaded)) <= 60 < len(tree.snap.pages) / 8
