"""Ranks that are processes. Collectives use shared memory or TCP on CPUs, and NCCL on GPUs. Channels use TCP, and NCCL if they
connect GPUs.

The ranks meet at the start and after each fault. Each meeting begins a new epoch, and goes like this:

    1. every rank has a listener for connections; a peer that connects to the listener must know the token in the `Rendezvous`
    2. the `Rendezvous` has the addresses of all listeners
    3. groups and channels are made when the worker asks for them

A group on CPUs first has connections between all its ranks. If these ranks can share memory, and all of them have the C++
kernels, the group uses the memory instead. Each group decides this for itself, because the ranks of one stage may be on one
machine, and the ranks of another stage on several machines.

On CPUs, after `close` each call in which this rank waits for a peer, or a peer for this rank, fails at once. On GPUs such waits
end without an error, and their results are garbage. The kernels of this rank end at once, and those of a peer when the peer
closes its world (`nccl.py`).
"""

import socket
import threading
from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch

from inflight.config.ranks import RankLayout
from inflight.distributed.channel import Channel
from inflight.distributed.channel_collectives import ChannelCollectives
from inflight.distributed.collectives import Collectives
from inflight.distributed.exchange import Exchange
from inflight.distributed.nccl import CHANNEL_CTAS, Communicator, NcclChannel, NcclCollectives, connect
from inflight.distributed.shared_collectives import share_memory
from inflight.distributed.socket_channel import SocketMesh
from inflight.distributed.store import meet_store
from inflight.distributed.world import World
from inflight.interface.worker import Rendezvous
from inflight.kernels.cpu.library import load_kernels


class _Closable(Protocol):
    """A group or a channel of the world."""

    def close(self) -> None: ...


P = TypeVar("P", bound=_Closable)


class ProcessWorld(World):
    """
    Args:
        device: the device of the groups' tensors.
    """

    def __init__(self, layout: RankLayout, rank: int, rendezvous: Rendezvous, device: torch.device) -> None:
        super().__init__(layout, rank)
        self._device = device
        self._timeout = rendezvous.timeout_seconds
        self._lock = threading.Lock()  # protects `_opened` and `_is_closed`
        self._opened: list[_Closable] = []
        self._is_closed = False
        assert rendezvous.listen_fd is not None, "the rank needs a socket that listens"
        listener = socket.socket(fileno=rendezvous.listen_fd)
        addresses = rendezvous.addresses
        self._host = addresses[rank][0]
        self._mesh = SocketMesh(rank, listener, rendezvous.token, addresses.__getitem__, self._timeout)

    def collectives(self, name: str) -> Collectives:
        size = self.layout.tensor_parallel_size
        stage = [self.layout.rank(tp_rank, self.pp_rank) for tp_rank in range(size)]
        if self._device.type == "cuda":
            return NcclCollectives(size, self.tp_rank, self._connect(stage, f"group {name}"))
        try:
            exchange = self._own(self._open_exchange(stage, f"group {name}"))
            shared = share_memory(exchange, load_kernels())
        except OSError as error:
            raise ConnectionError(f"rank {self.rank} could not join the group {name!r}: {error}") from error
        return self._own(ChannelCollectives(exchange) if shared is None else shared)

    def channel(self, peer: int, name: str) -> Channel:
        return self._own(self._mesh.channel(peer, name))

    def device_channel(self, peer: int, name: str) -> Channel:
        assert self._device.type == "cuda", f"device_channel is for GPUs; tensors on {self._device} use `channel`"
        pair = sorted((self.rank, peer))
        return NcclChannel(self._connect(pair, f"device {name}", CHANNEL_CTAS), pair.index(self.rank))

    @property
    def is_waiting(self) -> bool:
        return any(getattr(each, "is_waiting", False) for each in list(self._opened))

    def close(self, reason: str) -> None:
        with self._lock:
            self._is_closed = True
            opened = list(self._opened)
        self._mesh.close()
        for each in opened:
            each.close()

    def _own(self, opened: P) -> P:
        """Let `close` close `opened`, and return `opened`. If the world is closed already, close `opened` now, and raise
        ConnectionError."""
        with self._lock:
            if not self._is_closed:
                self._opened.append(opened)
                return opened
        opened.close()
        raise ConnectionError("this rank has stopped its communication")

    def _open_exchange(self, ranks: Sequence[int], name: str) -> Exchange:
        """Connect to all other ranks of the group, which all call this."""
        opened = self._mesh.connections([peer for peer in ranks if peer != self.rank], name)
        connections = {ranks.index(peer): connection for peer, connection in opened.items()}
        return Exchange(len(ranks), ranks.index(self.rank), connections, self._timeout, ranks)

    def _connect(self, ranks: Sequence[int], name: str, max_ctas: int | None = None) -> Communicator:
        """Make a communicator of the GPUs of `ranks`, which all call this."""
        try:
            store = meet_store(self._mesh, self.rank, ranks, name, self._host, self._timeout)
            own = ranks.index(self.rank)
            return self._own(connect(store, own, len(ranks), self._device, self._timeout, max_ctas))
        except (OSError, RuntimeError) as error:
            raise ConnectionError(
                f"rank {self.rank} could not join the communicator {name!r} of ranks {ranks}: {error}"
            ) from error
