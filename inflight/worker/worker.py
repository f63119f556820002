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
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch.profiler import record_function

from inflight.attention.backend import AttentionBackend
from inflight.attention.selector import get_backend
from inflight.config.cpu_binding import AUTO, cores_of_rank
from inflight.config.engine import EngineConfig
from inflight.config.kv_cache_memory import check_kv_cache_fits
from inflight.config.partition import pipeline_stage
from inflight.config.weight_size import check_weights_fit, weight_bytes
from inflight.device.accelerator import Accelerator
from inflight.device.base import Device
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
from inflight.worker.model_runner import ModelRunner
from inflight.worker.pipeline import Pipeline
from inflight.worker.profiling import RankProfiler, is_profiling
from inflight.worker.runner import PreparedStep, Runner
from inflight.worker.stage_order import StagedStep, StageOrder

T = TypeVar("T")


@dataclass(slots=True)
class _Step:
    """A step under way. `before` is the future of the step before it, if that may still be under way."""

    model_input: PreparedStep
    before: Future[ModelRunnerOutput] | None
    future: Future[ModelRunnerOutput] = field(default_factory=Future)
    forward: Any = None  # the runner's own
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
        self._device = get_device(config.device.kind, rank % config.parallel.num_local_ranks)
        self._start_threads()
        self._free_bytes_before_loading = self._device.available_memory_bytes()
        self._budget_bytes = self._device.budget_bytes(config.cache.memory_utilization)
        self._stage = pipeline_stage(config.parallel.pipeline_layer_partition, config.parallel.layout.pp_rank(rank))
        self._runner: Runner | None = None
        self._available_bytes: int | None = None
        self._has_left = False  # the other ranks
        self._kv_cache_config: KVCacheConfig | None = None
        self._world = self._join(rendezvous)
        # threads share one profiler, and the first rank's records them all
        self._shares_profiler = isinstance(rendezvous, ThreadWorlds) and rank > 0
        self._profiler = RankProfiler(f"tp{self._world.tp_rank}-pp{self._world.pp_rank}", self._device.kind)
        try:
            self._tp = self._world.tensor_parallel_group("model")
            self._pipeline = Pipeline(config, self._stage, self._world, self._device, self._timeline)
        except BaseException:  # an interrupt, too: peers must not wait for a rank that was never made
            self._world.close("it could not start")
            self._device.close()
            raise

        self._order = StageOrder(self._device.submit)
        self._futures: deque[Future[ModelRunnerOutput]] = (
            deque()
        )  # of steps, in order; those that are done leave with time

    @property
    def runner(self) -> Runner:
        assert self._runner is not None, "load_model comes first"
        return self._runner

    def load_model(self) -> None:
        """
        Raises:
            OutOfMemoryError: a GPU has too little memory for its weights, or the machine for a KV cache of the requested size.
                Nothing has been loaded.
        """
        if self._runner is None:
            self._check_memory()
            self._device.submit(self._load_model).result()

    def _check_memory(self) -> None:
        parallel, cache = self._config.parallel, self._config.cache
        num_bytes = weight_bytes(self._config.model, parallel, parallel.layout.pp_rank(self.rank))
        if isinstance(self._device, Accelerator):
            check_weights_fit(
                num_bytes,
                budget_bytes=self._budget_bytes,
                free_bytes=self._free_bytes_before_loading,
                total_bytes=self._device.total_memory_bytes(),
                memory_utilization=cache.memory_utilization,
            )
        if cache.memory_bytes is not None:
            check_kv_cache_fits(
                cache.memory_bytes,
                weight_bytes=num_bytes,
                num_sharing=self._num_sharing_memory,
                free_bytes=self._free_bytes_before_loading,
            )

    @property
    def _num_sharing_memory(self) -> int:
        """How many ranks share this rank's memory: on a CPU all ranks of the node."""
        return self._config.parallel.num_local_ranks if self._device.kind == "cpu" else 1

    @torch.inference_mode()
    def _load_model(self) -> None:
        model_config = self._config.model
        dtype: torch.dtype = getattr(torch, model_config.dtype)
        head_dim, cache = model_config.architecture.head_dim, self._config.cache
        kv_cache_dtype: torch.dtype = getattr(torch, cache.dtype)
        device = self._device
        backend = get_backend(
            *(device.kind, head_dim, cache.block_size, dtype, kv_cache_dtype),
            name=self._config.device.attention_backend,
            num_multiprocessors=device.num_multiprocessors if isinstance(device, Accelerator) else 0,
            max_shared_bytes=device.max_shared_bytes if isinstance(device, Accelerator) else 0,
            batch_invariant=model_config.batch_invariant,
        )
        make_runner = _runner_class(self._device, backend, self._config)
        self._runner = make_runner(
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
        weights = self._free_bytes_before_loading - self._device.available_memory_bytes()
        peak = self._device.measure_peak_bytes(self.runner.profile_run)
        peak += self.runner.reserved_bytes(peak)
        return (self._budget_bytes - max(0, weights)) // self._num_sharing_memory - peak

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
            with record_function(f"step {step_id}") if is_profiling() else nullcontext():
                received = None if self._stage.is_first or link is None else link.receive(step_id)
                step.forward = self.runner.execute_model(step.model_input, received)
                if isinstance(step.forward, IntermediateTensors):
                    assert link is not None
                    link.send(step_id, step.forward)
        except BaseException as error:  # an interrupt, too: this thread has nobody above it
            step.error = error
            if step.before is not None and not step.before.done():
                # else peers would wait in this forward while a step before it is to be sampled
                self.leave_groups_after_failure()

    @torch.inference_mode()
    def _sample(self, step: _Step, grammar_output: GrammarOutput | None) -> None:
        """In the compute thread, which goes on with the next stage while the drain thread answers this step."""
        try:
            if step.error is not None:
                raise step.error
            finish = partial(self.runner.drain, self.runner.sample(step.model_input, step.forward, grammar_output))
        except BaseException as error:
            finish = partial(_raise, error)
            self.runner.discard(step.model_input)
        try:
            drained = self._device.drain(partial(self._settle, step.future, finish))
        except BaseException as error:  # the device is gone, and says so at whatever it is asked
            step.future.set_exception(step.error or error)
            return
        drained.add_done_callback(partial(_fail_with, step.future))

    def graph_report(self) -> dict[str, Any]:  # Any: JSON
        """What the start has found: CUDA graphs, `num_graphs`, `seconds`, `bytes` of device memory; and `linears`, how products
        with few rows are computed: lists of the fields of `LinearChoice`. Zeros and nothing where there are none."""
        return self.runner.graph_report()

    def _settle(self, future: Future[ModelRunnerOutput], finish: Callable[[], ModelRunnerOutput]) -> None:
        """In the drain thread."""
        try:
            output = finish()
            # a GPU's collectives end then without an error, and with whatever was in their memory
            if self._has_left and isinstance(self._device, Accelerator) and self._config.parallel.world_size > 1:
                raise ConnectionError("this rank has left its groups")
        except BaseException as error:  # whatever it is, it is the step's
            future.set_exception(error)
        else:
            future.set_result(output)

    def execute_dummy_batch(self) -> None:
        self._compute(partial(torch.inference_mode()(self.runner.dummy_run), 1))

    def phase(self) -> str:
        return ", ".join(self._timeline.under_way())

    def is_waiting(self) -> bool:
        receives = any(phase.startswith("receive ") for phase in self._timeline.under_way())
        return receives or self._world.is_waiting

    def check_health(self) -> None:
        """Compute a step without requests. It fails if an error has broken the device for good."""
        if self._has_left and self._config.parallel.world_size > 1:
            raise ConnectionError(f"rank {self.rank} has left its groups")
        self.execute_dummy_batch()
        if isinstance(self._device, Accelerator):
            self._device.compute.record().synchronize()

    def leave_groups_after_failure(self) -> None:
        self._has_left = True
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
        self._has_left = True
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
        if device.kind != "cpu":
            return
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


def _fail_with(future: Future[ModelRunnerOutput], drained: Future[None]) -> None:
    """The device failed before the step could be settled."""
    error = None if drained.cancelled() else drained.exception()
    if error is not None and not future.done():
        future.set_exception(error)


def _raise(error: BaseException) -> ModelRunnerOutput:
    raise error


def _runner_class(device: Device, backend: AttentionBackend, config: EngineConfig) -> Callable[..., Runner]:
    """Drafts are proposed and resolved on the host, and some backends plan each step there: such steps are those of
    `ModelRunner` on every device."""
    if not isinstance(device, Accelerator) or config.speculative is not None or not backend.can_capture:
        return ModelRunner
    from inflight.worker.graph_model_runner import GraphModelRunner  # needs triton

    return GraphModelRunner
