"""API keys: recognising, rights, expiry, removal, and what two servers agree on."""

from __future__ import annotations

import base64
import hashlib
import hmac
import threading

import anyio
import pytest

from fanout.errors import Denied, Invalid, NotFound
from fanout.format import layout
from fanout.format.call import ClaimRecord, EndRecord, decode_claim, decode_end
from fanout.format.key import KeyRecord, MasterRecord, decode_key, decode_master
from fanout.runtime import Runtime, seeded
from fanout.server.keys import _CACHE_ENTRIES, CACHE_S, Created, Keys, Principal
from fanout.store.base import Store
from fanout.store.memory import MemoryStore
from fanout.store.wrap import Metered


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def runtime(self) -> Runtime:
        return Runtime(now_ns=lambda: int(self.now_s * 1e9), monotonic=lambda: self.now_s, sleep=lambda _: None)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store() -> Metered:
    return Metered(MemoryStore())


@pytest.fixture
def keys(store: Store, clock: Clock) -> Keys:
    return Keys(store, clock.runtime())


def whose(keys: Keys, token: str) -> Principal | None:
    return anyio.run(keys.by_token, token)


def test_a_token_is_recognised_and_kept_nowhere(store: Metered, keys: Keys) -> None:
    made = keys.create(nickname="bob", right="read")
    found = whose(keys, made.token)
    assert found is not None
    assert (found.id, found.nickname, found.author, found.right) == (made.record.id, "bob", "bob", "read")
    key = layout.access_key(made.record.id)
    data = store.get(key)
    assert decode_key(data, key).token_hash == hashlib.sha256(made.token.encode()).digest()
    secret = made.token.rpartition("-")[2].encode()
    assert all(secret not in store.get(meta.key) for meta in store.list())
    assert made.token not in repr(made)
    assert made.s3_secret not in repr(made)


@pytest.mark.parametrize(
    "change",
    [
        lambda token: token[:-1] + ("0" if token[-1] != "0" else "1"),
        lambda token: token.upper(),
        lambda token: token + "0",
        lambda token: token[4:],
        lambda token: "key-" + "0" * 16 + token[20:],
        lambda token: "",
        lambda token: "key-../../../etc/passwd",
        lambda token: token + "\n",
        lambda token: "key-\u0660" + token[5:],
    ],
)
def test_what_is_no_token(keys: Keys, change: object) -> None:
    token = keys.create().token
    assert whose(keys, change(token)) is None  # type: ignore[operator]


def test_an_access_key_has_a_secret_that_any_server_derives(store: Metered, keys: Keys, clock: Clock) -> None:
    made = keys.create()
    other = Keys(store, clock.runtime())
    found = anyio.run(other.by_access_key, made.record.id)
    assert found is not None
    assert found[1] == made.s3_secret
    told = hmac.new(keys.master(), b"s3\0" + made.record.id.encode(), "sha256").digest()
    assert base64.b64decode(made.s3_secret) == told
    assert anyio.run(keys.by_access_key, "0" * 16) is None
    assert anyio.run(keys.by_access_key, "AKIAIOSFODNN7EXAMPLE") is None


