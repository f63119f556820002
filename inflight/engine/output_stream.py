"""`OutputStream`: one request's outputs, as an asynchronous iterator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from inflight.engine.input_processor import ProcessedRequest
from inflight.engine.request_state import RequestState
from inflight.outputs import RequestOutput


class OutputStream:
    """Yields `RequestOutput`s as the request's kind says; the last has finished=True. For one reader, on the event loop.

    An output is made when it is read, of all that has come by then: a slow reader gets fewer and longer ones, no token is
    lost, and what waits for him costs no more than the tokens.

    Attributes:
        request: what was submitted.
    """

    def __init__(self, state: RequestState, abort: Callable[[], None]) -> None:
        self.request: ProcessedRequest = state.request
        self._state = state
        self._abort = abort
        self._has_news = False
        self._is_over = False  # the last output was read
        self._unread: RequestOutput | None = None  # outputs that came before `_error`
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> RequestOutput:
        """
        Raises:
            RequestTimeoutError: the request's time is over; it has been aborted.
            EngineDeadError: the engine is gone.
            EngineClosedError: the engine was closed.
            Outputs that came before an error are returned first.
        """
        assert self._waiter is None, "one reader at a time"
        while True:
            if self._unread is not None and not self._is_over:
                output, self._unread = self._unread, None
                return output
            if self._error is not None:
                self._is_over, error = True, self._error
                raise error
            if self._is_over:
                raise StopAsyncIteration
            if self._has_news:
                self._has_news = False
                if (news := self._state.take_output()) is not None:
                    self._is_over = news.finished
                    return news
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def abort(self) -> None:
        """End the request, if it runs: the engine forgets it at once, and the iterator ends with one last output."""
        if not self._state.finished:
            self._abort()

    async def aclose(self) -> None:
        """`abort`, and yield nothing more. A reader that waits sees the end."""
        self._is_over = True
        self.abort()
        self._wake()

    # -- called by the engine ----------------------------------------------------------------------------------------

    def notify(self) -> None:
        """The request has changed."""
        self._has_news = True
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the stream with this error, behind the outputs that are not read yet. To be called while the request runs."""
        if not self._is_over:
            self._unread = self._state.take_output() if self._has_news else None
            self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
