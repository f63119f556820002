"""`MemoryBudget`: how much memory a rank may use, and how much of it is left for the KV cache."""

from __future__ import annotations

import torch

from inflight.config.engine import EngineConfig
from inflight.config.ranks import Place
from inflight.config.weight_size import check_kv_cache_fits, check_weights_fit, weight_bytes
from inflight.device.accelerator import Accelerator
from inflight.device.base import Device
from inflight.worker.runner import Runner


class MemoryBudget:
    """Create it before the model is loaded, because the constructor records how much memory is free."""

    def __init__(self, config: EngineConfig, place: Place, device: Device) -> None:
        self._config, self._rank, self._device = config, place.rank, device
        self._free_bytes = device.available_memory_bytes()
        self._budget_bytes = device.budget_bytes(config.cache.memory_utilization)
        # how many ranks of this engine share this rank's memory, itself included: on a CPU all ranks of the node
        self._num_sharing = place.num_engine_ranks if device.kind == "cpu" else 1
        # on a CPU all replicas of the engine share the memory
        self._num_replicas = config.parallel.data_parallel_size if device.kind == "cpu" else 1

    def check_before_loading(self) -> None:
        """Check early that the weights and the requested KV cache fit.

        Raises:
            OutOfMemoryError: the weights do not fit the GPU, or the requested KV cache does not fit the machine.
        """
        parallel, cache = self._config.parallel, self._config.cache
        num_bytes = weight_bytes(self._config.model, parallel, parallel.layout.pp_rank(self._rank))
        if isinstance(self._device, Accelerator):
            check_weights_fit(
                num_bytes,
                budget_bytes=self._budget_bytes,
                free_bytes=self._free_bytes,
                total_bytes=self._device.total_memory_bytes(),
                memory_utilization=cache.memory_utilization,
            )
        if cache.memory_bytes is not None:
            check_kv_cache_fits(
                cache.memory_bytes, weight_bytes=num_bytes, num_sharing=self._num_sharing, free_bytes=self._free_bytes
            )

    @torch.inference_mode()
    def measure_available(self, runner: Runner) -> int:
        """The bytes left for the KV cache: the budget minus the loaded weights, the peak memory of a step and the bytes that
        the runner reserves. Call this in the device's compute thread.

        If ranks share memory, the weights of all these ranks are subtracted from the budget. Each rank gets an equal share of
        the rest. If replicas share memory, each of them has an equal share of the budget.
        """
        weights = self._free_bytes - self._device.available_memory_bytes()
        if self._num_replicas > 1:  # the weights of other replicas may have taken free memory meanwhile
            parallel = self._config.parallel
            own = weight_bytes(self._config.model, parallel, parallel.layout.pp_rank(self._rank))
            weights = min(weights, self._num_sharing * own)
        peak = self._device.measure_peak_bytes(runner.profile_run)
        peak += runner.reserved_bytes(peak)
        return (self._budget_bytes // self._num_replicas - max(0, weights)) // self._num_sharing - peak