def test_servers_that_start_together_agree_on_one_master() -> None:
    store = MemoryStore()
    barrier = threading.Barrier(8)
    found: list[bytes] = []

    def start(seed: int) -> None:
        keys = Keys(store, seeded(seed))
        barrier.wait()
        found.append(keys.master())

    threads = [threading.Thread(target=start, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1


def test_a_key_ends(keys: Keys, clock: Clock) -> None:
    made = keys.create(expires_in_s=60)
    clock.now_s += 59
    assert whose(keys, made.token) is not None
    clock.now_s += 1
    assert whose(keys, made.token) is None
    assert anyio.run(keys.by_access_key, made.record.id) is None


def test_a_removed_key_is_honoured_for_seconds_elsewhere_and_not_here(store: Metered, keys: Keys, clock: Clock) -> None:
    other = Keys(store, clock.runtime())
    made = keys.create()
    assert whose(other, made.token) is not None
    keys.delete(made.record.id)
    assert whose(keys, made.token) is None
    assert whose(other, made.token) is not None
    clock.now_s += CACHE_S
    assert whose(other, made.token) is None
    with pytest.raises(NotFound):
        keys.delete(made.record.id)


def test_looking_up_costs_one_request_and_wrong_guesses_are_remembered(
    store: Metered, keys: Keys, clock: Clock
) -> None:
    other = Keys(store, clock.runtime())
    token = keys.create().token
    unknown = "key-" + "0" * 16 + "-" + "0" * 48
    before = store.usage()
    for _ in range(5):
        assert whose(other, token) is not None
        assert whose(other, unknown) is None
    assert (store.usage() - before).requests == {"get": 2}


def test_the_cache_is_bounded(keys: Keys) -> None:
    for number in range(_CACHE_ENTRIES + 10):
        keys._remember(f"{number:016x}", None)
    assert len(keys._seen) == _CACHE_ENTRIES


def test_rights(keys: Keys) -> None:
    disk, other = "dsk-" + "1" * 16, "dsk-" + "2" * 16

    def may(made: Created, disk_id: str, right: str) -> bool:
        principal = whose(keys, made.token)
        assert principal is not None
        try:
            principal.require(disk_id, right)  # type: ignore[arg-type]
        except Denied:
            return False
        return True

    reader, writer = keys.create(right="read"), keys.create(right="write", disks=[disk])
    assert may(reader, disk, "read")
    assert not may(reader, disk, "write")
    assert may(writer, disk, "write")
    assert not may(writer, other, "read")
    admin = whose(keys, keys.create(right="admin").token)
    assert admin is not None
    admin.require_admin()
    for made in (reader, writer):
        principal = whose(keys, made.token)
        assert principal is not None
        with pytest.raises(Denied):
            principal.require_admin()


@pytest.mark.parametrize(
    "arguments",
    [
        {"right": "all"},
        {"right": "admin", "disks": ["dsk-" + "1" * 16]},
        {"disks": []},
        {"nickname": "x" * 257},
        {"nickname": "two\nlines"},
        {"expires_in_s": 0},
        {"expires_in_s": float("nan")},
        {"expires_in_s": float("inf")},
    ],
)
def test_keys_that_cannot_be(store: Metered, keys: Keys, arguments: dict[str, object]) -> None:
    with pytest.raises(Invalid):
        keys.create(**arguments)  # type: ignore[arg-type]
    assert not keys.any()


def test_listing_and_forgetting_a_disk(keys: Keys, clock: Clock) -> None:
    disk = "dsk-" + "1" * 16
    first = keys.create(nickname="1")
    clock.now_s += 1
    keys.create(nickname="2", disks=[disk])
    clock.now_s += 1
    keys.create(nickname="3", disks=[disk, "dsk-" + "2" * 16])
    assert [record.nickname for record in keys.list()] == ["1", "2", "3"]
    keys.forget_disk(disk)
    assert [record.nickname for record in keys.list()] == ["1", "3"]
    assert keys.get(first.record.id) == first.record


def test_records_as_version_1_stored_them() -> None:
    """These bytes stay readable, whatever is written today."""
    key = (
        "RkFOQQGBpCyD78nAKPXxRLfD9uMaKLUv/SBZpQEApAKYsDAxMjM0NTY3ODlhYmNkZWbEIAGjYm9ipHJlYWSRtGRzay0REqN3aHkCAERA6gbc"
        "AQ=="
    )
    claim = "RkFOUQHT7QrhxncLzQQ8894BDtn3KLUv/SBGdQEAdAKUxCADpGV4LTGRk7Rkc2stMDEyMzQ1Njc4OWFiY2RlZqRtYWluBREBAA0gAg=="
    disk = "dsk-0123456789abcdef"
    expected = KeyRecord("0123456789abcdef", b"\1" * 32, "bob", "read", (disk,), 17, 18, "why")
    assert decode_key(base64.b64decode(key), "keys/x") == expected
    master = base64.b64decode("RkFOTQHIFCd4rhVBxMeEutU4uBPSKLUv/SAkXQAAKJLEIAIRAQANIAI=")
    assert decode_master(master, "master") == MasterRecord(b"\2" * 32, 17)
    assert decode_claim(base64.b64decode(claim), "x") == ClaimRecord(b"\3" * 32, "ex-1", ((disk, "main", 5),), 17)
    end = base64.b64decode("RkFOTwG6ao5b/5t6OG8ywJ8Sg90yKLUv/SARiQAAk6ZyZXN1bHTEAnt9pGV4LTE=")
    assert decode_end(end, "x") == EndRecord("result", b"{}", "ex-1")
