"""The ASGI application that serves S3: from a request to its operation, and from errors to answers.

Owns dispatch, the headers every answer has, and what becomes of an error. The operations are in the modules beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import aclosing
from typing import Any

import anyio
import anyio.to_thread

from fanout.errors import FanoutError
from fanout.server.caller import Caller
from fanout.server.keys import Right
from fanout.server.s3 import listing, multipart, reading, tagging, writing
from fanout.server.s3.access import Access, authenticate
from fanout.server.s3.body import Body
from fanout.server.s3.buckets import Buckets
from fanout.server.s3.call import Call
from fanout.server.s3.documents import OWNER, OWNER_ID, document, error_document, text
from fanout.server.s3.errors import S3Error, error_of
from fanout.server.s3.request import Header, Reply, Request, parse
from fanout.server.state import State

__all__ = ["S3Gateway"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Operation = Callable[[Call], Awaitable[Reply]]

#: Blocking calls at once. Most of them wait: for the store, or for their commit's group.
_THREADS = 64
_SMALL_BODY_BYTES = 64 << 10
_XML = (b"content-type", b"application/xml")
_log = logging.getLogger("fanout.server.s3")

#: Parts of a bucket or object that are asked for by a name in the query, and what is answered where there is nothing.
_NOTHING = {
    "cors": "NoSuchCORSConfiguration",
    "encryption": "ServerSideEncryptionConfigurationNotFoundError",
    "lifecycle": "NoSuchLifecycleConfiguration",
    "object-lock": "ObjectLockConfigurationNotFoundError",
    "policy": "NoSuchBucketPolicy",
    "publicAccessBlock": "NoSuchPublicAccessBlockConfiguration",
    "replication": "ReplicationConfigurationNotFoundError",
    "website": "NoSuchWebsiteConfiguration",
}
_EMPTY = {
    "accelerate": "AccelerateConfiguration",
    "logging": "BucketLoggingStatus",
    "notification": "NotificationConfiguration",
    "requestPayment": "RequestPaymentConfiguration",
    "versioning": "VersioningConfiguration",
}
_SUBRESOURCES = frozenset({
    *_NOTHING, *_EMPTY, "acl", "analytics", "attributes", "delete", "intelligent-tiering", "inventory", "legal-hold",
    "location", "metrics", "metadataTable", "ownershipControls", "policyStatus", "renameObject", "restore", "retention",
    "select", "session", "tagging", "torrent", "uploadId", "uploads", "versions",
})  # fmt: skip

_OBJECT_OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("GET", ""): reading.get_object,
    ("HEAD", ""): reading.get_object,
    ("PUT", ""): writing.put_object,
    ("DELETE", ""): writing.delete_object,
    ("GET", "attributes"): reading.get_attributes,
    ("GET", "tagging"): tagging.get,
    ("PUT", "tagging"): tagging.put,
    ("DELETE", "tagging"): tagging.delete,
    ("GET", "uploadId"): multipart.list_parts,
    ("PUT", "uploadId"): multipart.upload_part,
    ("POST", "uploadId"): multipart.complete,
    ("DELETE", "uploadId"): multipart.abort,
    ("POST", "uploads"): multipart.create,
}
_BUCKET_OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("GET", "uploads"): multipart.list_uploads,
    ("GET", "versions"): listing.list_versions,
    ("POST", "delete"): writing.delete_objects,
}


class S3Gateway:
    """Serves the disks of an opened state as buckets."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._buckets = Buckets(state, self._in_thread)
        self._limiter: anyio.CapacityLimiter | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = self._state.runtime.hex_id(16).upper()
        resource, method = "/", scope["method"]
        asked_for_body = False

        async def receiving() -> Any:
            nonlocal asked_for_body
            asked_for_body = True
            return await receive()

        try:
            request = parse(scope)
            resource = request.resource
            reply = await self._answer(request, receiving)
        except FanoutError as error:
            reply = _failure(error_of(error), resource, request_id)
        except Exception as error:
            _log.error("an S3 request broke", exc_info=error)
            reply = _failure(S3Error("InternalError"), resource, request_id)
        if not asked_for_body and any(name == b"expect" for name, _ in scope["headers"]):
            # The client may or may not send the body that was not asked for: nothing else can follow it.
            reply.headers.append((b"connection", b"close"))
        await _send(reply, method, request_id, send, receive)

    async def _answer(self, request: Request, receive: Receive) -> Reply:
        access = await authenticate(self._state, request)
        request.scope["fanout.caller"] = Caller(self._state, access.principal)  # for the log
        if not request.bucket:
            if request.method != "GET" or request.key:
                raise S3Error("MethodNotAllowed")
            return await self._buckets.list(access.principal, request)
        subresource = _subresource(request)
        if not request.key and not subresource and request.method in ("PUT", "DELETE"):
            if request.method == "DELETE":
                return await self._buckets.delete(access.principal, request.bucket)
            body = await Body(request, access, receive, _SMALL_BODY_BYTES).read(self._in_thread, None)
            return await self._buckets.create(access.principal, request, body)
        operation = (_object_operation if request.key else _bucket_operation)(request, subresource)
        try:
            return await operation(await self._call(request, access, receive))
        except FanoutError as error:
            if error_of(error).s3 != "NoSuchBucket" or not self._buckets.forget(request.bucket):
                raise
        # The disk was deleted under us, and perhaps made anew since: then this answers, or the client asks again.
        call = await self._call(request, access, receive)
        if request.method not in ("GET", "HEAD"):
            raise S3Error("ServiceUnavailable", "The bucket was deleted and made anew; please send this again.")
        return await operation(call)

    async def _call(self, request: Request, access: Access, receive: Receive) -> Call:
        if request.headers.get("x-amz-expected-bucket-owner", OWNER_ID) != OWNER_ID:
            raise S3Error("AccessDenied", f"The owner of every bucket is {OWNER_ID!r}.")
        right: Right = "read" if request.method in ("GET", "HEAD") else "write"
        line = await self._buckets.open(access.principal, request.bucket, right)
        return Call(self._state, request, access, receive, self._in_thread, line, self._buckets)

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(_THREADS)
        return await anyio.to_thread.run_sync(call, limiter=self._limiter)


