"""How the ranks of several replicas meet, and how they leave each other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from inflight.config.expert_parallel import ExpertRoom
from inflight.distributed.replica_experts import ReplicaExperts
from inflight.distributed.shared_collectives import SharedCollectives
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.kernels.cpu.library import load_kernels
from tests.support.waits import wait_until

ROOM = ExpertRoom(hidden_size=8, choices_per_row=2)
TOKEN = bytes(32)


@pytest.fixture
def pair() -> Iterator[list[ReplicaExperts]]:
    found = [
        ReplicaExperts(TensorParallelGroup(), ROOM, num_replicas=2, replica=index, shares_memory=True)
        for index in range(2)
    ]
    for each in found:
        each.connect(None)
    yield found
    for each in found:
        each.leave()


def meet(pair: list[ReplicaExperts], tokens: tuple[bytes, bytes] = (TOKEN, TOKEN)) -> None:
    addresses = [each.listen() for each in pair]
    with ThreadPoolExecutor(2) as threads:
        done = [threads.submit(each.meet, token, addresses, 60.0) for each, token in zip(pair, tokens, strict=True)]
        for each in done:
            each.result()


def test_ranks_are_alone_until_they_meet_and_after_they_leave(pair: list[ReplicaExperts]) -> None:
    shares_memory = load_kernels() is not None

    def sizes() -> list[tuple[int, int]]:
        return [(each.collectives.size, each._num_replicas) for each in pair if each.collectives is not None]

    assert sizes() == [(1, 1)] * 2 and [(each.size, each.rank) for each in pair] == [(2, 0), (2, 1)]
    for _ in range(2):
        meet(pair)
        assert sizes() == [(2, 2)] * 2
        assert all((each.rows is not None) is shares_memory for each in pair)
        with pair[0].alone():
            assert sizes() == [(1, 1), (2, 2)]
        assert sizes() == [(2, 2)] * 2
        for each in pair:
            each.connect(None)
        assert sizes() == [(1, 1)] * 2


def test_alone_a_rank_waits_for_nobody(pair: list[ReplicaExperts]) -> None:
    alone = pair[0].collectives
    assert alone is not None and isinstance(alone, SharedCollectives) is (load_kernels() is not None)
    x = torch.arange(3.0)
    assert torch.equal(alone.all_reduce(x.clone()), x) and torch.equal(alone.all_gather(x, 0), x)
    assert torch.equal(alone.broadcast(x.clone()), x)


def test_leave_ends_the_wait_for_a_rank_that_does_not_come(pair: list[ReplicaExperts]) -> None:
    first = pair[0]
    addresses = [each.listen() for each in pair]
    with ThreadPoolExecutor(1) as threads:
        meeting = threads.submit(first.meet, TOKEN, addresses, 60.0)
        wait_until(lambda: bool(first._opened) and first._listener is None)
        first.leave()
        with pytest.raises(OSError, match=r"stopped|left|cannot reach"):
            meeting.result()
    with pytest.raises(ConnectionError):
        first.listen()
    first.connect(None)
    meet(pair)


def test_leave_ends_the_wait_in_a_collective(pair: list[ReplicaExperts]) -> None:
    meet(pair)
    together = pair[0].collectives
    assert together is not None
    ended: list[Exception] = []

    def wait() -> None:
        try:
            together.all_reduce(torch.zeros(3))
        except OSError as error:
            ended.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_until(lambda: pair[0].is_waiting)
    pair[1].leave()
    waiting.join(60.0)
    assert len(ended) == 1


def test_ranks_of_another_epoch_do_not_meet(pair: list[ReplicaExperts]) -> None:
    addresses = [each.listen() for each in pair]
    with ThreadPoolExecutor(2) as threads:
        tokens = (TOKEN, b"x" * 32)
        done = [threads.submit(each.meet, token, addresses, 1.0) for each, token in zip(pair, tokens, strict=True)]
        for each in done:
            with pytest.raises(OSError, match=r".+"):
                each.result()


def test_a_rank_that_does_not_listen_cannot_meet(pair: list[ReplicaExperts]) -> None:
    with pytest.raises(ConnectionError, match="does not listen"):
        pair[0].meet(TOKEN, [("127.0.0.1", 1)] * 2, 1.0)
