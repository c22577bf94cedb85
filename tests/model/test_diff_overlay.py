"""Random commands over real overlay mounts: what the diff commits is what the command left, on both tiers.

Each example is a disk that lives through a few sandboxes. After each: the tree on the disk equals what the command
saw last, the next sandbox (over base and delta) sees the same, and so does a fresh materialisation.
"""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fanout.engine.base import Engine, Spec
from fanout.engine.bubblewrap import BubblewrapEngine
from fanout.errors import EngineUnavailable
from fanout.view.cache import HostCache
from fanout.view.materialise import materialise
from fanout.view.view import View, open_view
from tests.support.views import LISTING, TINY, Contents, Workspace, of_directory, of_listing, of_state


@pytest.fixture(scope="module", params=["kernel", "bwrap"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = BubblewrapEngine(overlay=request.param)
    try:
        made.probe()
    except EngineUnavailable as error:
        made.close()
        pytest.skip(f"{request.param} does not run here: {error}")
    yield made
    made.close()


def run(engine: Engine, view: View, script: str) -> str:
    out: list[bytes] = []
    spec = Spec(
        argv=["/bin/sh", "-c", script], mounts=[view.mount("/mnt/d")], cwd="/mnt/d", env={"PATH": "/usr/bin:/bin"}
    )
    ended = engine.start(spec).wait(lambda stream, data: out.append(data))
    assert ended.exit_code == 0, b"".join(out)
    return b"".join(out).decode()


def plain(tree: Contents, engine: Engine) -> Contents:
    """Without its index overlayfs parts a hard link that is opened for writing; one that stayed the same we keep."""
    if engine.xattr_prefix == "trusted.overlay.":
        return tree
    return {path: item._replace(group=()) for path, item in tree.items()}


def fresh(space: Workspace, where: str, below: bytes = b"") -> Contents:
    """Materialise the disk anew and read it back."""
    os.mkdir(where)
    fd = os.open(where, os.O_RDONLY)
    try:
        state = space.state
        root = state.get(below)
        assert root is not None
        cut = len(below) + 1 if below else 0
        entries = ((path[cut:], node) for path, node in state.below(below))
        materialise(fd, root, entries, space.reader, state.blob_bytes())
    finally:
        os.close(fd)
    return of_directory(where)


name = st.sampled_from(["a", "b", "c"])
path = st.lists(name, min_size=1, max_size=3).map("/".join)
when = st.integers(1, 2_000_000_000).map(lambda s: f"@{s}.{s % 1000:03d}000001")
size = st.sampled_from([0, 1, 5, 200, 301, 700])

op = st.one_of(
    st.tuples(st.just("write"), path, size),
    st.tuples(st.just("append"), path, size),
    st.tuples(st.just("mkdir"), path),
    st.tuples(st.just("fill"), path),
    st.tuples(st.just("rm"), path),
    st.tuples(st.just("remake"), path),
    st.tuples(st.just("mv"), path, path),
    st.tuples(st.just("mv"), path, path),
    st.tuples(st.just("swap"), path, path),
    st.tuples(st.just("cp"), path, path),
    st.tuples(st.just("ln"), path, path),
    st.tuples(st.just("symlink"), path, st.sampled_from(["a", "../b", "/etc/passwd", "nowhere"])),
    st.tuples(st.just("chmod"), path, st.sampled_from(["600", "644", "755", "700", "4755", "1777"])),
    st.tuples(st.just("touch"), path, when),
    st.tuples(st.just("open"), path),
    st.tuples(st.just("sparse"), path),
)


Op = tuple[Any, ...]


def shell(op: Op, number: int) -> str:
    kind, target, *rest = op
    p = shlex.quote(target)
    other = shlex.quote(str(rest[0])) if rest else ""
    text = f"$(printf '%0{rest[0]}d' {number})" if kind in ("write", "append") and rest[0] else ""
    return {
        "write": f'printf %s "{text}" > {p}',
        "append": f'printf %s "{text}" >> {p}',
        "mkdir": f"mkdir -p {p}",
        "fill": f"mkdir -p {p}/b {p}/c && echo {number} > {p}/a && echo x{number} > {p}/b/a && ln {p}/a {p}/c/b",
        "rm": f"rm -rf {p}",
        "remake": f"rm -rf {p} && mkdir {p} && echo {number} > {p}/c",
        "mv": f"mv -T {p} {other}",
        "swap": f"mv -T {p} t{number} && mv -T {other} {p} && mv -T t{number} {other}",
        "cp": f"cp -a {p} {other}",
        "ln": f"ln -f {p} {other}",
        "symlink": f"ln -sfn {other} {p}",
        "chmod": f"chmod {other} {p}",
        "touch": f"touch -h -d {other} {p}",
        "open": f"true >> {p}",
        "sparse": f"truncate -s 200000 {p} && echo {number} >> {p}",
    }[kind]


rounds_of_ops = st.lists(st.lists(op, min_size=1, max_size=8), min_size=1, max_size=4)
with_subdirectory = pytest.mark.parametrize("subdirectory", [b"", b"s/t"], ids=["whole", "subdirectory"])
quick = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
long = settings(quick, max_examples=1500)


@with_subdirectory
@quick
@given(rounds=rounds_of_ops)
def test_a_disk_holds_what_commands_left(engine: Engine, subdirectory: bytes, rounds: list[list[Op]]) -> None:
    check(engine, subdirectory, rounds)


@pytest.mark.soak
@with_subdirectory
@long
@given(rounds=rounds_of_ops)
def test_a_disk_holds_what_commands_left_for_long(engine: Engine, subdirectory: bytes, rounds: list[list[Op]]) -> None:
    check(engine, subdirectory, rounds)


def check(engine: Engine, subdirectory: bytes, rounds: list[list[Op]]) -> None:
    with tempfile.TemporaryDirectory() as top:
        cache = HostCache(Path(top) / "cache", 1 << 30)
        space = Workspace(TINY)
        if subdirectory:
            space.write({b"beside": b"untouched", subdirectory + b"/a/b": b"first"})
        before = of_state(space.state, space.reader, subdirectory)
        try:
            for turn, ops in enumerate(rounds):
                base = space.state
                with open_view(
                    cache, space.reader, base, disk_id="d", subdirectory=subdirectory, writable=True
                ) as view:
                    steps = [f"{{ {shell(each, 10 * turn + i)}; }} 2>/dev/null" for i, each in enumerate(ops)]
                    text = run(engine, view, "; ".join((LISTING, *steps, LISTING)))
                    first, last, _ = text.split("====\n")
                    assert of_listing(first) == before, "what the command found"
                    packer = space.packer()
                    intents = view.intents(packer)
                    space.commit(intents, packer, base)
                before = of_state(space.state, space.reader, subdirectory)
                assert plain(before, engine) == plain(of_listing(last), engine), "what the disk holds"
                if turn % 2:
                    space.branch.fold()
            assert fresh(space, f"{top}/fresh", subdirectory) == before, "what another host gets"
            if subdirectory:
                assert space.read(b"beside") == b"untouched"
        finally:
            space.close()
            cache.close()
