"""Checks of sampling parameters that need the vocabulary's size. The front end calls them, so they do not import torch."""

from collections.abc import Iterable

from inflight.errors import InvalidRequestError
from inflight.interface.request import ResolvedSampling
from inflight.sampling_params import LOGPROBS_PARAMETERS, SamplingParams


def check_sampling(sampling: ResolvedSampling, vocab_size: int) -> None:
    """Check that all token ids are in the vocabulary, and that some token can be drawn.

    Raises:
        InvalidRequestError: a token id that the user gave is outside the vocabulary. Or no token could be drawn, because each
            allowed token is forbidden: min_tokens forbids end tokens, and bad_words forbid words of one token.
    """
    params = sampling.params
    _check_within("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    _check_within("logit_bias", params.logit_bias or (), vocab_size)
    _check_within("stop_token_ids", params.stop_token_ids or (), vocab_size)
    if params.allowed_token_ids is not None:
        _check_allowed(sampling, frozenset(params.allowed_token_ids))


def _check_allowed(sampling: ResolvedSampling, allowed: frozenset[int]) -> None:
    """Check that a token of `allowed` can be drawn."""
    params = sampling.params
    bad = {word[0] for word in sampling.bad_words_token_ids if len(word) == 1}
    if allowed <= bad:
        raise InvalidRequestError(
            f"bad_words forbid every token of allowed_token_ids={sorted(allowed)[:8]}, so no token could be drawn: allow "
            "another token, or remove a bad word",
            "bad_words",
        )
    if params.min_tokens > 0 and allowed <= bad | sampling.stop_token_ids:
        raise InvalidRequestError(
            f"allowed_token_ids={sorted(allowed)[:8]} has only bad words and end tokens, which min_tokens={params.min_tokens} "
            "forbids, so no token could be drawn: allow another token, or leave min_tokens out",
            "allowed_token_ids",
        )


def check_num_logprobs(params: SamplingParams, vocab_size: int) -> None:
    """Check how many log-probabilities are wanted.

    Raises:
        InvalidRequestError: more log-probabilities are wanted than the vocabulary has tokens.
    """
    for name in LOGPROBS_PARAMETERS:
        count = getattr(params, name)
        if count is not None and count > vocab_size:
            raise InvalidRequestError(
                f"{name}={count} is more than the vocabulary's {vocab_size} tokens; give at most {vocab_size}", name
            )


def _check_within(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"{name} holds {token_id}, but the model's token ids are 0 to {vocab_size - 1}", name
            )
