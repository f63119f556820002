"""`MemoryBudget`: how much memory a rank may use, and how much of it is left for the KV cache."""

import torch

from inflight.config.engine import EngineConfig
from inflight.config.ranks import Place
from inflight.device.accelerator import Accelerator
from inflight.device.base import Device
from inflight.errors import OutOfMemoryError
from inflight.worker.runner import Runner


class MemoryBudget:
    """Create it before the model is loaded, because the constructor records how much memory is free."""

    def __init__(self, config: EngineConfig, place: Place, device: Device) -> None:
        self._cache, self._device = config.cache, device
        self._free_bytes = device.available_memory_bytes()
        self._budget_bytes = device.budget_bytes(config.cache.memory_utilization)
        # how many ranks of this engine share this rank's memory, itself included: on a CPU all ranks of the node
        self._num_sharing = place.num_engine_ranks if device.kind == "cpu" else 1
        # on a CPU all replicas of the engine share the memory
        self._num_replicas = len(config.parallel.replicas) if device.kind == "cpu" else 1
        self._weight_bytes = 0

    def check_before_loading(self, num_bytes: int) -> None:
        """Check that the weights and the requested KV cache fit. Call this before the weights, `num_bytes`, are loaded.

        Raises:
            OutOfMemoryError: the weights do not fit the GPU, or the requested KV cache does not fit the machine.
        """
        self._weight_bytes = num_bytes
        if isinstance(self._device, Accelerator):
            self._check_weights(num_bytes, self._device.total_memory_bytes())
        if self._cache.memory_bytes is not None:
            self._check_kv_cache(self._cache.memory_bytes, num_bytes)

    @torch.inference_mode()
    def measure_available(self, runner: Runner) -> int:
        """The bytes left for the KV cache: the budget minus the loaded weights, the peak memory of a step and the bytes that
        the runner reserves. Call this in the device's compute thread.

        If ranks share memory, the weights of all these ranks are subtracted from the budget. Each rank gets an equal share of
        the rest. If replicas share memory, each of them has an equal share of the budget.
        """
        weights = self._free_bytes - self._device.available_memory_bytes()
        if self._num_replicas > 1:  # the weights of other replicas may have taken free memory meanwhile
            weights = min(weights, self._num_sharing * self._weight_bytes)
        peak = self._device.measure_peak_bytes(runner.profile_run)
        peak += runner.reserved_bytes(peak)
        return (self._budget_bytes // self._num_replicas - max(0, weights)) // self._num_sharing - peak

    def _check_weights(self, num_bytes: int, total_bytes: int) -> None:
        """`total_bytes`: the GPU's memory."""
        free_bytes, utilization = self._free_bytes, self._cache.memory_utilization
        if num_bytes <= self._budget_bytes:
            return
        ways = ["set quantization", "raise tensor_parallel_size or pipeline_parallel_size"]
        if num_bytes < min(free_bytes, total_bytes):
            ways.insert(0, f"raise gpu_memory_utilization={utilization:g}")
        if num_bytes < total_bytes and free_bytes < utilization * total_bytes:
            ways.insert(0, "end other programs that use the GPU")
        raise OutOfMemoryError(
            f"the weights of a rank are {_gib(num_bytes)}, but the engine may use {_gib(self._budget_bytes)} of its GPU, which "
            f"has {_gib(total_bytes)}, {_gib(free_bytes)} of them free (gpu_memory_utilization={utilization:g}); "
            f"{', '.join(ways)}, or use a larger GPU"
        )

    def _check_kv_cache(self, memory_bytes: int, num_bytes: int) -> None:
        """`memory_bytes`: what `kv_cache_memory_bytes` asks for on each rank. `num_bytes`: the size of the weights."""
        if self._num_sharing * (memory_bytes + num_bytes) <= self._free_bytes:
            return
        room = self._free_bytes // self._num_sharing - num_bytes
        ways = (
            [f"lower it to {_gib(room)} at most", "free memory"] if room > 0 else ["free memory", "use a smaller model"]
        )
        sharing = f", which {self._num_sharing} ranks share" if self._num_sharing > 1 else ""
        raise OutOfMemoryError(
            f"kv_cache_memory_bytes={memory_bytes} (--kv-cache-memory-bytes) asks for a KV cache of {_gib(memory_bytes)} "
            f"beside {_gib(num_bytes)} of weights, but only {_gib(self._free_bytes)} of memory is free{sharing}; "
            f"{', '.join(ways)}, or do not set kv_cache_memory_bytes: then the engine chooses a size that fits into the free "
            "memory"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
