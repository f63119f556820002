"""One `FakeGpu` for each rank of an engine, whose ranks are threads. Tensors of a GPU are `DeviceTensor`s of its own device.

Collectives and channels between GPUs are as NCCL's: they need tensors of the rank's own GPU, a graph records them as one
operation, and `all_reduce` writes its result to its argument. Channels of the host are as sockets: they send tensors of the
host. The work of a rank runs at once (`eager`), and waits for other ranks where a GPU's kernels would.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from inflight.attention.backend import AttentionBackend
from inflight.config.engine import EngineConfig
from inflight.config.ranks import RankLayout
from inflight.device.base import Device
from inflight.distributed.channel import Channel
from inflight.distributed.collectives import Collectives, sum_in_rank_order
from inflight.distributed.thread_world import TensorBarrier, ThreadWorlds
from inflight.distributed.world import World
from inflight.sample import processors
from tests.support.device_tensors import DEVICE_TYPE, gpu
from tests.support.fake_gpu import FakeGpu, as_one_operation, install, triton_backend


class GpuCollectives(Collectives):
    def __init__(self, size: int, rank: int, barrier: TensorBarrier, device: torch.device) -> None:
        self.size, self.rank = size, rank
        self._barrier, self._device = barrier, device

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._exchange(x, lambda everything: x.copy_(sum_in_rank_order(everything)))
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        gathered = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        self._exchange(x.contiguous(), lambda everything: gathered.copy_(torch.cat(everything)))
        return gathered if dim == 0 else torch.cat(gathered.chunk(self.size), dim=dim)

    def broadcast(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._exchange(x, lambda everything: x.copy_(everything[0]))
        return x

    def close(self) -> None:
        self._barrier.close(f"rank {self.rank} of the group has left")

    def _exchange(self, x: Tensor, finish: Callable[[list[Tensor]], object]) -> None:
        assert x.device == self._device, f"a collective between GPUs got a tensor on {x.device}"

        def run() -> None:
            everything = [each.clone() for each in self._barrier.put(self.rank, x.cpu())]
            self._barrier.leave()
            finish([each.to(self._device) for each in everything])

        as_one_operation(run)


class CheckedChannel(Channel):
    """A channel for tensors on `device` only."""

    def __init__(self, channel: Channel, device: torch.device) -> None:
        self._channel, self._device = channel, device

    def send(self, tensor: Tensor) -> None:
        assert tensor.device == self._device, f"a channel of {self._device} got a tensor on {tensor.device}"
        assert tensor.is_contiguous()
        self._channel.send(tensor.cpu())

    def receive(self, tensor: Tensor) -> None:
        assert tensor.device == self._device, f"a channel of {self._device} got a tensor on {tensor.device}"
        received = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        self._channel.receive(received)
        tensor.copy_(received)

    def close(self) -> None:
        self._channel.close()


class GpuWorld(World):
    def __init__(self, worlds: ThreadWorlds, layout: RankLayout, rank: int, device: torch.device) -> None:
        super().__init__(layout, rank)
        self._worlds, self._device, self._of_threads = worlds, device, worlds.of(rank)

    def collectives(self, name: str) -> Collectives:
        barrier = self._worlds.barrier(self.pp_rank, name)
        return GpuCollectives(self.layout.tensor_parallel_size, self.tp_rank, barrier, self._device)

    def channel(self, peer: int, name: str) -> Channel:
        return CheckedChannel(self._of_threads.channel(peer, name), torch.device("cpu"))

    def device_channel(self, peer: int, name: str) -> Channel:
        return CheckedChannel(self._of_threads.channel(peer, f"device {name}"), self._device)

    def close(self, reason: str) -> None:
        self._of_threads.close(reason)


def install_gpus(monkeypatch: pytest.MonkeyPatch, num_gpus: int) -> list[FakeGpu]:
    """Engines find so many GPUs, and their ranks find worlds between GPUs. Rank i is on GPU i."""
    gpus = [FakeGpu(eager=True, torch_device=gpu(index)) for index in range(num_gpus)]
    install(monkeypatch, gpus[0])
    of_thread = threading.local()

    def get_device(kind: str, index: int) -> Device:
        of_thread.gpu = gpus[index]
        return gpus[index]

    def get_backend(*_: object, **__: object) -> AttentionBackend:
        return triton_backend(of_thread.gpu.torch_device)

    def join_world(config: EngineConfig, rank: int, rendezvous: object, device: Device) -> World:
        assert isinstance(rendezvous, ThreadWorlds)
        return GpuWorld(rendezvous, config.parallel.layout, rank, device.torch_device)

    monkeypatch.setattr("inflight.worker.worker.get_device", get_device)
    monkeypatch.setattr("inflight.worker.worker.get_backend", get_backend)
    monkeypatch.setattr("inflight.worker.worker.join_world", join_world)
    monkeypatch.setitem(processors.CHUNK_ELEMENTS, DEVICE_TYPE, processors.CHUNK_ELEMENTS["cuda"])
    return gpus
