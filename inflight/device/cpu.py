"""`CpuDevice`: host memory, one thread that runs the tasks in order, and one thread that runs the work of `drain`.

Only the thread for tasks opens parallel regions, because OpenMP creates a pool of threads for every thread that opens one. With
two pools there would be more pool threads than cores. Then all pool threads sleep between regions, until the process ends, and
each region of torch and each step of the kernels begins after 40 us instead of 1 us (libgomp, `gomp_managed_threads`).

Side effects:
1. From the constructor to `close`, the C library's allocator keeps freed memory.
2. The two threads start when they are first used. They end in `close`.
3. `set_num_threads` also sets the size of the pools that torch starts later in this process.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch

from inflight.config.free_memory import available_bytes
from inflight.device import host_memory
from inflight.device.base import Device, T
from inflight.device.long_calls import LONG_CALLS


class CpuDevice(Device):
    kind = "cpu"
    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        # This thread spends its time in calls that release the interpreter lock. Meanwhile the caller can prepare more tasks.
        self._compute = ThreadPoolExecutor(
            1, "inflight-compute", initializer=setattr, initargs=(LONG_CALLS, "before", self._begin_long_call)
        )
        self._drain = ThreadPoolExecutor(1, "inflight-drain")
        # of the compute thread: work that it has not handed to the drain thread yet, and whether it has begun a long call since
        self._held: list[Callable[[], object]] = []
        self._has_begun = False
        self._closed = False
        self._kept = host_memory.KeptMemory()

    def available_memory_bytes(self) -> int:
        return available_bytes()

    def measure_peak_bytes(self, work: Callable[[], object]) -> int:
        return host_memory.peak_bytes_of(work)

    def allocate_arena(self, num_blocks: int, block_bytes: int) -> torch.Tensor:
        # The tensor's storage holds the only reference to the mapping, so the mapping ends with the storage.
        pages = host_memory.map_arena(num_blocks, block_bytes)
        return torch.frombuffer(pages, dtype=torch.uint8).view(num_blocks, block_bytes)

    def to_device(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array.copy())

    def submit(self, task: Callable[[], T]) -> Future[T]:
        assert not self._closed, "submit after close"
        return self._compute.submit(self._run, task)

    def _run(self, task: Callable[[], T]) -> T:
        try:
            return task()
        finally:
            # if this task or the one before has begun a long call, the next one, if it is there already, soon does, too
            if not (self._has_begun and self._compute._work_queue.qsize()):
                self._hand_over()
            if self._held:
                self._has_begun = False

    def _begin_long_call(self) -> None:
        self._has_begun = True
        self._hand_over()

    def _hand_over(self) -> None:
        while self._held:
            self._drain.submit(self._held.pop(0))

    def drain(self, work: Callable[[], T]) -> Future[T]:
        """See `Device`. Results are not copied: on a CPU they are in host memory already. The drain thread gets the work when
        the next task begins a long call (long_calls.py), at the latest when it ends; at once if no task waits."""
        assert self._begin_long_call == LONG_CALLS.before, "only tasks call drain"
        future: Future[T] = Future()
        self._held.append(partial(_complete, future, work))
        return future

    def set_num_threads(self, num_threads: int) -> None:
        self._drain.submit(lambda: _use_threads(1)).result()
        # This must be the second call, because the last call also sets the size of every pool that torch starts later.
        self.submit(lambda: _use_threads(num_threads)).result()

    def synchronize(self) -> None:
        if not self._closed:
            self.submit(lambda: None).result()

    def close(self) -> None:
        self._closed = True
        self._compute.shutdown(cancel_futures=True)
        self._hand_over()
        self._drain.shutdown()
        self._kept.release()


def _complete(future: Future[T], work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


def _use_threads(num_threads: int) -> None:
    """Sets the size of the calling thread's pool."""
    torch.get_num_threads()  # otherwise torch would replace this setting by the process-wide one when the thread first computes
    torch.set_num_threads(num_threads)
