"""One step: the plan that goes to every rank (`SchedulerOutput`), and the answer of every rank (`ModelRunnerOutput`).

A *row* is one request's part of the step. All arrays of a plan list the rows in the same order. Each running request has a
*slot*, its place in the worker's `InputBatch`. The worker keeps what it was sent about the request. So a plan contains only
what is new: all data of a request that has just got its slot, and a few numbers for each other request. The answer has no
request ids, because its rows are in the plan's order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from inflight.interface.parts import EncoderInput, PartResult, RequestPart
from inflight.interface.request import Int32Array, LogprobsColumns, ResolvedSampling


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequestData:
    """All data of a request that has just got its slot: it is scheduled for the first time, or again after a preemption.

    `token_ids` are all tokens known so far: the prompt, then the emitted ones. `block_ids` has one block table per KV group,
    with all blocks that this step needs. Proposers of drafts must not show tokens to a request with another `cache_salt`.
    """

    request_id: str
    slot: int
    token_ids: Int32Array  # [num_tokens]
    num_prompt_tokens: int
    block_ids: tuple[Int32Array, ...]
    sampling: ResolvedSampling
    cache_salt: str = ""
    parts: tuple[RequestPart, ...] = ()


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
    """Tokens that are not drawn, because a grammar allows no others: `token_ids[i]` is at `positions[i]` of `slots[i]`.

    The tokens of a slot are consecutive: from the first token that the row computes to the last known token of the request.
    They replace the tokens that older steps draw for the slot.
    """

    slots: Int32Array
    positions: Int32Array
    token_ids: Int32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """The plan of one step.

    Row i computes tokens `[num_computed_tokens[i], num_computed_tokens[i] + num_scheduled_tokens[i])` of the request in
    `slots[i]`. If `samples[i]` is true, the row ends with the request's last token, and one more token is drawn after it. If
    that last token is drawn by a step that was in flight when this step was planned, only the workers know it.

    A draft is a guess of a later token. A row with drafts (`max_draft_tokens[i] >= 0`) computes the newest token of its slot
    and at most `max_draft_tokens[i]` drafts that follow this token. It draws a token after each token that it computes. Its
    `num_computed_tokens` and `num_scheduled_tokens` are upper bounds, because only the workers know how many drafts there are,
    and how many drafts of the steps in flight are accepted.
    """

    step_id: int
    new_requests: tuple[NewRequestData, ...]
    request_ids: tuple[str, ...]  # [num_rows], for error messages
    slots: Int32Array  # [num_rows]
    num_computed_tokens: Int32Array  # [num_rows]
    num_scheduled_tokens: Int32Array  # [num_rows]
    samples: np.ndarray[tuple[int], np.dtype[np.bool_]]  # [num_rows]
    block_table_deltas: tuple[BlockTableDelta, ...]  # one per KV group
    max_draft_tokens: Int32Array = field(default_factory=_empty)  # [num_rows]; -1: no drafts; empty: no row has drafts
    grammar_rows: Int32Array = field(default_factory=_empty)  # ascending; rows that draw under a mask
    # before its rows, the step forgets the embeddings of images that it does not need any more, and computes some of others
    encoder_evictions: tuple[bytes, ...] = ()  # the digests of these images
    encoder_inputs: tuple[EncoderInput, ...] = ()
    forced_tokens: TokenDelta | None = None  # the worker writes them into its batch before it computes the rows

    @property
    def num_tokens(self) -> int:
        return int(self.num_scheduled_tokens.sum())

    def describe(self) -> str:
        """Returns the plan as text, one line per row, for an error dump."""
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

    Row `rows[i]` of the plan has `num_masks[i]` consecutive masks: one for each of its drafts, and one for the token after
    them. Bit t % 32 of word t // 32 is set if token t may be drawn. A rank that does not draw gets empty `masks`. It still gets
    the message, because all ranks of a stage must run the same commands in the same order.
    """

    rows: Int32Array  # [n], the plan's `grammar_rows`; empty if the step is void: its draws are not used
    num_masks: Int32Array  # [n]
    masks: npt.NDArray[np.int32]  # [sum of num_masks, ceil(vocab_size / 32)], or [0, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRunnerOutput:
    """One rank's answer to one step. It is sent when the rank's device has ended the step. On a rank that does not draw, all
    arrays are empty.

    `sampled_token_ids` are the tokens of the sampling rows (those with `samples`), in row order. The j-th sampling row has
    `num_sampled_tokens[j]` tokens, the first at `sampled_positions[j]` of its request. If `num_sampled_tokens` and
    `sampled_positions` are empty, no row has drafts. Then each sampling row has one token, directly after the last token that
    the row computes. `logprobs` are those of the tokens `sampled_token_ids[logprobs_rows]`. `draft_token_ids[j]` are drafts
    that the next step may compute after the last token of the j-th sampling row. Unused entries are -1.

    `compute_seconds` is the time of the step's forward and sample; 0 if it was not measured. Waits for other ranks' data and
    for masks are not included, except that on a GPU the time includes a wait for late masks. `shares_cores`: whether
    the rank's compute threads had to wait for their cores in the last steps (worker/core_sharing.py). `refused_images`: the
    digests of images that the vision tower cannot compute, with the reasons.
    """

    step_id: int
    sampled_token_ids: Int32Array = field(default_factory=_empty)
    num_sampled_tokens: Int32Array = field(default_factory=_empty)  # [num_sampling_rows] or empty
    sampled_positions: Int32Array = field(default_factory=_empty)  # [num_sampling_rows] or empty
    logprobs: LogprobsColumns | None = None
    logprobs_rows: Int32Array = field(default_factory=_empty)
    parts: tuple[tuple[int, PartResult], ...] = ()  # with the rows of the plan that they belong to
    draft_token_ids: Int32Array = field(default_factory=_empty)  # [num_sampling_rows, num_speculative_tokens] or empty
    compute_seconds: float = 0.0
    shares_cores: bool = False
    refused_images: tuple[tuple[bytes, str], ...] = ()
