"""Settings: arguments over FANOUT_* variables over defaults; unknown ones are refused; secrets are never shown."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import pytest

import fanout
from fanout.config import MAX_IN_FLIGHT_PER_CORE, MAX_TIMEOUT_S, Settings
from fanout.errors import Invalid


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    loaded = Settings.load({})
    assert (loaded.store, loaded.cache_dir) == ("file:///data/fanout", Path("/cache/fanout"))
    assert loaded.max_in_flight == MAX_IN_FLIGHT_PER_CORE * len(os.sched_getaffinity(0))
    assert (loaded.engine, loaded.url, loaded.output_bytes) == ("auto", None, 1 << 20)


def test_arguments_win_over_variables_over_defaults() -> None:
    environ = {"FANOUT_STORE": "memory://v", "FANOUT_MAX_IN_FLIGHT": "7", "FANOUT_CACHE_BYTES": "2097152"}
    loaded = Settings.load(environ, store="memory://a", max_in_flight=None)
    assert (loaded.store, loaded.max_in_flight, loaded.cache_bytes) == ("memory://a", 7, 2 << 20)


def test_an_empty_variable_is_not_set() -> None:
    assert Settings.load({"FANOUT_ENGINE": ""}).engine == "auto"


def test_the_index_of_searches_is_on_unless_it_is_turned_off() -> None:
    assert Settings.load({}).grep_index
    assert not Settings.load({"FANOUT_GREP_INDEX": "0"}).grep_index
    assert not Settings.load({"FANOUT_GREP_INDEX": "1"}, grep_index=False).grep_index


def test_host_paths_are_separated_like_PATH() -> None:
    assert Settings.load({"FANOUT_HOST_PATHS": "/opt/a:/opt/b"}).host_paths == ("/opt/a", "/opt/b")
    networks = Settings.load({"FANOUT_NETWORK_DENY": "10.0.0.0/8:192.168.0.0/16"}).network_deny
    assert networks == ("10.0.0.0/8", "192.168.0.0/16")


@pytest.mark.parametrize(
    ("environ", "arguments", "says"),
    [
        ({"FANOUT_MAX_IN_FLIGHT": "many"}, {}, ["FANOUT_MAX_IN_FLIGHT is 'many'", "integer"]),
        ({}, {"max_in_flight": 0}, ["max_in_flight is 0", "greater than or equal to 1"]),
        ({"FANOUT_MAX_IN_FLIGHT": "3"}, {"max_in_flight": 0}, ["max_in_flight is 0"]),
        ({"FANOUT_ENGINE": "docker"}, {}, ["FANOUT_ENGINE is 'docker'", "'bubblewrap'"]),
        ({}, {"cache_bytes": 5}, ["cache_bytes is 5", "1048576"]),
        ({}, {"store": ""}, ["store is ''"]),
        ({}, {"stores": "memory://"}, ["no setting 'stores'", "store,"]),
    ],
)
def test_bad_values_are_named(environ: dict[str, str], arguments: dict[str, object], says: list[str]) -> None:
    with pytest.raises(Invalid) as caught:
        Settings.load(environ, **arguments)
    for words in says:
        assert words in str(caught.value)


SECRET = "key-5a1b"


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + repr(error)


@pytest.mark.parametrize("arguments", [{"api_key": [SECRET]}, {"apikey": SECRET}, {"api_key": SECRET, "engine": "x"}])
def test_secrets_are_never_shown(arguments: dict[str, object]) -> None:
    with pytest.raises(Invalid) as caught:
        Settings.load({}, **arguments)
    assert SECRET not in shown(caught.value)
    loaded = Settings.load({"FANOUT_API_KEY": SECRET})
    assert loaded.api_key == SECRET
    assert SECRET not in repr(loaded) + str(loaded)


def test_connect_refuses_what_settings_refuse() -> None:
    with pytest.raises(Invalid, match="no setting 'stor'"):
        fanout.connect(stor="memory://")
    with pytest.raises(Invalid, match="engine is 'docker'"):
        fanout.connect(engine="docker")


def test_the_longest_timeout_is_a_day() -> None:
    assert MAX_TIMEOUT_S == 24 * 3600
