"""`Acceptance`: how often the drafts of each request were right."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from inflight.interface.request import Int32Array

REQUEST_MEMORY = 0.95  # the weight of a request's older drafts is multiplied by this with each new draft
MEMORY = 0.998  # the same for the drafts of all requests
PRIOR = 4.0  # so many drafts of a request count as much as the average of all requests


@dataclass(slots=True)
class _Counts:
    """How many drafts were right, and how many were compared."""

    right: float = 0.0
    compared: float = 0.0

    def add(self, right: int, compared: int, memory: float) -> None:
        share = memory**compared
        self.right = self.right * share + right
        self.compared = self.compared * share + compared


class Acceptance:
    """How often drafts were right, for each slot and for all slots together. Older drafts weigh less.

    Args:
        right, compared: assumed at the start, for each kind: how many drafts were right, of how many that were compared.
        num_kinds: how many kinds of drafts there are. Each kind is counted separately.
    """

    def __init__(self, right: float, compared: float, num_kinds: int = 1) -> None:
        self._of_all = [_Counts(right, compared) for _ in range(num_kinds)]
        self._of_slots: dict[int, list[_Counts]] = {}

    def forget(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._of_slots.pop(slot, None)

    def add(self, slot: int, right: int, compared: int, kind: int = 0) -> None:
        counts = self._of_slots.get(slot)
        if counts is None:
            counts = self._of_slots[slot] = [_Counts() for _ in self._of_all]
        counts[kind].add(right, compared, REQUEST_MEMORY)
        self._of_all[kind].add(right, compared, MEMORY)

    def add_all(self, slots: Int32Array, right: npt.NDArray[Any], compared: npt.NDArray[np.integer]) -> None:
        """All arguments are [n]. A slot may occur several times."""
        for slot, num_right, num_compared in zip(slots.tolist(), right.tolist(), compared.tolist(), strict=True):
            self.add(slot, int(num_right), num_compared)

    def probability(self, slot: int, kind: int = 0) -> float:
        """The probability that a draft of the slot's request is right, if all drafts before it are right."""
        of_all = self._of_all[kind].right / self._of_all[kind].compared
        counts = self._of_slots.get(slot)
        if counts is None:
            return of_all
        return (counts[kind].right + PRIOR * of_all) / (counts[kind].compared + PRIOR)
