"""A store whose every request goes through one place."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from fanout.store.base import ObjectMeta
from fanout.store.wrap import Wrapper

__all__ = ["EveryRequest"]

T = TypeVar("T")


class EveryRequest(Wrapper):
    """Hands each request to `at`, which makes it or does not."""

    @abstractmethod
    def at(self, request: Callable[[], T]) -> T:
        """Make one request, or do something else."""

    def create(self, key: str, data: bytes) -> None:
        self.at(lambda: self.inner.create(key, data))

    def put(self, key: str, data: bytes) -> None:
        self.at(lambda: self.inner.put(key, data))

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return self.at(lambda: self.inner.get(key, start, length))

    def head(self, key: str) -> ObjectMeta | None:
        return self.at(lambda: self.inner.head(key))

    def list(self, prefix: str = "", start_after: str = "", limit: int | None = None) -> Iterator[ObjectMeta]:
        return self.at(lambda: self.inner.list(prefix, start_after, limit))

    def delete(self, keys: Sequence[str]) -> None:
        self.at(lambda: self.inner.delete(keys))
