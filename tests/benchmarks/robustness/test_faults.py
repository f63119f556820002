"""`benchmarks.faults`: its load is the same each time, a stream equals an answer in one piece, and what differs is found."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from benchmarks.robustness.fault_load import Outcome
from benchmarks.robustness.fault_requests import KINDS, BadAnswer, LoadRequest, difference, draw_requests, read_answer
from benchmarks.robustness.faults import Fault, Injected, Plan, Result, memory_growth

CALL = {"index": 0, "function": {"name": "get_weather", "arguments": '{"city": '}}
EVENTS: list[dict[str, Any]] = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": [CALL]}, "token_ids": [5, 6], "finish_reason": None}]},
    {
        "choices": [
            {
                "index": 0,
                "delta": {"tool_calls": [{"index": 0, "function": {"arguments": '"Oslo"}'}}], "content": "!"},
                "token_ids": [7],
                "finish_reason": "tool_calls",
            }
        ]
    },
]
WHOLE: dict[str, Any] = {
    "choices": [
        {
            "index": 0,
            "message": {
                "content": "!",
                "tool_calls": [{"function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}],
            },
            "token_ids": [5, 6, 7],
            "finish_reason": "tool_calls",
        }
    ]
}
SCORED: dict[str, Any] = {
    "choices": [
        {
            "index": 0,
            "text": "ab",
            "token_ids": [1, 2],
            "logprobs": {"tokens": ["a", "b"], "token_logprobs": [-0.5, -1.0]},
            "finish_reason": "length",
        }
    ]
}


def test_requests_are_the_same_each_time_and_of_all_kinds() -> None:
    requests = draw_requests(3, 8, 100, 64)
    assert requests == draw_requests(3, 8, 100, 64) != draw_requests(4, 8, 100, 64)
    every = [request for each in requests for request in each]
    assert len({request.name for request in every}) == 800
    for kind in KINDS:
        of_kind = [request for request in every if f"({kind})" in request.name]
        assert len(of_kind) == 100
        assert 30 < sum(request.is_stream for request in of_kind) < 70
    assert all("seed" in request.body for request in every if request.body["temperature"])


def test_a_stream_equals_an_answer_in_one_piece() -> None:
    stream, whole = read_answer(EVENTS), read_answer([WHOLE])
    assert difference(stream, whole) == ""
    assert stream[0].tool_calls == {0: ("get_weather", '{"city": "Oslo"}')}


@pytest.mark.parametrize("change", ["token", "text", "logprob", "choice"])
def test_what_differs_is_found(change: str) -> None:
    truth, found = read_answer([SCORED]), read_answer([copy.deepcopy(SCORED)])
    assert difference(truth, found) == ""
    match change:
        case "token":
            found[0].token_ids[1] = 3
        case "text":
            found[0].text = "aB"
        case "logprob":
            found[0].logprobs[1] = ("b", -1.01)
        case "choice":
            found.append(found[0])
    assert difference(truth, found) != ""


def test_an_answer_that_is_not_complete_is_refused() -> None:
    with pytest.raises(BadAnswer, match="no such model"):
        read_answer([{"error": {"message": "no such model"}}])
    with pytest.raises(BadAnswer, match="without a finish reason"):
        read_answer(EVENTS[:2])
    with pytest.raises(BadAnswer, match="without a finish reason"):
        read_answer([])


def test_every_way_to_fail_is_a_problem() -> None:
    fault = Fault("sigkill")
    plan = Plan(faults=[fault])
    request = LoadRequest("client 0, request 0", "/v1/completions", {"stream": True})
    answered = Outcome(request, choices=read_answer([SCORED]))
    good = Result(
        1.0, outcomes=[answered], injected=[Injected(fault, ["rank 0"], 0.1, 0.2)], num_recoveries={"rank_died": 1}
    )
    assert good.problems(plan) == []
    assert "counted recoveries" in good.problems(Plan(faults=[]))[0]
    good.injected[0].recovered_seconds = None
    good.outcomes.append(Outcome(request, error="status 503"))
    good.differences.append("text of choice 0")
    good.not_injected.append("the load had ended")
    assert len(good.problems(plan)) == 4


def test_a_fault_that_only_ranks_can_have() -> None:
    with pytest.raises(SystemExit, match="hits ranks"):
        Fault("raise", "engine")


def test_growth_of_memory_is_measured_without_the_warm_up() -> None:
    assert memory_growth([10, 50, 100, 100, 100, 100, 101, 102]) == pytest.approx(1.015)
