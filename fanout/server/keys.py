"""API keys: who may do what. Records in the bucket, so that all servers on it agree.

Owns tokens, rights and the secrets derived from the master. Knows no HTTP. docs/decisions/0006-keys.md says why it is
made as it is.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

from fanout.disk.record import create_record
from fanout.errors import Denied, Exists, Invalid, NotFound
from fanout.format import layout
from fanout.format.key import KeyRecord, MasterRecord, Right, decode_key, decode_master, encode_key, encode_master
from fanout.runtime import Runtime
from fanout.store.base import Store

__all__ = ["ANONYMOUS", "CACHE_S", "MAX_TEXT", "Keys", "Principal", "Right", "is_key_id"]

#: How long a server goes on honouring a key after it was removed through another one, and seconds of a wrong guess.
CACHE_S = 5.0
_MISS_S = 1.0
_CACHE_ENTRIES = 10_000
#: Looking up keys that no cache knows never takes more threads than this: made-up ones must not hold up all else.
_LOOKUPS = 8
_lookups: RunVar[anyio.CapacityLimiter] = RunVar("fanout-key-lookups")
#: Longest nickname and description, in characters.
MAX_TEXT = 256

_TOKEN = re.compile(r"key-([0-9a-f]{16})-([0-9a-f]{48})")
_KEY_ID = re.compile(r"[0-9a-f]{16}")
_RIGHTS: tuple[Right, ...] = ("read", "write", "admin")


@dataclass(frozen=True, slots=True)
class Principal:
    """Who makes a request. `disks` are the ids of the disks it may see, None meaning all."""

    id: str
    nickname: str
    right: Right
    disks: frozenset[str] | None = None
    expires_ns: int = 0

    @property
    def author(self) -> str:
        """What its commits say they are by."""
        return self.nickname or self.id

    def sees(self, disk_id: str) -> bool:
        """Whether a disk is one of this principal's."""
        return self.disks is None or disk_id in self.disks

    def require(self, disk_id: str, right: Right) -> None:
        """Raise `Denied` unless this principal has `right` on the disk of this id (ids, for a name can pass on)."""
        if not self.sees(disk_id):
            raise Denied(f"this key does not give access to disk {disk_id!r}")
        self._require(right)

    def require_admin(self) -> None:
        """Raise `Denied` unless this principal may create and delete disks and keys."""
        self._require("admin")

    def _require(self, right: Right) -> None:
        if _RIGHTS.index(self.right) < _RIGHTS.index(right):
            raise Denied(f"this key has the right to {self.right}, not to {right}")


#: Who everybody is on a server without keys.
ANONYMOUS = Principal("anonymous", "anonymous", "admin")


@dataclass(slots=True)
class _Seen:
    """What a lookup found; `until_s` is monotonic."""

    record: KeyRecord | None
    until_s: float


@dataclass(slots=True)
class Created:
    """A new key. `token` and `s3_secret` are shown once and in no repr."""

    record: KeyRecord
    token: str = field(repr=False)
    s3_secret: str = field(repr=False)


