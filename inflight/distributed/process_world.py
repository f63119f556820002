"""Ranks that are processes: collectives over torch.distributed (gloo on a CPU, NCCL on a GPU), channels over TCP.

Every group is made with its own store. Torch's global default group is not used. An epoch is one start of all ranks. In each
epoch the ranks meet like this:

    1. rank 0 serves a TCPStore at the address in its `Rendezvous`, and the other ranks connect to this store
    2. every rank opens a listener for channels, and writes the listener's address to the store; a peer that connects to the
       listener must know the token in the `Rendezvous`
    3. groups and channels are made when the worker asks for them

After `close`, peers that wait for this rank get an error at once. If this rank itself waits in a gloo collective, its wait ends
only after the timeout, or when the peers leave, too. Therefore the executor kills a rank that does not end in time. On a GPU
the kernels of this rank end at once, and the peers' kernels end when the peers close their worlds (`nccl.py`).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from inflight.config.ranks import RankLayout
from inflight.distributed.channel import Channel
from inflight.distributed.nccl import CHANNEL_CTAS, Communicator, NcclChannel, connect
from inflight.distributed.socket_channel import SocketChannel, local_address
from inflight.distributed.store import open_mesh, reach_store, serve_store
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.distributed.torch_group import GroupHandle, TorchGroup
from inflight.distributed.world import World
from inflight.interface.worker import Rendezvous


class ProcessWorld(World):
    """
    Args:
        device: the device of the groups' tensors.

    Raises:
        ConnectionError: the ranks could not connect to each other in time.
    """

    def __init__(self, layout: RankLayout, rank: int, rendezvous: Rendezvous, device: torch.device) -> None:
        super().__init__(layout, rank)
        self._device = device
        self._timeout = rendezvous.timeout_seconds
        self._groups: list[GroupHandle] = []
        self._channels: list[SocketChannel] = []
        self._store: Store = PrefixStore(f"epoch {rendezvous.epoch}", _open_store(rank, rendezvous))
        self._host = local_address(rendezvous.host, rendezvous.port)
        self._mesh = open_mesh(self._store, rank, self._host, rendezvous.token, self._timeout)

    def tensor_parallel_group(self, name: str) -> TensorParallelGroup:
        size = self.layout.tensor_parallel_size
        if size == 1:
            return TensorParallelGroup()
        store = PrefixStore(f"group {name} of stage {self.pp_rank}", self._store)
        if self._device.type == "cuda":
            return TorchGroup(size, self.tp_rank, self._connect(store, self.tp_rank, size, f"group {name!r}"))
        try:
            handle = GroupHandle(self._make_gloo(store, size))
        except RuntimeError as error:
            raise ConnectionError(f"rank {self.rank} could not join the group {name!r}: {error}") from error
        self._groups.append(handle)
        return TorchGroup(size, self.tp_rank, handle)

    def channel(self, peer: int, name: str) -> Channel:
        channel = self._mesh.channel(peer, name)
        self._channels.append(channel)
        return channel

    def device_channel(self, peer: int, name: str) -> Channel:
        assert self._device.type == "cuda", f"device_channel is for GPUs; tensors on {self._device} use `channel`"
        low, high = sorted((self.rank, peer))
        store = PrefixStore(f"channel {name} of ranks {low} and {high}", self._store)
        own = int(self.rank == high)
        return NcclChannel(self._connect(store, own, 2, f"channel {name!r} to rank {peer}", CHANNEL_CTAS), own)

    @property
    def is_waiting(self) -> bool:
        return any(handle.is_waiting for handle in self._groups)

    def close(self, reason: str) -> None:
        for channel in self._channels:
            channel.close()
        self._mesh.close()
        for handle in self._groups:
            handle.close()

    def _connect(self, store: Store, rank: int, size: int, what: str, max_ctas: int | None = None) -> Communicator:
        try:
            communicator = connect(store, rank, size, self._device, self._timeout, max_ctas)
        except RuntimeError as error:
            raise ConnectionError(f"rank {self.rank} could not connect the {what}: {error}") from error
        self._groups.append(communicator)
        return communicator

    def _make_gloo(self, store: Store, size: int) -> Any:
        gloo_class: Any = ProcessGroupGloo  # Any: torch's stubs lack some of its members
        gloo = gloo_class._Options()
        gloo._timeout = timedelta(seconds=self._timeout)
        gloo._threads = 1  # the collectives of a group run one after the other
        gloo._devices = [gloo_class.create_device(hostname=self._host)]
        return gloo_class(store, self.tp_rank, size, gloo)


def _open_store(rank: int, rendezvous: Rendezvous) -> Store:
    host, port = rendezvous.host, rendezvous.port
    if rank == 0:
        assert rendezvous.listen_fd is not None, "rank 0 needs the listening socket of the rendezvous"
        return serve_store(host, port, rendezvous.listen_fd, rendezvous.timeout_seconds)
    asked = f"rank {rank} cannot reach rank 0"
    return reach_store(host, port, rendezvous.timeout_seconds, asked=asked, where=f"{host}:{port}")
