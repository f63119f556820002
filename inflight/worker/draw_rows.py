"""Rows of draws: a sampling row has one behind its last token, and one behind each of its drafts' predecessors."""

from __future__ import annotations

import numpy as np

from inflight.interface.request import Int32Array
from inflight.interface.step import GrammarOutput, SchedulerOutput
from inflight.sample.metadata import GrammarMasks


def grammar_masks(plan: SchedulerOutput, output: GrammarOutput, draw_start_loc: Int32Array) -> GrammarMasks:
    """The masks, by draw. `draw_start_loc` [num_sampling_rows + 1]: the draws of the j-th sampling row are
    `[draw_start_loc[j], draw_start_loc[j + 1])`."""
    assert plan.samples[output.rows].all(), "masks for rows that do not sample"
    sampling_rows = np.cumsum(plan.samples)[output.rows] - 1
    starts, counts = draw_start_loc[sampling_rows], np.diff(draw_start_loc)[sampling_rows]
    assert np.array_equal(counts, output.num_masks), (
        f"step {plan.step_id}: rows {output.rows.tolist()} have {output.num_masks.tolist()} masks for {counts.tolist()} draws"
    )
    within = np.arange(len(output.masks)) - np.repeat(np.cumsum(counts) - counts, counts)
    return GrammarMasks(rows=np.repeat(starts, counts) + within, masks=output.masks)
