"""`ErraticTimes`: predicts step times at random, so that the time limit of every step is another one."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from inflight.scheduler.scheduler import Scheduler
from inflight.scheduler.step_time.limits import StepLimits
from inflight.scheduler.step_time.load import StepLoad
from inflight.scheduler.step_time.model import StepTimeModel


class ErraticTimes(StepTimeModel):
    """Of a few microseconds to a few seconds; what it observes it forgets."""

    def __init__(self, seed: int) -> None:
        super().__init__((1e-3, 1e-4, 1e-4, 1e-4, 1e-5, 1e-8, 1e-8))
        self._rng = random.Random(seed)

    def seconds(self, load: StepLoad) -> float:
        return 10 ** self._rng.uniform(-6, 0.5)

    def num_prompt_tokens_within(self, seconds: float, load: StepLoad, context: int, most: int) -> int:
        return self._rng.choice([0, self._rng.randint(0, most), most])

    def observe(self, load: StepLoad, seconds: float) -> float:
        assert seconds > 0
        return seconds


def limit_times(scheduler: Scheduler, block_size: int, times: StepTimeModel, **limits: Any) -> None:
    """From now on limit the time of steps, as predicted by `times`. `limits` are fields of `SchedulerConfig`."""
    scheduler._config = config = replace(scheduler._config, **limits)
    scheduler.limits = scheduler.gates._limits = StepLimits(
        config, block_size, times, has_drafts=scheduler._num_speculative_tokens > 0
    )
