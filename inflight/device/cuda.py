"""`CudaDevice`: one NVIDIA GPU. Stages only queue work, so they run in the caller's thread. Another thread waits for results.

    caller          | prepare N+1 | launch N+1 | prepare N+2 | ...        never waits for the GPU
    drain thread                       | wait for tokens N -> reply

The device creates three streams: `compute`, `copy_in` and `copy_out`. The default stream is not used, because other streams
might have to wait for it.

Side effects: Python switches threads after `SWITCH_SECONDS`. The thread that calls the constructor uses this GPU from then on.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inflight.device.accelerator import SWITCH_SECONDS, Accelerator, Event, Stream
from inflight.device.base import T
from inflight.errors import ConfigError, OutOfMemoryError


class CudaEvent(Event):
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def synchronize(self) -> None:
        self.event.synchronize()


class CudaStream(Stream):
    """A CUDA stream. `enqueue` launches at once, in the thread of the caller."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def enqueue(self, work: Callable[[], None]) -> None:
        if torch.cuda.current_stream() == self.stream:
            work()
        else:
            with torch.cuda.stream(self.stream):
                work()

    def record(self) -> Event:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # a thread that waits for it sleeps
        event.record(self.stream)
        return CudaEvent(event)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.event)


class CudaDevice(Accelerator):
    """One NVIDIA GPU.

    Args:
        index: the number of the GPU among the GPUs that this process can see.

    Raises:
        ConfigError: there is no GPU with this number.
    """

    kind = "cuda"

    def __init__(self, index: int) -> None:
        if index >= (count := torch.cuda.device_count()):
            raise ConfigError(
                f"rank {index} of this machine needs a GPU of its own, and torch sees {count} here: use fewer ranks, or check "
                "CUDA_VISIBLE_DEVICES (if a launcher shows each process only one GPU, make it show all of them)"
            )
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        streams = [torch.cuda.Stream(self.torch_device) for _ in range(3)]  # type: ignore[no-untyped-call]
        self.compute, self.copy_in, self.copy_out = map(CudaStream, streams)
        self._compute_stream = streams[0]
        self._pool = torch.cuda.graph_pool_handle()
        self._drain = ThreadPoolExecutor(1, "inflight-drain", initializer=self._enter, initargs=(streams[2],))
        self._closed = False
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
        self._enter(streams[0])

    @property
    def num_multiprocessors(self) -> int:
        return int(torch.cuda.get_device_properties(self.torch_device).multi_processor_count)

    @property
    def max_shared_bytes(self) -> int:
        properties = torch.cuda.get_device_properties(self.torch_device)
        return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]  # missing in torch's stub

    def available_memory_bytes(self) -> int:
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def total_memory_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch_device)[1])

    def budget_bytes(self, utilization: float) -> int:
        """Returns the share `utilization` of all memory of the device, whoever uses the rest: the share is this engine's."""
        return int(self.total_memory_bytes() * utilization)

    def measure_peak_bytes(self, work: Callable[[], object]) -> int:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self.torch_device)
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        work()
        torch.cuda.synchronize(self.torch_device)
        return max(0, torch.cuda.max_memory_reserved(self.torch_device) - before)

    def allocate_arena(self, num_blocks: int, block_bytes: int) -> Tensor:
        try:
            return torch.zeros(num_blocks, block_bytes, dtype=torch.uint8, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"the KV cache of {num_blocks} blocks, {num_blocks * block_bytes / 2**30:.1f} GiB, does not fit into the "
                f"{self.available_memory_bytes() / 2**30:.1f} GiB that are free: lower gpu_memory_utilization or "
                "kv_cache_memory_bytes"
            ) from error

    def to_device(self, array: np.ndarray[Any, Any]) -> Tensor:
        """The copy runs on the stream `compute`, like every operation that uses the new tensor."""
        pinned = torch.from_numpy(np.ascontiguousarray(array)).pin_memory()
        with torch.cuda.stream(self._compute_stream):
            return pinned.to(self.torch_device, non_blocking=True)

    def new_stream(self) -> CudaStream:
        return CudaStream(torch.cuda.Stream(self.torch_device))  # type: ignore[no-untyped-call]

    def pinned(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_elements, dtype=dtype, device="cpu", pin_memory=True)

    def pinned_pages(self, num_bytes: int) -> Tensor:
        """`pinned` would round the size up to a power of two, and torch would keep the memory when the tensor is gone."""
        try:
            pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory = np.frombuffer(pages, dtype=np.uint8)
            address = int(memory.ctypes.data)
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)))  # type: ignore[no-untyped-call]
        except (OSError, RuntimeError) as error:
            raise OutOfMemoryError(
                f"{num_bytes / 2**30:.1f} GiB of host memory cannot be pinned for the GPU ({error}): lower kv_offloading_size, "
                "or raise the limit of the container's memory"
            ) from error
        weakref.finalize(memory, _unregister, address).atexit = False  # before the pages are unmapped
        return torch.from_numpy(memory)

    def enter_thread(self) -> None:
        torch.cuda.set_device(self.torch_device)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        torch.cuda.synchronize(self.torch_device)
        with torch.cuda.stream(self._compute_stream):
            drop_library_workspaces()  # the graph gets its own workspace: a shared one may be freed too early
            graph = record_graph(work, self._pool)
            drop_library_workspaces()
        return graph.replay

    def drain(self, work: Callable[[], T]) -> Future[T]:
        reached = self.compute.record()

        def wait_and_work() -> T:
            reached.synchronize()
            return work()

        return self._drain.submit(wait_and_work)

    def set_num_threads(self, num_threads: int) -> None:
        """Sets the number of CPU threads, which only convert weights."""
        torch.set_num_threads(num_threads)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._drain.shutdown(wait=True)
            with contextlib.suppress(RuntimeError):  # the device may have failed
                torch.cuda.synchronize(self.torch_device)
                drop_library_workspaces()

    def _enter(self, stream: torch.cuda.Stream) -> None:
        """Makes `stream` the current stream of the calling thread."""
        self.enter_thread()
        torch.cuda.set_stream(stream)


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


# Any: torch does not export the type of a pool
def record_graph(work: Callable[[], None], pool: Any = None) -> torch.cuda.CUDAGraph:
    """Records the operations that `work` launches on the current stream. Without a `pool`, the graph has its own memory."""
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(False):  # torch's random state must not be an inference tensor
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # other threads may allocate
    try:
        work()
    except BaseException:
        with contextlib.suppress(RuntimeError):  # an error here would hide the error of `work`
            graph.capture_end()
        raise
    graph.capture_end()
    return graph


def drop_library_workspaces() -> None:
    """Frees the workspaces of cuBLAS. cuBLAS keeps one for each stream that was ever used."""
    torch._C._cuda_clearCublasWorkspaces()
