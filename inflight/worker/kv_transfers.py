"""`make_transfers`: makes the `RankTransfers` of one rank, with its host pool and its tiers."""

import hashlib

import torch
from torch import Tensor

from inflight.config.engine import EngineConfig
from inflight.device.base import Device
from inflight.device.block_copies import block_copies
from inflight.interface.kv_cache import KVCacheConfig
from inflight.kernels.cpu.library import load_kernels
from inflight.kv_connector.rank_transfers import RankTransfers
from inflight.kv_connector.tier_stack import TierStack


def make_transfers(
    config: EngineConfig, rank: int, device: Device, arena: Tensor, kv_cache_config: KVCacheConfig
) -> RankTransfers:
    """Returns the transfers, and allocates the host pool. `arena`: uint8 [num_blocks, block_bytes].

    Raises:
        ConfigError: a tier cannot be made.
        OutOfMemoryError: the host has too little free memory for the host pool.
    """
    transfer = config.cache.transfer
    layout = config.parallel.layout
    assert transfer is not None
    copies = block_copies(device, arena, kv_cache_config.num_slots)
    if not transfer.tiers:
        return RankTransfers(copies, None)
    of_tensors = f"tp{layout.tp_rank(rank)}of{layout.tensor_parallel_size}"
    of_layers = f"pp{layout.pp_rank(rank)}of{layout.pipeline_parallel_size}"
    shard = f"{of_tensors}-{of_layers}"
    # other kernels round differently, so their blocks get other names
    kernels = load_kernels() if device.kind == "cpu" else torch.cuda.get_device_name()
    computed_by = getattr(kernels, "instruction_set", kernels), torch.__version__
    layers = kv_cache_config.groups, kv_cache_config.block_bytes, config.parallel.pipeline_layer_partition
    tiers = TierStack(
        transfer.tiers,
        root=hashlib.sha256(
            kv_cache_config.contents + repr((shard, layers, device.kind, computed_by)).encode()
        ).digest(),
        shard=shard,
        num_shards=layout.world_size,
        payload_bytes=kv_cache_config.block_bytes,
    )
    return RankTransfers(copies, tiers)
