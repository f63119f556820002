"""From the rows that `schedule` chose to the `SchedulerOutput` that travels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from inflight.interface.step import BlockTableDelta, NewRequestData, SchedulerOutput
from inflight.scheduler.request import Request


class PlannedRow(NamedTuple):
    """`num_tokens` of `request` are to be computed; its block tables grew by `num_new_blocks` entries at their ends."""

    request: Request
    num_tokens: int
    num_new_blocks: int
    is_new: bool  # new in its slot: travels in full


def make_plan(step_id: int, rows: Sequence[PlannedRow], num_groups: int) -> SchedulerOutput:
    requests = [row.request for row in rows]
    computed = np.array([request.num_computed_tokens for request in requests], dtype=np.int32)
    scheduled = np.array([row.num_tokens for row in rows], dtype=np.int32)
    planned = np.array([request.num_planned_tokens for request in requests], dtype=np.int32)
    return SchedulerOutput(
        step_id=step_id,
        new_requests=tuple(_full(row.request) for row in rows if row.is_new),
        request_ids=tuple([request.request_id for request in requests]),
        slots=np.array([request.slot for request in requests], dtype=np.int32),
        num_computed_tokens=computed,
        num_scheduled_tokens=scheduled,
        samples=computed + scheduled == planned,
        block_table_deltas=_deltas([row for row in rows if row.num_new_blocks and not row.is_new], num_groups),
    )


def _full(request: Request) -> NewRequestData:
    return NewRequestData(
        request_id=request.request_id,
        slot=request.slot,
        token_ids=request.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        block_ids=tuple(np.array(table, dtype=np.int32) for table in request.blocks.tables),
        sampling=request.sampling,
        num_prompt_logprobs_done=request.num_prompt_logprobs_done,
    )


def _deltas(rows: Sequence[PlannedRow], num_groups: int) -> tuple[BlockTableDelta, ...]:
    slots: list[int] = []
    columns: list[int] = []
    block_ids: list[list[int]] = [[] for _ in range(num_groups)]
    for request, _, count, _ in rows:
        length = len(request.blocks.tables[0])
        slots.extend([request.slot] * count)
        columns.extend(range(length - count, length))
        for ids, table in zip(block_ids, request.blocks.tables, strict=True):
            ids.extend(table[length - count :])
    slot_array, column_array = np.array(slots, dtype=np.int32), np.array(columns, dtype=np.int32)
    return tuple(
        BlockTableDelta(slots=slot_array, columns=column_array, block_ids=np.array(ids, dtype=np.int32))
        for ids in block_ids
    )
