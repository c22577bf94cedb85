"""S3's checksums of objects: computing, verifying and combining them.

Owns the algorithms and the rules for what a client may claim. Knows no HTTP beyond the names of headers.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from awscrt import checksums as crt

from fanout.server.s3.errors import S3Error

__all__ = ["ALGORITHMS", "Claimed", "Digests", "claimed_checksum", "composite", "full_object", "header_of"]


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...

    def digest(self) -> bytes: ...


class _Crc:
    """A cyclic redundancy check with the interface of hashlib."""

    def __init__(self, compute: Callable[[bytes, int], int], size: int) -> None:
        self._compute = compute
        self._size = size
        self._value = 0

    def update(self, data: bytes, /) -> None:
        self._value = self._compute(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(self._size, "big")


#: name -> (how to begin one, bytes of its value)
ALGORITHMS: dict[str, tuple[Callable[[], _Hash], int]] = {
    "CRC32": (lambda: _Crc(zlib.crc32, 4), 4),
    "CRC32C": (lambda: _Crc(crt.crc32c, 4), 4),
    "CRC64NVME": (lambda: _Crc(crt.crc64nvme, 8), 8),
    "SHA1": (hashlib.sha1, 20),
    "SHA256": (hashlib.sha256, 32),
}
_COMBINE: dict[str, Callable[[int, int, int], int]] = {
    "CRC32": crt.combine_crc32,
    "CRC32C": crt.combine_crc32c,
    "CRC64NVME": crt.combine_crc64nvme,
}
_PREFIX = "x-amz-checksum-"
_NOT_VALUES = frozenset({"x-amz-checksum-algorithm", "x-amz-checksum-mode", "x-amz-checksum-type"})


class Claimed:
    """The checksum that a client gave or announced: its algorithm, and its value unless that follows the body."""

    __slots__ = ("algorithm", "value")

    def __init__(self, algorithm: str, value: str | None) -> None:
        self.algorithm = algorithm
        self.value = value


def header_of(algorithm: str) -> str:
    return _PREFIX + algorithm.lower()


def claimed_checksum(headers: Mapping[str, str]) -> Claimed | None:
    """Return what the request says of its body's checksum; None where it says nothing."""
    given = [name for name in headers if name.startswith(_PREFIX) and name not in _NOT_VALUES]
    if len(given) > 1:
        raise S3Error("InvalidRequest", "Expecting a single x-amz-checksum- header.")
    trailer = headers.get("x-amz-trailer", "").strip().lower()
    announced = headers.get("x-amz-sdk-checksum-algorithm", "").upper()
    if given:
        algorithm = given[0][len(_PREFIX) :].upper()
        _known(algorithm)
        return Claimed(algorithm, headers[given[0]])
    if trailer.startswith(_PREFIX):
        return Claimed(_known(trailer[len(_PREFIX) :].upper()), None)
    if trailer:
        raise S3Error("InvalidRequest", "The only trailing header this server takes is a checksum.")
    return Claimed(_known(announced), None) if announced else None


def _known(algorithm: str) -> str:
    if algorithm not in ALGORITHMS:
        raise S3Error(
            "InvalidRequest", f"There is no checksum algorithm {algorithm[:40]!r}; there are {', '.join(ALGORITHMS)}."
        )
    return algorithm


class Digests:
    """What is computed of a body as it passes, and compared with what the client said of it in the end."""

    def __init__(self, headers: Mapping[str, str], sha256_hex: str | None, checksum: Claimed | None) -> None:
        self.length = 0
        self.checksum = checksum
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._expected_md5 = _content_md5(headers)
        self._expected_sha256 = sha256_hex
        self._sha256 = hashlib.sha256() if sha256_hex is not None else None
        self._sum = ALGORITHMS[checksum.algorithm][0]() if checksum is not None else None

    def update(self, data: bytes) -> None:
        self.length += len(data)
        self._md5.update(data)
        if self._sha256 is not None:
            self._sha256.update(data)
        if self._sum is not None:
            self._sum.update(data)

    @property
    def md5(self) -> bytes:
        return self._md5.digest()

    @property
    def value(self) -> str:
        """The checksum in base64; empty where none was asked for."""
        return base64.b64encode(self._sum.digest()).decode() if self._sum is not None else ""

    def verify(self, trailers: Mapping[str, str]) -> None:
        """Compare with what was claimed before and after the body."""
        if self._sha256 is not None and self._sha256.hexdigest() != self._expected_sha256:
            raise S3Error("XAmzContentSHA256Mismatch")
        if self._expected_md5 is not None and self._md5.digest() != self._expected_md5:
            raise S3Error("BadDigest", "The Content-MD5 you specified did not match what we received.")
        if self.checksum is None:
            return
        name = header_of(self.checksum.algorithm)
        expected = self.checksum.value if self.checksum.value is not None else trailers.get(name)
        if expected is not None and expected != self.value:
            raise S3Error(
                "BadDigest", f"The {self.checksum.algorithm} you specified did not match the calculated checksum."
            )


def _content_md5(headers: Mapping[str, str]) -> bytes | None:
    text = headers.get("content-md5")
    if text is None:
        return None
    try:
        value = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        value = b""
    if len(value) != 16:
        raise S3Error("InvalidDigest", "The Content-MD5 you specified is not valid.")
    return value


def composite(algorithm: str, values: Sequence[str]) -> str:
    """Return the checksum of the parts' checksums, and how many there are: `value-N`."""
    total = ALGORITHMS[algorithm][0]()
    for value in values:
        total.update(base64.b64decode(value))
    return f"{base64.b64encode(total.digest()).decode()}-{len(values)}"


def full_object(algorithm: str, parts: Sequence[tuple[int, str]]) -> str:
    """Return the checksum of the whole from (size, checksum) of its parts; only for those that can be combined."""
    combine = _COMBINE.get(algorithm)
    if combine is None:
        raise S3Error("InvalidRequest", f"{algorithm} cannot be of the type FULL_OBJECT in a multipart upload.")
    value = 0
    for size, text in parts:
        value = combine(value, int.from_bytes(base64.b64decode(text), "big"), size)
    return base64.b64encode(value.to_bytes(ALGORITHMS[algorithm][1], "big")).decode()
