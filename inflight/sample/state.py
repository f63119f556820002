"""`SamplingState`: the sampling parameters of each slot's request, as numpy columns, so a step copies its rows without a loop.

There is one row for each slot (place of a request) of the `InputBatch`. `add` overwrites a row. The row of a slot whose request
has ended keeps its old values.
"""

import numpy as np
import numpy.typing as npt
import torch

from inflight.interface.request import Int32Array, ResolvedSampling
from inflight.sample.processors import TokenLists
from inflight.sample.rows import (
    ALLOWED,
    BAD_WORDS,
    BIAS,
    LISTS,
    LOGPROBS,
    MIN_TOKENS,
    OUTPUT_PENALTY,
    PARAMETERS,
    RANDOM,
    REPETITION,
    RESTRICTED,
    SamplingRows,
)
from inflight.sample.seeds import MASK64

MIN_TEMPERATURE = 1e-20  # logits / T must stay finite; at 1e-6 and below every draw is the argmax
MIN_REPETITION_PENALTY = 1e-10  # logits / penalty must also stay finite


class SamplingState:
    """Columns of sampling parameters, one row per slot.

    Args:
        max_num_seqs: the number of slots.
        vocab_size: the number of logits in a row. Larger token ids are dropped. They cannot come from the user, because
            `validation.py` refuses such requests.
        device: the device of the metadata's tensors.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device | str) -> None:
        self._rows = SamplingRows(
            vocab_size=vocab_size,
            device=torch.device(device),
            slots=np.arange(max_num_seqs, dtype=np.int32),
            features=np.zeros(max_num_seqs, dtype=np.int32),
            parameters=np.zeros(max_num_seqs, dtype=PARAMETERS),
            lists=np.full(max_num_seqs, None, dtype=np.object_),
        )

    def add(self, slot: int, sampling: ResolvedSampling) -> None:
        """Give `slot` to a request; forget the request that had it."""
        rows, vocab_size = self._rows, self._rows.vocab_size
        rows.features[slot] = features = features_of(sampling, vocab_size)
        rows.lists[slot] = TokenLists.of(sampling, vocab_size) if features & LISTS else None
        rows.parameters[slot] = parameters_of(sampling, vocab_size)

    def take(self, slots: Int32Array) -> SamplingRows:
        """A copy of the rows of `slots`, which a later `add` does not change; a slot may occur several times."""
        return self._rows.take(slots)


def parameters_of(sampling: ResolvedSampling, vocab_size: int) -> npt.NDArray[np.void]:
    """A request's parameters as one record of the dtype PARAMETERS, [1]."""
    params, row = sampling.params, np.zeros(1, dtype=PARAMETERS)
    row["seed"] = sampling.seed & MASK64
    row["top_k"] = min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size
    row["top_p"] = params.top_p if params.top_p < 1.0 else 2.0
    row["min_tokens"] = params.min_tokens
    row["temperature"] = max(params.temperature, MIN_TEMPERATURE)
    row["log_min_p"] = np.log(params.min_p) if params.min_p > 0.0 else -np.inf
    row["repetition"] = max(params.repetition_penalty, MIN_REPETITION_PENALTY)
    row["frequency"] = params.frequency_penalty
    row["presence"] = params.presence_penalty
    row["num_logprobs"] = min(params.logprobs or 0, vocab_size)
    return row


def features_of(sampling: ResolvedSampling, vocab_size: int) -> int:
    """Which of the feature bits a request needs."""
    params = sampling.params
    features = 0
    if not params.greedy:
        restricted = 0 < params.top_k < vocab_size or params.top_p < 1.0 or params.min_p > 0.0
        features |= RESTRICTED if restricted else RANDOM
    for feature, needed in (
        (ALLOWED, params.allowed_token_ids is not None),
        (BIAS, bool(params.logit_bias)),
        (BAD_WORDS, bool(sampling.bad_words_token_ids)),
        (MIN_TOKENS, params.min_tokens > 0 and bool(sampling.stop_token_ids)),
        (REPETITION, params.repetition_penalty != 1.0),
        (OUTPUT_PENALTY, params.frequency_penalty != 0.0 or params.presence_penalty != 0.0),
        (LOGPROBS, params.logprobs is not None),
    ):
        features |= feature if needed else 0
    return features
