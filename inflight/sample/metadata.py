"""`SamplingMetadata`: how the rows of one step are drawn. Built by `SamplingRows.metadata`.

Rows are the step's draws, [0, num_rows).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:  # Any: of whatever dtype
    """The array as a tensor of the same dtype, sharing its memory on the CPU."""
    return torch.from_numpy(array).to(device, non_blocking=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomRows:
    """Rows that draw from the whole vocabulary. `rows` is None where they are all rows of the step, in order."""

    rows: Tensor | None  # int64 [n]
    temperature: Tensor | None  # float32 [n, 1]; None: all are 1
    keys: Tensor  # int32 [n, 2], of (seed, position)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestrictedRows(RandomRows):
    """Rows that draw from the tokens that min_p, top_k and top_p leave."""

    top_k: Tensor  # int64 [n, 1]; the vocabulary's size where unused
    top_p: Tensor  # float64 [n, 1]; above 1 where unused, so that rounding drops nothing
    log_min_p: Tensor  # float32 [n, 1]; -inf where unused
    window: int  # how many of the most probable tokens to look at first: enough for every top_k, if they are small


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingMetadata:
    """One step's sampling. Every row is in exactly one of greedy, random and restricted.

    `greedy_rows` is None where no row is greedy or (then random and restricted are None too) all are.
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
    """What the grammars of one step admit; the other rows are free. A row drawn without an admitted token is IMPOSSIBLE_TOKEN.

    Bit t % 32 of word t // 32 says that token t may be drawn, as in `interface.step.GrammarOutput`.
    """

    rows: npt.NDArray[np.int64]  # [n], sampling rows, rising
    masks: npt.NDArray[np.int32]  # [n, ceil(vocab_size / 32)]
