"""Drawn rows with all processors at once, against plain loops; on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from inflight.sample import processors
from inflight.sample.processors import LogitsProcessors, in_one_copy
from inflight.sample.rows import GrammarMasks
from inflight.sample.state import SamplingState
from inflight.sampling_params import SamplingParams
from tests.unit.sample.batch import GREEDY, NOT_YET, Row, sample, step_of
from tests.unit.sample.device_batch import DEVICE

VOCAB_SIZE = 77

tokens = st.integers(0, VOCAB_SIZE - 1)
few_tokens = st.integers(0, 4)  # so that words and penalties meet


@st.composite
def rows_with_features(draw: st.DrawFn) -> Row:
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.0, 1.0])),
        top_k=draw(st.sampled_from([0, 3])),
        logit_bias=draw(st.dictionaries(tokens, st.sampled_from([-100.0, -1.0, 2.0]), max_size=4)),
        allowed_token_ids=draw(st.none() | st.lists(tokens, min_size=1, max_size=9)),
        repetition_penalty=draw(st.sampled_from([1.0, 0.3, 1.7])),
        frequency_penalty=draw(st.sampled_from([0.0, -0.3, 1.1])),
        presence_penalty=draw(st.sampled_from([0.0, 0.7])),
        min_tokens=draw(st.sampled_from([0, 3])),
        logprobs=draw(st.sampled_from([None, 0, 3])),
    )
    return Row(
        params,
        seed=draw(st.integers(0, 2**64 - 1)),
        prompt=draw(st.lists(few_tokens, min_size=1, max_size=6)),
        output=draw(st.lists(few_tokens, max_size=6)),
        stop_token_ids=draw(st.lists(tokens, max_size=3)),
        bad_words=draw(st.lists(st.lists(few_tokens, min_size=1, max_size=4), max_size=4)),
    )


@st.composite
def grammar_masks(draw: st.DrawFn, num_rows: int) -> GrammarMasks | None:
    rows = sorted(draw(st.sets(st.integers(0, num_rows - 1))))
    if not rows:
        return None
    seed = draw(st.integers(0, 2**30))
    words = np.random.default_rng(seed).integers(-(2**31), 2**31, size=(len(rows), 3)).astype(np.int32)
    if draw(st.booleans()):
        words[0] = 0  # a dead grammar
    return GrammarMasks(rows=np.array(rows, dtype=np.int64), masks=words)


def processors_of(
    rows: Sequence[Row], masks: GrammarMasks | None = None
) -> tuple[LogitsProcessors | None, Tensor, list[np.ndarray]]:
    """Of rows in slots as in `step_of`; the device's history; and what was uploaded."""
    num_rows, uploads = len(rows), []
    state = SamplingState(num_rows + 1, VOCAB_SIZE, "cpu")
    _, _, history = step_of(rows, VOCAB_SIZE)
    slots = np.arange(num_rows, 0, -1, dtype=np.int32)
    for slot, row in zip(slots.tolist(), rows, strict=True):
        state.add(slot, row.resolved)
    num_prompt = np.array([len(row.prompt) for row in rows], dtype=np.int32)
    positions = num_prompt + np.array([len(row.output) for row in rows], dtype=np.int32)

    def upload(array: np.ndarray) -> Tensor:
        uploads.append(array)
        return torch.from_numpy(array.copy()).to(DEVICE)

    return LogitsProcessors.of(state.take(slots), positions, num_prompt, masks, upload), history.to(DEVICE), uploads


