"""Bad input is refused before anything starts: `Invalid` names the argument, the value and what is allowed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import anyio
import pytest

from fanout.config import Settings
from fanout.errors import Denied, Invalid, NotFound
from fanout.local import LocalFanout
from fanout.run import request
from fanout.store.memory import MemoryStore
from fanout.store.wrap import Metered

BIG = "x" * (128 << 10)

#: (options of exec, what the message must say: the argument, the value, what is allowed)
BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({"command": ""}, ["command is ''", "non-empty"]),
    ({"command": " \n\t"}, ["command is", "non-empty"]),
    ({"command": None}, ["command is None", "shell command"]),
    ({"command": "echo \0"}, ["command is", "NUL"]),
    ({"command": BIG}, ["command is 'xxx", "131071 bytes", "stdin or a file"]),
    ({"command": "echo \ud800"}, ["command is", "UTF-8"]),
    ({"timeout_s": 0}, ["timeout_s is 0", "more than 0", "86400"]),
    ({"timeout_s": -1.5}, ["timeout_s is -1.5", "more than 0"]),
    ({"timeout_s": math.nan}, ["timeout_s is nan", "more than 0"]),
    ({"timeout_s": math.inf}, ["timeout_s is inf", "at most 86400"]),
    ({"timeout_s": 86_400.1}, ["timeout_s is 86400.1", "at most 86400"]),
    ({"timeout_s": 10**400}, ["timeout_s is 1000", "at most 86400"]),
    ({"timeout_s": True}, ["timeout_s is True", "more than 0"]),
    ({"timeout_s": "60"}, ["timeout_s is '60'", "seconds"]),
    ({"timeout_s": None}, ["timeout_s is None", "seconds"]),
    ({"env": {"": "v"}}, ["env is ''", "not empty"]),
    ({"env": {"A\0B": "v"}}, ["env is 'A\\x00B'", "NUL"]),
    ({"env": {"A;B": "v"}}, ["env is 'A;B'", "';'"]),
    ({"env": {"A=B": "v"}}, ["env is 'A=B'", "'='"]),
    ({"env": {"\ud800": "v"}}, ["env is", "UTF-8"]),
    ({"env": {1: "v"}}, ["env is 1", "name"]),
    ({"env": {"K": 1}}, ["env['K'] is 1", "str"]),
    ({"env": {"K": "a\0b"}}, ["env['K'] is", "NUL"]),
    ({"env": {"K": BIG}}, ["env['K'] is", "131071 bytes"]),
    ({"env": {"K": "x" * ((128 << 10) - 2)}}, ["env['K'] is", "131071 bytes"]),
    ({"env": ["K=V"]}, ["env is ['K=V']", "mapping"]),
    ({"cwd": "mnt/work"}, ["cwd is 'mnt/work'", "absolute"]),
    ({"cwd": ""}, ["cwd is ''", "absolute"]),
    ({"cwd": "/a\0b"}, ["cwd is '/a\\x00b'", "NUL"]),
    ({"cwd": "/" + "d" * 4096}, ["cwd is '/ddd", "4095 bytes"]),
    ({"cwd": "/\ud800"}, ["cwd is", "UTF-8"]),
    ({"cwd": Path("/tmp")}, ["cwd is PosixPath('/tmp')", "absolute"]),
    ({"stdin": 7}, ["stdin is 7", "bytes or str"]),
    ({"stdin": "\ud800"}, ["stdin is", "UTF-8"]),
    ({"memory_mib": 0}, ["memory_mib is 0", "1 to"]),
    ({"memory_mib": 1e308}, ["memory_mib is 1e+308", "1 to"]),
    ({"memory_mib": 0.5}, ["memory_mib is 0.5", "1 to"]),
    ({"memory_mib": "1G"}, ["memory_mib is '1G'", "MiB"]),
    ({"cpus": 0}, ["cpus is 0", "above 0"]),
    ({"cpus": math.nan}, ["cpus is nan", "above 0"]),
    ({"cpus": True}, ["cpus is True", "above 0"]),
    ({"commit": "sometimes"}, ["commit is 'sometimes'", '"on_success"']),
    ({"commit": None}, ["commit is None", '"always"']),
    ({"network": "no"}, ["network is 'no'", "True or False"]),
    ({"idempotency_key": ""}, ["idempotency_key is ''", "1 to 255"]),
    ({"idempotency_key": "k" * 256}, ["idempotency_key is 'kkk", "1 to 255"]),
    ({"idempotency_key": 5}, ["idempotency_key is 5", "1 to 255"]),
    ({"disks": {"..": None}}, ["disks is '..'", "[A-Za-z0-9_]"]),
    ({"disks": {"a/b": None}}, ["disks is 'a/b'", "[A-Za-z0-9_]"]),
    ({"disks": {"": None}}, ["disks is ''", "[A-Za-z0-9_]"]),
    ({"disks": {"n" * 64: None}}, ["disks is 'nnn", "{0,62}"]),
    ({"disks": {"work": "ws"}}, ["disks['work'] is 'ws'", "disk.mount(...)"]),
    ({"disks": ["ws"]}, ["disks is ['ws']", "mapping"]),
]


@pytest.mark.parametrize(("options", "says"), BAD, ids=lambda case: str(case)[:60])
def test_exec_refuses_and_makes_nothing(options: dict[str, Any], says: list[str], tmp_path: Path) -> None:
    store = Metered(MemoryStore())

    async def call() -> None:
        async with LocalFanout(Settings(cache_dir=tmp_path, store="memory://"), store=store) as fo:
            with pytest.raises(Invalid) as caught:
                await fo.exec(**{"command": "true", **options})
            for words in says:
                assert words in str(caught.value)
            assert len(str(caught.value)) < 1000
            assert fo._engine is None, "an engine was started"

    anyio.run(call)
    assert sum(store.usage().requests.values()) == 0
    assert not list((tmp_path / "upper").iterdir())


def test_mounts_are_refused_too(tmp_path: Path) -> None:
    async def calls() -> None:
        async with LocalFanout(Settings(cache_dir=tmp_path, store="memory://"), store=MemoryStore()) as fo:
            disk = await fo.disks.create("ws")
            await disk.put_object("file", b"")
            await disk.checkpoint("cp")
            with pytest.raises(Invalid, match="conditional"):
                disk.mount(read_only=True, conditional=True)
            for bad in ("../x", "a//b", "a/./b", "a\0b", 5):
                with pytest.raises(Invalid, match="subdirectory"):
                    disk.mount(subdirectory=bad)  # type: ignore[arg-type]
            with pytest.raises(NotFound, match="no commit 99"):
                await fo.exec("true", disks={"w": disk.mount(at=99)})
            with pytest.raises(NotFound, match="no branch 'nope'"):
                await fo.exec("true", disks={"w": disk.mount(branch="nope")})
            with pytest.raises(NotFound, match="no branch or checkpoint 'nope'"):
                await fo.exec("true", disks={"w": disk.mount(at="nope")})
            with pytest.raises(NotFound, match="subdirectory"):
                await fo.exec("true", disks={"w": disk.mount(subdirectory="nope")})
            with pytest.raises(Invalid, match="subdirectory"):
                await fo.exec("true", disks={"w": disk.mount(subdirectory="file")})
            point = await fo.disks.get("ws@cp")
            with pytest.raises(Denied, match="read_only=True"):
                await fo.exec("true", disks={"w": point})
            with pytest.raises(Invalid, match=r"no such option.*timeout_s"):
                async for _ in fo.stream("true", timeout=3):
                    pass
            assert [commit.seq async for commit in disk.log()] == [1]
            assert not list((tmp_path / "upper").iterdir())

    anyio.run(calls)


def test_what_is_allowed_passes() -> None:
    assert request.check_env({"a.b-c": "", "K": "x" * ((128 << 10) - 3)})["a.b-c"] == ""
    assert request.check_limits(86_400, 0.5, 1).memory_bytes == 1 << 20
    assert request.check_stdin("ü\udcff") == b"\xc3\xbc\xff"
    assert request.check_stdin(bytearray(b"x")) == b"x"
    assert request.check_stdin(None) == b""
    assert request.check_mount_name("work-1.x_y") == "work-1.x_y"
    assert request.check_cwd("/a b\nc") == "/a b\nc"
    assert request.check_key("k" * 255) == "k" * 255


def test_expand_quotes_for_the_shell() -> None:
    assert request.expand("a {} {#}", ["x y", "it's", 3]) == ["a 'x y' 1", "a 'it'\"'\"'s' 2", "a 3 3"]
    assert request.expand("a {}", ["{}", "{#}"]) == ["a '{}'", "a '{#}'"]
    assert request.expand("a {}", []) == []
    with pytest.raises(Invalid, match=r"must say \{\}"):
        request.expand("echo", ["x"])
    with pytest.raises(Invalid, match="NUL"):
        request.expand("echo {}", ["a\0"])
