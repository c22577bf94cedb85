"""AWS Signature Version 4, the server's side: what was signed, by whom, and whether it is right.

Owns parsing of signatures, canonical requests and their comparison in constant time. Pure: no keys, no clock, no I/O.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from hashlib import sha256
from urllib.parse import quote, unquote_to_bytes

from fanout.server.s3.errors import S3Error

__all__ = [
    "ALGORITHM",
    "EMPTY_SHA256",
    "UNSIGNED",
    "Claim",
    "canonical_paths",
    "canonical_request",
    "chunk_signature",
    "claim_of_header",
    "claim_of_query",
    "is_right",
    "presigned_query",
    "signature_of",
    "signing_key",
    "trailer_signature",
]

ALGORITHM = "AWS4-HMAC-SHA256"
UNSIGNED = "UNSIGNED-PAYLOAD"
EMPTY_SHA256 = sha256(b"").hexdigest()
#: Longest life of a presigned request, in seconds.
MAX_EXPIRES_S = 7 * 24 * 3600

_DATE = re.compile(r"[0-9]{8}T[0-9]{6}Z")
_SAFE_PATH, _SAFE = "/-_.~", "-_.~"
_WHOLE = re.compile(r"-?[0-9]{1,9}")
_SPACES = re.compile(r" +")


@dataclass(frozen=True, slots=True)
class Claim:
    """Who says to have signed a request, and how. `time` is UTC; `expires_s` is None for a header's signature."""

    access_key: str
    day: str
    region: str
    signed_headers: tuple[str, ...]
    signature: str
    time: datetime
    amz_date: str
    expires_s: int | None = None

    @property
    def scope(self) -> str:
        return f"{self.day}/{self.region}/s3/aws4_request"


def claim_of_header(text: str, headers: Mapping[str, str]) -> Claim:
    """Read an `Authorization: AWS4-HMAC-SHA256 …` header."""
    scheme, _, rest = text.partition(" ")
    fields: dict[str, str] = {}
    for part in rest.split(","):
        name, _, value = part.partition("=")
        fields[name.strip()] = value.strip()
    if scheme != ALGORITHM or not {"Credential", "SignedHeaders", "Signature"} <= fields.keys():
        raise S3Error("AuthorizationHeaderMalformed", "Credential, SignedHeaders and Signature are needed.")
    date = headers.get("x-amz-date") or headers.get("date", "")
    return _claim(
        fields["Credential"], fields["SignedHeaders"], fields["Signature"], date, "AuthorizationHeaderMalformed"
    )


def claim_of_query(query: Mapping[str, str]) -> Claim:
    """Read the signature of a presigned URL."""
    wrong = "AuthorizationQueryParametersError"
    names = ("X-Amz-Credential", "X-Amz-Date", "X-Amz-Expires", "X-Amz-SignedHeaders", "X-Amz-Signature")
    missing = [name for name in names if not query.get(name)]
    if query.get("X-Amz-Algorithm") != ALGORITHM or missing:
        raise S3Error(wrong, f"A presigned request needs X-Amz-Algorithm={ALGORITHM}, {', '.join(names)}.")
    expires = query["X-Amz-Expires"]
    if _WHOLE.fullmatch(expires) is None or int(expires) > MAX_EXPIRES_S:
        raise S3Error(wrong, f"X-Amz-Expires must be 1 to {MAX_EXPIRES_S} seconds.")
    return _claim(
        query["X-Amz-Credential"],
        query["X-Amz-SignedHeaders"],
        query["X-Amz-Signature"],
        query["X-Amz-Date"],
        wrong,
        int(expires),
    )


def _claim(credential: str, signed: str, signature: str, date: str, wrong: str, expires_s: int | None = None) -> Claim:
    parts = credential.rsplit("/", 4)
    if len(parts) != 5 or parts[4] != "aws4_request" or not parts[0]:
        raise S3Error(wrong, "A credential is ACCESS-KEY/YYYYMMDD/REGION/s3/aws4_request.")
    access_key, day, region, service, _ = parts
    if service != "s3":
        raise S3Error(wrong, f"The service of the credential is {service[:40]!r}; it must be 's3'.")
    time = _time(date)
    amz_date = time.strftime("%Y%m%dT%H%M%SZ")
    if day != amz_date[:8]:
        raise S3Error(wrong, "The date of the credential is not that of the request.")
    names = tuple(name.strip().lower() for name in signed.split(";") if name.strip())
    if "host" not in names:
        raise S3Error(wrong, "The host header must be signed.")
    return Claim(access_key, day, region, names, signature, time, amz_date, expires_s)


