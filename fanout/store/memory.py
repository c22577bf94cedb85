"""A store in this process's memory, for tests and throwaway disks.

Owns the objects and the names under which one process shares them. Knows nothing of what the bytes mean.
"""

from __future__ import annotations

import builtins
import threading
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator, Sequence

from fanout.errors import Exists, Invalid, NotFound
from fanout.runtime import Runtime, system
from fanout.store.base import ObjectMeta, Store, check_key, check_list, check_range

__all__ = ["MemoryStore"]

_PAGE = 1000
_named: dict[str, MemoryStore] = {}
_named_lock = threading.Lock()


class MemoryStore(Store):
    """Objects in a dict; gone with the process. `runtime` is the store's clock.

    It is as strict as the strictest store: a key that continues another one is `Invalid`.
    """

    def __init__(self, name: str = "", *, runtime: Runtime = system) -> None:
        self.url = f"memory://{name}"
        self._runtime = runtime
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, int]] = {}
        self._sorted: builtins.list[str] = []
        self._folders: Counter[str] = Counter()

    @classmethod
    def named(cls, name: str) -> MemoryStore:
        """Return the store every caller of this process gets for `name`; made at the first call."""
        with _named_lock:
            if name not in _named:
                _named[name] = cls(name)
            return _named[name]

    def create(self, key: str, data: bytes) -> None:
        check_key(key)
        with self._lock:
            if key in self._objects:
                raise Exists(f"{self.url}: {key} is already there")
            self._store(key, data)

    def put(self, key: str, data: bytes) -> None:
        check_key(key)
        with self._lock:
            self._store(key, data)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        check_key(key)
        check_range(start, length)
        with self._lock:
            found = self._objects.get(key)
        if found is None:
            raise NotFound(f"{self.url}: no object {key}")
        return found[0][start : None if length is None else start + length]

    def head(self, key: str) -> ObjectMeta | None:
        check_key(key)
        with self._lock:
            found = self._objects.get(key)
        return None if found is None else ObjectMeta(key, len(found[0]), found[1])

    def list(self, prefix: str = "", start_after: str = "", limit: int | None = None) -> Iterator[ObjectMeta]:
        check_list(prefix, start_after, limit)
        return self._pages(prefix, start_after, limit)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
        with self._lock:
            for key in keys:
                if self._objects.pop(key, None) is not None:
                    del self._sorted[bisect_left(self._sorted, key)]
                    for folder in _parents(key):
                        self._folders[folder] -= 1

    def _store(self, key: str, data: bytes) -> None:
        if key not in self._objects:
            above = next((folder for folder in _parents(key) if folder in self._objects), None)
            if above is not None or self._folders[key] > 0:
                other = above or "a longer key"
                raise Invalid.argument("key", key, f"{other} is stored: no key continues another")
            insort(self._sorted, key)
            self._folders.update(_parents(key))
        self._objects[key] = (bytes(data), self._runtime.now_ns())

    def _pages(self, prefix: str, start_after: str, limit: int | None) -> Iterator[ObjectMeta]:
        left = limit
        after = start_after
        while left is None or left > 0:
            with self._lock:
                begin = max(bisect_left(self._sorted, prefix), bisect_right(self._sorted, after))
                keys = self._sorted[begin : begin + (_PAGE if left is None else min(left, _PAGE))]
                page = [ObjectMeta(k, len(self._objects[k][0]), self._objects[k][1]) for k in keys]
            for meta in page:
                if not meta.key.startswith(prefix):
                    return
                yield meta
            if not page:
                return
            after = page[-1].key
            left = None if left is None else left - len(page)


def _parents(key: str) -> list[str]:
    parts = key.split("/")
    return ["/".join(parts[:n]) for n in range(1, len(parts))]
