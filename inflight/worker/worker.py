"""`Worker`: one rank. It owns the device, the model, the runner and the connections to other ranks.

The executor calls it from one thread. A step is prepared there and then handed to the device's compute thread:

    calling thread   | prepare N | prepare N+1 |              | prepare N+2 |
    compute thread               | receive N, forward N, send N, sample N | receive N+1, forward N+1, ...

so a step is ready before the one before it ends, and only the compute thread ever waits for another rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

import torch
from torch.profiler import record_function

from inflight.attention.backend import AttentionBackend
from inflight.attention.selector import get_backend
from inflight.config.engine import EngineConfig
from inflight.config.partition import pipeline_stage
from inflight.device.selector import get_device
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.distributed.process_world import ProcessWorld
from inflight.distributed.thread_world import ThreadWorlds
from inflight.distributed.world import LoneWorld, World
from inflight.interface.kv_cache import KVCacheConfig, KVCacheSpec
from inflight.interface.step import ModelRunnerOutput, SchedulerOutput
from inflight.interface.worker import Rendezvous, WorkerBase
from inflight.model_loader.loader import load_model
from inflight.models.causal_lm import CausalLM
from inflight.timeline import Event, Timeline
from inflight.worker.model_runner import ModelInput, ModelRunner
from inflight.worker.pipeline import Pipeline
from inflight.worker.profiling import RankProfiler


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
        self._device.set_num_threads(config.device.num_threads)
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

    @property
    def runner(self) -> ModelRunner:
        assert self._runner is not None, "load_model comes first"
        return self._runner

    @torch.inference_mode()
    def load_model(self) -> None:
        if self._runner is not None:
            return
        model_config = self._config.model
        dtype: torch.dtype = getattr(torch, model_config.dtype)
        head_dim, block_size = model_config.architecture.head_dim, self._config.cache.block_size
        backend = get_backend(self._device.kind, head_dim, block_size, dtype)
        self._runner = ModelRunner(
            self._config,
            self._load_stage(backend),
            backend,
            self._device,
            self._timeline,
            tp=self._tp,
            stage=self._stage,
            sender=self._pipeline.sender,
            receiver=self._pipeline.receiver,
        )

    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return self.runner.kv_cache_specs()

    @torch.inference_mode()
    def determine_available_memory(self) -> int:
        """The share of the memory free at the start that the engine may use, less the weights and a step's peak.

        Ranks on a CPU share its memory: what is free, and what the weights of all have taken, is divided among them.
        """
        if self._available_bytes is None:
            budget = int(self._free_bytes_before_loading * self._config.cache.memory_utilization)
            weights = self._free_bytes_before_loading - self._device.available_memory_bytes()
            with self._leaving_on_error():
                peak = self._device.measure_peak_bytes(self.runner.profile_run)
            self._available_bytes = (budget - max(0, weights)) // self._config.parallel.num_local_ranks - peak
        return self._available_bytes

    @torch.inference_mode()
    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        if kv_cache_config == self._kv_cache_config:
            return
        with self._leaving_on_error():
            self.runner.initialize(kv_cache_config)
            self._kv_cache_config = kv_cache_config
            self.runner.dummy_run(1)  # warm up: the first call of each kernel is slow

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        model_input = self.runner.prepare_inputs(scheduler_output)
        if not self._stage.is_first:
            assert self._pipeline.link is not None
            self._pipeline.link.post_receive(scheduler_output.step_id, scheduler_output.num_tokens)
        return self._device.submit(partial(self._compute, model_input))

    @torch.inference_mode()
    def _compute(self, model_input: ModelInput) -> ModelRunnerOutput:
        step_id, link = model_input.plan.step_id, self._pipeline.link
        with record_function(f"step {step_id}"):
            received = None if self._stage.is_first or link is None else link.receive(step_id)
            forward = self.runner.execute_model(model_input, received)
            if isinstance(forward, IntermediateTensors):
                assert link is not None
                link.send(step_id, forward)
            return self.runner.sample(model_input, forward)

    @torch.inference_mode()
    def execute_dummy_batch(self) -> None:
        with self._leaving_on_error():
            self.runner.dummy_run(1)

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
        self._profiler.close()
        self._runner = None

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

    @contextmanager
    def _leaving_on_error(self) -> Iterator[None]:
        """Peers must not wait in a collective for a rank that has failed before it."""
        try:
            yield
        except BaseException:
            self._world.close("it failed")
            raise
