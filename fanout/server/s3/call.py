"""One request being answered: who asks, on which line of which disk, and the way into threads and commits.

Owns these few steps, which all operations share.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote_to_bytes

from fanout.disk.disk import Disk, Point
from fanout.disk.merge import Intent, Policy
from fanout.disk.proposal import Landed, Proposal
from fanout.disk.state import State as Tree
from fanout.format.facts import Facts, facts_of
from fanout.format.tree import Node, Ref
from fanout.local_disk import LocalDisk
from fanout.server.keys import Principal
from fanout.server.s3.access import Access
from fanout.server.s3.body import Body
from fanout.server.s3.buckets import Buckets
from fanout.server.s3.conditions import check_write
from fanout.server.s3.described import etag_of
from fanout.server.s3.errors import S3Error
from fanout.server.s3.request import Request, check_key
from fanout.server.state import State

__all__ = ["Call", "blobs_of", "described"]


@dataclass(slots=True)
class Call:
    """`line` is the branch or checkpoint that the bucket is; `threads` runs a blocking call in a worker thread."""

    state: State
    request: Request
    access: Access
    receive: Callable[[], Awaitable[Any]]
    threads: Callable[[Callable[[], Any]], Awaitable[Any]]
    line: LocalDisk
    buckets: Buckets

    @property
    def disk(self) -> Disk:
        return self.line.core

    @property
    def point(self) -> Point:
        return self.line.point

    @property
    def principal(self) -> Principal:
        return self.access.principal

    @property
    def headers(self) -> Mapping[str, str]:
        return self.request.headers

    @property
    def query(self) -> Mapping[str, str]:
        return self.request.query

    def now_ns(self) -> int:
        return self.state.runtime.now_ns()

    def body(self, most: int | None = None) -> Body:
        return Body(self.request, self.access, self.receive, most or self.state.limits.object_bytes)

    def require_version(self) -> None:
        """There are no versions but the one that is there, which S3 calls null."""
        version = self.query.get("versionId")
        if version not in (None, "", "null"):
            raise S3Error("NoSuchVersion")

    def require_condition(self, now: Node | None) -> None:
        """Hold the conditions of a write against what the key names now."""
        check_write(self.headers, None if now is None else etag_of(now, facts_of(now)))

    async def source(self) -> tuple[Call, bytes]:
        """Return a call that reads where x-amz-copy-source points, and the key there."""
        bucket, key = _source_of(self.headers["x-amz-copy-source"])
        line = await self.buckets.open(self.principal, bucket, "read")
        return replace(self, line=line), key

    def commit(
        self,
        plan: Callable[[Tree], Sequence[Intent]],
        message: str,
        blobs: Mapping[bytes, bytes] | None = None,
        seen_blobs: Mapping[bytes, bytes] | None = None,
    ) -> Landed:
        """Commit what `plan` makes of the newest tree; returns when it is durable. Blocking."""
        proposal = Proposal(
            (),
            Policy.STRICT,
            blobs=blobs or {},
            seen_blobs=seen_blobs or {},
            author=self.principal.author,
            message=message,
            plan=plan,
        )
        return self.disk.writable(self.point).commit(proposal)


def _source_of(text: str) -> tuple[str, bytes]:
    """Take an x-amz-copy-source header apart: bucket and key."""
    path, _, query = text.partition("?")
    if query and query not in ("versionId=null", "versionId="):
        raise S3Error("NoSuchVersion") if query.startswith("versionId=") else S3Error("InvalidArgument")
    bucket, slash, key = unquote_to_bytes(path.removeprefix("/").encode("latin-1")).partition(b"/")
    if not bucket or not slash or not key:
        raise S3Error("InvalidArgument", "A copy source is /bucket/key.", ArgumentName="x-amz-copy-source")
    try:
        return bucket.decode(), check_key(key, write=False)
    except UnicodeDecodeError:
        raise S3Error("InvalidArgument", "The copy source is not UTF-8.") from None


def blobs_of(tree: Tree, refs: Sequence[Ref]) -> dict[bytes, bytes]:
    """Return the packs among the tree's inline ones that hold something of `refs`."""
    return {ref.pack: tree.blobs[ref.pack][1] for ref in refs if ref.pack in tree.blobs}


def described(node: Node) -> tuple[Facts | None, str]:
    """Return what is kept of a node, and its ETag."""
    facts = facts_of(node)
    return facts, etag_of(node, facts)
