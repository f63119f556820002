"""`OutputStream`: the outputs of one request, as an asynchronous iterator. `OutputQueue` is the engine's end of it.

Who has the stream keeps the engine. Who has the queue does not: so the engine's event loop may have it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from inflight.engine.request.processed import ProcessedRequest
from inflight.engine.request.request_state import RequestState
from inflight.outputs import RequestOutput


class OutputQueue:
    """Attributes: `state`: the request. `timer`: ends the request at its timeout."""

    def __init__(self, state: RequestState) -> None:
        self.state = state
        self.timer: asyncio.TimerHandle | None = None
        self._has_news = False
        self._is_over = False  # whether the last output was read
        self._unread: RequestOutput | None = None  # an output that arrived before `_error` and was not read yet
        self._error: Exception | None = None
        self._wakes = asyncio.Event()

    def notify(self) -> None:
        """The request has an output."""
        self._has_news = True
        self._wakes.set()

    def fail(self, error: Exception) -> None:
        """End the stream. The reader gets the unread outputs, then this error. Call it only while the request runs."""
        if not self._is_over:
            self._unread = self.state.take_output() if self._has_news else None
            self._error = error
        self._wakes.set()

    def close(self) -> None:
        """Yield nothing more. If a reader waits for an output, its iteration ends."""
        self._is_over = True
        self._wakes.set()

    async def get(self) -> RequestOutput:
        """See `OutputStream.__anext__`."""
        while True:
            if self._unread is not None and not self._is_over:
                output, self._unread = self._unread, None
                return output
            if self._error is not None:
                self._is_over = True
                error = self._error
                raise error
            if self._is_over:
                raise StopAsyncIteration
            if self._has_news:
                self._has_news = False
                if (news := self.state.take_output()) is not None:
                    self._is_over = news.finished
                    return news
            self._wakes.clear()
            await self._wakes.wait()


class OutputStream:
    """Yields `RequestOutput`s, in the form that the request's `RequestOutputKind` asks for. The last output is `finished`. Only
    one reader may use the stream, on the engine's event loop.

    An output is made when it is read, and contains all tokens that have arrived by then. So a slow reader gets fewer outputs
    with more tokens in each, but no token is lost.
    """

    def __init__(self, queue: OutputQueue, abort: Callable[[], None]) -> None:
        self.request: ProcessedRequest = queue.state.request
        self._queue = queue
        self._abort = abort

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> RequestOutput:
        """
        Raises:
            RequestTimeoutError: the request took too long and was aborted.
            EngineDeadError: the engine has failed.
            EngineClosedError: the engine was closed.

        Outputs that arrived before the error are returned first.
        """
        return await self._queue.get()

    def abort(self) -> None:
        """End the request if it has not ended. The engine forgets it at once, and the iterator yields one last output."""
        if not self._queue.state.finished:
            self._abort()

    async def aclose(self) -> None:
        """Abort the request, and yield nothing more. If a reader waits for an output, its iteration ends."""
        self._queue.close()  # first, so the reader does not get the output of the abort
        self.abort()
