"""Several replicas of the engine: which one gets a request. What caches count for is in test_replica_caches.py."""

from __future__ import annotations

import random

import pytest

from inflight.engine.serving.admission import QueueLimits
from inflight.engine.serving.output_lengths import FIRST_LENGTH as W
from inflight.errors import InvalidRequestError, OverloadedError
from inflight.interface.statistics import FaultStatus
from tests.support.refusals import refused
from tests.unit.engine.request.output_cases import request
from tests.unit.engine.serving.event_loop import run
from tests.unit.engine.serving.lone_front_end import DRAWN, front_end_of, names, report, taken


def test_a_burst_is_divided_by_the_tokens_of_its_prompts() -> None:
    async def test() -> None:
        engine, clients = front_end_of(4, max_num_seqs=256)
        draws = random.Random(1)
        for i in range(512):
            engine.submit(request(str(i), [97] * round(10 * 40 ** draws.random())))
        loads = [client.admission.load for client in clients]
        assert max(loads) < 1.02 * sum(loads) / 4
        for client in clients:
            client._finish("gone")

    run(test)


def test_the_newest_report_and_what_was_sent_after_it_are_counted() -> None:
    async def test() -> None:
        engine, (first, second) = front_end_of(2)
        report(first, 0, num_running=3, num_running_tokens=203)
        report(second, 0, num_running=30, num_running_tokens=30, num_waiting=2, num_waiting_tokens=100)
        assert (first.admission.load, second.admission.load) == (203 + 3 * W, 130 + 32 * W)
        report(second, 0, num_running=2, num_running_tokens=3, num_waiting=1, num_waiting_tokens=100)
        assert (first.admission.load, second.admission.load) == (203 + 3 * W, 103 + 3 * W)
        engine.submit(request("a", [97] * 80))
        assert (names(first), names(second)) == ([], ["a"])
        assert second.admission.load == 183 + 3 * W + DRAWN
        engine.submit(request("b", [97] * 50, n=3))  # its sequences stay together
        assert (names(first), names(second)) == (["0_b", "1_b", "2_b"], [])
        report(second, 1, num_running=1, num_running_tokens=1)
        assert (first.admission.load, second.admission.load) == (253 + 3 * W + 3 * DRAWN, 1 + W)
        report(second, 0, num_running=1, num_running_tokens=1)
        assert [client.num_requests for client in (first, second)] == [1, 1]
        first._finish("gone")
        second._finish("gone")

    run(test)


def test_requests_are_refused_only_if_every_queue_is_full() -> None:
    async def test() -> None:
        engine, clients = front_end_of(2, 1, QueueLimits(max_queued_requests=1))
        for i in range(4):  # one runs and one waits at each
            engine.check_admission()
            engine.submit(request(str(i)))
        assert sorted(len(taken(client)) for client in clients) == [2, 2]
        for refuse in (engine.check_admission, lambda: engine.submit(request("more"))):
            with pytest.raises(OverloadedError, match="at most 1 may wait"):
                refuse()
        with pytest.raises(InvalidRequestError, match=r"3 sequences .* at most 2 are allowed"):
            engine.submit(request("wide", n=3))
        with refused("", "3 sequences", "at most 2"):
            engine.check_admission(5)
        report(clients[1], 2)
        with pytest.raises(OverloadedError):
            engine.submit_all([request(str(i)) for i in range(10, 13)])  # there is room for two
        assert len(engine._requests) == 4  # none was started
        engine.submit_all([request(str(i)) for i in range(10, 12)])
        assert (names(clients[0]), names(clients[1])) == ([], ["10", "11"])
        for client in clients:
            client._finish("gone")

    run(test)


def test_prompts_of_one_call_are_divided() -> None:
    async def test() -> None:
        engine, clients = front_end_of(2)
        engine.submit_all([request(str(i), [97] * (10 + i)) for i in range(20)])
        assert [len(taken(client)) for client in clients] == [10, 10]
        for client in clients:
            client._finish("gone")

    run(test)


def test_a_client_may_choose_the_replica() -> None:
    async def test() -> None:
        engine, (first, second) = front_end_of(2)
        for name in "abc":
            engine.submit_all([request(name)], data_parallel_rank=1)
        assert (names(first), names(second)) == ([], ["a", "b", "c"])
        for wrong in (2, -1):
            with refused("data_parallel_rank", "0 to 1"):
                engine.submit_all([request("d")], data_parallel_rank=wrong)
        second._lose("gone")
        assert names(first) == ["a", "b", "c"]
        engine.submit_all([request("d")], data_parallel_rank=1)
        assert names(first) == ["d"]
        first._finish("gone")
        second._finish("gone")

    run(test)


def test_a_replica_whose_ranks_recover_gets_nothing_new() -> None:
    """Its engine's process lives, and its own requests wait there."""

    async def test() -> None:
        engine, (first, second) = front_end_of(2)
        stay = engine.submit_all([request("stay")], data_parallel_rank=0)
        first.take_faults(FaultStatus(state="recovering"))
        for name in "abc":
            engine.submit_all([request(name)], data_parallel_rank=0)
        assert (names(first), names(second)) == (["stay"], ["a", "b", "c"])
        second.take_faults(FaultStatus(state="recovering"))
        engine.submit_all([request("d")], data_parallel_rank=0)
        assert names(first) == ["d"], "if all recover, requests wait at the one that was asked for"
        first.take_faults(FaultStatus())
        engine.submit_all([request("e")], data_parallel_rank=1)
        assert names(first) == ["e"] and len(stay) == 1
        first._finish("gone")
        second._finish("gone")

    run(test)
