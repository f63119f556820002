"""`InputBatch`: the running requests as numpy columns. Each plan updates it, and each step's inputs are made from it.

A plan is the scheduler's output for one step. A slot is an index into the columns, and a request keeps its slot while it runs.
A slot without a request keeps old data, which is never read.

Only the thread that prepares steps uses the batch. This thread runs ahead of the device, so some older steps may still have to
draw their tokens. The batch knows only the slots and positions of these tokens.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from inflight.interface.request import Int32Array
from inflight.interface.step import SchedulerOutput

NO_STEP = -1
NO_TOKENS: Int32Array = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of one plan. The tokens of all rows are in flat arrays: those of row i are
    `[query_start_loc[i], query_start_loc[i + 1])`.

    The host does not know the input tokens at the indices `drawn_tokens` yet, so `input_ids` has 0 there. Each of these inputs
    is the last drawn token of its slot. A sampling row is a row that draws. The draws of the j-th sampling row are
    `[draw_start_loc[j], draw_start_loc[j + 1])`. If the row has m draws, one draw follows each of its last m tokens.
    """

    input_ids: Int32Array  # [num_tokens]
    positions: Int32Array  # [num_tokens]
    query_start_loc: Int32Array  # [num_rows + 1]
    num_computed_tokens: Int32Array  # [num_rows], how many tokens are in the KV cache before this step
    seq_lens: Int32Array  # [num_rows], how many tokens are in the KV cache after this step
    sampling_rows: Int32Array  # [num_sampling_rows]
    draw_start_loc: Int32Array  # [num_sampling_rows + 1]
    drawn_tokens: Int32Array  # [num_drawn], indices into the flat tokens
    drawn_slots: Int32Array  # [num_drawn]
    drawn_in_step: int  # the latest step that draws one of `drawn_tokens`; NO_STEP if there are none
    draft_tokens: Int32Array = field(default_factory=lambda: NO_TOKENS)  # [num_drafts], indices into the flat tokens
    draft_slots: Int32Array = field(default_factory=lambda: NO_TOKENS)  # [num_drafts]
    # the id of the previous step, if this step computes exactly the tokens that the previous step drew; otherwise NO_STEP
    continues: int = NO_STEP

    @property
    def num_draws(self) -> Int32Array:
        """[num_sampling_rows]: the draws of each."""
        return self.draw_start_loc[1:] - self.draw_start_loc[:-1]

    @property
    def draw_tokens(self) -> npt.NDArray[np.int64]:
        """[num_draws]: for each draw, the flat index of the token whose hidden state gives its logits."""
        before = self.query_start_loc[1:][self.sampling_rows] - self.draw_start_loc[1:]
        return before.repeat(self.num_draws) + np.arange(self.draw_start_loc[-1], dtype=np.int64)

    def rope_positions(self, deltas: Int32Array) -> Int32Array:
        """[num_tokens]: the positions for rotary embeddings. `deltas`, [num_rows], are added to those of each row."""
        return self.positions + np.repeat(deltas, np.diff(self.query_start_loc)) if deltas.any() else self.positions

    @property
    def first_positions(self) -> Int32Array:
        """[num_sampling_rows]: the position of each row's first drawn token."""
        return self.seq_lens[self.sampling_rows] + 1 - self.num_draws


