"""Log-probabilities of prompts: every position once, from the hidden state before it, however the prompt is cut into steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.interface.request import ResolvedSampling
from inflight.sampling_params import SamplingParams
from inflight.worker import prompt_logprobs
from inflight.worker.input_batch import InputBatch
from inflight.worker.prompt_logprobs import PromptLogprobsProgress, PromptLogprobsSpan, joined
from tests.unit.worker.test_input_batch import ints, new, plan

WANTED = ResolvedSampling(params=SamplingParams(prompt_logprobs=2), seed=0, max_tokens=4)


def start_loc(scheduled: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(scheduled)]).astype(np.int32)


@settings(max_examples=40)
@given(st.integers(1, 12), st.lists(st.integers(1, 5), max_size=8), st.lists(st.integers(1, 3), max_size=12))
def test_every_position_is_answered_once_from_the_state_before_it(
    num_prompt: int, chunks: list[int], neighbours: list[int]
) -> None:
    """In each step another request's tokens stand before this one's."""
    prompt = np.arange(100, 100 + num_prompt, dtype=np.int32)
    batch, progress = InputBatch(max_num_seqs=4, max_model_len=64, block_size=4, num_groups=1), PromptLogprobsProgress()
    wanted = replace(new(2, prompt, ints(1, 2, 3)), sampling=WANTED)
    neighbour = new(0, ints(*range(40)), ints(4, 5))
    found: dict[int, int] = {}
    done = neighbour_done = 0
    for step, chunk in enumerate([*chunks, num_prompt, 1, 1]):  # decodes, in the end
        count = min(chunk, num_prompt - done) or 1
        beside = neighbours[step] if step < len(neighbours) else 1
        scheduled = ints(beside, count)
        news = (neighbour, wanted) if step == 0 else ()
        a_plan = plan(
            ints(0, 2), ints(neighbour_done, done), scheduled, [False, done + count >= num_prompt], new_requests=news
        )
        batch.apply(a_plan)
        for data in news:
            progress.add(data)
        for work in progress.advance(a_plan, start_loc(scheduled), batch):
            assert (work.row, work.num_logprobs) == (1, 2)
            for i, target in enumerate(work.targets.tolist()):
                position = work.start + i
                assert target == prompt[position]
                assert position not in found
                found[position] = done + (work.first_token + i - beside)  # the position whose state it comes from
        done, neighbour_done = done + count, neighbour_done + beside
    assert found == {position: position - 1 for position in range(1, num_prompt)}


def test_what_was_answered_before_a_preemption_is_not_answered_again() -> None:
    batch, progress = InputBatch(max_num_seqs=1, max_model_len=16, block_size=4, num_groups=1), PromptLogprobsProgress()
    resumed = replace(new(0, ints(5, 6, 7, 8, 9), ints(1, 2)), sampling=WANTED, num_prompt_logprobs_done=3)
    a_plan = plan(ints(0), ints(0), ints(5), [True], new_requests=(resumed,))
    batch.apply(a_plan)
    progress.add(resumed)
    (work,) = progress.advance(a_plan, ints(0, 5), batch)
    assert (work.start, work.first_token, work.targets.tolist()) == (3, 2, [8, 9])


def test_a_slot_that_goes_to_another_request_owes_nothing() -> None:
    batch, progress = InputBatch(max_num_seqs=1, max_model_len=16, block_size=4, num_groups=1), PromptLogprobsProgress()
    first = replace(new(0, ints(5, 6, 7, 8), ints(1)), sampling=WANTED)
    a_plan = plan(ints(0), ints(0), ints(2), [False], new_requests=(first,))
    batch.apply(a_plan)
    progress.add(first)
    assert len(progress.advance(a_plan, ints(0, 2), batch)) == 1
    second = new(0, ints(1, 2, 3, 4, 5, 6), ints(1, 2))
    a_plan = plan(ints(0), ints(0), ints(6), [True], new_requests=(second,), step_id=1)
    batch.apply(a_plan)
    progress.add(second)
    assert progress.advance(a_plan, ints(0, 6), batch) == ()


def test_the_columns_are_log_probabilities_whatever_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 4, generator=generator)
    head = torch.randn(4, 9, generator=generator)
    targets = np.array([8, 0, 3, 3, 5, 1, 2], dtype=np.int32)
    work = PromptLogprobsSpan(row=0, start=1, first_token=2, targets=targets, num_logprobs=2)
    expected = torch.log_softmax(hidden[2:9].double() @ head.double(), dim=1)
    for max_rows in (1, 3, 256):
        monkeypatch.setattr(prompt_logprobs, "MAX_ROWS", max_rows)
        pieces = work.pieces(hidden, lambda rows: rows @ head, torch.from_numpy(targets))
        assert len(pieces) == -(-len(targets) // max_rows)
        columns = joined(pieces)
        assert columns.token_ids[:, 0].tolist() == targets.tolist()
        for row, target in enumerate(targets.tolist()):
            top = torch.topk(expected[row], 2)
            assert columns.token_ids[row, 1:].tolist() == top.indices.tolist()
            np.testing.assert_allclose(columns.logprobs[row, 0], float(expected[row, target]), atol=1e-5)
            np.testing.assert_allclose(columns.logprobs[row, 1:], top.values.numpy(), atol=1e-5)
            assert columns.ranks[row] == 1 + int((expected[row] > expected[row, target]).sum())
