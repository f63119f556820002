"""Times of a request, and what an output says if nothing else is known."""

from __future__ import annotations

from inflight.errors import ErrorKind
from inflight.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput


def test_the_time_to_the_first_token_begins_with_the_arrival() -> None:
    metrics = RequestMetrics(arrival_time=1.0, first_scheduled_time=2.5, first_token_time=4.25, finished_time=9.0)
    assert metrics.time_to_first_token == 3.25


def test_an_output_that_has_just_begun() -> None:
    completion = CompletionOutput(index=0, text="", token_ids=[])
    assert (completion.finish_reason, completion.stop_reason, completion.events) == (None, None, None)
    assert (completion.cumulative_logprob, completion.logprobs, completion.num_reasoning_tokens) == (None, None, 0)
    output = RequestOutput(request_id="a", prompt=None, prompt_token_ids=[1], outputs=[completion])
    assert not output.finished and output.num_cached_tokens == 0
    assert (output.error, output.error_kind, output.metrics) == ("", ErrorKind.REQUEST, None)
    assert Logprob(-0.5, 1).decoded_token is None
