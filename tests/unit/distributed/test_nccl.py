"""NCCL's groups and channels, with gloo in the place of its backend: what they ask of it, and how they end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from inflight.distributed.nccl import Communicator, NcclChannel, NcclCollectives, connect

T = TypeVar("T")


class GlooInItsPlace:
    """As ProcessGroupNCCL: collectives on the caller's stream, which return no work to wait for. `abort` comes back late."""

    class Options:
        def __init__(self) -> None:
            self._timeout = timedelta()
            self.config = SimpleNamespace(max_ctas=None)

    def __init__(self, store: c10d.Store, rank: int, size: int, options: Options) -> None:
        self.options, self.calls = options, 0
        self.aborted, self.graphs_are_gone = threading.Event(), threading.Event()
        gloo_class: Any = c10d.ProcessGroupGloo
        gloo = gloo_class._Options()
        gloo._timeout, gloo._threads = options._timeout, 1
        gloo._devices = [gloo_class.create_device(hostname="127.0.0.1")]
        self._gloo = gloo_class(store, rank, size, gloo)

    def allreduce(self, tensors: list[Tensor], options: Any) -> None:
        self._run(self._gloo.allreduce, tensors, options)

    def broadcast(self, tensors: list[Tensor], options: Any) -> None:
        self._run(self._gloo.broadcast, tensors, options)

    def _allgather_base(self, gathered: Tensor, x: Tensor, options: Any) -> None:
        self._run(self._gloo._allgather_base, gathered, x, options)

    def abort(self) -> None:
        self.aborted.set()
        self.graphs_are_gone.wait(300)
        raise RuntimeError("in vain")

    def _run(self, collective: Callable[..., Any], *arguments: Any) -> None:
        assert arguments[-1].asyncOp is False
        self.calls += 1
        collective(*arguments).wait()


@pytest.fixture(autouse=True)
def _gloo_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c10d, "ProcessGroupNCCL", GlooInItsPlace, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)


def on_all(size: int, work: Callable[[int, Communicator], T], max_ctas: int | None = None) -> list[T]:
    store = c10d.HashStore()

    def run(rank: int) -> T:
        communicator = connect(c10d.PrefixStore("x", store), rank, size, torch.device("cpu"), 10.0, max_ctas)
        assert communicator.backend.calls == 3  # what has been used once needs no setting up in a capture
        assert communicator.backend.options.config.max_ctas == max_ctas
        return work(rank, communicator)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def test_collectives() -> None:
    def work(rank: int, communicator: Communicator) -> list[Tensor]:
        group = NcclCollectives(3, rank, communicator)
        return [
            group.all_reduce(torch.tensor([[rank, 1.0], [2.0, 3.0]]).T),
            group.all_gather(torch.full((2, 1), rank)),
            group.all_gather(torch.full((1, 2), rank), dim=0),
            group.broadcast(torch.tensor(7 + rank)),
        ]

    for reduced, columns, rows, first in on_all(3, work):
        assert reduced.tolist() == [[3.0, 6.0], [3.0, 9.0]]
        assert columns.tolist() == [[0, 1, 2]] * 2
        assert rows.tolist() == [[0, 0], [1, 1], [2, 2]]
        assert int(first) == 7


@pytest.mark.parametrize("sender", [0, 1])
def test_a_channel_carries_what_is_sent(sender: int) -> None:
    def work(rank: int, communicator: Communicator) -> list[list[float]]:
        channel, seen = NcclChannel(communicator, rank), []
        for i in range(3):
            x = torch.full((2,), 10.0 * rank + i)
            (channel.send if rank == sender else channel.receive)(x)
            seen.append(x.tolist())
        return seen

    assert on_all(2, work, max_ctas=4) == [[[10.0 * sender + i] * 2 for i in range(3)]] * 2


def test_close_aborts_and_waits_for_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def work(rank: int, communicator: Communicator) -> None:
        backend, channel = communicator.backend, NcclChannel(communicator, rank)
        channel.close()
        channel.close()
        assert backend.aborted.wait(300)
        with pytest.raises(ConnectionError, match="this rank has stopped its communication"):
            channel.send(torch.zeros(1))
        with pytest.raises(ConnectionError, match="this rank has stopped its communication"):
            NcclCollectives(2, rank, communicator).all_reduce(torch.zeros(1))
        backend.graphs_are_gone.set()

    on_all(2, work)
    for thread in threading.enumerate():
        if thread.name == "inflight-abort":
            thread.join(300)
    assert caplog.messages == ["a communicator could not be aborted: in vain"] * 2
