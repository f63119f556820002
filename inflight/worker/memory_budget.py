"""`MemoryBudget`: how much memory a rank may use, and how much of it is left for the KV cache.

On a GPU each rank has memory of its own, and the share `gpu_memory_utilization` is for weights, working memory and KV cache of
this engine. So much must be free when the engine starts: several engines on one GPU have a share each.

On a CPU all ranks of all replicas of the machine share its memory. Together they need:

    weights of all ranks + host pools of all replicas (kv_offloading_size) + KV caches and working memory of all ranks

Weights and host pools have a size that is known, and are refused if they do not fit. The share is for the rest: so a model
whose weights need more than the share runs, if there is memory for it. All this is computed from the free memory before the
start (`DeviceConfig.free_host_bytes`), because a rank that starts later, or again, finds less: the others have taken theirs.
"""

import torch

from inflight.config.engine import EngineConfig
from inflight.config.free_memory import available_bytes
from inflight.config.ranks import Place
from inflight.config.weight_room import Beside, Request, weights_do_not_fit
from inflight.config.weight_room import gibibytes as _gib
from inflight.device import host_memory
from inflight.device.accelerator import Accelerator
from inflight.device.base import Device
from inflight.errors import OutOfMemoryError
from inflight.model_loader.weight_size import WeightSizes
from inflight.weight_cache.peak_memory import peak_bytes
from inflight.worker.runner_base import RunnerBase


