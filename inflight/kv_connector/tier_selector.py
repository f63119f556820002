"""`open_tier`: makes the tier that a configuration names. Only here are the classes of tiers chosen."""

import importlib

from inflight.config.kv_tiers import KVTierConfig
from inflight.errors import ConfigError
from inflight.kv_connector.fs_tier import FsTier
from inflight.kv_connector.tier import Tier

# type -> the file and the class in it. Both need an optional library
_OPTIONAL = {"redis": ("redis_tier", "RedisTier"), "obj": ("object_store_tier", "ObjectStoreTier")}


def open_tier(config: KVTierConfig, shard: str, num_shards: int) -> Tier:
    """Returns the tier. `shard`, `num_shards`: see `FsTier`.

    Raises:
        ConfigError: it cannot be made.
    """
    if config.type == "fs":
        return FsTier(config, shard, num_shards)
    if config.type in _OPTIONAL:
        file, name = _OPTIONAL[config.type]
        built_in: Tier = getattr(importlib.import_module(f"inflight.kv_connector.{file}"), name)(config)
        return built_in
    assert config.module_path is not None
    option = f"secondary_tiers: module_path={config.module_path!r}"
    module, _, name = config.module_path.partition(":")
    try:
        kind = getattr(importlib.import_module(module), name)
    except Exception as error:
        raise ConfigError(f"{option} cannot be imported: {type(error).__name__}: {error}; correct it") from error
    if not (isinstance(kind, type) and issubclass(kind, Tier)):
        raise ConfigError(f"{option} is no subclass of inflight.kv_connector.tier.Tier; give one")
    try:
        tier: Tier = kind(dict(config.options or {}))  # type: ignore[call-arg]  # a user's class takes its options
    except Exception as error:  # not its text: it may contain a password of the options
        raise ConfigError(f"{option} cannot be made: {type(error).__name__}; correct its options") from None
    return tier
