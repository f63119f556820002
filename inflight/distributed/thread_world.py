"""Ranks that are threads of one process: groups meet at a barrier, channels are queues.

All ranks get the same `ThreadWorlds`. It holds the barriers and the queues, and makes each of them when the first rank asks for
it. If a rank closes its world, the worlds of all ranks end, because the other ranks cannot work without this rank. After a
fault the ranks get new `ThreadWorlds`.
"""

import threading
from queue import Empty, Queue

import torch
from torch import Tensor

from inflight.config.ranks import RankLayout
from inflight.distributed.channel import Channel
from inflight.distributed.collectives import Collectives, sum_in_rank_order
from inflight.distributed.world import World


class Mailbox:
    """A queue of tensors from one rank to another."""

    def __init__(self, timeout_seconds: float) -> None:
        self._tensors: Queue[Tensor | None] = Queue()  # None: the mailbox is closed
        self._closed = ""
        self._timeout = timeout_seconds

    def put(self, tensor: Tensor) -> None:
        if self._closed:
            raise ConnectionError(self._closed)
        self._tensors.put(tensor)

    def take(self) -> Tensor:
        try:
            tensor = self._tensors.get(timeout=self._timeout)
        except Empty:
            raise TimeoutError(f"another rank sent nothing for {self._timeout:g} s") from None
        if tensor is None or self._closed:
            self._tensors.put(None)  # for other threads that wait, now or later
            raise ConnectionError(self._closed)
        return tensor

    def close(self, reason: str) -> None:
        self._closed = self._closed or reason
        self._tensors.put(None)


class TensorBarrier:
    """A barrier at which the ranks of a group read each other's tensors."""

    def __init__(self, size: int, timeout_seconds: float) -> None:
        self._barrier = threading.Barrier(size, timeout=timeout_seconds)
        self._tensors: list[Tensor] = [torch.empty(0, dtype=torch.float32, device="cpu")] * size
        self._closed = ""

    def put(self, rank: int, x: Tensor) -> list[Tensor]:
        """Wait until all ranks have put a tensor, and return these tensors. They may be read until this rank calls `leave`."""
        self._tensors[rank] = x
        self._wait()
        return self._tensors

    def leave(self) -> None:
        """Wait until all ranks have called `leave`. Then no rank reads the tensors any more."""
        self._wait()

    def close(self, reason: str) -> None:
        self._closed = self._closed or reason
        self._barrier.abort()

    def _wait(self) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise ConnectionError(self._closed or "a rank of the group did not come to the barrier in time") from None


class ThreadCollectives(Collectives):
    """Every rank computes the result from the tensors of all ranks, in rank order. So all ranks get the same bits."""

    def __init__(self, size: int, rank: int, barrier: TensorBarrier) -> None:
        self.size, self.rank = size, rank
        self._barrier = barrier

    def all_reduce(self, x: Tensor) -> Tensor:
        total = sum_in_rank_order(self._put(x))
        self._barrier.leave()
        return total

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        everything = torch.cat(self._put(x), dim=dim)
        self._barrier.leave()
        return everything

    def broadcast(self, x: Tensor) -> Tensor:
        copy = self._put(x)[0].clone()
        self._barrier.leave()
        return copy

    def close(self) -> None:
        self._barrier.close(f"rank {self.rank} of the group has left")

    def _put(self, x: Tensor) -> list[Tensor]:
        return self._barrier.put(self.rank, x)


class ThreadChannel(Channel):
    def __init__(self, outbox: Mailbox, inbox: Mailbox) -> None:
        self._outbox, self._inbox = outbox, inbox

    def send(self, tensor: Tensor) -> None:
        self._outbox.put(tensor.clone())

    def receive(self, tensor: Tensor) -> None:
        received = self._inbox.take()
        assert (received.shape, received.dtype) == (tensor.shape, tensor.dtype), "the two ends differ in shape or dtype"
        tensor.copy_(received)

    def close(self) -> None:
        for mailbox in (self._outbox, self._inbox):
            mailbox.close("one of its two ranks has closed the channel")


class ThreadWorlds:
    """The state that the ranks of one process share. Any thread may call any method.

    Args:
        timeout_seconds: the longest time that a rank waits for another rank.
    """

    def __init__(self, layout: RankLayout, timeout_seconds: float) -> None:
        self.layout = layout
        self._timeout = timeout_seconds
        self._lock = threading.Lock()
        self._barriers: dict[tuple[int, str], TensorBarrier] = {}
        self._mailboxes: dict[tuple[int, int, str], Mailbox] = {}
        self._closed = ""

    def of(self, rank: int) -> World:
        """The world of one rank."""
        return _ThreadWorld(self, rank)

    def barrier(self, pp_rank: int, name: str) -> TensorBarrier:
        with self._lock:
            self._raise_if_closed()
            size = self.layout.tensor_parallel_size
            return self._barriers.setdefault((pp_rank, name), TensorBarrier(size, self._timeout))

    def mailbox(self, sender: int, receiver: int, name: str) -> Mailbox:
        with self._lock:
            self._raise_if_closed()
            return self._mailboxes.setdefault((sender, receiver, name), Mailbox(self._timeout))

    def close(self, reason: str) -> None:
        """Let every wait of every rank fail with ConnectionError(reason), now and later. Idempotent."""
        with self._lock:
            self._closed = self._closed or reason
            for barrier in self._barriers.values():
                barrier.close(self._closed)
            for mailbox in self._mailboxes.values():
                mailbox.close(self._closed)

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise ConnectionError(self._closed)


class _ThreadWorld(World):
    def __init__(self, worlds: ThreadWorlds, rank: int) -> None:
        super().__init__(worlds.layout, rank)
        self._worlds = worlds

    def collectives(self, name: str) -> Collectives:
        barrier = self._worlds.barrier(self.pp_rank, name)
        return ThreadCollectives(self.layout.tensor_parallel_size, self.tp_rank, barrier)

    def channel(self, peer: int, name: str) -> Channel:
        return ThreadChannel(self._worlds.mailbox(self.rank, peer, name), self._worlds.mailbox(peer, self.rank, name))

    def close(self, reason: str) -> None:
        self._worlds.close(f"rank {self.rank} has left: {reason}")
