"""`Worker`: one rank. It owns the device, the model, the runner and the connections to other ranks.

The executor calls it from one thread. Loading and all computation run in the device's compute thread. A step is prepared in the
calling thread:

    calling thread   | prepare N | prepare N+1 |              | prepare N+2 |
    compute thread               | receive N, forward N, send N | sample N | receive N+1, forward N+1, ...
    drain thread                                                           | drain N |

So the next step is prepared before the previous step ends. Of these three threads, only the compute thread waits for other
ranks. `StageOrder` decides whether a forward or a sample runs next. The drain thread copies the drawn tokens to the host and
completes the step's future.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch.profiler import record_function

from inflight.attention.backend import AttentionBackend
from inflight.attention.selector import get_backend
from inflight.config.architecture import TRANSFORMERS
from inflight.config.engine import EngineConfig
from inflight.config.pipeline_stage import pipeline_stage
from inflight.device.accelerator import Accelerator
from inflight.device.base import Device
from inflight.device.selector import get_device
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.distributed.thread_world import ThreadWorlds
from inflight.distributed.world import World
from inflight.errors import ConfigError
from inflight.interface.kv_cache import KVCacheConfig, KVCacheSpec
from inflight.interface.step import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from inflight.interface.worker import Rendezvous, WorkerBase
from inflight.model_loader.loader import load_model
from inflight.models.causal_lm import CausalLM
from inflight.timeline import Event, Timeline
from inflight.worker.memory_budget import MemoryBudget
from inflight.worker.model_runner import ModelRunner
from inflight.worker.pipeline import Pipeline
from inflight.worker.profiling import RankProfiler, is_profiling
from inflight.worker.runner import PreparedStep, Runner
from inflight.worker.stage_order import StagedStep, StageOrder
from inflight.worker.startup import join_world, start_threads

T = TypeVar("T")


@dataclass(slots=True)
class _Step:
    """A step under way. `before` is the future of the previous step; None if that step had ended when this one was prepared."""

    model_input: PreparedStep
    before: Future[ModelRunnerOutput] | None
    future: Future[ModelRunnerOutput] = field(default_factory=Future)
    forward: Any = None  # each runner has its own type
    started_at: float = 0.0  # when its forward began, on the clock time.perf_counter()
    compute_seconds: float = 0.0  # the time of its forward and its sample so far; on a GPU, the time of their launch
    error: BaseException | None = None


class Worker(WorkerBase):
    """The worker that computes a real model. `WorkerBase` documents its methods.

    Args:
        rank: the global rank.
        rendezvous: how the ranks connect: as processes, or as threads of this process. None if there is one rank only.

    Raises:
        ConfigError, ConnectionError: the ranks could not connect to each other.
    """

    def __init__(self, config: EngineConfig, rank: int, rendezvous: Rendezvous | ThreadWorlds | None) -> None:
        self._config = config
        self.rank = rank
        self._timeline = Timeline()
        self._device = get_device(config.device.kind, config.parallel.place(rank))
        self._core_binding = start_threads(config, rank, self._device)
        self._memory = MemoryBudget(config, rank, self._device)
        self._stage = pipeline_stage(config.parallel.pipeline_layer_partition, config.parallel.layout.pp_rank(rank))
        self._runner: Runner | None = None
        self._available_bytes: int | None = None
        # both since the ranks connected last, at the start or after a fault:
        self._has_left = False  # whether this rank has left its groups and links
        self._failed_step: int | None = None  # the first step that failed; later steps do not run
        self._has_warmed_up = False  # whether a step without requests has run
        self._kv_cache_config: KVCacheConfig | None = None
        try:
            self._world = self._join(rendezvous)
        except BaseException:
            self._device.close()
            raise
        # ranks that are threads share one profiler: the profiler of rank 0 records them all
        self._shares_profiler = isinstance(rendezvous, ThreadWorlds) and rank > 0
        self._profiler = RankProfiler(f"tp{self._world.tp_rank}-pp{self._world.pp_rank}", self._device.kind)
        try:
            self._tp = self._world.tensor_parallel_group("model")
            self._pipeline = Pipeline(config, self._stage, self._world, self._device, self._timeline)
        except BaseException:  # also an interrupt: other ranks must not wait for this one
            self._world.close("it could not start")
            self._device.close()
            raise

        self._last_end = 0.0  # when the last step ended on a GPU, on the clock time.perf_counter()
        self._order = StageOrder(self._device.submit)
        # the futures of the steps under way and of some older ones, in order
        self._futures: deque[Future[ModelRunnerOutput]] = deque()

    @property
    def runner(self) -> Runner:
        assert self._runner is not None, "call load_model first"
        return self._runner

    def load_model(self) -> None:
        if self._runner is None:
            self._memory.check_before_loading()
            self._device.submit(self._load_model).result()

    @torch.inference_mode()
    def _load_model(self) -> None:
        model_config = self._config.model
        dtype: torch.dtype = getattr(torch, model_config.dtype)
        cache = self._config.cache
        kv_cache_dtype: torch.dtype = getattr(torch, cache.dtype)
        device = self._device
        backend = get_backend(
            *(device.kind, model_config.architecture.head_dims, cache.block_size, dtype, kv_cache_dtype),
            num_multiprocessors=device.num_multiprocessors if isinstance(device, Accelerator) else 0,
            max_shared_bytes=device.max_shared_bytes if isinstance(device, Accelerator) else 0,
        )
        model = self._load_stage(backend)
        if model.backend is not None and model.backend is not backend:
            if kv_cache_dtype != dtype:
                raise ConfigError(
                    f"kv_cache_dtype={cache.dtype!r}: no kernel supports this model's attention; leave it out"
                )
            backend = model.backend
        make_runner = _runner_class(device, self._config)
        self._runner = make_runner(
            self._config, model, backend, device, self._timeline, tp=self._tp, pipeline=self._pipeline
        )

    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return self.runner.kv_cache_specs()

    def determine_available_memory(self) -> int:
        if self._available_bytes is None:
            self._available_bytes = self._compute(lambda: self._memory.measure_available(self.runner))
        return self._available_bytes

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        if kv_cache_config != self._kv_cache_config or not self._has_warmed_up:
            self._compute(partial(self._initialize, kv_cache_config))

    @torch.inference_mode()
    def _initialize(self, kv_cache_config: KVCacheConfig) -> None:
        if kv_cache_config != self._kv_cache_config:
            self.runner.initialize(kv_cache_config)
            self._kv_cache_config = kv_cache_config
        self.runner.warm_up()
        self._has_warmed_up = True

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        self._raise_if_failed(scheduler_output.step_id)
        try:
            model_input = self.runner.prepare_inputs(scheduler_output)
        except BaseException:
            self._note_failed(scheduler_output.step_id)
            raise
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

    def _note_failed(self, step_id: int) -> None:
        if self._failed_step is None or step_id < self._failed_step:
            self._failed_step = step_id

    def _raise_if_failed(self, step_id: int) -> None:
        """Raises if an earlier step has failed, or if the groups were left.

        A plan says only what has changed since the plan before it. A step that does not know what the failed plan has
        changed would write to KV blocks that belong to other requests now.
        """
        failed = self._failed_step
        if failed is not None and failed < step_id:
            raise ConnectionError(f"rank {self.rank} does not run step {step_id}, because step {failed} failed on it")
        if self._has_left and self._config.parallel.world_size > 1:
            raise ConnectionError(f"rank {self.rank} has stopped its communication")

    @torch.inference_mode()
    def _forward(self, step: _Step) -> None:
        """Run the step's forward, in the compute thread. An error is kept for `_sample`, because steps end in order."""
        step_id, link = step.model_input.plan.step_id, self._pipeline.link
        try:
            self._raise_if_failed(step_id)
            with record_function(f"step {step_id}") if is_profiling() else nullcontext():
                received = None if self._stage.is_first or link is None else link.receive(step_id)
                self.runner.receive_tokens(step.model_input)
                step.started_at = time.perf_counter()
                step.forward = self.runner.execute_model(step.model_input, received)
                step.compute_seconds = time.perf_counter() - step.started_at
                if isinstance(step.forward, IntermediateTensors):
                    assert link is not None
                    link.send(step_id, step.forward)
        except BaseException as error:  # also an interrupt: no caller of this thread would report it
            step.error = error
            self._note_failed(step_id)
            if step.before is not None and not step.before.done():
                # other ranks could wait in this forward for ever, and then the previous step would never be sampled
                self.leave_groups("a step failed on it")

    @torch.inference_mode()
    def _sample(self, step: _Step, grammar_output: GrammarOutput | None) -> None:
        """Run the step's sample, in the compute thread. The drain thread answers the step while the compute thread runs
        the next stage."""
        drawn = None
        try:
            if step.error is None:
                start = time.perf_counter()
                drawn = self.runner.sample(step.model_input, step.forward, grammar_output)
                step.compute_seconds += time.perf_counter() - start
        except BaseException as error:
            step.error = error
            self._note_failed(step.model_input.plan.step_id)
        if step.error is not None:
            self.runner.discard(step.model_input)
        try:
            drained = self._device.drain(partial(self._settle, step, drawn))
        except BaseException as error:  # the device has failed: it raises at every call
            step.future.set_exception(step.error or error)
            return
        drained.add_done_callback(partial(_fail_with, step.future))

    def graph_report(self) -> dict[str, Any]:  # Any: JSON
        """Reports what was recorded and tuned at the start.

        `num_graphs`, `seconds` and `bytes` (of device memory) describe the CUDA graphs. `linears` lists, for each matrix
        product, the fields of its `LinearChoice`: how the product is computed if it has few rows. On a CPU the numbers are 0
        and the list is empty.
        """
        return self.runner.graph_report()

    def _settle(self, step: _Step, drawn: Any) -> None:  # Any: each runner has its own type
        """Complete the step's future, in the drain thread."""
        try:
            if step.error is not None:
                raise step.error
            output = self.runner.drain(drawn)
            # when a rank leaves its groups, a GPU's collectives end without an error, and with arbitrary results
            if self._has_left and isinstance(self._device, Accelerator) and self._config.parallel.world_size > 1:
                raise ConnectionError(f"rank {self.rank} has stopped its communication")
        except BaseException as error:
            step.future.set_exception(error)
        else:
            step.future.set_result(replace(output, compute_seconds=self._compute_seconds(step)))
        if self._core_binding is not None:
            self._core_binding.follow()

    def _compute_seconds(self, step: _Step) -> float:
        """How long the step computed. Call this when the step has just ended.

        On a GPU the time begins when the step is launched, or when the previous step ends if that is later. If the step's masks
        come late, the wait for the masks is part of the time.
        """
        if not isinstance(self._device, Accelerator):
            return step.compute_seconds
        now = time.perf_counter()
        seconds, self._last_end = now - max(step.started_at, self._last_end), now
        return seconds

    def execute_dummy_batch(self) -> None:
        self._compute(partial(torch.inference_mode()(self.runner.dummy_run), 1))

    def phase(self) -> str:
        return ", ".join(self._timeline.under_way())

    def is_waiting(self) -> bool:
        receives = any(phase.startswith("receive ") for phase in self._timeline.under_way())
        return receives or self._world.is_waiting

    def check_health(self) -> None:
        """Compute a step without requests. It fails if the device cannot compute any more. From now on steps run again."""
        if self._has_left and self._config.parallel.world_size > 1:
            raise ConnectionError(f"rank {self.rank} has stopped its communication")
        self.execute_dummy_batch()
        self._failed_step = None
        if isinstance(self._device, Accelerator):
            self._device.compute.record().synchronize()

    def leave_groups(self, reason: str) -> None:
        self._has_left = True
        self._world.close(reason)

    def end_steps(self) -> None:
        self._pipeline.close()
        self._device.synchronize()  # forwards and samples that were submitted fail, because this rank has left its groups
        self._device.drain(lambda: None).result()
        for future in self._futures:
            future.cancel()  # its step waits for masks that never come
        self._futures.clear()
        self._order = StageOrder(self._device.submit)

    def join_epoch(self, rendezvous: Rendezvous | ThreadWorlds | None) -> None:
        self._world = self._join(rendezvous)
        self._has_left = self._has_warmed_up = False
        self._failed_step = None
        try:
            self._world.tensor_parallel_group("model", into=self._tp)
            self._pipeline = Pipeline(self._config, self._stage, self._world, self._device, self._timeline)
        except BaseException:  # other ranks must not wait for this one
            self.leave_groups("it could not meet the others")
            raise
        self.runner.begin_epoch(self._pipeline)

    def profile(self, start: bool, folder: str = "") -> str | None:
        """Start a trace of this rank's threads, or stop the trace. The stop writes the trace to tp<n>-pp<n>.json in the
        `folder` that was given at the start, and returns the path of the file.

        Steps are marked "step <id>". If the ranks are threads of one process, rank 0 records all ranks, and the other ranks
        return None.
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
        self._has_left = True
        self._world.close("it was shut down")
        self._pipeline.close()
        self._device.close()
        for future in self._futures:
            future.cancel()  # its step still waits for masks, or its stages were dropped
        self._profiler.close()
        self._runner = None

    def _join(self, rendezvous: Rendezvous | ThreadWorlds | None) -> World:
        """Connect to the other ranks. Benchmarks override it."""
        return join_world(self._config, self.rank, rendezvous, self._device)

    def _load_stage(self, backend: AttentionBackend) -> CausalLM:
        """This rank's part of the model, weights included. Benchmarks override it."""
        return load_model(
            self._config.model, device=self._device.torch_device, backend=backend, tp=self._tp, stage=self._stage
        )

    def _compute(self, stage: Callable[[], T]) -> T:
        """Run `stage` in the compute thread and wait for it. If it fails, leave the groups, so that no other rank waits."""
        try:
            return self._device.submit(stage).result()
        except BaseException:
            self._world.close("it failed")
            raise


def _fail_with(future: Future[ModelRunnerOutput], drained: Future[None]) -> None:
    """If the device failed before the step could be settled, fail the step's future."""
    error = None if drained.cancelled() else drained.exception()
    if error is not None and not future.done():
        future.set_exception(error)


def _runner_class(device: Device, config: EngineConfig) -> Callable[..., Runner]:
    """The class of the runner. Drafts are proposed and verified on the host, so an engine with drafts has a
    `ModelRunner` on a GPU too, and so has a model whose code may wait for the device: no graph can be captured of it."""
    is_fallback = config.model.architecture.implementation == TRANSFORMERS
    if not isinstance(device, Accelerator) or config.speculative is not None or is_fallback:
        return ModelRunner
    from inflight.worker.graph_model_runner import GraphModelRunner  # needs triton

    return GraphModelRunner
