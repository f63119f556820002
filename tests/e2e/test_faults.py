"""Faults of every process of a server under load: no request is lost, and every answer is that of a run without faults.

`make test` lets every fault happen once. `make test-full` lets each happen 20 times among 800 requests, with every way of
splitting a model, and oversubscribes the cores for half an hour.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from benchmarks.robustness.fault_chaos import MAX_BURST
from benchmarks.robustness.fault_injection import FAULTS, Fault
from benchmarks.robustness.fault_load import Load, Outcome
from benchmarks.robustness.fault_requests import LoadRequest
from benchmarks.robustness.fault_server import FaultServer
from benchmarks.robustness.faults import Plan, Result, run, run_chaos
from benchmarks.shared.served_process import ServedProcess
from tests.e2e.faulty_executor import UNLUCKY
from tests.e2e.faulty_executor import __name__ as faulty
from tests.support.python_process import PythonProcess

FULL = os.environ.get("INFLIGHT_TEST_FULL") == "1"
SMALL_CACHE = ("--kv-cache-memory-bytes", "16M")
TWO_RANKS = ("--tensor-parallel-size", "2", *SMALL_CACHE)
DRAFTS = ("--speculative-config", json.dumps({"method": "ngram", "num_speculative_tokens": 3}))
LAYOUTS = {
    "tp2": ("-tp", "2"),
    "pp2": ("-pp", "2"),
    "pp2, depth 3": ("-pp", "2", "--pipeline-stagger", "2", "--pipeline-depth", "3"),
    "tp2 and pp2": ("-tp", "2", "-pp", "2"),
    "tp2, drafts": ("-tp", "2", *DRAFTS),
}
RANK_FAULTS = [Fault(kind) for kind in FAULTS]
PROCESS_FAULTS = [
    Fault("sigkill", "engine"),
    Fault("sigkill", "front-end"),
    Fault("sigkill", "spare"),
    Fault("sigstop", "engine"),
    Fault("sigstop", "front-end"),
    Fault("sigstop", "spare"),
]
FRONT_ENDS_AND_SPARE = (
    "--api-server-count",
    "2",
    "--fault-tolerance-config",
    '{"max_recoveries": 1000, "spare_workers": 1}',
)
STREAM = {"max_tokens": 100, "ignore_eos": True, "temperature": 0.0, "stream": True, "return_token_ids": True}


@pytest.fixture(autouse=True)
def _forked_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's processes share their imports, except with `make test-full`: there they start as users' processes do."""
    if not FULL:
        monkeypatch.setattr(ServedProcess, "popen", PythonProcess)


def assert_nothing_lost(plan: Plan) -> Result:
    result = run(plan)
    assert not (problems := result.problems(plan)), "\n".join([*problems, result.log[-20_000:]])
    assert len(result.injected) == len(plan.faults)
    return result


def short(faults: list[Fault], options: tuple[str, ...]) -> Plan:
    shuffled = random.Random(1).sample(faults, len(faults))
    return Plan(
        faults=shuffled,
        options=[*options, *SMALL_CACHE],
        num_clients=4,
        num_requests=16,
        max_tokens=32,
        steady_tokens=0,
    )


def long(fault: Fault, options: tuple[str, ...]) -> Plan:
    return Plan(faults=[fault] * 20, options=[*options, *SMALL_CACHE], steady_tokens=0)


def test_every_fault_of_a_rank() -> None:
    result = assert_nothing_lost(short(RANK_FAULTS, LAYOUTS["tp2"]))
    assert sum(result.num_recoveries.values()) >= len(RANK_FAULTS)
    assert set(result.num_recoveries) == {"rank_died", "rank_hung", "step_failed"}


def test_every_fault_of_the_other_processes() -> None:
    result = assert_nothing_lost(short(PROCESS_FAULTS, (*FRONT_ENDS_AND_SPARE, *LAYOUTS["tp2"])))
    assert {"engine_died", "front_end_died"} <= set(result.num_recoveries)


@pytest.mark.full
@pytest.mark.parametrize("fault", RANK_FAULTS, ids=lambda fault: fault.name)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_fault_of_a_rank_twenty_times(fault: Fault, layout: str) -> None:
    result = assert_nothing_lost(long(fault, LAYOUTS[layout]))
    assert sum(result.num_recoveries.values()) >= 20


