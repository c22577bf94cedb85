"""What can be wrapped around any store: retries, a limit of concurrent requests, counters, injected faults.

Owns those four policies, one class each; a store has no flags for them. Knows nothing of how a store works.
The usual order is `Retrying(Metered(Limited(store)))`: each attempt is counted, waiting holds no slot.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeVar, get_args

from fanout.errors import Exists, FanoutError, Invalid, Unavailable, Unknown
from fanout.runtime import Runtime, system
from fanout.store.base import ObjectMeta, Store, check_list

__all__ = ["Fault", "FaultKind", "Faulty", "Fired", "Limited", "Metered", "Retrying", "Usage", "Verb"]

_T = TypeVar("_T")

#: The requests of a store, as `Usage.requests` and `Fault.verb` name them.
Verb = Literal["create", "put", "get", "head", "list", "delete"]

#: How many keys one request of a listing or a deletion carries, at S3 and so in the counters.
PAGE = 1000


class Wrapper(Store):
    """A store that passes everything on to `inner`; the four below change one thing each."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.url = inner.url

    def create(self, key: str, data: bytes) -> None:
        self.inner.create(key, data)

    def put(self, key: str, data: bytes) -> None:
        self.inner.put(key, data)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return self.inner.get(key, start, length)

    def head(self, key: str) -> ObjectMeta | None:
        return self.inner.head(key)

    def list(self, prefix: str = "", start_after: str = "", limit: int | None = None) -> Iterator[ObjectMeta]:
        return self.inner.list(prefix, start_after, limit)

    def delete(self, keys: Sequence[str]) -> None:
        self.inner.delete(keys)

    def close(self) -> None:
        self.inner.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"


class Retrying(Wrapper):
    """Tries everything but `create` again while the store is unavailable; `create` goes through once.

    At most `attempts` tries; before the n-th again it sleeps a random time up to
    `min(cap_s, base_s * 2**n)` (full jitter). The defaults sleep 18 s on average, 37 s at most.
    A put that failed is `Unknown` if any of its attempts was.
    """

    def __init__(
        self,
        inner: Store,
        runtime: Runtime = system,
        *,
        attempts: int = 10,
        base_s: float = 0.1,
        cap_s: float = 8.0,
    ) -> None:
        if attempts < 1:
            raise Invalid.argument("attempts", attempts, "1 or more")
        super().__init__(inner)
        self._runtime = runtime
        self._attempts = attempts
        self._base_s = base_s
        self._cap_s = cap_s

    def put(self, key: str, data: bytes) -> None:
        self._retry(lambda: self.inner.put(key, data))

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return self._retry(lambda: self.inner.get(key, start, length))

    def head(self, key: str) -> ObjectMeta | None:
        return self._retry(lambda: self.inner.head(key))

    def list(self, prefix: str = "", start_after: str = "", limit: int | None = None) -> Iterator[ObjectMeta]:
        check_list(prefix, start_after, limit)
        return self._go_on(prefix, start_after, limit)

    def delete(self, keys: Sequence[str]) -> None:
        self._retry(lambda: self.inner.delete(keys))

    def _go_on(self, prefix: str, after: str, left: int | None) -> Iterator[ObjectMeta]:
        """Yield a listing; where it breaks, list again from the last key that was yielded."""
        items: Iterator[ObjectMeta] | None = None

        def following() -> ObjectMeta | None:
            nonlocal items
            current = items or self.inner.list(prefix, after, left)
            items = None  # an iterator that raised is finished
            item = next(current, None)
            items = current
            return item

        while (item := self._retry(following)) is not None:
            yield item
            after = item.key
            left = None if left is None else left - 1

    def _retry(self, request: Callable[[], _T]) -> _T:
        unknown = False
        for attempt in range(self._attempts):
            if attempt:
                most = min(self._cap_s, self._base_s * 2**attempt)
                self._runtime.sleep(self._runtime.uniform(0.0, most))
            try:
                return request()
            except (Unavailable, Unknown) as error:
                unknown = unknown or isinstance(error, Unknown)
                last: FanoutError = error
        raise (Unknown if unknown else Unavailable)(f"{last} (gave up after {self._attempts} tries)") from last


