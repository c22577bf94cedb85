"""The commit protocol: one branch's log of create-only entries.

Owns appending (what to believe of every answer a store can give) and reading forward, to a seal if there is one.
Knows nothing of trees: the caller builds each entry for the tail it is handed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from fanout.disk.record import ATTEMPTS, pause, read_back
from fanout.disk.trim import refuse_trimmed
from fanout.errors import Corrupt, Exists, FanoutError, NotFound, Unavailable, Unknown
from fanout.format import layout
from fanout.format.entry import Entry, decode_entry, encode_entry, is_seal
from fanout.runtime import Runtime
from fanout.store.base import Store

__all__ = ["Deleted", "Log"]

_READ_PARALLEL = 16
#: Stands for a seal where an entry was looked for.
_SEAL = Entry(b"", 0, 0, ())


class Deleted(NotFound):
    """The disk was deleted; nothing can be read of it or committed to it any more."""


class Log:
    """The entries of one branch. Thread safe; holds no state."""

    def __init__(self, store: Store, disk_id: str, branch_uuid: str, runtime: Runtime) -> None:
        self._store = store
        self._disk_id = disk_id
        self._branch_uuid = branch_uuid
        self._runtime = runtime

    def read(self, seq: int) -> Entry | None:
        """Return one entry, or None where it does not exist; `Deleted` for a seal. One request."""
        entry = self._load(seq)
        if entry is _SEAL:
            raise Deleted(f"the disk {self._disk_id} was deleted")
        return entry

    def _load(self, seq: int) -> Entry | None:
        key = self._key(seq)
        try:
            data = self._store.get(key)
        except NotFound:
            return None
        if is_seal(data):
            return _SEAL
        entry = decode_entry(data, key)
        if entry.seq != seq:
            raise Corrupt(f"{key}: says it is entry {entry.seq}")
        return entry

    def after(self, seq: int, until: int | None = None, *, far: bool = False) -> Iterator[Entry]:
        """Yield the entries seq+1, seq+2, ... to the tail (or to `until`), in order.

        `Corrupt` for a hole, `Trimmed` for one that garbage collection left.

        To the tail: one get when there is none, two when there is one; a listing and parallel gets when there are
        more. `far` expects many and begins with the listing. To `until`: one get each.
        """
        if until is None:
            if not far:
                for near in (seq + 1, seq + 2):
                    entry = self.read(near)
                    if entry is None:
                        return
                    yield entry
                seq += 2
            until = self._newest(seq)
        yield from self._read_range(seq + 1, until)

    def append(
        self, tail: int, build: Callable[[int, bytes], Entry | None], advance: Callable[[Sequence[Entry]], None]
    ) -> Entry | None:
        """Make one entry durable at the end of the log and return it (None if `build` finds nothing to write there).

        `tail` is the last entry the caller knows. `build(seq, write_id)` makes the entry for a place in the log;
        it is called again after `advance(entries)` has shown the caller what others wrote meanwhile.
        `Unavailable`: certainly not written. `Unknown`: the outcome could not be learned.
        """
        entry = build(tail + 1, self._runtime.token_bytes(16))
        if entry is None:
            # Only an entry that lands proves that `tail` was the tail. A conflict with, or doing nothing about, what
            # others have changed since would be an answer from the past.
            news = list(self.after(tail))
            if not news:
                return None
            advance(news)
            entry = build(news[-1].seq + 1, self._runtime.token_bytes(16))
        failure: FanoutError | None = None
        ambiguous = False
        attempt = 0
        while entry is not None and attempt < ATTEMPTS:
            if attempt:
                pause(self._runtime, attempt)
            attempt += 1
            try:
                self._store.create(self._key(entry.seq), encode_entry(entry))
                return entry
            except (Exists, Unknown) as error:
                failure = error
                there = self._read_back(entry, error)
                if there is _SEAL:
                    raise Deleted(f"the disk {self._disk_id} was deleted; nothing was written") from None
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
            except Unavailable as error:
                failure = error  # nothing was stored
            except FanoutError as error:
                if not ambiguous:
                    raise  # refused for good, and nothing was stored
                failure, attempt = error, ATTEMPTS
        if entry is None:
            return None
        raise (Unknown if ambiguous else Unavailable)(
            f"{self._store.url} did not store {self._key(entry.seq)}: {failure}"
        ) from failure

    def _read_back(self, entry: Entry, failure: FanoutError) -> Entry | None:
        key = self._key(entry.seq)
        return read_back(self._store, key, lambda: self._load(entry.seq), failure, self._runtime)

    def _newest(self, seq: int) -> int:
        """Return the newest sequence number after `seq`, or `seq`. A listing may leave out what comes meanwhile."""
        prefix = layout.log_prefix(self._disk_id, self._branch_uuid)
        keys = (meta.key for meta in self._store.list(prefix, start_after=self._key(seq)))
        return max((layout.seq_of_key(key) for key in keys if layout.is_seq_key(key)), default=seq)

    def _read_range(self, first: int, last: int) -> Iterator[Entry]:
        if last - first < 2:
            yield from (self._must_read(seq, last) for seq in range(first, last + 1))
            return
        with ThreadPoolExecutor(_READ_PARALLEL, "fanout-log") as pool:
            for start in range(first, last + 1, 4 * _READ_PARALLEL):
                some = range(start, min(start + 4 * _READ_PARALLEL, last + 1))
                yield from pool.map(lambda seq: self._must_read(seq, last), some)

    def _must_read(self, seq: int, last: int) -> Entry:
        entry = self.read(seq)
        if entry is None:
            refuse_trimmed(self._store, self._disk_id, self._branch_uuid, seq, last)
            raise Corrupt(f"{self._key(seq)} is missing, although the log goes on to {last}")
        return entry

    def _key(self, seq: int) -> str:
        return layout.log_key(self._disk_id, self._branch_uuid, seq)
