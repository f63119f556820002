"""An engine of one rank whose worker is within reach: for benchmarks that look into the model or take the time of its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
import torch

from inflight.attention.backend import AttentionBackend
from inflight.config.engine import EngineConfig
from inflight.config.engine_args import EngineArgs
from inflight.config.ranks import Place
from inflight.engine.start.make_core import make_core
from inflight.engine.start.model_files import resolve_config
from inflight.executor.uniproc import UniProcExecutor
from inflight.interface.part_kinds import parts_of
from inflight.interface.request import EngineCoreRequest, ResolvedSampling
from inflight.interface.worker import Rendezvous, WorkerBase
from inflight.models.causal_lm import CausalLM
from inflight.sampling_params import SamplingParams
from inflight.worker.worker import Worker

STEP_SECONDS = 900.0
T = TypeVar("T")


class ObservedWorker(Worker):
    """The real worker. `model` is there once it is loaded."""

    model: CausalLM

    def _load_stage(self, backend: AttentionBackend) -> CausalLM:
        self.model = super()._load_stage(backend)
        return self.model

    def on_compute_thread(self, call: Callable[[], T]) -> T:
        """Run `call` where the model's kernels run, as they run: kernels may be bound to that thread."""

        def run() -> T:
            with torch.inference_mode():
                return call()

        return self._device.submit(run).result()


class ObservedEngine:
    """A context manager. Greedy, token ids only; requests are numbered.

    Raises:
        ConfigError: the arguments, the folder or the machine do not fit.
    """

    def __init__(self, args: EngineArgs) -> None:
        config = replace(resolve_config(args), execute_model_timeout_seconds=STEP_SECONDS)
        workers: list[ObservedWorker] = []

        def make_worker(config: EngineConfig, place: Place, rendezvous: Rendezvous | None) -> WorkerBase:
            workers.append(ObservedWorker(config, place, rendezvous))
            return workers[0]

        executor = UniProcExecutor(config, make_worker)
        try:
            self.core = make_core(config, executor)
        except BaseException:  # an interrupt, too
            executor.shutdown()
            raise
        self.worker = workers[0]
        self._num_requests = 0

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
        """Run the prompts together to their ends, which come with `params.max_tokens`."""
        assert params.max_tokens is not None
        for prompt in prompts:
            self.core.add_request(
                EngineCoreRequest(
                    request_id=str(self._num_requests),
                    sampling=ResolvedSampling(params=params, seed=0, max_tokens=params.max_tokens),
                    parts=parts_of(params, ()),
                ),
                np.array(prompt, dtype=np.int32),
            )
            self._num_requests += 1
        while self.core.has_unfinished_requests():
            self.core.step()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.core.close()
