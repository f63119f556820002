"""The first times of the `StepTimeModel`: measured at the start of the engine, with a few steps of invented requests."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import replace

import numpy as np

from inflight.config.engine import EngineConfig
from inflight.executor.executor import Executor
from inflight.interface.kv_cache import KVCacheConfig
from inflight.interface.request import EngineCoreRequest, ResolvedSampling
from inflight.kv_cache.manager import KVCacheManager
from inflight.sampling_params import SamplingParams
from inflight.scheduler.scheduler import Scheduler
from inflight.scheduler.step_time import TOKEN_LIMITS, StepTimeModel

logger = logging.getLogger(__name__)

UNKNOWN_SECONDS = 1e-3  # in place of a time that a worker does not measure


def measured_step_times(
    config: EngineConfig, executor: Executor, kv_cache_config: KVCacheConfig, first_step_id: int
) -> tuple[StepTimeModel | None, int]:
    """Returns a model of the engine's step times, and the id of the next step. The model is None if the configuration does not
    limit the time of steps; then nothing is measured.

    Raises:
        EngineError: a step failed.
    """
    if not config.scheduler.limits_time:
        return None, first_step_id
    start = time.perf_counter()
    few, many = (_fitting(length, config, kv_cache_config) for length in TOKEN_LIMITS)
    seconds, step_id = [], first_step_id
    for num_tokens in (1, 1, few, many):  # the very first step is slower than later ones
        seconds.append(_measure(num_tokens, config, executor, kv_cache_config, step_id))
        step_id += 1
    logger.info(
        "step times: 1 token takes %.1f ms, %d take %.1f ms, %d take %.1f ms (measured in %.2f s)",
        seconds[1] * 1e3, few, seconds[2] * 1e3, many, seconds[3] * 1e3, time.perf_counter() - start,
    )  # fmt: skip
    return StepTimeModel.from_times(*seconds[1:]), step_id


def _fitting(length: int, config: EngineConfig, kv_cache_config: KVCacheConfig) -> int:
    """The length, or less if such a prompt would not fit a step or the KV cache."""
    blocks_of_group = (kv_cache_config.num_blocks - 1) // len(kv_cache_config.groups)
    room = blocks_of_group * kv_cache_config.groups[0].spec.block_size
    return max(1, min(length, config.scheduler.max_num_batched_tokens, config.model.max_model_len - 1, room - 1))


def _measure(
    num_tokens: int, config: EngineConfig, executor: Executor, kv_cache_config: KVCacheConfig, step_id: int
) -> float:
    """Returns the seconds that a step with a prompt of `num_tokens` tokens computes. It is planned by a scheduler with a block
    pool of its own; the data that it leaves in slots and blocks is overwritten when requests get these."""
    limits = replace(config.scheduler, target_seconds=math.inf, max_step_seconds=math.inf, policy="fcfs")
    kv_cache = KVCacheManager(kv_cache_config, fingerprint=config.model.fingerprint, enable_prefix_caching=False)
    scheduler = Scheduler(limits, kv_cache, max_model_len=config.model.max_model_len, first_step_id=step_id)
    scheduler.add_request(
        EngineCoreRequest(
            request_id=f"measurement of {num_tokens} tokens",
            prompt_token_ids=np.zeros(num_tokens, dtype=np.int32),
            sampling=ResolvedSampling(params=SamplingParams(temperature=0.0, max_tokens=1), seed=0, max_tokens=1),
            arrival_time=time.monotonic(),
        )
    )
    plan = scheduler.schedule()
    assert plan is not None
    output = executor.execute_model(plan)
    scheduler.update_from_output(plan, output)
    return output.compute_seconds or UNKNOWN_SECONDS
