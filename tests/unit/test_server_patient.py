"""Answers that take long: heartbeats meanwhile, the truth in the envelope, and nothing goes on for nobody."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import contextmanager
from typing import Any

import anyio
import pytest
from starlette.responses import Response
from starlette.types import Message

from fanout import wire
from fanout.errors import Busy, NotFound
from fanout.server.answers import success
from fanout.server.patient import Patient, Streaming

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def quick_hearts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HEARTBEAT_S", 0.01)


class Caller:
    """Somebody who listens; `leave` makes him go away."""

    def __init__(self) -> None:
        self.heard: list[Message] = []
        self._gone = anyio.Event()
        self._asked = False

    def leave(self) -> None:
        self._gone.set()

    async def call(self, response: Response) -> None:
        await response({"type": "http"}, self.receive, self.send)

    async def receive(self) -> Message:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.heard.append(message)

    async def until_heard(self, count: int) -> None:
        with anyio.fail_after(30):
            while len(self.heard) < count:
                await anyio.sleep(0.001)

    @property
    def status(self) -> int:
        return int(self.heard[0]["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.heard[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.heard[1:])

    @property
    def ended(self) -> bool:
        return not self.heard[-1].get("more_body", False)


async def test_a_quick_answer_is_as_any_other() -> None:
    caller = Caller()

    async def work() -> Response:
        return success(5)

    await caller.call(Patient(work, {"X": "y"}))
    assert (caller.status, json.loads(caller.body), caller.ended) == (200, {"success": True, "data": 5}, True)
    assert caller.headers[b"x"] == b"y"
    assert caller.headers[b"content-length"] == str(len(caller.body)).encode()

    async def fail() -> Response:
        raise NotFound("it is not")

    caller = Caller()
    await caller.call(Patient(fail, {"X": "y"}))
    assert (caller.status, json.loads(caller.body)["code"], caller.headers[b"x"]) == (404, "not_found", b"y")


async def test_a_mistake_is_left_to_who_logs_it_unless_the_answer_has_begun() -> None:
    async def broken() -> Response:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await Caller().call(Patient(broken, {}))
    caller = Caller()

    async def later() -> Response:
        await caller.until_heard(2)
        raise ZeroDivisionError

    await caller.call(Patient(later, {}))
    assert json.loads(caller.body)["code"] == "internal"


@pytest.mark.parametrize("fails", [False, True])
async def test_a_slow_answer_is_kept_alive_and_its_envelope_tells(fails: bool) -> None:
    caller = Caller()

    async def work() -> Response:
        await caller.until_heard(4)
        if fails:
            raise Busy("no")
        return success("late")

    await caller.call(Patient(work, {"X": "y"}))
    assert caller.status == 200
    assert b"content-length" not in caller.headers
    assert caller.body.startswith(b"\n\n\n")
    answer = json.loads(caller.body)
    assert answer["success"] is not fails
    assert answer.get("code") == ("busy" if fails else None)
    assert caller.ended


@pytest.mark.parametrize("finish", [False, True])
async def test_a_caller_who_goes_away(finish: bool) -> None:
    caller = Caller()
    began, ended = anyio.Event(), []

    async def work() -> Response:
        began.set()
        try:
            await anyio.sleep(0.05)
            ended.append("whole")
        except anyio.get_cancelled_exc_class():
            ended.append("cancelled")
            raise
        return success(None)

    async with anyio.create_task_group() as group:
        group.start_soon(caller.call, Patient(work, {}, finish=finish))
        await began.wait()
        caller.leave()
    assert ended == ["whole" if finish else "cancelled"]


async def test_work_that_another_call_cancels_is_answered() -> None:
    scopes: list[anyio.CancelScope] = []

    @contextmanager
    def held(scope: anyio.CancelScope) -> Any:
        scopes.append(scope)
        try:
            yield
        finally:
            scopes.clear()

    async def work() -> Response:
        scopes[0].cancel()
        await anyio.sleep_forever()
        raise AssertionError

    caller = Caller()
    await caller.call(Patient(work, {}, held=held))
    assert json.loads(caller.body)["code"] == "unavailable"
    assert not scopes


# -- streams ---------------------------------------------------------------------------------------------------------


def failed(error: Exception) -> bytes:
    return f"failed: {error}".encode()


async def test_a_stream_with_nothing_to_say_is_kept_alive() -> None:
    caller = Caller()

    async def parts() -> AsyncGenerator[bytes, None]:
        await caller.until_heard(3)
        yield b"one\n"
        await caller.until_heard(7)
        yield b"two\n"

    await caller.call(Streaming(parts(), wire.NDJSON, {}, last=b"end\n"))
    assert [line for line in caller.body.split(b"\n") if line] == [b"one", b"two", b"end"]
    assert caller.body.startswith(b"\n\n")
    assert caller.ended


async def test_a_stream_that_fails() -> None:
    async def parts(begin: bool) -> AsyncGenerator[bytes, None]:
        if begin:
            yield b"one\n"
        raise NotFound("gone")

    caller = Caller()
    await caller.call(Streaming(parts(False), wire.NDJSON, {}, failed=failed))
    assert (caller.status, json.loads(caller.body)["code"]) == (404, "not_found")
    caller = Caller()
    await caller.call(Streaming(parts(True), wire.NDJSON, {}, last=b"end\n", failed=failed))
    assert (caller.status, caller.body, caller.ended) == (200, b"one\nfailed: gone", True)
    caller = Caller()
    await caller.call(Streaming(parts(True), "application/octet-stream", {}, beating=False))
    assert (caller.body, caller.ended) == (b"one\n", False), "what was sent may be taken for all"


async def test_bytes_have_no_heartbeats() -> None:
    caller = Caller()

    async def parts() -> AsyncGenerator[bytes, None]:
        await anyio.sleep(0.05)
        yield b"data"
        await anyio.sleep(0.05)

    await caller.call(Streaming(parts(), "application/octet-stream", {"Content-Length": "4"}, beating=False))
    assert (caller.body, caller.headers[b"content-length"]) == (b"data", b"4")


async def test_a_stream_whose_reader_goes_away_is_closed() -> None:
    caller = Caller()
    closed = []

    async def parts() -> AsyncGenerator[bytes, None]:
        try:
            yield b"one\n"
            await anyio.sleep_forever()
        finally:
            closed.append(True)

    async with anyio.create_task_group() as group:
        group.start_soon(caller.call, Streaming(parts(), wire.NDJSON, {}))
        await caller.until_heard(2)
        caller.leave()
    assert closed == [True]
