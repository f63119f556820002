"""`EngineViews`: lets several parts of a front end watch one engine. While nobody watches, the engine makes no views."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from inflight.interface.codec import Message
from inflight.interface.engine_view import EndRequests, EngineView, Watch

Take = Callable[[EngineView], None]


class EngineViews:
    """Used on the event loop.

    Args:
        send: sends a message to the engine.
    """

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._takers: list[Take] = []

    @contextmanager
    def watched(self, take: Take) -> Iterator[None]:
        """Call `take` with each view of the engine while the `with` block runs."""
        self._takers.append(take)
        self._send(Watch(is_wanted=True))  # also to an engine that is watched: if it sleeps, it sends a view
        try:
            yield
        finally:
            self._takers.remove(take)
            if not self._takers:
                self._send(Watch(is_wanted=False))

    def take(self, view: EngineView) -> None:
        for take in list(self._takers):
            take(view)

    def renew(self) -> None:
        """A new process of the engine has come: it does not know yet that it is watched."""
        if self._takers:
            self._send(Watch(is_wanted=True))

    def end_requests(self, *request_ids: str) -> None:
        self._send(EndRequests(request_ids=request_ids))
