"""The rules of the mount modes: docs/MERGE.md is the table, and this is what holds it to the code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fanout.disk.merge import Intent, Policy, rebase
from fanout.format.entry import Put
from fanout.format.tree import DIR, FILE, SYMLINK, Node, Ref, directory, same_content, same_node
from tests.support.trees import DictTree, Plain, applied, intents_between, land, same_trees, unreachable

DOC = Path(__file__).parents[2] / "docs" / "MERGE.md"

Tree = dict[bytes, Node]
Change = Callable[[Tree, str], None]


def file(content: str, mode: int = 0o644, mtime_ns: int = 1) -> Node:
    data = content.encode()
    return Node(FILE, mode, mtime_ns, len(data), (Ref(b"p" * 16, 4, len(data), len(data), data.ljust(32, b".")),))


def put(tree: Tree, path: bytes, node: Node) -> None:
    tree[path] = node
    parent = path.rpartition(b"/")[0]
    if parent in tree:
        tree[parent] = msgspec.structs.replace(tree[parent], mtime_ns=node.mtime_ns)


def take(tree: Tree, path: bytes) -> dict[bytes, Node]:
    return {p: tree.pop(p) for p in list(tree) if p == path or p.startswith(path + b"/")}


def rename(tree: Tree, who: str) -> None:
    for path, node in take(tree, b"n").items():
        tree[b"moved-by-" + who.encode() + path[1:]] = node


def chmod(tree: Tree, who: str) -> None:
    tree[b"n"] = msgspec.structs.replace(tree[b"n"], mode=0o700 if who == "mine" else 0o750)


def touch(tree: Tree, who: str) -> None:
    tree[b"n"] = msgspec.structs.replace(tree[b"n"], mtime_ns=7 if who == "mine" else 6)


def to_directory(tree: Tree, who: str) -> None:
    tree[b"n"] = directory(0o755, 5)
    tree[b"n/in-" + who.encode()] = file(who)


def to_file(tree: Tree, who: str) -> None:
    take(tree, b"n")
    tree[b"n"] = file(who)


#: What `n` is at first -> what each side may do to it.
CASES: dict[str, tuple[Tree, dict[str, Change]]] = {
    "nothing": (
        {},
        {
            "add file": lambda t, who: put(t, b"n", file(who)),
            "add link": lambda t, who: put(t, b"n", Node(SYMLINK, 0o777, 1, target=who.encode())),
            "mkdir": lambda t, who: put(t, b"n", directory(0o755, 5)),
            "mkdir, add inside": lambda t, who: to_directory(t, who),
        },
    ),
    "a file": (
        {b"n": file("old")},
        {
            "modify": lambda t, who: put(t, b"n", file(who, mtime_ns=5)),
            "chmod": chmod,
            "touch": touch,
            "delete": lambda t, who: [None for _ in take(t, b"n")].clear(),
            "rename away": rename,
            "file to directory": to_directory,
        },
    ),
    "an empty directory": (
        {b"n": directory(0o755, 1)},
        {
            "rmdir": lambda t, who: [None for _ in take(t, b"n")].clear(),
            "chmod": chmod,
            "add inside": lambda t, who: put(t, b"n/new-" + who.encode(), file(who, mtime_ns=5)),
            "directory to file": to_file,
        },
    ),
    "a directory with `old`": (
        {b"n": directory(0o711, 1), b"n/old": file("old")},
        {
            "remove all": lambda t, who: [None for _ in take(t, b"n")].clear(),
            "rename away": rename,
            "chmod": chmod,
            "add inside": lambda t, who: put(t, b"n/new-" + who.encode(), file(who, mtime_ns=5)),
            "add inside, same name": lambda t, who: put(t, b"n/new", file(who, mtime_ns=5)),
            "modify `old`": lambda t, who: put(t, b"n/old", file(who, mtime_ns=5)),
            "delete `old`": lambda t, who: [None for _ in take(t, b"n/old")].clear(),
            "directory to file": to_file,
        },
    ),
}

#: Column -> the policy, and whether it is a three-way merge.
COLUMNS: dict[str, tuple[Policy, bool]] = {
    "shared": (Policy.FIRST_WINS, False),
    "conditional": (Policy.LAST_WINS, False),
    "objects": (Policy.STRICT, False),
    "merge": (Policy.FIRST_WINS, True),
    "merge, ours": (Policy.KEEP_THEIRS, True),
    "merge, theirs": (Policy.LAST_WINS, True),
}

ROWS = [(start, first, second) for start, (_, changes) in CASES.items() for first in changes for second in changes]


def sides(start: str, first: str, second: str) -> tuple[Tree, Tree, Tree]:
    base, changes = CASES[start]
    theirs, mine = dict(base), dict(base)
    changes[first](theirs, "theirs")
    changes[second](mine, "mine")
    return base, theirs, mine


def outcome(start: str, first: str, second: str, column: str) -> str:
    policy, merging = COLUMNS[column]
    base, theirs, mine = sides(start, first, second)
    result = land(base, theirs, mine, policy, merging=merging)
    if result.conflicts:
        return "conflict"
    tree = applied(theirs, result.effects)
    if same_trees(tree, theirs, times=False):
        return "same" if same_trees(tree, mine, times=False) else "first"
    return "second" if same_trees(tree, mine, times=False) else "both"


def table() -> str:
    lines = []
    for start in CASES:
        lines += ["", f"### `n` is {start}", "", "| first | then | " + " | ".join(COLUMNS) + " |"]
        lines.append("|---|---|" + "---|" * len(COLUMNS))
        for row_start, first, second in ROWS:
            if row_start == start:
                cells = [outcome(start, first, second, column) for column in COLUMNS]
                lines.append(f"| {first} | {second} | " + " | ".join(cells) + " |")
    return "\n".join(lines).strip() + "\n"


def test_the_documented_table_is_what_happens() -> None:
    text = DOC.read_text()
    begin, end = "<!-- table: tests/unit/test_merge.py -->\n", "<!-- end of table -->"
    documented = text[text.index(begin) + len(begin) : text.index(end)].strip() + "\n"
    assert documented == table(), "write it anew with: python -m tests.unit.test_merge"


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize(("start", "first", "second"), ROWS)
def test_nothing_is_unreachable_and_nothing_lost_silently(start: str, first: str, second: str, column: str) -> None:
    policy, merging = COLUMNS[column]
    base, theirs, mine = sides(start, first, second)
    check(base, theirs, mine, policy, merging)


def check(base: Plain, theirs: Plain, mine: Plain, policy: Policy, merging: bool) -> None:
    result = land(base, theirs, mine, policy, merging=merging)
    if result.conflicts:
        assert policy is not Policy.KEEP_THEIRS
        assert not result.effects
        return
    tree = applied(theirs, result.effects)
    assert unreachable(tree) == []
    put_paths = [e.path for e in result.effects]
    assert len(put_paths) == len(set(put_paths)), "one effect a path"
    for path in base.keys() | theirs.keys() | mine.keys():
        was, other, own, now = base.get(path), theirs.get(path), mine.get(path), tree.get(path)
        changed_by_others = not same_node(was, other, times=False)
        changed_by_me = not same_node(was, own, times=False)
        if not changed_by_me and changed_by_others and other is not None and (now is None or now.kind != other.kind):
            # Only a file or link may give way, to a directory that I needed there.
            assert policy is not Policy.FIRST_WINS
            assert now is not None
            assert now.kind == DIR
            assert other.kind != DIR
        if changed_by_others and not changed_by_me and other is not None and other.kind != DIR:
            assert same_node(now, other, times=False) or now is not None
        if policy is Policy.FIRST_WINS:
            if changed_by_me and own is not None and own.kind != DIR:
                assert same_node(now, own, times=False), f"my {path!r} did not land, and no conflict"
            if changed_by_others and other is not None and other.kind != DIR and not same_node(own, other, times=False):
                assert same_node(now, other, times=False), f"their {path!r} is gone, and no conflict"
        attributes_only = was is not None and own is not None and same_content(was, own)
        if policy is Policy.LAST_WINS and changed_by_me and own is not None and own.kind != DIR and not attributes_only:
            assert now is not None
            assert now.kind == own.kind, f"my {path!r} did not land"


names = st.sampled_from([b"a", b"a/a", b"a/b", b"a/b/a", b"b", b"b/a", b"c"])
steps = st.lists(st.tuples(st.sampled_from("fdlmrc"), names, st.integers(0, 3)), max_size=6)


def run(tree: Plain, ops: list[tuple[str, bytes, int]], clock: int) -> Tree:
    made = dict(tree)
    for kind, path, number in ops:
        above = path.rpartition(b"/")[0]
        if above and made.get(above, file("")).kind != DIR:
            continue
        if kind == "m" and path in made:
            made[path] = msgspec.structs.replace(made[path], mode=0o700 + number)
            continue
        if kind == "c":
            other = [b"a", b"b", b"c", b"d"][number]
            if path in made and not other.startswith(path) and not path.startswith(other) and other not in made:
                made.update({other + p[len(path) :]: n for p, n in take(made, path).items()})
            continue
        take(made, path)
        if kind != "r":
            put(
                made,
                path,
                {"f": file(f"{clock}-{number}"), "d": directory(0o755, clock)}.get(
                    kind, Node(SYMLINK, 0o777, clock, target=b"%d" % number)
                ),
            )
    return made


@given(steps, steps, steps, st.sampled_from(list(COLUMNS)))
def test_any_two_trees(
    first: list[tuple[str, bytes, int]], second: list[tuple[str, bytes, int]], third: list[tuple[str, bytes, int]],
    column: str,
) -> None:  # fmt: skip
    policy, merging = COLUMNS[column]
    base = run({b"a": directory(), b"a/a": file("0"), b"b": file("0")}, first, 1)
    check(base, run(base, second, 2), run(base, third, 3), policy, merging)


nodes = st.sampled_from([file("x"), file("y", 0o600), directory(0o700, 9), Node(SYMLINK, 0o777, 1, target=b"t"), None])


@given(
    st.lists(st.builds(Intent, names, nodes, nodes, st.booleans()), max_size=8),
    steps,
    st.sampled_from(list(Policy)),
    st.sets(names),
)
def test_even_intents_that_make_no_sense_leave_a_tree(
    intents: list[Intent], first: list[tuple[str, bytes, int]], policy: Policy, touched: set[bytes]
) -> None:
    tree = run({b"a": directory(), b"a/a": file("0"), b"b": file("0")}, first, 1)
    result = rebase(intents, DictTree(tree), dict.fromkeys(touched, 0), policy)
    assert unreachable(applied(tree, result.effects)) == []


def test_a_commit_onto_what_it_saw_lands_whole() -> None:
    for start, first, _ in ROWS:
        base, theirs, _ = sides(start, first, first)
        for policy in Policy:
            result = rebase(intents_between(base, theirs), DictTree(base), {}, policy)
            kinds_change = any((base[p].kind == DIR) != (theirs[p].kind == DIR) for p in base.keys() & theirs.keys())
            if policy is Policy.STRICT and kinds_change:
                assert result.conflicts
            else:
                assert same_trees(applied(base, result.effects), theirs), (start, first, policy)


def test_a_directory_made_again_keeps_its_mode() -> None:
    base, theirs, mine = sides("a directory with `old`", "remove all", "add inside")
    tree = applied(theirs, land(base, theirs, mine, Policy.LAST_WINS).effects)
    assert tree[b"n"].mode == 0o711


def test_fields_that_only_one_side_changed_both_land() -> None:
    base: Tree = {b"n": file("old")}
    theirs, mine = {b"n": file("old", 0o600)}, {b"n": file("new", mtime_ns=5)}
    tree = applied(theirs, land(base, theirs, mine, Policy.LAST_WINS).effects)
    assert tree[b"n"].mode == 0o600
    assert same_node(tree[b"n"], file("new", 0o600, 5))
    tree = applied(mine, land(base, mine, theirs, Policy.LAST_WINS).effects)
    assert same_node(tree[b"n"], file("new", 0o600, 5))


def test_changes_are_named_for_the_history() -> None:
    base: Tree = {b"d": directory(0o755, 1), b"d/f": file("old"), b"g": file("old")}
    mine = {b"d": directory(0o755, 9), b"d/f": file("new"), b"g": file("old", 0o600), b"h": file("h")}
    effects = rebase(intents_between(base, mine), DictTree(base), {}, Policy.FIRST_WINS).effects
    assert {e.path: e.change for e in effects if isinstance(e, Put)} == {b"d": 3, b"d/f": 1, b"g": 2, b"h": 0}


if __name__ == "__main__":
    sys.stdout.write(table())
