"""Workers of a device that takes 5 ms: the real ones, whose forward begins with a sleep."""

from __future__ import annotations

import time

from torch import Tensor

from benchmarks.shared.precise_sleep import PreciseSleep
from inflight.attention.backend import AttentionBackend
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.models.causal_lm import CausalLM, ModelStep
from inflight.worker.expert_worker import ExpertWorker
from inflight.worker.worker import Worker

STEP_SECONDS = 0.005


class SleepingWorker(Worker):
    def _load_stage(self, backend: AttentionBackend) -> CausalLM:
        return with_sleep(super()._load_stage(backend))


class SleepingExpertWorker(ExpertWorker):
    """In a step without rows it does not sleep."""

    def _load_stage(self, backend: AttentionBackend) -> CausalLM:
        return with_sleep(super()._load_stage(backend))


def with_sleep(model: CausalLM) -> CausalLM:
    forward, sleep = model.forward, PreciseSleep()

    def slow_forward(step: ModelStep) -> Tensor | IntermediateTensors:
        sleep.until(time.perf_counter() + STEP_SECONDS)
        return forward(step)

    model.forward = slow_forward  # type: ignore[method-assign]
    return model
