"""`KVEventsConfig`: whether and where replicas publish which blocks are in their prefix caches. Names and values are vLLM's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inflight.config.json_option import from_json
from inflight.errors import ConfigError
from inflight.setting import setting

_TCP = re.compile(r"tcp://\S+:[0-9]{1,5}")


@dataclass(frozen=True, kw_only=True)
class KVEventsConfig:
    """`endpoint` and `replay_endpoint` are addresses of ZeroMQ. Replica n adds n to their ports."""

    enable_kv_cache_events: bool = setting(False, "Whether events are published.")
    publisher: str | None = setting(None, "null: nothing is published.", choices=("zmq", "null"))
    endpoint: str = setting("tcp://*:5557", "Where events are published.")
    replay_endpoint: str | None = setting(None, "Where a subscriber can ask for the last events again.")
    buffer_steps: int = setting(10_000, "How many messages can be asked for again.", bounds=(1, 2**20))
    hwm: int = setting(100_000, "Most messages that wait for one subscriber; further ones are lost.", bounds=(1, 2**30))
    max_queue_size: int = setting(100_000, "Most messages that wait to be published.", bounds=(1, 2**30))
    topic: str = setting("", "The topic of the messages.")


# Any: checked here
def resolve_kv_events(given: Mapping[str, Any] | None, *, is_caching: bool, replicas: range) -> KVEventsConfig | None:
    """Returns the config that `given` (`EngineArgs.kv_events_config`) describes; None if nothing is published.

    Args:
        is_caching: whether there is a prefix cache.
        replicas: the numbers of this server's replicas.

    Raises:
        ConfigError: a wrong value, or there is no prefix cache.
    """
    config = from_json(KVEventsConfig, "kv_events_config", given)
    ports = [_ports(each, replicas) for each in (config.endpoint, config.replay_endpoint) if each is not None]
    if not config.topic.isprintable():
        raise ConfigError(f"kv_events_config: topic={config.topic!r} has characters that cannot be printed; change it")
    if not config.enable_kv_cache_events or config.publisher == "null":
        return None
    hosts = {each.rpartition(":")[0] for each in (config.endpoint, config.replay_endpoint) if each is not None}
    share_host = is_bound(config.endpoint) or len(hosts) == 1
    if share_host and len(ports) == 2 and set(ports[0]) & set(ports[1]):
        raise ConfigError(
            f"kv_events_config: endpoint={config.endpoint!r} and replay_endpoint={config.replay_endpoint!r} have common "
            f"ports, because replica n adds n to each port and the last replica is {replicas[-1]}; change one of them"
        )
    if not is_caching:
        raise ConfigError("kv_events_config with enable_prefix_caching=False: nothing is cached; leave one of them out")
    return config


def is_bound(endpoint: str) -> bool:
    """Whether the engine listens at `endpoint` for subscribers. Otherwise it connects to one that listens there."""
    return "*" in endpoint or "[::]" in endpoint


def _ports(endpoint: str, replicas: range) -> range:
    """The ports of all replicas."""
    port = int(endpoint.rpartition(":")[2]) if _TCP.fullmatch(endpoint) else 0
    ports = range(port + replicas[0], port + replicas[-1] + 1)
    if port == 0 or ports[-1] > 65535:
        raise ConfigError(
            f"kv_events_config: {endpoint!r} is no endpoint with a port in [1, {65535 - replicas[-1]}]; give one like "
            "'tcp://*:5557', or leave it out"
        )
    return ports
