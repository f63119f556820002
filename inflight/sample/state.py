"""`SamplingState`: how each slot's request is sampled, as columns, so that a step's metadata is a few vectorised picks.

Owns one row per slot of the InputBatch. `add` overwrites a slot; there is no remove: a slot nobody samples costs nothing.
Work per step is in numpy over the rows; Python loops run only over rows that have a feature with a list of its own.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from inflight.interface.request import Int32Array, ResolvedSampling
from inflight.sample.history import HistoryRows
from inflight.sample.metadata import (
    Bans,
    RandomRows,
    RestrictedRows,
    SamplingMetadata,
    to_device,
)
from inflight.sample.seeds import MASK64, draw_keys
from inflight.sample.token_lists import TokenLists, allowed_tokens, logit_bias, stop_bans

IntArray = npt.NDArray[np.integer]
Int64Array = npt.NDArray[np.int64]

# Bits of the column `features`; 0 is a greedy row without extras.
RANDOM = 1
RESTRICTED = 2
ALLOWED = 4
BIAS = 8
BAD_WORDS = 16
MIN_TOKENS = 32
REPETITION = 64
OUTPUT_PENALTY = 128
LOGPROBS = 256

HISTORY = BAD_WORDS | REPETITION | OUTPUT_PENALTY
LISTS = ALLOWED | BIAS | BAD_WORDS | MIN_TOKENS

NO_ROWS: Int64Array = np.empty(0, dtype=np.int64)

WINDOW = 128  # of the most probable tokens; mostly holds what top_p and min_p leave
MAX_WINDOW = 256  # a larger top_k is for the race of all tokens
MIN_TEMPERATURE = 1e-20  # logits / T must stay finite; far below 1e-6 every draw is the argmax anyway
MIN_REPETITION_PENALTY = 1e-10  # so must logits / penalty


class SamplingState:
    """Columns of sampling parameters, one row per slot.

    Args:
        max_num_seqs: the number of slots.
        vocab_size: the width of the logits. Lists drop token ids beyond it (`validation.py` is where the user hears of them).
        device: where the metadata's tensors go.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device | str) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._features = np.zeros(max_num_seqs, dtype=np.int32)
        self._temperature = np.ones(max_num_seqs, dtype=np.float32)
        self._seed = np.zeros(max_num_seqs, dtype=np.uint64)
        self._top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self._top_p = np.zeros(max_num_seqs, dtype=np.float64)
        self._log_min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self._repetition = np.ones(max_num_seqs, dtype=np.float32)
        self._frequency = np.zeros(max_num_seqs, dtype=np.float32)
        self._presence = np.zeros(max_num_seqs, dtype=np.float32)
        self._num_logprobs = np.zeros(max_num_seqs, dtype=np.int32)
        self._min_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._lists: list[TokenLists | None] = [None] * max_num_seqs

    def add(self, slot: int, sampling: ResolvedSampling) -> None:
        """Give `slot` to a request, whatever was there."""
        params = sampling.params
        self._features[slot] = features = features_of(sampling, self.vocab_size)
        self._lists[slot] = TokenLists.of(sampling, self.vocab_size, self.device) if features & LISTS else None
        self._temperature[slot] = max(params.temperature, MIN_TEMPERATURE)
        self._seed[slot] = sampling.seed & MASK64
        self._top_k[slot] = min(params.top_k, self.vocab_size) if params.top_k > 0 else self.vocab_size
        self._top_p[slot] = params.top_p if params.top_p < 1.0 else 2.0
        self._log_min_p[slot] = np.log(params.min_p) if params.min_p > 0.0 else -np.inf
        self._repetition[slot] = max(params.repetition_penalty, MIN_REPETITION_PENALTY)
        self._frequency[slot] = params.frequency_penalty
        self._presence[slot] = params.presence_penalty
        self._num_logprobs[slot] = min(params.logprobs or 0, self.vocab_size)
        self._min_tokens[slot] = params.min_tokens

    def needs_history(self, slots: Int32Array) -> bool:
        """Whether a row of `slots` looks at the tokens before its draw."""
        return bool(np.bitwise_or.reduce(self._features[slots], initial=0) & HISTORY)

    def metadata(self, slots: Int32Array, positions: IntArray, num_prompt_tokens: IntArray) -> SamplingMetadata:
        """What the sampler needs for one step, without what `history` adds; a snapshot: a later `add` does not reach into it.

        Args:
            slots: [num_rows], one per sampling row; a slot may come more than once (drafts being verified).
            positions: [num_rows], the position of the token to be drawn: the number of tokens before it.
            num_prompt_tokens: [num_rows].
        """
        num_rows = len(slots)
        features = self._features[slots]
        union = int(np.bitwise_or.reduce(features, initial=0))
        if not union:
            return SamplingMetadata(num_rows=num_rows)

        def pick(feature: int) -> Int64Array:
            return np.flatnonzero(features & feature)

        device, vocab_size = self.device, self.vocab_size
        greedy = np.flatnonzero(features & (RANDOM | RESTRICTED) == 0)
        allowed = pick(ALLOWED) if union & ALLOWED else NO_ROWS
        bias = pick(BIAS) if union & BIAS else NO_ROWS
        logprobs = pick(LOGPROBS) if union & LOGPROBS else NO_ROWS
        return SamplingMetadata(
            num_rows=num_rows,
            greedy_rows=to_device(greedy, device) if 0 < len(greedy) < num_rows else None,
            random=self._random_rows(pick(RANDOM), slots, positions) if union & RANDOM else None,
            restricted=self._restricted_rows(pick(RESTRICTED), slots, positions) if union & RESTRICTED else None,
            allowed=allowed_tokens(allowed.tolist(), self._lists_of(slots[allowed])),
            bias=logit_bias(bias, self._lists_of(slots[bias]), vocab_size, device) if len(bias) else None,
            min_tokens=self._stop_bans(pick(MIN_TOKENS), slots, positions - num_prompt_tokens)
            if union & MIN_TOKENS
            else None,
            logprobs_rows=logprobs.astype(np.int32) if len(logprobs) else None,
            num_logprobs=int(self._num_logprobs[slots[logprobs]].max(initial=0)),
        )

    def history(self, slots: Int32Array, num_prompt_tokens: IntArray, num_tokens: IntArray) -> HistoryRows | None:
        """The rows of the same step that look at the tokens before the draw, or None; a snapshot too.

        Args:
            slots, num_prompt_tokens: as for `metadata`.
            num_tokens: [num_rows], how many tokens (prompt and output) come before the draw and count.
        """
        features = self._features[slots]
        if not int(np.bitwise_or.reduce(features, initial=0)) & HISTORY:
            return None
        repetition, output, bad_words = (
            np.flatnonzero(features & feature) for feature in (REPETITION, OUTPUT_PENALTY, BAD_WORDS)
        )
        return HistoryRows(
            vocab_size=self.vocab_size,
            slots=slots.copy(),
            num_prompt_tokens=num_prompt_tokens.astype(np.int64),
            num_tokens=num_tokens.astype(np.int64),
            repetition=repetition,
            repetition_penalty=self._repetition[slots[repetition]],
            output=output,
            frequency=self._frequency[slots[output]],
            presence=self._presence[slots[output]],
            bad_words=bad_words,
            lists=self._lists_of(slots[bad_words]),
        )

    def _lists_of(self, slots: Int32Array) -> list[TokenLists]:
        found = [self._lists[slot] for slot in slots.tolist()]
        return [lists for lists in found if lists is not None]

    def _random_rows(self, rows: Int64Array, slots: Int32Array, positions: IntArray) -> RandomRows:
        whole = len(rows) == len(slots)
        if not whole:
            slots, positions = slots[rows], positions[rows]
        temperature = self._temperature[slots]
        keys = draw_keys(self._seed[slots], positions)
        return RandomRows(
            rows=None if whole else to_device(rows, self.device),
            temperature=None if (temperature == 1.0).all() else to_device(temperature[:, None], self.device),
            keys=to_device(keys, self.device),
        )

    def _restricted_rows(self, rows: Int64Array, slots: Int32Array, positions: IntArray) -> RestrictedRows:
        base = self._random_rows(rows, slots, positions)
        slots = slots[rows]
        top_k = self._top_k[slots]
        enough = np.where(
            top_k < self.vocab_size, top_k + 1, WINDOW
        )  # one more than k shows that nothing ties with the k-th
        return RestrictedRows(
            rows=base.rows,
            temperature=base.temperature,
            keys=base.keys,
            top_k=to_device(top_k[:, None], self.device),
            top_p=to_device(self._top_p[slots, None], self.device),
            log_min_p=to_device(self._log_min_p[slots, None], self.device),
            window=min(int(enough.max()), MAX_WINDOW, self.vocab_size),
        )

    def _stop_bans(self, rows: Int64Array, slots: Int32Array, num_emitted: IntArray) -> Bans | None:
        rows = rows[num_emitted[rows] < self._min_tokens[slots[rows]]]
        return stop_bans(rows, self._lists_of(slots[rows]), self.vocab_size, self.device) if len(rows) else None


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
