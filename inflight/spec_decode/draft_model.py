"""`DraftModel`: a small model writes the next tokens, and the served model verifies them.

    served model   computes the tokens [s, e) of a request, and draws the tokens [e, n)
    draft model    computes the tokens [c, n), where c is how many it has computed before, and draws draft 0 behind them
                   computes draft 0, and draws draft 1; and so on

A request that gets no drafts is left out until a block of its tokens is full; then these tokens show how many drafts would have
been right.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from inflight.attention.backend import AttentionBackend
from inflight.config.engine import EngineConfig
from inflight.device.base import Device
from inflight.interface.request import Int32Array
from inflight.interface.step import NewRequestData
from inflight.models.causal_lm import CausalLM
from inflight.sample.sampler import Sampler
from inflight.spec_decode.model_drafter import NOTHING, DraftInputs, IntArray, ModelDrafter, Pass

# of a slot whose request is new: its tokens that are in the KV cache were computed by a step of another request
_NEW = -1


class _Checks(NamedTuple):
    """Tokens that were drawn while their request had no drafts: would the draft model have proposed them?

    Attributes:
        places: [m], of the request in `drawing_rows`.
        positions, tokens: [m], of the tokens.
        indices: [m], of the tokens before them among those that the draft model computes now.
    """

    places: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    indices: npt.NDArray[np.int64]

    @classmethod
    def of(
        cls,
        places: Sequence[int],
        inputs: DraftInputs,
        starts: Int32Array,
        ends: Int32Array,
        behind: npt.NDArray[np.int64],
    ) -> "_Checks":
        """`behind`: of each row, the index of the token behind its last one."""
        found: list[tuple[int, int, int, int]] = []
        for place in places:
            row = int(inputs.drawing_rows[place])
            for position in range(int(starts[row]) + 1, int(ends[row])):
                token = int(inputs.token_ids[inputs.slots[row], position])
                found.append((place, position, token, int(behind[row] - ends[row] + position - 1)))
        return cls(*np.array(found, dtype=np.int64).reshape(-1, 4).T)


class DraftModel(ModelDrafter):
    """Its arguments are those of `ModelDrafter`."""

    def __init__(
        self, model: CausalLM, config: EngineConfig, *, backend: AttentionBackend, device: Device, share_of_step: float
    ) -> None:
        super().__init__(model, config, backend=backend, device=device, share_of_step=share_of_step)
        self._block_size = config.cache.block_size
        # of each slot: how many tokens are in the cache
        self._num_cached: Int32Array = np.zeros(config.scheduler.max_num_seqs, dtype=np.int32)

    def begin(self, requests: Sequence[NewRequestData]) -> None:
        super().begin(requests)
        self._num_cached[[data.slot for data in requests]] = _NEW

    def _compute_step(self, inputs: DraftInputs, counts: Int32Array, sampler: Sampler) -> tuple[IntArray, Pass]:
        starts, ends, is_new = self._spans(inputs, counts)
        rows = np.flatnonzero(starts < ends)
        if not len(rows):
            return rows, NOTHING
        slots = inputs.slots[rows]
        spans = zip(slots, starts[rows], ends[rows], strict=True)
        tokens = np.concatenate([inputs.token_ids[slot, start:end] for slot, start, end in spans])
        behind = np.zeros(len(inputs.slots), dtype=np.int64)  # the index of the token behind each row's last one
        behind[rows] = np.cumsum(ends[rows] - starts[rows])
        places = np.flatnonzero(counts > 0)  # in `drawing_rows`
        unproposed = np.flatnonzero((counts == 0) & ~is_new[inputs.drawing_rows])
        checked = _Checks.of(unproposed.tolist(), inputs, starts, ends, behind)
        last = np.concatenate([behind[inputs.drawing_rows[places]] - 1, checked.indices])
        passed = self._forward(tokens, inputs, rows, starts[rows], ends[rows], last, None)
        if len(checked.indices):
            sampling = inputs.sampling.take(checked.places)
            right = self._draw(passed.logits[len(places) :], sampling, checked.positions, sampler)
            checked_slots = inputs.slots[inputs.drawing_rows[checked.places]]
            self._acceptance.add_all(checked_slots, right == checked.tokens, np.ones(len(right), dtype=np.int64))
            passed = passed.take(np.arange(len(places)))
        return places, passed

    def _spans(self, inputs: DraftInputs, counts: Int32Array) -> tuple[Int32Array, Int32Array, npt.NDArray[np.bool_]]:
        """Which tokens [start, end) of each row are computed now, and which rows belong to new requests.

        A row that gets no drafts is left out until a block is full: then it is computed at once, because others may find the
        block."""
        slots = inputs.slots
        ends = np.minimum(inputs.num_tokens, self.config.max_model_len)
        computed = inputs.num_computed_tokens
        cached = self._num_cached[slots]
        is_new = cached == _NEW
        # the last token before the step has been computed as soon as it was drawn, but that of a new request has not
        starts = np.minimum(np.where(is_new, computed, np.minimum(cached, computed + 1)), ends)
        waits = np.zeros(len(slots), dtype=np.bool_)
        waits[inputs.drawing_rows] = counts == 0
        waits &= ~is_new & (ends // self._block_size == starts // self._block_size)
        ends = np.where(waits, starts, ends)
        self._num_cached[slots] = ends
        return starts, ends, is_new