class Limited(Wrapper):
    """Lets at most `limit` requests run at once; the others wait, in no particular order."""

    def __init__(self, inner: Store, limit: int) -> None:
        if limit < 1:
            raise Invalid.argument("limit", limit, "1 or more")
        super().__init__(inner)
        self._slots = threading.BoundedSemaphore(limit)

    def create(self, key: str, data: bytes) -> None:
        with self._slots:
            self.inner.create(key, data)

    def put(self, key: str, data: bytes) -> None:
        with self._slots:
            self.inner.put(key, data)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        with self._slots:
            return self.inner.get(key, start, length)

    def head(self, key: str) -> ObjectMeta | None:
        with self._slots:
            return self.inner.head(key)

    def list(self, prefix: str = "", start_after: str = "", limit: int | None = None) -> Iterator[ObjectMeta]:
        return self._one_by_one(self.inner.list(prefix, start_after, limit))

    def delete(self, keys: Sequence[str]) -> None:
        with self._slots:
            self.inner.delete(keys)

    def _one_by_one(self, items: Iterator[ObjectMeta]) -> Iterator[ObjectMeta]:
        while True:
            with self._slots:  # not across the yield: the caller may take its time
                item = next(items, None)
            if item is None:
                return
            yield item


@dataclass(frozen=True, slots=True)
class Usage:
    """What was asked of a store: requests by verb, and object bytes written and read."""

    requests: Mapping[str, int] = field(default_factory=dict)
    bytes_written: int = 0
    bytes_read: int = 0

    @property
    def total(self) -> int:
        """All requests."""
        return sum(self.requests.values())

    def __getitem__(self, verb: Verb) -> int:
        return self.requests.get(verb, 0)

    def __sub__(self, earlier: Usage) -> Usage:
        """What was asked between two snapshots; verbs that were not used are left out."""
        return Usage(
            dict(Counter(self.requests) - Counter(earlier.requests)),
            self.bytes_written - earlier.bytes_written,
            self.bytes_read - earlier.bytes_read,
        )


class Metered(Wrapper):
    """Counts the requests that reach `inner`, failed ones too, whatever that store is.

    A listing counts one request for each 1,000 items, a deletion one for each 1,000 keys, as at S3. What
    an SDK retries below is not seen.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._requests: Counter[str] = Counter()
        self._written = 0
        self._read = 0

    def usage(self) -> Usage:
        """Return the counts so far. Subtract an earlier one for what lies between."""
        with self._lock:
            return Usage(dict(self._requests), self._written, self._read)

    def create(self, key: str, data: bytes) -> None:
        self._count("create", written=len(data))
        self.inner.create(key, data)

    def put(self, key: str, data: bytes) -> None:
        self._count("put", written=len(data))
        self.inner.put(key, data)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        self._count("get")
        data = self.inner.get(key, start, length)
        self._count("get", requests=0, read=len(data))
        return data

    def head(self, key: str) -> ObjectMeta | None:
        self._count("head")
        return self.inner.head(key)

    def list(self, prefix: str = "", start_after: str = "", limit: int | None = None) -> Iterator[ObjectMeta]:
        return self._pages(self.inner.list(prefix, start_after, limit))

    def delete(self, keys: Sequence[str]) -> None:
        self._count("delete", requests=-(-len(keys) // PAGE))
        self.inner.delete(keys)

    def _pages(self, items: Iterator[ObjectMeta]) -> Iterator[ObjectMeta]:
        self._count("list")
        for count, item in enumerate(items):
            if count and count % PAGE == 0:
                self._count("list")
            yield item

    def _count(self, verb: Verb, *, requests: int = 1, written: int = 0, read: int = 0) -> None:
        with self._lock:
            self._requests[verb] += requests
            self._written += written
            self._read += read


FaultKind = Literal["lost", "echo", "refused", "unavailable", "slow", "truncated", "corrupted"]
_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
_READS = ("get", "head", "list")


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong, and which requests it hits.

    It hits requests of `verb` (None: any) whose key (for a listing its prefix, for a deletion its first
    key) is found by the regular expression `key`: the `nth` of them (from 1) and the `times - 1` after it.

    - `lost`: the request is done, its answer is lost: `Unknown` for a write, `Unavailable` for the others.
    - `echo`: a create is done and reported as `Exists`, as by an SDK that retried after a lost answer.
    - `refused`: nothing is done and the outcome is open: `Unknown` (a 409 or a 500 with nothing stored).
      `Unavailable` for all but create and put.
    - `unavailable`: nothing is done: `Unavailable`.
    - `slow`: done after `seconds`.
    - `truncated`: a get gives the first half of its bytes. `corrupted`: one byte of them is another.
    """

    kind: FaultKind
    verb: Verb | None = None
    key: str = ""
    nth: int = 1
    times: int = 1
    seconds: float = 0.01

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise Invalid.argument("kind", self.kind, f"one of {', '.join(_KINDS)}")
        if self.nth < 1 or self.times < 1:
            raise Invalid.argument("nth, times", (self.nth, self.times), "1 or more")


@dataclass(frozen=True, slots=True)
class Fired:
    """A fault that happened: what, and to which request."""

    kind: FaultKind
    verb: Verb
    key: str


