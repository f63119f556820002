"""One step: the plan that goes to every rank, and what every rank answers.

The plan is a delta against the worker's `InputBatch`: requests new to a slot in full, the rest as columns. Rows are
the requests that take part in the step, in the plan's order; answers are aligned with the plan's rows, never by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from inflight.interface.request import Int32Array, LogprobsColumns, ResolvedSampling


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequestData:
    """A request that takes `slot`: first scheduled, or resumed after a preemption (then it brings its emitted tokens).

    `token_ids` are all tokens known, prompt first. `block_ids` has one table per KV group, complete for this step.
    """

    request_id: str
    slot: int
    token_ids: Int32Array  # [num_tokens]
    num_prompt_tokens: int
    block_ids: tuple[Int32Array, ...]
    sampling: ResolvedSampling
    num_prompt_logprobs_done: int = 0  # prompt positions whose logprobs have been answered already


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTableDelta:
    """Entries to write into one group's block tables: `table[slots[i], columns[i]] = block_ids[i]`."""

    slots: Int32Array
    columns: Int32Array
    block_ids: Int32Array


def _empty() -> Int32Array:
    return np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """Tokens known without a draw, because a grammar admitted no other: `token_ids[i]` stands at `positions[i]` of `slots[i]`.

    For each slot they are consecutive, begin with the first token that the row computes, and end what is known. What steps
    before this one draw for the slot is superseded.
    """

    slots: Int32Array
    positions: Int32Array
    token_ids: Int32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """The plan of one step.

    Row i computes tokens `[num_computed_tokens[i], num_computed_tokens[i] + num_scheduled_tokens[i])` of the request in
    `slots[i]`. `samples[i]` says that the row reaches the last token, so that one more is drawn from its last logits. That
    last token may have been drawn by a step that was in flight when this one was planned: then only the workers have it.

    A row with drafts (`max_draft_tokens[i] >= 0`) computes the token that was drawn last for its slot, wherever it stands, and
    the first of the drafts that were proposed behind it, `max_draft_tokens[i]` at most; it draws a token behind each of
    them. Its `num_computed_tokens` and `num_scheduled_tokens` are upper bounds: only the workers know how many drafts there
    are, and how many of the steps in flight will have been accepted.
    """

    step_id: int
    new_requests: tuple[NewRequestData, ...]
    request_ids: tuple[str, ...]  # [num_rows], for error messages
    slots: Int32Array  # [num_rows]
    num_computed_tokens: Int32Array  # [num_rows]
    num_scheduled_tokens: Int32Array  # [num_rows]
    samples: np.ndarray[tuple[int], np.dtype[np.bool_]]  # [num_rows]
    block_table_deltas: tuple[BlockTableDelta, ...]  # one per KV group
    max_draft_tokens: Int32Array = field(default_factory=_empty)  # [num_rows], -1: the row is exact; or empty: all are
    grammar_rows: Int32Array = field(
        default_factory=_empty
    )  # rows that draw under a mask, rising: a `GrammarOutput` follows
    forced_tokens: TokenDelta | None = None  # applied before the rows

    @property
    def num_tokens(self) -> int:
        return int(self.num_scheduled_tokens.sum())

    def describe(self) -> str:
        """The plan as text, for an error dump: a line per row."""
        lines = [f"step {self.step_id}: {len(self.request_ids)} requests, {self.num_tokens} tokens"]
        new = {data.slot for data in self.new_requests}
        grammar_rows, drafts = set(self.grammar_rows.tolist()), self.max_draft_tokens.tolist()
        for i, request_id in enumerate(self.request_ids):
            computed, scheduled = int(self.num_computed_tokens[i]), int(self.num_scheduled_tokens[i])
            lines.append(
                f"  {request_id}: slot {int(self.slots[i])}, tokens [{computed}, {computed + scheduled})"
                f"{', samples' if self.samples[i] else ''}{', new in its slot' if int(self.slots[i]) in new else ''}"
                f"{', under a grammar' if i in grammar_rows else ''}"
                f"{f', at most {drafts[i]} of them drafts' if drafts and drafts[i] >= 0 else ''}"
            )
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarOutput:
    """The masks of one step, for its rows under a grammar; sent once for each plan that has such rows.

    Row `rows[i]` of the plan has `num_masks[i]` masks in a row: one for each of its drafts and one more. Bit t % 32 of word
    t // 32 says that token t may be drawn. `masks` is empty on ranks that do not draw: for them the message only says that
    the masks have been sent, so that all ranks of a stage do their work in one order.
    """

    rows: Int32Array  # [n], the plan's `grammar_rows`; none of them for a step that is void: what it draws is dropped
    num_masks: Int32Array  # [n]
    masks: npt.NDArray[np.int32]  # [sum of num_masks, ceil(vocab_size / 32)], or [0, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Log-probabilities of the prompt tokens `[start, start + n)` of the request in the plan's row `row`."""

    row: int
    start: int
    columns: LogprobsColumns


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRunnerOutput:
    """One rank's answer to one step; it also says "my device work for this step has ended".

    `sampled_token_ids` are those of the plan's sampling rows, in row order: `num_sampled_tokens[j]` of the j-th, or one of each
    where that is empty. The first stands at `sampled_positions[j]`, or behind the row's last token where that is empty: a row
    with drafts begins where only the workers know. All empty on a rank that does not draw.
    `logprobs` covers the sampled tokens listed in `logprobs_rows` (indices into `sampled_token_ids`).
    `draft_token_ids[j]` are what a step that plans them would try behind the last token of the j-th sampling row, then -1.
    """

    step_id: int
    sampled_token_ids: Int32Array = field(default_factory=_empty)
    num_sampled_tokens: Int32Array = field(default_factory=_empty)  # [num_sampling_rows] or empty
    sampled_positions: Int32Array = field(default_factory=_empty)  # [num_sampling_rows] or empty
    logprobs: LogprobsColumns | None = None
    logprobs_rows: Int32Array = field(default_factory=_empty)
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    draft_token_ids: Int32Array = field(default_factory=_empty)  # [num_sampling_rows, num_speculative_tokens] or empty
