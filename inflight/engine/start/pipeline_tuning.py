"""Measures the best *stagger* of a pipeline at the start. With a stagger of 3, a request gets a token in every third step.

    stage 0   | a 0 | b 0 | c 0 | a 1 | ...        a, b, c: shares of the requests; 0, 1: their tokens
    link            | a 0 | b 0 | c 0 | ...
    stage 1               | a 0 | b 0 | c 0 | ...  with a stagger of 3, token 0 of share a is back in time for its token 1
              |------- loop -------|

A step takes max(slowest stage, loop / stagger). The loop is the time from the start of a step on the first stage until the
tokens that the step draws are back on the first stage. It contains all stages, the links between them, and the way back. The
time of the slowest stage and the time of the loop are measured with real steps of invented requests:

    loop    every step has the same rows, so each step waits for the tokens of the previous step
    stage   every step has different rows, so no step waits for another step

If the stagger is larger than necessary, each step has few requests, and a request waits longer for its tokens. So the smallest
stagger that keeps all stages busy is chosen. The stagger does not change which tokens are drawn.
"""

import itertools
import logging
import math
import statistics
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import replace

import numpy as np

from inflight.config.engine import EngineConfig, SchedulerConfig
from inflight.engine.start.step_times import measured_request, measuring_scheduler
from inflight.executor.executor import Executor
from inflight.interface.kv_cache import KVCacheConfig
from inflight.interface.step import ModelRunnerOutput, SchedulerOutput
from inflight.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

# A step may take TOLERANCE times as long as the slowest stage. The goal is 1.15. The limit is lower, because measurements are
# not exact.
TOLERANCE = 1.1
MAX_ROWS = 8  # at most this many requests are in a measured step
NUM_STEPS = 6  # how many steps of each kind are timed


def tuned(config: EngineConfig, executor: Executor, kv_cache_config: KVCacheConfig) -> tuple[SchedulerConfig, int]:
    """Returns the scheduler's configuration with a stagger and depth (steps in flight) that fit the pipeline, and the id of the
    next step. Nothing is measured if the user has set the stagger, if there is only one stage, or if `max_model_len` is too
    small for the measured requests.

    Raises:
        EngineError: a step failed.
    """
    scheduler = config.scheduler
    # a measured request gets one token in each step, or more with speculative decoding
    num_drafts = config.speculative.num_speculative_tokens if config.speculative is not None else 0
    max_tokens = (2 + NUM_STEPS) * (1 + num_drafts) + 1
    if scheduler.max_stagger is None or max_tokens >= config.model.max_model_len:
        return scheduler, 0
    start = time.perf_counter()
    measurement = _Measurement(config, executor, kv_cache_config, num_drafts, max_tokens)
    loop, stage = measurement.run()
    stagger = choose_stagger(loop, stage, lowest=scheduler.stagger, highest=scheduler.max_stagger)
    chosen = replace(scheduler, stagger=stagger, depth=max(scheduler.depth, stagger + 1))
    logger.info(
        "pipeline: with %d requests a step, a token's way through all stages and back takes %.2f ms, and the slowest stage "
        "takes %.2f ms: stagger %d, %d steps in flight (measured in %.2f s; pipeline_stagger sets another stagger)",
        measurement.num_rows, loop * 1e3, stage * 1e3, chosen.stagger, chosen.depth, time.perf_counter() - start,
    )  # fmt: skip
    return chosen, measurement.next_step_id


def choose_stagger(loop: float, stage: float, *, lowest: int, highest: int) -> int:
    """Returns the smallest stagger in [lowest, highest] with which a step takes at most TOLERANCE * stage. If there is no such
    stagger, returns `highest`."""
    return min(max(lowest, math.ceil(loop / (TOLERANCE * stage))), highest)


class _Measurement:
    """Runs measured steps with its own schedulers (see `measuring_scheduler`)."""

    def __init__(
        self, config: EngineConfig, executor: Executor, kv_cache_config: KVCacheConfig, num_drafts: int, max_tokens: int
    ) -> None:
        assert config.scheduler.max_stagger is not None
        self._config = config
        self._executor = executor
        self._kv_cache_config = kv_cache_config
        self._num_drafts = num_drafts
        self._max_tokens = max_tokens
        self._depth = config.scheduler.max_stagger + 1  # at most this many steps are in flight
        block_size = kv_cache_config.groups[0].spec.block_size
        blocks_of_request = len(kv_cache_config.groups) * math.ceil((1 + max_tokens) / block_size)
        room = min(config.scheduler.max_num_seqs // self._depth, (kv_cache_config.num_blocks - 1) // blocks_of_request)
        self.num_rows = max(1, min(MAX_ROWS, room))
        self.next_step_id = 0

    def run(self) -> tuple[float, float]:
        """Returns the time of the loop and the time of the slowest stage, in seconds, for steps of `num_rows` requests."""
        rows, depth = self.num_rows, self._depth
        loop = self._period(self._scheduler(2, rows * (1 + self._num_drafts)), rows, self._max_tokens, 2)
        stage = self._period(self._scheduler(depth, rows), rows * (depth + 1 + NUM_STEPS), 1, depth)
        return loop, stage

    def _period(self, scheduler: Scheduler, num_requests: int, max_tokens: int, depth: int) -> float:
        """Returns the median time from one commit to the next, with `depth` steps in flight. The first `depth` steps fill the
        pipeline and are not timed."""
        for index in range(num_requests):
            request = measured_request(f"pipeline measurement {index}", max_tokens)
            scheduler.add_request(request, np.zeros(1, dtype=np.int32))
        in_flight: deque[tuple[SchedulerOutput, Future[ModelRunnerOutput]]] = deque()
        commits: list[float] = []
        while len(commits) < depth + NUM_STEPS:
            while len(in_flight) < depth and (plan := scheduler.schedule()) is not None:
                in_flight.append((plan, self._executor.execute_model(plan, non_block=True)))
                self.next_step_id = plan.step_id + 1
            plan, future = in_flight.popleft()
            scheduler.update_from_output(plan, future.result())
            commits.append(time.perf_counter())
        for _, future in in_flight:
            future.result()
        return statistics.median(after - before for before, after in itertools.pairwise(commits[depth - 1 :]))

    def _scheduler(self, depth: int, max_num_batched_tokens: int) -> Scheduler:
        return measuring_scheduler(
            self._config,
            replace(self._config.scheduler, max_num_batched_tokens=max_num_batched_tokens, depth=depth, stagger=1),
            self._kv_cache_config,
            first_step_id=self.next_step_id,
            num_speculative_tokens=self._num_drafts,
        )
