"""Execs under an idempotency key, by whichever process: run once, told to all who ask.

Owns the order of claiming, running and keeping what came of it, and how that is encoded. Claims are disk/calls.py's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import anyio
import anyio.to_thread
from pydantic import BaseModel

from fanout import wire
from fanout.disk.calls import MAX_OUTCOME_BYTES, Calls, Claim, Held
from fanout.errors import FanoutError, Unknown
from fanout.format.call import ClaimRecord, EndRecord
from fanout.model import Run
from fanout.run.exec import Job
from fanout.run.executor import LocalExecutor
from fanout.runtime import Runtime

__all__ = ["hash_of", "run_claimed"]

#: How often who waits for another process looks, in seconds: soon at first.
_POLL_S = (0.02, 1.0)
#: What is kept of each stream of an outcome that is too long to be kept whole, in bytes.
_KEPT_STREAM_BYTES = 1 << 20


async def run_claimed(
    calls: Calls, executor: LocalExecutor, job: Job, digest: str, asked: bytes, runtime: Runtime
) -> Run:
    """Run a job that no process has run under this key, else return (or raise) what came of it there.

    Waits for a process that has it, for as long as that gives signs of life.
    """
    writing = [mount for mount in job.mounts if mount.mode != "read_only"]
    lines = tuple((mount.disk.id, mount.base.branch.name, mount.base.branch.known().seq) for mount in writing)
    record = ClaimRecord(asked, job.id, lines, runtime.now_ns())
    claim = await _claim(calls, digest, record)
    if isinstance(claim, EndRecord):
        return _outcome_of(claim)
    ended = False

    def keep(outcome: Run | FanoutError) -> None:
        nonlocal ended
        ended = True
        try:
            calls.finish(claim, _end_of(outcome, job.id))
        except FanoutError:
            pass  # the caller is told all the same; who asks later finds the commit, and is told of that

    def void() -> None:
        try:
            calls.finish(claim, EndRecord("void", b"", job.id))
        except FanoutError:
            pass  # who asks later has to wait until the claim is taken for dead

    stop = calls.keep_alive(claim)
    try:
        return await executor.run(replace(job, fence=partial(calls.check, claim)), keep)
    except (FanoutError, anyio.get_cancelled_exc_class()):
        if not ended:  # then nothing was committed, and nothing will be
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(void)
        raise
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(stop)


async def _claim(calls: Calls, digest: str, record: ClaimRecord) -> Claim | EndRecord:
    found: Claim | EndRecord | Held = await anyio.to_thread.run_sync(calls.enter, digest, record)
    pause_s = _POLL_S[0]
    while isinstance(found, Held):
        await anyio.sleep(pause_s)
        pause_s = min(2 * pause_s, _POLL_S[1])
        found = await anyio.to_thread.run_sync(calls.enter, digest, record, found)
    return found


def hash_of(asked: object) -> bytes:
    """Return a hash of what was asked, the same in every process and whatever the order of keys."""
    return hashlib.sha256(repr(_plain(asked)).encode("utf-8", "surrogatepass")).digest()


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):
        return type(value).__name__, _plain(value.model_dump())
    if isinstance(value, Mapping):
        return sorted((str(key), repr(_plain(each))) for key, each in value.items())
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value


def _end_of(outcome: Run | FanoutError, exec_id: str) -> EndRecord:
    if isinstance(outcome, Run):
        payload = wire.json_bytes(wire.run_fields(outcome))
        if len(payload) > MAX_OUTCOME_BYTES:
            payload = wire.json_bytes(wire.run_fields(_cut(outcome)))
        return EndRecord("result", payload, exec_id)
    run = getattr(outcome, "run", None)
    payload = wire.json_bytes(wire.error_fields(outcome))
    if isinstance(run, Run) and len(payload) > MAX_OUTCOME_BYTES:
        payload = wire.json_bytes({**wire.error_fields(outcome), "run": wire.run_fields(_cut(run))})
    return EndRecord("error", payload, exec_id)


def _cut(run: Run) -> Run:
    return run.model_copy(
        update={
            "stdout_bytes": run.stdout_bytes[:_KEPT_STREAM_BYTES],
            "stderr_bytes": run.stderr_bytes[:_KEPT_STREAM_BYTES],
            "stdout_truncated": run.stdout_truncated or len(run.stdout_bytes) > _KEPT_STREAM_BYTES,
            "stderr_truncated": run.stderr_truncated or len(run.stderr_bytes) > _KEPT_STREAM_BYTES,
        }
    )


def _outcome_of(end: EndRecord) -> Run:
    if end.kind == "result":
        return wire.run_of(wire.json_of(end.payload))
    if end.kind == "error":
        raise wire.error_of(wire.json_of(end.payload), 500)
    raise Unknown(end.payload.decode())
