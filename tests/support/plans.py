"""`step_plan` and `new_request`: the place in the tests that knows all fields of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from inflight.interface.request import Int32Array, ResolvedSampling
from inflight.interface.step import NewRequestData, SchedulerOutput
from inflight.sampling_params import SamplingParams

SAMPLING = ResolvedSampling(params=SamplingParams(), seed=0, max_tokens=4)
Ints = Sequence[int] | Int32Array


def ints(*values: int) -> Int32Array:
    return np.array(values, dtype=np.int32)


def new_request(slot: int, tokens: Ints, *blocks: Ints, **fields: Any) -> NewRequestData:
    """`blocks`: of each KV group. `fields`: those that differ from a prompt named after its slot."""
    given = {"request_id": f"r{slot}", "num_prompt_tokens": len(tokens), "sampling": SAMPLING, **fields}
    block_ids = tuple(np.asarray(each, dtype=np.int32) for each in blocks)
    return NewRequestData(slot=slot, token_ids=np.asarray(tokens, dtype=np.int32), block_ids=block_ids, **given)


def step_plan(slots: Ints, computed: Ints, scheduled: Ints, samples: Sequence[bool], **fields: Any) -> SchedulerOutput:
    """A row for each slot. `fields`: those of `SchedulerOutput` that are not those of step 0, which nothing is new in."""
    given = {
        "step_id": 0,
        "request_ids": tuple(f"r{slot}" for slot in slots),
        "new_requests": (),
        "block_table_deltas": (),
        **fields,
    }
    return SchedulerOutput(
        slots=np.asarray(slots, dtype=np.int32),
        num_computed_tokens=np.asarray(computed, dtype=np.int32),
        num_scheduled_tokens=np.asarray(scheduled, dtype=np.int32),
        samples=np.array(samples, dtype=np.bool_),
        **given,
    )
