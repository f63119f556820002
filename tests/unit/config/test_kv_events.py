"""`kv_events_config`: vLLM's fields, and what is wrong with them."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.config.kv_events import is_bound, resolve_kv_events
from inflight.errors import ConfigError

ON = {"enable_kv_cache_events": True}


def test_what_is_published() -> None:
    for given in (None, {}, {"enable_kv_cache_events": False}, {**ON, "publisher": "null"}):
        assert resolve_kv_events(given, is_caching=True, replicas=range(2)) is None
    config = resolve_kv_events({**ON, "publisher": "zmq", "topic": "kv@pod"}, is_caching=True, replicas=range(2))
    assert config is not None
    assert (config.endpoint, config.replay_endpoint, config.topic) == ("tcp://*:5557", None, "kv@pod")


def test_ports_of_another_machine_are_no_conflict() -> None:
    given = {**ON, "endpoint": "tcp://10.0.0.1:5557", "replay_endpoint": "tcp://*:5557"}
    assert resolve_kv_events(given, is_caching=True, replicas=range(64)) is not None
    assert (
        resolve_kv_events({**ON, "replay_endpoint": "tcp://*:5559"}, is_caching=True, replicas=range(3, 5)) is not None
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({**ON, "endpont": "tcp://*:1"}, "has no 'endpont'; did you mean 'endpoint'"),
        (
            {**ON, "endpoint": "ipc:///tmp/x"},
            r"'ipc:///tmp/x' is no endpoint with a port in \[1, 65531\]; give one like 'tcp://\*:5557'",
        ),
        ({**ON, "endpoint": "tcp://*:0"}, "'tcp://\\*:0' is no endpoint"),
        ({**ON, "endpoint": "tcp://*:65532"}, "'tcp://\\*:65532' is no endpoint"),
        (
            {**ON, "replay_endpoint": "tcp://*:5558"},
            "common ports, because replica n adds n .* the last replica is 4; change",
        ),
        ({**ON, "topic": "a\ud800"}, r"topic='a\\ud800' has characters that cannot be printed"),
        ({**ON, "endpoint": "tcp://a:57", "replay_endpoint": "tcp://a:58"}, "have common ports"),
        ({**ON, "endpoint": "tcp://*:\u0665\u0665\u0665\u0667"}, "is no endpoint"),
        ("", "a str, not a dictionary"),
        ({**ON, "replay_endpoint": "tcp://*"}, "'tcp://\\*' is no endpoint"),
        ({**ON, "buffer_steps": 0}, "buffer_steps=0"),
        ({**ON, "publisher": "kafka"}, "publisher='kafka'"),
        ("yes", "a str, not a dictionary"),
    ],
)
def test_what_is_wrong(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_events_config.*{message}"):
        resolve_kv_events(given, is_caching=True, replicas=range(3, 5))


def test_without_a_prefix_cache_there_is_nothing_to_tell() -> None:
    with pytest.raises(ConfigError, match="nothing is cached; leave one of them out"):
        resolve_kv_events(ON, is_caching=False, replicas=range(1))


@pytest.mark.parametrize(
    ("endpoint", "replay", "has_conflict"),
    [
        ("tcp://*:65531", None, False),  # the last replica has the last port
        ("tcp://*:5557", "tcp://*:5559", False),
        ("tcp://*:5559", "tcp://*:5557", False),
        ("tcp://*:5557", "tcp://0.0.0.0:5557", True),
        ("tcp://[::]:5557", "tcp://a:5558", True),
        ("tcp://a:5557", "tcp://b:5557", False),
        ("tcp://a:5557", "tcp://a:5557", True),
    ],
)
def test_ports_of_replicas(endpoint: str, replay: str | None, has_conflict: bool) -> None:
    given = {**ON, "endpoint": endpoint, "replay_endpoint": replay}
    if has_conflict:
        with pytest.raises(ConfigError, match="have common ports"):
            resolve_kv_events(given, is_caching=True, replicas=range(3, 5))
    else:
        config = resolve_kv_events(given, is_caching=True, replicas=range(3, 5))
        assert config is not None and (config.endpoint, config.replay_endpoint) == (endpoint, replay)


@pytest.mark.parametrize(("endpoint", "listens"), [("tcp://*:1", True), ("tcp://[::]:1", True), ("tcp://a:1", False)])
def test_who_listens(endpoint: str, listens: bool) -> None:
    assert is_bound(endpoint) == listens


def test_what_is_wrong_is_told_also_if_nothing_is_published() -> None:
    for given in ({"endpoint": "tcp://*:0"}, {**ON, "publisher": "null", "topic": "\n"}):
        with pytest.raises(ConfigError, match="kv_events_config"):
            resolve_kv_events(given, is_caching=True, replicas=range(1))
    assert resolve_kv_events({**ON, "publisher": "null"}, is_caching=False, replicas=range(1)) is None
