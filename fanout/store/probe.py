"""Does a store keep the promises that fanout cannot do without? Asked once, when a disk is made.

Owns the questions and the refusal. Knows nothing of what kind of store it asks.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NoReturn

from fanout.errors import Exists, FanoutError, Invalid, Unavailable, Unknown
from fanout.runtime import Runtime
from fanout.store.base import Store

__all__ = ["Capabilities", "probe"]

_RACERS = 16
_ROUNDS = 3
_PREFIX = "probe/"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a probed store was seen to do. A store that lacks one of the first four is refused instead.

    `clock_offset_ms` is the store's clock minus this host's, to about a second.
    """

    create_only: bool
    read_after_write: bool
    list_after_write: bool
    ranged_get: bool
    clock_offset_ms: float


def probe(store: Store, runtime: Runtime) -> Capabilities:
    """Try the store out under a fresh key of `probe/` and remove what that left.

    16 racing creates of one key must have one winner whose bytes are stored; a second create must be
    refused; what was written must be read, listed and read in part. About 40 requests.

    Errors: `Invalid` (the store does not keep a promise; names the store and the promise), `Unavailable`,
    `Denied`.
    """
    base = f"{_PREFIX}{runtime.hex_id(16)}"
    keys: list[str] = []
    try:
        for attempt in range(_ROUNDS):
            keys.append(f"{base}/race-{attempt}")
            if (stored := _race(store, keys[-1])) is not None:
                break
        else:
            raise Unavailable(f"{store.url}: no create came through in {_ROUNDS} races")
        return _read_back(store, runtime, base, keys[-1], stored)
    finally:
        _clean_up(store, keys)


def _race(store: Store, key: str) -> bytes | None:
    """Race for `key`; return what is stored after, None if nothing is and no racer was told it won."""
    barrier = threading.Barrier(_RACERS)

    def racer(number: int) -> FanoutError | None:
        body = _body(number)
        barrier.wait()
        try:
            store.create(key, body)
        except (Exists, Unknown, Unavailable) as error:
            return error
        return None

    with ThreadPoolExecutor(_RACERS, thread_name_prefix="fanout-probe") as pool:
        outcomes = list(pool.map(racer, range(_RACERS)))
    winners = [number for number, outcome in enumerate(outcomes) if outcome is None]
    if len(winners) > 1:
        _refuse(store, f"{len(winners)} of {_RACERS} racing create-only puts of one key won, not one")
    if all(isinstance(outcome, Unavailable) for outcome in outcomes):
        raise outcomes[0] or Unavailable(store.url)
    if store.head(key) is None:
        if winners:
            _refuse(store, "a create-only put was acknowledged and then not there")
        return None
    stored = store.get(key)
    # Without a winner the right one's answer was lost, or came back as an echo.
    possible = winners or [n for n, outcome in enumerate(outcomes) if isinstance(outcome, Exists | Unknown)]
    if stored not in [_body(number) for number in possible]:
        _refuse(store, "a create-only put that lost the race replaced the winner's object")
    return stored


def _read_back(store: Store, runtime: Runtime, base: str, key: str, stored: bytes) -> Capabilities:
    try:
        store.create(key, b"late")
    except (Exists, Unknown):
        pass
    else:
        _refuse(store, "a create-only put replaced an object that was there")
    if store.get(key) != stored:
        _refuse(store, "a refused create-only put changed the object")
    if store.get(key, 2, 5) != stored[2:7]:
        _refuse(store, "a ranged get does not give the range")
    listed = [meta for meta in store.list(f"{base}/") if meta.key == key]
    if len(listed) != 1 or listed[0].size != len(stored):
        _refuse(store, "an object that was written is not listed at once")
    meta = store.head(key)
    if meta is None:
        _refuse(store, "an object that was written is not seen at once")
    return Capabilities(
        create_only=True,
        read_after_write=True,
        list_after_write=True,
        ranged_get=True,
        clock_offset_ms=round((meta.modified_ns - runtime.now_ns()) / 1e6, 1),
    )


def _body(number: int) -> bytes:
    return f"racer {number:02d} of {_RACERS}".encode()


def _refuse(store: Store, why: str) -> NoReturn:
    raise Invalid(
        f"store {store.url} is not safe to write to: {why}. fanout needs create-only puts "
        "(If-None-Match: *) that are atomic, and reads and listings that see what was written."
    )


def _clean_up(store: Store, keys: list[str]) -> None:
    try:
        store.delete(keys)
    except FanoutError:
        pass  # a leftover is harmless and small, and must not hide what the probe found
