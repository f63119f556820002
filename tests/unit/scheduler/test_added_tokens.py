"""What a commit tells the front end of one request, whatever the others in its step want."""

from __future__ import annotations

import numpy as np
import pytest

from inflight.engine.outbox import merge_outputs
from inflight.interface.request import EngineCoreRequest, FinishReason, LogprobsColumns, ResolvedSampling
from inflight.kv_cache.manager import RequestBlocks
from inflight.sampling_params import SamplingParams, StructuredOutputsParams
from inflight.scheduler.added_tokens import (
    MAX_FORCED_TOKENS,
    AddedTokens,
    SampledRow,
    StepCounters,
    add_tokens,
    make_output,
)
from inflight.scheduler.request import Request


@pytest.mark.parametrize("num_logprobs", [0, 2])
def test_a_sequence_has_as_many_logprobs_as_it_asked_for_whoever_is_in_its_steps(num_logprobs: int) -> None:
    sampling = ResolvedSampling(params=SamplingParams(logprobs=num_logprobs), seed=0, max_tokens=9)
    core = EngineCoreRequest(
        request_id="a", prompt_token_ids=np.array([1], np.int32), sampling=sampling, arrival_time=0.0
    )
    request = Request(core, order=0, blocks=RequestBlocks(([],), b""), max_model_len=64)
    pieces = []
    for position, width in enumerate((1 + num_logprobs, 21, 6), 1):  # others with 20, then with 5, are in the step
        columns = LogprobsColumns(
            token_ids=np.arange(width, dtype=np.int32)[None] + 100 * position,
            logprobs=np.zeros((1, width), np.float32),
            ranks=np.ones(1, np.int32),
        )
        pieces.append(make_output(request, AddedTokens((7,), None, ""), SampledRow(position, [7], columns, [])))
    merged = merge_outputs(pieces).logprobs
    assert merged is not None
    assert merged.token_ids.tolist() == [[100 * p + i for i in range(1 + num_logprobs)] for p in (1, 2, 3)]
    assert merged.logprobs.shape == merged.token_ids.shape


class _Endless:
    """A grammar that forces every token. It is also the manager and the grammars of the scheduler."""

    def __init__(self) -> None:
        self.manager = self

    def advance(self, request_id: str, token_id: int) -> str:
        return ""

    def has_ended(self, request_id: str) -> bool:
        return False

    def forced_tokens(self, request_id: str, limit: int) -> list[int]:
        return [3] * limit


def test_one_commit_adds_a_limited_number_of_forced_tokens() -> None:
    """A constant of 20,000 characters in a schema must not stop the engine while its tokens are found."""
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="3*"))
    sampling = ResolvedSampling(params=params, seed=0, max_tokens=40)
    core = EngineCoreRequest(
        request_id="a", prompt_token_ids=np.array([1], np.int32), sampling=sampling, arrival_time=0.0
    )
    request = Request(core, order=0, blocks=RequestBlocks(([],), b""), max_model_len=64)
    sizes = []
    while request.num_output_tokens < 40:
        drawn = SampledRow(request.num_tokens, [3], None, [])
        added = add_tokens(request, drawn, _Endless(), StepCounters())  # type: ignore[arg-type]
        sizes.append(len(added.token_ids))
    assert sizes == [1 + MAX_FORCED_TOKENS, 1 + MAX_FORCED_TOKENS, 40 - 2 - 2 * MAX_FORCED_TOKENS]
    assert added.finish_reason is FinishReason.LENGTH
