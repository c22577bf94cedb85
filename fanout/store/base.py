"""The store interface: named immutable-ish byte objects, and the few promises the disk builds on.

Owns the contract and its error vocabulary. Knows nothing of disks, logs or files. Blocking.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["ObjectMeta", "Store"]


@dataclass(frozen=True, slots=True)
class ObjectMeta:
    """One stored object: its key, size in bytes, and last modification by the store's own clock (ns)."""

    key: str
    size: int
    modified_ns: int


class Store(ABC):
    """A flat map from keys to bytes, safe for concurrent use by threads and processes.

    Keys are non-empty ASCII strings of parts joined by `/`; parts are `[A-Za-z0-9._@=-]+`, never `.` or `..`.

    Errors every method may raise: `Unavailable` (the store could not be reached or refused for now; for
    writes: certainly nothing was stored), `Unknown` (writes only: the answer was lost or ambiguous, the object may or
    may not be there), `Denied` (credentials), `Invalid` (a key or a store configuration it cannot take).
    """

    #: Shown in messages: scheme, bucket and prefix; never a credential.
    url: str

    @abstractmethod
    def create(self, key: str, data: bytes) -> None:
        """Store `data` under `key` if nothing is there, atomically and durably; else `Exists`.

        Of any number of racing creates of one key exactly one returns. An implementation never retries
        this call itself: the caller reads back. `Exists` may also be the echo of our own lost answer.
        """

    @abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Store `data` under `key`, replacing what is there; atomic and durable. May be retried inside."""

    @abstractmethod
    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return the object's bytes from `start`, at most `length` of them (all by default); `NotFound`.

        A range past the end gives what exists (possibly b""), never an error.
        """

    @abstractmethod
    def head(self, key: str) -> ObjectMeta | None:
        """Return the object's metadata, or None where there is none."""

    @abstractmethod
    def list(self, prefix: str = "", start_after: str = "", limit: int | None = None) -> Iterator[ObjectMeta]:
        """Yield the objects whose key starts with `prefix`, in byte order, after `start_after`.

        At most `limit` of them. Strongly consistent: an object whose create returned is listed. Lazy: pages are fetched as needed.
        """

    @abstractmethod
    def delete(self, keys: list[str]) -> None:
        """Remove the keys; those that are not there count as removed."""

    def close(self) -> None:
        """Release sockets and threads; the store is not used afterwards."""
