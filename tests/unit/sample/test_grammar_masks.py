"""Grammar masks in the sampler: a wall for the draw, nothing to the log-probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from inflight.sample.rows import GrammarMasks
from inflight.sample.sampler import IMPOSSIBLE_TOKEN
from inflight.sampling_params import SamplingParams
from tests.unit.sample.batch import GREEDY, Row, sample

VOCAB_SIZE = 77


def logits_of(num_rows: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * scale


def masks_of(admitted: dict[int, set[int]]) -> GrammarMasks:
    """Row -> the tokens that its mask admits."""
    bits = np.zeros((len(admitted), -(-VOCAB_SIZE // 32) * 32), dtype=np.uint8)
    for i, tokens in enumerate(admitted.values()):
        bits[i, list(tokens)] = 1
        bits[i, VOCAB_SIZE:] = i % 2  # counts for nothing
    return GrammarMasks(
        rows=np.array(list(admitted), dtype=np.int64), masks=np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    )


TOKENS = st.integers(0, VOCAB_SIZE - 1)
TOKEN_LISTS = st.lists(TOKENS, max_size=6)


@st.composite
def sampling_rows(draw: st.DrawFn) -> Row:
    """Of every kind, extreme values among them; without allowed_token_ids."""
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1e-300, 1e-3, 0.7, 1.0, 1e4])),
        top_k=draw(st.sampled_from([0, 1, 3, VOCAB_SIZE])),
        top_p=draw(st.sampled_from([5e-324, 0.5, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.1, 1.0])),
        logit_bias=draw(st.dictionaries(TOKENS, st.sampled_from([-100.0, -1.0, 2.0, 100.0]), max_size=8)),
        repetition_penalty=draw(st.sampled_from([1e-300, 0.5, 1.0, 2.0, 1e4])),
        frequency_penalty=draw(st.sampled_from([-2.0, 0.0, 2.0])),
        presence_penalty=draw(st.sampled_from([-2.0, 0.0, 2.0])),
        min_tokens=draw(st.sampled_from([0, 16])),
        logprobs=draw(st.sampled_from([None, 0, 3])),
    )
    return Row(
        params,
        seed=draw(st.integers(0, 2**64 - 1)),
        prompt=draw(st.lists(TOKENS, min_size=1, max_size=6)),
        output=draw(TOKEN_LISTS),
        stop_token_ids=draw(TOKEN_LISTS),
        bad_words=draw(st.lists(st.lists(TOKENS, min_size=1, max_size=2), max_size=6)),
    )


ROWS = st.lists(sampling_rows(), min_size=1, max_size=5)


@given(rows=ROWS, data=st.data(), scale=st.sampled_from([0.0, 3.0, 1e4]))
def test_one_admitted_token_is_drawn_whatever_else_is_asked(rows: list[Row], data: st.DataObject, scale: float) -> None:
    only = [data.draw(TOKENS) for _ in rows]
    logits = logits_of(len(rows), scale=scale)
    at = torch.arange(len(rows)), torch.tensor(only)
    if data.draw(st.booleans()):
        logits[at] = logits.amin(dim=1) - 1e4  # the least likely of all
    banning = [  # the token itself is biased away, a bad word and an end token that comes too early
        Row(
            SamplingParams(temperature=0.0, logit_bias={token: -100.0}, min_tokens=16),
            stop_token_ids=[token],
            bad_words=[[token]],
        )
        for token in only[:1]
    ]
    logits, only = torch.cat([logits, logits[:1]]), [*only, only[0]]
    out = sample(logits, rows + banning, masks_of({i: {token} for i, token in enumerate(only)}))
    assert out.token_ids.tolist() == only


@given(rows=ROWS, data=st.data())
def test_a_mask_is_the_same_as_logits_that_are_minus_infinity(rows: list[Row], data: st.DataObject) -> None:
    """In the rows that have one; log-probabilities are those of the logits before."""
    masked = data.draw(st.lists(st.sampled_from(range(len(rows))), unique=True).map(sorted))
    admitted = {row: data.draw(st.sets(TOKENS)) for row in masked}
    logits = logits_of(len(rows))
    forbidden = np.zeros(logits.shape, dtype=bool)
    for row, tokens in admitted.items():
        forbidden[row] = [token not in tokens for token in range(VOCAB_SIZE)]
    walled = logits.masked_fill(torch.from_numpy(forbidden), -torch.inf)
    out, plain = sample(logits, rows, masks_of(admitted)), sample(walled, rows)
    tokens = out.token_ids.tolist()
    assert tokens == plain.token_ids.tolist()
    for row, wanted in admitted.items():
        assert tokens[row] in wanted if wanted else tokens[row] == IMPOSSIBLE_TOKEN
    assert all(tokens[row] >= 0 for row in range(len(rows)) if row not in admitted)
    if out.logprobs is None or out.logprobs_rows is None:
        assert all(row.params.logprobs is None for row in rows)
        return
    columns, truth = out.logprobs.to_columns(), logits.double().log_softmax(dim=1)
    for i, row in enumerate(out.logprobs_rows.tolist()):
        assert columns.token_ids[i, 0] == tokens[row]
        if tokens[row] >= 0:
            assert columns.logprobs[i, 0] == pytest.approx(float(truth[row, tokens[row]]), abs=1e-4)
        k = columns.token_ids.shape[1] - 1
        assert columns.token_ids[i, 1:].tolist() == truth[row].topk(k).indices.tolist()


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}])
def test_no_admitted_token_is_impossible_in_its_row_only(fields: dict[str, Any]) -> None:
    rows = [Row(SamplingParams(**fields), seed=i) for i in range(3)]
    logits = logits_of(3)
    free = sample(logits, rows).token_ids.tolist()
    assert sample(logits, rows, masks_of({1: set()})).token_ids.tolist() == [free[0], IMPOSSIBLE_TOKEN, free[2]]


def test_two_walls() -> None:
    """A mask does not open what allowed_token_ids closes, nor the reverse."""
    allowed = Row(SamplingParams(temperature=0.0, allowed_token_ids=[3, 4]))
    rows, masks = [allowed, allowed, Row(GREEDY)], masks_of({0: {4, 5}, 1: {5}})
    assert sample(logits_of(3), rows, masks).token_ids.tolist()[:2] == [4, IMPOSSIBLE_TOKEN]


def test_no_masks() -> None:
    logits, rows = logits_of(2), [Row(GREEDY), Row(GREEDY)]
    assert torch.equal(sample(logits, rows, masks_of({})).token_ids, sample(logits, rows).token_ids)
