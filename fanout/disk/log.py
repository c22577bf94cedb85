"""The commit protocol: one branch's log of create-only entries.

Owns appending (what to believe of every answer a store can give) and reading forward. Knows nothing of trees:
the caller builds each entry for the tail it is handed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from fanout.errors import Corrupt, Exists, FanoutError, NotFound, Unavailable, Unknown
from fanout.format import layout
from fanout.format.entry import Entry, decode_entry, encode_entry
from fanout.runtime import Runtime
from fanout.store.base import ObjectMeta, Store

__all__ = ["Log"]

#: How often an append is tried again after an answer that left nothing behind.
_ATTEMPTS = 8
_BACKOFF_S = 0.05
_READ_PARALLEL = 16


class Log:
    """The entries of one branch. Thread safe; holds no state."""

    def __init__(self, store: Store, disk_id: str, branch_uuid: str, runtime: Runtime) -> None:
        self._store = store
        self._disk_id = disk_id
        self._branch_uuid = branch_uuid
        self._runtime = runtime

    def read(self, seq: int) -> Entry | None:
        """Return one entry, or None where it does not exist. One request."""
        key = self._key(seq)
        try:
            data = self._store.get(key)
        except NotFound:
            return None
        entry = decode_entry(data, key)
        if entry.seq != seq:
            raise Corrupt(f"{key}: says it is entry {entry.seq}")
        return entry

    def after(self, seq: int, until: int | None = None) -> Iterator[Entry]:
        """Yield the entries seq+1, seq+2, ... to the tail (or to `until`), in order.

        One request when there is none; a listing and parallel reads when there are several. `Corrupt` for a hole.
        """
        if until is not None and until <= seq:
            return
        first = self.read(seq + 1)
        if first is None:
            if until is not None:
                raise Corrupt(f"{self._key(seq + 1)} is missing, although the log goes on to {until}")
            return
        yield first
        rest = [layout.seq_of_key(meta.key) for meta in self._list_after(seq + 1)]
        if until is not None:
            rest = [found for found in rest if found <= until]
        yield from self._read_many(rest, seq + 2)

    def append(
        self, tail: int, build: Callable[[int, bytes], Entry | None], advance: Callable[[Sequence[Entry]], None]
    ) -> Entry | None:
        """Make one entry durable at the end of the log and return it (None if `build` found nothing to write).

        `tail` is the last entry the caller knows. `build(seq, write_id)` makes the entry for a place in the log;
        it is called again after `advance(entries)` has shown the caller what others wrote meanwhile.
        `Unavailable`: certainly not written. `Unknown`: the outcome could not be learned.
        """
        entry = build(tail + 1, self._runtime.token_bytes(16))
        failure: FanoutError | None = None
        ambiguous = False
        attempt = 0
        while entry is not None and attempt < _ATTEMPTS:
            try:
                self._store.create(self._key(entry.seq), encode_entry(entry))
                return entry
            except Unavailable as error:
                failure = error  # nothing was stored
            except (Exists, Unknown) as error:
                failure = error
                there = self._read_back(entry, error)
                if there is not None and there.write_id == entry.write_id:
                    return there
                if there is not None:
                    news = [there, *self.after(there.seq)]
                    advance(news)
                    # Only now a new write id: until its place is taken, a lost write may still land there.
                    entry = build(news[-1].seq + 1, self._runtime.token_bytes(16))
                    attempt, ambiguous = 0, False
                    continue
                ambiguous = ambiguous or isinstance(error, Unknown)
            attempt += 1
            self._runtime.sleep(self._runtime.uniform(0, _BACKOFF_S * 2**attempt))
        if entry is None:
            return None
        raise (Unknown if ambiguous else Unavailable)(
            f"{self._store.url} did not store {self._key(entry.seq)} in {_ATTEMPTS} attempts: {failure}"
        ) from failure

    def _read_back(self, entry: Entry, failure: Exception) -> Entry | None:
        """Learn what a failed or ambiguous create left behind; None means nothing."""
        key = self._key(entry.seq)
        for attempt in range(_ATTEMPTS):
            if attempt:
                self._runtime.sleep(self._runtime.uniform(0, _BACKOFF_S * 2**attempt))
            try:
                return self.read(entry.seq)
            except Unavailable as error:
                failure = error
        raise Unknown(
            f"{self._store.url} did not say whether it stored {key}, and it cannot be read back: {failure}"
        ) from failure

    def _list_after(self, seq: int) -> Iterator[ObjectMeta]:
        prefix = layout.log_prefix(self._disk_id, self._branch_uuid)
        return self._store.list(prefix, start_after=self._key(seq))

    def _read_many(self, seqs: Sequence[int], expected: int) -> Iterator[Entry]:
        for place, seq in enumerate(seqs):
            if seq != expected + place:
                raise Corrupt(f"{self._key(expected + place)} is missing, although {seq} exists")
        if len(seqs) < 3:
            yield from (self._must_read(seq) for seq in seqs)
            return
        with ThreadPoolExecutor(_READ_PARALLEL, "fanout-log") as pool:
            for start in range(0, len(seqs), 4 * _READ_PARALLEL):
                yield from pool.map(self._must_read, seqs[start : start + 4 * _READ_PARALLEL])

    def _must_read(self, seq: int) -> Entry:
        entry = self.read(seq)
        if entry is None:
            raise Corrupt(f"{self._key(seq)} was listed but cannot be read")
        return entry

    def _key(self, seq: int) -> str:
        return layout.log_key(self._disk_id, self._branch_uuid, seq)
