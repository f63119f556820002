"""`Worker`: one rank. It owns the device, the model and the runner; the executor calls it from one thread."""

from __future__ import annotations

import torch

from inflight.attention.selector import get_backend
from inflight.config.engine import EngineConfig
from inflight.device.selector import get_device
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.interface.kv_cache import KVCacheConfig, KVCacheSpec
from inflight.interface.step import ModelRunnerOutput, SchedulerOutput
from inflight.interface.worker import Rendezvous, WorkerBase
from inflight.model_loader.loader import load_model
from inflight.timeline import Event, Timeline
from inflight.worker.model_runner import ModelRunner


class Worker(WorkerBase):
    """The real worker. `rank` is the global rank; with one process there is only rank 0."""

    def __init__(self, config: EngineConfig, rank: int, rendezvous: Rendezvous | None) -> None:
        self._config = config
        self.rank = rank
        self._timeline = Timeline()
        self._device = get_device(config.device.kind)
        self._device.set_num_threads(config.device.num_threads)
        self._free_bytes_before_loading = self._device.available_memory_bytes()
        self._runner: ModelRunner | None = None
        self._available_bytes: int | None = None
        self._kv_cache_config: KVCacheConfig | None = None

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
        backend = get_backend(self._device.kind, model_config.architecture.head_dim, dtype)
        model = load_model(
            model_config, device=self._device.torch_device, backend=backend, tp=TensorParallelGroup(size=1, rank=0)
        )
        self._runner = ModelRunner(self._config, model, backend, self._device, self._timeline)

    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return self.runner.kv_cache_specs()

    @torch.inference_mode()
    def determine_available_memory(self) -> int:
        """The share of the memory free at the start that the engine may use, less the weights and a step's peak."""
        if self._available_bytes is None:
            budget = int(self._free_bytes_before_loading * self._config.cache.memory_utilization)
            weights = self._free_bytes_before_loading - self._device.available_memory_bytes()
            peak = self._device.measure_peak_bytes(self.runner.profile_run)
            self._available_bytes = budget - max(0, weights) - peak
        return self._available_bytes

    @torch.inference_mode()
    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        if kv_cache_config == self._kv_cache_config:
            return
        self.runner.initialize(kv_cache_config)
        self._kv_cache_config = kv_cache_config
        self.runner.dummy_run(1)  # warm up: the first call of each kernel is slow

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        model_input = self.runner.prepare_inputs(scheduler_output)
        return self.runner.sample(model_input, self.runner.execute_model(model_input))

    @torch.inference_mode()
    def execute_dummy_batch(self) -> None:
        self.runner.dummy_run(1)

    def timeline_events(self) -> list[Event]:
        """The last events of this rank: `prepare`, `forward` and `sample` of each step."""
        return self._timeline.events()

    def shutdown(self) -> None:
        self._runner = None
        self._device.close()