class Faulty(Wrapper):
    """A store in which chosen things go wrong; for tests of what is built on a store, yours too.

    `faults` is a script; the first that matches a request hits it. With `seed`, a share `rate` (0 to 1) of
    the other requests is hit by one of `kinds`, by default all that a correct store may do. Which ones
    depends only on the seed, the verb, the key and how often that request was made, not on how threads
    interleave. `fired` lists what happened.
    """

    def __init__(
        self,
        inner: Store,
        *faults: Fault,
        seed: int | None = None,
        rate: float = 0.1,
        kinds: Sequence[FaultKind] = ("lost", "echo", "refused", "unavailable", "slow"),
        runtime: Runtime = system,
    ) -> None:
        if not 0 <= rate <= 1 or not kinds:
            raise Invalid.argument("rate, kinds", (rate, kinds), "a share from 0 to 1, at least one kind")
        super().__init__(inner)
        self.fired: list[Fired] = []
        self._script = [(fault, re.compile(fault.key)) for fault in faults]
        self._seen = [0] * len(faults)
        self._made: Counter[tuple[Verb, str]] = Counter()
        self._seed = seed
        self._rate = rate
        self._kinds = tuple(kinds)
        self._runtime = runtime
        self._lock = threading.Lock()

    def create(self, key: str, data: bytes) -> None:
        with self._around("create", key):
            self.inner.create(key, data)

    def put(self, key: str, data: bytes) -> None:
        with self._around("put", key):
            self.inner.put(key, data)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        with self._around("get", key) as fault:
            data = self.inner.get(key, start, length)
            if fault is not None and fault.kind == "truncated":
                return data[: len(data) // 2]
            if fault is not None and fault.kind == "corrupted" and data:
                middle = len(data) // 2
                return data[:middle] + bytes([data[middle] ^ 0x01]) + data[middle + 1 :]
            return data

    def head(self, key: str) -> ObjectMeta | None:
        with self._around("head", key):
            return self.inner.head(key)

    def list(self, prefix: str = "", start_after: str = "", limit: int | None = None) -> Iterator[ObjectMeta]:
        return self._at_the_first(self.inner.list(prefix, start_after, limit), prefix)

    def delete(self, keys: Sequence[str]) -> None:
        with self._around("delete", keys[0] if keys else ""):
            self.inner.delete(keys)

    def _at_the_first(self, items: Iterator[ObjectMeta], prefix: str) -> Iterator[ObjectMeta]:
        with self._around("list", prefix):
            pass
        yield from items

    @contextmanager
    def _around(self, verb: Verb, key: str) -> Iterator[Fault | None]:
        fault = self._choose(verb, key)
        what = f"{self.url}: {verb} of {key}: injected fault"
        lost = Unknown if verb in ("create", "put") else Unavailable
        match fault.kind if fault else None:
            case "unavailable":
                raise Unavailable(what)
            case "refused":
                raise lost(what)
            case "slow" if fault:
                self._runtime.sleep(fault.seconds)
        yield fault
        match fault.kind if fault else None:
            case "lost":
                raise lost(what)
            case "echo" if verb == "create":
                raise Exists(what)

    def _choose(self, verb: Verb, key: str) -> Fault | None:
        with self._lock:
            chosen = None
            for n, (fault, pattern) in enumerate(self._script):
                if fault.verb in (None, verb) and pattern.search(key):
                    self._seen[n] += 1
                    if chosen is None and fault.nth <= self._seen[n] < fault.nth + fault.times:
                        chosen = fault
            self._made[verb, key] += 1
            if chosen is None and self._seed is not None:
                chosen = self._draw(verb, key, self._made[verb, key])
            if chosen is not None and _applies(chosen.kind, verb):
                self.fired.append(Fired(chosen.kind, verb, key))
                return chosen
            return None

    def _draw(self, verb: Verb, key: str, count: int) -> Fault | None:
        digest = hashlib.sha256(f"{self._seed}\0{verb}\0{key}\0{count}".encode()).digest()
        if int.from_bytes(digest[:8], "big") >= self._rate * 2**64:
            return None
        kinds = [kind for kind in self._kinds if _applies(kind, verb)]
        if not kinds:
            return None
        return Fault(kinds[int.from_bytes(digest[8:16], "big") % len(kinds)], seconds=digest[16] / 255 * 0.01)


def _applies(kind: FaultKind, verb: Verb) -> bool:
    match kind:
        case "echo":
            return verb == "create"
        case "truncated" | "corrupted":
            return verb == "get"
        case "lost":
            return verb not in _READS  # a read whose answer is lost is just unavailable
        case _:
            return True
