"""`KVTierConfig`: one tier of storage for KV blocks below host memory: a folder, Redis, an object store, or a user's class."""

import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from inflight.config.json_option import from_json
from inflight.errors import ConfigError
from inflight.setting import setting


@dataclass(frozen=True, kw_only=True)
class KVTierConfig:
    """The settings of one tier. Neither `repr` nor errors show those that may contain a password."""

    type: str = setting("fs", "What the tier is.", choices=("fs", "redis", "obj", "custom"))
    path: str | None = setting(None, "fs: the folder. Several engines may share it.")
    max_bytes: int = setting(
        0, "fs: most bytes of the objects of all ranks; 0: half of (free space + objects).", bounds=(0, 2**60)
    )
    url: str | None = setting(None, "redis, obj: the address.", is_secret=True)
    blocks_per_chunk: int = setting(
        1, "obj: how many blocks of full attention that follow each other are one object.", bounds=(1, 64)
    )
    ttl_seconds: int = setting(0, "redis: seconds for which an object is kept; 0: no limit.", bounds=(0, 2**31 - 1))
    module_path: str | None = setting(
        None, "custom: 'package.module:Class', a subclass of inflight.kv_connector.tier.Tier."
    )
    options: Mapping[str, Any] | None = setting(  # Any: obstore, or the user's class, checks its own options
        None, "obj: options of obstore, such as endpoint and region; custom: the argument of the class.", is_secret=True
    )
    checksum_key: str | None = setting(
        None,
        "A secret of at least 16 characters, the same in all engines of this tier. Give one if others can write to the tier: "
        "then only objects of writers with this secret are used.",
        is_secret=True,
    )
    timeout_seconds: float = setting(
        2.0, "How long one operation may take; then it counts as failed.", bounds=(0, 600), excludes_low=True
    )
    max_operations: int = setting(16, "Most operations at one time on a rank; others are not tried.", bounds=(1, 1024))


class _Kind(NamedTuple):
    own: str  # the settings that not all types of tiers have; the first is needed
    example: str  # of the needed setting
    pattern: str  # of the needed setting
    library: str  # the library that it needs


_KINDS = {
    "fs": _Kind("path max_bytes", "'/mnt/kv'", r".+", ""),
    "redis": _Kind(
        "url ttl_seconds",
        "'redis://user:password@host:6379/0', 'rediss://host' (TLS) or 'unix:///run/redis.sock?db=0'",
        r"(rediss?://(\S*@)?([\w.-]+|\[[0-9a-fA-F:.]+\])(:\d{1,5})?(/\d*)?|unix://([^@/\s]*@)?/[^?#\s]+)"
        r"(\?(db|ssl_\w+)=[^&#\s]*(&(db|ssl_\w+)=[^&#\s]*)*)?",
        "redis",
    ),
    "obj": _Kind(
        "url options blocks_per_chunk",
        "'s3://bucket/prefix', 'gs://…', 'az://…', 'file:///folder' or 'memory:///', and keys in options",
        r"(s3|gs|az)://[^@/?#\s]+(/[^?#\s]*)?|file:///[^?#\s]+|memory:///?",
        "obstore",
    ),
    "custom": _Kind("module_path options", "'package.module:Class'", r"[^\W\d]\w*(\.\w+)*:\w+", ""),
}
_COMMON = {each.name for each in fields(KVTierConfig)} - {name for kind in _KINDS.values() for name in kind.own.split()}


def resolve_kv_tiers(given: object, option: str = "secondary_tiers") -> tuple[KVTierConfig, ...]:
    """Returns the tiers that `given`, a list of dictionaries, describes. Knows vLLM's settings of the types fs and obj, too.

    Raises:
        ConfigError: a wrong value, or a library is missing. The text names the tier as {option}[number].
    """
    if given is None:
        return ()
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes)):
        # not the value: it may contain a password
        raise ConfigError(f"{option} is a {type(given).__name__}, no list; give a list of dictionaries or leave it out")
    tiers = tuple(_resolve_tier(f"{option}[{number}]", each) for number, each in enumerate(given))
    if len(sizes := {tier.blocks_per_chunk for tier in tiers} - {1}) > 1:
        raise ConfigError(
            f"{option}: blocks_per_chunk has different values above 1: {sorted(sizes)}; give each tier 1 or one of them"
        )
    return tiers


def _resolve_tier(option: str, given: object) -> KVTierConfig:
    if not isinstance(given, Mapping):
        what = type(given).__name__
        raise ConfigError(f"{option} is a {what}, no dictionary; give one like {{'type': 'fs', 'path': '/mnt/kv'}}")
    given = _from_vllm(given)
    config = from_json(KVTierConfig, option, given, "type")
    kind = _KINDS[config.type]
    own = kind.own.split()
    if other := sorted(set(given) - _COMMON - {*own}):
        raise ConfigError(f"{option} is a tier of type {config.type!r}, which takes no {other[0]}; leave it out")
    needed = getattr(config, own[0])
    if needed is None or not re.fullmatch(kind.pattern, needed, re.ASCII if config.type != "fs" else 0):
        raise ConfigError(f"{option}: its {own[0]} is {'wrong' if needed else 'missing'}; give one like {kind.example}")
    if config.checksum_key is not None and len(config.checksum_key) < 16:
        raise ConfigError(f"{option}: its checksum_key is shorter than 16 characters; give a longer one")
    for library in ("xxhash", kind.library):
        if library and importlib.util.find_spec(library) is None:
            raise ConfigError(
                f"{option}: a tier of type {config.type!r} needs the library {library}, which is not installed; "
                "use pip install 'inflight-llm[kv-tiers]', or leave the tier out"
            )
    return replace(config, path=config.path and os.path.abspath(os.path.expanduser(config.path)))


def _from_vllm(given: Mapping[str, Any]) -> dict[str, Any]:  # Any: checked afterwards
    """`given` with our names: `root_dir` becomes `path`, numbers of threads become `max_operations`, and `store_config` becomes
    `url` and `options`."""
    found = dict(given)
    threads = [found.pop(name) for name in ("n_read_threads", "n_write_threads", "io_threads") if name in found]
    if threads:
        found["max_operations"] = sum(threads) if all(type(each) is int for each in threads) else threads
    if "root_dir" in found:
        found["path"] = found.pop("root_dir")
    if isinstance(found.get("store_config"), Mapping):
        store = dict(found.pop("store_config"))
        scheme = store.pop("scheme", "http")
        endpoint = store.pop("endpoint_override", "")
        found["url"] = f"s3://{store.pop('bucket', '')}/{found.pop('prefix', '')}"
        names = {"access_key": "access_key_id", "secret_key": "secret_access_key"}
        found["options"] = {names.get(name, name): value for name, value in store.items() if value != ""}
        if endpoint:
            found["options"] |= {"endpoint": f"{scheme}://{endpoint}", "allow_http": scheme == "http"}
    return found
