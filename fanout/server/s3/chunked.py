"""The aws-chunked encoding: a body in chunks that may be signed one by one, and headers that follow it.

Owns decoding and verifying it as it comes in. Pure; what the trailing headers mean is the caller's business.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable
from hashlib import sha256

from fanout.server.s3.errors import S3Error

__all__ = ["ChunkedDecoder", "Signing"]

_MAX_LINE = 4096
_MAX_TRAILERS = 16
_HEAD = re.compile(rb"([0-9a-fA-F]{1,12})(?:;\s*chunk-signature=([0-9a-fA-F]{64}))?\s*")


class Signing:
    """How the chunks are signed: `chunk` and `trailer` compute a signature from the one before and what it covers."""

    def __init__(self, seed: str, chunk: Callable[[str, str], str], trailer: Callable[[str, bytes], str]) -> None:
        self.previous = seed
        self._chunk = chunk
        self._trailer = trailer

    def check_chunk(self, data_sha256: str, signature: str) -> None:
        self._check(self._chunk(self.previous, data_sha256), signature)

    def check_trailer(self, text: bytes, signature: str) -> None:
        self._check(self._trailer(self.previous, text), signature)

    def _check(self, expected: str, signature: str) -> None:
        if not hmac.compare_digest(expected, signature):
            raise S3Error("SignatureDoesNotMatch")
        self.previous = expected


class ChunkedDecoder:
    """Decodes one body, whatever pieces it comes in. After `finish`, `trailers` has the headers that followed it."""

    def __init__(self, signing: Signing | None, trailing: bool, length: int) -> None:
        self._signing = signing
        self._trailing = trailing
        self._expected = length
        self._got = 0
        self._buffer = bytearray()
        self._left = 0  # of the chunk's data
        self._signature = ""
        self._hash = sha256()
        self._state = self._head
        self._signed_trailers = b""
        self.trailers: dict[str, str] = {}

    def feed(self, raw: bytes) -> list[bytes]:
        """Take what came in; returns the pieces of the decoded body it holds."""
        self._buffer += raw
        pieces: list[bytes] = []
        while self._state(pieces):
            pass
        return pieces

    def finish(self) -> None:
        """Say that the body has ended; `IncompleteBody` if it should not have."""
        if self._state != self._over:
            raise S3Error("IncompleteBody", "The body ended within its chunks.")
        if self._got != self._expected:
            raise S3Error("IncompleteBody", "The body has another length than x-amz-decoded-content-length says.")

    def _line(self) -> bytes | None:
        end = self._buffer.find(b"\r\n", 0, _MAX_LINE)
        if end < 0:
            if len(self._buffer) >= _MAX_LINE:
                raise _malformed()
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line

    def _head(self, pieces: list[bytes]) -> bool:
        line = self._line()
        if line is None:
            return False
        match = _HEAD.fullmatch(line)
        if match is None or (self._signing is not None) != (match[2] is not None):
            raise _malformed()
        self._left = int(match[1], 16)
        if self._got + self._left > self._expected:
            raise S3Error("IncompleteBody", "The body is longer than x-amz-decoded-content-length says.")
        self._signature = (match[2] or b"").decode().lower()
        self._hash = sha256()
        if self._left:
            self._state = self._data
        else:
            self._verify()
            self._state = self._trailer if self._trailing else self._end
        return True

    def _data(self, pieces: list[bytes]) -> bool:
        piece = bytes(self._buffer[: self._left])
        if not piece:
            return False
        del self._buffer[: len(piece)]
        self._left -= len(piece)
        self._got += len(piece)
        if self._signing is not None:
            self._hash.update(piece)
        pieces.append(piece)
        if self._left == 0:
            self._verify()
            self._state = self._after_data
        return True

    def _verify(self) -> None:
        if self._signing is not None:
            self._signing.check_chunk(self._hash.hexdigest(), self._signature)

    def _after_data(self, pieces: list[bytes]) -> bool:
        if len(self._buffer) < 2:
            return False
        if self._buffer[:2] != b"\r\n":
            raise _malformed()
        del self._buffer[:2]
        self._state = self._head
        return True

    def _trailer(self, pieces: list[bytes]) -> bool:
        line = self._line()
        if line is None:
            return False
        if not line:
            if self._signing is not None:
                raise S3Error("MalformedTrailerError", "The trailing headers are not signed.")
            self._state = self._over
            return True
        name, colon, value = line.decode("latin-1").partition(":")
        name = name.strip().lower()
        if not colon or len(self.trailers) >= _MAX_TRAILERS:
            raise S3Error("MalformedTrailerError")
        if name == "x-amz-trailer-signature" and self._signing is not None:
            self._signing.check_trailer(self._signed_trailers, value.strip().lower())
            self._state = self._end
            return True
        self.trailers[name] = value.strip()
        self._signed_trailers += f"{name}:{value.strip()}\n".encode("latin-1")
        return True

    def _end(self, pieces: list[bytes]) -> bool:
        """Expect the empty line in the end, which some clients leave out."""
        if self._buffer[:2] == b"\r\n":
            del self._buffer[:2]
        elif self._buffer and self._buffer != b"\r":
            raise _malformed()
        else:
            self._state = self._over if not self._buffer else self._end
            return False
        self._state = self._over
        return True

    def _over(self, pieces: list[bytes]) -> bool:
        if self._buffer == b"\r\n":
            self._buffer.clear()
        if self._buffer:
            raise _malformed()
        return False


def _malformed() -> S3Error:
    return S3Error("InvalidRequest", "The body is not well-formed aws-chunked.")
