"""`FakeGpu`: an accelerator in host memory whose streams run when somebody waits for them, and then in the order of the test.

Work that is queued stays queued until the host waits for an event. Then streams advance one piece at a time, the one that comes
first in `order` and can; so what is not ordered by a stream or an event does happen in the order that hurts: with `copy_out`
first, tokens are copied before they are drawn, unless the copy waits for them. With `eager=True` work runs at once as far as
it can: a host that writes to memory which is still to be read is caught by the other setting.

Graphs are recorded for real: every torch operation and every kernel, with the addresses and the numbers of the recording.
"""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from inflight.attention.backend import AttentionBackend
from inflight.config.cuda_driver import Gpu
from inflight.config.machine import Machine
from inflight.device.accelerator import Accelerator, Event, Stream
from tests.support.device_tensors import RECORDING, host_memory

T = TypeVar("T")

HOST = torch.device("cpu")
COPY_OUT_FIRST = ("copy_out", "copy_in", "link", "compute")
COMPUTE_FIRST = ("compute", "link", "copy_in", "copy_out")
_INTERPRETING = threading.RLock()  # Triton's interpreter serves one thread at a time, whatever device it is


class FakeEvent(Event):
    def __init__(self, device: FakeGpu) -> None:
        self._device = device
        self.done = False

    def synchronize(self) -> None:
        self._device.run_until(lambda: self.done)


class FakeStream(Stream):
    def __init__(self, device: FakeGpu, name: str) -> None:
        self._device, self.name = device, name
        self.queue: deque[Callable[[], None] | FakeEvent | tuple[FakeEvent]] = deque()

    def enqueue(self, work: Callable[[], None]) -> None:
        self._put(work)

    def record(self) -> Event:
        event = FakeEvent(self._device)
        self._put(event)
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, FakeEvent)
        self._put((event,))

    def _put(self, item: Callable[[], None] | FakeEvent | tuple[FakeEvent]) -> None:
        with self._device.running:
            self.queue.append(item)
            if self._device.eager:
                self._device.run_all()

    def can_advance(self) -> bool:
        return bool(self.queue) and not (isinstance(self.queue[0], tuple) and not self.queue[0][0].done)

    def advance(self) -> None:
        item = self.queue.popleft()
        if isinstance(item, FakeEvent):
            item.done = True
        elif not isinstance(item, tuple):
            with torch.inference_mode(), np.errstate(all="ignore"):  # integers wrap, and NaN is a number
                item()


