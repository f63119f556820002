"""`Gates`: which waiting request may be admitted next, and which ones are held until an event."""

from collections.abc import Collection

from inflight.errors import EngineError
from inflight.scheduler.no_transfers import NoTransfers
from inflight.scheduler.prompt_sharing import PromptSharing
from inflight.scheduler.request import Request, RequestStatus
from inflight.scheduler.request_queue import RequestQueue
from inflight.scheduler.step_time.limits import StepLimits
from inflight.scheduler.suspects import Suspects


class Gates:
    """All reasons for a request to wait, but one: while its grammar is being compiled, `Scheduler.add_request` holds it.

    Attributes:
        transfers: brings blocks that waiting requests need into the arena.
    """

    def __init__(self, waiting: RequestQueue, sharing: PromptSharing, suspects: Suspects, limits: StepLimits) -> None:
        self._waiting, self._sharing, self._suspects, self._limits = waiting, sharing, suspects, limits
        self.transfers = NoTransfers()

    def next_request(self, *, may_start_long: bool) -> Request | None:
        """Returns the first request in queue order that may be admitted now; None if there is none. Holds requests that must
        wait until their leader's prompt is planned, or until their blocks are in the arena. While there are suspects, only
        the oldest of them may be admitted."""
        if self._suspects.alone is not None:
            request = self._suspects.lone
            if request is None or request.status is RequestStatus.RUNNING or request.num_in_flight:
                return None
            return None if self._waiting.is_held(request) else request
        while (request := self._waiting.peek(may_start_long=may_start_long)) is not None:
            if request.num_in_flight:
                return None  # it was preempted, and is soon admitted again; later requests would take its blocks
            if (leader := self._sharing.leader_to_wait_for(request)) is not None:
                self._waiting.hold(request, leader.request_id)
            elif not request.blocks.were_sought and self._must_wait_for_blocks(request):
                self._waiting.hold(request, request.request_id)
            elif not request.is_long and self._sharing.is_long(request, self._limits):
                # since it was queued, its leader has ended, or cached blocks were evicted
                self._waiting.mark_long(request)
            else:
                return request
        return None

    def _must_wait_for_blocks(self, request: Request) -> bool:
        """Returns whether the request must wait for its blocks. If it has a leader, it shares the blocks of the leader."""
        has_leader = self._sharing.leader(request) is not None
        return not has_leader and self.transfers.begin(request, self._sharing.last_reusable(request))

    def check_progress(
        self, requests: Collection[object], in_flight: Collection[object], *, is_compiling: bool
    ) -> None:
        """Called if nothing can be scheduled. Raises `EngineError`, unless a step is in flight, a transfer runs, or a
        grammar is being compiled while all requests are held, or while a suspect must run first."""
        num_free = 0 if self._suspects.alone is not None else len(requests) - self._waiting.num_held
        awaits_news = in_flight or self.transfers.is_running or (is_compiling and not num_free)
        if requests and not awaits_news:
            raise EngineError(f"none of {len(requests)} requests can be scheduled: a defect of Inflight")

    def note_brought(self, request: Request) -> None:
        """The request need not wait for blocks any more."""
        request.is_long = self._sharing.is_long(request, self._limits)
        self._waiting.release(request.request_id)
