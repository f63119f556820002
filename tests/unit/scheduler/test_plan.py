"""What a plan tells the workers of its rows, and what it changes in their requests."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.interface.prompt_logprobs import PromptLogprobsPart
from inflight.interface.step import SchedulerOutput
from inflight.scheduler.plan import PlannedRow, make_plan, record_planned
from inflight.scheduler.request import NO_DRAFTS, Request
from tests.unit.scheduler.test_request import make_request

PARTS = (PromptLogprobsPart(num_logprobs=0, num_done=2),)


def running(slot: int, computed: int, planned: int, *, tables: Any = None, **given: Any) -> Request:
    """A request with the prompt 1, 2, 3 and the output 8, 9."""
    request = make_request(emitted_token_ids=(8, 9), **given)
    request.slot, request.num_computed_tokens, request.num_planned_tokens = slot, computed, planned
    if tables is not None:
        request.blocks.tables = tables
    return request


def test_a_row_samples_only_at_its_last_token() -> None:
    rows = [
        PlannedRow(running(3, 0, 5), 4, 0, False),  # a part of its tokens
        PlannedRow(running(1, 4, 5), 1, 0, False),  # a decode
        PlannedRow(running(0, 4, 5, regex="a"), 1, 0, False),
        PlannedRow(running(2, 1, 5, regex="a"), 1, 0, False),
    ]
    plan = make_plan(7, rows, 2)
    assert (plan.step_id, plan.request_ids, plan.slots.tolist()) == (7, ("a",) * 4, [3, 1, 0, 2])
    assert plan.num_computed_tokens.tolist() == [0, 4, 4, 1]
    assert plan.num_scheduled_tokens.tolist() == [4, 1, 1, 1]
    assert plan.samples.tolist() == [False, True, True, False]
    assert plan.grammar_rows.tolist() == [2]
    assert (plan.max_draft_tokens.tolist(), plan.new_requests, plan.forced_tokens) == ([], (), None)
    assert [delta.slots.tolist() for delta in plan.block_table_deltas] == [[], []]


@pytest.mark.parametrize(("first_masked", "num_drafts", "has_mask"), [
    (5, NO_DRAFTS, True), (6, NO_DRAFTS, False), (6, 0, False), (6, 1, True), (7, 1, False), (7, 2, True), (0, 3, True),
])  # fmt: skip
def test_a_row_has_a_mask_only_if_one_of_its_draws_needs_it(first_masked: int, num_drafts: int, has_mask: bool) -> None:
    """The first token is drawn at position 5, and one more after each draft."""
    request = running(0, 4, 5, regex="a")
    request.first_masked = first_masked
    plan = make_plan(7, [PlannedRow(request, 1 + max(num_drafts, 0), 0, False, num_drafts)], 2)
    assert plan.grammar_rows.tolist() == [0] * has_mask


def test_a_row_with_drafts_draws_after_the_last_of_them() -> None:
    rows = [
        PlannedRow(running(0, 4, 5), 3, 0, False, 2),
        PlannedRow(running(1, 4, 5), 1, 0, False, 0),
        PlannedRow(running(2, 4, 5), 1, 0, False, NO_DRAFTS),
        PlannedRow(running(3, 0, 5), 2, 0, False, NO_DRAFTS),
    ]
    plan = make_plan(7, rows, 2)
    assert plan.samples.tolist() == [True, True, True, False]
    assert plan.max_draft_tokens.tolist() == [2, 0, NO_DRAFTS, NO_DRAFTS]


def test_new_requests_are_sent_whole_and_the_new_blocks_of_others() -> None:
    rows = [
        PlannedRow(running(0, 0, 5, parts=PARTS), 5, 2, True),
        PlannedRow(running(1, 4, 5, tables=([10, 11, 12], [20, 21, 22])), 1, 1, False),
        PlannedRow(running(2, 4, 5, tables=([13], [23])), 1, 0, False),
        PlannedRow(running(3, 4, 5, tables=([14, 15, 16], [24, 25, 26])), 1, 2, False),
    ]
    plan = make_plan(0, rows, 2)
    (new,) = plan.new_requests
    assert (new.request_id, new.slot, new.num_prompt_tokens, new.parts) == ("a", 0, 3, PARTS)
    assert new.token_ids.tolist() == [1, 2, 3, 8, 9]
    assert [ids.tolist() for ids in new.block_ids] == [[4, 5], [6, 7]]
    assert new.sampling is rows[0].request.sampling
    for delta, block_ids in zip(plan.block_table_deltas, ([12, 15, 16], [22, 25, 26]), strict=True):
        assert delta.slots.tolist() == [1, 3, 3]
        assert delta.columns.tolist() == [2, 1, 2]
        assert delta.block_ids.tolist() == block_ids


def forced_of(plan: SchedulerOutput) -> list[tuple[int, int, int]]:
    forced = plan.forced_tokens
    if forced is None:
        return []
    return list(zip(forced.slots.tolist(), forced.positions.tolist(), forced.token_ids.tolist(), strict=True))


@pytest.mark.parametrize(
    ("has_unsent", "is_new", "computed", "forced"),
    [
        (True, False, 3, [(1, 3, 8), (1, 4, 9), (2, 4, 9)]),
        (True, False, 4, [(1, 4, 9), (2, 4, 9)]),
        (True, False, 5, [(2, 4, 9)]),
        (False, False, 3, [(2, 4, 9)]),
        (True, True, 3, [(2, 4, 9)]),
    ],
)
def test_forced_tokens_are_told_from_the_first_position_of_the_row(
    has_unsent: bool, is_new: bool, computed: int, forced: list[tuple[int, int, int]]
) -> None:
    first, second = running(1, computed, 6), running(2, 4, 5)
    first.has_unsent_tokens, second.has_unsent_tokens = has_unsent, True
    plan = make_plan(0, [PlannedRow(first, 1, 0, is_new), PlannedRow(second, 1, 0, False)], 2)
    assert forced_of(plan) == forced
    first.has_unsent_tokens = second.has_unsent_tokens = False
    assert make_plan(0, [PlannedRow(first, 1, 0, False)], 2).forced_tokens is None


@pytest.mark.parametrize(
    ("count", "drafts", "computed", "planned", "draws"),
    [(1, NO_DRAFTS, 4, 5, False), (2, NO_DRAFTS, 5, 6, True), (2, 0, 5, 6, True), (4, 2, 7, 8, True)],
)
def test_a_request_after_its_step_was_planned(
    count: int, drafts: int, computed: int, planned: int, draws: bool
) -> None:
    """Only a step that draws a token counts for the stagger, and for how long the request waits for tokens."""
    request = running(0, 3, 5)
    request.num_in_flight, request.draft_token_ids, request.last_token_time = 1, [4], 0.5
    record_planned([PlannedRow(request, count, 0, False, drafts)], 6, 2.5, 3)
    assert (request.num_computed_tokens, request.num_planned_tokens) == (computed, planned)
    assert (request.num_in_flight, request.draft_token_ids) == (2, [4])
    assert (request.staggered_until, request.last_token_time) == ((9, 2.5) if draws else (0, 0.5))
    request.has_unsent_tokens = True
    record_planned([PlannedRow(request, 0, 0, False)], 7, 3.5, 3)
    assert not request.has_unsent_tokens and request.draft_token_ids == [], "proposed before the forced tokens"