class MemoryBudget:
    """Create it before the model is loaded, because the constructor records how much memory is free."""

    def __init__(self, config: EngineConfig, place: Place, device: Device) -> None:
        self._cache = config.cache
        self._device = device
        self._is_cpu = device.kind == "cpu"
        self._is_first_start = config.cache.num_blocks is None
        self._free_bytes = device.available_memory_bytes()
        self._budget_bytes = device.budget_bytes(config.cache.memory_utilization)
        self._own_bytes = host_memory.own_bytes()
        parallel = config.parallel
        self._num_local_ranks = place.num_local_ranks
        self._num_engine_ranks = place.num_engine_ranks
        is_one_process = parallel.distributed_executor_backend == "uni"  # the ranks of an engine are its threads
        self._ranks_in_process = parallel.world_size if is_one_process else 1
        # the part of all ranks of one replica that is on this machine, times the number of replicas
        self._local_share = place.num_local_ranks / parallel.world_size
        self._tensor_parallel_size = parallel.tensor_parallel_size
        self._free_host_bytes = self._free_bytes if self._is_cpu else available_bytes()
        if place.machine == 0 and config.device.free_host_bytes is not None:
            libraries = self._num_local_ranks // self._ranks_in_process * self._own_bytes
            self._free_host_bytes = max(self._free_host_bytes, config.device.free_host_bytes - libraries)
        host_pool = config.cache.transfer.cpu_bytes if config.cache.transfer is not None else 0
        self._host_pool_bytes = int(host_pool * self._local_share)
        self._weights = WeightSizes(rank=0, whole=0)
        model = config.model
        self._request = Request(model.architecture, model.max_model_len, model.dtype, config.cache.dtype)
        models = (model, config.draft_model, config.speculative, config.cache.block_size, config.cache.dtype)
        self._step_settings = (torch.__version__, *models, config.scheduler, config.device.num_threads)

    def check_before_loading(self, weights: WeightSizes) -> None:
        """Check that what has a known size fits: weights, host pool, and the KV cache if the user has set its size. Call
        this before the weights are loaded.

        Raises:
            OutOfMemoryError: the weights do not fit the GPU or the host, or the host pool or the KV cache does not fit
                beside them.
        """
        self._weights = weights
        if isinstance(self._device, Accelerator):
            self._check_weights_on_gpu(weights.rank, self._device.total_memory_bytes())
        elif self._is_first_start:
            self._check_weights_on_host()
        else:  # the sizes are those of an earlier start, but another program may have taken the memory meanwhile
            if weights.rank > self._free_bytes:
                raise OutOfMemoryError(weights_do_not_fit(weights.rank, self._free_bytes, Beside()))
            return
        self._check_host_pool(self._all_weights(weights.whole) if self._is_cpu else 0)
        if self._cache.memory_bytes is not None:
            self._check_kv_cache(self._cache.memory_bytes, weights.rank)

    @property
    def served_bytes(self) -> int:
        """`WeightSizes.whole` of the model that `check_before_loading` was called for."""
        return self._weights.whole

    def check_beside(self, weights: WeightSizes) -> None:
        """As `check_before_loading`, for a second model beside the first one."""
        first = self._weights
        beside = first.beside.plus(weights.beside)
        self.check_before_loading(WeightSizes(first.rank + weights.rank, first.whole + weights.whole, beside))

    def _all_weights(self, whole: int) -> int:
        """The bytes of the weights of all ranks of all replicas on this machine. `whole`: as in `WeightSizes`."""
        return int(whole * self._tensor_parallel_size * self._local_share)

    @torch.inference_mode()
    def measure_available(self, runner: RunnerBase) -> int:
        """The bytes left for the KV cache of this rank: its share, minus the peak memory of a step and the bytes that the
        runner reserves. On a GPU the weights are subtracted from the share, too. Call this in the device's compute thread."""
        if not self._is_cpu:
            left = self._budget_bytes - max(0, self._free_bytes - self._device.available_memory_bytes())
        else:
            ratio = self._unpacked_ratio(runner.mapped_bytes)
            others = self._all_weights(self._weights.whole) * ratio + self._host_pool_bytes
            left = int((self._free_host_bytes - others) * self._cache.memory_utilization) // self._num_local_ranks
        peak = peak_bytes(
            runner.packed_key, self._step_settings, lambda: self._device.measure_peak_bytes(runner.profile_run)
        )
        return left - peak - runner.reserved_bytes(peak)

    def _unpacked_ratio(self, mapped_bytes: int) -> float:
        """How much more memory this rank's weights take than was expected: quantized ones may have been unpacked."""
        host_memory.call_c_library("malloc_trim", 0)
        taken = (host_memory.own_bytes() - self._own_bytes) / self._ranks_in_process
        return max(1.0, (taken + mapped_bytes) / max(1, self._weights.rank))

    def _check_weights_on_host(self) -> None:
        needed = self._all_weights(self._weights.whole)
        if needed > self._free_host_bytes:
            num_replicas = self._num_local_ranks // self._num_engine_ranks
            beside = self._weights.beside.times(self._tensor_parallel_size * self._local_share)
            free = self._free_host_bytes
            raise OutOfMemoryError(weights_do_not_fit(needed, free, beside, self._request, num_replicas=num_replicas))

    def _check_host_pool(self, weight_bytes: int) -> None:
        """`weight_bytes`: the weights of all ranks of this machine, if they are in the host's memory."""
        if not self._host_pool_bytes or weight_bytes + self._host_pool_bytes <= self._free_host_bytes:
            return
        room = self._free_host_bytes - weight_bytes
        num_replicas = self._num_local_ranks // self._num_engine_ranks
        lower = f"lower it to {_gib(room // num_replicas)} at most" if room > 0 else "leave it out"
        replicas = f", for {num_replicas} replicas," if num_replicas > 1 else ""
        raise OutOfMemoryError(
            f"kv_offloading_size (cpu_bytes_to_use) needs {_gib(self._host_pool_bytes)} of host memory{replicas} beside "
            f"{_gib(weight_bytes)} of weights, but only {_gib(self._free_host_bytes)} is free; {lower}, or free memory"
        )

    def _check_weights_on_gpu(self, num_bytes: int, total_bytes: int) -> None:
        """`total_bytes`: the GPU's memory."""
        free_bytes = self._free_bytes
        utilization = self._cache.memory_utilization
        if num_bytes <= self._budget_bytes:
            self._check_share_is_free(total_bytes)
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

    def _check_share_is_free(self, total_bytes: int) -> None:
        """A later start takes the KV cache of the first one, whatever the share is."""
        needs_share = self._is_first_start and self._cache.memory_bytes is None
        if not needs_share or self._budget_bytes <= self._free_bytes:
            return
        lower = self._free_bytes * 100 // total_bytes / 100
        raise OutOfMemoryError(
            f"gpu_memory_utilization={self._cache.memory_utilization:g} is {_gib(self._budget_bytes)} of the GPU's "
            f"{_gib(total_bytes)}, but only {_gib(self._free_bytes)} of them is free; lower it to {lower:g} at most, end other "
            "programs that use the GPU, or set kv_cache_memory_bytes"
        )

    def _check_kv_cache(self, memory_bytes: int, num_bytes: int) -> None:
        """`memory_bytes`: what `kv_cache_memory_bytes` asks for on each rank. `num_bytes`: the size of the weights."""
        num_sharing = self._num_local_ranks if self._is_cpu else 1
        free_bytes = self._free_host_bytes - self._host_pool_bytes if self._is_cpu else self._free_bytes
        if num_sharing * (memory_bytes + num_bytes) <= free_bytes:
            return
        room = free_bytes // num_sharing - num_bytes
        ways = (
            [f"lower it to {_gib(room)} at most", "free memory"] if room > 0 else ["free memory", "use a smaller model"]
        )
        sharing = f", which {num_sharing} ranks share" if num_sharing > 1 else ""
        host_pool = (
            f" beside the host pool of {_gib(self._host_pool_bytes)}" if self._is_cpu and self._host_pool_bytes else ""
        )
        raise OutOfMemoryError(
            f"kv_cache_memory_bytes={memory_bytes} (--kv-cache-memory-bytes) asks for a KV cache of {_gib(memory_bytes)} "
            f"beside {_gib(num_bytes)} of weights, but only {_gib(free_bytes)} of memory is free{host_pool}{sharing}; "
            f"{', '.join(ways)}, or do not set kv_cache_memory_bytes: then the engine chooses a size that fits into the free "
            "memory"
        )
