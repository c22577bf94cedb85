"""Who makes an S3 request: signatures, presigned URLs and plain tokens, checked against the keys.

Owns these decisions and what of a body's signing follows from them. Knows no operation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from fanout.server.keys import Principal
from fanout.server.s3 import sigv4
from fanout.server.s3.chunked import ChunkedDecoder, Signing
from fanout.server.s3.errors import S3Error, refused
from fanout.server.s3.request import Request
from fanout.server.state import State

__all__ = ["Access", "authenticate"]

#: How far a client's clock may be off.
SKEW_S = 15 * 60
_STREAMING = "STREAMING-"
_SIGNED_STREAMS = {"STREAMING-AWS4-HMAC-SHA256-PAYLOAD": False, "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER": True}
_UNSIGNED_STREAM = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
_HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class Access:
    """Who asks, and how the body comes: `sha256` to verify it by, or `decoder` to take it apart with."""

    principal: Principal
    sha256: str | None = None
    decoder: ChunkedDecoder | None = None


async def authenticate(state: State, request: Request) -> Access:
    """Return who makes the request; the errors of AWS for who cannot be believed."""
    authorization = request.headers.get("authorization", "").strip()
    if authorization.startswith("AWS4-"):
        return await _by_signature(state, request, sigv4.claim_of_header(authorization, request.headers))
    if "X-Amz-Algorithm" in request.query or "X-Amz-Signature" in request.query:
        return await _by_signature(state, request, sigv4.claim_of_query(request.query))
    if authorization.startswith("AWS ") or "AWSAccessKeyId" in request.query:
        raise S3Error("InvalidRequest", "Signature version 2 is not supported: use AWS4-HMAC-SHA256.")
    token = authorization.removeprefix("Bearer ").strip()
    if token.startswith("key-"):
        principal = await state.keys.by_token(token)
        if principal is None:
            raise S3Error("AccessDenied", "This key is unknown, removed or expired.")
    elif state.anonymous is not None:
        principal = state.anonymous
    elif authorization:
        raise S3Error("InvalidArgument", "Unsupported Authorization Type", ArgumentName="Authorization")
    else:
        raise S3Error("AccessDenied")
    return _access(request, principal, None)


async def _by_signature(state: State, request: Request, claim: sigv4.Claim) -> Access:
    _check_time(claim, state.runtime.now_ns() / 1e9)
    payload = request.headers.get("x-amz-content-sha256")
    if payload is None:
        if claim.expires_s is None:
            raise S3Error("MissingSecurityHeader", "A signed request needs an x-amz-content-sha256 header.")
        payload = sigv4.UNSIGNED
    unsigned = [name for name in request.headers if name.startswith("x-amz-") and name not in claim.signed_headers]
    if unsigned and claim.expires_s is None:
        raise S3Error(
            "AccessDenied", "There were headers present in the request which were not signed.",
            HeadersNotSigned=", ".join(unsigned),
        )  # fmt: skip
    found = await state.keys.by_access_key(claim.access_key)
    if found is None:
        raise S3Error("InvalidAccessKeyId", AWSAccessKeyId=claim.access_key[:128])
    principal, secret = found
    key = sigv4.signing_key(secret, claim.day, claim.region)
    if not any(sigv4.is_right(claim, key, text) for text in _signed_texts(request, claim, payload)):
        shown = next(iter(_signed_texts(request, claim, payload))).decode("latin-1")
        raise S3Error(
            "SignatureDoesNotMatch", AWSAccessKeyId=claim.access_key, SignatureProvided=claim.signature[:128],
            CanonicalRequest=shown,
        )  # fmt: skip
    signing = Signing(
        claim.signature, partial(sigv4.chunk_signature, claim, key), partial(sigv4.trailer_signature, claim, key)
    )
    return _access(request, principal, signing)


def _signed_texts(request: Request, claim: sigv4.Claim, payload: str) -> Iterator[bytes]:
    """Yield what the client may have signed; any of it binds it to this very request.

    Clients differ in escaping paths, and with bytes beyond ASCII in a header: some sign what they send, some the
    characters it stands for.
    """
    for path in sigv4.canonical_paths(request.raw_path):
        text = sigv4.canonical_request(
            request.method, path, request.raw_query, request.headers, claim.signed_headers, payload
        )
        yield text.encode("latin-1", "replace")
        if not text.isascii():
            yield text.encode()


def _check_time(claim: sigv4.Claim, now_s: float) -> None:
    signed_s = claim.time.timestamp()
    if claim.expires_s is None:
        if abs(now_s - signed_s) > SKEW_S:
            raise S3Error(
                "RequestTimeTooSkewed",
                RequestTime=claim.amz_date,
                ServerTime=datetime.fromtimestamp(now_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                MaxAllowedSkewMilliseconds=str(SKEW_S * 1000),
            )
    elif signed_s > now_s + SKEW_S:
        raise S3Error("AccessDenied", "Request is not valid yet.")
    elif now_s > signed_s + claim.expires_s:
        raise S3Error("AccessDenied", "Request has expired.", **{"X-Amz-Expires": str(claim.expires_s)})


def _access(request: Request, principal: Principal, signing: Signing | None) -> Access:
    """Say how the body is to be read."""
    payload = request.headers.get("x-amz-content-sha256")
    if payload is None or payload == sigv4.UNSIGNED:
        if payload is None and "aws-chunked" in request.headers.get("content-encoding", ""):
            raise S3Error("InvalidRequest", "An aws-chunked body needs an x-amz-content-sha256 header.")
        return Access(principal)
    if not payload.startswith(_STREAMING):
        if len(payload) != 64 or not _HEX.issuperset(payload):
            raise refused("x-amz-content-sha256", payload, "The SHA-256 of the body, UNSIGNED-PAYLOAD or STREAMING-….")
        return Access(principal, sha256=payload)
    length = request.headers.get("x-amz-decoded-content-length", "")
    if not length.isascii() or not length.isdigit() or len(length) > 18:
        raise S3Error("MissingContentLength", "A streamed body needs an x-amz-decoded-content-length header.")
    if payload == _UNSIGNED_STREAM:
        return Access(principal, decoder=ChunkedDecoder(None, True, int(length)))
    if payload in _SIGNED_STREAMS and signing is not None:
        return Access(principal, decoder=ChunkedDecoder(signing, _SIGNED_STREAMS[payload], int(length)))
    if payload in _SIGNED_STREAMS:
        raise S3Error("InvalidRequest", "The chunks are signed, the request is not.")
    raise S3Error("NotImplemented", f"There is no x-amz-content-sha256 {payload[:80]!r} here.")
