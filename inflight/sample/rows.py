"""`SamplingRows`: a frozen copy of the sampling parameters of a step's rows. `SamplingMetadata`: what the draws of a step need.

A row is one draw. A step that verifies drafts knows its rows and their positions only when its forward begins, in the compute
thread. By then the plan of a later step may have given the slots (places in the batch) to other requests. So
`SamplingState.take` copies the parameters when the step is prepared, and the copy is read when the rows are known.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.interface.request import Int32Array
from inflight.sample.seeds import draw_keys

IntArray = npt.NDArray[np.integer]
Int64Array = npt.NDArray[np.int64]

# Bits of the column `features`: what a row needs. RANDOM rows draw from the whole vocabulary, and RESTRICTED rows from the
# tokens that min_p, top_k and top_p leave. A greedy row has neither bit.
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

WINDOW = 128  # how many of the most probable tokens are examined first; usually top_p and min_p keep fewer
MAX_WINDOW = 256  # if top_k is larger, the token is drawn by the slower method of candidates.py

PARAMETERS = np.dtype(  # one record per row, so that one gather copies all parameters
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


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:  # Any: all dtypes
    """The array as a tensor of the same dtype. On the CPU the tensor shares the array's memory."""
    return torch.from_numpy(array).to(device, non_blocking=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomRows:
    """Rows that draw from the whole vocabulary. If these are all rows of the step, `rows` is None."""

    rows: Tensor | None  # int64 [n]
    temperature: Tensor | None  # float32 [n, 1]; None if all are 1
    keys: Tensor  # int32 [n, 2], the `draw_keys` of (seed, position)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestrictedRows(RandomRows):
    """Rows that draw from the tokens that min_p, top_k and top_p leave."""

    top_k: Tensor  # int64 [n, 1]; the vocabulary's size if unused
    top_p: Tensor  # float64 [n, 1]; above 1 if unused, so that rounding drops nothing
    log_min_p: Tensor  # float32 [n, 1]; -inf if unused
    window: int  # how many of the most probable tokens are examined first; more than any top_k, but at most MAX_WINDOW


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingMetadata:
    """How the rows of one step are drawn. Every row is either greedy or random or restricted.

    `greedy_rows` is None if no row is greedy. If all rows are greedy, `greedy_rows`, `random` and `restricted` are None.
    """

    num_rows: int
    greedy_rows: Tensor | None = None  # int64 [n]
    random: RandomRows | None = None
    restricted: RestrictedRows | None = None

    @property
    def all_greedy(self) -> bool:
        return self.random is None and self.restricted is None


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarMasks:
    """The tokens that the grammars of one step admit. If a row's mask admits no token, IMPOSSIBLE_TOKEN is drawn.

    Bit t % 32 of word t // 32 is 1 if token t may be drawn, as in `interface.step.GrammarOutput`.
    """

    rows: npt.NDArray[np.int64]  # [n], indices of the step's draws, ascending
    masks: npt.NDArray[np.int32]  # [n, ceil(vocab_size / 32)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """The sampling parameters of some rows, one row per draw. `SamplingState.take` makes these objects."""

    vocab_size: int
    device: torch.device  # where the metadata's tensors go
    slots: Int32Array  # [num_rows]
    features: Int32Array  # [num_rows]
    parameters: npt.NDArray[np.void]  # [num_rows] of PARAMETERS; empty if no row has a feature
    lists: npt.NDArray[np.object_]  # [num_rows] of `TokenLists | None`; empty if no row has lists

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def needs_history(self) -> bool:
        """Whether a row looks at the tokens before its draw."""
        return bool(self._union & HISTORY)

    @property
    def is_plain(self) -> bool:
        """Whether no row needs a change of its logits, or log-probabilities."""
        return not self._union & ~(RANDOM | RESTRICTED)

    @property
    def _union(self) -> int:
        return int(np.bitwise_or.reduce(self.features, initial=0))

    def take(self, indices: IntArray) -> "SamplingRows":
        """A copy of the rows `indices`, in this order; a row may occur several times."""
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

    def having(self, feature: int) -> Int64Array:
        """The indices of the rows that have at least one of these feature bits, in ascending order."""
        return np.flatnonzero(self.features & feature) if self._union & feature else NO_ROWS

    def metadata(self, positions: IntArray) -> SamplingMetadata:
        """The metadata of these rows for one step's draws.

        Args:
            positions: [num_rows], the position of the token to be drawn: the number of tokens before it.
        """
        random, restricted = self.having(RANDOM), self.having(RESTRICTED)
        if not len(random) and not len(restricted):
            return SamplingMetadata(num_rows=self.num_rows)
        greedy = np.flatnonzero(self.features & (RANDOM | RESTRICTED) == 0)
        return SamplingMetadata(
            num_rows=self.num_rows,
            greedy_rows=to_device(greedy, self.device) if len(greedy) else None,
            random=self._random_rows(random, positions) if len(random) else None,
            restricted=self._restricted_rows(restricted, positions) if len(restricted) else None,
        )

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
        base = self._random_rows(rows, positions)
        parameters = self.parameters[rows]
        top_k = parameters["top_k"]
        # a window of k + 1 tokens shows whether another token has the same logit as the k-th
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

    def _column(self, values: npt.NDArray[Any]) -> Tensor:  # Any: all dtypes
        """Copy one parameter of some rows from their records to a contiguous tensor [n, 1]."""
        return to_device(np.ascontiguousarray(values)[:, None], self.device)
