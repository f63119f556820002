"""`Worker`: one rank. It owns the device, the model, the runner and the connections to other ranks.

The executor calls it from one thread. Whatever computes, loading too, runs in the device's compute thread. A step is prepared
in the calling thread, and then handed over:

    calling thread   | prepare N | prepare N+1 |              | prepare N+2 |
    compute thread               | receive N, forward N, send N | sample N | receive N+1, forward N+1, ...
    drain thread                                                           | drain N |

so a step is ready before the one before it ends, and only the compute thread ever waits for another rank. Which stage goes next
is `StageOrder`'s to say. What is drawn goes to the drain thread, which copies it out and completes the step's future.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch.profiler import record_function

from inflight.attention.backend import AttentionBackend
from inflight.attention.selector import get_backend
from inflight.config.cpu_binding import AUTO, cores_of_rank
from inflight.config.engine import EngineConfig
from inflight.config.partition import pipeline_stage
from inflight.device.selector import get_device
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.distributed.process_world import ProcessWorld
from inflight.distributed.thread_world import ThreadWorlds
from inflight.distributed.world import LoneWorld, World
from inflight.errors import ConfigError
from inflight.interface.kv_cache import KVCacheConfig, KVCacheSpec
from inflight.interface.step import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from inflight.interface.worker import Rendezvous, WorkerBase
from inflight.kernels.cpu.library import load_kernels
from inflight.kernels.cpu.threads import bind_threads
from inflight.model_loader.loader import load_model
from inflight.models.causal_lm import CausalLM
from inflight.timeline import Event, Timeline
from inflight.worker.model_input import ForwardOutput, ModelInput
from inflight.worker.model_runner import ModelRunner
from inflight.worker.pipeline import Pipeline
from inflight.worker.profiling import RankProfiler
from inflight.worker.stage_order import StagedStep, StageOrder

T = TypeVar("T")


@dataclass(slots=True)
class _Step:
    """A step under way. `before` is the future of the step before it, if that may still be under way."""

    model_input: ModelInput
    before: Future[ModelRunnerOutput] | None
    future: Future[ModelRunnerOutput] = field(default_factory=Future)
    forward: ForwardOutput | IntermediateTensors | None = None
    error: BaseException | None = None


class Worker(WorkerBase):
    """The real worker.

    Args:
        rank: the global rank.
        rendezvous: how the ranks meet: as processes, or as threads of this one. None for a rank that is alone.

    Raises:
        ConfigError, ConnectionError: the ranks did not meet.
    """

    def __init__(self, config: EngineConfig, rank: int, rendezvous: Rendezvous | ThreadWorlds | None) -> None:
        self._config = config
        self.rank = rank
        self._timeline = Timeline()
        self._device = get_device(config.device.kind)
        self._start_threads()
        self._free_bytes_before_loading = self._device.available_memory_bytes()
        self._stage = pipeline_stage(config.parallel.pipeline_layer_partition, config.parallel.layout.pp_rank(rank))
        self._runner: ModelRunner | None = None
        self._available_bytes: int | None = None
        self._kv_cache_config: KVCacheConfig | None = None
        self._world = self._join(rendezvous)
        # threads share one profiler, and the first rank's records them all
        self._shares_profiler = isinstance(rendezvous, ThreadWorlds) and rank > 0
        self._profiler = RankProfiler(f"tp{self._world.tp_rank}-pp{self._world.pp_rank}")
        try:
            self._tp = self._world.tensor_parallel_group("model")
            self._pipeline = Pipeline(config, self._stage, self._world, self._device.torch_device, self._timeline)
        except BaseException:  # an interrupt, too: peers must not wait for a rank that was never made
            self._world.close("it could not start")
            self._device.close()
            raise

        self._order = StageOrder(self._device.submit)
        self._futures: deque[Future[ModelRunnerOutput]] = (
            deque()
        )  # of steps, in order; those that are done leave with time

    @property
    def runner(self) -> ModelRunner:
        assert self._runner is not None, "load_model comes first"
        return self._runner

    def load_model(self) -> None:
        if self._runner is None:
            self._device.submit(self._load_model).result()

    @torch.inference_mode()
    def _load_model(self) -> None:
        model_config = self._config.model
        dtype: torch.dtype = getattr(torch, model_config.dtype)
        head_dim, cache = model_config.architecture.head_dim, self._config.cache
        kv_cache_dtype: torch.dtype = getattr(torch, cache.dtype)
        backend = get_backend(self._device.kind, head_dim, cache.block_size, dtype, kv_cache_dtype)
        self._runner = ModelRunner(
            self._config,
            self._load_stage(backend),
            backend,
            self._device,
            self._timeline,
            tp=self._tp,
            stage=self._stage,
            senders=self._pipeline.senders,
            receiver=self._pipeline.receiver,
        )

    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return self.runner.kv_cache_specs()

    def determine_available_memory(self) -> int:
        """The share of the memory free at the start that the engine may use, less the weights and a step's peak.

        Ranks on a CPU share its memory: what is free, and what the weights of all have taken, is divided among them.
        """
        if self._available_bytes is None:
            self._available_bytes = self._compute(self._measure_available_memory)
        return self._available_bytes

    @torch.inference_mode()
    def _measure_available_memory(self) -> int:
        budget = int(self._free_bytes_before_loading * self._config.cache.memory_utilization)
        weights = self._free_bytes_before_loading - self._device.available_memory_bytes()
        peak = self._device.measure_peak_bytes(self.runner.profile_run)
        return (budget - max(0, weights)) // self._config.parallel.num_local_ranks - peak

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        if kv_cache_config != self._kv_cache_config:
            self._compute(partial(self._initialize, kv_cache_config))

    @torch.inference_mode()
    def _initialize(self, kv_cache_config: KVCacheConfig) -> None:
        self.runner.initialize(kv_cache_config)
        self._kv_cache_config = kv_cache_config
        self.runner.dummy_run(1)  # warm up: the first call of each kernel is slow

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        model_input = self.runner.prepare_inputs(scheduler_output)
        if not self._stage.is_first:
            assert self._pipeline.link is not None
            self._pipeline.link.post_receive(scheduler_output.step_id, scheduler_output.num_tokens)
        while self._futures and self._futures[0].done():
            self._futures.popleft()
        step = _Step(model_input, before=self._futures[-1] if self._futures else None)
        self._futures.append(step.future)
        self._order.add(
            StagedStep(
                step_id=scheduler_output.step_id,
                drawn_in_step=model_input.inputs.drawn_in_step,
                awaits_masks=self._stage.is_last and len(scheduler_output.grammar_rows) > 0,
                forward=partial(self._forward, step),
                sample=partial(self._sample, step),
            )
        )
        return step.future

    def provide_grammar_output(self, step_id: int, grammar_output: GrammarOutput) -> None:
        self._order.provide(step_id, grammar_output)

    @torch.inference_mode()
    def _forward(self, step: _Step) -> None:
        """In the compute thread. What it raises is raised again by `_sample`: steps end in order."""
        step_id, link = step.model_input.plan.step_id, self._pipeline.link
        try:
            with record_function(f"step {step_id}"):
                received = None if self._stage.is_first or link is None else link.receive(step_id)
                step.forward = self.runner.execute_model(step.model_input, received)
                if isinstance(step.forward, IntermediateTensors):
                    assert link is not None
                    link.send(step_id, step.forward)
        except BaseException as error:  # an interrupt, too: this thread has nobody above it
            step.error = error
            if step.before is not None and not step.before.done():
                self.step_failed()  # else peers would wait in this forward while a step before it is to be sampled

    @torch.inference_mode()
    def _sample(self, step: _Step, grammar_output: GrammarOutput | None) -> None:
        """In the compute thread, which goes on with the next stage while the drain thread answers this step."""
        try:
            if step.error is not None:
                raise step.error
            assert step.forward is not None
            finish = partial(self.runner.drain, self.runner.sample(step.model_input, step.forward, grammar_output))
        except BaseException as error:
            finish = partial(_raise, error)
        self._device.drain(partial(_settle, step.future, finish))

    def execute_dummy_batch(self) -> None:
        self._compute(partial(torch.inference_mode()(self.runner.dummy_run), 1))

    def step_failed(self) -> None:
        self._world.close("a step failed on it")

    def profile(self, start: bool, folder: str = "") -> str | None:
        """Start a trace of this rank's threads, or stop it and write `folder`/tp<n>-pp<n>.json, whose path is returned.

        Steps are marked "step <id>". Ranks that are threads of a process share the trace of the first; the others return None.
        """
        if self._shares_profiler:
            return None
        if start:
            self._profiler.start(folder)
            return None
        return self._profiler.stop()

    def timeline_events(self) -> list[Event]:
        """The last events of this rank: `prepare`, `receive`, `forward`, `sample`, `drain` and `send` of each step."""
        return self._timeline.events()

    def shutdown(self) -> None:
        self._world.close("it was shut down")
        self._pipeline.close()
        self._device.close()
        for future in self._futures:
            future.cancel()  # of steps whose stages were dropped, or waited for masks
        self._profiler.close()
        self._runner = None

    def _start_threads(self) -> None:
        device, parallel = self._config.device, self._config.parallel
        self._device.set_num_threads(device.num_threads)
        cores = cores_of_rank(
            device.threads_bind,
            usable=sorted(os.sched_getaffinity(0)),
            num_threads=device.num_threads,
            local_rank=self.rank % parallel.num_local_ranks,
            num_local_ranks=parallel.num_local_ranks,
        )
        kernels = load_kernels()
        if cores is not None and kernels is not None:
            self._device.submit(partial(bind_threads, kernels, cores)).result()
        elif cores is not None and device.threads_bind != AUTO:
            raise ConfigError(
                f"cpu_threads_bind={device.threads_bind!r} needs the C++ kernels, which are not here; set it to 'off'"
            )

    def _join(self, rendezvous: Rendezvous | ThreadWorlds | None) -> World:
        layout = self._config.parallel.layout
        if isinstance(rendezvous, ThreadWorlds):
            return rendezvous.of(self.rank)
        if rendezvous is not None and layout.world_size > 1:
            return ProcessWorld(layout, self.rank, rendezvous, self._device.torch_device)
        assert layout.world_size == 1, f"{layout.world_size} ranks need a rendezvous"
        return LoneWorld()

    def _load_stage(self, backend: AttentionBackend) -> CausalLM:
        """This rank's part of the model, weights included."""
        return load_model(
            self._config.model, device=self._device.torch_device, backend=backend, tp=self._tp, stage=self._stage
        )

    def _compute(self, stage: Callable[[], T]) -> T:
        """Run `stage` in the compute thread, to its end. Peers must not wait for a rank that fails."""
        try:
            return self._device.submit(stage).result()
        except BaseException:
            self._world.close("it failed")
            raise


def _settle(future: Future[ModelRunnerOutput], finish: Callable[[], ModelRunnerOutput]) -> None:
    try:
        output = finish()
    except BaseException as error:  # whatever it is, it is the step's
        future.set_exception(error)
    else:
        future.set_result(output)


def _raise(error: BaseException) -> ModelRunnerOutput:
    raise error
