"""`open_tier`: makes the tier that a configuration names. Only here are the classes of tiers chosen."""

import importlib

from inflight.config.kv_tiers import KVTierConfig
from inflight.errors import ConfigError
from inflight.kv_connector.tier import Tier

# type -> the class. It is imported if it is used, because it may need an optional library
TIERS = {
    "fs": "inflight.kv_connector.fs_tier:FsTier",
    "redis": "inflight.kv_connector.redis_tier:RedisTier",
    "obj": "inflight.kv_connector.object_store_tier:ObjectStoreTier",
}


def open_tier(config: KVTierConfig, shard: str, num_shards: int) -> Tier:
    """Returns the tier. `shard`, `num_shards`: see `Tier.open`.

    Raises:
        ConfigError: it cannot be made.
    """
    if config.type in TIERS:
        module, _, name = TIERS[config.type].partition(":")
        own: type[Tier] = getattr(importlib.import_module(module), name)
        return own.open(config, shard, num_shards)
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
        return kind.open(config, shard, num_shards)
    except Exception as error:  # not its text: it may contain a password of the options
        raise ConfigError(f"{option} cannot be made: {type(error).__name__}; correct its options") from None
