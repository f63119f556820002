"""`Accelerator`: a device that works beside the host, on streams. What staging, graphs and overlap are written against.

    host       launch N          launch N+1                     nobody here waits
    copy_in    | inputs N+1 |
    compute    | step N ...........| step N+1 ...
    copy_out                       | tokens N |  -> event -> drain thread

Tests drive it with a device whose streams run when, and in what order, the test likes: what is not ordered by a stream or by
an event may happen in any order there, and sooner or later does on a GPU.
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

# How long a thread may keep the interpreter from another that wants it, instead of Python's 5 ms: those that plan, prepare and
# answer take turns within a step, and a step of a GPU may take half a millisecond.
SWITCH_SECONDS = 1e-4


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """While device work is recorded: a graph or an event of another engine that the collector ends would end the recording."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Event(ABC):
    """A point in a stream's work. Any thread may ask."""

    @abstractmethod
    def synchronize(self) -> None:
        """Return when the stream has come here; other threads run meanwhile. Not for stages: they would stop the queue."""


class Stream(ABC):
    """Work runs in the order of the calls; that of two streams side by side, unless an event puts it in order."""

    @abstractmethod
    def enqueue(self, work: Callable[[], None]) -> None:
        """Queue the device work that `work` launches. `work` is called once, at the latest when the device comes to it.

        It reads and writes memory that exists before, or that earlier work has left in an object both know; it may allocate for
        itself. Numbers that it needs from the host it was given beforehand. What it reads stays as it is, and nobody looks at
        what it writes, until an event recorded behind it is done (on the host) or waited for (by a stream).
        """

    @abstractmethod
    def record(self) -> Event:
        """The point behind everything queued so far."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """What is queued from now on runs behind `event`. The host does not wait."""


class Graph(ABC):
    """Device work that was recorded once and is launched as one: with the addresses and the numbers of the recording."""

    @abstractmethod
    def replay(self) -> None:
        """Launch it; within work that is enqueued on `Accelerator.compute`."""


class Accelerator(Device):
    """Stages only launch: they queue on `compute`, and none waits for the device.

    Attributes:
        compute: what stages queue their work on, and the stream on which `capture` records.
        copy_in, copy_out: copies from and to pinned memory, beside it.
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
        """One more, for a link to another rank."""

    @abstractmethod
    def pinned(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Host memory [num_elements], its contents undefined, that is copied to and from the device while the host goes on."""

    @abstractmethod
    def capture(self, work: Callable[[], None]) -> Graph:
        """Record what `work` launches; it has run before, so nothing is compiled or set up within. In a stage, while
        nothing else is queued. All graphs take their memory from one pool: what one leaves in tensors of its own, the next may
        overwrite.
        """

    @property
    @abstractmethod
    def num_multiprocessors(self) -> int:
        """Of the device: how many programs run at once."""

    @property
    @abstractmethod
    def max_shared_bytes(self) -> int:
        """The most shared memory, in bytes, that one program can use."""

    @abstractmethod
    def total_memory_bytes(self) -> int:
        """Of the device, whoever uses it."""
