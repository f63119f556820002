"""Log-probabilities: of the raw logits, ranked, for the rows that asked."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from inflight.sample.logprobs import gather_logprobs
from inflight.sampling_params import SamplingParams
from tests.unit.sample.batch import Row, sample


def logits_of(num_rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("k", [0, 1, 5, 100])
@pytest.mark.parametrize("vocab_size", [100, 5000, 151_936])
def test_gather_against_log_softmax(vocab_size: int, k: int) -> None:
    logits = logits_of(7, vocab_size)
    before = logits.clone()
    tokens = torch.tensor([0, 1, vocab_size - 1, 5, 50, 99, 3], dtype=torch.int32)
    columns = gather_logprobs(logits, tokens, k).to_columns()
    assert torch.equal(logits, before)
    expected = logits.double().log_softmax(dim=1)
    assert columns.token_ids.dtype == np.int32
    assert columns.logprobs.dtype == np.float32
    assert columns.ranks.dtype == np.int32
    assert columns.token_ids.shape == columns.logprobs.shape == (7, 1 + k)
    assert columns.token_ids[:, 0].tolist() == tokens.tolist()
    assert columns.token_ids[:, 1:].tolist() == expected.argsort(dim=1, descending=True)[:, :k].tolist()
    at = expected.gather(1, torch.from_numpy(columns.token_ids).long())
    torch.testing.assert_close(torch.from_numpy(columns.logprobs).double(), at, rtol=1e-5, atol=1e-5)
    own = expected.gather(1, tokens.long()[:, None])
    assert columns.ranks.tolist() == (1 + (expected > own).sum(dim=1)).tolist()


def test_equals_share_a_rank_and_stand_by_id() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0]])
    for token, rank in ((0, 4), (1, 1), (2, 1), (3, 5), (4, 1)):
        columns = gather_logprobs(logits, torch.tensor([token]), 4).to_columns()
        assert columns.ranks.tolist() == [rank]
        assert columns.token_ids[0, 1:].tolist() == [1, 2, 4, 0]


def test_equals_at_the_edge_stand_by_id() -> None:
    logits = torch.zeros(2, 5000)
    logits[1, 4321] = 1.0
    columns = gather_logprobs(logits, torch.tensor([7, 7]), 3).to_columns()
    assert columns.token_ids[:, 1:].tolist() == [[0, 1, 2], [4321, 0, 1]]


def test_a_row_alone_and_among_many_is_the_same() -> None:
    logits = logits_of(40, 6000)
    tokens = torch.arange(40)
    together = gather_logprobs(logits, tokens, 5).to_columns()
    for i in (0, 17, 39):
        alone = gather_logprobs(logits[i : i + 1], tokens[i : i + 1], 5).to_columns()
        row = together.rows(i, i + 1)
        assert (alone.token_ids == row.token_ids).all()
        assert (alone.logprobs == row.logprobs).all()
        assert (alone.ranks == row.ranks).all()


def test_no_rows_and_masked_logits() -> None:
    assert gather_logprobs(torch.empty(0, 9), torch.empty(0, dtype=torch.int64), 2).to_columns().token_ids.shape == (
        0,
        3,
    )
    logits = torch.full((1, 6), -torch.inf)
    logits[0, 2] = 1.0
    columns = gather_logprobs(logits, torch.tensor([2]), 2).to_columns()
    assert columns.logprobs.tolist() == [[0.0, 0.0, -np.inf]]


def test_an_impossible_token_has_no_logprob() -> None:
    columns = gather_logprobs(torch.zeros(1, 4), torch.tensor([-1]), 1).to_columns()
    assert columns.token_ids.tolist() == [[-1, 0]]
    assert np.isnan(columns.logprobs[0, 0])


# ---- in the sampler


def test_they_are_of_the_raw_logits_and_of_the_drawn_token() -> None:
    """Whatever changes the draw does not change them."""
    logits = logits_of(4, 300)
    rows = [
        Row(SamplingParams(temperature=0.0)),
        Row(SamplingParams(temperature=3.0, top_k=50, logprobs=2), seed=1),
        Row(SamplingParams(logit_bias={4: 100.0}, repetition_penalty=2.0, logprobs=4), prompt=[4], seed=2),
        Row(SamplingParams(allowed_token_ids=[9], logprobs=0)),
    ]
    out = sample(logits, rows)
    assert out.logprobs is not None
    assert out.logprobs_rows is not None
    assert out.logprobs_rows.dtype == np.int32
    assert out.logprobs_rows.tolist() == [1, 2, 3]
    columns = out.logprobs.to_columns()
    assert columns.token_ids.shape == (3, 5)  # as many as the row that asked for the most
    drawn = out.token_ids.tolist()
    assert columns.token_ids[:, 0].tolist() == drawn[1:]
    assert drawn[2:] == [4, 9]
    expected = logits.log_softmax(dim=1)
    for i, row in enumerate([1, 2, 3]):
        assert columns.logprobs[i, 0] == pytest.approx(float(expected[row, drawn[row]]), abs=1e-5)
        assert columns.token_ids[i, 1:].tolist() == expected[row].topk(4).indices.tolist()
        assert columns.ranks[i] == 1 + int((expected[row] > expected[row, drawn[row]]).sum())


def test_no_row_asked() -> None:
    out = sample(logits_of(2, 50), [Row(), Row(SamplingParams())])
    assert out.logprobs is None
    assert out.logprobs_rows is None


def test_more_than_the_vocabulary_holds() -> None:
    out = sample(logits_of(1, 5), [Row(SamplingParams(logprobs=20))])
    assert out.logprobs is not None
    assert out.logprobs.token_ids.shape == (1, 6)


def test_more_than_the_vocabulary_holds_of_a_prompt() -> None:
    assert gather_logprobs(logits_of(2, 5), torch.tensor([1, 2]), 20).to_columns().logprobs.shape == (2, 6)
