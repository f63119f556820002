"""`HiddenStateDrafter`: a layer that reads the served model's hidden states (`DraftingLayer`) writes the next tokens.

    served model   computes the tokens [s, e) of a request, and draws the tokens [e, n)
    drafter        computes the positions [s, n - 1), position p of token p + 1 and of the served model's hidden state at p, and
                   draws draft 0 behind them
                   computes position n - 1 of draft 0 and of its own hidden state at n - 2, and draws draft 1; and so on

What is cached for a position depends on the next token. So in a cached prefix, the last position of the last block may come
from a request that went on with another token. This makes the next drafts a little less likely to be right, and no token
changes.

All positions are computed in the step that computes their hidden states, because these are not kept. A request that gets no
drafts costs this one layer, without the head. In every `STEPS_BETWEEN_PROBES`-th step, one draft is drawn for each such request
and compared with the next token, so drafts come back when they would be right.
"""

import numpy as np

from inflight.attention.backend import AttentionBackend
from inflight.config.engine import EngineConfig
from inflight.device.base import Device
from inflight.interface.request import Int32Array
from inflight.models.drafting_layer import DraftingLayer
from inflight.sample.sampler import Sampler
from inflight.spec_decode.model_drafter import NOTHING, DraftInputs, IntArray, ModelDrafter, Pass

STEPS_BETWEEN_PROBES = 32


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

    def _compute_step(self, inputs: DraftInputs, counts: Int32Array, sampler: Sampler) -> tuple[IntArray, Pass]:
        assert inputs.hidden is not None
        self._num_steps += 1
        starts = inputs.num_computed_tokens
        # A request that draws nothing in this step has more tokens, which are in its prompt.
        num_known = inputs.num_tokens + 1
        num_known[inputs.drawing_rows] -= 1
        ends = np.maximum(starts, np.minimum(num_known, self.config.max_model_len) - 1)
        rows = np.flatnonzero(starts < ends)
        if not len(rows):
            return rows, NOTHING
        lengths = ends - starts
        indices = [np.arange(lengths[row]) + inputs.query_start_loc[row] for row in rows]
        spans = list[Int32Array]()
        for row in rows:
            tokens = inputs.token_ids[inputs.slots[row]]
            spans.append(tokens[starts[row] + 1 : ends[row] + 1])
        is_wanted = counts > 0
        if self._num_steps % STEPS_BETWEEN_PROBES == 0:
            num_tokens = self._num_tokens[inputs.slots[inputs.drawing_rows]]
            is_wanted |= num_tokens < self.config.max_model_len - 1
        is_wanted &= lengths[inputs.drawing_rows] > 0
        places = np.flatnonzero(is_wanted)
        behind = np.cumsum(lengths)  # the index of the position behind each row's last one
        last = behind[inputs.drawing_rows[places]] - 1
        chosen = self._device.to_device(np.concatenate(indices))
        hidden = self.model.read_hidden(inputs.hidden[chosen])
        tokens = np.concatenate(spans)
        passed = self._forward(tokens, inputs, rows, starts[rows], ends[rows], last, hidden)
        return places, passed
