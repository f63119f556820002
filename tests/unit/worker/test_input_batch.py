"""`InputBatch`: plans in, flat columns out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from inflight.interface.step import BlockTableDelta, SchedulerOutput, TokenDelta
from inflight.worker.input_batch import NO_STEP, InputBatch
from tests.support.plans import ints, new_request, step_plan


def plan(
    slots: np.ndarray, computed: np.ndarray, scheduled: np.ndarray, samples: list[bool], **more: object
) -> SchedulerOutput:
    empty = BlockTableDelta(slots=ints(), columns=ints(), block_ids=ints())
    return step_plan(slots, computed, scheduled, samples, **{"block_table_deltas": (empty,), **more})


def test_a_chunk_a_prompt_and_a_decode_in_one_step() -> None:
    batch = InputBatch(max_num_seqs=4, max_model_len=16, block_size=4, num_groups=1)
    first = plan(
        ints(2, 0),
        ints(0, 0),
        ints(3, 2),
        [False, True],
        new_requests=(new_request(2, ints(10, 11, 12, 13, 14), ints(5, 6)), new_request(0, ints(20, 21), ints(7))),
    )
    batch.apply(first)
    inputs = batch.step_inputs(first)
    assert inputs.input_ids.tolist() == [10, 11, 12, 20, 21]
    assert inputs.positions.tolist() == [0, 1, 2, 0, 1]
    assert inputs.query_start_loc.tolist() == [0, 3, 5]
    assert inputs.seq_lens.tolist() == [3, 2]
    assert inputs.sampling_rows.tolist() == [1]
    assert (inputs.drawn_tokens.tolist(), inputs.drawn_in_step) == ([], NO_STEP)
    second = plan(ints(2, 0), ints(3, 2), ints(2, 1), [True, True], step_id=1)
    inputs = batch.step_inputs(second)
    assert inputs.input_ids.tolist() == [13, 14, 0]
    assert inputs.positions.tolist() == [3, 4, 2]
    assert (inputs.drawn_tokens.tolist(), inputs.drawn_slots.tolist(), inputs.drawn_in_step) == ([2], [0], 0)
    assert batch.block_table(0, ints(2, 0), 5)[0].tolist() == [5, 6]


def test_block_table_deltas_go_to_their_columns() -> None:
    batch = InputBatch(max_num_seqs=2, max_model_len=16, block_size=4, num_groups=1)
    delta = BlockTableDelta(slots=ints(1, 1, 0), columns=ints(2, 3, 0), block_ids=ints(8, 9, 4))
    batch.apply(plan(ints(1), ints(0), ints(1), [True], block_table_deltas=(delta,)))
    assert batch.block_table(0, ints(0, 1), 16).tolist() == [[4, 0, 0, 0], [0, 0, 8, 9]]


def test_a_drawn_token_belongs_to_the_latest_step_that_drew_for_its_slot() -> None:
    batch = InputBatch(max_num_seqs=3, max_model_len=16, block_size=4, num_groups=1)
    slots = ints(0, 1)
    first = plan(slots, ints(0, 0), ints(2, 2), [True, False], new_requests=(
        new_request(0, ints(1, 2), ints(3)), new_request(1, ints(5, 6, 7), ints(4))
    ))  # fmt: skip
    batch.apply(first)
    batch.step_inputs(first)
    found = [
        batch.step_inputs(plan(slots, ints(2, 2), ints(1, 1), [True, True], step_id=4)),
        batch.step_inputs(plan(ints(1), ints(3), ints(1), [True], step_id=5)),
        batch.step_inputs(plan(slots, ints(3, 4), ints(1, 1), [True, True], step_id=9)),
    ]
    assert [inputs.drawn_slots.tolist() for inputs in found] == [[0], [1], [0, 1]]
    assert [inputs.drawn_in_step for inputs in found] == [0, 4, 5]


def test_a_slot_given_to_another_request_has_no_drawn_tokens() -> None:
    batch = InputBatch(max_num_seqs=1, max_model_len=16, block_size=4, num_groups=1)
    for step_id, tokens in enumerate((ints(1, 2), ints(3, 4, 5))):
        batch_plan = plan(
            ints(0),
            ints(0),
            ints(len(tokens)),
            [True],
            new_requests=(new_request(0, tokens, ints(3)),),
            step_id=step_id,
        )
        batch.apply(batch_plan)
        inputs = batch.step_inputs(batch_plan)
        assert (inputs.input_ids.tolist(), inputs.drawn_in_step) == (tokens.tolist(), NO_STEP)


def test_forced_tokens_are_known_with_the_drawn_one_before_them() -> None:
    batch = InputBatch(max_num_seqs=2, max_model_len=16, block_size=4, num_groups=1)
    first = plan(ints(1), ints(0), ints(2), [True], new_requests=(new_request(1, ints(1, 2), ints(3)),))
    batch.apply(first)
    batch.step_inputs(first)
    forced = TokenDelta(slots=ints(1, 1, 1), positions=ints(2, 3, 4), token_ids=ints(7, 8, 9))
    second = plan(ints(1), ints(2), ints(3), [True], step_id=1, forced_tokens=forced)
    batch.apply(second)
    inputs = batch.step_inputs(second)
    assert (inputs.input_ids.tolist(), inputs.drawn_tokens.tolist()) == ([7, 8, 9], [])
    assert (inputs.positions.tolist(), inputs.drawn_in_step) == ([2, 3, 4], NO_STEP)
    inputs = batch.step_inputs(plan(ints(1), ints(5), ints(1), [True], step_id=2))
    assert (inputs.drawn_tokens.tolist(), inputs.drawn_in_step) == ([0], 1)


def decodes(step_id: int, length: int, slots: np.ndarray | None = None, **more: object) -> SchedulerOutput:
    """A plan in which each request computes the token that was drawn for it before, and draws the next one."""
    slots = ints(2, 0) if slots is None else slots
    ones = np.ones_like(slots)
    return plan(slots, length * ones, ones, [True] * len(slots), **{"step_id": step_id, **more})


@pytest.mark.parametrize(
    ("change", "continues"),
    [
        ({}, True),
        ({"slots": ints(0, 2)}, False),
        ({"num_computed_tokens": ints(3, 4)}, False),  # a request was preempted and goes on in its slot
        ({"samples": np.array([True, False])}, False),
        ({"forced_tokens": TokenDelta(slots=ints(2), positions=ints(3), token_ids=ints(9))}, False),
        ({"max_draft_tokens": ints(0, 0)}, False),
        ({"new_requests": (new_request(0, ints(1, 2, 3, 4), ints(7)),)}, False),
    ],
)
def test_only_a_step_that_computes_what_the_one_before_drew_continues_it(
    change: dict[str, object], continues: bool
) -> None:
    batch = InputBatch(max_num_seqs=3, max_model_len=16, block_size=4, num_groups=1)
    prompts = tuple(new_request(slot, ints(5, 6), ints(slot)) for slot in (2, 0))
    first = plan(ints(2, 0), ints(0, 0), ints(2, 2), [True, True], new_requests=prompts)
    batch.apply(first)
    assert batch.step_inputs(first).continues == NO_STEP
    second = batch.step_inputs(decodes(4, 2))
    assert second.continues == NO_STEP  # the step before computed prompts
    third = replace(decodes(6, 3), **change)  # type: ignore[arg-type]
    batch.apply(third)
    inputs = batch.step_inputs(third)
    assert inputs.continues == (4 if continues else NO_STEP)
    if continues:
        assert (inputs.drawn_slots.tolist(), inputs.drawn_tokens.tolist(), inputs.drawn_in_step) == ([2, 0], [0, 1], 4)
        assert (inputs.positions.tolist(), inputs.seq_lens.tolist()) == ([3, 3], [4, 4])
        later = batch.step_inputs(decodes(9, 4, ints(0)))
        assert (later.continues, later.drawn_in_step) == (NO_STEP, 6)


def test_a_chunk_that_draws_nothing_is_not_waited_for() -> None:
    batch = InputBatch(max_num_seqs=2, max_model_len=16, block_size=4, num_groups=1)
    first = plan(ints(1), ints(0), ints(3), [True], new_requests=(new_request(1, ints(5, 6, 7), ints(3)),))
    batch.apply(first)
    batch.step_inputs(first)
    resumed = replace(new_request(1, ints(5, 6, 7, 8, 9), ints(3)), num_prompt_tokens=3)
    chunk = plan(ints(1), ints(0), ints(2), [False], step_id=3, new_requests=(resumed,))
    batch.apply(chunk)
    batch.step_inputs(chunk)
    assert batch.num_prompt_tokens[1] == 3
    last = batch.step_inputs(plan(ints(1), ints(2), ints(4), [True], step_id=5))
    assert (last.input_ids.tolist(), last.drawn_tokens.tolist(), last.drawn_in_step) == ([7, 8, 9, 0], [3], 0)


def test_a_step_behind_a_chunk_of_one_token_does_not_continue_it() -> None:
    """The chunk has drawn nothing, so the next token is one of the prompt."""
    batch = InputBatch(max_num_seqs=2, max_model_len=16, block_size=4, num_groups=1)
    prompts = (new_request(0, ints(5), ints(3)), new_request(1, ints(7, 8), ints(4)))
    first = plan(ints(0, 1), ints(0, 0), ints(1, 1), [True, False], new_requests=prompts)
    batch.apply(first)
    batch.step_inputs(first)
    inputs = batch.step_inputs(decodes(1, 1, ints(0, 1)))
    assert (inputs.continues, inputs.input_ids.tolist(), inputs.drawn_tokens.tolist()) == (NO_STEP, [0, 8], [0])