def logits_of(num_rows: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def expected_logits(logits: Tensor, rows: Sequence[Row], masks: GrammarMasks | None = None) -> Tensor:
    """One row, one token at a time, in float32."""
    out = logits.numpy().copy()
    for i, (row, values) in enumerate(zip(rows, out, strict=True)):
        params, tokens = row.params, [*row.prompt, *row.output]
        if masks is not None and i in masks.rows:
            words = masks.masks[masks.rows.tolist().index(i)].tolist()
            values[[t for t in range(VOCAB_SIZE) if not words[t // 32] >> t % 32 & 1]] = -np.inf
        if params.allowed_token_ids is not None:
            values[[t for t in range(VOCAB_SIZE) if t not in params.allowed_token_ids]] = -np.inf
        for token, bias in (params.logit_bias or {}).items():
            values[token] += np.float32(bias)
        completed = [word[-1] for word in row.bad_words if list(word[:-1]) == tokens[len(tokens) - len(word) + 1 :]]
        too_early = row.stop_token_ids if len(row.output) < params.min_tokens else []
        for banned in (completed, too_early):
            before = values.copy()
            values[list(banned)] = -np.inf
            if (values == -np.inf).all():
                values[:] = before
        for token in {*tokens} if params.repetition_penalty != 1.0 else ():
            penalty = np.float32(params.repetition_penalty)
            values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
        for token in {*row.output}:
            count = np.float32(row.output.count(token))
            values[token] -= count * np.float32(params.frequency_penalty) + np.float32(params.presence_penalty)
    return torch.from_numpy(out)


def device_logits(logits: Tensor, rows: Sequence[Row], masks: GrammarMasks | None = None) -> Tensor:
    found, history, _ = processors_of(rows, masks)
    logits = logits.to(DEVICE, copy=True)
    if found is not None:
        found.apply(logits, history)
    return logits.cpu()


@given(
    st.data(),
    st.lists(rows_with_features(), min_size=1, max_size=5),
    st.integers(0, 2**30),
    st.sampled_from([80, 10**6]),
)
def test_logits_and_logprobs_are_those_of_plain_loops(
    data: st.DataObject, rows: list[Row], seed: int, chunk: int
) -> None:
    masks = data.draw(grammar_masks(len(rows)))
    logits = logits_of(len(rows), seed)
    found, history, uploads = processors_of(rows, masks)
    assert len(uploads) == (found is not None)
    drawn = sample(logits, rows, masks)
    changed = logits.to(DEVICE, copy=True)
    if found is not None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(processors, "CHUNK_ELEMENTS", {DEVICE.type: chunk})
            found.apply(changed, history)
    assert torch.equal(changed.cpu(), expected_logits(logits, rows, masks))
    logprobs = None if found is None else found.logprobs(drawn.token_ids.to(DEVICE))
    assert (logprobs is None) == (drawn.logprobs is None)
    if found is not None and logprobs is not None and drawn.logprobs is not None:
        assert found.logprobs_rows is not None and drawn.logprobs_rows is not None
        assert found.logprobs_rows.tolist() == drawn.logprobs_rows.tolist()
        assert torch.equal(logprobs.token_ids.cpu(), drawn.logprobs.token_ids)
        assert torch.equal(logprobs.ranks.cpu(), drawn.logprobs.ranks)
        torch.testing.assert_close(logprobs.logprobs.cpu(), drawn.logprobs.logprobs, equal_nan=True)


@pytest.mark.parametrize(
    "row",
    [
        Row(GREEDY),
        Row(SamplingParams(top_k=3, top_p=0.5)),
        Row(SamplingParams(min_tokens=2), output=[1, 1], stop_token_ids=[3]),  # no more
        Row(SamplingParams(), bad_words=[[5, 5, 5, 5, 6]]),  # longer than what there is
    ],
)
def test_a_row_that_needs_nothing_costs_nothing(row: Row) -> None:
    found, _, uploads = processors_of([row, Row(GREEDY)])
    assert found is None and not uploads


def greedy(**fields: Any) -> SamplingParams:  # Any: the fields of SamplingParams
    return SamplingParams(temperature=0.0, **fields)


def test_a_draft_sees_only_the_tokens_before_it() -> None:
    """Rows of one slot, at rising positions, as they verify drafts."""
    row = Row(greedy(repetition_penalty=2.0, frequency_penalty=1.0), prompt=[1, 2], bad_words=[[7, 7], [9]])
    state = SamplingState(2, VOCAB_SIZE, "cpu")
    state.add(1, row.resolved)
    history = torch.full((3, 10), NOT_YET, dtype=torch.int32)
    history[1, :5] = torch.tensor([1, 2, 7, 7, 8])
    positions = np.array([2, 3, 4, 5], dtype=np.int32)
    rows = state.take(np.ones(4, dtype=np.int32))
    found = LogitsProcessors.of(
        rows, positions, np.full(4, 2, dtype=np.int32), None, lambda array: torch.from_numpy(array).to(DEVICE)
    )
    logits = logits_of(4)
    expected = torch.cat(
        [
            expected_logits(
                logits[i : i + 1], [Row(row.params, prompt=[1, 2], output=[7, 7, 8][:i], bad_words=row.bad_words)], None
            )
            for i in range(4)
        ]
    )
    assert found is not None
    changed = logits.to(DEVICE, copy=True)
    found.apply(changed, history.to(DEVICE))
    assert torch.equal(changed.cpu(), expected)


def test_a_ban_that_would_leave_nothing_yields() -> None:
    """Two words end with one token, of which one applies; it is the only token that is allowed."""
    words = [[3, 5], [4, 5], [1, 6]]
    rows = [
        Row(greedy(allowed_token_ids=[5]), prompt=[3], bad_words=words),
        Row(greedy(allowed_token_ids=[5, 6]), prompt=[3], bad_words=words),
        Row(greedy(), prompt=[4], bad_words=words),
    ]
    out = device_logits(logits_of(3), rows)
    assert [row.isfinite().nonzero()[:, 0].tolist() for row in out[:2]] == [[5], [6]]
    assert torch.equal(out, expected_logits(logits_of(3), rows))


def test_logprobs_are_of_the_logits_before() -> None:
    rows = [Row(greedy(logprobs=2, allowed_token_ids=[4])), Row(greedy())]
    logits = logits_of(2)
    found, history, _ = processors_of(rows)
    assert found is not None and found.num_logprobs == 2
    found.apply(logits.to(DEVICE, copy=True), history)
    logprobs = found.logprobs(torch.tensor([4, 0], dtype=torch.int32, device=DEVICE))
    assert logprobs is not None
    torch.testing.assert_close(logprobs.logprobs[0, 0].cpu(), logits.log_softmax(1)[0, 4])
    assert logprobs.token_ids[0, 1:].tolist() == logits[0].topk(2).indices.tolist()


def test_one_copy_holds_arrays_of_every_kind() -> None:
    arrays = {
        "a": np.arange(3, dtype=np.int64),
        "b": np.array([[1.5], [2.5], [3.5]], dtype=np.float32),
        "c": np.arange(6, dtype=np.int32).reshape(2, 3),
        "d": np.empty((0, 2), dtype=np.int32),
        "e": np.array([7], dtype=np.int64),
    }
    found = in_one_copy(arrays, torch.from_numpy)
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].numpy().dtype == array.dtype
        np.testing.assert_array_equal(found[name].numpy(), array)
