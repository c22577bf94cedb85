"""Branches and checkpoints of the dialect.

Owns making a retried creation the same one, and how a branch is described.
"""

from __future__ import annotations

from collections.abc import Mapping

import anyio.to_thread
from fastapi import APIRouter, Response

from fanout.disk.branch import Branch
from fanout.disk.disk import Disk
from fanout.disk.load import lineage_at
from fanout.errors import Exists, Invalid, NotFound
from fanout.format.layout import check_branch_name
from fanout.server.answers import success
from fanout.server.archil.bodies import BranchBody, IdempotencyKey
from fanout.server.archil.disks import line_id, timestamp
from fanout.server.caller import CallerOf

__all__ = ["router"]

router = APIRouter()


@router.post("/disks/{disk}/branches", status_code=201, summary="Start a branch from a checkpoint")
async def create_branch(
    disk: str, body: BranchBody, caller: CallerOf, idempotency_key: IdempotencyKey = None
) -> Response:
    """Start a writable branch. With the same Idempotency-Key and arguments again: the branch that was made then."""
    found = await caller.disk(disk, "write")
    check_branch_name("branch_name", body.branch_name)
    uuid = None
    if idempotency_key:
        asked = "\0".join((caller.principal.id, found.id, idempotency_key, body.model_dump_json()))
        uuid = caller.state.keys.derive("branch", asked.encode()).hex()[:32]

    def work() -> dict[str, object]:
        core = found.core
        record = core.checkpoint_record(body.from_checkpoint_name)
        if body.from_branch is not None and record.branch != body.from_branch:
            raise NotFound(f"branch {body.from_branch!r} has no checkpoint {body.from_checkpoint_name!r}")
        start = core.point(body.from_checkpoint_name)
        try:
            made = core.create_branch(body.branch_name, start, uuid)
        except Exists:
            if uuid is None or body.branch_name not in core.branch_names():
                raise
            made = core.branch(body.branch_name)
            if made.uuid != uuid:
                raise
        return _described(core, made, body.from_checkpoint_name)

    if body.from_checkpoint_name == "main":
        raise Invalid.argument("from_checkpoint_name", body.from_checkpoint_name, "a checkpoint; this is a branch")
    return success(await anyio.to_thread.run_sync(work), status=201)


@router.get("/disks/{disk}/branches", summary="List branches")
async def list_branches(disk: str, caller: CallerOf) -> Response:
    """List all branches but `main`, which is the disk itself; those that keep what a conflict left out among them."""
    core = (await caller.disk(disk)).core

    def work() -> list[dict[str, object]]:
        names = _checkpoints(core)
        branches = [core.branch(name) for name in core.branch_names() if name != "main"]
        return [_described(core, branch, names.get(_origin(branch), "")) for branch in branches]

    return success(await anyio.to_thread.run_sync(work))


@router.get("/disks/{disk}/branches/{name:path}", summary="Describe a branch")
async def get_branch(disk: str, name: str, caller: CallerOf) -> Response:
    core = (await caller.disk(disk)).core

    def work() -> dict[str, object]:
        branch = core.branch(name)
        return _described(core, branch, _checkpoints(core).get(_origin(branch), ""))

    return success(await anyio.to_thread.run_sync(work))


@router.get("/disks/{disk}/checkpoints", summary="List checkpoints")
async def list_checkpoints(disk: str, caller: CallerOf) -> Response:
    """List the disk's checkpoints. `filesystem_id` works wherever a disk's id does, to read."""
    found = await caller.disk(disk)
    listed = [
        {
            "checkpoint_name": checkpoint.name,
            "filesystem_id": line_id(found.id, checkpoint.name),
            "branch_name": checkpoint.branch,
            "seq": checkpoint.seq,
            "created_at": checkpoint.time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        }
        async for checkpoint in found.checkpoints()
    ]
    return success(listed)


def _described(core: Disk, branch: Branch, checkpoint: str) -> dict[str, object]:
    """Return a branch as the dialect has it; the checkpoint's name is "" for one that started elsewhere."""
    return {
        "root_filesystem_id": core.id,
        "branch_name": branch.name,
        "filesystem_id": line_id(core.id, branch.name),
        "from_checkpoint_name": checkpoint,
        "from_checkpoint_filesystem_id": line_id(core.id, checkpoint),
        "created_at": timestamp(branch.record.created_ns),
    }


def _origin(branch: Branch) -> tuple[str, int] | None:
    """Where a branch started: the id of the line and the sequence number, as a checkpoint there has them."""
    lineage = branch.record.lineage
    return lineage[0] if lineage else None


def _checkpoints(core: Disk) -> Mapping[tuple[str, int] | None, str]:
    """Return the names of the disk's checkpoints by the place that a branch started from them has as its origin."""
    records = {name: core.checkpoint_record(name) for name in core.checkpoint_names()}
    return {lineage_at(core.branch(each.branch).record, each.seq)[0]: name for name, each in records.items()}
