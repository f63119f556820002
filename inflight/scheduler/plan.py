"""`make_plan`: makes the `SchedulerOutput`, which is sent to the workers, from the rows that the scheduler has chosen."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from inflight.interface.step import BlockTableDelta, NewRequestData, SchedulerOutput, TokenDelta
from inflight.scheduler.request import NO_DRAFTS, Request


class PlannedRow(NamedTuple):
    """The step computes `num_tokens` tokens of `request`. At most `num_drafts` of them are drafts (guesses of later tokens).

    In each block table of the request, the last `num_new_blocks` entries are new.
    """

    request: Request
    num_tokens: int
    num_new_blocks: int
    is_new: bool  # the request has just got its slot, so all its data is sent
    num_drafts: int = NO_DRAFTS


def _needs_mask(row: PlannedRow) -> bool:
    """Whether one of the tokens that the row draws may need a mask. The last of them is drawn after all drafts."""
    return row.request.num_planned_tokens + max(row.num_drafts, 0) >= row.request.first_masked


def make_plan(step_id: int, rows: Sequence[PlannedRow], num_groups: int) -> SchedulerOutput:
    requests = [row.request for row in rows]
    computed = np.array([request.num_computed_tokens for request in requests], dtype=np.int32)
    scheduled = np.array([row.num_tokens for row in rows], dtype=np.int32)
    planned = np.array([request.num_planned_tokens for request in requests], dtype=np.int32)
    drafts = np.array([row.num_drafts for row in rows], dtype=np.int32)
    draws = np.array([not request.only_prompt for request in requests], dtype=np.bool_)
    samples = draws & (computed + scheduled == planned + np.maximum(drafts, 0))
    grammar_rows = [
        i for i, request in enumerate(requests) if request.has_grammar and samples[i] and _needs_mask(rows[i])
    ]
    return SchedulerOutput(
        step_id=step_id,
        new_requests=tuple(_full(row.request) for row in rows if row.is_new),
        request_ids=tuple([request.request_id for request in requests]),
        slots=np.array([request.slot for request in requests], dtype=np.int32),
        num_computed_tokens=computed,
        num_scheduled_tokens=scheduled,
        samples=samples,
        block_table_deltas=_deltas([row for row in rows if row.num_new_blocks and not row.is_new], num_groups),
        max_draft_tokens=drafts if (drafts != NO_DRAFTS).any() else drafts[:0],
        grammar_rows=np.array(grammar_rows, dtype=np.int32),
        forced_tokens=_forced(rows),
    )


def _full(request: Request) -> NewRequestData:
    return NewRequestData(
        request_id=request.request_id,
        slot=request.slot,
        token_ids=request.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        block_ids=tuple(np.array(table, dtype=np.int32) for table in request.blocks.tables),
        sampling=request.sampling,
        cache_salt=request.core.cache_salt,
        parts=tuple([part.for_ranks() for part in request.parts]),
    )


def _forced(rows: Sequence[PlannedRow]) -> TokenDelta | None:
    """Returns the tokens that grammars have forced and that the workers need, starting at the first position of each row.

    A row that starts after the request's last known token needs none, because a step in flight draws the forced tokens, too.
    """
    forced = [
        (request, range(request.num_computed_tokens, request.num_tokens))
        for request, _, _, is_new, _ in rows
        if request.has_unsent_tokens and not is_new and request.num_computed_tokens < request.num_tokens
    ]
    if not forced:
        return None
    return TokenDelta(
        slots=np.repeat([request.slot for request, _ in forced], [len(span) for _, span in forced]).astype(np.int32),
        positions=np.concatenate([np.arange(span.start, span.stop, dtype=np.int32) for _, span in forced]),
        token_ids=np.concatenate([request.token_ids_from(span.start) for request, span in forced]),
    )


def _deltas(rows: Sequence[PlannedRow], num_groups: int) -> tuple[BlockTableDelta, ...]:
    slots: list[int] = []
    columns: list[int] = []
    block_ids: list[list[int]] = [[] for _ in range(num_groups)]
    for request, _, count, _, _ in rows:
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


def record_planned(rows: Sequence[PlannedRow], step_id: int, end_time: float, stagger: int) -> None:
    """Change the requests of a step that was planned. `end_time`: when it will end, on the clock of planned steps."""
    for request, num_tokens, _, _, num_drafts in rows:
        request.num_in_flight += 1
        if request.has_unsent_tokens:
            request.has_unsent_tokens = False
            request.draft_token_ids = []  # these drafts were proposed before the grammar forced tokens
        request.num_computed_tokens += num_tokens
        request.num_planned_tokens += max(num_drafts, 0)
        if request.num_computed_tokens == request.num_planned_tokens and not request.only_prompt:  # a token is drawn
            request.num_planned_tokens += 1
            request.staggered_until = step_id + stagger
            request.last_token_time = end_time
