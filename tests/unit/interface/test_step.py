"""The text of a plan in an error dump."""

from __future__ import annotations

import numpy as np
import pytest

from inflight.interface.request import Int32Array, ResolvedSampling
from inflight.interface.step import NewRequestData, SchedulerOutput
from inflight.sampling_params import SamplingParams


def ints(*values: int) -> Int32Array:
    return np.array(values, dtype=np.int32)


@pytest.mark.parametrize("has_drafts", [False, True])
def test_a_plan_as_text(has_drafts: bool) -> None:
    new = NewRequestData(
        request_id="b",
        slot=7,
        token_ids=ints(1, 2, 3),
        num_prompt_tokens=3,
        block_ids=(ints(1),),
        sampling=ResolvedSampling(params=SamplingParams(), seed=1, max_tokens=4),
    )
    plan = SchedulerOutput(
        step_id=5,
        new_requests=(new,),
        request_ids=("a", "b", "c"),
        slots=ints(2, 7, 3),
        num_computed_tokens=ints(10, 0, 4),
        num_scheduled_tokens=ints(1, 3, 5),
        samples=np.array([True, False, True]),
        block_table_deltas=(),
        max_draft_tokens=ints(-1, -1, 4) if has_drafts else ints(),
        grammar_rows=ints(0, 2),
    )
    assert plan.describe().splitlines() == [
        "step 5: 3 requests, 9 tokens",
        "  a: slot 2, tokens [10, 11), samples, under a grammar",
        "  b: slot 7, tokens [0, 3), new in its slot",
        "  c: slot 3, tokens [4, 9), samples, under a grammar" + ", at most 4 of them drafts" * has_drafts,
    ]
