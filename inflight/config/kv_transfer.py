"""`KVTransferConfig`: which KV blocks are kept outside of the cache, and where. The options have vLLM's names and values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inflight.config.engine_args import EngineArgs
from inflight.config.json_option import Config, from_json
from inflight.config.kv_tiers import KVTierConfig, resolve_kv_tiers
from inflight.errors import ConfigError
from inflight.setting import setting


@dataclass(frozen=True, kw_only=True)
class KVTransferConfig:
    """The result of `resolve_kv_transfer`.

    Attributes:
        cpu_bytes: the size of the host pool (host memory for blocks), all ranks together.
        loads, saves: whether blocks are copied from the host pool and the tiers into the cache, and from the cache to these.
        uses_arc: the host pool evicts by ARC, and not the least recently used block.
        offload_prompt_only: only blocks of prompts are saved.
        fails_if_not_loaded: a request fails if a rank cannot copy its blocks from the host pool. Otherwise they are computed.
        ignored: the given settings of vLLM that Inflight ignores.
    """

    cpu_bytes: int
    loads: bool = True
    saves: bool = True
    uses_arc: bool = False
    offload_prompt_only: bool = False
    fails_if_not_loaded: bool = False
    tiers: tuple[KVTierConfig, ...] = ()
    ignored: tuple[str, ...] = ()

    @property
    def blocks_per_chunk(self) -> int:
        """The largest number of blocks that a tier stores as one object."""
        return max((tier.blocks_per_chunk for tier in self.tiers), default=1)


@dataclass(frozen=True, kw_only=True)
class _Option:
    """What `kv_transfer_config` may contain, besides `_IGNORED`."""

    kv_connector: str = setting("OffloadingConnector", "The connector.", choices=("OffloadingConnector",))
    kv_role: str = setting("kv_both", "Whether it saves and loads.", choices=("kv_both", "kv_producer", "kv_consumer"))
    kv_load_failure_policy: str = setting("recompute", "What to do if a load fails.", choices=("recompute", "fail"))
    kv_connector_extra_config: Mapping[str, Any] | None = None  # Any: checked here


@dataclass(frozen=True, kw_only=True)
class _Extra:
    """What `kv_connector_extra_config` may contain, besides `_IGNORED_EXTRA`."""

    cpu_bytes_to_use: float = setting(0, "Bytes of host memory, all ranks together.", bounds=(0, 2**50))
    eviction_policy: str = setting(
        "lru", "Which block of the host pool is dropped for a new one.", choices=("lru", "arc")
    )
    offload_prompt_only: bool = setting(False, "Whether only blocks of prompts are saved.")
    secondary_tiers: object = None


# vLLM's settings that Inflight accepts and ignores; the log names them at the start
_IGNORED = frozenset(
    "kv_connector_module_path enable_permute_local_kv engine_id kv_buffer_device kv_buffer_size kv_ip kv_parallel_size kv_port "
    "kv_rank".split()
)
_IGNORED_EXTRA = frozenset(
    "block_size block_size_factor lazy_offload num_cpu_blocks spec_name spec_module_path store_threshold".split()
)


def resolve_kv_transfer(args: EngineArgs) -> KVTransferConfig | None:
    """Returns what `kv_transfer_config` and `kv_offloading_size` describe; None if neither is given.

    Raises:
        ConfigError: a wrong value, or something that transfers need is missing.
    """
    given = args.kv_transfer_config
    gibibytes = args.kv_offloading_size
    if given is None and gibibytes is None:
        return None
    option, ignored = _read(_Option, "kv_transfer_config", given, _IGNORED)
    name = "kv_transfer_config.kv_connector_extra_config"
    extra, ignored_extra = _read(_Extra, name, option.kv_connector_extra_config, _IGNORED_EXTRA)
    tiers = resolve_kv_tiers(extra.secondary_tiers, f"{name}.secondary_tiers")
    cpu_bytes = int(extra.cpu_bytes_to_use or (gibibytes or 0) * 2**30)
    what = "kv_offloading_size" if given is None else "kv_transfer_config"
    if cpu_bytes == 0:
        raise ConfigError(f"{what}: no host memory is given; give kv_offloading_size in GiB, or cpu_bytes_to_use")
    if not args.enable_prefix_caching:
        raise ConfigError(f"{what} with enable_prefix_caching=False: nothing is cached; leave one of them out")
    if args.distributed_executor_backend == "external_launcher":
        raise ConfigError(
            f"{what} with distributed_executor_backend='external_launcher': the engines of the launcher must make the same "
            "plans, but loads end at different times; leave one of them out, or use 'mp'"
        )
    return KVTransferConfig(
        cpu_bytes=cpu_bytes,
        loads=option.kv_role != "kv_producer",
        saves=option.kv_role != "kv_consumer",
        uses_arc=extra.eviction_policy == "arc",
        offload_prompt_only=extra.offload_prompt_only,
        fails_if_not_loaded=option.kv_load_failure_policy == "fail",
        tiers=tiers,
        ignored=(*ignored, *ignored_extra),
    )


def _read(
    kind: type[Config], option: str, given: Mapping[str, Any] | None, ignored: frozenset[str]
) -> tuple[Config, list[str]]:
    """Returns the settings, and which of the names `ignored` were given."""
    if not isinstance(given, Mapping):
        return from_json(kind, option, given), []
    meant = {name: value for name, value in given.items() if name not in ignored}
    return from_json(kind, option, meant), [name for name in given if name in ignored]
