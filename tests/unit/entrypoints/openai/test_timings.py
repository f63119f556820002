"""The timings of a chat's stream: llama.cpp's names, the counts of the usage, and figures that fit each other."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from inflight.entrypoints.openai.timings import Timer
from inflight.outputs import CompletionOutput, RequestMetrics, RequestOutput
from tests.unit.entrypoints.api_client import SETTINGS, serving

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}
# of llama.cpp's server, tools/server/README.md
NAMES = {
    *("cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second"),
    *("predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second"),
}


@pytest.mark.parametrize("each", [False, True])
def test_the_last_chunk_has_timings_and_others_if_they_are_asked_for(each: bool) -> None:
    with serving(replace(SETTINGS)) as api:
        answer = api.post(
            "/v1/chat/completions", {**CHAT, "timings_per_token": each, "stream_options": {"include_usage": True}}
        )
        *chunks, usage = answer.events[:-1] if answer.events[-1] == "[DONE]" else answer.events
        timed = [chunk["timings"] for chunk in chunks if "timings" in chunk]
        assert "timings" in chunks[-1] and "timings" not in usage
        assert len(timed) == len(chunks) if each else len(timed) < len(chunks)
        assert all(timings.keys() == NAMES for timings in timed)
        counts = [timings["predicted_n"] for timings in timed]
        assert counts == sorted(counts) and counts[-1] == usage["usage"]["completion_tokens"]
        assert timed[-1]["cache_n"] + timed[-1]["prompt_n"] == usage["usage"]["prompt_tokens"]


def output(metrics: RequestMetrics | None, num_cached: int = 4) -> RequestOutput:
    completion = CompletionOutput(index=0, text="x", token_ids=[1], finish_reason=metrics and "stop")
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=list(range(14)),
        outputs=[completion],
        finished=metrics is not None,
        num_cached_tokens=num_cached,
        metrics=metrics,
    )


def test_the_last_timings_are_the_engines_own() -> None:
    metrics = RequestMetrics(arrival_time=1.0, first_scheduled_time=2.0, first_token_time=2.5, finished_time=4.5)
    timings = Timer().of_output(output(metrics), completion_tokens=8)
    assert timings == {
        "cache_n": 4,
        "prompt_n": 10,
        "prompt_ms": 500,
        "prompt_per_token_ms": 50,
        "prompt_per_second": 20,
        "predicted_n": 8,
        "predicted_ms": 2000,
        "predicted_per_token_ms": 250,
        "predicted_per_second": 4,
    }


def test_nothing_is_infinite() -> None:
    metrics = RequestMetrics(arrival_time=1.0, first_scheduled_time=1.0, first_token_time=1.0, finished_time=1.0)
    for each in (Timer().of_output(output(metrics, 14), 1), Timer().of_output(output(None, 14), 0)):
        assert all(math.isfinite(value) and value >= 0 for value in each.values())  # type: ignore[arg-type]
