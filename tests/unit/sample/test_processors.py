"""Masks, bias and penalties: against transformers' processors and plain loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from inflight.sampling_params import SamplingParams
from tests.unit.sample.batch import Row, processed, tokens_of

VOCAB_SIZE = 40
INF = torch.inf


def greedy(**fields: Any) -> SamplingParams:  # Any: the fields of SamplingParams
    return SamplingParams(temperature=0.0, **fields)


def logits_of(num_rows: int, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def finite(row: Tensor) -> list[int]:
    return row.isfinite().nonzero()[:, 0].tolist()


def ids(*tokens: int) -> Tensor:
    return torch.tensor([tokens])


def test_a_plain_row_is_not_touched() -> None:
    logits = logits_of(3)
    rows = [Row(greedy()), Row(SamplingParams(top_k=3)), Row(SamplingParams(min_tokens=3), stop_token_ids=())]
    assert torch.equal(processed(logits, rows), logits)


def test_a_row_with_everything_leaves_the_others_alone() -> None:
    params = greedy(
        logit_bias={1: 2.0},
        allowed_token_ids=list(range(20)),
        min_tokens=5,
        repetition_penalty=1.5,
        frequency_penalty=0.5,
        presence_penalty=0.5,
    )
    row = Row(params, prompt=[1, 2], output=[3, 3], stop_token_ids=[5], bad_words=[[7], [3, 8]])
    logits = logits_of(3)
    out = processed(logits, [Row(), row, Row(SamplingParams())])
    assert torch.equal(out[[0, 2]], logits[[0, 2]])
    assert torch.equal(out[1], processed(logits[1:2], [row])[0])
    assert not torch.equal(out[1], logits[1])


# ---- allowed_token_ids


def test_nothing_but_the_allowed() -> None:
    logits = logits_of(2)
    out = processed(logits, [Row(greedy(allowed_token_ids=[3, 9, 9])), Row(greedy(allowed_token_ids=[39]))])
    assert [finite(row) for row in out] == [[3, 9], [39]]
    assert torch.equal(out[0, [3, 9]], logits[0, [3, 9]])


def test_allowed_tokens_outside_the_vocabulary() -> None:
    logits = logits_of(1)
    assert finite(processed(logits, [Row(greedy(allowed_token_ids=[3, VOCAB_SIZE, 10**9]))])[0]) == [3]
    assert tokens_of(logits, [Row(greedy(allowed_token_ids=[VOCAB_SIZE]))]) == [-1]


# ---- logit_bias


def test_bias_is_added() -> None:
    logits = logits_of(3)
    rows = [Row(greedy(logit_bias={1: 5.0, 7: -100.0})), Row(), Row(greedy(logit_bias={0: 0.5, VOCAB_SIZE: 3.0, 2: 0}))]
    expected = logits.clone()
    expected[0, 1] += 5
    expected[0, 7] -= 100
    expected[2, 0] += 0.5
    assert torch.equal(processed(logits, rows), expected)
    as_transformers = SequenceBiasLogitsProcessor([[[1], 5.0], [[7], -100.0]])(ids(0), logits[:1].clone())
    assert torch.equal(processed(logits[:1], rows[:1]), as_transformers)


def test_bias_does_not_open_what_is_not_allowed() -> None:
    row = Row(greedy(allowed_token_ids=[3, 4], logit_bias={3: 1.0, 5: 100.0}))
    assert finite(processed(logits_of(1), [row])[0]) == [3, 4]


def test_bias_outside_the_vocabulary_only() -> None:
    logits = logits_of(1)
    assert torch.equal(processed(logits, [Row(greedy(logit_bias={VOCAB_SIZE: 5.0}))]), logits)


# ---- bad_words


@pytest.mark.parametrize(
    ("tokens", "banned"),
    [
        ([1, 2, 3], [9, 4]),  # [9] always, [3, 4] after 3
        ([1, 2], [9, 3]),  # [1, 2, 3] after 1, 2
        ([2, 1], [9]),
        ([2], [9]),  # shorter than the word
        ([3, 3], [9, 4, 3]),  # [3, 3, 3] after 3, 3
        ([3], [9, 4]),  # one 3 is not two
    ],
)
def test_the_token_that_completes_a_bad_word(tokens: list[int], banned: list[int]) -> None:
    words = [[9], [3, 4], [1, 2, 3], [3, 3, 3]]
    logits = logits_of(1)
    for split in range(1, len(tokens) + 1):  # a word may begin in the prompt
        row = Row(greedy(), prompt=tokens[:split], output=tokens[split:], bad_words=words)
        out = processed(logits, [row])
        assert sorted(set(range(VOCAB_SIZE)) - set(finite(out[0]))) == sorted(banned)
        expected = NoBadWordsLogitsProcessor(words, eos_token_id=-1)(ids(*tokens), logits.clone())
        assert torch.equal(out, expected)


def test_bad_words_of_two_rows() -> None:
    rows = [Row(greedy(), prompt=[1, 2], bad_words=[[2, 5]]), Row(greedy(), prompt=[1, 3], bad_words=[[2, 5], [3, 6]])]
    out = processed(logits_of(2), rows)
    assert [sorted(set(range(VOCAB_SIZE)) - set(finite(row))) for row in out] == [[5], [6]]


def test_bad_words_that_never_match() -> None:
    logits = logits_of(1)
    row = Row(greedy(), prompt=[1, 2], bad_words=[[7, 5], [VOCAB_SIZE], [], [2, VOCAB_SIZE + 3]])
    assert torch.equal(processed(logits, [row]), logits)


# ---- min_tokens


@pytest.mark.parametrize("num_emitted", [0, 1, 2, 3, 4])
def test_end_tokens_are_forbidden_before_min_tokens(num_emitted: int) -> None:
    logits = logits_of(1)
    row = Row(greedy(min_tokens=3), prompt=[1, 2], output=[4] * num_emitted, stop_token_ids=[5, 6, VOCAB_SIZE])
    out = processed(logits, [row])
    banned = sorted(set(range(VOCAB_SIZE)) - set(finite(out[0])))
    assert banned == ([5, 6] if num_emitted < 3 else [])
    expected = MinNewTokensLengthLogitsProcessor(2, 3, torch.tensor([5, 6]))(ids(1, 2, *[4] * num_emitted), logits)
    assert torch.equal(out, expected)


def test_min_tokens_counts_positions_not_known_tokens() -> None:
    """Ahead of the host: the tokens in between are still on the device."""
    row = Row(greedy(min_tokens=3), prompt=[1, 2], output=[4], stop_token_ids=[5], position=5)
    logits = logits_of(1)
    assert torch.equal(processed(logits, [row]), logits)


# ---- what happens when nothing would be left


def test_min_tokens_yields_to_allowed_token_ids() -> None:
    logits = logits_of(2)
    rows = [
        Row(greedy(min_tokens=9, allowed_token_ids=[5, 6]), stop_token_ids=[5, 6, 7]),
        Row(greedy(min_tokens=9, allowed_token_ids=[5, 8]), stop_token_ids=[5, 6, 7]),
    ]
    out = processed(logits, rows)
    assert [finite(row) for row in out] == [[5, 6], [8]]
    assert torch.equal(out[0, [5, 6]], logits[0, [5, 6]])


def test_min_tokens_yields_to_a_grammar() -> None:
    """The grammar is complete: its mask leaves the end token only."""
    logits = torch.full((1, VOCAB_SIZE), -INF)
    logits[0, 5] = -2.0
    assert tokens_of(logits, [Row(greedy(min_tokens=9), stop_token_ids=[5, 6])]) == [5]
    assert tokens_of(logits, [Row(SamplingParams(min_tokens=9), stop_token_ids=[5, 6])]) == [5]


def test_bad_words_yield_too_and_min_tokens_first() -> None:
    logits = logits_of(3)
    rows = [
        Row(greedy(allowed_token_ids=[4]), bad_words=[[4]]),
        Row(greedy(allowed_token_ids=[4, 5], min_tokens=2), bad_words=[[4]], stop_token_ids=[5]),
        Row(greedy(allowed_token_ids=[4, 5], min_tokens=2), bad_words=[[4], [5]], stop_token_ids=[5]),
    ]
    assert [finite(row) for row in processed(logits, rows)] == [[4], [5], [4]]


def test_a_row_without_any_token_stays_impossible() -> None:
    logits = torch.full((1, VOCAB_SIZE), -INF)
    row = Row(greedy(min_tokens=9, repetition_penalty=2.0, frequency_penalty=1.0), output=[5], stop_token_ids=[5])
    assert tokens_of(logits, [row]) == [-1]


# ---- penalties

TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30)


@st.composite
def penalised_rows(draw: st.DrawFn) -> Row:
    params = SamplingParams(
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.5, 2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.7, -1.1, 2.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.3, -2.0])),
    )
    return Row(params, prompt=draw(TOKENS) or [1], output=draw(TOKENS))


@given(rows=st.lists(penalised_rows(), min_size=1, max_size=6), seed=st.integers(0, 5))
def test_penalties_against_a_plain_loop(rows: list[Row], seed: int) -> None:
    logits = logits_of(len(rows), seed=seed)
    expected = logits.double()
    for i, row in enumerate(rows):
        for token in {*row.prompt, *row.output}:
            value = float(expected[i, token])
            penalty = row.params.repetition_penalty
            expected[i, token] = value / penalty if value > 0 else value * penalty
        for token in set(row.output):
            expected[i, token] -= list(row.output).count(token) * row.params.frequency_penalty
            expected[i, token] -= row.params.presence_penalty
    torch.testing.assert_close(processed(logits, rows).double(), expected, rtol=1e-6, atol=1e-6)


def test_repetition_penalty_is_that_of_transformers() -> None:
    logits = logits_of(1)
    tokens = [1, 2, 2, 3, 30, 1]
    expected = RepetitionPenaltyLogitsProcessor(1.7)(ids(*tokens), logits.clone())
    for split in (1, 3, 6):
        row = Row(greedy(repetition_penalty=1.7), prompt=tokens[:split], output=tokens[split:])
        assert torch.equal(processed(logits, [row]), expected)


def test_frequency_and_presence_count_the_output_only() -> None:
    logits = torch.zeros(2, VOCAB_SIZE)
    rows = [
        Row(greedy(frequency_penalty=0.5), prompt=[1, 1, 2], output=[2, 2, 3]),
        Row(greedy(presence_penalty=0.5), prompt=[1, 1, 2], output=[2, 2, 3]),
    ]
    out = processed(logits, rows)
    assert out[0, [1, 2, 3]].tolist() == [0.0, -1.0, -0.5]
    assert out[1, [1, 2, 3]].tolist() == [0.0, -0.5, -0.5]
    assert (out != 0).sum() == 4


def test_no_output_yet_is_no_penalty() -> None:
    logits = logits_of(1)
    row = Row(SamplingParams(frequency_penalty=1.0), prompt=[1, 2])
    assert torch.equal(processed(logits, [row]), logits)


def test_penalties_leave_masks_alone() -> None:
    row = Row(greedy(allowed_token_ids=[1], repetition_penalty=0.5, frequency_penalty=-2.0), output=[1, 2, 2])
    assert finite(processed(logits_of(1), [row])[0]) == [1]


def test_each_field_changes_the_greedy_token() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    cases: list[tuple[Row, int]] = [
        (Row(greedy()), 3),
        (Row(greedy(allowed_token_ids=[0, 1])), 1),
        (Row(greedy(logit_bias={0: 4.0})), 0),
        (Row(greedy(), bad_words=[[3]]), 2),
        (Row(greedy(), prompt=[0], bad_words=[[0, 3]]), 2),
        (Row(greedy(min_tokens=1), stop_token_ids=[3]), 2),
        (Row(greedy(repetition_penalty=2.0), prompt=[3]), 2),
        (Row(greedy(frequency_penalty=0.6), output=[3]), 3),
        (Row(greedy(frequency_penalty=0.6), output=[3, 3]), 2),
        (Row(greedy(presence_penalty=1.1), output=[3]), 2),
        (Row(greedy(presence_penalty=1.1), prompt=[3]), 3),
    ]
    for row, token in cases:
        assert tokens_of(logits, [row]) == [token], row
