"""What every store promises: the same tests on each of them, plain and wrapped."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fanout.errors import Exists, Invalid, NotFound
from fanout.runtime import system
from fanout.store.base import MAX_KEY_BYTES, Store
from fanout.store.local import LocalStore
from fanout.store.probe import probe
from fanout.store.wrap import Limited, Metered, Retrying
from tests import support
from tests.conftest import STORES


def wrapped(store: Store) -> Store:
    return Retrying(Metered(Limited(store, 16)), system, attempts=3, base_s=0.01)


@pytest.fixture(params=STORES)
def bare(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return LocalStore(tmp_path / "durable")
    found: Store = request.getfixturevalue(f"{request.param}_store")
    return found


@pytest.fixture(params=["plain", "wrapped"])
def store(request: pytest.FixtureRequest, bare: Store) -> Store:
    return wrapped(bare) if request.param == "wrapped" else bare


def keys(store: Store, prefix: str = "", start_after: str = "", limit: int | None = None) -> list[str]:
    return [meta.key for meta in store.list(prefix, start_after, limit)]


def test_what_is_created_is_read(store: Store) -> None:
    before = system.now_ns()
    store.create("a/b/c", b"hello")
    assert store.get("a/b/c") == b"hello"
    meta = store.head("a/b/c")
    assert meta is not None
    assert (meta.key, meta.size) == ("a/b/c", 5)
    assert abs(meta.modified_ns - before) < 30 * 10**9


def test_create_does_not_replace(store: Store) -> None:
    store.create("k", b"first")
    with pytest.raises(Exists):
        store.create("k", b"second")
    assert store.get("k") == b"first"


def test_create_after_delete_is_a_first_create(store: Store) -> None:
    store.create("k", b"1")
    store.delete(["k"])
    store.create("k", b"2")
    assert store.get("k") == b"2"


def test_put_replaces(store: Store) -> None:
    store.put("p/k", b"a longer first value")
    store.put("p/k", b"short")
    assert store.get("p/k") == b"short"
    with pytest.raises(Exists):
        store.create("p/k", b"")


def test_what_is_not_there(store: Store) -> None:
    store.create("d/there", b"x")
    for key in ("nothing", "d/nothing", "d", "d/there/below"):
        with pytest.raises(NotFound, match=key):
            store.get(key)
        with pytest.raises(NotFound, match=key):
            store.get(key, 0, 0)
        assert store.head(key) is None
        store.delete([key])
    assert store.get("d/there") == b"x"


RANGES = [
    (0, None, b"0123456789"),
    (3, None, b"3456789"),
    (3, 4, b"3456"),
    (0, 1, b"0"),
    (9, 1, b"9"),
    (8, 100, b"89"),
    (0, 100, b"0123456789"),
    (10, None, b""),
    (10, 5, b""),
    (1000, 5, b""),
    (1000, None, b""),
    (0, 0, b""),
    (5, 0, b""),
    (1000, 0, b""),
]


def test_ranges(store: Store) -> None:
    store.create("r", b"0123456789")
    for start, length, expected in RANGES:
        assert store.get("r", start, length) == expected, (start, length)


def test_an_empty_object(store: Store) -> None:
    store.create("e", b"")
    assert store.get("e") == b""
    assert store.get("e", 0, 5) == b""
    assert store.get("e", 1) == b""
    meta = store.head("e")
    assert meta is not None
    assert meta.size == 0
    assert [(m.key, m.size) for m in store.list()] == [("e", 0)]


def test_a_large_object(store: Store) -> None:
    data = bytes(range(256)) * (9 * 4096 + 1)  # a bit over 9 MiB, no multiple of anything
    store.create("large", data)
    assert store.get("large") == data
    assert store.get("large", 5_000_000, 3_000_000) == data[5_000_000:8_000_000]


def test_bytes_are_kept_exactly(store: Store) -> None:
    data = b"\x00\xff\r\n\n\r" + bytes(range(256))
    store.create("b", data)
    assert store.get("b") == data


def test_listing_is_in_byte_order_of_the_whole_key(store: Store) -> None:
    names = ["a-b", "a.b", "a/b", "a/b-c", "a/d/e", "a/d.e", "a0", "a=", "A", "Z/a", "_", "a@", "a_b/c"]
    for name in names:
        store.create(name, b"x")
    expected = sorted(names)
    assert keys(store) == expected
    for prefix in ("", "a", "a/", "a/b", "a/d", "a/d/", "a-", "Z", "zz", "a/b/c", "_"):
        assert keys(store, prefix) == [k for k in expected if k.startswith(prefix)], prefix
    for after in [*expected, "a", "a/", "a/d", "a/d/", "a/~", "~", " ", "a/b/"]:
        assert keys(store, start_after=after) == [k for k in expected if k > after], after
        assert keys(store, "a/", after) == [k for k in expected if k > after and k.startswith("a/")], after
    for limit in range(4):
        assert keys(store, "a", "a-b", limit) == [k for k in expected if k > "a-b" and k.startswith("a")][:limit]


def test_listing_gives_sizes_and_times(store: Store) -> None:
    store.create("x/1", b"12345")
    [meta] = store.list("x/")
    assert meta == store.head("x/1") or abs(meta.modified_ns - system.now_ns()) < 30 * 10**9
    assert meta.size == 5


def test_listing_is_lazy_and_survives_changes(store: Store) -> None:
    for n in range(30):
        store.create(f"l/{n:03d}", b"")
    iterator = store.list("l/")
    assert next(iterator).key == "l/000"
    store.delete([f"l/{n:03d}" for n in range(0, 30, 2)])
    rest = [meta.key for meta in iterator]
    assert rest == sorted(rest)
    assert set(rest) >= {f"l/{n:03d}" for n in range(1, 30, 2)}


def test_listing_sees_each_create_at_once(store: Store) -> None:
    for n in range(10):
        store.create(f"log/{n:020d}", b"")
        assert keys(store, "log/", f"log/{n - 1:020d}" if n else "") == [f"log/{n:020d}"]


def test_delete_many_and_missing(store: Store) -> None:
    for n in range(20):
        store.create(f"m/{n % 3}/{n}", b"x")
    store.delete([f"m/{n % 3}/{n}" for n in range(15)] + ["m/none", "none/at/all"])
    assert keys(store) == sorted(f"m/{n % 3}/{n}" for n in range(15, 20))
    store.delete([])
    store.delete(["m/none"])


BAD_KEYS = [
    "", "/", "/a", "a/", "a//b", ".", "..", "a/../b", "../a", "a/.", "a b", "ä", "a\0", "a\n", "a+b", "a\\b",
    "x" * 241, "/".join(["x" * 200] * 5),
]  # fmt: skip


def test_bad_keys_are_refused_everywhere(store: Store) -> None:
    calls: list[Callable[[str], object]] = [
        lambda key: store.create(key, b""),
        lambda key: store.put(key, b""),
        store.get,
        store.head,
        lambda key: store.delete(["fine", key]),
    ]
    for key in BAD_KEYS:
        for call in calls:
            with pytest.raises(Invalid, match="key is"):
                call(key)


def test_good_keys(store: Store) -> None:
    good = ["...", "a..b", ".a", "-", "A=@_.-9", "x" * 240, "/".join(["y" * 199] * 4)]
    assert len(good[-1]) == MAX_KEY_BYTES - 1
    for key in good:
        store.create(key, key.encode())
    assert keys(store) == sorted(good)
    assert all(store.get(key) == key.encode() for key in good)


def test_bad_arguments_are_refused_at_the_call(store: Store) -> None:
    store.create("k", b"")
    for start, length in ((-1, None), (0, -1)):
        with pytest.raises(Invalid):
            store.get("k", start, length)
    for prefix, after, limit in (
        ("../", "", None), ("/a", "", None), ("a//b", "", None), ("a b", "", None), ("", "ä", None), ("", "", -1)
    ):  # fmt: skip
        with pytest.raises(Invalid):
            store.list(prefix, after, limit)


def test_sixteen_threads_race(store: Store) -> None:
    for n in range(5):
        key = f"race/{n}"
        barrier = threading.Barrier(16)

        def racer(number: int, key: str = key, barrier: threading.Barrier = barrier) -> bool:
            barrier.wait()
            try:
                store.create(key, b"%d" % number * 1000)
            except Exists:
                return False
            return True

        with ThreadPoolExecutor(16) as pool:
            outcomes = list(pool.map(racer, range(16)))
        assert outcomes.count(True) == 1
        assert store.get(key) == b"%d" % outcomes.index(True) * 1000


def test_readers_see_all_of_a_put_or_none(store: Store) -> None:
    sizes = {ord("a"): 10_000, ord("b"): 300_000}
    store.put("w", b"a" * sizes[ord("a")])
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for letter, size in sizes.items():
                store.put("w", bytes([letter]) * size)

    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(write)
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            data = store.get("w")
            assert data == data[:1] * sizes[data[0]]
        stop.set()
        writer.result()


@pytest.mark.parametrize("bare", ["local", pytest.param("s3", marks=pytest.mark.s3)], indirect=True)
def test_four_processes_race(bare: Store) -> None:
    endpoint = getattr(bare, "endpoint", "") or ""
    names = [f"race/{n:03d}" for n in range(100)]
    script = Path(support.__file__).parent / "racer.py"
    racers = [
        subprocess.Popen(
            [sys.executable, str(script), bare.url, endpoint, str(number), *names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    try:
        for racer in racers:
            assert racer.stdout is not None
            assert racer.stdout.readline() == "ready\n"
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("go\n")
            racer.stdin.flush()
        won = {number: racer.communicate(timeout=60)[0].split() for number, racer in enumerate(racers)}
    finally:
        for racer in racers:
            racer.kill()
            racer.wait()
    assert sorted(key for each in won.values() for key in each) == names
    assert all(bare.get(key) == str(number).encode() for number, each in won.items() for key in each)
    assert sum(1 for each in won.values() if each) > 1, "they did not race at all"


def test_the_probe_accepts_it(store: Store) -> None:
    found = probe(store, system)
    assert found.create_only
    assert found.list_after_write
    assert abs(found.clock_offset_ms) < 10_000
    assert keys(store) == []


def test_a_repr_names_the_store(store: Store) -> None:
    assert store.url in repr(store)


PARTS = st.sampled_from(["a", "a-", "a.", "a0", "b", "B", "=", "a-b"])
KEYS = st.lists(PARTS, min_size=1, max_size=3).map("/".join)


@pytest.mark.parametrize("bare", ["memory", "local"], indirect=True)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_sequence_behaves_like_a_dict(bare: Store, data: st.DataObject) -> None:
    bare.delete([meta.key for meta in bare.list()])
    model: dict[str, bytes] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        key = data.draw(KEYS)
        body = data.draw(st.binary(max_size=4))
        clash = any(k.startswith(key + "/") or key.startswith(k + "/") for k in model)
        match data.draw(st.sampled_from(["create", "put", "delete", "list"])):
            case "create" if key in model:
                with pytest.raises(Exists):
                    bare.create(key, body)
            case "create" | "put" as verb if clash:
                with pytest.raises(Invalid):
                    getattr(bare, verb)(key, body)
            case "create" | "put" as verb:
                getattr(bare, verb)(key, body)
                model[key] = body
            case "delete":
                bare.delete([key])
                model.pop(key, None)
            case _:
                after = data.draw(KEYS)
                assert keys(bare, key, after) == sorted(k for k in model if k.startswith(key) and k > after)
    assert {meta.key: bare.get(meta.key) for meta in bare.list()} == model
