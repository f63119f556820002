"""`Accelerator`: a device that computes beside the host, on streams: the interface that staging, graphs and overlap use.

    host       launch N          launch N+1                     never waits
    copy_in    | inputs N+1 |
    compute    | step N ...........| step N+1 ...
    copy_out                       | tokens N |  -> event -> drain thread

Tests use a device that runs its streams in any order the test chooses. Operations that neither a stream nor an event orders may
run in any order there, as on a GPU.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import torch
from torch import Tensor

from inflight.device.base import Device, T

# How long a thread may keep the interpreter's lock while another waits for it, instead of Python's 5 ms. The threads that plan,
# prepare and answer take turns within a step, and a step of a GPU may take half a millisecond.
SWITCH_SECONDS = 1e-4


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """For recording a graph: the recording would fail if the collector freed a graph or an event of another engine."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Event(ABC):
    """A point in the order of a stream. Any thread may use it."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the stream has reached this point; other threads run meanwhile. Stages must not call it."""


class Stream(ABC):
    """Runs device operations in the order of the calls. Two streams run side by side, unless an event orders them."""

    @abstractmethod
    def enqueue(self, work: Callable[[], None]) -> None:
        """Queue the device operations that `work` launches. `work` is called once: now, or when the device reaches it.

        `work` uses memory that exists already, or tensors that an earlier `work` has left in a shared object; it may allocate
        temporaries. It gets all numbers that it needs from the host in advance. Until an event that is recorded after it has
        been reached, nobody may change what it reads, or read what it writes.
        """

    @abstractmethod
    def record(self) -> Event:
        """The point after everything queued so far."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """What is queued from now on runs after `event`. The host does not wait."""


class Graph(ABC):
    """Device operations that are launched together, with the addresses and the numbers that they were recorded with."""

    @abstractmethod
    def replay(self) -> None:
        """Launch it; called within `Accelerator.compute.enqueue`."""


class Accelerator(Device):
    """Stages only launch: they queue operations on `compute`, and do not wait for the device.

    Attributes:
        compute: the stream of the stages; `capture` records on it.
        copy_in, copy_out: the streams of copies from and to pinned memory.
    """

    compute: Stream
    copy_in: Stream
    copy_out: Stream

    def submit(self, stage: Callable[[], T]) -> Future[T]:
        """At once, in the caller's thread: `compute` keeps the order."""
        future: Future[T] = Future()
        try:
            future.set_result(stage())
        except Exception as error:
            future.set_exception(error)
        return future

    @abstractmethod
    def new_stream(self) -> Stream:
        """Another stream, for a link to another rank."""

    @abstractmethod
    def pinned(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised host memory [num_elements] whose copies to and from the device run while the host goes on."""

    @abstractmethod
    def capture(self, work: Callable[[], None]) -> Graph:
        """Record what `work` launches. Called in a stage, while nothing else is queued.

        `work` has run before, so it compiles and sets up nothing. All graphs share one memory pool: the tensors that one graph
        allocates may be overwritten by the next.
        """

    @property
    @abstractmethod
    def num_multiprocessors(self) -> int:
        """How many programs the device runs at once."""

    @property
    @abstractmethod
    def max_shared_bytes(self) -> int:
        """The most shared memory, in bytes, that one program can use."""

    @abstractmethod
    def total_memory_bytes(self) -> int:
        """All memory of the device, free or not."""
