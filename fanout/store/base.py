"""The store interface: immutable-ish byte objects under keys, and the few promises the disk builds on.

Owns the contract, the rules for keys and the error vocabulary. Knows nothing of disks, logs or
files. Blocking.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fanout.errors import Invalid

__all__ = ["MAX_KEY_BYTES", "ObjectMeta", "Store", "check_key", "check_list", "check_range", "is_key"]

#: Longest key. S3 allows 1024 bytes, the prefix of the store included.
MAX_KEY_BYTES = 800

_PART = r"(?!\.{1,2}(?:/|$))[A-Za-z0-9._@=-]{1,240}"
_KEY = re.compile(rf"{_PART}(?:/{_PART})*")
_PREFIX = re.compile(rf"(?:{_PART}/)*[A-Za-z0-9._@=-]{{0,240}}")
_ASCII = re.compile(r"[ -~]*")


@dataclass(frozen=True, slots=True)
class ObjectMeta:
    """One stored object: its key, size in bytes, and last modification by the store's own clock (ns)."""

    key: str
    size: int
    modified_ns: int


class Store(ABC):
    """A flat map from keys to bytes, safe for concurrent use by threads and processes.

    Keys are parts joined by `/`, at most 800 bytes; a part is 1 to 240 of `[A-Za-z0-9._@=-]`, never `.` or
    `..`. No key continues another one (`a` and `a/b`): a directory cannot hold both, so the memory and local
    stores refuse the second with `Invalid`. S3 would take both and does not look.

    Errors every method may raise:
    - `Unavailable`: the store could not be reached or refused for now. Of `create` and `put` certainly
      nothing was stored; a `delete` may have removed some of its keys.
    - `Unknown` (`create` and `put` only): the answer was lost or ambiguous (a 5xx, a 409, a timeout, a cut
      connection); the object may or may not be there. Read it back.
    - `Denied`: the credentials or the file permissions do not allow this.
    - `Invalid`: a key, or a configuration of the store (no such bucket, no such feature), that cannot work.
    """

    #: Shown in messages: scheme, bucket and prefix; never a credential.
    url: str

    @abstractmethod
    def create(self, key: str, data: bytes) -> None:
        """Store `data` under `key` if nothing is there, atomically and durably; else `Exists`.

        Of any number of racing creates of one key exactly one stores. An implementation never retries
        this call itself: the caller reads back. `Exists` may also be the echo of our own lost answer.
        """

    @abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Store `data` under `key`, replacing what is there; atomic and durable. May be retried inside."""

    @abstractmethod
    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return the object's bytes from `start`, at most `length` of them (all by default); `NotFound`.

        A range past the end gives what exists (possibly b""), never an error. The result is never cut
        short: bytes lost on the way are `Unavailable`.
        """

    @abstractmethod
    def head(self, key: str) -> ObjectMeta | None:
        """Return the object's metadata, or None where there is none."""

    @abstractmethod
    def list(self, prefix: str = "", start_after: str = "", limit: int | None = None) -> Iterator[ObjectMeta]:
        """Yield the objects whose key starts with `prefix`, in byte order of the key, after `start_after`.

        At most `limit` of them. `prefix` may end within a part; `start_after` is any printable ASCII.
        Strongly consistent: an object whose create returned before the call is listed. Lazy: pages are
        fetched as needed, so an object that comes or goes during the iteration may or may not be seen.
        What is not an object of a valid key is left out.
        """

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> None:
        """Remove the keys; those that are not there count as removed. Repeating it is harmless."""

    def close(self) -> None:  # noqa: B027 - not every store holds something
        """Release sockets and threads; the store is not used afterwards."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"


def is_key(key: str) -> bool:
    """Whether `key` is one that a store takes."""
    return len(key) <= MAX_KEY_BYTES and _KEY.fullmatch(key) is not None


def check_key(key: str) -> None:
    """Raise `Invalid` unless `key` is one that a store takes."""
    if not is_key(key):
        raise Invalid.argument(
            "key",
            key,
            f"parts of 1 to 240 [A-Za-z0-9._@=-], not '.' or '..', joined by '/', at most {MAX_KEY_BYTES} bytes in all",
        )


def check_range(start: int, length: int | None) -> None:
    """Raise `Invalid` unless both are ranges a `get` takes."""
    if start < 0:
        raise Invalid.argument("start", start, "bytes, 0 or more")
    if length is not None and length < 0:
        raise Invalid.argument("length", length, "bytes, 0 or more, or None for all")


def check_list(prefix: str, start_after: str, limit: int | None) -> None:
    """Raise `Invalid` unless these are arguments a `list` takes."""
    if len(prefix) > MAX_KEY_BYTES or not _PREFIX.fullmatch(prefix):
        raise Invalid.argument("prefix", prefix, "the beginning of a key")
    if not _ASCII.fullmatch(start_after):
        raise Invalid.argument("start_after", start_after, "printable ASCII")
    if limit is not None and limit < 0:
        raise Invalid.argument("limit", limit, "0 or more, or None for all")
