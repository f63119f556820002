"""Measures a few steps of invented requests at the start of the engine, to make the first `StepTimeModel`.

A `StepTimeModel` predicts how long a step takes.
"""

import logging
import time
from dataclasses import replace

import numpy as np

from inflight.config.engine import EngineConfig, SchedulerConfig
from inflight.config.experts import share_read
from inflight.executor.executor import Executor
from inflight.interface.kv_cache import KVCacheConfig
from inflight.interface.request import EngineCoreRequest, ResolvedSampling
from inflight.kv_cache.manager import KVCacheManager
from inflight.sampling_params import SamplingParams
from inflight.scheduler.scheduler import Scheduler
from inflight.scheduler.step_time.load import TOKEN_LIMITS
from inflight.scheduler.step_time.model import StepTimeModel

logger = logging.getLogger(__name__)

UNKNOWN_SECONDS = 1e-3  # used as the time of a step if the worker has not measured it


def measured_step_times(
    config: EngineConfig, executor: Executor, kv_cache_config: KVCacheConfig, first_step_id: int
) -> tuple[StepTimeModel | None, int]:
    """Returns a model of the engine's step times, and the id of the next step. If the configuration does not limit the time of
    steps, nothing is measured, and the model is None.

    Raises:
        EngineError: a step failed.
    """
    if not config.scheduler.limits_time:
        return None, first_step_id
    start = time.perf_counter()
    few, many = (_fitting(length, config, kv_cache_config) for length in TOKEN_LIMITS)
    seconds = []
    step_id = first_step_id
    for num_tokens in (1, 1, few, many):  # the first time is not used: the first step is slower
        seconds.append(_measure(num_tokens, config, executor, kv_cache_config, step_id))
        step_id += 1
    logger.debug(
        "step times: 1 token takes %.1f ms, %d take %.1f ms, %d take %.1f ms (measured in %.2f s)",
        seconds[1] * 1e3, few, seconds[2] * 1e3, many, seconds[3] * 1e3, time.perf_counter() - start,
    )  # fmt: skip
    return StepTimeModel.from_times(seconds[1:], share_read(config.model.architecture)), step_id


def _fitting(length: int, config: EngineConfig, kv_cache_config: KVCacheConfig) -> int:
    """Returns `length`, or less if a prompt of this length would not fit into a step, the model's context or the KV cache."""
    blocks_of_group = (kv_cache_config.num_blocks - 1) // len(kv_cache_config.groups)
    room = blocks_of_group * kv_cache_config.groups[0].spec.block_size
    return max(1, min(length, config.scheduler.max_num_batched_tokens, config.model.max_model_len - 1, room - 1))


def _measure(
    num_tokens: int, config: EngineConfig, executor: Executor, kv_cache_config: KVCacheConfig, step_id: int
) -> float:
    """Returns the seconds that a step with a prompt of `num_tokens` tokens computes."""
    scheduler = measuring_scheduler(config, config.scheduler, kv_cache_config, first_step_id=step_id)
    # the tokens differ, so that they choose different experts, as those of a real prompt do
    prompt = np.arange(num_tokens, dtype=np.int32) % config.model.architecture.vocab_size
    scheduler.add_request(measured_request("measurement", max_tokens=1), prompt)
    plan = scheduler.schedule()
    assert plan is not None
    output = executor.execute_model(plan)
    scheduler.update_from_output(plan, output)
    return output.compute_seconds or UNKNOWN_SECONDS


def measuring_scheduler(
    config: EngineConfig,
    limits: SchedulerConfig,
    kv_cache_config: KVCacheConfig,
    *,
    first_step_id: int,
    num_speculative_tokens: int = 0,
) -> Scheduler:
    """Returns a scheduler for measured steps. It has a block pool of its own, so the engine's scheduler and block pool do not
    change. The steps leave data in the workers' slots and blocks. Real requests overwrite this data when they get the slots and
    blocks."""
    return Scheduler(
        replace(limits, policy="fcfs"),
        KVCacheManager(kv_cache_config, fingerprint=config.model.fingerprint, enable_prefix_caching=False),
        max_model_len=config.model.max_model_len,
        num_speculative_tokens=num_speculative_tokens,
        first_step_id=first_step_id,
    )


def measured_request(request_id: str, max_tokens: int) -> EngineCoreRequest:
    """Returns an invented request, which draws exactly `max_tokens` tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    sampling = ResolvedSampling(params=params, seed=0, max_tokens=max_tokens)
    return EngineCoreRequest(request_id=request_id, sampling=sampling)
