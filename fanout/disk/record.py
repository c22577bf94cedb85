"""Objects that are written once, and what to believe of the store's answer.

Owns settling lost answers: reading back, trying again, and the small create-only records (disks, names, branches,
checkpoints) that hold something unique to their writer. log.py does the same for entries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fanout.errors import Exists, FanoutError, NotFound, Unavailable, Unknown
from fanout.runtime import Runtime
from fanout.store.base import Store

__all__ = ["ATTEMPTS", "create_record", "pause", "read_back"]

#: How often a create is tried again after an answer that left nothing behind, and a read after one that gave nothing.
ATTEMPTS = 8
_BACKOFF_S = 0.05

T = TypeVar("T")


def pause(runtime: Runtime, attempt: int) -> None:
    """Sleep before attempt number `attempt` (from 1): full jitter, up to 6.4 s before the last."""
    runtime.sleep(runtime.uniform(0, _BACKOFF_S * 2**attempt))


def create_record(store: Store, key: str, data: bytes, taken: str, runtime: Runtime) -> None:
    """Create `key`; raises `Exists(taken)` only if somebody else's record is there.

    `data` must be unique to this writer (it holds a random id), so that reading it back tells whose it is.
    `Unavailable`: certainly not written. `Unknown`: the outcome could not be learned.
    """
    failure: FanoutError | None = None
    ambiguous = False
    for attempt in range(ATTEMPTS):
        if attempt:
            pause(runtime, attempt)
        try:
            store.create(key, data)
            return
        except Unavailable as error:
            failure = error
        except (Exists, Unknown) as error:
            failure = error
            there = read_back(store, key, lambda: store.get(key), error, runtime)
            if there == data:
                return
            if there is not None:
                raise Exists(taken) from None
            ambiguous = ambiguous or isinstance(error, Unknown)
    raise (Unknown if ambiguous else Unavailable)(
        f"{store.url} did not store {key} in {ATTEMPTS} attempts: {failure}"
    ) from failure


def read_back(store: Store, key: str, load: Callable[[], T | None], failure: FanoutError, runtime: Runtime) -> T | None:
    """Learn what a failed or ambiguous create left at `key`; None means nothing, `Unknown` that it cannot be read."""
    for attempt in range(ATTEMPTS):
        if attempt:
            pause(runtime, attempt)
        try:
            return load()
        except NotFound:
            return None
        except FanoutError as error:
            failure = error
            if attempt and not isinstance(error, Unavailable):
                break  # twice the same damage or refusal is no accident of the transfer
    raise Unknown(
        f"{store.url} did not say whether it stored {key}, and it cannot be read back: {failure}"
    ) from failure
