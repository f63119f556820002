"""A broken link between two machines, which comes back after a while: no request is lost, and no answer differs.

Either the ranks of an engine are on both machines, or each has a replica."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import threading
import time
from collections.abc import Iterator

import pytest

from benchmarks.robustness.fault_load import Load
from benchmarks.robustness.fault_requests import draw_requests
from benchmarks.robustness.fault_server import FaultServer
from benchmarks.robustness.faults import Result, compare, truth_of
from benchmarks.shared.report import emit
from tests.e2e.two_machines import TwoMachines, two_machines, why_not

FULL = os.environ.get("INFLIGHT_TEST_FULL") == "1"
CUT_SECONDS = 10.0
MAX_RECOVERY_SECONDS = 300.0
SILENCE_SECONDS = 300.0  # a link may be silent for 15 s; the kernel alone would wait for a quarter of an hour
CUTS = ("link down", "blackhole from a", "blackhole from b")

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.fixture(scope="module")
def machines() -> Iterator[TwoMachines]:
    config = '{"max_recoveries": 1000}'
    with two_machines("--kv-cache-memory-bytes", "16M", "--fault-tolerance-config", config) as made:
        yield made


# without "full": the cut that neither machine is told of, and in which one machine still hears the other
@pytest.mark.parametrize("cut", [CUTS[2], *(pytest.param(cut, marks=pytest.mark.full) for cut in CUTS[:2])])
def test_a_link_that_comes_back(machines: TwoMachines, cut: str) -> None:
    server = machines.server
    requests = draw_requests(5, 4, 50 if FULL else 12, 32)
    result = Result(server.cold_start_seconds)
    truth = truth_of(Load(server.address, requests), result)
    before = sum(server.num_recoveries().values())
    load = Load(server.address, requests)
    runner = threading.Thread(target=load.run)
    runner.start()
    while len(load.outcomes) < len(requests):  # the load is under way
        time.sleep(0.01)
    with machines.link_down() if cut == "link down" else machines.blackhole(cut[-1]):
        time.sleep(CUT_SECONDS)
    runner.join()
    compare(truth, load.outcomes, result)
    assert [(outcome.request.name, outcome.error) for outcome in result.lost] == [], server.text_of_log()[-20_000:]
    assert result.differences == []
    assert server.wait_until_recovered(MAX_RECOVERY_SECONDS)
    emit(
        benchmark="cut link", cut=cut, requests=len(result.outcomes), longest_silence_seconds=round(result.longest_silence, 2),
        recoveries=server.num_recoveries(), cold_start_seconds=round(result.cold_start_seconds, 2),
    )  # fmt: skip
    # the cut was felt: streams waited for it, or the ranks began anew
    assert result.longest_silence > CUT_SECONDS / 2 or sum(server.num_recoveries().values()) > before
    assert machines.worker.poll() is None


@pytest.fixture(scope="module")
def machines_with_replicas() -> Iterator[TwoMachines]:
    with two_machines("--kv-cache-memory-bytes", "16M", replicas=True) as made:
        yield made


def engines_of(server: FaultServer) -> dict[str, str]:
    with contextlib.closing(http.client.HTTPConnection(*server.address, timeout=300)) as connection:
        connection.request("GET", "/ready")
        found: dict[str, str] = json.loads(connection.getresponse().read())["engines"]
        return found


@pytest.mark.parametrize("cut", [CUTS[1], *(pytest.param(cut, marks=pytest.mark.full) for cut in (CUTS[0], CUTS[2]))])
def test_a_replica_whose_link_comes_back(machines_with_replicas: TwoMachines, cut: str) -> None:
    machines, server = machines_with_replicas, machines_with_replicas.server
    requests = draw_requests(5, 4, 50 if FULL else 12, 32)
    result = Result(server.cold_start_seconds)
    truth = truth_of(Load(server.address, requests), result)
    load = Load(server.address, requests)
    runner = threading.Thread(target=load.run)
    runner.start()
    while len(load.outcomes) < len(requests):  # the load is under way
        time.sleep(0.01)
    with machines.link_down() if cut == "link down" else machines.blackhole(cut[-1]):
        end = time.monotonic() + SILENCE_SECONDS
        runner.join()  # the other replica goes on with all of them
        while engines_of(server) != {"0": "ready", "1": "recovering"}:
            assert time.monotonic() < end, server.text_of_log()[-5000:]
            time.sleep(0.1)
    compare(truth, load.outcomes, result)
    assert [(outcome.request.name, outcome.error) for outcome in result.lost] == [], server.text_of_log()[-20_000:]
    assert result.differences == []
    end = time.monotonic() + MAX_RECOVERY_SECONDS
    while engines_of(server) != {"0": "ready", "1": "ready"}:
        assert time.monotonic() < end, server.text_of_log()[-5000:]
        time.sleep(0.1)
    emit(
        benchmark="cut link to a replica", cut=cut, requests=len(result.outcomes),
        longest_silence_seconds=round(result.longest_silence, 2),
    )  # fmt: skip
    assert machines.worker.poll() is None
