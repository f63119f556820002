"""`Request`: its tokens, how far it is, and how many drafts it may have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from inflight.interface.prompt_logprobs import PromptLogprobsPart
from inflight.interface.request import AnswerFrame, EngineCoreRequest, ResolvedSampling
from inflight.kv_cache.request_blocks import RequestBlocks
from inflight.sampling_params import SamplingParams
from inflight.scheduler.request import NO_DRAFTS, NO_SLOT, Request, RequestStatus
from inflight.structured_outputs_params import StructuredOutputsParams

PARTS = (PromptLogprobsPart(num_logprobs=0, num_done=2),)


def make_request(
    prompt: tuple[int, ...] = (1, 2, 3), *, max_tokens: int = 6, max_model_len: int = 64, regex: str = "", **core: Any
) -> Request:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex=regex) if regex else None)
    sampling = ResolvedSampling(params=params, seed=0, max_tokens=max_tokens)
    given = EngineCoreRequest(request_id="a", sampling=sampling, **core)
    blocks = RequestBlocks(([4, 5], [6, 7]), b"")
    return Request(given, np.array(prompt, np.int32), order=2, blocks=blocks, max_model_len=max_model_len)


def test_a_new_request() -> None:
    request = make_request(num_losses=1, parts=PARTS)
    assert (request.status, request.slot, request.order) == (RequestStatus.WAITING, NO_SLOT, 2)
    assert (request.num_prompt_tokens, request.num_tokens, request.num_planned_tokens) == (3, 3, 3)
    assert (request.num_computed_tokens, request.num_output_tokens, request.num_cached_tokens) == (0, 0, -1)
    assert (request.num_faults, request.num_tokens_at_fault, request.parts) == (1, 3, PARTS)
    assert not (request.has_begun or request.has_grammar or request.is_decoding or request.has_planned_prompt)
    assert make_request(regex="a").has_grammar


@pytest.mark.parametrize(("budget", "has_masks"), [(None, False), (0, True), (9, True)])
def test_a_reasoning_budget_needs_masks(budget: int | None, has_masks: bool) -> None:
    frame = AnswerFrame(begin="<t>", end="</t>", max_reasoning_tokens=budget)
    sampling = ResolvedSampling(params=SamplingParams(), seed=0, max_tokens=6, answer_frame=frame)
    given = EngineCoreRequest(request_id="a", sampling=sampling)
    blocks = RequestBlocks(([4], [6]), b"")
    assert Request(given, np.array([1], np.int32), order=2, blocks=blocks, max_model_len=64).has_grammar == has_masks


@pytest.mark.parametrize(("max_tokens", "max_model_len", "most"), [(6, 64, 9), (6, 9, 9), (6, 8, 8), (1, 64, 4)])
def test_a_request_ends_at_its_own_limit_or_the_model_s(max_tokens: int, max_model_len: int, most: int) -> None:
    assert make_request(max_tokens=max_tokens, max_model_len=max_model_len).max_num_tokens == most
    resumed = make_request(max_tokens=max_tokens, max_model_len=max_model_len, emitted_token_ids=(8,))
    assert resumed.max_num_tokens == most, "its emitted tokens are among them"


def test_tokens_from_each_position() -> None:
    request = make_request(emitted_token_ids=(8,))
    assert request.has_begun and request.num_tokens == request.num_tokens_at_fault == 4
    request.append(9)
    assert (request.num_tokens, request.num_output_tokens, request.num_planned_tokens) == (5, 2, 4)
    for start in range(6):
        found = request.token_ids_from(start)
        assert found.tolist() == [1, 2, 3, 8, 9][start:]
        assert found.dtype == np.int32
    assert request.token_ids.tolist() == [1, 2, 3, 8, 9]


def test_a_request_does_not_copy_its_prompt() -> None:
    """So all sequences of a request share one array."""
    prompt = np.array([1, 2, 3], np.int32)
    sampling = ResolvedSampling(params=SamplingParams(), seed=0, max_tokens=3)
    core = EngineCoreRequest(request_id="a", sampling=sampling)
    request = Request(core, prompt, order=0, blocks=RequestBlocks(([],), b""), max_model_len=64)
    assert np.shares_memory(request.token_ids, prompt)


@pytest.mark.parametrize(
    ("status", "has_begun"),
    [(RequestStatus.WAITING, False), (RequestStatus.RUNNING, True), (RequestStatus.PREEMPTED, True)],
)
def test_a_request_begins_when_it_runs_first(status: RequestStatus, has_begun: bool) -> None:
    request = make_request()
    request.status = status
    assert request.has_begun == has_begun


@pytest.mark.parametrize(("planned", "is_decoding"), [(3, False), (4, True), (8, True), (9, False)])
def test_a_request_decodes_between_its_first_and_its_last_token(planned: int, is_decoding: bool) -> None:
    request = make_request()
    request.num_planned_tokens = planned
    assert request.is_decoding == is_decoding


@pytest.mark.parametrize(("computed", "has_planned_prompt"), [(0, False), (1, False), (2, True), (3, True), (5, True)])
def test_the_last_token_of_a_prompt_need_not_be_planned(computed: int, has_planned_prompt: bool) -> None:
    """Followers never share it."""
    request = make_request()
    request.num_computed_tokens = computed
    assert request.has_planned_prompt == has_planned_prompt


@pytest.mark.parametrize(
    ("speculative", "tokens", "planned", "drafts", "has_unsent", "most"),
    [
        (0, 5, 5, 2, False, NO_DRAFTS),
        (0, 5, 6, 2, False, NO_DRAFTS),
        (3, 5, 5, 2, True, NO_DRAFTS),
        (3, 5, 5, 0, False, NO_DRAFTS),
        (3, 5, 5, 2, False, 2),
        (3, 5, 5, 4, False, 3),  # of the limit of 9, the fifth to eighth and one that is drawn
        (3, 7, 7, 2, False, 1),
        (3, 8, 8, 2, False, NO_DRAFTS),
        (3, 5, 6, 0, False, 2),  # the position of its newest token is not known
        (1, 5, 6, 0, False, 1),
        (3, 5, 8, 2, False, 0),
    ],
)
def test_how_many_drafts_a_request_may_have(
    speculative: int, tokens: int, planned: int, drafts: int, has_unsent: bool, most: int
) -> None:
    request = make_request()
    while request.num_tokens < tokens:
        request.append(7)
    request.num_planned_tokens, request.draft_token_ids = planned, [7] * drafts
    request.has_unsent_tokens = has_unsent
    assert request.max_drafts(speculative) == most


def test_the_state_as_text() -> None:
    request = make_request()
    request.append(7)
    request.status, request.slot, request.num_in_flight = RequestStatus.RUNNING, 11, 15
    request.num_computed_tokens, request.num_planned_tokens = 13, 14
    text = request.describe()
    for part in ("a: RUNNING", "slot 11", "3 prompt", "1 emitted", "13 of 14 planned", "2 blocks", "15 steps"):
        assert part in text, text
