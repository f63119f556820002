"""`Gates`: which waiting request may be admitted next, and which ones are held until an event."""

from collections.abc import Callable, Collection

from inflight.errors import EngineError
from inflight.scheduler.prompt_sharing import PromptSharing
from inflight.scheduler.quarantine import Quarantine
from inflight.scheduler.request import Request, RequestStatus
from inflight.scheduler.request_queue import RequestQueue
from inflight.scheduler.step_time.limits import StepLimits
from inflight.scheduler.transfers import Transfers

# One reason for a request to wait. It returns None if the request may start, otherwise the event until which the request is
# deferred (`RequestQueue.defer`). It is asked again at each try to admit the request, so it must be fast.
Gate = Callable[[Request], str | None]


class Gates:
    """All reasons for a request to wait, but one: while its grammar is being compiled, `Scheduler.add_request` holds it.

    Attributes:
        gates: are asked in this order. Who adds one calls `release`, in the scheduler's thread, when an event comes.
    """

    def __init__(
        self,
        waiting: RequestQueue,
        sharing: PromptSharing,
        quarantine: Quarantine,
        limits: StepLimits,
        transfers: Transfers,
    ) -> None:
        self._waiting, self._sharing, self._quarantine, self._limits = waiting, sharing, quarantine, limits
        self._transfers = transfers
        self.gates: list[Gate] = [self._leader_awaited, self._blocks_awaited]
        self.release = waiting.release

    def next_request(self, *, may_start_long: bool) -> Request | None:
        """Returns the first request in queue order that may be admitted now; None if there is none. Holds requests that a gate
        lets not start. While requests are in quarantine, only the oldest of them may be admitted."""
        if self._quarantine.alone is not None:
            request = self._quarantine.lone
            if request is None or request.status is RequestStatus.RUNNING or request.num_in_flight:
                return None
            return None if self._waiting.is_deferred(request) else request
        while (request := self._waiting.peek(may_start_long=may_start_long)) is not None:
            if request.num_in_flight:
                return None  # it was preempted, and is soon admitted again; later requests would take its blocks
            event = next((event for gate in self.gates if (event := gate(request)) is not None), None)
            if event is not None:
                self._waiting.defer(request, event)
            elif not request.is_long and self._sharing.is_long(request, self._limits):
                # since it was queued, its leader has ended, or cached blocks were evicted
                self._waiting.mark_long(request)
            else:
                return request
        return None

    def _leader_awaited(self, request: Request) -> str | None:
        """A follower waits until its leader's prompt is planned."""
        leader = self._sharing.leader_to_wait_for(request)
        return None if leader is None else leader.request_id

    def _blocks_awaited(self, request: Request) -> str | None:
        """A request waits until its blocks are in the arena. If it has a leader, it shares the blocks of the leader."""
        if request.blocks.were_sought or self._sharing.leader(request) is not None:
            return None
        return request.request_id if self._transfers.begin(request, self._sharing.last_reusable(request)) else None

    def check_progress(
        self, requests: Collection[object], in_flight: Collection[object], *, is_compiling: bool
    ) -> None:
        """Called if nothing can be scheduled. Raises `EngineError`, unless a step is in flight, a transfer runs, or all
        requests are held, or one in quarantine must run first, while a grammar is being compiled or a gate was added."""
        num_free = 0 if self._quarantine.alone is not None else len(requests) - self._waiting.num_deferred
        awaits_news = (
            in_flight or self._transfers.is_running or ((is_compiling or len(self.gates) > 2) and not num_free)
        )
        if requests and not awaits_news:
            raise EngineError(f"none of {len(requests)} requests can be scheduled: a defect of Inflight")

    def record_brought(self, request: Request) -> None:
        """The request need not wait for blocks any more."""
        request.is_long = self._sharing.is_long(request, self._limits)
        self.release(request.request_id)
