"""Every route of the API with generated input, in process: an answer with a reason, never a mistake of ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anyio
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, note, settings
from schemathesis import GenerationMode

from fanout.config import Settings
from fanout.server.app import create_app
from fanout.server.state import State

#: How many requests a route gets.
EXAMPLES = 8
#: Deleting the disk that the others are to find comes to nothing new.
_LEFT_ALONE = {("DELETE", "/api/disks/{disk}")}


@schemathesis.serializer("application/vnd.msgpack", "application/vnd.fanout.frames")
def packed(context: object, value: object) -> bytes:
    return value if isinstance(value, bytes) else msgspec.msgpack.encode(value, enc_hook=str)


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    top = tmp_path_factory.mktemp("fuzz")
    chosen = Settings.load({}, store="memory://", cache_dir=top / "cache", engine="bubblewrap")
    state = State(chosen, authenticate=False)

    async def start() -> None:
        await state.open()
        disk = await state.fanout.disks.create("ws")
        await disk.put_object("a/b", b"content\n")
        await disk.checkpoint("cp")

    anyio.run(start)
    yield schemathesis.openapi.from_asgi("/openapi.json", create_app(state))
    anyio.run(state.close)


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_no_route_breaks(api: Any, mode: GenerationMode) -> None:
    """One test for all routes: which there are is known when the application is made."""
    operations = [found.ok() for found in api.get_all_operations()]
    assert len(operations) > 20
    for operation in operations:

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
        )
        def check(case: Any) -> None:
            if "disk" in (case.path_parameters or {}) and (case.method, case.path) not in _LEFT_ALONE:
                case.path_parameters["disk"] = "ws"
            answer = case.call()
            note(f"{case.method} {case.formatted_path}: {answer.status_code} {answer.text[:500]}")
            assert answer.status_code not in (500, 502)
            if answer.status_code >= 400 and case.method != "HEAD":
                told = json.loads(answer.text)
                assert told["success"] is False
                assert told["error"]
                assert told["code"]

        check()
