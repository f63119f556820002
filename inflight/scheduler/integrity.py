"""`check_requests`: asserts that the states of requests and the scheduler's queues agree. For tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from inflight.scheduler.grammars import RequestGrammars
from inflight.scheduler.prompt_sharing import PromptSharing
from inflight.scheduler.request import NO_SLOT, Request, RequestStatus
from inflight.scheduler.request_queue import RequestQueue


def check_requests(
    live: list[Request],
    running: Sequence[Request],
    waiting: RequestQueue,
    in_flight: Iterable[Sequence[Request]],
    free_slots: Sequence[int],
    grammars: RequestGrammars,
    sharing: PromptSharing,
) -> None:
    """
    Args:
        live: all requests that have not ended.
        running: in queue order.
        in_flight: the requests of each step in flight.
    """
    is_running = [request for request in live if request.status is RequestStatus.RUNNING]
    assert sorted(waiting.key(request) for request in is_running) == [waiting.key(request) for request in running]
    assert len(live) == len(running) + len(waiting)
    slots = sorted([*free_slots, *(request.slot for request in running)])
    assert slots == list(range(len(slots)))
    rows = Counter(request.order for requests in in_flight for request in requests)
    for request in live:
        assert request.num_tokens <= request.num_planned_tokens <= request.max_num_tokens
        assert 0 <= request.num_computed_tokens < request.num_planned_tokens
        assert request.num_in_flight == rows[request.order]
        assert request.num_in_flight or request.num_planned_tokens == request.num_tokens
        assert (request.slot == NO_SLOT) == (request.status is not RequestStatus.RUNNING)
        is_held, is_compiling = waiting.is_held(request), grammars.is_compiling(request)
        assert is_held or not is_compiling
        assert is_compiling or not is_held or sharing.leader_to_wait_for(request) is not None
    grammars.check_integrity(live)
