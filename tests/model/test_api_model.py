"""State machine through the public interface: several connections, each with a cache of its own, on one store that
fails at random, against a plain dict.

What is certain must be so: a call that returned has happened, one that raised `Unavailable` or a refusal has not. After
`Unknown` either may be true; the model then looks, once, through a healthy connection, and goes on from what it finds.
Everything depends on the seed in the failure's notes.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fanout.config import Tuning
from fanout.errors import Conflict, Exists, FanoutError, Invalid, NotFound, Unavailable, Unknown
from fanout.format import layout
from fanout.format.entry import decode_entry
from fanout.model import Started
from fanout.runtime import Runtime
from fanout.store.base import Store
from fanout.store.memory import MemoryStore
from fanout.store.wrap import Faulty, Retrying
from tests.support.connections import connected
from tests.support.disks import TINY, hasty, new_disk

CONNECTIONS = 3
TUNING = Tuning(**{**TINY.model_dump(), "fold_entries": 6})
#: path -> content; a directory is None.
Model = dict[str, bytes | None]

names = st.sampled_from(["a", "b", "d", "d/a", "d/b", "d/e/a", "e/a"])
contents = st.sampled_from([b"", b"one", b"two\n", b"x" * 50, b"y" * 200, b"\0\1\2" * 30])
which = st.integers(0, CONNECTIONS - 1)
branches = st.sampled_from(["main", "main", "side"])
modes = st.sampled_from(["shared", "conditional", "read_only"])


def parents(path: str) -> list[str]:
    parts = path.split("/")[:-1]
    return ["/".join(parts[: n + 1]) for n in range(len(parts))]


class ApiMachine(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed: int) -> None:
        note(f"seed {seed}")
        self.top = Path(tempfile.mkdtemp(prefix="fanout-model-"))
        self.stack = contextlib.ExitStack()
        self.portal = self.stack.enter_context(start_blocking_portal())
        source = random.Random(seed)
        self.store: Store = MemoryStore()
        quick = hasty()
        self.runtime = Runtime(sleep=quick.sleep, token_bytes=source.randbytes, uniform=source.uniform)
        self.core = new_disk(self.store, self.runtime, TUNING, "ws")
        self.core.create_branch("side", self.core.point())
        self.healthy = self.connect(self.store, "healthy")
        self.faulty = [Faulty(self.store, seed=seed + n, rate=0.12, runtime=self.runtime) for n in range(CONNECTIONS)]
        self.connections = [
            self.connect(Retrying(faulty, self.runtime, attempts=3), f"c{n}") for n, faulty in enumerate(self.faulty)
        ]
        self.models: dict[str, Model] = {"main": {}, "side": {}}
        self.marks: dict[str, Model] = {}
        self.execs = 0

    def connect(self, store: Store, name: str) -> Any:
        return self.stack.enter_context(
            self.portal.wrap_async_context_manager(
                connected(store, self.top / name, runtime=self.runtime, tuning=TUNING, max_in_flight=4)
            )
        )

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            self.stack.close()
            shutil.rmtree(self.top, ignore_errors=True)

    # -- how a call may end ----------------------------------------------------------------------------------------

    def call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        async def go() -> Any:
            return await function(*arguments, **named)

        return self.portal.call(go)

    def disk(self, number: int, branch: str) -> Any:
        """A handle through a faulty connection; opening may fail, which changes nothing."""
        for _ in range(50):
            with contextlib.suppress(Unavailable):
                return self.call(self.connections[number].disks.get, f"ws@{branch}")
        raise AssertionError("the store never answered")

    def found(self, branch: str) -> Model:
        """What is on the branch, through the healthy connection."""

        async def look() -> Model:
            disk = await self.healthy.disks.get(f"ws@{branch}")
            model: Model = {item.key: await disk.get_object(item.key) async for item in disk.list_objects()}
            folders = [""]
            while folders:
                folder = folders.pop()
                async for entry in disk.listdir(f"/{folder}"):
                    if entry.kind == "directory":
                        path = f"{folder}/{entry.name}".lstrip("/")
                        model[path] = None
                        folders.append(path)
            return model

        result: Model = self.portal.call(look)
        return result

    def commits(self) -> int:
        """How many commits the logs of all branches hold."""
        keys = [meta.key for meta in self.store.list(f"disks/{self.core.id}/log/")]
        return sum(len(decode_entry(self.store.get(key), key).commits) for key in keys)

    def change(self, branch: str, wanted: Model, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Make a call that takes the branch's model to `wanted`; returns the result, or the error that ended it."""
        before, commits = self.models[branch], self.commits()
        try:
            result = self.call(function, *arguments, **named)
        except Unknown as error:
            assert self.commits() - commits in (0, 1)
            found = self.found(branch)
            assert found in (before, wanted), "something else than all or nothing"
            self.models[branch] = found
            return error
        except FanoutError as error:
            refused = error
        else:
            assert self.commits() - commits in (0, 1), "committed twice"
            assert wanted == before or self.commits() > commits
            self.models[branch] = wanted
            return result
        assert self.commits() == commits, f"{refused}, and yet something was committed"
        return refused

    # -- objects ---------------------------------------------------------------------------------------------------

    @rule(number=which, branch=branches, path=names, data=contents)
    def put(self, number: int, branch: str, path: str, data: bytes) -> None:
        model = self.models[branch]
        blocked = model.get(path, b"") is None or any(model.get(p) is not None for p in parents(path))
        wanted = {**model, **dict.fromkeys(parents(path)), path: data}
        outcome = self.change(branch, wanted, self.disk(number, branch).put_object, path, data)
        if blocked:
            assert isinstance(outcome, Conflict | Unavailable | Unknown), outcome
            assert self.models[branch] == model
        else:
            assert not isinstance(outcome, FanoutError) or isinstance(outcome, Unavailable | Unknown), outcome

    @rule(number=which, branch=branches, path=names, recursive=st.booleans())
    def delete(self, number: int, branch: str, path: str, recursive: bool) -> None:
        model = self.models[branch]
        below = {p for p in model if p.startswith(path + "/")}
        refused = bool(below) and not recursive
        wanted = {p: data for p, data in model.items() if p != path and p not in below}
        if refused:
            wanted = model
        disk = self.disk(number, branch)
        outcome = self.change(branch, wanted, disk.delete_object, path, recursive=recursive)
        allowed = (Invalid, Unavailable, Unknown) if refused else (Unavailable, Unknown)
        assert isinstance(outcome, allowed) or not (refused or isinstance(outcome, FanoutError)), outcome

    @rule(number=which, branch=branches, source=names, to=names)
    def move(self, number: int, branch: str, source: str, to: str) -> None:
        target = to
        model = self.models[branch]
        moved = {p for p in model if p == source or p.startswith(source + "/")}
        blocked = any(model.get(p) is not None for p in parents(target))
        refused = not moved or target in model or (target + "/").startswith(source + "/") or blocked
        wanted = {p: data for p, data in model.items() if p not in moved}
        wanted.update(dict.fromkeys(parents(target)))
        wanted.update({target + p[len(source) :]: model[p] for p in moved})
        disk = self.disk(number, branch)
        outcome = self.change(branch, model if refused else wanted, disk.move, f"/{source}", f"/{target}")
        if refused:
            assert isinstance(outcome, NotFound | Exists | Invalid | Conflict | Unavailable | Unknown), outcome
        else:
            assert not isinstance(outcome, FanoutError) or isinstance(outcome, Unavailable | Unknown), outcome

    @rule(number=which, branch=branches, path=names)
    def read(self, number: int, branch: str, path: str) -> None:
        disk = self.disk(number, branch)
        wanted = self.models[branch].get(path)
        try:
            assert self.call(disk.get_object, path) == wanted
        except (NotFound, Invalid):
            assert wanted is None
        except Unavailable:
            pass

    # -- commands --------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.execs < 4)
    @rule(number=which, mode=modes, path=names, rival=which, data=st.sampled_from([b"r1", b"r2", None]))
    def run(self, number: int, mode: str, path: str, rival: int, data: bytes | None) -> None:
        """A command writes a file of its own and one that another connection may change meanwhile."""
        self.execs += 1
        model = self.models["main"]
        if model.get(path, b"") is None or any(model.get(p) is not None for p in parents(path)):
            return
        disk = self.disk(number, "main")
        mount = disk.mount(read_only=mode == "read_only", conditional=mode == "conditional")
        mine = f"own{self.execs}"
        folder = path.rpartition("/")[0] or "."
        command = f"cat {path} 2>/dev/null; mkdir -p {folder}; echo mine > {mine}; echo mine > {path}; sleep 0.05"
        seen = model.get(path) or b""
        rivalled = False

        async def go() -> Any:
            nonlocal rivalled
            other = await self.healthy.disks.get("ws")
            run = None
            async for event in self.connections[number].stream(command, disks={"w": mount}):
                if isinstance(event, Started) and data is not None:
                    await other.put_object(path, data)
                    rivalled = True
                run = getattr(event, "run", run)
            return run

        base, commits = dict(model), self.commits()
        try:
            outcome = self.portal.call(go)
        except (Unavailable, Unknown) as error:
            outcome = error
        if rivalled:
            assert data is not None
            base.update({**dict.fromkeys(parents(path)), path: data})
        written: Model = {**base, **dict.fromkeys(parents(path)), path: b"mine\n", mine: b"mine\n"}
        found = self.found("main")
        assert self.commits() - commits <= 1 + rivalled, "committed twice"
        if isinstance(outcome, FanoutError):
            if isinstance(outcome, Unknown) and found != base:
                assert found[mine] == b"mine\n"
                written[path] = found[path]  # in whatever order the two came
                base = written
            assert found == base
            self.models["main"] = base
            return
        commit = outcome.commits["w"]
        assert outcome.stdout_bytes == seen
        if mode == "read_only":
            assert commit.seq is None
            wanted = base
        elif commit.conflict is not None:
            assert rivalled
            assert mode == "shared"
            assert path in commit.conflict.paths
            rescued = self.found(commit.conflict.rescue_branch)
            assert rescued[path] == rescued[mine] == b"mine\n"
            wanted = base
        else:
            wanted = written
            if rivalled and self.first(f"put {path}", commit.base_seq) > commit.seq:
                wanted[path] = data  # the command was done before the other came
            elif rivalled:
                assert mode == "conditional", "first wins, and another came first"
                if path in model:
                    wanted[path] = found[path]  # by byte range: it need not be what one of them wrote
        assert found == wanted
        self.models["main"] = wanted

    def first(self, message: str, after: int) -> int:
        """The number of the first commit of that message after another."""

        async def look() -> int:
            disk = await self.healthy.disks.get("ws")
            return min([c.seq async for c in disk.log(after=after) if c.message == message])

        number: int = self.portal.call(look)
        return number

    # -- branches --------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.marks) < 3)
    @rule(number=which, branch=branches)
    def checkpoint(self, number: int, branch: str) -> None:
        name = f"cp{len(self.marks)}"
        try:
            self.call(self.disk(number, branch).checkpoint, name)
        except Exists:
            return  # an earlier one that was said to be unknown
        except (Unavailable, Unknown):
            with contextlib.suppress(NotFound):
                self.call(self.healthy.disks.get, f"ws@{name}")
                self.marks[name] = dict(self.models[branch])
            return
        self.marks[name] = dict(self.models[branch])

    @rule(number=which, on_conflict=st.sampled_from(["fail", "ours", "theirs"]))
    def merge(self, number: int, on_conflict: str) -> None:
        disk = self.disk(number, "main")
        before = self.models["main"]
        try:
            self.call(disk.merge, "side", on_conflict=on_conflict)
        except (Conflict, Unavailable):
            return
        except Unknown:
            pass
        found = self.found("main")
        if on_conflict == "theirs":
            for path, data in self.models["side"].items():
                assert path in found or path in before or data is None or found == before or path not in before
        self.models["main"] = found

    @rule(number=which, branch=branches)
    def fold(self, number: int, branch: str) -> None:
        core = self.disk(number, branch).core
        with contextlib.suppress(Unavailable, Unknown):
            core.branch(branch).refresh()
            core.branch(branch).fold()

    # -- what always holds -----------------------------------------------------------------------------------------

    @invariant()
    def the_disk_is_the_model(self) -> None:
        for branch, model in getattr(self, "models", {}).items():
            assert self.found(branch) == model
        for name, model in getattr(self, "marks", {}).items():
            assert self.found(name) == model

    @invariant()
    def numbers_are_contiguous(self) -> None:
        if not hasattr(self, "core"):
            return
        prefix = f"disks/{self.core.id}/log/"
        by_branch: dict[str, list[int]] = {}
        for meta in self.store.list(prefix):
            by_branch.setdefault(meta.key.split("/")[3], []).append(layout.seq_of_key(meta.key))
            assert decode_entry(self.store.get(meta.key), meta.key).seq == layout.seq_of_key(meta.key)
        for numbers in by_branch.values():
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


SHORT = settings(max_examples=12, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck))
TestApi = ApiMachine.TestCase
TestApi.settings = SHORT


@pytest.mark.soak
class TestApiForLong(ApiMachine.TestCase):
    settings = settings(SHORT, max_examples=200, stateful_step_count=40)
