"""Execs and searches of the dialect.

Owns where disks are seen (one at /mnt, /mnt/archil and /mnt/data, several below /mnt/archil) and what a run is
answered as.
"""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter, Request, Response

from fanout.errors import Denied, Invalid
from fanout.local_disk import LocalDisk
from fanout.model import Mount, Run
from fanout.run.mounts import PlacedMount
from fanout.server.answers import failure, success
from fanout.server.archil.bodies import ExecBody, ExecManyBody, GrepBody, IdempotencyKey, MountBody
from fanout.server.caller import Caller, CallerOf
from fanout.server.running import run_exec, unless_gone

__all__ = ["router"]

#: Where the only disk is, and the names in it under which it is seen, too.
_ROOT, _ALIASES = "/mnt", ("archil", "data")
_BASE = "/mnt/archil"
#: Exit code of a command that something ended which is no exit: 128 + SIGKILL, as in a shell.
_KILLED = 137
router = APIRouter()


@router.post("/disks/{disk}/exec", summary="Run a command on one disk")
async def exec_one(
    disk: str, body: ExecBody, request: Request, caller: CallerOf, idempotency_key: IdempotencyKey = None
) -> Response:
    """Run a command in a fresh sandbox that sees the disk at /mnt, /mnt/archil and /mnt/data, and starts in /mnt.

    The disk is mounted in shared mode; read-only where the key may only read, or the id is a checkpoint's.
    """
    found = await caller.disk(disk)
    mount = found.mount(read_only=found.at is not None or not _may_write(caller, found))
    placed = PlacedMount.of(mount, _ROOT, _ALIASES)
    return await _run(request, caller, body.command, {"disk": placed}, _ROOT, idempotency_key)


@router.post("/exec", summary="Run a command on several disks")
async def exec_many(
    body: ExecManyBody, request: Request, caller: CallerOf, idempotency_key: IdempotencyKey = None
) -> Response:
    """Run a command in a fresh sandbox that sees each disk at its own path below /mnt/archil, and starts there."""
    mounts: dict[str, Mount] = {}
    taken: list[str] = []
    for given, wanted in body.disks.items():
        path = _path(given, taken)
        spec = MountBody(disk=wanted) if isinstance(wanted, str) else wanted
        found = await caller.disk(spec.disk)
        if not spec.read_only:
            caller.principal.require(found.id, "write")
        mount = found.mount(
            read_only=spec.read_only or found.at is not None,
            conditional=spec.conditional,
            subdirectory=spec.subdirectory or None,
            checkout=spec.checkout_paths or (),
            queue_ms=spec.queue_ms,
        )
        mounts[path.replace("/", ".") if path.replace("/", ".") not in mounts else f"disk-{len(mounts)}"] = (
            PlacedMount.of(mount, f"{_BASE}/{path}")
        )
    return await _run(request, caller, body.command, mounts, _BASE if mounts else "/mnt", idempotency_key)


@router.post("/disks/{disk}/grep", summary="Search a disk")
async def grep(disk: str, body: GrepBody, request: Request, caller: CallerOf) -> Response:
    """Search the files of a directory for a POSIX extended regular expression."""
    found = await caller.disk(disk)
    with caller.state.exec():
        result = await unless_gone(
            request,
            lambda: found.grep(
                body.pattern,
                directory="/" + body.directory.strip("/"),
                recursive=body.recursive,
                syntax="ere",
                max_results=body.max_results,
                max_duration_s=float(body.max_duration_seconds),
                concurrency=body.concurrency,
            ),
        )
    took_ms = round(result.duration_ms)
    return success(
        {
            "matches": [{"file": match.file, "line": match.line, "text": match.text} for match in result.matches],
            "stoppedReason": result.stopped_reason,
            "filesScanned": result.files_scanned,
            "containersDispatched": len(result.shards),
            "computeSecondsUsed": result.duration_ms / 1e3,
            "durationMs": took_ms,
            "listingMs": 0,
            "grepMs": took_ms,
        }
    )


def _may_write(caller: Caller, disk: LocalDisk) -> bool:
    try:
        caller.principal.require(disk.id, "write")
    except Denied:
        return False
    return True


def _path(given: str, taken: list[str]) -> str:
    """Check a relative path below /mnt/archil; none may lie in another."""
    parts = given.strip("/").split("/")
    allowed = "a relative path such as 'data', without '.', '..', NUL or empty parts, of at most 255 bytes"
    if any(part in ("", ".", "..") or "\0" in part for part in parts) or len(given.encode("utf-8", "replace")) > 255:
        raise Invalid.argument("disks", given, allowed)
    path = "/".join(parts)
    for other in taken:
        if f"{path}/".startswith(f"{other}/") or f"{other}/".startswith(f"{path}/"):
            raise Invalid.argument("disks", given, f"a path that does not lie in {other!r}, where another disk is")
    taken.append(path)
    return path


async def _run(
    request: Request, caller: Caller, command: str, mounts: Mapping[str, Mount], cwd: str, key: str | None
) -> Response:
    limit_s = caller.state.limits.call_s
    run = await run_exec(request, caller, command, disks=mounts, cwd=cwd, timeout_s=limit_s, idempotency_key=key)
    result = _told(run)
    if run.conflict is not None:
        ended = f"; the command itself ended with exit code {result['exitCode']}"
        return failure(409, "conflict", f"{run.conflict}{ended}", data=result)
    if run.status == "timed_out":
        wrote = any(commit.seq is not None for commit in run.commits.values())
        fate = "what it had written is committed" if wrote else "it had written nothing"
        return failure(504, "timeout", f"the command ran longer than {limit_s:g} s and was killed; {fate}", data=result)
    return success(result)


def _told(run: Run) -> dict[str, object]:
    timing = run.timing
    return {
        "exitCode": _KILLED if run.exit_code is None else run.exit_code,
        "stdout": run.stdout,
        "stderr": run.stderr,
        "timing": {
            "totalMs": round(timing.total_ms),
            "queueMs": round(timing.queue_ms),
            "executeMs": round(timing.execute_ms),
        },
        "execId": run.id,
        "status": run.status,
        "stdoutTruncated": run.stdout_truncated,
        "stderrTruncated": run.stderr_truncated,
    }
