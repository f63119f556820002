"""Allocates the KV cache at the start: asks the ranks for their layers and free memory, and computes the size of the cache."""

from __future__ import annotations

import logging
import time

from inflight.config.engine import EngineConfig
from inflight.engine.kv_cache_sizing import describe_size, make_kv_cache_configs
from inflight.executor.executor import Executor
from inflight.interface.kv_cache import KVCacheConfig

logger = logging.getLogger(__name__)


def allocate_kv_cache(config: EngineConfig, executor: Executor) -> KVCacheConfig:
    """Allocate the caches of all ranks. All have the same number of blocks. Returns the configuration of the cache of rank 0.

    Raises:
        OutOfMemoryError: one sequence of `max_model_len` tokens does not fit.
        EngineError: a rank failed.
    """
    start = time.perf_counter()
    specs = executor.get_kv_cache_specs()
    if config.cache.memory_bytes is not None:
        available = [config.cache.memory_bytes] * len(specs)
    else:
        available = executor.determine_available_memory()
    kv_cache_configs = make_kv_cache_configs(
        specs,
        available,
        max_model_len=config.model.max_model_len,
        max_step_tokens=config.scheduler.max_num_batched_tokens,
        is_measured=config.cache.memory_bytes is None,
        max_num_seqs=config.scheduler.max_num_seqs,
        usual_sequence_len=config.cache.usual_sequence_len,
    )
    sized = time.perf_counter()
    logger.info("%s", describe_size(kv_cache_configs[0], config.cache, config.scheduler))
    executor.initialize_from_config(kv_cache_configs)
    logger.debug("the free memory was measured in %.2f s", sized - start)
    logger.debug("the KV cache was allocated, and a first step was run, in %.2f s", time.perf_counter() - sized)
    return kv_cache_configs[0]
