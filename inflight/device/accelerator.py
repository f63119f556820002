"""`Accelerator`: a device that computes on streams while the host (the CPU) goes on. `GraphModelRunner` uses this interface.

    host       launch N          launch N+1                     never waits
    copy_in    | inputs N+1 |
    compute    | step N ...........| step N+1 ...
    copy_out                       | tokens N |  -> event -> drain thread

Tests use a device on which the test chooses the order. If neither a stream nor an event orders two operations, the test may run
them in any order, as on a GPU.
"""

import gc
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import torch
from torch import Tensor

from inflight.device.base import Device, T

# How long a thread may keep the interpreter's lock while another thread waits for it. Python's default of 5 ms is too long:
# a step of a GPU may take half a millisecond, and in this time the threads that plan, prepare and answer all have to run.
SWITCH_SECONDS = 1e-4


class _Recordings:
    """The recordings under way in all threads of this process."""

    lock = threading.Lock()
    count = 0
    collects_after = False  # whether Python collected garbage before the first of them


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Stops Python's garbage collection in the `with` block, in which a CUDA graph is recorded. The recording would fail if the
    collector freed a graph or an event of another engine. Several threads may record at a time."""
    with _Recordings.lock:
        if not _Recordings.count:
            _Recordings.collects_after = gc.isenabled()
            gc.collect()
            gc.disable()
        _Recordings.count += 1
    try:
        yield
    finally:
        with _Recordings.lock:
            _Recordings.count -= 1
            if not _Recordings.count and _Recordings.collects_after:
                gc.enable()


class Event(ABC):
    """A point in the order of a stream. Any thread may use it."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until the stream has reached this point. Other threads run meanwhile. A task (see `Device`) must not call
        this method, because a task must not wait for the device."""


class Stream(ABC):
    """Runs device operations in the order of the calls. Two streams run side by side, unless an event orders them."""

    @abstractmethod
    def enqueue(self, work: Callable[[], None]) -> None:
        """Queue the device operations that `work` launches. `work` is called once: now, or when the device reaches it.

        `work` uses memory that exists already, or tensors that an earlier `work` has stored in a shared object. It may allocate
        temporaries. The caller computes all numbers that `work` needs from the host before this call. Record an event after
        this call. Until the stream has reached the event, nobody may change the inputs of `work` or read its results.
        """

    @abstractmethod
    def record(self) -> Event:
        """Returns the point after all operations that are queued so far."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Operations that are queued from now on run after `event`. The host does not wait."""


class Accelerator(Device):
    """A device whose tasks (see `Device`) queue operations on the stream `compute` and do not wait for the device.

    Attributes:
        compute: the stream that tasks use; `capture` records on it, too.
        copy_in, copy_out: the streams of copies from and to pinned memory.
    """

    compute: Stream
    copy_in: Stream
    copy_out: Stream

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Runs the task at once, in the caller's thread. The operations that the task queues run later, in order, on the
        stream `compute`."""
        future: Future[T] = Future()
        try:
            future.set_result(task())
        except Exception as error:
            future.set_exception(error)
        return future

    @abstractmethod
    def new_stream(self) -> Stream:
        """Returns a new stream, for the data that is sent to or received from another rank."""

    @abstractmethod
    def pinned(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Allocates uninitialised pinned host memory [num_elements]. The device can copy from and to it while the host goes
        on."""

    @abstractmethod
    def pinned_pages(self, num_bytes: int) -> Tensor:
        """As `pinned`, uint8 [num_bytes], zeroed, for memory that is large and stays. It takes `num_bytes`, rounded up to whole
        pages, and is free again when the tensor and its views are gone.

        Raises:
            OutOfMemoryError: the system has not so much memory, or cannot pin it.
        """

    @abstractmethod
    def enter_thread(self) -> None:
        """Call this first in every thread that uses the device. A thread that does not would use the first GPU of the machine,
        and make a context there, which takes half a gigabyte."""

    @abstractmethod
    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Records the operations that `work` launches, as a graph. Called in a task, while nothing else is queued. Returns the
        function that launches the graph, for `Stream.enqueue`. A launch uses the addresses and the numbers of the recording.

        `work` must have run before, so that it compiles nothing and sets up nothing. All graphs share one memory pool: a graph
        may overwrite the tensors that another graph has allocated.
        """

    @property
    @abstractmethod
    def num_multiprocessors(self) -> int:
        """The number of streaming multiprocessors (SMs)."""

    @property
    @abstractmethod
    def max_shared_bytes(self) -> int:
        """The most shared memory, in bytes, that one thread block can use."""

    @abstractmethod
    def total_memory_bytes(self) -> int:
        """All memory of the device, free or not."""
