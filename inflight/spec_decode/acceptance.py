"""`Acceptance`: how often the drafts of each request were right."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from inflight.interface.request import Int32Array
from inflight.spec_decode.adaptive import MEMORY, PRIOR, REQUEST_MEMORY

_FIRST_DRAFTS = 8.0  # so many right drafts are assumed at the start, so that drafts are tried


class Acceptance:
    """How often drafts were right, of each slot and of all. Older drafts weigh less."""

    def __init__(self, max_num_seqs: int) -> None:
        self._right = np.zeros(max_num_seqs)
        self._compared = np.zeros(max_num_seqs)
        self._all_right = self._all_compared = _FIRST_DRAFTS  # at first drafts are tried

    def forget(self, slots: Sequence[int]) -> None:
        self._right[slots] = self._compared[slots] = 0.0

    def add(self, slots: Int32Array, right: npt.NDArray[Any], compared: npt.NDArray[np.integer]) -> None:
        """All arguments are [n]. A slot may occur several times."""
        for slot, num_right, num_compared in zip(slots.tolist(), right.tolist(), compared.tolist(), strict=True):
            share = REQUEST_MEMORY**num_compared
            self._right[slot] = self._right[slot] * share + num_right
            self._compared[slot] = self._compared[slot] * share + num_compared
        share = MEMORY ** int(compared.sum())
        self._all_right = self._all_right * share + float(right.sum())
        self._all_compared = self._all_compared * share + float(compared.sum())

    def probabilities(self, slots: Int32Array) -> list[float]:
        """[n]: of each slot, that a draft is right if the drafts before it are."""
        of_all = PRIOR * self._all_right / self._all_compared
        found: list[float] = ((self._right[slots] + of_all) / (self._compared[slots] + PRIOR)).tolist()
        return found
