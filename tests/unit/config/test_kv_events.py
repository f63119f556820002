"""`kv_events_config`: vLLM's fields, and what is wrong with them."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.config.kv_events import resolve_kv_events
from inflight.errors import ConfigError

ON = {"enable_kv_cache_events": True}


def test_what_is_published() -> None:
    for given in (None, {}, {"enable_kv_cache_events": False}, {**ON, "publisher": "null"}):
        assert resolve_kv_events(given, is_caching=True) is None
    config = resolve_kv_events({**ON, "publisher": "zmq", "topic": "kv@pod"}, is_caching=True)
    assert config is not None
    assert (config.endpoint, config.replay_endpoint, config.topic) == ("tcp://*:5557", None, "kv@pod")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({**ON, "endpont": "tcp://*:1"}, "has no 'endpont'; did you mean 'endpoint'"),
        ({**ON, "endpoint": "ipc:///tmp/x"}, "'ipc:///tmp/x' is no endpoint; give one like 'tcp://\\*:5557'"),
        ({**ON, "replay_endpoint": "tcp://*"}, "'tcp://\\*' is no endpoint"),
        ({**ON, "buffer_steps": 0}, "buffer_steps=0"),
        ({**ON, "publisher": "kafka"}, "publisher='kafka'"),
        ("yes", "is not a dictionary"),
    ],
)
def test_what_is_wrong(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_events_config.*{message}"):
        resolve_kv_events(given, is_caching=True)


def test_without_a_prefix_cache_there_is_nothing_to_tell() -> None:
    with pytest.raises(ConfigError, match="nothing is cached; leave one of them out"):
        resolve_kv_events(ON, is_caching=False)
