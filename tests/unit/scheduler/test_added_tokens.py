"""What a commit tells the front end of one request, whatever the others in its step want."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from inflight.engine.process.outbox import merge_outputs
from inflight.interface.request import EngineCoreRequest, FinishReason, LogprobsColumns, ResolvedSampling
from inflight.interface.statistics import StepCounts
from inflight.interface.step import ModelRunnerOutput
from inflight.kv_cache.request_blocks import RequestBlocks
from inflight.sampling_params import SamplingParams
from inflight.scheduler.added_tokens import (
    MAX_FORCED_TOKENS,
    AddedTokens,
    SampledRow,
    add_tokens,
    make_output,
    sampled_rows,
    take_back_rejected,
)
from inflight.scheduler.request import Request, RequestStatus
from inflight.structured_outputs_params import StructuredOutputsParams
from tests.support.plans import ints, step_plan


@pytest.mark.parametrize("num_logprobs", [0, 2])
def test_a_sequence_has_as_many_logprobs_as_it_asked_for_whoever_is_in_its_steps(num_logprobs: int) -> None:
    sampling = ResolvedSampling(params=SamplingParams(logprobs=num_logprobs), seed=0, max_tokens=9)
    core = EngineCoreRequest(request_id="a", sampling=sampling)
    request = Request(core, np.array([1], np.int32), order=0, blocks=RequestBlocks(([],), b""), max_model_len=64)
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

    def num_free(self, request_id: str) -> int:
        return 0

    def forced_tokens(self, request_id: str, limit: int) -> list[int]:
        return [3] * limit


def test_one_commit_adds_a_limited_number_of_forced_tokens() -> None:
    """A constant of 20,000 characters in a schema must not stop the engine while its tokens are found."""
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="3*"))
    sampling = ResolvedSampling(params=params, seed=0, max_tokens=40)
    core = EngineCoreRequest(request_id="a", sampling=sampling)
    request = Request(core, np.array([1], np.int32), order=0, blocks=RequestBlocks(([],), b""), max_model_len=64)
    sizes = []
    while request.num_output_tokens < 40:
        drawn = SampledRow(request.num_tokens, [3], None, [])
        added = add_tokens(request, drawn, _Endless(), StepCounts())  # type: ignore[arg-type]
        sizes.append(len(added.token_ids))
    assert sizes == [1 + MAX_FORCED_TOKENS, 1 + MAX_FORCED_TOKENS, 40 - 2 - 2 * MAX_FORCED_TOKENS]
    assert added.finish_reason is FinishReason.LENGTH


def make_request(params: SamplingParams, **resolved: Any) -> Request:
    sampling = ResolvedSampling(params=params, seed=0, max_tokens=40, **resolved)
    core = EngineCoreRequest(request_id="a", sampling=sampling)
    return Request(core, np.array([1], np.int32), order=0, blocks=RequestBlocks(([],), b""), max_model_len=64)


def add(request: Request, token_ids: list[int], stats: StepCounts, grammars: Any = None) -> AddedTokens:
    return add_tokens(request, SampledRow(request.num_tokens, token_ids, None, []), grammars, stats)


@pytest.mark.parametrize(("min_tokens", "num_added"), [(0, 1), (1, 1), (2, 2), (3, 3)])
def test_a_stop_token_ends_a_request_that_has_its_least_tokens(min_tokens: int, num_added: int) -> None:
    """The stop token itself counts. Tokens after it are dropped."""
    request, stats = make_request(SamplingParams(min_tokens=min_tokens), stop_token_ids=frozenset({7})), StepCounts()
    added = add(request, [7, 7, 7, 8], stats)
    assert (added.token_ids, added.finish_reason) == ((7,) * num_added, FinishReason.STOP)
    assert stats.num_sampled_tokens == request.num_output_tokens == num_added


def test_the_stop_reason_is_a_token_that_the_user_has_named() -> None:
    for token_id, stop_reason in ((7, 7), (2, None)):  # 2 is EOS, which ends every text
        request = make_request(SamplingParams(), stop_token_ids=frozenset({7, 2}), eos_token_ids=frozenset({2}))
        output = make_output(request, add(request, [token_id], StepCounts()))
        assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, stop_reason)
        assert output.num_cached_tokens == 0  # it was never admitted; -1 is for the scheduler only


def test_a_request_that_wants_logprobs_gets_no_forced_tokens() -> None:
    """Only a draw computes log-probabilities."""
    regex = StructuredOutputsParams(regex="3*")
    for num_logprobs, num_forced in ((None, MAX_FORCED_TOKENS), (0, 0), (2, 0)):
        request = make_request(SamplingParams(structured_outputs=regex, logprobs=num_logprobs))
        stats = StepCounts()
        assert len(add(request, [3], stats, _Endless()).token_ids) == 1 + num_forced
        assert (stats.num_sampled_tokens, stats.num_forced_tokens) == (1, num_forced)
        assert request.has_unsent_tokens == bool(num_forced)
        assert request.num_planned_tokens == request.num_tokens


def test_a_token_that_a_grammar_has_forced_is_not_added_again() -> None:
    """The step that draws it was planned before."""
    request, stats = make_request(SamplingParams()), StepCounts()
    add(request, [5, 6], stats)
    added = add_tokens(request, SampledRow(request.num_tokens - 1, [6, 9], None, []), cast("Any", None), stats)
    assert added.token_ids == (9,) and request.token_ids.tolist() == [1, 5, 6, 9]
    assert stats.num_sampled_tokens == 3


@pytest.mark.parametrize(
    ("proposed", "drawn", "max_drafts", "counted", "accepted"),
    [
        ([4, 5, 6], 1, 3, 3, 0),
        ([4, 5, 6], 3, 3, 3, 2),
        ([4, 5, 6], 4, 3, 3, 3),
        ([4], 2, 3, 1, 1),  # the plan had room for 3 drafts, but only one was proposed
        ([4, 5, 6], 2, 1, 1, 1),
    ],
)
def test_drafts_are_counted_as_verified_and_accepted(
    proposed: list[int], drawn: int, max_drafts: int, counted: int, accepted: int
) -> None:
    request, stats = make_request(SamplingParams()), StepCounts()
    request.draft_token_ids, request.status = proposed, RequestStatus.RUNNING
    request.num_computed_tokens, request.num_planned_tokens = 1 + max_drafts, 2 + max_drafts
    row = SampledRow(1, [9] * drawn, None, [])
    num_computed = take_back_rejected(request, row, 1 + max_drafts, max_drafts, stats)
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (counted, accepted)
    assert num_computed == drawn  # the last drawn token is not computed yet
    assert (request.num_computed_tokens, request.num_planned_tokens) == (drawn, 1 + drawn)
    request.status = RequestStatus.PREEMPTED  # then its computed tokens are 0 already
    request.num_computed_tokens = 0
    take_back_rejected(request, row, 1 + max_drafts, max_drafts, stats)
    assert request.num_computed_tokens == 0


def test_each_row_gets_its_own_tokens_drafts_and_logprobs() -> None:
    """Rows 1, 2 and 4 draw 2, 1 and 3 tokens. Row 2 wants no log-probabilities."""
    samples = [False, True, True, False, True]
    drafts = ints(-1, 2, 0, -1, 2)
    plan = step_plan([0] * 5, [0, 10, 20, 30, 40], [5, 3, 1, 1, 3], samples, step_id=3, max_draft_tokens=drafts)
    of_tokens = np.array([0, 1, 3, 4, 5], np.int32)  # their places in `sampled_token_ids`
    columns = LogprobsColumns(
        token_ids=of_tokens[:, None] + 100, logprobs=np.zeros((5, 1), np.float32), ranks=np.ones(5, np.int32)
    )
    output = ModelRunnerOutput(
        step_id=3,
        sampled_token_ids=np.arange(50, 56, dtype=np.int32),
        num_sampled_tokens=np.array([2, 1, 3], np.int32),
        sampled_positions=np.array([11, 21, 41], np.int32),
        logprobs=columns,
        logprobs_rows=of_tokens,
        draft_token_ids=np.array([[1, 2, -1], [-1, -1, -1], [3, -1, -1]], np.int32),
    )
    rows = sampled_rows(plan, output)
    assert {row: (each.position, each.token_ids, each.drafts) for row, each in rows.items()} == {
        1: (11, [50, 51], [1, 2]),
        2: (21, [52], []),
        4: (41, [53, 54, 55], [3]),
    }
    logprobs = {
        row: None if each.logprobs is None else each.logprobs.token_ids[:, 0].tolist() for row, each in rows.items()
    }
    assert logprobs == {1: [100, 101], 2: None, 4: [103, 104, 105]}
    plain = replace(
        output,
        sampled_token_ids=np.array([7, 8, 9], np.int32),
        num_sampled_tokens=ints(),
        sampled_positions=ints(),
        logprobs=None,
        draft_token_ids=ints(),
    )
    # without drafts each row draws one token, after the last one that it computes
    assert {row: (each.position, each.token_ids) for row, each in sampled_rows(plan, plain).items()} == {
        1: (13, [7]),
        2: (21, [8]),
        4: (43, [9]),
    }
