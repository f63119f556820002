"""`ReplicaExperts`: the ranks of several replicas that divide the experts of a layer among them.

A rank computes either together with all replicas, or *alone*: without the ranks of other replicas. It is alone at the start,
while a step is measured, and after a fault, until the replicas meet again (engine/lockstep/). Alone,
the experts of other replicas add nothing to a sum. So the results are of no use, but a step does about the same work.
"""

import os
import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

from torch import Tensor

from inflight.config.expert_parallel import ExpertRoom
from inflight.distributed.channel_collectives import ChannelCollectives
from inflight.distributed.collectives import Collectives
from inflight.distributed.exchange import Exchange
from inflight.distributed.expert_parallel import ExpertParallelGroup, SharedRows
from inflight.distributed.shared_collectives import (
    PIECE_BYTES,
    Offer,
    SharedCollectives,
    make_memory,
    open_memory,
    share_memory,
)
from inflight.distributed.socket_channel import SocketChannel, SocketMesh
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.kernels.cpu.library import load_kernels
from inflight.sockets import listen

_HOST = "127.0.0.1"  # all ranks are on one machine


class _Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=_Closable)


class ReplicaExperts(ExpertParallelGroup):
    """`connect` lets the rank compute alone, and `meet` together with the others. `leave` ends all waits for others, until the
    next `connect`; any thread may call it."""

    def __init__(
        self,
        tp: TensorParallelGroup,
        room: ExpertRoom,
        *,
        num_replicas: int,
        replica: int,
        num_places: int = 0,
        shares_memory: bool,
    ) -> None:
        super().__init__(
            *(tp, room), num_replicas=num_replicas, replica=replica, num_places=num_places, shares_memory=shares_memory
        )
        self._place = (num_replicas, replica)
        self.channels: dict[int, SocketChannel] = {}  # to the other ranks, for copies of experts
        self._alone: tuple[SharedRows | None, Collectives | None] = (None, None)
        self._lock = threading.Lock()  # for the next three
        self._opened: list[_Closable] = []
        self._has_left = False
        self._listener: socket.socket | None = None

    def connect(self, collectives: Collectives | None) -> None:
        """`collectives`: those of `tp`; None if the replica has one rank."""
        self.leave()
        with self._lock:
            self._has_left = False
        self._take_place(1, 0)
        self._use(collectives or _lone_collectives())
        self._alone = (self.rows, self.collectives)

    def listen(self) -> tuple[str, int]:
        """Listen for the ranks of other replicas. Returns the address."""
        listener = self._own(listen(_HOST, 0))
        with self._lock:
            self._listener = listener
        host, port = listener.getsockname()[:2]
        return host, port

    def meet(self, token: bytes, addresses: Sequence[tuple[str, int]], timeout_seconds: float) -> None:
        """Compute together with all ranks from now on. All ranks call this after `listen`, while no thread uses the group.

        Args:
            token: the secret of this meeting.
            addresses: where each rank of each replica listens, in the order of `rank`.

        Raises:
            OSError: a rank did not come, or `leave` was called.
        """
        assert len(addresses) == self.size, addresses
        with self._lock:
            listener = self._listener
            self._listener = None
            if listener is None:
                raise ConnectionError("this rank does not listen for the ranks of other replicas")
            self._opened.remove(listener)  # the mesh owns it
        mesh = self._own(SocketMesh(self.rank, listener, token, addresses.__getitem__, timeout_seconds))
        connections = mesh.connections([peer for peer in range(self.size) if peer != self.rank], "experts")
        exchange = self._own(Exchange(self.size, self.rank, connections, timeout_seconds))
        shared = share_memory(exchange, load_kernels())
        collectives = self._own(ChannelCollectives(exchange) if shared is None else shared)
        if self.num_places:
            peers = (peer for peer in range(self.size) if peer != self.rank)
            self.channels = {peer: self._own(mesh.channel(peer, "copies of experts")) for peer in peers}
        self._take_place(*self._place)
        self._use(collectives)

    def _take_place(self, num_replicas: int, replica: int) -> None:
        self._num_replicas = num_replicas
        self._replica = replica

    def leave(self) -> None:
        with self._lock:
            self._has_left = True
            self._listener = None
            opened = self._opened
            self._opened = []
        for each in opened:
            each.close()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within the context the rank computes alone. No thread may use the group when it begins or ends."""
        place = (self._num_replicas, self._replica)
        together = (self.rows, self.collectives)
        self._take_place(1, 0)
        self.rows, self.collectives = self._alone
        try:
            yield
        finally:
            self._take_place(*place)
            self.rows, self.collectives = together

    @property
    def is_waiting(self) -> bool:
        return bool(getattr(self.collectives, "is_waiting", False))

    def _own(self, opened: C) -> C:
        """Let `leave` close `opened`. If it was called already, close it now, and raise ConnectionError."""
        with self._lock:
            if not self._has_left:
                self._opened.append(opened)
                return opened
        opened.close()
        raise ConnectionError("this rank has left the other replicas")


class _LoneCollectives(Collectives):
    """Of one rank, whose tensors are the results."""

    size, rank = 1, 0

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        return x

    def close(self) -> None:
        """Nothing waits."""


def _lone_collectives() -> Collectives:
    """Those of one rank: of the C++ kernels, if they can be used."""
    kernels = load_kernels()
    num_bytes: int = 0 if kernels is None else kernels.inflight_group_memory_bytes(1, PIECE_BYTES)
    offer = Offer(os.getpid(), -1, secrets.token_bytes(32))
    if num_bytes:
        offer = offer._replace(memory_fd=make_memory(num_bytes, offer.mark))
    if kernels is None or offer.memory_fd < 0:
        return _LoneCollectives()
    try:
        memory = open_memory(offer, num_bytes)
    finally:
        os.close(offer.memory_fd)
    return SharedCollectives(kernels, memory, [os.pidfd_open(os.getpid())], [0], 0, 1.0)
