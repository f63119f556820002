"""Rows with drafts: which tokens a step computes for them, and which of the drawn tokens become output.

A row is a request's part of a step. A draft is a token that a proposer has guessed. How many drafts a row has is known only
when the forward pass begins. So the plan (the scheduler's output) has upper bounds. A drawn token that becomes output is
called emitted.

plan      1 + max_draft_tokens tokens for the row; their positions are not known yet
forward   the last drawn token of the row's slot, then the drafts that exist         `resolve_drafts`
sample    one draw after each of the forward's tokens                                `grammar_masks`: a mask for each draw
message   the emitted tokens (`message_of`), then the next drafts; sent to the other ranks
output    the emitted tokens, for the engine           `VerifiedDraws`
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from inflight.interface.request import Int32Array, LogprobsColumns
from inflight.interface.step import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from inflight.sample.rows import GrammarMasks
from inflight.sample.verification import emitted_rows
from inflight.worker.input_batch import StepInputs, start_locations


def resolve_drafts(plan: SchedulerOutput, inputs: StepInputs, num_tokens: Int32Array, drafts: Int32Array) -> StepInputs:
    """Make the exact inputs of a step from `inputs`, which were made for the upper bounds.

    Args:
        num_tokens: [num_rows], how many tokens each row's request has, drafts excluded; ignored for rows without drafts.
        drafts: [num_rows, k], each row's drafts, padded with -1.
    """
    has_drafts = plan.max_draft_tokens >= 0
    num_drafts = np.minimum((drafts >= 0).sum(axis=1, dtype=np.int32), plan.max_draft_tokens)
    starts = np.where(has_drafts, num_tokens - 1, inputs.num_computed_tokens)
    lengths = np.where(has_drafts, 1 + num_drafts, plan.num_scheduled_tokens)
    assert (starts <= plan.num_computed_tokens).all() and (lengths <= plan.num_scheduled_tokens).all(), (
        f"step {plan.step_id} would compute {lengths.tolist()} tokens from positions {starts.tolist()}, beyond its plan:\n"
        f"{plan.describe()}"
    )
    query_start_loc = start_locations(lengths)
    rows = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    offsets = np.arange(len(rows), dtype=np.int32) - query_start_loc[rows]
    source = inputs.query_start_loc[rows] + offsets
    place = np.empty(len(inputs.input_ids), dtype=np.int32)
    place[source] = np.arange(len(rows), dtype=np.int32)
    draft_tokens = np.flatnonzero(has_drafts[rows] & (offsets > 0)).astype(np.int32)
    draft_rows = rows[draft_tokens]
    input_ids = inputs.input_ids[source]
    input_ids[draft_tokens] = drafts[draft_rows, offsets[draft_tokens] - 1]
    return replace(
        inputs,
        input_ids=input_ids,
        positions=starts[rows] + offsets,
        query_start_loc=query_start_loc,
        num_computed_tokens=starts,
        seq_lens=starts + lengths,
        draw_start_loc=start_locations(np.where(has_drafts, lengths, 1)[inputs.sampling_rows]),
        drawn_tokens=place[inputs.drawn_tokens],
        draft_tokens=draft_tokens,
        draft_slots=plan.slots[draft_rows],
    )


@dataclass(frozen=True, slots=True)
class VerifiedDraws:
    """Which draws of a step become output, and the next drafts. Only in an engine with drafts."""

    num_emitted: npt.NDArray[np.int64]  # [num_sampling_rows]; a row's first draws are emitted
    positions: Int32Array  # [num_sampling_rows], the position of the first emitted token
    draw_start_loc: Int32Array  # [num_sampling_rows + 1]
    drafts: Int32Array  # [num_sampling_rows, k], for the next step

    def emitted(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        """`output` with only the draws that are emitted."""
        emitted = emitted_rows(self.num_emitted, self.draw_start_loc)
        logprobs, rows = output.logprobs, output.logprobs_rows
        if logprobs is not None:
            kept = np.isin(rows, emitted)
            logprobs = LogprobsColumns(
                token_ids=logprobs.token_ids[kept], logprobs=logprobs.logprobs[kept], ranks=logprobs.ranks[kept]
            )
            rows = np.searchsorted(emitted, rows[kept]).astype(np.int32)
        return replace(
            output,
            sampled_token_ids=output.sampled_token_ids[emitted],
            num_sampled_tokens=self.num_emitted.astype(np.int32),
            sampled_positions=self.positions,
            logprobs=logprobs,
            logprobs_rows=rows,
            draft_token_ids=self.drafts,
        )


def grammar_masks(
    plan: SchedulerOutput, output: GrammarOutput | None, draw_start_loc: Int32Array
) -> GrammarMasks | None:
    """Match the grammar masks of a step with its draws. A row with a grammar has one mask for each of its draws. Returns None
    if the step has no masks.

    Args:
        draw_start_loc: [num_sampling_rows + 1]; the draws of sampling row j are `[draw_start_loc[j], draw_start_loc[j + 1])`.
    """
    if output is None or not len(output.rows):  # no rows: the step is void, its tokens are dropped
        return None
    assert plan.samples[output.rows].all(), f"step {plan.step_id} has grammar masks for rows that draw no token"
    sampling_rows = np.cumsum(plan.samples)[output.rows] - 1
    starts = draw_start_loc[sampling_rows]
    counts = np.diff(draw_start_loc)[sampling_rows]
    assert np.array_equal(counts, output.num_masks), (
        f"step {plan.step_id}: rows {output.rows.tolist()} draw {counts.tolist()} tokens, but have masks for "
        f"{output.num_masks.tolist()}"
    )
    within = np.arange(len(output.masks)) - np.repeat(np.cumsum(counts) - counts, counts)
    return GrammarMasks(rows=np.repeat(starts, counts) + within, masks=output.masks)


def message_of(
    sampled: Int32Array, num_emitted: npt.NDArray[np.int64], draw_start_loc: Int32Array, width: int
) -> Int32Array:
    """The emitted tokens of each sampling row, padded with -1: [num_sampling_rows, width].

    IMPOSSIBLE_TOKEN (no token could be drawn) becomes 0. The engine fails this request when it gets the step's output. Before
    that, a later step may begin, and it needs a valid input token.
    """
    message = np.full((len(num_emitted), width), -1, dtype=np.int32)
    emitted = sampled[emitted_rows(num_emitted, draw_start_loc)]
    message[np.arange(width) < num_emitted[:, None]] = emitted.clip(min=0)
    return message
