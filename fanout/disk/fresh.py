"""How long ago something was known to be so, for what garbage collection allows only a while.

Owns measuring that for packs, and the time by the store's clock. What follows for logs is decided in branch.py, for
folds in fold.py; all by `Runtime.uptime`, which goes on while the machine sleeps.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

from fanout.errors import Limit, Unavailable
from fanout.runtime import Runtime
from fanout.store.base import Store

__all__ = ["PackAges", "store_now"]

#: How many packs of this process are remembered: 1.6 TB at 16 MiB each.
_PACKS = 100_000


class PackAges:
    """When this process began to store each of its packs. Thread safe.

    Until an entry refers to a pack it looks like garbage, so it must not wait for that longer than `limit_s`, which is
    half of what a collection gives it by default.
    """

    def __init__(self, runtime: Runtime, limit_s: float) -> None:
        self._runtime = runtime
        self._limit_s = limit_s
        self._since: OrderedDict[bytes, float] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, pack: bytes) -> None:
        """Remember that the pack is about to be stored."""
        with self._lock:
            self._since[pack] = self._runtime.uptime()
            while len(self._since) > _PACKS:
                self._since.popitem(last=False)

    def check(self, packs: Iterable[bytes]) -> None:
        """Raise `Limit` if one of the packs was stored too long ago to be referred to for the first time."""
        for pack in packs:
            since = self._since.get(pack)
            if since is not None and self._runtime.uptime() - since > self._limit_s:
                raise Limit(
                    f"its data was stored more than {self._limit_s:g} s before this commit, and may be gone as "
                    "garbage; nothing was written"
                )

    def forget(self, packs: Iterable[bytes]) -> None:
        """The packs are referred to by an entry that is there: they are no garbage any more."""
        with self._lock:
            for pack in packs:
                self._since.pop(pack, None)


def store_now(store: Store, runtime: Runtime) -> int:
    """Return the time by the store's own clock, in ns: that of an object stored now. Three requests."""
    key = f"probe/now-{runtime.hex_id(16)}"
    try:
        store.put(key, b"what time is it?")
        meta = store.head(key)
    finally:
        store.delete([key])
    if meta is None:
        raise Unavailable(f"{store.url} does not show an object that was just stored")
    return meta.modified_ns
