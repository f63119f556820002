"""`SamplingRows`: a frozen copy of some slots' sampling columns, and what a step is told of them.

A step that verifies drafts learns its rows and their positions only at the head of its forward, on the thread that computes;
by then a later plan may have given the slots to others. So the columns are copied when a step is planned, by
`SamplingState.take`, and read when its rows are known. Work is in numpy over the rows; Python loops run only over rows with a
list of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from inflight.interface.request import Int32Array
from inflight.sample.history import HistoryRows
from inflight.sample.metadata import Bans, RandomRows, RestrictedRows, SamplingMetadata, to_device
from inflight.sample.seeds import draw_keys
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

WINDOW = 128  # of the most probable tokens; mostly holds what top_p and min_p leave
MAX_WINDOW = 256  # a larger top_k is for the race of all tokens

PARAMETERS = np.dtype(  # one record per row, so that one gather copies all of them
    [
        ("seed", np.uint64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_tokens", np.int64),
        ("temperature", np.float32),
        ("log_min_p", np.float32),
        ("repetition", np.float32),
        ("frequency", np.float32),
        ("presence", np.float32),
        ("num_logprobs", np.int32),
    ],
    align=True,
)

NO_ROWS: Int64Array = np.empty(0, dtype=np.int64)
NO_PARAMETERS = np.empty(0, dtype=PARAMETERS)
NO_LISTS = np.empty(0, dtype=np.object_)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """Sampling parameters, one row per draw; made by `take` only."""

    vocab_size: int
    device: torch.device  # where the metadata's tensors go
    slots: Int32Array  # [num_rows]
    features: Int32Array  # [num_rows]
    parameters: npt.NDArray[np.void]  # [num_rows] of PARAMETERS; empty where no row has a feature
    lists: npt.NDArray[np.object_]  # [num_rows] of `TokenLists | None`; empty where no row has lists

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def needs_history(self) -> bool:
        """Whether a row looks at the tokens before its draw."""
        return bool(self._union & HISTORY)

    @property
    def _union(self) -> int:
        return int(np.bitwise_or.reduce(self.features, initial=0))

    def take(self, indices: IntArray) -> SamplingRows:
        """A copy of the rows `indices`, in that order; one may come more than once."""
        features = self.features[indices]
        union = int(np.bitwise_or.reduce(features, initial=0))
        return SamplingRows(
            vocab_size=self.vocab_size,
            device=self.device,
            slots=self.slots[indices],
            features=features,
            parameters=self.parameters[indices] if union else NO_PARAMETERS,
            lists=self.lists[indices] if union & LISTS else NO_LISTS,
        )

    def metadata(self, positions: IntArray, num_prompt_tokens: IntArray) -> SamplingMetadata:
        """What the sampler needs for one step of these rows, without what `history` adds.

        Args:
            positions: [num_rows], the position of the token to be drawn: the number of tokens before it.
            num_prompt_tokens: [num_rows].
        """
        features, union = self.features, self._union
        if not union:
            return SamplingMetadata(num_rows=self.num_rows)

        def pick(feature: int) -> Int64Array:
            return np.flatnonzero(features & feature) if union & feature else NO_ROWS

        greedy = np.flatnonzero(features & (RANDOM | RESTRICTED) == 0)
        allowed, bias, logprobs = pick(ALLOWED), pick(BIAS), pick(LOGPROBS)
        return SamplingMetadata(
            num_rows=self.num_rows,
            greedy_rows=to_device(greedy, self.device) if 0 < len(greedy) < self.num_rows else None,
            random=self._random_rows(pick(RANDOM), positions) if union & RANDOM else None,
            restricted=self._restricted_rows(pick(RESTRICTED), positions) if union & RESTRICTED else None,
            allowed=allowed_tokens(allowed.tolist(), self._lists_of(allowed)),
            bias=logit_bias(bias, self._lists_of(bias), self.vocab_size, self.device) if len(bias) else None,
            min_tokens=self._stop_bans(pick(MIN_TOKENS), positions - num_prompt_tokens) if union & MIN_TOKENS else None,
            logprobs_rows=logprobs.astype(np.int32) if len(logprobs) else None,
            num_logprobs=int(self.parameters["num_logprobs"][logprobs].max(initial=0)),
        )

    def history(self, num_prompt_tokens: IntArray, positions: IntArray) -> HistoryRows | None:
        """The rows that look at the tokens before the draw, or None; a snapshot too.

        Args:
            num_prompt_tokens: [num_rows].
            positions: [num_rows], of the draw: how many tokens (prompt and output) come before it and count.
        """
        if not self.needs_history:
            return None
        repetition, output, bad_words = (
            np.flatnonzero(self.features & feature) for feature in (REPETITION, OUTPUT_PENALTY, BAD_WORDS)
        )
        return HistoryRows(
            vocab_size=self.vocab_size,
            slots=self.slots,
            num_prompt_tokens=num_prompt_tokens.astype(np.int64),
            num_tokens=positions.astype(np.int64),
            repetition=repetition,
            repetition_penalty=self.parameters["repetition"][repetition],
            output=output,
            frequency=self.parameters["frequency"][output],
            presence=self.parameters["presence"][output],
            bad_words=bad_words,
            lists=self._lists_of(bad_words),
        )

    def _lists_of(self, rows: Int64Array) -> list[TokenLists]:
        """Of rows that have them."""
        found: list[TokenLists] = self.lists[rows].tolist() if len(rows) else []
        return found

    def _random_rows(self, rows: Int64Array, positions: IntArray) -> RandomRows:
        parameters = self.parameters[rows]
        temperature = parameters["temperature"]
        keys = draw_keys(parameters["seed"], positions[rows])
        return RandomRows(
            rows=None if len(rows) == self.num_rows else to_device(rows, self.device),
            temperature=None if (temperature == 1.0).all() else self._column(temperature),
            keys=to_device(keys, self.device),
        )

    def _restricted_rows(self, rows: Int64Array, positions: IntArray) -> RestrictedRows:
        base, parameters = self._random_rows(rows, positions), self.parameters[rows]
        top_k = parameters["top_k"]
        # one more than k shows that nothing ties with the k-th
        enough = np.where(top_k < self.vocab_size, top_k + 1, WINDOW)
        return RestrictedRows(
            rows=base.rows,
            temperature=base.temperature,
            keys=base.keys,
            top_k=self._column(top_k),
            top_p=self._column(parameters["top_p"]),
            log_min_p=self._column(parameters["log_min_p"]),
            window=min(int(enough.max()), MAX_WINDOW, self.vocab_size),
        )

    def _column(self, values: npt.NDArray[Any]) -> torch.Tensor:  # Any: of whatever dtype
        """A parameter, a field of strided records, as a dense tensor [n, 1]."""
        return to_device(np.ascontiguousarray(values)[:, None], self.device)

    def _stop_bans(self, rows: Int64Array, num_emitted: IntArray) -> Bans | None:
        rows = rows[num_emitted[rows] < self.parameters["min_tokens"][rows]]
        return stop_bans(rows, self._lists_of(rows), self.vocab_size, self.device) if len(rows) else None
