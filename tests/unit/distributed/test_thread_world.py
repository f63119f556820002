"""Ranks that are threads: collectives, channels, and the end of both."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from inflight.config.ranks import RankLayout
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.distributed.thread_world import ThreadWorlds
from inflight.errors import ConfigError


def on_all(worlds: ThreadWorlds, work: Callable[[TensorParallelGroup], torch.Tensor]) -> list[torch.Tensor]:
    size = worlds.layout.tensor_parallel_size
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(worlds.of(rank).tensor_parallel_group("model")), range(size)))


def test_collectives() -> None:
    worlds = ThreadWorlds(RankLayout(3, 1), timeout_seconds=300)
    assert [x.tolist() for x in on_all(worlds, lambda group: group.all_reduce(torch.tensor([group.rank, 1.0])))] == [
        [3.0, 3.0]
    ] * 3
    columns = on_all(worlds, lambda group: group.all_gather(torch.full((2, 1), group.rank)))
    assert all(x.tolist() == [[0, 1, 2], [0, 1, 2]] for x in columns)
    rows = on_all(worlds, lambda group: group.all_gather(torch.full((1, 2), group.rank), dim=0))
    assert all(x.tolist() == [[0, 0], [1, 1], [2, 2]] for x in rows)
    assert [int(x) for x in on_all(worlds, lambda group: group.broadcast(torch.tensor(7 + group.rank)))] == [7, 7, 7]


def test_a_rank_may_change_its_tensor_as_soon_as_the_collective_returns() -> None:
    worlds = ThreadWorlds(RankLayout(2, 1), timeout_seconds=300)

    def many(group: TensorParallelGroup) -> torch.Tensor:
        x = torch.zeros(20_000)
        for i in range(50):
            x.fill_(i + group.rank)
            assert torch.equal(group.broadcast(x), torch.full_like(x, i))
            assert torch.equal(group.all_reduce(x.fill_(i)), torch.full_like(x, 2 * i))
        return x

    on_all(worlds, many)


def test_what_was_sent_may_be_changed() -> None:
    worlds = ThreadWorlds(RankLayout(1, 2), timeout_seconds=300)
    sender, receiver = worlds.of(0).channel(1, "x"), worlds.of(1).channel(0, "x")
    tensor = torch.tensor([1.0])
    sender.send(tensor)
    tensor.fill_(2.0)
    received = torch.empty(1)
    receiver.receive(received)
    assert float(received) == 1.0


def test_channels_are_told_apart_by_name_and_direction() -> None:
    worlds = ThreadWorlds(RankLayout(1, 2), timeout_seconds=300)
    first, second = worlds.of(0), worlds.of(1)
    for value, (sender, peer, name) in enumerate(((first, 1, "x"), (first, 1, "y"), (second, 0, "x"))):
        sender.channel(peer, name).send(torch.tensor([value]))
    received = torch.empty(1, dtype=torch.int64)
    for value, (receiver, peer, name) in ((1, (second, 0, "y")), (2, (first, 1, "x")), (0, (second, 0, "x"))):
        receiver.channel(peer, name).receive(received)
        assert int(received) == value


def test_a_rank_that_leaves_is_missed_by_all_now_and_later() -> None:
    worlds = ThreadWorlds(RankLayout(2, 2), timeout_seconds=300)
    group, channel = worlds.of(0).tensor_parallel_group("model"), worlds.of(0).channel(2, "x")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(group.all_reduce, torch.zeros(1))
        worlds.of(3).close("it failed")
        with pytest.raises(ConnectionError, match="rank 3 has left: it failed"):
            waiting.result(timeout=300)
    for work in (
        lambda: group.broadcast(torch.zeros(1)),
        lambda: channel.send(torch.zeros(1)),
        lambda: channel.receive(torch.zeros(1)),
        lambda: worlds.of(1).tensor_parallel_group("model"),
        lambda: worlds.of(1).channel(0, "x"),
    ):
        with pytest.raises(ConnectionError, match="rank 3 has left: it failed"):
            work()


def test_a_rank_that_stays_away() -> None:
    worlds = ThreadWorlds(RankLayout(2, 1), timeout_seconds=0.05)
    with pytest.raises(ConnectionError, match="did not come to the barrier in time"):
        worlds.of(0).tensor_parallel_group("model").all_reduce(torch.zeros(1))


def test_threads_have_no_gpu_of_their_own() -> None:
    worlds = ThreadWorlds(RankLayout(1, 2), timeout_seconds=300)
    with pytest.raises(ConfigError, match="distributed_executor_backend='mp'"):
        worlds.of(0).device_channel(1, "activations")
