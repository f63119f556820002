"""Devices whose streams run when, and in which order, a random number says; channels and groups between them.

Everything that may happen in any order is a stream: those of all devices, and the hosts, whose work it is to launch. What waits
for another rank raises `NotYet` and is tried again, so it has to be the first thing that a work does.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inflight.device.accelerator import Accelerator, Event, Stream
from inflight.distributed.channel import Channel
from inflight.distributed.tensor_parallel import TensorParallelGroup
from tests.support.fake_device import FakeDevice


class NotYet(BaseException):
    """Another rank has not come so far. No Exception: nobody may take it for an error."""


class FakeEvent(Event):
    def __init__(self) -> None:
        self.done = False

    def synchronize(self) -> None:
        raise AssertionError("nobody on the host waits")


class FakeStream(Stream):
    """`deaf`: it forgets to wait for events."""

    def __init__(self) -> None:
        self.deaf = False
        self._queue: deque[Callable[[], object] | FakeEvent] = deque()  # an event is one to wait for

    def enqueue(self, work: Callable[[], object]) -> None:
        self._queue.append(work)

    def record(self) -> FakeEvent:
        event = FakeEvent()
        self._queue.append(lambda: setattr(event, "done", True))
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, FakeEvent)
        if not self.deaf:
            self._queue.append(event)

    @property
    def is_empty(self) -> bool:
        return not self._queue

    def advance(self) -> bool:
        """Do the oldest thing, if it can be done."""
        item = self._queue[0]
        if isinstance(item, FakeEvent):
            if not item.done:
                return False
        else:
            try:
                item()
            except NotYet:
                return False
        self._queue.popleft()
        return True


def run(streams: list[FakeStream], seed: int) -> None:
    """All that is queued, and what it queues. The order of preference changes now and then: one may starve for long."""
    rng = random.Random(seed)
    while waiting := [stream for stream in streams if not stream.is_empty]:
        if rng.random() < 0.1:
            rng.shuffle(streams)
        if not any(stream.advance() for stream in waiting * 2):  # the first try of one may let another go on
            raise RuntimeError("deadlock: every stream waits")


class FakeAccelerator(FakeDevice, Accelerator):
    """`one_queue`: as hardware with one, all its streams are the same."""

    num_multiprocessors = 1
    max_shared_bytes = 227 << 10

    def __init__(self, one_queue: bool = False) -> None:
        super().__init__()
        self._one_queue = one_queue
        self.compute: FakeStream = FakeStream()
        self.streams = [self.compute]

    def new_stream(self) -> FakeStream:
        if not self._one_queue:
            self.streams.append(FakeStream())
        return self.streams[-1]

    def pinned(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        raise NotImplementedError

    def pinned_pages(self, num_bytes: int) -> Tensor:
        raise NotImplementedError

    def enter_thread(self) -> None:
        pass

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        raise NotImplementedError

    def total_memory_bytes(self) -> int:
        raise NotImplementedError


class FakeDeviceChannel(Channel):
    """Both ends of a connection. Data are read and written during the whole time in which both ends are there."""

    def __init__(self) -> None:
        self.closed = False
        self.num_elements = 0  # that have travelled
        self._offered: Tensor | None = None
        self._at_first: Tensor | None = None
        self._taken = False

    def send(self, tensor: Tensor) -> None:
        self._raise_if_closed()
        if self._offered is None:
            self._offered, self._at_first = tensor, tensor.clone()
        if not self._taken:
            raise NotYet
        self._offered, self._taken = None, False

    def receive(self, tensor: Tensor) -> None:
        self._raise_if_closed()
        if self._offered is None or self._taken:
            tensor.fill_(float("nan"))  # the receiver may write from the start
            raise NotYet
        assert self._at_first is not None and self._offered.shape == tensor.shape
        assert torch.equal(self._offered, self._at_first), "it was changed while it was being sent"
        tensor.copy_(self._offered)
        self._taken = True
        self.num_elements += tensor.numel()

    def close(self) -> None:
        self.closed = True

    def _raise_if_closed(self) -> None:
        if self.closed:
            raise ConnectionError("this rank has stopped its communication")


@dataclass
class FakeBarrier:
    """The n-th gather of each rank meets those of the others."""

    size: int
    gathers: list[dict[int, Tensor]] = field(default_factory=list)
    num_left: dict[int, int] = field(default_factory=dict)  # gathers that a rank has left


class FakeGroup(TensorParallelGroup):
    def __init__(self, size: int, rank: int, barrier: FakeBarrier) -> None:
        super().__init__(size, rank)
        self._barrier = barrier

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        barrier = self._barrier
        n = barrier.num_left.setdefault(self.rank, 0)
        while len(barrier.gathers) <= n:
            barrier.gathers.append({})
        parts = barrier.gathers[n]
        parts.setdefault(self.rank, x.clone())
        if len(parts) < barrier.size:
            raise NotYet
        barrier.num_left[self.rank] += 1
        return torch.cat([parts[rank] for rank in range(barrier.size)], dim=dim)