def _subresource(request: Request) -> str:
    found = [name for name in request.query if name in _SUBRESOURCES]
    if len(found) > 1:
        raise S3Error("InvalidRequest", f"Conflicting query parameters: {', '.join(sorted(found))}.")
    return found[0] if found else ""


def _object_operation(request: Request, subresource: str) -> Operation:
    if "x-amz-copy-source" in request.headers and request.method == "PUT":
        if subresource == "":
            return writing.copy_object
        if subresource == "uploadId":
            return multipart.upload_part_copy
    operation = _OBJECT_OPERATIONS.get((request.method, subresource))
    if operation is not None:
        return operation
    if subresource == "acl" and request.method == "GET":
        return _acl
    raise _unknown(request, subresource)


def _bucket_operation(request: Request, subresource: str) -> Operation:
    operation = _BUCKET_OPERATIONS.get((request.method, subresource))
    if operation is not None:
        return operation
    if request.method == "HEAD" and not subresource:
        return _head_bucket
    if request.method == "GET":
        if not subresource:
            return listing.list_objects_v2 if request.query.get("list-type") == "2" else listing.list_objects
        if subresource == "acl":
            return _acl
        if subresource == "location":
            return _location
        if subresource == "ownershipControls":
            return _ownership
        if subresource in _EMPTY:
            return _empty
        if subresource in _NOTHING or subresource == "tagging":
            return _nothing
    raise _unknown(request, subresource)


def _unknown(request: Request, subresource: str) -> S3Error:
    if request.method not in ("GET", "HEAD", "PUT", "POST", "DELETE") or (request.method == "HEAD" and subresource):
        return S3Error("MethodNotAllowed")
    if not subresource and request.method == "POST" and request.key:
        return S3Error("MethodNotAllowed")
    what = f"{request.method} of {subresource!r}" if subresource else request.method
    return S3Error("NotImplemented", f"{what} is not implemented.")


# -- small answers -------------------------------------------------------------------------------------------------


async def _head_bucket(call: Call) -> Reply:
    await call.threads(call.point.state)
    return Reply(200, [(b"x-amz-bucket-region", b"us-east-1")])


async def _location(call: Call) -> Reply:
    await call.threads(call.point.state)
    return Reply(200, [], document("LocationConstraint"))


async def _ownership(call: Call) -> Reply:
    rule = text("ObjectOwnership", "BucketOwnerEnforced")
    return Reply(200, [], document("OwnershipControls", f"<Rule>{rule}</Rule>"))


async def _acl(call: Call) -> Reply:
    if call.request.key:
        await call.threads(lambda: reading.find(call, call.request.key))
    grantee = (
        f'<Grantee xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance" xsi:type="CanonicalUser"><ID>{OWNER_ID}</ID>'
        f"<DisplayName>{OWNER_ID}</DisplayName></Grantee>"
    )
    grant = f"<Grant>{grantee}{text('Permission', 'FULL_CONTROL')}</Grant>"
    return Reply(200, [], document("AccessControlPolicy", OWNER, f"<AccessControlList>{grant}</AccessControlList>"))


async def _empty(call: Call) -> Reply:
    name = _subresource(call.request)
    inner = text("Payer", "BucketOwner") if name == "requestPayment" else ""
    return Reply(200, [], document(_EMPTY[name], inner))


async def _nothing(call: Call) -> Reply:
    name = _subresource(call.request)
    raise S3Error(_NOTHING.get(name, "NoSuchTagSet"), BucketName=call.request.bucket)


# -- sending -------------------------------------------------------------------------------------------------------


def _failure(error: S3Error, resource: str, request_id: str) -> Reply:
    if error.status == 304:
        return Reply(304)
    return Reply(error.status, [_XML], error_document(error.s3, error.message, resource, request_id, error.fields))


async def _send(reply: Reply, method: str, request_id: str, send: Send, receive: Receive) -> None:
    headers: list[Header] = [(b"x-amz-request-id", request_id.encode()), *reply.headers]
    length = len(reply.body) if reply.length is None else reply.length
    if reply.status != 304 and (reply.status != 204):
        headers.append((b"content-length", b"%d" % length))
    if reply.body and not any(name == b"content-type" for name, _ in reply.headers):
        headers.append(_XML)
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    if reply.stream is None or method == "HEAD":
        await send({"type": "http.response.body", "body": b"" if method == "HEAD" else reply.body})
        return
    async with aclosing(reply.stream) as pieces:  # type: ignore[type-var]
        await reading.send_ahead(pieces, send, receive)