@pytest.mark.full
@pytest.mark.parametrize("fault", PROCESS_FAULTS, ids=lambda fault: fault.name)
def test_a_fault_of_another_process_twenty_times(fault: Fault) -> None:
    assert_nothing_lost(long(fault, (*FRONT_ENDS_AND_SPARE, *LAYOUTS["tp2"])))


@pytest.mark.full
@pytest.mark.parametrize(
    "options", [(*LAYOUTS["tp2"], "--api-server-count", "2"), (*LAYOUTS["pp2"], *DRAFTS)], ids=["tp2", "pp2"]
)
def test_any_process_at_any_moment(options: tuple[str, ...]) -> None:
    plan = Plan(
        faults=(),
        options=[*options, *SMALL_CACHE],
        num_clients=4,
        num_requests=16,
        max_tokens=48,
        is_chaos=True,
        seconds=60.0,
    )
    result, chaos = run_chaos(plan)
    problems = [*result.problems(plan), *chaos.problems]
    assert not problems, "\n".join([*problems, result.log[-20_000:]])
    assert sum(chaos.counts.values()) > MAX_BURST  # more than in the start


def test_no_rank_is_killed_because_the_cores_are_busy() -> None:
    """`Result.problems` says so if the server has counted a recovery."""
    plan = Plan(
        faults=[],
        options=[*LAYOUTS["tp2"], *SMALL_CACHE],
        num_clients=4,
        num_requests=100 if FULL else 2,
        max_tokens=32,
        steady_tokens=0,
        oversubscribe=4 if FULL else 2,  # in `make test` there are the processes of other tests, too
        seconds=1800.0 if FULL else 1.0,
    )
    assert_nothing_lost(plan)


# -- single requests -------------------------------------------------------------------------------------------------


def complete(server: FaultServer, first_token: int, **fields: object) -> Outcome:
    """Send one request, and return what became of it."""
    body = {**STREAM, "prompt": [first_token, 4, 5], **fields}
    (outcome,) = Load(server.address, [[LoadRequest("single", "/v1/completions", body)]]).run()
    return outcome


def test_a_poisoned_request_fails_alone(tmp_path: Path) -> None:
    """Each step with this request fails. It ends with status 500, and all others get the tokens that they get without it."""
    arguments = [*TWO_RANKS, "--distributed-executor-backend", f"{faulty}:FaultyExecutor"]
    with FaultServer({"dtype": "float32"}, arguments=arguments) as server:
        prompts = [[first, 4, 5] for first in (3, 7, 8)]
        requests = [[LoadRequest(f"{prompt}", "/v1/completions", {**STREAM, "prompt": prompt})] for prompt in prompts]
        truth = {outcome.request.name: outcome.choices for outcome in Load(server.address, requests).run()}
        poisoned = LoadRequest("poisoned", "/v1/completions", {**STREAM, "prompt": [UNLUCKY, 4, 5], "stream": False})
        outcomes = {outcome.request.name: outcome for outcome in Load(server.address, [*requests, [poisoned]]).run()}
        assert "status 500" in outcomes.pop("poisoned").error
        assert {name: outcome.choices for name, outcome in outcomes.items()} == truth
        assert server.wait_until_recovered(300)
        assert complete(server, 3).choices == truth["[3, 4, 5]"]
        assert set(server.num_recoveries()) == {"step_failed"}


def test_when_no_recovery_is_left_the_server_fails_with_exit_code_1() -> None:
    config = ["--fault-tolerance-config", '{"max_recoveries": 1}']
    with FaultServer({"dtype": "float32"}, arguments=[*TWO_RANKS, *config]) as server:
        _kill_a_rank(server)
        assert server.wait_until_recovered(300)
        assert complete(server, 3).choices is not None
        _kill_a_rank(server)
        end = time.monotonic() + 300
        while not server.has_ended and time.monotonic() < end:
            with contextlib.suppress(AssertionError):
                assert complete(server, 3, max_tokens=1).choices is None
        assert server.has_ended
    assert server.exit_code == 1, server.text_of_log()


def _kill_a_rank(server: FaultServer) -> None:
    os.kill(next(pid for pid, title in server.titles().items() if title.startswith("worker tp")), signal.SIGKILL)
