"""`watched_state`: what the scheduler knows of each request and block, for somebody who watches the engine."""

import numpy as np

from inflight.interface.engine_view import COLUMNS, STATES
from inflight.interface.kv_cache import DUMMY_BLOCK
from inflight.interface.request import Int32Array
from inflight.kv_cache.block_states import block_states
from inflight.scheduler.request import Request
from inflight.scheduler.step_scheduler import StepScheduler


def watched_state(scheduler: StepScheduler) -> tuple[tuple[str, ...], Int32Array, bytes]:
    """The ids of all requests, in the order of their arrival, their `COLUMNS`, and the state of each block. The numbers are
    those of the newest commit and plan."""
    requests = sorted(scheduler._requests.values(), key=lambda request: request.order)
    rows = np.array([_row(request) for request in requests], dtype=np.int32)
    ids = tuple(request.request_id for request in requests)
    return ids, rows.reshape(len(requests), len(COLUMNS)), block_states(scheduler._kv_cache.pool)


def _row(request: Request) -> tuple[int, ...]:
    """In the order of `COLUMNS`."""
    tables = request.blocks.tables
    return (
        STATES.index(request.status.name.lower()),
        request.num_prompt_tokens,
        max(request.num_cached_tokens, 0),
        min(request.num_computed_tokens, request.num_tokens),
        request.num_tokens - request.num_prompt_tokens,
        len(request.draft_token_ids),
        sum(len(table) - table.count(DUMMY_BLOCK) for table in tables),
    )
