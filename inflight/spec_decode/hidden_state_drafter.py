"""`HiddenStateDrafter`: a layer that reads the served model's hidden states (`DraftingLayer`) writes the next tokens.

    served model   computes the tokens [s, e) of a request, and draws the tokens [e, n)
    drafter        computes the positions [s, n - 1), position p of token p + 1 and of the served model's hidden state at p, and
                   draws draft 0 behind them
                   computes position n - 1 of draft 0 and of its own hidden state at n - 2, and draws draft 1; and so on

What is cached for a position depends on the next token. So in a cached prefix, the last position of the last block may come
from a request that went on with another token. This makes the next drafts a little less likely to be right, and no token
changes.

Hidden states are not kept for long. So every position is computed sooner or later, also of a request that gets no drafts. For
such a request the head is not needed, and it is cheaper to compute many positions at once. So its hidden states wait until the
request gets a draft again, or its positions fill a block, or they are many. Each full block of the KV cache has the keys of
both models, for whoever finds it later. In a `STEPS_BETWEEN_PROBES`-th step, if there is time for a trial, one draft is drawn
for each such request and compared with the next token, so drafts come back when they would be right.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.attention.backend import AttentionBackend
from inflight.attention.metadata import AttentionInputs
from inflight.config.engine import EngineConfig
from inflight.device.base import Device
from inflight.interface.request import Int32Array
from inflight.interface.step import NewRequestData
from inflight.models.drafting_layer import DraftingLayer
from inflight.sample.sampler import Sampler
from inflight.spec_decode.model_drafter import NOTHING, DraftInputs, IntArray, ModelDrafter, Pass

STEPS_BETWEEN_PROBES = 32
# When so many positions wait, they are computed: of a request (so that no step gets much longer), and together
_MOST_OF_REQUEST = 32
_MOST_TOGETHER = 512


class HiddenStateDrafter(ModelDrafter):
    """Its arguments are those of `ModelDrafter`."""

    reads_hidden = True
    shift = 1
    model: DraftingLayer

    def __init__(
        self,
        model: DraftingLayer,
        config: EngineConfig,
        *,
        backend: AttentionBackend,
        device: Device,
        share_of_step: float,
    ) -> None:
        super().__init__(model, config, backend=backend, device=device, share_of_step=share_of_step)
        self._num_steps = 0
        self._block_size = config.cache.block_size
        # of each slot: how many positions before those of the next step are not computed yet
        self._num_waiting: Int32Array = np.zeros(config.scheduler.max_num_seqs, dtype=np.int32)
        self._waiting: dict[int, list[Tensor]] = {}  # slot -> the hidden states of these positions

    def begin(self, requests: Sequence[NewRequestData]) -> None:
        super().begin(requests)
        for data in requests:
            self._num_waiting[data.slot] = 0
            self._waiting.pop(data.slot, None)

    def warm_up(self, inputs: AttentionInputs) -> None:
        if not self._is_checked:
            projection = self.model.projection
            zeros = torch.zeros(1, projection.in_features, dtype=projection.dtype, device=self._device.torch_device)
            self._require_numbers(self.model.read_hidden(zeros))
        super().warm_up(inputs)

    def _num_behind(self, inputs: DraftInputs) -> IntArray:
        behind: Int32Array = self._num_waiting[inputs.slots[inputs.drawing_rows]]
        return behind

    def _compute_step(self, inputs: DraftInputs, counts: Int32Array, sampler: Sampler) -> tuple[IntArray, Pass]:
        computed = inputs.num_computed_tokens
        starts = computed - self._num_waiting[inputs.slots]
        # A request that draws nothing in this step has more tokens, which are in its prompt.
        num_known = inputs.num_tokens + 1
        num_known[inputs.drawing_rows] -= 1
        ends = np.maximum(computed, np.minimum(num_known, self.config.max_model_len) - 1)
        places = self._wanted(inputs, counts, ends)
        is_due = starts // self._block_size < ends // self._block_size
        is_due |= ends - starts >= _MOST_OF_REQUEST
        is_due |= (starts < ends) & (int((ends - starts).sum()) >= _MOST_TOGETHER)
        is_due[inputs.drawing_rows[places]] = True
        self._num_waiting[inputs.slots] = np.where(is_due, 0, ends - starts)
        hidden = self._take_hidden(inputs, is_due, ends)
        rows = np.flatnonzero(is_due)
        if not len(rows):
            return rows, NOTHING
        spans = zip(inputs.slots[rows], starts[rows], ends[rows], strict=True)
        tokens = np.concatenate([inputs.token_ids[slot, start + 1 : end + 1] for slot, start, end in spans])
        behind = np.cumsum(np.where(is_due, ends - starts, 0))  # the index of the position behind each row's last one
        last = behind[inputs.drawing_rows[places]] - 1
        passed = self._forward(tokens, inputs, rows, starts[rows], ends[rows], last, self.model.read_hidden(hidden))
        return places, passed

    def _wanted(self, inputs: DraftInputs, counts: Int32Array, ends: Int32Array) -> IntArray:
        """The places in `drawing_rows` for which drafts are drawn. `ends`: [num_rows], of the positions."""
        self._num_steps += 1
        rows = inputs.drawing_rows
        is_wanted = counts > 0
        if self._num_steps % STEPS_BETWEEN_PROBES == 0 and self._has_time(len(rows) - int(is_wanted.sum())):
            num_tokens = self._num_tokens[inputs.slots[rows]]
            is_wanted |= num_tokens < self.config.max_model_len - 1
        is_wanted &= inputs.num_computed_tokens[rows] < ends[rows]
        return np.flatnonzero(is_wanted)

    def _has_time(self, num_requests: int) -> bool:
        """For a trial draft of so many requests."""
        return not self.choice.costs.is_measured or self.choice.spend_on(num_requests)

    def _take_hidden(self, inputs: DraftInputs, is_due: npt.NDArray[np.bool_], ends: Int32Array) -> Tensor:
        """[num_positions, ...]: the hidden states of the rows that are due, with those that waited. The others wait from now
        on."""
        assert inputs.hidden is not None
        lengths = ends - inputs.num_computed_tokens
        indices = [begin + np.arange(length) for begin, length in zip(inputs.query_start_loc, lengths, strict=False)]
        chosen = self._device.to_device(np.concatenate(indices))
        parts = torch.split(inputs.hidden[chosen], lengths.tolist())
        due = list[Tensor]()
        for slot, part, goes in zip(inputs.slots.tolist(), parts, is_due.tolist(), strict=True):
            waiting = self._waiting.pop(slot, [])
            waiting.append(part)
            if goes:
                due += waiting
            else:
                self._waiting[slot] = waiting
        return torch.cat(due) if due else inputs.hidden[:0]