@lru_cache(maxsize=256)
def _time(text: str) -> datetime:
    if not _DATE.fullmatch(text):
        return _http_time(text)
    try:
        return datetime.strptime(text, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        raise S3Error("AccessDenied", "The date of the request is not valid.") from None


def _http_time(text: str) -> datetime:
    try:
        found = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):
        raise S3Error("AccessDenied", "A signed request needs a valid Date or x-amz-date header.") from None
    return (found.replace(tzinfo=UTC) if found.tzinfo is None else found).astimezone(UTC)


def canonical_paths(raw_path: bytes) -> tuple[str, ...]:
    """Return what may have been signed as the path: it, escaped as AWS does it, or as it was sent."""
    escaped, sent = quote(unquote_to_bytes(raw_path), safe=_SAFE_PATH), raw_path.decode("latin-1")
    return (escaped,) if escaped == sent else (escaped, sent)


def canonical_request(
    method: str,
    path: str,
    query: Sequence[tuple[str, str]],
    headers: Mapping[str, str],
    signed_headers: Sequence[str],
    payload: str,
) -> str:
    """Return the text whose hash is signed. `query` has raw (still escaped) names and values."""
    pairs = sorted((_requoted(name), _requoted(value)) for name, value in query if name != "X-Amz-Signature")
    lines = [method, path, "&".join([f"{name}={value}" for name, value in pairs])]
    for name in signed_headers:
        value = headers.get(name, "").strip()
        lines.append(f"{name}:{_SPACES.sub(' ', value) if '  ' in value else value}")
    lines += ("", ";".join(signed_headers), payload)
    return "\n".join(lines)


def _requoted(text: str) -> str:
    return quote(unquote_to_bytes(text.replace("+", "%20")), safe=_SAFE) if not text.isalnum() else text


@lru_cache(maxsize=1024)
def signing_key(secret: str, day: str, region: str) -> bytes:
    key = ("AWS4" + secret).encode()
    for part in (day, region, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


def signature_of(claim: Claim, key: bytes, canonical: bytes) -> str:
    """Return the signature that a canonical request has with this key."""
    text = f"{ALGORITHM}\n{claim.amz_date}\n{claim.scope}\n{sha256(canonical).hexdigest()}"
    return hmac.digest(key, text.encode(), "sha256").hex()


def is_right(claim: Claim, key: bytes, canonical: bytes) -> bool:
    """Whether the claim's signature is that of a canonical request; in constant time."""
    expected = signature_of(claim, key, canonical)
    return hmac.compare_digest(expected.encode(), claim.signature.encode("utf-8", "surrogateescape"))


def chunk_signature(claim: Claim, key: bytes, previous: str, data_sha256: str) -> str:
    """Return the signature of one chunk of a signed stream, given that of the chunk before it."""
    text = "\n".join(("AWS4-HMAC-SHA256-PAYLOAD", claim.amz_date, claim.scope, previous, EMPTY_SHA256, data_sha256))
    return hmac.digest(key, text.encode(), "sha256").hex()


def trailer_signature(claim: Claim, key: bytes, previous: str, trailers: bytes) -> str:
    """Return the signature of the trailing headers of a signed stream."""
    text = "\n".join(("AWS4-HMAC-SHA256-TRAILER", claim.amz_date, claim.scope, previous, sha256(trailers).hexdigest()))
    return hmac.digest(key, text.encode(), "sha256").hex()


def presigned_query(
    method: str, host: str, path: str, access_key: str, secret: str, time: datetime, expires_s: int
) -> str:
    """Return the query string that lets whoever has it make one request, from `time` (UTC) on for `expires_s`.

    `path` is escaped as `canonical_paths` does it.
    """
    amz_date = time.strftime("%Y%m%dT%H%M%SZ")
    day, region = amz_date[:8], "us-east-1"
    pairs = [
        ("X-Amz-Algorithm", ALGORITHM),
        ("X-Amz-Credential", quote(f"{access_key}/{day}/{region}/s3/aws4_request", safe=_SAFE)),
        ("X-Amz-Date", amz_date),
        ("X-Amz-Expires", str(expires_s)),
        ("X-Amz-SignedHeaders", "host"),
    ]
    canonical = canonical_request(method, path, pairs, {"host": host}, ("host",), UNSIGNED)
    claim = Claim(access_key, day, region, ("host",), "", time, amz_date)
    signature = signature_of(claim, signing_key(secret, day, region), canonical.encode())
    return "&".join([f"{name}={value}" for name, value in pairs] + [f"X-Amz-Signature={signature}"])
