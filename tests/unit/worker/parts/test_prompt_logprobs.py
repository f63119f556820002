"""Log-probabilities of prompts: every position once, from the hidden state before it, however the prompt is cut into steps."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.config.pipeline_stage import PipelineStage, pipeline_stage
from inflight.errors import EngineError
from inflight.interface.parts import RequestPart
from inflight.interface.prompt_logprobs import PromptLogprobsPart
from inflight.models.causal_lm import CausalLM, ModelStep
from inflight.worker.input_batch import InputBatch
from inflight.worker.parts import prompt_logprobs
from inflight.worker.parts.prompt_logprobs import PromptLogprobsReader
from inflight.worker.parts.reader import PartWork
from inflight.worker.parts.row_parts import RowParts, StepParts
from tests.support.plans import ints, new_request
from tests.unit.worker.test_input_batch import plan

WANTED = (PromptLogprobsPart(num_logprobs=2),)
LAST: PipelineStage = pipeline_stage((2,), 0)
NO_MODEL = cast(CausalLM, SimpleNamespace(tower=None, cache_users=list))


def work_of(parts: RowParts, a_plan: object, batch: InputBatch) -> tuple[PartWork, ...]:
    found = parts.prepare(a_plan, batch.step_inputs(a_plan), batch)  # type: ignore[arg-type]
    return () if found is None else found.work


@settings(max_examples=40)
@given(st.integers(1, 12), st.lists(st.integers(1, 5), max_size=8), st.lists(st.integers(1, 3), max_size=12))
def test_every_position_is_answered_once_from_the_state_before_it(
    num_prompt: int, chunks: list[int], neighbours: list[int]
) -> None:
    """In each step another request's tokens stand before this one's."""
    prompt = np.arange(100, 100 + num_prompt, dtype=np.int32)
    batch, parts = InputBatch(max_num_seqs=4, max_model_len=64, block_size=4, num_groups=1), RowParts(LAST, NO_MODEL)
    wanted = replace(new_request(2, prompt, ints(1, 2, 3)), parts=WANTED)
    neighbour = new_request(0, ints(*range(40)), ints(4, 5))
    found: dict[int, int] = {}
    done = neighbour_done = 0
    for step, chunk in enumerate([*chunks, num_prompt, 1, 1]):  # decodes, in the end
        count = max(min(chunk, num_prompt - done), 1)
        beside = neighbours[step] if step < len(neighbours) else 1
        scheduled = ints(beside, count)
        news = (neighbour, wanted) if step == 0 else ()
        a_plan = plan(
            ints(0, 2), ints(neighbour_done, done), scheduled, [False, done + count >= num_prompt], new_requests=news
        )
        batch.apply(a_plan)
        for data in news:
            parts.add(data)
        assert parts.slots == {2}
        for work in work_of(parts, a_plan, batch):
            (targets,) = work.arrays
            assert (work.row, work.slot, work.num_tokens) == (1, 2, len(targets))
            for i, target in enumerate(targets.tolist()):
                position = work.start + 1 + i
                assert target == prompt[position]
                assert position not in found
                found[position] = done + (work.first_token + i - beside)  # the position whose state it comes from
        done, neighbour_done = done + count, neighbour_done + beside
    assert found == {position: position - 1 for position in range(1, num_prompt)}


def test_what_was_answered_before_a_preemption_is_not_answered_again() -> None:
    batch, parts = InputBatch(max_num_seqs=1, max_model_len=16, block_size=4, num_groups=1), RowParts(LAST, NO_MODEL)
    again = (PromptLogprobsPart(num_logprobs=2, num_done=3),)
    resumed = replace(new_request(0, ints(5, 6, 7, 8, 9), ints(1, 2)), parts=again)
    a_plan = plan(ints(0), ints(0), ints(5), [True], new_requests=(resumed,))
    batch.apply(a_plan)
    parts.add(resumed)
    (work,) = work_of(parts, a_plan, batch)
    assert (work.start, work.first_token, work.arrays[0].tolist()) == (2, 2, [8, 9])


def test_a_slot_that_goes_to_another_request_owes_nothing() -> None:
    batch, parts = InputBatch(max_num_seqs=1, max_model_len=16, block_size=4, num_groups=1), RowParts(LAST, NO_MODEL)
    first = replace(new_request(0, ints(5, 6, 7, 8), ints(1)), parts=WANTED)
    a_plan = plan(ints(0), ints(0), ints(2), [False], new_requests=(first,))
    batch.apply(a_plan)
    parts.add(first)
    assert len(work_of(parts, a_plan, batch)) == 1
    second = new_request(0, ints(1, 2, 3, 4, 5, 6), ints(1, 2))
    a_plan = plan(ints(0), ints(0), ints(6), [True], new_requests=(second,), step_id=1)
    batch.apply(a_plan)
    parts.add(second)
    assert not parts.slots and work_of(parts, a_plan, batch) == ()


def test_only_the_last_stage_reads_hidden_states() -> None:
    parts = RowParts(pipeline_stage((1, 1), 0), NO_MODEL)
    parts.add(replace(new_request(0, ints(5, 6), ints(1)), parts=WANTED))
    assert not parts.slots


def test_a_part_that_this_rank_does_not_know_is_refused_in_words() -> None:
    class Strange(RequestPart):
        kind = "strange"

    with pytest.raises(EngineError, match=r"request r0 .*'strange'; .*prompt_logprobs"):
        RowParts(LAST, NO_MODEL).add(replace(new_request(0, ints(5, 6), ints(1)), parts=(Strange(),)))


@pytest.mark.parametrize("moved", [0, 3])
def test_the_columns_are_log_probabilities_whatever_the_pieces(moved: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With drafts in the step, the tokens may begin later than was planned."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(11 + moved, 4, generator=generator)
    head = torch.randn(4, 9, generator=generator)
    targets = np.array([8, 0, 3, 3, 5, 1, 2], dtype=np.int32)
    work = PartWork(
        reader=PromptLogprobsReader(),
        part=WANTED[0],
        row=1,
        slot=0,
        first_token=2,
        start=0,
        num_tokens=7,
        arrays=(targets,),
    )
    expected = torch.log_softmax(hidden[2 + moved : 9 + moved].double() @ head.double(), dim=1)
    for max_rows in (1, 3, 256):
        monkeypatch.setattr(prompt_logprobs, "MAX_ROWS", max_rows)
        parts = StepParts([work]).moved(ints(0, moved))
        parts.upload(torch.from_numpy)
        step = parts.extend(ModelStep(hidden, hidden, (), rows=torch.zeros(1)))
        assert step.rows is None, "the hidden states of all tokens are needed"
        calls: list[int] = []

        def compute_logits(rows: torch.Tensor, calls: list[int] = calls) -> torch.Tensor:
            calls.append(len(rows))
            return rows @ head

        parts.read(hidden, cast("CausalLM", SimpleNamespace(compute_logits=compute_logits)))
        assert calls == [min(max_rows, 7 - first) for first in range(0, 7, max_rows)]
        parts.copy(torch.clone)
        ((row, result),) = parts.results()
        columns = result.columns  # type: ignore[attr-defined]
        assert (row, result.start) == (1, 1)  # type: ignore[attr-defined]
        assert columns.token_ids[:, 0].tolist() == targets.tolist()
        for index, target in enumerate(targets.tolist()):
            top = torch.topk(expected[index], 2)
            assert columns.token_ids[index, 1:].tolist() == top.indices.tolist()
            np.testing.assert_allclose(columns.logprobs[index, 0], float(expected[index, target]), atol=1e-5)
            np.testing.assert_allclose(columns.logprobs[index, 1:], top.values.numpy(), atol=1e-5)
            assert columns.ranks[index] == 1 + int((expected[index] > expected[index, target]).sum())
