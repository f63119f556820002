"""`Suspects`: requests that were in flight during several faults in a row. Each runs alone, until it is known which request is
the cause.

A request may make each of its steps fail, or end the process that computes it, for example because it hits a defect of a
kernel. Other requests must not suffer from this. So a request becomes a suspect when it was in flight during MAX_FAULTS faults,
without progress between them. While there are suspects, only the oldest suspect runs. When it makes progress, it is no suspect
any more. If there is a fault while it runs alone, it is the cause.

Progress is MIN_PROGRESS_TOKENS tokens since the last fault. After a fault the prompt and all tokens are computed as a prompt,
and this draws the first token. Only the second token shows that a decode works, too.

The faults are failed steps, lost ranks, and losses of the engine core's process. The front end counts the latter
(`EngineCoreRequest.num_losses`). While a suspect runs alone, the owner of the process knows its id. If the process is lost, the
next process ends this request (`StartEngine.guilty`). Compiling a grammar may end the process, too. So while there are suspects
the grammars of new requests are deferred: only the grammar of the suspect that may run is compiled.
"""

from collections.abc import Collection, Sequence

from inflight.interface.request import MAX_FAULTS, MIN_PROGRESS_TOKENS
from inflight.scheduler.request import Request


class Suspects:
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
        self._suspects: list[Request] = []
        self.deferred: list[Request] = []

    @property
    def lone(self) -> Request | None:
        """Returns `alone`, the suspect that may run now, if no step in flight has another request; otherwise None."""
        alone = self.alone
        return alone if all(request is alone for _, requests in self._in_flight for request in requests) else None

    def add(self, request: Request) -> bool:
        """Note a new request. Returns whether it is a suspect, because of the engine cores that were lost with it."""
        is_suspect = request.num_faults >= MAX_FAULTS
        if is_suspect:
            self._set([*self._suspects, request])
        if self._suspects and request.has_grammar:
            request.defers_grammar = True
            self.deferred.append(request)
        return is_suspect

    def take_deferred(self) -> list[Request]:
        """Returns the deferred requests whose grammars may be compiled now."""
        taken = [each for each in self.deferred if self.alone is None or each is self.lone]
        self.deferred = [each for each in self.deferred if each not in taken]
        return taken

    def note_failed_step(self, requests: Sequence[Request]) -> Request | None:
        """Note that a step with these requests has failed. If a suspect was alone in the step, returns it, because it is the
        cause."""
        if len(requests) == 1 and requests[0] is self.alone:
            return requests[0]
        for request in requests:
            request.num_faults += 1
            request.num_tokens_at_fault = request.num_tokens
        self._set([*self._suspects, *(each for each in requests if each.num_faults == MAX_FAULTS)])
        return None

    def note_progress(self, request: Request) -> None:
        """Note that the request has got tokens, after it was in flight during a fault."""
        if request.num_tokens - request.num_tokens_at_fault >= MIN_PROGRESS_TOKENS:
            self.clear(request)

    def clear(self, request: Request) -> None:
        """Note that the request has made progress, or has ended."""
        if request.defers_grammar:
            self.deferred = [each for each in self.deferred if each is not request]
        if request.num_faults:
            request.num_faults = 0
            self._set([suspect for suspect in self._suspects if suspect is not request])

    def _set(self, suspects: list[Request]) -> None:
        self._suspects = sorted(suspects, key=lambda request: request.order)
        self.alone = self._suspects[0] if suspects else None
