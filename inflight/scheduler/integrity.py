"""`check_requests` asserts that the states of requests and the scheduler's queues agree. `describe_requests` is for dumps."""

from collections import Counter
from collections.abc import Iterable, Sequence

from inflight.scheduler.encoder_inputs import EncoderInputs
from inflight.scheduler.grammars import RequestGrammars
from inflight.scheduler.prompt_sharing import PromptSharing
from inflight.scheduler.request import NO_SLOT, Request, RequestStatus
from inflight.scheduler.request_queue import RequestQueue
from inflight.scheduler.transfers import Transfers


def describe_requests(live: Iterable[Request]) -> str:
    """Returns one line for each request that has a slot or is in a step in flight."""
    return "\n".join(f"  {each.describe()}" for each in live if each.slot != NO_SLOT or each.num_in_flight)


def check_requests(
    live: list[Request],
    running: Sequence[Request],
    waiting: RequestQueue,
    in_flight: Iterable[Sequence[Request]],
    free_slots: Sequence[int],
    grammars: RequestGrammars,
    sharing: PromptSharing,
    transfers: Transfers,
    encoder: EncoderInputs | None,
) -> None:
    """For tests.

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
        assert 0 <= request.num_computed_tokens < request.num_planned_tokens + request.only_prompt
        assert request.num_in_flight == rows[request.order]
        assert request.num_in_flight or request.num_planned_tokens == request.num_tokens
        assert (request.slot == NO_SLOT) == (request.status is not RequestStatus.RUNNING)
        is_deferred = waiting.is_deferred(request)
        is_compiling = grammars.is_compiling(request)
        assert is_deferred or not is_compiling
        has_event = is_compiling or request.defers_grammar or sharing.leader_to_wait_for(request) is not None
        has_event = has_event or transfers.awaits(request)
        has_event = has_event or (encoder is not None and encoder.is_awaited_by(request.parts))
        assert has_event or not is_deferred
    grammars.check_integrity(live)