class FakeGraph:
    """Replays each operation on the tensors of the recording, and leaves its results in those of the recording."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._operations: list[Callable[[], None]] = []
        recorder = _Recorder(self._operations)
        _share_interpreter()
        RECORDING.recorder, RECORDING.is_on = recorder, True
        try:
            with recorder, np.errstate(all="ignore"):
                work()
        finally:
            RECORDING.recorder, RECORDING.is_on = None, False

    def replay(self) -> None:
        for operation in self._operations:
            operation()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, operations: list[Callable[[], None]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = operations
        self.is_off = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if not self.is_off:
            self.operations.append(lambda: _again(function, args, kwargs, result))
        return result


def _again(function: Any, args: Any, kwargs: Any, result: Any) -> None:
    renewed = function(*args, **kwargs)
    old, new = (list(value) if isinstance(value, (tuple, list)) else [value] for value in (result, renewed))
    for before, after in zip(old, new, strict=True):
        if isinstance(before, torch.Tensor) and host_memory(before).data_ptr() != host_memory(after).data_ptr():
            before.copy_(after)


def as_one_operation(run: Callable[[], None]) -> None:
    """Call `run`. If this thread records a graph, the graph calls it again, whatever it does."""
    recorder: _Recorder | None = getattr(RECORDING, "recorder", None)
    if recorder is None or recorder.is_off:
        run()
        return
    recorder.is_off, RECORDING.is_on = True, False
    try:
        run()
    finally:
        recorder.is_off, RECORDING.is_on = False, True
    recorder.operations.append(run)


def _share_interpreter() -> None:
    """From now on Triton's interpreter runs one kernel at a time, on the numbers of device tensors, and graphs note kernels
    with their arguments."""
    from triton.runtime.interpreter import GridExecutor

    with _INTERPRETING:
        if hasattr(GridExecutor, "_inflight_shared"):
            return
        original = GridExecutor.__call__

        def call(executor: Any, *args: Any, **kwargs: Any) -> None:
            args, kwargs = tuple(map(host_memory, args)), {name: host_memory(each) for name, each in kwargs.items()}

            def run() -> None:
                with _INTERPRETING:
                    original(executor, *args, **kwargs)

            as_one_operation(run)

        GridExecutor.__call__, GridExecutor._inflight_shared = call, True


class FakeGpu(Accelerator):
    """
    Args:
        order: names of streams; when several can advance, the first of these does.
        torch_device: where its tensors are; see `device_tensors.gpu`.
    """

    kind = "cuda"
    num_multiprocessors = 2
    max_shared_bytes = 227 << 10

    def __init__(
        self,
        *,
        order: Sequence[str] = COMPUTE_FIRST,
        eager: bool = False,
        memory_bytes: int = 1 << 30,
        torch_device: torch.device = HOST,
    ) -> None:
        self.running = threading.RLock()
        self.torch_device = torch_device
        self.order, self.eager, self.memory_bytes = tuple(order), eager, memory_bytes
        self.num_graphs = 0
        self._streams: list[FakeStream] = []
        self.compute, self.copy_in, self.copy_out = (self._stream(name) for name in ("compute", "copy_in", "copy_out"))
        self._drain = ThreadPoolExecutor(1, "fake-drain")
        self.closed = False

    def _stream(self, name: str) -> FakeStream:
        self._streams.append(FakeStream(self, name))
        return self._streams[-1]

    def new_stream(self) -> Stream:
        return self._stream("link")

    def advance(self) -> bool:
        """One piece of work; False if no stream can."""
        with self.running:
            for stream in sorted(self._streams, key=lambda stream: self.order.index(stream.name)):
                if stream.can_advance():
                    stream.advance()
                    return True
            return False

    def run_all(self) -> None:
        while self.advance():
            pass

    def run_until(self, is_done: Callable[[], bool]) -> None:
        if is_done():  # also while another thread waits for another rank
            return
        with self.running:
            while not is_done():
                assert self.advance(), "a stream waits for an event that nobody will reach"

    def available_memory_bytes(self) -> int:
        return self.memory_bytes

    def total_memory_bytes(self) -> int:
        return self.memory_bytes

    def measure_peak_bytes(self, work: Callable[[], object]) -> int:
        with self.running, np.errstate(all="ignore"):
            work()
        return 0

    def allocate_arena(self, num_blocks: int, block_bytes: int) -> torch.Tensor:
        return torch.zeros(num_blocks, block_bytes, dtype=torch.uint8, device=self.torch_device)

    def to_device(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array.copy()).to(self.torch_device)

    def pinned(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_elements, dtype=dtype)

    def pinned_pages(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def enter_thread(self) -> None:
        """Any thread may use it."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        with self.running:
            assert not any(stream.queue for stream in self._streams), "something else is queued"
            assert not gc.isenabled(), "what is collected now would end the recording"
            self.num_graphs += 1
            return FakeGraph(work).replay

    def drain(self, work: Callable[[], T]) -> Future[T]:
        reached = self.compute.record()

        def wait_and_work() -> T:
            reached.synchronize()
            return work()

        return self._drain.submit(wait_and_work)

    def set_num_threads(self, num_threads: int) -> None:
        """Nothing computes in parallel."""

    def synchronize(self) -> None:
        if not self.closed:
            self.run_all()

    def close(self) -> None:
        self.closed = True
        self._drain.shutdown(wait=True)


GPUS = (Gpu(name="fake", compute_capability=(9, 0), num_multiprocessors=2, total_memory_bytes=1 << 30),)


def install(monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu) -> None:
    """Engines find `gpu`, and Triton's attention for it; what is no kernel of the step is plain torch."""
    _share_interpreter()
    machine = Machine(device="cuda", num_cores=1, dtypes=("float32", "bfloat16", "float16"), gpus=GPUS)
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", "off")  # a recording does not see calls of C++
    monkeypatch.setattr("inflight.engine.start.model_files.detect_machine", lambda device: machine)
    monkeypatch.setattr("inflight.worker.worker.get_device", lambda kind, rank: gpu)
    monkeypatch.setattr("inflight.worker.worker.get_backend", lambda *_, **__: triton_backend(gpu.torch_device))


def triton_backend(device: torch.device) -> AttentionBackend:
    from inflight.attention.triton_paged import TritonPagedBackend

    return TritonPagedBackend(device, num_multiprocessors=FakeGpu.num_multiprocessors)