class Keys:
    """The API keys of one bucket. Thread safe; `by_token` and `by_access_key` may be called from any event loop."""

    def __init__(self, store: Store, runtime: Runtime) -> None:
        self._store = store
        self._runtime = runtime
        self._seen: OrderedDict[str, _Seen] = OrderedDict()
        self._lock = threading.Lock()
        self._master: bytes | None = None

    # -- recognising ------------------------------------------------------------------------------------------

    async def by_token(self, text: str) -> Principal | None:
        """Return whose token this is (`key-…`); None for one that is unknown, wrong, removed or expired."""
        match = _TOKEN.fullmatch(text)
        if match is None:
            return None
        record = await self._find(match[1])
        right = record is not None and hmac.compare_digest(record.token_hash, _hash(text))
        return self._principal(record) if record is not None and right else None

    async def by_access_key(self, access_key: str) -> tuple[Principal, str] | None:
        """Return whose S3 access key id this is, and the secret it signs with; None as in `by_token`."""
        if not is_key_id(access_key):
            return None
        record = await self._find(access_key)
        principal = self._principal(record) if record is not None else None
        if principal is None:
            return None
        if self._master is None:
            await anyio.to_thread.run_sync(self.master)
        return principal, self.s3_secret(access_key)

    async def _find(self, key_id: str) -> KeyRecord | None:
        known = self._known(key_id)
        if known is not None:
            return known.record
        try:
            limiter = _lookups.get()
        except LookupError:
            limiter = anyio.CapacityLimiter(_LOOKUPS)
            _lookups.set(limiter)
        return await anyio.to_thread.run_sync(self._look_up, key_id, limiter=limiter)

    def _known(self, key_id: str) -> _Seen | None:
        with self._lock:
            seen = self._seen.get(key_id)
            return seen if seen is not None and seen.until_s > self._runtime.monotonic() else None

    def _look_up(self, key_id: str) -> KeyRecord | None:
        known = self._known(key_id)  # another may have asked while this one waited
        if known is not None:
            return known.record
        record = self._load(key_id)
        self._remember(key_id, record)
        return record

    def _load(self, key_id: str) -> KeyRecord | None:
        key = layout.access_key(key_id)
        try:
            return decode_key(self._store.get(key), key)
        except NotFound:
            return None

    def _remember(self, key_id: str, record: KeyRecord | None) -> None:
        until_s = self._runtime.monotonic() + (_MISS_S if record is None else CACHE_S)
        with self._lock:
            self._seen[key_id] = _Seen(record, until_s)
            self._seen.move_to_end(key_id)
            while len(self._seen) > _CACHE_ENTRIES:
                self._seen.popitem(last=False)

    def _principal(self, record: KeyRecord) -> Principal | None:
        if record.expires_ns and record.expires_ns <= self._runtime.now_ns():
            return None
        disks = None if record.disks is None else frozenset(record.disks)
        return Principal(record.id, record.nickname, record.right, disks, record.expires_ns)

    # -- keeping (blocking) -----------------------------------------------------------------------------------

    def create(
        self,
        *,
        nickname: str = "",
        description: str = "",
        right: Right = "write",
        disks: Iterable[str] | None = None,
        expires_in_s: float | None = None,
    ) -> Created:
        """Make a key and return it with its token, which is kept nowhere. `disks` are disk ids."""
        only = None if disks is None else tuple(sorted(set(disks)))
        if right not in _RIGHTS:
            raise Invalid.argument("right", right, f"one of {', '.join(_RIGHTS)}")
        if only is not None and (right == "admin" or not only):
            raise Invalid.argument("disks", only, "at least one; an admin's key is for all disks")
        for argument, text in (("nickname", nickname), ("description", description)):
            if len(text) > MAX_TEXT or not text.isprintable():
                raise Invalid.argument(argument, text, f"at most {MAX_TEXT} printable characters")
        if expires_in_s is not None and not 0 < expires_in_s <= 100 * 365 * 86_400:
            raise Invalid.argument("expires_in_s", expires_in_s, "more than 0 and at most 100 years")
        now_ns = self._runtime.now_ns()
        key_id = self._runtime.hex_id(16)
        token = f"key-{key_id}-{self._runtime.token_bytes(24).hex()}"
        expires_ns = 0 if expires_in_s is None else now_ns + int(expires_in_s * 1e9)
        record = KeyRecord(key_id, _hash(token), nickname, right, only, now_ns, expires_ns, description)
        self.master()
        create_record(self._store, layout.access_key(key_id), encode_key(record), "the id is taken", self._runtime)
        self._remember(key_id, record)
        return Created(record, token, self.s3_secret(key_id))

    def list(self) -> list[KeyRecord]:
        """Return all keys, oldest first, expired ones included."""
        found = []
        for meta in self._store.list(layout.KEYS):
            key_id = layout.name_of_key(meta.key, layout.KEYS)
            record = self._load(key_id) if is_key_id(key_id) else None
            if record is not None:
                found.append(record)
        return sorted(found, key=lambda record: (record.created_ns, record.id))

    def get(self, key_id: str) -> KeyRecord:
        """Return one key as the store has it; `NotFound`."""
        record = self._load(key_id) if is_key_id(key_id) else None
        if record is None:
            raise NotFound(f"there is no key {key_id!r}")
        return record

    def delete(self, key_id: str) -> None:
        """Remove a key; `NotFound`. Other servers go on honouring it for at most `CACHE_S` seconds."""
        self.get(key_id)
        self._store.delete([layout.access_key(key_id)])
        self._remember(key_id, None)

    def forget_disk(self, disk_id: str) -> None:
        """Remove the keys that are for this disk alone: it is gone, and its id never comes back."""
        for record in self.list():
            if record.disks == (disk_id,):
                self._store.delete([layout.access_key(record.id)])
                self._remember(record.id, None)

    def any(self) -> bool:
        """Whether there is a key at all."""
        return next(iter(self._store.list(layout.KEYS, limit=1)), None) is not None

    # -- what is derived from the master ----------------------------------------------------------------------

    def master(self) -> bytes:
        """Return the secret of this bucket; the first server to ask makes it, and all agree on one."""
        if self._master is None:
            made = MasterRecord(self._runtime.token_bytes(32), self._runtime.now_ns())
            try:
                found = self._load_master()
            except NotFound:
                try:
                    create_record(self._store, layout.MASTER_KEY, encode_master(made), "there is one", self._runtime)
                    found = made
                except Exists:
                    found = self._load_master()
            self._master = found.secret
        return self._master

    def _load_master(self) -> MasterRecord:
        return decode_master(self._store.get(layout.MASTER_KEY), layout.MASTER_KEY)

    def s3_secret(self, key_id: str) -> str:
        """Return the secret access key that belongs to a key's id."""
        return base64.b64encode(self.derive("s3", key_id.encode())).decode()

    def derive(self, purpose: str, data: bytes) -> bytes:
        """Return 32 bytes that only who has the master can make; `purpose` keeps uses apart."""
        return hmac.digest(self.master(), purpose.encode() + b"\0" + data, "sha256")


def is_key_id(text: str) -> bool:
    """Whether `text` has the form of a key's id: 16 hex digits."""
    return _KEY_ID.fullmatch(text) is not None


def _hash(token: str) -> bytes:
    # One round is enough: a token holds 192 random bits, so there is nothing to guess.
    return hashlib.sha256(token.encode()).digest()
