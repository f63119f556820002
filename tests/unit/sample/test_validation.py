"""Refusals that need the vocabulary."""

from __future__ import annotations

import pytest

from inflight.errors import InvalidRequestError
from inflight.sample.validation import check_num_logprobs, check_sampling
from inflight.sampling_params import SamplingParams
from tests.support.refusals import refused
from tests.unit.sample.batch import Row


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Row(SamplingParams(allowed_token_ids=[3, 100])), r"allowed_token_ids holds 100, .* 0 to 99"),
        (Row(SamplingParams(logit_bias={100: 1.0})), "logit_bias holds 100"),
        (Row(SamplingParams(stop_token_ids=[100])), "stop_token_ids holds 100"),
        (Row(SamplingParams(allowed_token_ids=[3, 4]), bad_words=[[3], [4]]), "bad_words forbid every"),
        (
            Row(SamplingParams(allowed_token_ids=[3, 4], min_tokens=1), stop_token_ids=[3, 4]),
            "only bad words and end tokens",
        ),
        (
            Row(SamplingParams(allowed_token_ids=[3, 4], min_tokens=1), stop_token_ids=[3], bad_words=[[4]]),
            "min_tokens",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(row: Row, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        check_sampling(row.resolved, vocab_size=100)


@pytest.mark.parametrize(
    "row",
    [
        Row(),
        Row(SamplingParams(allowed_token_ids=[0, 99], logit_bias={0: 1.0, 99: 1.0}, stop_token_ids=[99])),
        Row(SamplingParams(allowed_token_ids=[3, 4], min_tokens=1), stop_token_ids=[3]),
        Row(SamplingParams(allowed_token_ids=[3]), stop_token_ids=[3]),
        Row(SamplingParams(allowed_token_ids=[3, 4]), bad_words=[[3], [4, 4]]),
        Row(stop_token_ids=[200]),  # the model's own end token, of a padded vocabulary: never drawn
    ],
)
def test_what_can_be_done_passes(row: Row) -> None:
    check_sampling(row.resolved, vocab_size=100)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_log_probabilities_of_more_tokens_than_there_are(name: str) -> None:
    def params(count: int) -> SamplingParams:
        return SamplingParams(logprobs=count) if name == "logprobs" else SamplingParams(prompt_logprobs=count)

    check_num_logprobs(params(50), 50)
    check_num_logprobs(SamplingParams(), 0)
    with refused(name, 50):
        check_num_logprobs(params(51), 50)


def test_end_tokens_are_forbidden_only_before_min_tokens() -> None:
    """Bad words alone, and end tokens alone, leave a token each."""
    row = Row(SamplingParams(allowed_token_ids=[3, 4], min_tokens=2), stop_token_ids=[3, 5], bad_words=[[5], [4, 3]])
    check_sampling(row.resolved, vocab_size=100)
    with refused("allowed_token_ids"):
        check_sampling(
            Row(SamplingParams(allowed_token_ids=[3], min_tokens=2), stop_token_ids=[3]).resolved, vocab_size=100
        )
