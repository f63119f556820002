"""One step: the plan that goes to every rank, and what every rank answers.

The plan is a delta against the worker's `InputBatch`: requests new to a slot in full, the rest as columns. Rows are
the requests that take part in the step, in the plan's order; answers are aligned with the plan's rows, never by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """The plan of one step.

    Row i computes tokens `[num_computed_tokens[i], num_computed_tokens[i] + num_scheduled_tokens[i])` of the request in
    `slots[i]`. `samples[i]` says that the row reaches the last token, so that one more is drawn from its last logits. That
    last token may have been drawn by a step that was in flight when this one was planned: then only the workers have it.
    """

    step_id: int
    new_requests: tuple[NewRequestData, ...]
    request_ids: tuple[str, ...]  # [num_rows], for error messages
    slots: Int32Array  # [num_rows]
    num_computed_tokens: Int32Array  # [num_rows]
    num_scheduled_tokens: Int32Array  # [num_rows]
    samples: np.ndarray[tuple[int], np.dtype[np.bool_]]  # [num_rows]
    block_table_deltas: tuple[BlockTableDelta, ...]  # one per KV group

    @property
    def num_tokens(self) -> int:
        return int(self.num_scheduled_tokens.sum())

    def describe(self) -> str:
        """The plan as text, for an error dump: a line per row."""
        lines = [f"step {self.step_id}: {len(self.request_ids)} requests, {self.num_tokens} tokens"]
        new = {data.slot for data in self.new_requests}
        for i, request_id in enumerate(self.request_ids):
            computed, scheduled = int(self.num_computed_tokens[i]), int(self.num_scheduled_tokens[i])
            lines.append(
                f"  {request_id}: slot {int(self.slots[i])}, tokens [{computed}, {computed + scheduled})"
                f"{', samples' if self.samples[i] else ''}{', new in its slot' if int(self.slots[i]) in new else ''}"
            )
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVConnectorOutput:
    """What a rank's KV connector finished: request ids whose save or load ended, and blocks that failed to load."""

    finished_sending: frozenset[str] = frozenset()
    finished_receiving: frozenset[str] = frozenset()
    failed_block_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Log-probabilities of the prompt tokens `[start, start + n)` of the request in the plan's row `row`."""

    row: int
    start: int
    columns: LogprobsColumns


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRunnerOutput:
    """One rank's answer to one step; it also says "my device work for this step has ended".

    `sampled_token_ids` are aligned with the plan's sampling rows, in row order; empty on a rank that does not sample.
    `logprobs` covers the sampling rows listed in `logprobs_rows` (indices among the sampling rows).
    """

    step_id: int
    kv_connector_output: KVConnectorOutput  # no default: forgetting it is a TypeError, not a silent loss
    sampled_token_ids: Int32Array = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    logprobs: LogprobsColumns | None = None
    logprobs_rows: Int32Array = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
