"""`CpuDevice`: host memory, one thread that runs the tasks in order, and one thread that runs the work of `drain`.

Only the thread for tasks opens parallel regions, because OpenMP creates a pool of threads for every thread that opens one. With
two pools there would be more pool threads than cores. Then all pool threads sleep between regions, until the process ends, and
each region of torch and each step of the kernels begins after 40 us instead of 1 us (libgomp, `gomp_managed_threads`).

Side effects:
1. From the constructor to `close`, the C library's allocator keeps freed memory.
2. The two threads start when they are first used. They end in `close`.
3. `set_num_threads` also sets the size of the pools that torch starts later in this process.
"""

import mmap
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from inflight.config.free_memory import available_bytes
from inflight.device import host_memory
from inflight.device.base import Device, T
from inflight.errors import OutOfMemoryError


class CpuDevice(Device):
    kind = "cpu"
    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        # This thread spends its time in calls that release the interpreter lock. Meanwhile the caller can prepare more tasks.
        self._compute = ThreadPoolExecutor(max_workers=1, thread_name_prefix="inflight-compute")
        self._drain = ThreadPoolExecutor(max_workers=1, thread_name_prefix="inflight-drain")
        self._closed = False
        self._kept = host_memory.KeptMemory()

    def available_memory_bytes(self) -> int:
        return available_bytes()

    def measure_peak_bytes(self, work: Callable[[], object]) -> int:
        # otherwise `work` could reuse freed memory, which would not be counted
        host_memory.call_c_library("malloc_trim", 0)
        before = host_memory.resident_bytes()
        files_before = host_memory.file_bytes()
        host_memory.reset_peak()
        work()
        # mapped weights that `work` reads for the first time are no memory of its own
        read = max(0, host_memory.file_bytes() - files_before)
        return max(0, host_memory.peak_resident_bytes() - read - before)

    def allocate_arena(self, num_blocks: int, block_bytes: int) -> torch.Tensor:
        """The operating system provides zeroed pages when they are first touched, so unused parts of the arena cost nothing."""
        num_bytes = num_blocks * block_bytes
        assert num_bytes > 0, f"an arena of {num_blocks} blocks of {block_bytes} bytes"
        try:
            pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise OutOfMemoryError(
                f"the KV cache of {num_blocks} blocks, {num_bytes / 2**30:.1f} GiB, cannot be allocated ({error}): "
                "lower kv_cache_memory_bytes or max_model_len"
            ) from error
        host_memory.advise_huge_pages(pages)
        # The tensor's storage holds the only reference to the mapping, so the mapping ends with the storage.
        return torch.frombuffer(pages, dtype=torch.uint8).view(num_blocks, block_bytes)

    def to_device(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array.copy())

    def submit(self, task: Callable[[], T]) -> Future[T]:
        assert not self._closed, "submit after close"
        return self._compute.submit(task)

    def drain(self, work: Callable[[], T]) -> Future[T]:
        # without a copy: on a CPU, the results of the tasks are in host memory already
        return self._drain.submit(work)

    def set_num_threads(self, num_threads: int) -> None:
        self.drain(lambda: _use_threads(1)).result()
        # This must be the second call, because the last call also sets the size of every pool that torch starts later.
        self.submit(lambda: _use_threads(num_threads)).result()

    def synchronize(self) -> None:
        if not self._closed:
            self.submit(lambda: None).result()

    def close(self) -> None:
        self._closed = True
        self._compute.shutdown(wait=True, cancel_futures=True)
        self._drain.shutdown(wait=True)
        self._kept.release()


def _use_threads(num_threads: int) -> None:
    """Sets the size of the calling thread's pool."""
    torch.get_num_threads()  # otherwise torch would replace this setting by the process-wide one when the thread first computes
    torch.set_num_threads(num_threads)