class InputBatch:
    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, block_size: int, num_groups: int, num_ahead_tokens: int = 0
    ) -> None:
        max_blocks = -(-(max_model_len + num_ahead_tokens) // block_size)
        self.token_ids: Int32Array = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        # for each slot, the position after the last token whose id was in a plan
        self.num_known_tokens: Int32Array = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_prompt_tokens: Int32Array = np.zeros(max_num_seqs, dtype=np.int32)
        self.block_tables = [np.zeros((max_num_seqs, max_blocks), dtype=np.int32) for _ in range(num_groups)]
        self.rope_deltas: Int32Array = np.zeros(max_num_seqs, dtype=np.int32)  # of each slot, see `RequestPart`
        self._last_draw = np.full(max_num_seqs, NO_STEP, dtype=np.int64)  # the latest step that draws for the slot
        self._before: tuple[SchedulerOutput, StepInputs] | None = None
        self._block_size = block_size

    def apply(self, plan: SchedulerOutput) -> None:
        """Add a plan's new requests, block table entries and forced tokens (tokens that a grammar dictates)."""
        for data in plan.new_requests:
            slot, length = data.slot, len(data.token_ids)
            self.token_ids[slot, :length] = data.token_ids
            self.num_known_tokens[slot] = length
            self.num_prompt_tokens[slot] = data.num_prompt_tokens
            self.rope_deltas[slot] = sum([part.rope_delta for part in data.parts])
            for table, block_ids in zip(self.block_tables, data.block_ids, strict=True):
                table[slot, : len(block_ids)] = block_ids
        for table, delta in zip(self.block_tables, plan.block_table_deltas, strict=True):
            table[delta.slots, delta.columns] = delta.block_ids
        if (forced := plan.forced_tokens) is not None:
            # forced tokens begin at the first token that the row computes, and replace the drawn tokens at their positions
            self.token_ids[forced.slots, forced.positions] = forced.token_ids
            # a slot may occur several times: numpy keeps its last value
            self.num_known_tokens[forced.slots] = forced.positions + 1

    def step_inputs(self, plan: SchedulerOutput) -> StepInputs:
        """Make the inputs of a plan. A row with drafts gets the most drafts that its plan allows.

        Call this once for each plan, in order, and after `apply`.
        """
        inputs = self._continued(plan) or self._flattened(plan)
        self._before = plan, inputs
        return inputs

    def _continued(self, plan: SchedulerOutput) -> StepInputs | None:
        """A fast path for a plan that continues the previous step: the rows are the same, all rows of both steps compute and
        draw one token, and the plan has no new requests, forced tokens or drafts. Returns None for other plans."""
        if self._before is None or plan.new_requests or plan.forced_tokens is not None or len(plan.max_draft_tokens):
            return None
        before, inputs = self._before
        num_rows = len(plan.slots)
        sizes = len(before.slots), len(inputs.input_ids), len(inputs.sampling_rows), int(plan.samples.sum())
        if any(size != num_rows for size in sizes):
            return None
        is_next = (plan.slots == before.slots) & (plan.num_computed_tokens == inputs.seq_lens)
        if not (is_next & (plan.num_scheduled_tokens == 1)).all():
            return None
        self._last_draw[plan.slots] = plan.step_id
        rows = inputs.sampling_rows
        return StepInputs(
            input_ids=np.zeros(num_rows, dtype=np.int32),
            positions=plan.num_computed_tokens,
            query_start_loc=inputs.query_start_loc,
            num_computed_tokens=plan.num_computed_tokens,
            seq_lens=plan.num_computed_tokens + 1,
            sampling_rows=rows,
            draw_start_loc=inputs.draw_start_loc,
            drawn_tokens=rows,
            drawn_slots=plan.slots,
            drawn_in_step=before.step_id,
            continues=before.step_id,
        )

    def _flattened(self, plan: SchedulerOutput) -> StepInputs:
        lengths = plan.num_scheduled_tokens
        query_start_loc = start_locations(lengths)
        rows = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        positions = np.arange(query_start_loc[-1], dtype=np.int32)
        positions += (plan.num_computed_tokens - query_start_loc[:-1])[rows]
        slots = plan.slots[rows]
        input_ids = self.token_ids[slots, positions]
        is_drawn = positions >= self.num_known_tokens[slots]
        num_draws = np.ones_like(lengths)
        if len(plan.max_draft_tokens):
            has_drafts = plan.max_draft_tokens >= 0
            assert plan.samples[has_drafts].all() and (lengths - 1 == plan.max_draft_tokens)[has_drafts].all()
            is_known = plan.num_computed_tokens < self.num_known_tokens[plan.slots]
            assert not (has_drafts & is_known).any(), (
                f"a row with drafts must begin with a drawn token:\n{plan.describe()}"
            )
            is_drawn &= ~has_drafts[rows]
            is_drawn[query_start_loc[:-1][has_drafts]] = True
            num_draws = np.where(has_drafts, lengths, num_draws)
        drawn_tokens = np.flatnonzero(is_drawn).astype(np.int32)
        drawn_slots = slots[drawn_tokens]
        input_ids[drawn_tokens] = 0
        drawn_in_step = int(self._last_draw[drawn_slots].max(initial=NO_STEP))
        self._last_draw[plan.slots[plan.samples]] = plan.step_id
        sampling_rows = plan.samples.nonzero()[0].astype(np.int32)
        return StepInputs(
            input_ids=input_ids,
            positions=positions,
            query_start_loc=query_start_loc,
            num_computed_tokens=plan.num_computed_tokens,
            seq_lens=plan.num_computed_tokens + lengths,
            sampling_rows=sampling_rows,
            draw_start_loc=start_locations(num_draws[sampling_rows]),
            drawn_tokens=drawn_tokens,
            drawn_slots=drawn_slots,
            drawn_in_step=drawn_in_step,
        )

    def block_table(self, group: int, slots: Int32Array, max_seq_len: int) -> Int32Array:
        """A copy of the block tables of `slots` in one KV group, for up to `max_seq_len` tokens: [num_rows, num_blocks]."""
        width = -(-max_seq_len // self._block_size)
        return self.block_tables[group][slots, :width]


def start_locations(lengths: npt.NDArray[np.integer]) -> Int32Array:
    """The bounds of n adjacent items with these lengths, [n + 1]. Item i is at `[locations[i], locations[i + 1])`."""
    locations = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=locations[1:])
    return locations
