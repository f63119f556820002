"""Rows with drafts: upper bounds in, what they are out; their masks, what is emitted of their draws, and the answer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inflight.interface.step import GrammarOutput, SchedulerOutput
from inflight.sample.logprobs import LogprobsTensors
from inflight.sample.sampler import SamplerOutput
from inflight.worker.draw_rows import VerifiedDraws, grammar_masks, message_of, resolve_drafts
from inflight.worker.input_batch import InputBatch, StepInputs
from inflight.worker.model_input import DrawnStep
from tests.support.plans import ints, new_request
from tests.unit.worker.test_input_batch import plan

DRAFTS = np.array([[7, -1, -1], [0, 0, 0], [30, 31, 32], [40, 41, -1]], dtype=np.int32)  # by row


@pytest.fixture
def step() -> tuple[SchedulerOutput, StepInputs]:
    """A row with at most 3 drafts, a chunk of a prompt, and two rows with at most 2; one token was drawn before for each."""
    batch = InputBatch(max_num_seqs=4, max_model_len=32, block_size=4, num_groups=1)
    prompts = tuple(new_request(slot, ints(*range(10 * slot, 10 * slot + 6)), ints(slot)) for slot in range(4))
    first = plan(ints(0, 2, 3), ints(0, 0, 0), ints(6, 6, 6), [True] * 3, new_requests=prompts)
    batch.apply(first)
    batch.step_inputs(first)
    second = plan(
        ints(0, 1, 2, 3),
        ints(9, 2, 8, 7),
        ints(4, 3, 3, 3),
        [True, False, True, True],
        step_id=1,
        max_draft_tokens=ints(3, -1, 2, 2),
        grammar_rows=ints(0, 3),
    )
    return second, batch.step_inputs(second)


def test_upper_bounds(step: tuple[SchedulerOutput, StepInputs]) -> None:
    _, inputs = step
    assert inputs.positions.tolist() == [9, 10, 11, 12, 2, 3, 4, 8, 9, 10, 7, 8, 9]
    assert inputs.seq_lens.tolist() == [13, 5, 11, 10]
    assert inputs.drawn_tokens.tolist() == [0, 7, 10]
    assert inputs.draw_start_loc.tolist() == [0, 4, 7, 10]
    assert inputs.drawn_in_step == 0


def test_rows_as_they_are(step: tuple[SchedulerOutput, StepInputs]) -> None:
    second, upper = step
    inputs = resolve_drafts(second, upper, ints(7, 99, 9, 8), DRAFTS)
    assert inputs.query_start_loc.tolist() == [0, 2, 5, 8, 11]
    assert inputs.input_ids.tolist() == [0, 7, 12, 13, 14, 0, 30, 31, 0, 40, 41]
    assert inputs.positions.tolist() == [6, 7, 2, 3, 4, 8, 9, 10, 7, 8, 9]
    assert inputs.num_computed_tokens.tolist() == [6, 2, 8, 7]
    assert inputs.seq_lens.tolist() == [8, 5, 11, 10]
    assert (inputs.drawn_tokens.tolist(), inputs.drawn_slots.tolist()) == ([0, 5, 8], [0, 2, 3])
    assert (inputs.draft_tokens.tolist(), inputs.draft_slots.tolist()) == ([1, 6, 7, 9, 10], [0, 2, 2, 3, 3])
    assert inputs.draw_start_loc.tolist() == [0, 2, 5, 8]
    assert inputs.draw_tokens.tolist() == [0, 1, 5, 6, 7, 8, 9, 10]
    assert inputs.first_positions.tolist() == [7, 9, 8]
    assert {inputs.input_ids.dtype, inputs.positions.dtype, inputs.query_start_loc.dtype} == {np.dtype(np.int32)}


def test_more_than_the_upper_bound_is_a_mistake(step: tuple[SchedulerOutput, StepInputs]) -> None:
    second, upper = step
    with pytest.raises(AssertionError, match="slot 0, tokens"):
        resolve_drafts(second, upper, ints(11, 99, 9, 8), DRAFTS)


def test_a_mask_for_each_draw(step: tuple[SchedulerOutput, StepInputs]) -> None:
    second, upper = step
    inputs = resolve_drafts(second, upper, ints(7, 99, 9, 8), DRAFTS)
    masks = np.arange(5, dtype=np.int32)[:, None]
    found = grammar_masks(
        second, GrammarOutput(rows=ints(0, 3), num_masks=ints(2, 3), masks=masks), inputs.draw_start_loc
    )
    assert found.rows.tolist() == [0, 1, 5, 6, 7]
    with pytest.raises(AssertionError, match=r"draw \[2, 3\] .*\[3, 2\]"):
        grammar_masks(second, GrammarOutput(rows=ints(0, 3), num_masks=ints(3, 2), masks=masks), inputs.draw_start_loc)


def test_masks_of_no_rows_are_none_and_rows_that_draw_nothing_have_none(
    step: tuple[SchedulerOutput, StepInputs],
) -> None:
    second, upper = step
    inputs = resolve_drafts(second, upper, ints(7, 99, 9, 8), DRAFTS)
    nothing = GrammarOutput(rows=ints(), num_masks=ints(), masks=np.empty((0, 1), dtype=np.int32))
    assert grammar_masks(second, nothing, inputs.draw_start_loc) is None  # the step is void
    assert grammar_masks(second, None, inputs.draw_start_loc) is None
    wrong = GrammarOutput(rows=ints(1), num_masks=ints(1), masks=np.zeros((1, 1), dtype=np.int32))
    with pytest.raises(AssertionError, match="masks for rows"):
        grammar_masks(second, wrong, inputs.draw_start_loc)


def test_rows_with_and_without_drafts_in_slots_of_any_order() -> None:
    """The row without drafts draws once, after its prompt."""
    batch = InputBatch(max_num_seqs=4, max_model_len=32, block_size=4, num_groups=1)
    first = plan(ints(3), ints(0), ints(2), [True], new_requests=(new_request(3, ints(8, 9), ints(1)),))
    batch.apply(first)
    batch.step_inputs(first)
    second = plan(
        ints(3, 1),
        ints(2, 0),
        ints(3, 4),
        [True, True],
        step_id=1,
        new_requests=(new_request(1, ints(4, 5, 6, 7), ints(2)),),
        max_draft_tokens=ints(2, -1),
    )
    batch.apply(second)
    inputs = resolve_drafts(second, batch.step_inputs(second), ints(3, 99), ints(20, 21, 0, 0).reshape(2, 2))
    assert inputs.input_ids.tolist() == [0, 20, 21, 4, 5, 6, 7]
    assert inputs.positions.tolist() == [2, 3, 4, 0, 1, 2, 3]
    assert (inputs.draft_slots.tolist(), inputs.drawn_slots.tolist()) == ([3, 3], [3])
    assert inputs.draw_start_loc.tolist() == [0, 3, 4]
    assert inputs.draw_tokens.tolist() == [0, 1, 2, 6]
    assert inputs.first_positions.tolist() == [3, 4]


def test_a_message_holds_what_is_emitted() -> None:
    sampled = ints(5, 6, 7, -1, 9, 10)
    message = message_of(sampled, np.array([2, 1, 2]), ints(0, 3, 4, 6), 3)
    assert message.tolist() == [[5, 6, -1], [0, -1, -1], [9, 10, -1]]


def test_the_answer_holds_what_is_emitted() -> None:
    sampled = torch.tensor([5, 6, 7, -1, 9, 10], dtype=torch.int32)
    rows = ints(0, 2, 4, 5)
    logprobs = LogprobsTensors(
        token_ids=sampled[torch.from_numpy(rows).long()][:, None],
        logprobs=torch.arange(4.0)[:, None],
        ranks=torch.arange(4, dtype=torch.int32),
    )
    drawn = SamplerOutput(token_ids=sampled, logprobs=logprobs, logprobs_rows=rows)
    verified = VerifiedDraws(
        np.array([2, 1, 2]), ints(3, 8, 4), ints(0, 3, 4, 6), np.array([[1, -1]] * 3, dtype=np.int32)
    )
    output = DrawnStep(7, drawn, verified).to_output()
    assert output.step_id == 7
    assert output.sampled_token_ids.tolist() == [5, 6, -1, 9, 10]
    assert output.num_sampled_tokens.tolist() == [2, 1, 2]
    assert output.sampled_positions.tolist() == [3, 8, 4]
    assert output.draft_token_ids.tolist() == [[1, -1]] * 3
    assert output.logprobs_rows.tolist() == [0, 3, 4]
    assert output.logprobs is not None
    assert output.logprobs.token_ids[:, 0].tolist() == [5, 9, 10]
    assert output.logprobs.ranks.tolist() == [0, 2, 3]
