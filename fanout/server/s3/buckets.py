"""Buckets: which disk, and which line of it, a bucket's name means; listing, creating and deleting them.

Owns that, and what this process remembers of it. Rights are the principal's to say.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from fanout.disk.disk import Disk
from fanout.disk.keys import list_keys
from fanout.disk.log import Deleted
from fanout.errors import Exists, Invalid, NotFound
from fanout.format.layout import MAIN
from fanout.local_disk import LocalDisk
from fanout.server.keys import Principal, Right
from fanout.server.s3.documents import OWNER, child, document, iso_date, parse_xml, text
from fanout.server.s3.errors import S3Error
from fanout.server.s3.request import Reply, Request
from fanout.server.state import State

__all__ = ["Buckets"]

Threads = Callable[[Callable[[], Any]], Awaitable[Any]]
_MOST_KNOWN = 1000
#: What S3 allows of what a disk may be called.
_S3_NAME = re.compile(r"(?!.*(?:\.\.|\.-|-\.))(?![0-9.]+$)[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_REGIONS = {None, "", "us-east-1", "local", "default"}


class Buckets:
    """The disks of a server, as buckets: `name` or id, with `@branch` or `@checkpoint` after it if wanted.

    Clients that allow no `@` may write `--` for it, and for the `/` of a rescue branch.
    """

    def __init__(self, state: State, threads: Threads) -> None:
        self._state = state
        self._threads = threads
        self._known: dict[str, LocalDisk] = {}

    async def open(self, principal: Principal, bucket: str, right: Right) -> LocalDisk:
        """Return the line that a bucket is; `NoSuchBucket`, `AccessDenied`. Costs no request if it was open before.

        A disk that was deleted meanwhile says so at the first look at its log: see `forget`.
        """
        line = self._known.get(bucket)
        if line is None:
            line = await self._find(bucket)
        if line is None:
            if principal.disks is not None:
                raise S3Error("AccessDenied", "This key does not give access to a bucket of this name.")
            raise S3Error("NoSuchBucket", BucketName=bucket)
        if not principal.sees(line.id):
            raise S3Error("AccessDenied", "This key does not give access to a bucket of this name.")
        principal.require(line.id, right)
        return line

    def forget(self, bucket: str) -> bool:
        """Let go of what is remembered of a bucket; returns whether it was."""
        return self._known.pop(bucket, None) is not None

    async def _find(self, bucket: str) -> LocalDisk | None:
        for spec in _spellings(bucket):
            try:
                line = await self._state.fanout.disks.get(spec)
            except (NotFound, Invalid):
                continue
            assert isinstance(line, LocalDisk)
            if line.point.seq is None:  # a checkpoint can be taken away, and nothing in its log would tell
                if len(self._known) >= _MOST_KNOWN:
                    self._known.clear()
                self._known[bucket] = line
            return line
        return None

    # -- operations -----------------------------------------------------------------------------------------

    async def list(self, principal: Principal, request: Request) -> Reply:
        """ListBuckets: those that the principal may see."""
        limit = request.number("max-buckets", 10_000, 1, 10_000)
        prefix = request.query.get("prefix", "")
        after = request.query.get("continuation-token", "")
        told: list[str] = []
        last = ""
        more = False
        async for disk in self._state.fanout.disks.list():
            assert isinstance(disk, LocalDisk)
            if not principal.sees(disk.id) or not disk.name.startswith(prefix) or disk.name <= after:
                continue
            if len(told) >= limit:
                more = True
                break
            created = text("CreationDate", iso_date(disk.core.record.created_ns))
            told.append(f"<Bucket>{text('Name', disk.name)}{created}</Bucket>")
            last = disk.name
        parts = [OWNER, f"<Buckets>{''.join(told)}</Buckets>"]
        if prefix:
            parts.append(text("Prefix", prefix))
        if more:
            parts.append(text("ContinuationToken", last))
        return Reply(200, [], document("ListAllMyBucketsResult", *parts))

    async def create(self, principal: Principal, request: Request, body: bytes) -> Reply:
        """CreateBucket: a new disk."""
        principal.require_admin()
        if body.strip():
            root = parse_xml(body, "CreateBucketConfiguration")
            if child(root, "LocationConstraint") not in _REGIONS:
                raise S3Error("InvalidLocationConstraint")
        if request.headers.get("x-amz-bucket-object-lock-enabled", "").lower() == "true":
            raise S3Error("NotImplemented", "There is no object lock.")
        if _S3_NAME.fullmatch(request.bucket) is None:
            raise S3Error("InvalidBucketName", BucketName=request.bucket)
        try:
            await self._state.fanout.disks.create(request.bucket)
        except Exists:
            pass  # as in us-east-1: who has it already may create it again, and nothing changes
        return Reply(200, [(b"location", b"/" + request.bucket.encode())])

    async def delete(self, principal: Principal, bucket: str) -> Reply:
        """DeleteBucket: an empty disk, which no branch or checkpoint keeps anything of."""
        principal.require_admin()
        line = await self.open(principal, bucket, "admin")
        if line.point.seq is not None or line.branch_name != MAIN:
            raise S3Error("MethodNotAllowed", "A branch or checkpoint is not deleted as a bucket.")
        try:
            await self._threads(lambda: _require_empty(line.core))
            await self._state.fanout.disks.delete(line.id)
        except Deleted:
            raise S3Error("NoSuchBucket", BucketName=bucket) from None
        finally:
            for known in [name for name, each in self._known.items() if each.id == line.id]:
                self.forget(known)
        return Reply(204)


def _require_empty(disk: Disk) -> None:
    if list_keys(disk.point().state(), b"", b"", b"", 1).keys:
        raise S3Error("BucketNotEmpty")
    others = [name for name in disk.branch_names() if name != MAIN]
    if others or next(disk.checkpoint_names(), None) is not None:
        raise S3Error("BucketNotEmpty", "The disk has other branches or checkpoints: delete it through its own API.")


def _spellings(bucket: str) -> Iterator[str]:
    yield bucket.replace(":", "/")
    if "@" in bucket:
        return
    at = bucket.find("--")
    while at > 0:
        line = bucket[at + 2 :]
        yield f"{bucket[:at]}@{'rescue/' + line[8:] if line.startswith('rescue--') else line}"
        at = bucket.find("--", at + 1)
