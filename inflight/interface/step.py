"""One step: the plan that goes to every rank (`SchedulerOutput`), and the answer of every rank (`ModelRunnerOutput`).

The plan is a delta against the worker's `InputBatch`: requests that are new to a slot are complete, the others are columns.
Rows are the requests that take part in the step, in the plan's order. An answer is aligned with the plan's rows, and names no
requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from inflight.interface.request import Int32Array, LogprobsColumns, ResolvedSampling


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequestData:
    """A request that takes `slot`: it is scheduled for the first time, or resumed after a preemption.

    `token_ids` are all known tokens: the prompt, then the emitted ones. `block_ids` has one table per KV group, complete for
    this step.
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
    """Tokens that need no draw, because a grammar allows no other one: `token_ids[i]` is at `positions[i]` of `slots[i]`.

    The tokens of a slot are consecutive. The first one is the first token that the row computes, and the last one is the last
    known token of the request. They replace what older steps draw for the slot.
    """

    slots: Int32Array
    positions: Int32Array
    token_ids: Int32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """The plan of one step.

    Row i computes tokens `[num_computed_tokens[i], num_computed_tokens[i] + num_scheduled_tokens[i])` of the request in
    `slots[i]`. If `samples[i]`, the row reaches the last token, and one more token is drawn from its last logits. If a step
    that was in flight when this one was planned draws that last token, only the workers know it.

    A row with drafts (`max_draft_tokens[i] >= 0`) computes the newest token of its slot, and at most `max_draft_tokens[i]` of
    the drafts that were proposed behind it. It draws a token behind each of them. Its `num_computed_tokens` and
    `num_scheduled_tokens` are upper bounds: only the workers know the number of drafts, and how many drafts of the steps in
    flight are accepted.
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
    grammar_rows: Int32Array = field(default_factory=_empty)  # rows that draw under a mask, rising; see `GrammarOutput`
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
    """The masks of one step, for its rows under a grammar. Sent once for each plan that has such rows.

    Row `rows[i]` of the plan has `num_masks[i]` consecutive masks: one for each of its drafts and one more. Bit t % 32 of word
    t // 32 says that token t may be drawn. On ranks that do not draw, `masks` is empty, and the message only says that the
    masks were sent: all ranks of a stage must compute in the same order.
    """

    rows: Int32Array  # [n], the plan's `grammar_rows`; empty if the step is void, and what it draws is dropped
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
    """One rank's answer to one step. It also says that the rank's device has ended the step. All arrays are empty on a rank
    that does not draw.

    `sampled_token_ids` are the tokens of the plan's sampling rows, in row order. The j-th sampling row has
    `num_sampled_tokens[j]` of them, and the first is at `sampled_positions[j]` of its request. Without drafts these two arrays
    are empty: each row has one token, at the position behind the row's last token. `logprobs` are the log-probabilities of the
    sampled tokens at the indices `logprobs_rows`. `draft_token_ids[j]` are the drafts that the next step may try behind the
    last token of the j-th sampling row, padded with -1.
    """

    step_id: int
    sampled_token_ids: Int32Array = field(default_factory=_empty)
    num_sampled_tokens: Int32Array = field(default_factory=_empty)  # [num_sampling_rows] or empty
    sampled_positions: Int32Array = field(default_factory=_empty)  # [num_sampling_rows] or empty
    logprobs: LogprobsColumns | None = None
    logprobs_rows: Int32Array = field(default_factory=_empty)
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    draft_token_ids: Int32Array = field(default_factory=_empty)  # [num_sampling_rows, num_speculative_tokens] or empty
