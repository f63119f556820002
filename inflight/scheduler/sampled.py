"""What a step drew, by row of its plan: `ModelRunnerOutput` taken apart."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from inflight.interface.request import LogprobsColumns
from inflight.interface.step import ModelRunnerOutput, SchedulerOutput


class SampledRow(NamedTuple):
    """`token_ids` stand at `position` and behind it; `logprobs` are of all of them. `drafts` are proposed behind the last."""

    position: int
    token_ids: list[int]
    logprobs: LogprobsColumns | None
    drafts: list[int]


def sampled_rows(plan: SchedulerOutput, output: ModelRunnerOutput) -> dict[int, SampledRow]:
    """Plan row -> what was drawn there, for the rows that sample."""
    rows = plan.samples.nonzero()[0]
    if output.num_sampled_tokens.size:
        counts = output.num_sampled_tokens
        positions = output.sampled_positions
    else:
        counts = np.ones(len(rows), dtype=np.int32)
        positions = (plan.num_computed_tokens + plan.num_scheduled_tokens)[rows]
    ends = np.cumsum(counts).tolist()
    assert len(counts) == len(rows) and (ends[-1] if ends else 0) == len(output.sampled_token_ids), plan.step_id
    token_ids = output.sampled_token_ids.tolist()
    drafts = output.draft_token_ids.tolist() if output.draft_token_ids.size else None
    columns = output.logprobs
    if drafts is None and columns is None and not output.num_sampled_tokens.size:  # most steps
        drawn = zip(rows.tolist(), positions.tolist(), token_ids, strict=True)
        return {row: SampledRow(position, [token_id], None, []) for row, position, token_id in drawn}
    # `logprobs_rows` rise, so those of one row are next to each other
    asked = np.searchsorted(output.logprobs_rows, ends).tolist() if columns is not None else None
    found: dict[int, SampledRow] = {}
    start = first_asked = 0
    for j, (row, position, end) in enumerate(zip(rows.tolist(), positions.tolist(), ends, strict=True)):
        logprobs = None
        if asked is not None and columns is not None:
            if asked[j] > first_asked:
                logprobs = columns.rows(first_asked, asked[j])
            first_asked = asked[j]
        proposed = [] if drafts is None else [token for token in drafts[j] if token >= 0]
        found[row] = SampledRow(position, token_ids[start:end], logprobs, proposed)
        start = end
    return found
