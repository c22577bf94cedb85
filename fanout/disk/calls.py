"""Calls under an idempotency key, across processes: one runs, the others get what came of it.

Owns claims, their taking over, and how long both are kept. Knows no commands; docs/decisions/0007-idempotency.md has
the argument why nothing is ever committed twice.
"""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fanout.disk.checkout import LEASE_S
from fanout.disk.record import create_record
from fanout.errors import Exists, FanoutError, Invalid, LeaseLost, NotFound
from fanout.format import layout
from fanout.format.call import ClaimRecord, EndRecord, decode_claim, decode_end, encode_claim, encode_end
from fanout.runtime import Runtime
from fanout.store.base import ObjectMeta, Store

if TYPE_CHECKING:
    from fanout.disk.catalogue import Catalogue

__all__ = ["KEEP_S", "MAX_OUTCOME_BYTES", "Calls", "Claim", "Held", "call_digest", "old_calls"]

#: How long what came of a call is remembered, at least: garbage collection forgets it then.
KEEP_S = 24 * 3600.0
#: The longest outcome that is kept, in bytes.
MAX_OUTCOME_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to run a call: held by this process until it says what came of it, or another takes it over."""

    key: str
    number: int
    record: ClaimRecord


@dataclass(slots=True)
class Held:
    """Somebody else's claim. `alive_ns` is its last sign of life by the store's clock, `since_s` when we saw that."""

    claim: Claim
    alive_ns: int
    since_s: float = field(compare=False)


class Calls:
    """The calls of one store. Blocking, thread safe."""

    def __init__(self, store: Store, catalogue: Catalogue, runtime: Runtime) -> None:
        self._store = store
        self._catalogue = catalogue
        self._runtime = runtime

    def enter(self, key: str, record: ClaimRecord, before: Held | None = None) -> Claim | EndRecord | Held:
        """Claim a call, or learn what came of it, or who has it: then ask again, with that as `before`.

        A claim without a sign of life for `LEASE_S`, as seen from here, is taken over. `Invalid` if the key was used
        for something else.
        """
        if before is None:
            try:
                return self._claim(key, 0, record)
            except Exists:
                pass
        found = self._newest(key)
        if found is None:
            return self._claimed_or_held(key, 0, record)  # it was forgotten just now
        claim, end, alive_ns = found
        if claim.record.asked != record.asked:
            raise Invalid("idempotency_key: this key was used for a different call before; take one of its own")
        if end is not None and end.kind != "void":
            return end
        if end is not None:
            return self._claimed_or_held(key, claim.number + 1, record)
        held = Held(claim, alive_ns, self._runtime.monotonic())
        if before is None or before != held:
            return held
        if held.since_s - before.since_s < LEASE_S:
            return before
        return self._take_over(claim, record)

    def finish(self, claim: Claim, end: EndRecord) -> None:
        """Say what came of a claim, for those who ask later."""
        create_record(
            self._store, layout.call_key(claim.key, claim.number, "end"), encode_end(end), "it has one", self._runtime
        )

    def check(self, claim: Claim) -> None:
        """Raise `LeaseLost` if the claim was taken over. Ask after the locks are held that its commits need."""
        if self._store.head(layout.call_key(claim.key, claim.number + 1, "claim")) is not None:
            raise LeaseLost("the call was taken over by another process, which took this one for dead")

    def keep_alive(self, claim: Claim) -> Callable[[], None]:
        """Give signs of life until what is returned is called (which may wait for one that is on its way)."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(LEASE_S / 3):
                try:
                    self._store.put(layout.call_key(claim.key, claim.number, "beat"), self._runtime.token_bytes(8))
                except FanoutError:
                    continue  # the next one may come through in time

        def stop() -> None:
            over.set()
            thread.join()

        thread = threading.Thread(target=beat, name="fanout-call", daemon=True)
        thread.start()
        return stop

    def _claim(self, key: str, number: int, record: ClaimRecord) -> Claim:
        made = layout.call_key(key, number, "claim")
        create_record(self._store, made, encode_claim(record), "the call is claimed", self._runtime)
        return Claim(key, number, record)

    def _claimed_or_held(self, key: str, number: int, record: ClaimRecord) -> Claim | Held | EndRecord:
        try:
            return self._claim(key, number, record)
        except Exists:
            found = self._newest(key)
            assert found is not None
            return Held(found[0], found[2], self._runtime.monotonic())

    def _newest(self, key: str) -> tuple[Claim, EndRecord | None, int] | None:
        """Return the newest claim of a call, its end, and its last sign of life."""
        there = {meta.key: meta for meta in self._store.list(layout.call_prefix(key))}
        numbers = [layout.call_number(each) for each in there if each.endswith("claim")]
        if not numbers:
            return None
        number = max(numbers)
        names = {kind: layout.call_key(key, number, kind) for kind in ("claim", "beat", "end")}
        try:
            claim = Claim(key, number, decode_claim(self._store.get(names["claim"]), names["claim"]))
            end = decode_end(self._store.get(names["end"]), names["end"]) if names["end"] in there else None
        except NotFound:
            return None
        return claim, end, max(there[name].modified_ns for name in names.values() if name in there)

    def _take_over(self, dead: Claim, record: ClaimRecord) -> Claim | EndRecord | Held:
        mine = self._claimed_or_held(dead.key, dead.number + 1, record)
        if not isinstance(mine, Claim):
            return mine
        landed = [where for line in dead.record.lines for where in self._fence(line, dead.record.exec_id)]
        if not landed:
            return mine
        told = (
            f"an earlier call under this key committed ({', '.join(landed)}, exec {dead.record.exec_id}), and was "
            "stopped before it could keep its result; it is not run again"
        )
        end = EndRecord("lost", told.encode(), dead.record.exec_id)
        self.finish(mine, end)
        return end

    def _fence(self, line: tuple[str, str, int], exec_id: str) -> Iterator[str]:
        """Make sure that an exec commits to a branch no more; yields where it has."""
        disk_id, name, since = line
        try:
            branch = self._catalogue.get(disk_id).branch(name)
        except NotFound:
            return
        for lock in list(branch.refresh().locks.values()):
            if lock.owner == exec_id:
                try:
                    branch.release(lock.id, broken=True)
                except NotFound:
                    pass  # its commit released it
        for entry in branch.history(since, branch.refresh().seq):
            if any(commit.exec_id == exec_id and commit.effects for commit in entry.commits):
                yield f"commit {entry.seq} of {name!r}"


def call_digest(scope: str, key: str) -> str:
    """Return what a call's objects are named by: of a key that people chose, nothing can be read there."""
    return hashlib.sha256(f"{scope}\0{key}".encode("utf-8", "surrogatepass")).hexdigest()


def old_calls(store: Store, now_ns: int) -> dict[str, int]:
    """Return key -> bytes of the calls that ended, or died, more than `KEEP_S` ago."""
    calls: defaultdict[str, list[ObjectMeta]] = defaultdict(list)
    for meta in store.list(layout.CALLS):
        calls[meta.key.rpartition("/")[0]].append(meta)
    oldest_ns = now_ns - int(KEEP_S * 1e9)
    return {
        meta.key: meta.size
        for group in calls.values()
        if max(meta.modified_ns for meta in group) < oldest_ns
        for meta in group
    }
