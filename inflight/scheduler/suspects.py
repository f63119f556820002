"""`Suspects`: requests that were in several failed steps in a row. Each runs alone, until it is known which request is the
cause.

A request may make each of its steps fail, for example because it hits a defect of a kernel. Other requests must not suffer from
this. So a request becomes a suspect when it was in MAX_FAILED_STEPS failed steps, and has got no token since the first of these
steps. While there are suspects, only the oldest suspect runs. When it gets a token, it is no suspect any more. If a step fails
in which it runs alone, it is the cause.
"""

from __future__ import annotations

from collections.abc import Sequence

from inflight.scheduler.request import Request

MAX_FAILED_STEPS = 3


class Suspects:
    def __init__(self) -> None:
        self._suspects: list[Request] = []  # in the order in which they arrived

    @property
    def alone(self) -> Request | None:
        """The only request that may run now; None if all may run."""
        return self._suspects[0] if self._suspects else None

    def note_failed_step(self, requests: Sequence[Request]) -> Request | None:
        """Note that a step with these requests has failed. If a suspect was alone in the step, returns it, because it is the
        cause."""
        if len(requests) == 1 and requests[0] is self.alone:
            return requests[0]
        for request in requests:
            request.num_failed_steps += 1
            if request.num_failed_steps == MAX_FAILED_STEPS:
                self._suspects.append(request)
        self._suspects.sort(key=lambda request: request.order)
        return None

    def clear(self, request: Request) -> None:
        """Note that the request has got a token, or has ended."""
        if request.num_failed_steps:
            request.num_failed_steps = 0
            self._suspects = [suspect for suspect in self._suspects if suspect is not request]
