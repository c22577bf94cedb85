"""Small create-only records (disks, names, branches, checkpoints), and what to believe of the store's answer.

Owns settling lost answers for objects that are written once and hold something unique to their writer.
"""

from __future__ import annotations

from fanout.errors import Exists, NotFound, Unavailable, Unknown
from fanout.store.base import Store

__all__ = ["create_record"]


def create_record(store: Store, key: str, data: bytes, taken: str) -> None:
    """Create `key`; raises `Exists(taken)` only if somebody else's record is there.

    `data` must be unique to this writer (it holds a random id), so that reading it back tells whose it is.
    """
    try:
        store.create(key, data)
        return
    except (Exists, Unknown) as error:
        try:
            there = store.get(key)
        except NotFound:
            raise Unavailable(f"{store.url} did not store {key}; nothing was written") from error
        except Unavailable:
            raise Unknown(f"{store.url} did not say whether it stored {key}, and it cannot be read back") from error
        if there != data:
            raise Exists(taken) from None
