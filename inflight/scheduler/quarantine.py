"""`Quarantine`: requests that were in flight during several faults in a row. Each runs alone, until it is known which request
is the cause.

A request may make each of its steps fail, or end the process that computes it, for example because it hits a defect of a
kernel. Other requests must not suffer from this. So a request is put in quarantine when it was in flight during MAX_FAULTS
faults, without progress between them. While the quarantine has requests, only the oldest of them runs. When it makes progress,
it leaves the quarantine. If there is a fault while it runs alone, it is the cause.

Progress is MIN_PROGRESS_TOKENS tokens since the last fault. After a fault the prompt and all tokens are computed as a prompt,
and this draws the first token. Only the second token shows that a decode works, too.

The faults are failed steps, lost ranks, and losses of the engine core's process. The front end counts the latter
(`EngineCoreRequest.num_losses`). While a request runs alone, the owner of the process knows its id. If the process is lost, the
next process ends this request (`StartEngine.guilty`). Compiling a grammar may end the process, too. So while the quarantine
has requests, the grammars of new ones are deferred: only the grammar of the request that may run is compiled.
"""

from collections.abc import Collection, Sequence

from inflight.interface.request import MAX_FAULTS, MIN_PROGRESS_TOKENS
from inflight.scheduler.request import Request


class Quarantine:
    """
    Args:
        in_flight: the scheduler's steps in flight, each with its plan and requests. The scheduler changes it.

    Attributes:
        alone: the only request that may run now; None if all may run.
        deferred: the requests whose grammars are not compiled yet.
    """

    def __init__(self, in_flight: Collection[tuple[object, Sequence[Request]]] = ()) -> None:
        self.alone: Request | None = None
        self._in_flight = in_flight
        self._requests: list[Request] = []
        self.deferred: list[Request] = []

    @property
    def lone(self) -> Request | None:
        """Returns `alone`, the request that may run now, if no step in flight has another request; otherwise None."""
        alone = self.alone
        if all(request is alone for _, requests in self._in_flight for request in requests):
            return alone
        return None

    def add(self, request: Request) -> bool:
        """Add a new request. Returns whether it is in quarantine, because of the engine cores that were lost with it."""
        is_quarantined = request.num_faults >= MAX_FAULTS
        if is_quarantined:
            self._set([*self._requests, request])
        if self._requests and request.has_grammar:
            request.defers_grammar = True
            self.deferred.append(request)
        return is_quarantined

    def take_deferred(self) -> list[Request]:
        """Returns the deferred requests whose grammars may be compiled now."""
        taken = [each for each in self.deferred if self.alone is None or each is self.lone]
        self.deferred = [each for each in self.deferred if each not in taken]
        return taken

    def record_failed_step(self, requests: Sequence[Request]) -> Request | None:
        """A step with these requests has failed. If a request in quarantine was alone in the step, returns it, because it is
        the cause."""
        if len(requests) == 1 and requests[0] is self.alone:
            return requests[0]
        for request in requests:
            request.num_faults += 1
            request.num_tokens_at_fault = request.num_tokens
        self._set([*self._requests, *(each for each in requests if each.num_faults == MAX_FAULTS)])
        return None

    def record_progress(self, request: Request) -> None:
        """The request has got tokens, after it was in flight during a fault."""
        if request.num_tokens - request.num_tokens_at_fault >= MIN_PROGRESS_TOKENS:
            self.clear(request)

    def clear(self, request: Request) -> None:
        """The request has made progress, or has ended."""
        if request.defers_grammar:
            self.deferred = [each for each in self.deferred if each is not request]
        if request.num_faults:
            request.num_faults = 0
            self._set([each for each in self._requests if each is not request])

    def _set(self, requests: list[Request]) -> None:
        self._requests = sorted(requests, key=lambda request: request.order)
        self.alone = self._requests[0] if requests else None
